"""Search among vectors: the very rows that a comparison with each finds, whatever the parts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_core.errors import ConfigError, CorpusError, FormatError
from bert_core.manifest import read_manifest
from bert_core.predictor import Predictor
from pipelines import predict, search
from pipelines.predict import PredictConfig
from pipelines.search import SearchConfig, best_of

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def rows(pretrained: Any) -> list[dict[str, Any]]:
    """Docstrings of the standard library."""
    lines = Path(pretrained.rows.source).read_text().splitlines()
    texts = dict.fromkeys(json.loads(line)["text"] for line in lines)
    return [{"id": n, "text": text, "odd": [n]} for n, text in enumerate(texts)]


@pytest.fixture
def config(pretrained: Any, rows: list[dict[str, Any]], tmp_path: Path) -> SearchConfig:
    """Vectors of all rows in Parquet, of every tenth in JSONL."""
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=50)
    some = "".join(f"{json.dumps(row)}\n" for row in rows[::10])
    (tmp_path / "queries.jsonl").write_text(some)
    for name, source in (("corpus", "rows.parquet"), ("queries", "queries.jsonl")):
        predict.run(
            PredictConfig(
                output=str(tmp_path / name),
                model=str(pretrained.folder / "pretrain" / "bundle"),
                source=str(tmp_path / source),
                task="feature-extraction",
                answer_column="",
                part_bytes=5000,
                num_workers=0,
                tracking_uri=pretrained.tracking_uri,
            )
        )
    return SearchConfig(
        output=str(tmp_path / "search"),
        corpus=str(tmp_path / "corpus"),
        queries=str(tmp_path / "queries"),
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


@pytest.mark.usefixtures("local_ray")
def test_the_nearest_rows_are_found_with_their_columns(
    config: SearchConfig, rows: list[dict[str, Any]], pretrained: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(search, "ROWS_AT_ONCE", 7)
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


def _cut(predictor: Predictor) -> Any:
    return predictor.task.parameters(truncate=True)  # type: ignore[call-arg]


def test_what_cannot_be_searched_is_refused(
    config: SearchConfig, finetuned: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"columns: wanted some of id, text, odd, got 'name'"):
        search.run(replace(config, columns=("name",)))
    with pytest.raises(ConfigError, match="top_k: wanted at least 1, got 0"):
        replace(config, top_k=0)
    other = PredictConfig(
        output=str(tmp_path / "labels"),
        model=str(finetuned.folder / "finetune" / "bundle"),
        source=str(tmp_path / "queries.jsonl"),
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
    with pytest.raises(FormatError, match="wanted vectors in a column 'predicted_vector', got no"):
        search.run(replace(config, queries=other.output, corpus=other.output))


def test_columns_that_results_cannot_stand_beside_are_refused(
    config: SearchConfig, pretrained: Any, tmp_path: Path
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"text": "a list", "results": 1}\n{"text": "a file", "results": "mine"}\n')
    asked = PredictConfig(
        output=str(tmp_path / "vectors"),
        model=str(pretrained.folder / "pretrain" / "bundle"),
        task="feature-extraction",
        source=str(source),
        answer_column="",
        num_workers=0,
        tracking_uri=config.tracking_uri,
    )
    predict.run(asked)
    with pytest.raises(CorpusError, match="wanted queries without a column 'results', where the n"):
        search.run(replace(config, queries=asked.output))
    tables = replace(config, queries=config.corpus, corpus=asked.output, top_k=2)
    with pytest.raises(CorpusError, match="wanted one type per column, as a table needs"):
        search.run(tables)


def test_the_best_are_those_of_a_full_sort() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(20, 300)).astype(np.float32)
    places = np.broadcast_to(np.arange(300), scores.shape)
    for k in (1, 7, 300, 500):
        best, where = best_of(scores, places, k)
        np.testing.assert_array_equal(best, np.sort(scores, axis=1)[:, ::-1][:, :k])
        np.testing.assert_array_equal(np.take_along_axis(scores, where, 1), best)
