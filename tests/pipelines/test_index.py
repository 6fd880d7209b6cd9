"""An index holds the rows of a prediction, and finds what a comparison with each would find."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_core import files
from bert_core.errors import ConfigError, CorpusError, FormatError, InputError, ResourceError
from bert_core.indexes.record import FORMAT_VERSION, read_record
from bert_core.indexes.table import Index
from bert_core.inference.vector_spaces import VectorSource, VectorSpace
from bert_core.manifest import Manifest, Output, write_manifest
from pipelines import index
from pipelines.index import IndexConfig

pytest.importorskip("lancedb", reason="indexes need the extra `search`")

SIZE, ROWS = 16, 300
SPACE = VectorSpace(
    model="1" * 64, task="feature-extraction", how={"pooling": "mean"}, dimensions=SIZE
)
SOURCE = VectorSource(space=SPACE, prompt="", max_tokens=128, is_normalized=False, precision="fp32")
WORDS = ["ships", "sailing", "harbours", "mountains", "weather", "the", "a café"]


def vectors_of(rows: int) -> np.ndarray:
    rng = np.random.default_rng(rows)
    centres = rng.normal(size=(20, SIZE))
    noise = 0.4 * rng.normal(size=(rows, SIZE))
    return (3 * (centres[rng.integers(0, 20, rows)] + noise)).astype(np.float32)


def table_of(rows: int) -> pa.Table:
    flat = pa.array(vectors_of(rows).ravel())
    return pa.table(
        {
            "name": [f"row {number}" for number in range(rows)],
            "text": [" ".join(WORDS[: 1 + number % len(WORDS)]) for number in range(rows)],
            "kind": [None if number % 7 == 0 else "ab"[number % 2] for number in range(rows)],
            "year": pa.array([1990 + number % 30 for number in range(rows)], pa.int16()),
            "predicted_vector": pa.FixedSizeListArray.from_arrays(flat, SIZE),
        }
    )


def predicted(folder: Path, table: pa.Table, *, lines: bool = False, parts: int = 3) -> str:
    """A prediction of these vectors, as `predict` writes it."""
    (folder / "rows").mkdir(parents=True)
    outputs = ["vectors.json"]
    size = -(-len(table) // parts)
    for number in range(parts):
        part = table.slice(number * size, size)
        outputs.append(f"rows/part-{number:05d}.{'jsonl' if lines else 'parquet'}")
        if lines:
            rows = [
                {name: value for name, value in row.items() if value is not None}
                for row in part.to_pylist()
            ]
            (folder / outputs[-1]).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        else:
            pq.write_table(part, folder / outputs[-1])
    files.write_json(str(folder / "vectors.json"), SOURCE.entries())
    manifest = Manifest(
        stage="predict",
        digest=f"{len(table)}-{lines}",
        config={"prefix": "predicted_", "answer_column": "", "task": None, "options": {}},
        inputs={"model": SPACE.model},
        outputs={name: Output.of(str(folder / name)) for name in outputs},
    )
    write_manifest(str(folder), manifest)
    return str(folder)


@pytest.fixture(scope="module")
def config(tmp_path_factory: Any) -> IndexConfig:
    """A small index that is searched exactly, with words."""
    folder = Path(tmp_path_factory.mktemp("index"))
    config = IndexConfig(
        output=str(folder / "index"),
        vectors=predicted(folder / "vectors", table_of(ROWS)),
        text_column="text",
        num_workers=0,
        tracking_uri=f"sqlite:///{folder}/mlflow.db",
    )
    index.run(config)
    return config


@pytest.fixture(scope="module")
def opened(config: IndexConfig) -> Index:
    return Index(config.output)


def cosines(rows: int, query: np.ndarray) -> np.ndarray:
    vectors = vectors_of(rows)
    scaled = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return scaled @ (query / np.linalg.norm(query))


def test_the_nearest_rows_are_those_of_a_full_comparison(opened: Index) -> None:
    record = opened.record
    assert (record.rows, record.kind, record.recall) == (ROWS, "exact", 1.0)
    assert record.columns == ["name", "text", "kind", "year"]
    assert opened.space == SPACE.digest
    rows = table_of(ROWS).drop_columns("predicted_vector").to_pylist()
    for query in vectors_of(ROWS)[::50] * 1.7 + 0.1:
        scores = cosines(ROWS, query)
        hits = opened.nearest(query, 5)
        assert [hit.number for hit in hits] == np.argsort(-scores)[:5].tolist()
        assert [hit.score for hit in hits] == pytest.approx(np.sort(scores)[::-1][:5], abs=1e-5)
        numbers = [hit.number for hit in hits]
        assert opened.rows(numbers, record.columns) == [rows[number] for number in numbers]


def test_a_filter_lets_the_same_rows_through_as_python(opened: Index) -> None:
    query, rows = vectors_of(ROWS)[0], table_of(ROWS).to_pylist()
    ways: list[tuple[dict[str, Any], Any]] = [
        ({"kind": "a"}, lambda row: row["kind"] == "a"),
        ({"kind": None}, lambda row: row["kind"] is None),
        (
            {"kind": ["a", "b"], "year": {"at_least": 2000, "below": 2010}},
            lambda row: row["kind"] is not None and 2000 <= row["year"] < 2010,
        ),
        ({"name": "row 7' OR 1=1"}, lambda row: False),
        ({"year": {"not": 1990}}, lambda row: row["year"] != 1990),
        ({"year": {"above": -(2**15), "below": 2**15 - 1}}, lambda row: True),
        ({"kind": {"not": "a"}}, lambda row: row["kind"] == "b"),  # a null meets no condition
    ]
    for conditions, is_wanted in ways:
        found = opened.nearest(query, ROWS, opened.filter(conditions))
        wanted = [number for number, row in enumerate(rows) if is_wanted(row)]
        assert sorted(hit.number for hit in found) == wanted
        words = opened.by_words("ships", ROWS, opened.filter(conditions))
        assert sorted(hit.number for hit in words) == wanted, "every row has ships"


def test_words_are_found_by_their_stems_and_both_rankings_are_fused(opened: Index) -> None:
    texts = table_of(ROWS)["text"].to_pylist()
    for asked, word in (("mountain", "mountains"), ("Sail", "sailing"), ("cafe", "café")):
        found = {hit.number for hit in opened.by_words(asked, ROWS)}
        assert found == {number for number, text in enumerate(texts) if word in text}
    assert opened.by_words("the", 5) == [], "a word that nearly every text has"
    query = vectors_of(ROWS)[3]
    dense, words = opened.nearest(query, 50), opened.by_words("a mountain", 50)
    hits = opened.hybrid(query, "a mountain", 10)
    for hit in hits:
        ranks = [
            [each.number for each in ranking].index(hit.number) + 1
            for ranking in (dense, words)
            if hit.number in {each.number for each in ranking}
        ]
        assert hit.score == pytest.approx(sum(1 / (60 + rank) for rank in ranks))
        assert (hit.cosine is None, hit.bm25 is None).count(False) == len(ranks)
    assert [hit.score for hit in hits] == sorted([hit.score for hit in hits], reverse=True)


def test_a_search_that_does_not_fit_is_refused(opened: Index, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="wanted vectors of 16 numbers, got 3"):
        opened.nearest(np.ones(3, np.float32), 1)
    for odd in (np.zeros(SIZE, np.float32), np.full(SIZE, np.nan, np.float32)):
        with pytest.raises(InputError, match="wanted finite numbers that are not all 0"):
            opened.nearest(odd, 1)
    assert opened.rows([1], ["name", "name"]) == [{"name": "row 1"}]
    with pytest.raises(InputError, match=r"columns: wanted some of name, .*, got 'none'"):
        opened.rows([0], ["none"])
    with pytest.raises(FormatError, match=r"wanted the folder of an index, it has no index\.json"):
        read_record(str(tmp_path))


def test_any_workers_make_the_same_index_and_a_killed_one_goes_on(
    config: IndexConfig, opened: Index, monkeypatch: Any
) -> None:
    killed = replace(config, output=f"{config.output}-killed")
    written: list[int] = []

    def killed_after_two(own: IndexConfig, vectors: Any, item: Any) -> int:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(item[0])
        return write_part(own, vectors, item)

    write_part = index.write_part
    with monkeypatch.context() as patched:
        patched.setattr(index, "write_part", killed_after_two)
        with pytest.raises(KeyboardInterrupt):
            index.run(killed)
    with pytest.raises(FormatError, match="wanted the folder of a finished stage"):
        Index(killed.output)
    kept = [path.stat().st_mtime_ns for path in sorted(Path(killed.output, "parts").iterdir())]
    assert len(kept) == 2

    def in_vain(*arguments: Any, **others: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(index, "measured", in_vain)  # the table is written, the record is not
        with pytest.raises(KeyboardInterrupt):
            index.run(killed)
    after = [path.stat().st_mtime_ns for path in sorted(Path(killed.output, "parts").iterdir())]
    assert after[:2] == kept
    index.run(killed)
    assert not Path(killed.output, "parts").exists()
    other = Index(killed.output)
    assert other.record == opened.record
    columns = opened.record.columns
    every = list(range(ROWS))
    assert other.rows(every, columns) == opened.rows(every, columns)
    query = vectors_of(ROWS)[9]
    assert other.hybrid(query, "weather", 20) == opened.hybrid(query, "weather", 20)


def test_rows_of_jsonl_get_columns_that_fit_all_parts(config: IndexConfig, tmp_path: Path) -> None:
    rows = table_of(9).to_pylist()
    for number, row in enumerate(rows):
        row |= {
            "count": number if number < 4 else number / 2,
            "late": True if number == 8 else None,
        }
    folder = predicted(tmp_path / "vectors", pa.Table.from_pylist(rows), lines=True)
    lines = replace(config, output=str(tmp_path / "index"), vectors=folder)
    index.run(lines)
    opened = Index(lines.output)
    assert {*opened.record.columns} == {"name", "text", "kind", "year", "count", "late"}
    found = opened.rows([0, 8], ["count", "late"])
    assert found == [{"count": 0.0, "late": None}, {"count": 4.0, "late": True}]
    late = replace(lines, output=f"{lines.output}-late", columns=("late",), text_column=None)
    index.run(late)
    assert Index(late.output).rows([0, 8], ["late"]) == [{"late": None}, {"late": True}]
    rows[7]["count"] = "seven"
    path = Path(folder, "rows", "part-00002.jsonl")
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows[6:]))
    with pytest.raises(
        CorpusError, match=r"part-00002\.jsonl: wanted one type per column, .* 'count'"
    ):
        index.run(replace(lines, output=f"{lines.output}-2"))
    index.run(replace(lines, output=f"{lines.output}-3", columns=("name", "text")))


def test_values_in_a_dictionary_are_plain_ones_in_an_index(
    config: IndexConfig, tmp_path: Path
) -> None:
    kinds = pa.array(["ab"[number // 3] for number in range(6)]).dictionary_encode()
    table = table_of(6).set_column(2, "kind", kinds)
    plain = replace(
        config, output=str(tmp_path / "index"), vectors=predicted(tmp_path / "vectors", table)
    )
    index.run(plain)
    opened = Index(plain.output)
    hits = opened.nearest(vectors_of(6)[0], 6, opened.filter({"kind": "b"}))
    assert sorted(hit.number for hit in hits) == [3, 4, 5]


def test_compressed_vectors_are_read_as_far_as_the_recall_needs(
    config: IndexConfig, tmp_path: Path
) -> None:
    rows = 2000
    folder = predicted(tmp_path / "vectors", table_of(rows))
    large = replace(
        config, output=str(tmp_path / "index"), vectors=folder, text_column=None,
        columns=("name",), exact_below=500, recall=0.9, recall_queries=50,
    )  # fmt: skip
    counts = index.run(large).counts
    opened = Index(large.output)
    assert (opened.record.kind, opened.record.columns) == ("ivf_pq", ["name"])
    assert counts["recall"] == opened.record.recall >= 0.9
    found = wanted = 0
    for query in vectors_of(rows)[7::40]:
        scores = cosines(rows, query)
        hits = opened.nearest(query, 10)
        assert [hit.score for hit in hits] == pytest.approx(
            [scores[hit.number] for hit in hits], abs=1e-4
        ), "scores are cosines, though rows are found by compressed vectors"
        found += len({hit.number for hit in hits} & set(np.argsort(-scores)[:10].tolist()))
        wanted += 10
        exact = opened.nearest(query, 10, exact=True)
        assert [hit.number for hit in exact] == np.argsort(-scores)[:10].tolist()
    assert found / wanted > 0.85, "what was measured is what other queries find"
    with pytest.raises(InputError, match="wanted an index with words, this one has only vectors"):
        opened.by_words("ships", 1)


def test_an_index_that_was_damaged_is_refused(config: IndexConfig, tmp_path: Path) -> None:
    small = replace(config, output=str(tmp_path / "index"), text_column=None)
    index.run(small)
    [data] = Path(small.output, "rows.lance", "data").iterdir()
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(FormatError, match="wanted the file that the index was written with, got o"):
        Index(small.output)
    data.unlink()
    with pytest.raises(FormatError, match=r"wanted the file that .*, got no such file: copy it ag"):
        Index(small.output)
    record = Path(small.output, "index.json")
    entries = json.loads(record.read_bytes()) | {"format_version": FORMAT_VERSION + 1}
    record.write_text(json.dumps(entries))
    with pytest.raises(FormatError, match="wanted format_version 1 or older, got 2"):
        read_record(small.output)


def test_vectors_and_columns_that_do_not_fit_are_told(
    config: IndexConfig, tmp_path: Path, monkeypatch: Any
) -> None:
    other = replace(config, output=str(tmp_path / "index"))
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "lancedb", None)
        with pytest.raises(
            ResourceError, match=r"lancedb: wanted this package, .*got none: run `pip"
        ):
            index.run(other)
    with pytest.raises(ConfigError, match=r"columns: wanted one of name, text, .*, got 'nam'"):
        index.run(replace(other, columns=("nam",)))
    with pytest.raises(ConfigError, match="columns: wanted 'text' among them, the text_column"):
        index.run(replace(other, columns=("name",)))
    with pytest.raises(ConfigError, match="text_column: wanted a column of texts, got 'year' of i"):
        index.run(replace(other, text_column="year"))
    table = table_of(6)
    zeros = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(6 * SIZE, np.float32)), SIZE)
    folder = predicted(tmp_path / "zeros", table.set_column(4, "predicted_vector", zeros))
    with pytest.raises(CorpusError, match="row 1: wanted a vector with a direction, got zeros"):
        index.run(replace(other, vectors=folder))
    folder = predicted(tmp_path / "named", table.rename_columns(["a.b", *table.column_names[1:]]))
    with pytest.raises(CorpusError, match=r"wanted no column 'a\.b', since an index adds _id, _v"):
        index.run(replace(other, vectors=folder))
    for name in ("", "_rowaddr", "_rowoffset", "_row_created_at_version"):
        with pytest.raises(CorpusError, match=f"wanted no column '{name}', since an index adds"):
            index._check_columns(replace(other, text_column=None), [name])
    tokens = Path(predicted(tmp_path / "tokens", table))
    space = replace(SPACE, how={"pooling": "per_token"})
    files.write_json(str(tokens / "vectors.json"), replace(SOURCE, space=space).entries())
    with pytest.raises(
        ConfigError, match="vectors: wanted a vector per text, got the vectors of t"
    ):
        index.run(replace(other, vectors=str(tokens)))
    old = Path(predicted(tmp_path / "old", table))
    manifest = Manifest(
        stage="predict", digest="old", inputs={"model": "1"}, outputs={},
        config={"prefix": "predicted_", "answer_column": "", "task": None, "options": {}},
    )  # fmt: skip
    write_manifest(str(old), manifest)
    with pytest.raises(ConfigError, match="vectors: wanted vectors that name what made them, got"):
        index.run(replace(other, vectors=str(old)))
