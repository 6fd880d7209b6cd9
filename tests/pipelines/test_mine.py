"""Mined negatives: those that a comparison with every passage finds, whatever the parts and the
workers."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_core.errors import ConfigError, CorpusError
from bert_core.inference.predictor import Predictor
from bert_core.manifest import read_manifest
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.text_classification import TextClassification
from bert_core.tasks.text_ranking import TextRanking
from pipelines import mine
from pipelines.answering.mining import NearnessConfig
from pipelines.commands import report
from pipelines.commands.report import ReportConfig
from pipelines.mine import MineConfig
from tests import tiny

WORDS = ("the", "sea", "is", "blue", "tree", "a")


def texts(count: int, words: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=words)) for _ in range(count)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, words = tmp_path_factory.mktemp("mining"), tiny.tokenizer()
    options = FeatureExtraction.options(normalize=True, prompts={"query": "is ", "passage": "a "})
    return {
        "vectors": tiny.bundle(folder / "vectors", words, task=FeatureExtraction(options=options)),
        "ranker": tiny.bundle(folder / "ranker", words, task=TextRanking()),
    }


@pytest.fixture(scope="module")
def done(
    small: Any, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> MineConfig:
    """Negatives that have been mined, of pairs of which some have the same first text."""
    folder = tmp_path_factory.mktemp("mined")
    firsts = texts(40, 4, 0)
    rows = [
        {"id": number, "text": firsts[number // 2], "text_pair": f"{firsts[number // 2]} {text}"}
        for number, text in enumerate(texts(80, 3, 1))
    ]
    lines = [json.dumps(row) for row in rows]
    lines.insert(7, '{"text": "a sea without another"}')
    (folder / "pairs.jsonl").write_text("".join(f"{line}\n" for line in lines))
    config = MineConfig(
        output=str(folder / "mine"),
        model=str(models["vectors"]),
        source=str(folder / "pairs.jsonl"),
        part_bytes=2000,
        negatives=3,
        near=NearnessConfig(first_rank=2, last_rank=12, relative_margin=0.01),
        num_workers=0,
        tracking_uri=small.tracking_uri,
    )
    mine.run(config)
    return config


def rows_in(folder: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted(Path(folder, "rows").iterdir()):
        if path.suffix == ".parquet":
            found += pq.read_table(path).to_pylist()
        else:
            found += map(json.loads, path.read_text().splitlines())
    return found


def unit_vectors(model: Path, prompt: str, of: list[str]) -> np.ndarray:
    vectors = np.array(Predictor(model, device="cpu").predict([prompt + text for text in of]))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def allowed(config: MineConfig, rows: list[dict[str, Any]], passages: list[str]) -> list[set[str]]:
    """What may be drawn for each row, by a comparison with every passage."""
    passages = [*dict.fromkeys(passages)]
    queries = unit_vectors(Path(config.model), "is ", [row["text"] for row in rows])
    own = unit_vectors(Path(config.model), "a ", [row["text_pair"] for row in rows])
    cosines = queries @ unit_vectors(Path(config.model), "a ", passages).T
    sets = []
    for row, scores, limit in zip(rows, cosines, (queries * own).sum(1), strict=True):
        belongs = {other["text_pair"] for other in rows if other["text"] == row["text"]}
        order = [p for p in np.argsort(-scores) if passages[p] not in belongs | {row["text"]}]
        near = config.near
        ranked = order[near.first_rank - 1 : near.last_rank]
        sets.append({passages[p] for p in ranked if scores[p] <= limit - 0.01 * abs(limit)})
    return sets


def test_negatives_are_among_those_that_a_comparison_with_each_allows(done: MineConfig) -> None:
    rows = rows_in(done.output)
    assert [row["id"] for row in rows] == list(range(80)), "in order, with their columns"
    sets = allowed(done, rows, [row["text_pair"] for row in rows])
    for row, may in zip(rows, sets, strict=True):
        assert len(row["negatives"]) == len(set(row["negatives"])) == min(3, len(may))
        assert set(row["negatives"]) <= may
    counts = read_manifest(done.output).counts
    drawn = sum(len(row["negatives"]) for row in rows)
    fewer = sum(len(row["negatives"]) < 3 for row in rows)
    assert (counts["negatives"], counts["rows_with_fewer_negatives"]) == (drawn, fewer)
    assert drawn > 40, "or little is tested"
    assert counts["candidates_too_near"] > 0
    assert (counts["rows"], counts["rejected_without_the_input"]) == (80, 1)
    assert counts["passages"] == len({row["text_pair"] for row in rows})
    assert len(list(Path(done.output, "rows").iterdir())) > 2, "several parts"
    assert Path(done.output, "margins.png").stat().st_size > 1000
    assert not any(name.startswith("margin_bin") for name in counts)


def test_the_report_counts_them_and_shows_their_margins(done: MineConfig, tmp_path: Path) -> None:
    page, counts = tmp_path / "report.html", read_manifest(done.output).counts
    report.run(ReportConfig(runs=(done.output,), output=str(page)))
    text = page.read_text()
    picture = base64.b64encode(Path(done.output, "margins.png").read_bytes()).decode()
    assert f'<img src="data:image/png;base64,{picture}" alt="Negatives per margin"' in text
    for name in ("negatives", "rows_with_fewer_negatives", "candidates_too_near"):
        row = f'<th scope="row">{name.replace("_", " ")}</th><td class="n">{counts[name]:,}</td>'
        assert row in text


def test_the_nearest_are_taken_in_order_if_asked_for(done: MineConfig, tmp_path: Path) -> None:
    config = replace(done, output=str(tmp_path / "nearest"), draw="nearest", near=NearnessConfig())
    mine.run(config)
    rows = rows_in(config.output)
    passages = [*dict.fromkeys(row["text_pair"] for row in rows)]
    queries = unit_vectors(Path(config.model), "is ", [row["text"] for row in rows])
    cosines = queries @ unit_vectors(Path(config.model), "a ", passages).T
    for row, scores in zip(rows, cosines, strict=True):
        belongs = {other["text_pair"] for other in rows if other["text"] == row["text"]}
        order = [passages[p] for p in np.argsort(-scores)]
        assert row["negatives"] == [text for text in order if text not in belongs][:3]


def same_bytes(one: str, other: str) -> bool:
    names = sorted(path.name for path in Path(one, "rows").iterdir())
    return names == sorted(path.name for path in Path(other, "rows").iterdir()) and all(
        Path(one, "rows", name).read_bytes() == Path(other, "rows", name).read_bytes()
        for name in names
    )


@pytest.mark.usefixtures("local_ray")
def test_workers_change_nothing(done: MineConfig, tmp_path: Path) -> None:
    two = replace(done, output=str(tmp_path / "two"), num_workers=2)
    mine.run(two)
    assert same_bytes(two.output, done.output)


def test_a_killed_run_goes_on_with_the_next_part(
    done: MineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(done, output=str(tmp_path / "killed"))
    whole = mine.make_part

    def killed(config: MineConfig, models: Any, passages: int, item: Any) -> dict[str, Any]:
        if item[0] == 2:
            raise KeyboardInterrupt
        return whole(config, models, passages, item)

    monkeypatch.setattr(mine, "make_part", killed)
    with pytest.raises(KeyboardInterrupt):
        mine.run(config)
    made = [*Path(config.output, "passages").iterdir(), *Path(config.output, "rows").iterdir()]
    before = {path: path.stat().st_mtime_ns for path in made if path.suffix != ".part"}
    assert len(list(Path(config.output, "parts").iterdir())) == 2
    monkeypatch.setattr(mine, "make_part", whole)
    mine.run(config)
    assert {path: path.stat().st_mtime_ns for path in before} == before, "nothing is made again"
    assert same_bytes(config.output, done.output)


def test_passages_of_their_own_and_a_rankers_verdict(
    done: MineConfig, models: dict[str, Path], tmp_path: Path
) -> None:
    passages = texts(50, 7, 5)
    pq.write_table(pa.table({"body": passages * 2}), tmp_path / "passages.parquet")
    table = pa.Table.from_pylist([
        {"text": row["text"], "pair": row["text_pair"], "when": 1} for row in rows_in(done.output)
    ])  # fmt: skip
    pq.write_table(table, tmp_path / "pairs.parquet", row_group_size=30)
    config = replace(
        done,
        output=str(tmp_path / "ranked"),
        source=str(tmp_path / "pairs.parquet"),
        columns={"text_pair": "pair"},
        passages=str(tmp_path / "passages.parquet"),
        passage_column="body",
        ranker=str(models["ranker"]),
        ranker_margin=0.01,
        near=NearnessConfig(last_rank=9),
    )
    counts = mine.run(config).counts
    rows = rows_in(config.output)
    assert list(rows[0]) == ["text", "pair", "when", "negatives", "scores"]
    ranker = Predictor(models["ranker"], device="cpu")
    raw = ranker.task.parameters(raw_scores=True)  # type: ignore[call-arg]
    for row in rows:
        read = [row["pair"], *row["negatives"]]
        pairs = [{"text": row["text"], "text_pair": text} for text in read]
        scores = [answer["score"] for answer in ranker.predict(pairs, raw)]
        assert row["scores"] == pytest.approx(scores, abs=1e-5)
        assert all(score <= row["scores"][0] - 0.01 for score in row["scores"][1:])
        assert set(row["negatives"]) <= set(passages)
    assert counts["candidates_ruled_out_by_the_ranker"] > 0
    assert counts["passages"] == len(set(passages))
    assert any(row["negatives"] for row in rows)


def test_what_cannot_be_mined_is_refused(
    done: MineConfig, models: dict[str, Path], tmp_path: Path
) -> None:
    rows = [{"text": "a", "label": label} for label in ("b", "c")]
    task = TextClassification.from_rows(rows)
    classifier = tiny.bundle(tmp_path / "classifier", tiny.tokenizer(), task=task)
    new = replace(done, output=str(tmp_path / "new"), num_workers=2)
    with pytest.raises(ConfigError, match=r"model: wanted one for vectors, .* text-classification"):
        mine.run(replace(new, model=str(classifier)))
    with pytest.raises(ConfigError, match=r"model: wanted one for vectors, .* sentence-similarity"):
        mine.run(replace(new, task="sentence-similarity"))
    with pytest.raises(
        ConfigError, match=r"ranker: wanted a model for text-ranking, got .*vectors"
    ):
        mine.run(replace(new, ranker=str(models["vectors"])))
    taken = tmp_path / "taken.csv"
    taken.write_text("text,text_pair,negatives\na,b,c\n")
    with pytest.raises(CorpusError, match="wanted no column 'negatives', which is added here"):
        mine.run(replace(new, source=str(taken)))
    other = tmp_path / "other.csv"
    other.write_text("other\na\n")
    with pytest.raises(CorpusError, match="wanted a column 'text'"):
        mine.run(replace(new, passages=str(other)))
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"other": 1}\n')
    with pytest.raises(CorpusError, match="wanted at least one passage, got none: name another"):
        mine.run(replace(new, passages=str(empty), num_workers=0))
