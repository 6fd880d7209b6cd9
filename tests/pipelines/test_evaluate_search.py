"""`raybert evaluate` on a retrieval set: what its files say, and what is refused before work."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import ir_measures
import numpy as np
import pyarrow.parquet as pq
import pytest
from ir_measures import AP, nDCG

from bert_core.bundle.format import About
from bert_core.bundle.writing import save_bundle
from bert_core.errors import ConfigError, CorpusError
from bert_core.inference.predictor import Predictor
from bert_core.manifest import read_manifest
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.text_classification import TextClassification
from pipelines import evaluate, publish
from pipelines.answering.searching import RetrievalConfig
from pipelines.answering.searching_again import retrieval_set_again
from pipelines.corpus.labelled import LabelledConfig
from pipelines.evaluate import EvaluateConfig
from pipelines.publish import PublishConfig
from tests import tiny
from tests.retrieval_sets import READ, beir

PROMPTS = {"query": "is the ", "passage": "a tree "}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of vectors with a prompt for each side."""
    options = FeatureExtraction.options(normalize=True, dimensions=[8], prompts=PROMPTS)
    task = FeatureExtraction(options=options)
    folder = tmp_path_factory.mktemp("searched") / "bundle"
    return tiny.bundle(folder, tiny.tokenizer(), task=task)


