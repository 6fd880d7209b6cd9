"""Search among vectors: the very rows that a comparison with each finds, whatever the parts."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_core.errors import ConfigError, CorpusError, FormatError
from bert_core.manifest import read_manifest
from pipelines import predict, search
from pipelines.answering import vector_files
from pipelines.predict import PredictConfig
from pipelines.search import SearchConfig, best_of

if TYPE_CHECKING:
    from bert_core.inference.predictor import Predictor


@pytest.fixture(scope="module")
def rows(pretrained: Any) -> list[dict[str, Any]]:
    """Docstrings of the standard library."""
    lines = Path(pretrained.rows.source).read_text().splitlines()
    texts = dict.fromkeys(json.loads(line)["text"] for line in lines)
    return [{"id": n, "text": text, "odd": [n]} for n, text in enumerate(texts)]


@pytest.fixture
def config(pretrained: Any, once: Any, rows: list[dict[str, Any]], tmp_path: Path) -> SearchConfig:
    """Vectors of all rows in Parquet, of every tenth in JSONL."""

    def predict_vectors(source: Path, output: Path) -> None:
        if source.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), source, row_group_size=50)
        else:
            source.write_text("".join(f"{json.dumps(row)}\n" for row in rows[::10]))
        predict.run(
            PredictConfig(
                output=str(output),
                model=str(pretrained.folder / "pretrain" / "bundle"),
                source=str(source),
                task="feature-extraction",
                answer_column="",
                part_bytes=5000,
                num_workers=0,
                tracking_uri=pretrained.tracking_uri,
            )
        )

    corpus, queries = once.folder / "corpus.parquet", once.folder / "queries.jsonl"
    return SearchConfig(
        output=str(tmp_path / "search"),
        corpus=str(once.made("corpus", partial(predict_vectors, corpus))),
        queries=str(once.made("queries", partial(predict_vectors, queries))),
        top_k=3,
        num_workers=0,
        tracking_uri=pretrained.tracking_uri,
    )


def found_in(folder: str) -> list[dict[str, Any]]:
    found = []
    for path in sorted(Path(folder, "rows").iterdir()):
        if path.suffix == ".parquet":
            found += pq.read_table(path).to_pylist()
        else:
            found += [json.loads(line) for line in path.read_text().splitlines()]
    return found


@pytest.mark.usefixtures("forked")
def test_the_nearest_rows_are_found_with_their_columns(
    config: SearchConfig, rows: list[dict[str, Any]], pretrained: Any, monkeypatch: Any
) -> None:
    from bert_core.inference.predictor import Predictor

    monkeypatch.setattr(vector_files, "ROWS_AT_ONCE", 7)
    counts = search.run(config).counts
    assert (counts["queries"], counts["rows"]) == (len(rows[::10]), len(rows))
    model = pretrained.folder / "pretrain" / "bundle"
    predictor = Predictor(model, device="cpu", task="feature-extraction")
    vectors = np.array(predictor.predict([row["text"] for row in rows], _cut(predictor)))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = found_in(config.output)
    assert [{name: row[name] for name in rows[0]} for row in found] == rows[::10]
    for query, row in zip(vectors[::10], found, strict=True):
        cosines = vectors @ query
        assert [set(result) for result in row["results"]] == [{"score", "row"}] * 3
        scores = [result["score"] for result in row["results"]]
        assert scores == pytest.approx(np.sort(cosines)[::-1][:3], abs=1e-5)
        for result in row["results"]:
            assert result["row"] == rows[result["row"]["id"]]
            assert result["score"] == pytest.approx(cosines[result["row"]["id"]], abs=1e-5)
        assert row["results"][0]["score"] == pytest.approx(1.0, abs=1e-5), "it stands there itself"
    spread = replace(
        config, output=f"{config.output}-2", num_workers=2, queries=config.corpus, columns=("id",)
    )
    search.run(spread)
    tables = found_in(spread.output)
    assert [row["id"] for row in tables] == list(range(len(rows)))
    for row, same in zip(tables[::10], found, strict=True):
        assert [each["row"] for each in row["results"]] == [
            {"id": each["row"]["id"]} for each in same["results"]
        ]


def _cut(predictor: "Predictor") -> Any:
    return predictor.task.parameters(truncate=True)  # type: ignore[call-arg]


def test_unsearchable_vectors_are_refused(
    config: SearchConfig, finetuned: Any, once: Any, tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(ConfigError, match=r"columns: wanted some of id, text, odd, got 'name'"):
        search.run(replace(config, columns=("name",)))
    with pytest.raises(ConfigError, match="top_k: wanted at least 1, got 0"):
        replace(config, top_k=0)
    other = PredictConfig(
        output=str(tmp_path / "labels"),
        model=str(finetuned.folder / "finetune" / "bundle"),
        source=str(once.folder / "queries.jsonl"),
        num_workers=0,
        tracking_uri=config.tracking_uri,
    )
    predict.run(other)
    digests = [read_manifest(one).inputs["model"][:12] for one in (config.corpus, other.output)]
    different_models = (
        rf"labels: wanted vectors by the model of .*, {digests[0]}, got those by {digests[1]}: pre"
    )
    with pytest.raises(ConfigError, match=different_models):
        search.run(replace(config, queries=other.output))
    told = capsys.readouterr().out
    assert "labels: it was written before predictions said what made their" in " ".join(
        told.split()
    )
    with pytest.raises(FormatError, match="wanted vectors in a column 'predicted_vector', got no"):
        search.run(replace(config, queries=other.output, corpus=other.output))


def test_vectors_of_another_space_are_refused_and_both_are_named(
    config: SearchConfig, pretrained: Any, once: Any, tmp_path: Path
) -> None:
    spaces = {}
    for name, options, parameters in (
        ("cls", {"pooling": "cls"}, {}),
        ("normalized", {}, {"normalize": True}),
        ("prompted", {"prompts": {"query": "a "}}, {"prompt_name": "query"}),
    ):
        predicted = PredictConfig(
            output=str(tmp_path / name),
            model=str(pretrained.folder / "pretrain" / "bundle"),
            task="feature-extraction",
            options=options,
            parameters=parameters,
            source=str(once.folder / "queries.jsonl"),
            num_workers=0,
            tracking_uri=config.tracking_uri,
        )
        manifest = predict.run(predicted)
        assert "vectors.json" in manifest.outputs
        spaces[name] = json.loads((tmp_path / name / "vectors.json").read_bytes())
    unknown = replace(predicted, output=f"{tmp_path}/new", parameters={"prompt_name": "none"})
    with pytest.raises(
        ConfigError, match=r"parameters.prompt_name: wanted one of the .* \(query\)"
    ):
        predict.run(unknown)
    [part, *_] = sorted(Path(config.corpus, "rows").iterdir())
    metadata = pq.read_schema(part).metadata or {}
    of_corpus = json.loads(metadata[b"raybert.vectors"])
    assert of_corpus == json.loads(Path(config.corpus, "vectors.json").read_bytes())
    digests = f"{of_corpus['digest'][:12]}, as in .*, got those of {spaces['cls']['digest'][:12]}"
    with pytest.raises(ConfigError, match=f"{digests}: the how is .*cls.* instead of .*mean"):
        search.run(replace(config, queries=str(tmp_path / "cls")))
    assert spaces["prompted"]["prompt"] == "a "
    for name in ("normalized", "prompted"):
        assert spaces[name]["digest"] == of_corpus["digest"]
        found = search.run(
            replace(config, output=f"{config.output}-{name}", queries=str(tmp_path / name))
        )
        assert found.counts["rows"] > 0


def test_columns_that_results_cannot_stand_beside_are_refused(
    config: SearchConfig, pretrained: Any, tmp_path: Path
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"text": "a list", "results": 1}\n{"text": "a file", "results": "mine"}\n')
    vectors = vectors_of(source, pretrained)
    with pytest.raises(CorpusError, match="wanted queries without a column 'results', where the n"):
        search.run(replace(config, queries=vectors))


def vectors_of(source: Path, pretrained: Any) -> str:
    """The folder of a prediction of vectors, with many parts."""
    config = PredictConfig(
        output=f"{source}.vectors",
        model=str(pretrained.folder / "pretrain" / "bundle"),
        task="feature-extraction",
        source=str(source),
        answer_column="",
        part_bytes=1,
        num_workers=0,
        tracking_uri=pretrained.tracking_uri,
    )
    predict.run(config)
    return config.output


COLUMNS: dict[str, pa.DataType] = {
    "at": pa.timestamp("ns"),
    "after": pa.duration("ns"),
    "big": pa.uint64(),
    "small": pa.int32(),
    "counts": pa.map_(pa.string(), pa.int32()),
    "note": pa.string(),
}
"""Types that Python's values do not keep."""