@pytest.fixture(scope="module")
def done(small: Any, bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> EvaluateConfig:
    """An evaluation that has been made."""
    folder = tmp_path_factory.mktemp("evaluated")
    config = EvaluateConfig(
        output=str(folder / "evaluate"),
        model=str(bundle),
        held_out=LabelledConfig(source=str(beir(folder / "set"))),
        retrieval=RetrievalConfig(dimensions=(4,)),
        num_workers=0,
        tracking_uri=small.tracking_uri,
    )
    evaluate.run(config)
    return config


@pytest.fixture
def config(done: EvaluateConfig, tmp_path: Path) -> EvaluateConfig:
    """Another, on a set of its own."""
    held_out = LabelledConfig(source=str(beir(tmp_path / "set")))
    return replace(done, output=str(tmp_path / "evaluate"), held_out=held_out)


def test_the_figures_are_those_of_the_models_own_vectors(
    done: EvaluateConfig, bundle: Path
) -> None:
    config = done
    counts = read_manifest(config.output).counts
    predictor = Predictor(bundle, device="cpu")
    # With the prompts of the two sides, by hand.
    queries, documents = (
        np.array(predictor.predict([prompt + text for text in texts]), np.float32)
        for prompt, texts in (("is the ", ["blue sea", "a tree"]), ("a tree ", READ))
    )
    ids = ["d1", "d2", "d3", "d10"]
    run = {
        query: dict(zip(ids, row.tolist(), strict=True))
        for query, row in zip(["q1", "q2"], queries @ documents.T, strict=True)
    }
    qrels = {"q1": {"d1": 2, "d3": 1}, "q2": {"d2": 1}}
    theirs = ir_measures.calc_aggregate([nDCG @ 10, AP @ 100], qrels, run)
    assert counts["ndcg_at_10"] == pytest.approx(theirs[nDCG @ 10], abs=1e-6)
    assert counts["map_at_100"] == pytest.approx(theirs[AP @ 100], abs=1e-6)
    assert counts["ndcg_at_10_low"] <= counts["ndcg_at_10"] <= counts["ndcg_at_10_high"]
    assert (counts["rows"], counts["documents"]) == (2, 4)
    assert counts["queries_left_out_as_not_judged"] == 1
    assert {"int8", "binary", "8_dimensions", "4_dimensions", "bm25"} == {
        name.removeprefix("ndcg_at_10_") for name in counts if name.startswith("ndcg_at_10_")
    } - {"low", "high"}
    table = pq.read_table(Path(config.output, "predictions.parquet")).to_pylist()
    assert [(row["id"], row["text"]) for row in table] == [("q1", "blue sea"), ("q2", "a tree")]
    for row in table:
        ranked = sorted(run[row["id"]], key=lambda number: -run[row["id"]][number])
        assert [hit["id"] for hit in row["nearest"]] == ranked
        assert {each["id"]: ranked[each["rank"] - 1] for each in row["relevant"]} == {
            each["id"]: each["id"] for each in row["relevant"]
        }
    assert np.mean([row["ndcg_at_10"] for row in table]) == pytest.approx(counts["ndcg_at_10"])
    forms = json.loads(Path(config.output, "forms.json").read_text())
    assert [each["bytes_per_vector"] for each in forms] == [128, 32, 4, 32, 16, None]
    worst = list(map(json.loads, Path(config.output, "worst.jsonl").read_text().splitlines()))
    faults = [1 - row["ndcg_at_10"] for row in table]
    assert [row["fault"] for row in worst] == sorted(filter(None, faults), reverse=True)
    assert all(row["fault"] == faults[row["row"] - 1] for row in worst)


@pytest.mark.usefixtures("local_ray")
def test_workers_change_nothing(
    done: EvaluateConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, spread = done, replace(done, output=str(tmp_path / "two"), num_workers=2)
    evaluate.run(spread)
    printed = capsys.readouterr().out
    for form in ("fp32", "int8", "binary", "8 dimensions", "4 dimensions", "BM25"):
        assert f"evaluate: {form} " in printed
    for name in ("predictions.parquet", "forms.json", "worst.jsonl"):
        assert Path(spread.output, name).read_bytes() == Path(config.output, name).read_bytes()


def test_sparse_vectors_are_searched_too(config: EvaluateConfig, tmp_path: Path) -> None:
    words = tiny.tokenizer()
    folder = tiny.bundle(tmp_path / "sparse", words, objectives=[MaskedLanguageModeling])
    config = replace(
        config, model=str(folder), task="sparse-embedding", retrieval=RetrievalConfig(bm25=None)
    )
    counts = evaluate.run(config).counts
    predictor = Predictor(folder, device="cpu", task="sparse-embedding")
    dense = np.zeros((6, words.vocab_size))
    for row, vector in zip(dense, predictor.predict(["blue sea", "a tree", *READ]), strict=True):
        for entry in vector:
            row[entry["index"]] = entry["value"]
    scores = (dense[:2] @ dense[2:].T).astype(np.float32)
    run = {q: dict(zip(["d1", "d2", "d3", "d10"], row.tolist(), strict=True))
           for q, row in zip(["q1", "q2"], scores, strict=True)}  # fmt: skip
    qrels = {"q1": {"d1": 2, "d3": 1}, "q2": {"d2": 1}}
    theirs = ir_measures.calc_aggregate([nDCG @ 10], qrels, run)
    assert counts["ndcg_at_10"] == pytest.approx(theirs[nDCG @ 10], abs=1e-6)


def test_pairs_that_trained_the_model_are_counted(config: EvaluateConfig, tmp_path: Path) -> None:
    words, task = tiny.tokenizer(), FeatureExtraction()
    pairs = [{"text": "blue sea", "text_pair": READ[0]}, {"text": "a", "text_pair": "tree"}]
    trained_rows = task.digests(pairs, task.chosen)
    model = tiny.model(tiny.encoder_config(words.vocab_size), task.build_objective)
    about = About(task=task, trained_rows=trained_rows)
    save_bundle(tmp_path / "trained", model, words, about)
    counts = evaluate.run(replace(config, model=str(tmp_path / "trained"))).counts
    assert counts["rows_seen_in_training"] == 1


def test_what_cannot_be_searched_is_refused_before_work(
    config: EvaluateConfig, tmp_path: Path
) -> None:
    folder = Path(config.held_out.source)
    with (folder / "qrels" / "test.tsv").open("a") as table:
        table.write("q1\tnowhere\t1\n")
    # Two workers, and no Ray here to start them.
    two = replace(config, num_workers=2)
    with pytest.raises(CorpusError, match=r"test.tsv, line 5: wanted a document .* 'nowhere'"):
        evaluate.run(two)
    long = replace(two, retrieval=RetrievalConfig(dimensions=(32,)))
    with pytest.raises(ConfigError, match=r"retrieval.dimensions: wanted lengths below 32"):
        evaluate.run(long)
    with pytest.raises(ConfigError, match=r"metric: wanted .*ndcg_at_10.*, got 'f1'"):
        evaluate.run(replace(two, metric="f1"))
    rows = [{"text": "a", "label": label} for label in ("b", "c")]
    task = TextClassification.from_rows(rows)
    classifier = tiny.bundle(tmp_path / "classifier", tiny.tokenizer(), task=task)
    with pytest.raises(ConfigError, match="wanted labelled rows for text-classification, got"):
        evaluate.run(replace(two, model=str(classifier)))
    skipped = replace(config, held_out=replace(config.held_out, bad_rows="skip"))
    assert evaluate.run(skipped).counts["judgements_left_out_as_bad"] == 1


def test_publish_compares_what_two_models_find(
    done: EvaluateConfig, config: EvaluateConfig, tmp_path: Path
) -> None:
    """The champion searches the same set again, without queries that trained one of the two."""
    first = PublishConfig(
        output=str(tmp_path / "first"), model=done.model, evaluation=done.output, name="searchers",
        num_workers=0, tracking_uri=done.tracking_uri,
    )  # fmt: skip
    assert publish.run(first).counts["is_champion"]

    def second(name: str, pairs: list[dict[str, str]]) -> tuple[str, Any]:
        """Why another model, trained on these pairs, is the champion or not, and its counts."""
        words, task = tiny.tokenizer(), FeatureExtraction()
        model = tiny.model(tiny.encoder_config(words.vocab_size), task.build_objective, seed=1)
        about = About(task=task, trained_rows=task.digests(pairs, task.chosen))
        save_bundle(tmp_path / name, model, words, about)
        measured = replace(config, model=str(tmp_path / name), output=str(tmp_path / f"{name}-on"))
        counts = evaluate.run(measured).counts
        again = replace(
            first, model=measured.model, evaluation=measured.output,
            output=str(tmp_path / f"{name}-published"),
        )  # fmt: skip
        return str(publish.run(again).counts["why"]), counts

    of_first = {row["id"]: row["ndcg_at_10"] for row in _queries(done)}
    why, counts = second("alike", [])
    difference = counts["ndcg_at_10"] - np.mean([*of_first.values()])
    assert f"ndcg_at_10 {difference:+.4f} (" in why
    assert "by paired bootstrap on 2 rows" in why
    why, counts = second("half", [{"text": "blue sea", "text_pair": READ[0]}])
    assert "by paired bootstrap on 1 row" in why
    assert "1 of the evaluation's 2 rows are left out, since one of the two was trained" in why
    seen = [{"text": "blue sea", "text_pair": READ[0]}, {"text": "a tree", "text_pair": READ[1]}]
    why, _ = second("seen", seen)
    assert "this bundle was trained on 2 of the evaluation's 2 queries, which favour it" in why
    measured = read_manifest(str(tmp_path / "seen-on"))
    folder = Path(config.held_out.source)
    with (folder / "queries.jsonl").open("a") as queries:
        queries.write(json.dumps({"_id": "q9", "text": "a sea"}) + "\n")
    changed = str(retrieval_set_again(measured))
    assert changed.startswith(f"{folder} has changed since the evaluation, so run `raybert evalu")
    shutil.rmtree(folder)
    told = "the retrieval set of the evaluation cannot be read ("
    assert str(retrieval_set_again(measured)).startswith(told)


def _queries(config: EvaluateConfig) -> list[dict[str, Any]]:
    return pq.read_table(Path(config.output, "predictions.parquet")).to_pylist()