def test_rows_of_tables_keep_their_types_in_every_part(
    config: SearchConfig, pretrained: Any, tmp_path: Path
) -> None:
    first = {"at": 1, "after": 1, "big": 2**64 - 1, "small": 1, "counts": {"a": 1}, "note": "one"}
    rows: list[dict[str, Any]] = [first, {**first, "at": 3, "note": None}]
    table = pa.table(
        {
            "text": ["a list of names", "how a file is opened"],
            "view": pa.array(["viewed", None], pa.string_view()),  # as Polars writes text
            **{
                name: pa.array(
                    [list(row[name].items()) if name == "counts" else row[name] for row in rows],
                    kind,
                )
                for name, kind in COLUMNS.items()
            },
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=1)
    vectors = vectors_of(tmp_path / "rows.parquet", pretrained)
    tables = replace(config, queries=vectors, corpus=vectors, top_k=1)
    search.run(tables)
    parts = sorted(Path(tables.output, "rows").iterdir())
    assert len(parts) == 2
    assert len({pq.read_schema(part).remove_metadata() for part in parts}) == 1
    found = pa.concat_tables([pq.read_table(part) for part in parts])
    nearest = found.column("results").combine_chunks().flatten().field("row")
    returned = pa.Table.from_struct_array(nearest)
    wanted = table.set_column(1, "view", pa.array(["viewed", None], pa.string()))
    assert returned.schema.equals(wanted.schema)
    assert returned.equals(wanted), "each row is nearest to itself"

    some = replace(tables, output=f"{config.output}-2", columns=("big", "text"))
    search.run(some)
    returned = pq.read_table(Path(some.output, "rows", "part-00000.parquet")).column("results")
    assert returned.to_pylist()[0][0]["row"] == {"big": 2**64 - 1, "text": "a list of names"}

    lines = replace(config, output=f"{config.output}-3", corpus=vectors, top_k=1)
    search.run(lines)
    assert all(row["results"][0]["row"]["big"] == 2**64 - 1 for row in found_in(lines.output))


def test_rows_of_jsonl_get_one_type_over_the_corpus(
    config: SearchConfig, pretrained: Any, tmp_path: Path
) -> None:
    texts = "a list of names", "how a file is opened", "the sum of two numbers"
    pq.write_table(pa.table({"text": texts}), tmp_path / "queries.parquet", row_group_size=1)
    values: list[dict[str, Any]]
    values = [{"note": None, "count": 1}, {"note": {"by": "me"}, "count": 2.5}, {"count": 3}]
    rows = [{"text": text, **value} for text, value in zip(texts, values, strict=True)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    queries = vectors_of(tmp_path / "queries.parquet", pretrained)
    tables = replace(config, queries=queries, corpus=vectors_of(source, pretrained), top_k=1)
    search.run(tables)
    parts = sorted(Path(tables.output, "rows").iterdir())
    assert len(parts) == 3
    found = pa.concat_tables([pq.read_table(part) for part in parts]).column("results")
    assert [row["row"] for [row] in found.to_pylist()] == [
        {"text": texts[0], "note": None, "count": 1.0},
        {"text": texts[1], "note": {"by": "me"}, "count": 2.5},
        {"text": texts[2], "note": None, "count": 3.0},
    ]


def test_a_column_of_an_unsupported_type_is_named(
    config: SearchConfig, pretrained: Any, tmp_path: Path
) -> None:
    odd = {
        "types": (1, "mine"),
        "large": (2**63, 1),
        "empty": ({}, {}),
        "inexact": (2**60 + 1, 0.5),
    }
    source = tmp_path / "rows.jsonl"
    rows = [
        {"text": text, **{name: values[place] for name, values in odd.items()}}
        for place, text in enumerate(["a list of names", "how a file is opened"])
    ]
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    corpus = vectors_of(source, pretrained)
    tables = replace(config, queries=config.corpus, corpus=corpus, top_k=2)
    for name in odd:
        message = rf"wanted one type per column, .* a column '{name}' without \("
        with pytest.raises(CorpusError, match=message):
            search.run(replace(tables, columns=("text", name)))
    search.run(replace(tables, columns=("text",)))
    search.run(replace(tables, output=f"{config.output}-2", queries=config.queries))


def test_the_best_are_those_of_a_full_sort() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(20, 300)).astype(np.float32)
    places = np.broadcast_to(np.arange(300), scores.shape)
    for k in (1, 7, 300, 500):
        best, where = best_of(scores, places, k)
        np.testing.assert_array_equal(best, np.sort(scores, axis=1)[:, ::-1][:, :k])
        np.testing.assert_array_equal(np.take_along_axis(scores, where, 1), best)
