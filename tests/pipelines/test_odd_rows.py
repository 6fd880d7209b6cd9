"""Odd rows through the stages: each refuses them by name or counts them in its manifest."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from bert_core.errors import ConfigError, CorpusError
from bert_core.tasks.examples import LONGEST
from bert_core.tasks.fill_mask import by_mask
from pipelines import evaluate, finetune, predict, publish
from pipelines.corpus.labelled import LabelledConfig
from pipelines.evaluate import EvaluateConfig
from pipelines.finetune import FinetuneConfig
from pipelines.predict import PredictConfig
from pipelines.publish import PublishConfig

GOOD = [
    {"text": f"Return {n} bytes.", "label": label} for n in range(8) for label in ("early", "late")
]
ODD = [
    {"text": "", "label": "early"},
    {"text": " \n", "label": "late"},
    {"text": "long " * 100_000, "label": "early"},
]
Written = Callable[..., LabelledConfig]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(name: str, rows: list[dict[str, Any]]) -> LabelledConfig:
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return LabelledConfig(source=str(path))

    return write


@pytest.fixture
def tuning(small: Any, untrained: Any, tmp_path: Path, written: Written) -> FinetuneConfig:
    return replace(
        small.finetune(tmp_path / "finetune"),
        model=str(untrained.encoder),
        train=written("train.jsonl", GOOD),
        held_out=written("held_out.jsonl", GOOD),
        rows_per_class=None,
        seeds=(0,),
        epochs=0.5,
    )


@pytest.fixture
def evaluation(small: Any, untrained: Any, tmp_path: Path) -> EvaluateConfig:
    return EvaluateConfig(
        output=str(tmp_path / "evaluate"),
        model=str(untrained.classifier),
        num_workers=0,
        tracking_uri=small.tracking_uri,
    )


@pytest.mark.trained
def test_fine_tuning_counts_the_rows_that_are_empty_or_cut(
    tuning: FinetuneConfig, written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    train = written("odd.jsonl", GOOD + ODD)
    counts = finetune.run(replace(tuning, train=train)).counts
    assert (counts["train_rows_with_empty_text"], counts["train_rows_cut"]) == (2, 1)
    assert (counts["held_out_rows_with_empty_text"], counts["held_out_rows_cut"]) == (0, 0)
    told = capsys.readouterr().out
    assert f"finetune: 2 rows with empty text in {train.source}" in told
    assert f"finetune: 1 row cut in {train.source} (train)" in told
    assert tuning.held_out is not None
    seen = counts["held_out_rows_seen_in_training"]  # the same rows, but for those that are odd
    (line,) = {line for line in told.splitlines() if tuning.held_out.source in line}
    assert line.startswith(f"finetune: {seen:,} rows seen in training in ")


@pytest.mark.parametrize(
    ("train", "held_out", "message"),
    [
        (
            GOOD,
            [{"text": "a", "label": "never"}],
            "row 1: its label 'never' is not one of the model's",
        ),
        (GOOD[::2], GOOD, r"training rows: wanted at least two labels, found 1 \(early\)"),
        (GOOD[:4], GOOD, "wanted at least batch_size = 8 rows to train on, got 4: lower batch_s"),
        (GOOD, [], "held_out.jsonl: wanted labelled rows, the file holds none: give another"),
        ([*GOOD, {"text": "a", "label": ""}], GOOD, "row 17: wanted text in the column 'label'"),
        ([*GOOD, {"txt": "a", "label": "x"}], GOOD, "row 17: wanted text in the column 'text'"),
    ],
)
def test_unusable_training_rows_are_named(
    tuning: FinetuneConfig, written: Written, train: Any, held_out: Any, message: str
) -> None:
    config = replace(
        tuning, train=written("train.jsonl", train), held_out=written("held_out.jsonl", held_out)
    )
    with pytest.raises(CorpusError, match=message):
        finetune.run(config)


def test_a_row_that_an_evaluation_cannot_take_has_its_number_in_the_file(
    small: Any, untrained: Any, tmp_path: Path, written: Written
) -> None:
    rows = [{"text": "[MASK]", "words": ["a"]}] * 600  # which no worker takes all at once
    rows[513] = {"text": "[MASK]", "words": ["a", "b"]}
    config = EvaluateConfig(
        output=str(tmp_path / "evaluate"),
        model=str(untrained.encoder),
        held_out=written("masks.jsonl", rows),
        num_workers=0,
        tracking_uri=small.tracking_uri,
    )
    with pytest.raises(CorpusError, match=r"masks.jsonl, row 514: wanted a word for each mask"):
        evaluate.run(config)


NEAR = {"text": "[MASK] list.", "words": ["the"]}
NEAR_AND_FAR = {"text": f"[MASK] list {'long ' * 600} [MASK].", "words": ["the", "a"]}
FAR = {"text": f"A list {'long ' * 600} [MASK].", "words": ["a"]}


@pytest.mark.trained
def test_a_mask_that_is_cut_off_is_not_learned_and_its_row_is_counted(
    tuning: FinetuneConfig, written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = written("masks.jsonl", [NEAR] * 8 + [NEAR_AND_FAR] * 4 + [FAR] * 3)
    masks = replace(tuning, task="fill-mask", train=rows, held_out=rows, epochs=2.0)
    counts = finetune.run(masks).counts
    assert (counts["train_rows"], counts["train_rows_cut"], counts["train_rows_left_out"]) == (
        15,
        7,
        3,
    )
    assert counts["steps"] == 3, "two epochs of 12 rows, 8 a step"
    assert counts["held_out_rows_cut"] == 7
    right = 19 * counts["accuracy_mean"]  # all masks count, also the 7 that are never asked
    assert right == pytest.approx(round(right), abs=1e-4)
    assert right <= 12.001
    told = capsys.readouterr().out
    assert f"finetune: 3 rows left out in {rows.source} (train)" in told
    far = written("far.jsonl", [FAR] * 8)
    message = r"far.jsonl: wanted at least batch_size = 8 rows .* max_length = 32 tokens, got 0 of"
    with pytest.raises(CorpusError, match=message):
        finetune.run(replace(masks, train=far, output=f"{masks.output}-far"))
    wrong = written("wrong.jsonl", [NEAR_AND_FAR] * 8 + [NEAR_AND_FAR | {"words": ["the"]}])
    with pytest.raises(CorpusError, match=r"row 9: wanted a word for each mask .*, got 1 for 2"):
        finetune.run(replace(masks, train=wrong, output=f"{masks.output}-wrong"))


def test_a_mask_that_is_cut_off_counts_as_wrong_and_perplexity_is_without_it(
    small: Any, untrained: Any, tmp_path: Path, written: Written
) -> None:
    config = EvaluateConfig(
        output=str(tmp_path / "far"),
        model=str(untrained.encoder),
        held_out=written("far.jsonl", [NEAR] * 8 + [NEAR_AND_FAR] * 4 + [FAR] * 3),
        num_workers=0,
        tracking_uri=small.tracking_uri,
    )
    far = evaluate.run(config).counts
    assert (far["rows"], far["rows_cut"]) == (15, 7)
    answers = pq.read_table(tmp_path / "far" / "predictions.parquet").to_pylist()
    right = [sum(one[0]["wanted"]["rank"] == 1 for one in by_mask(json.loads(row["answer"])))
             for row in answers]  # fmt: skip
    assert far["accuracy"] == sum(right) / 19
    assert [row["predicted_words"] for row in answers[-3:]] == [[], [], []]
    shares = [one[0]["wanted"]["log_share"] for row in answers
              for one in by_mask(json.loads(row["answer"]))]  # fmt: skip
    assert len(shares) == 12
    assert far["perplexity"] == pytest.approx(np.exp(-np.mean(shares)))
    none = written("none.jsonl", [FAR] * 3)
    counts = evaluate.run(replace(config, held_out=none, output=str(tmp_path / "none"))).counts
    assert (counts["accuracy"], counts["wrong_rows"], counts["rows_cut"]) == (0.0, 3, 3)


def test_an_evaluation_counts_the_rows_that_are_empty_or_cut(
    evaluation: EvaluateConfig, written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = written("odd.jsonl", GOOD + ODD)
    counts = evaluate.run(replace(evaluation, held_out=held_out)).counts
    assert (counts["rows"], counts["rows_with_empty_text"], counts["rows_cut"]) == (19, 2, 1)
    assert f"evaluate: 1 row cut in {held_out.source}" in capsys.readouterr().out
    one_class = replace(
        evaluation, held_out=written("one.jsonl", GOOD[::2]), output=f"{evaluation.output}-one"
    )
    assert evaluate.run(one_class).counts["matthews"] == 0.0
    unseen = written("unseen.jsonl", [*GOOD, {"text": "a", "label": "never"}])
    with pytest.raises(CorpusError, match="row 17: its label 'never' is not one of the model's"):
        evaluate.run(replace(evaluation, held_out=unseen, output=f"{evaluation.output}-unseen"))


def test_an_option_of_earlier_versions_is_refused_before_ray_starts(
    tuning: FinetuneConfig, written: Written
) -> None:
    pairs = written("pairs.jsonl", [{"text": f"{n} a", "text_pair": f"{n} b"} for n in range(40)])
    embedding = replace(
        tuning, task="feature-extraction", train=pairs, held_out=None, batch_size=16, num_workers=2,
        address="127.0.0.1:1", options={"group_size": 8},
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"^options\.group_size: wanted none, since it is no"):
        finetune.run(embedding)


@pytest.mark.trained
def test_pairs_are_not_trained_on_one_by_one_unless_they_have_negatives(
    tuning: FinetuneConfig, written: Written
) -> None:
    rows = [{"text": f"{n} a", "text_pair": f"{n} b"} for n in range(8)]
    embedding = replace(
        tuning, task="feature-extraction", train=written("pairs.jsonl", rows), held_out=None,
        batch_size=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"^batch_size: wanted at least 2, since a row"):
        finetune.run(embedding)
    triples = [{**row, "negatives": ["another"]} for row in rows]
    finetune.run(replace(embedding, train=written("triples.jsonl", triples)))


@pytest.mark.trained
def test_a_ranker_learns_lists_whose_queries_come_together(
    tuning: FinetuneConfig, written: Written
) -> None:
    rows = [
        {"text": f"{n % 6} a", "text_pair": f"{n} b", "score": float(n % 5 == 0)} for n in range(30)
    ]
    ranker = replace(
        tuning, task="text-ranking", train=written("lists.jsonl", rows), held_out=None,
        batch_size=10, options={"loss": "lambda"},
    )  # fmt: skip
    manifest = finetune.run(ranker)
    assert manifest.counts["steps"] > 0


@pytest.mark.trained
def test_an_evaluation_counts_the_lines_that_are_broken(
    tuning: FinetuneConfig, evaluation: EvaluateConfig, tmp_path: Path
) -> None:
    lines = [f"{n}\t1\t2\tWhat is {n}?\tIs it {n}?\t{n % 2}" for n in range(16)]
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    (tmp_path / "qqp.tsv").write_text("\n".join([header, *lines, "16\t1\t2\tcut"]) + "\n")
    questions = LabelledConfig(source=str(tmp_path / "qqp.tsv"), format="qqp")
    finetune.run(replace(tuning, train=questions, held_out=None))
    model = str(Path(tuning.output) / "bundle")
    counts = evaluate.run(replace(evaluation, model=model, held_out=questions)).counts
    assert (counts["rows"], counts["broken_lines_left_out"]) == (16, 1)


def test_a_bundle_is_published_by_an_evaluation_whose_first_rows_are_too_long(
    evaluation: EvaluateConfig, finetuned: Any, written: Written
) -> None:
    evaluation = replace(
        evaluation,
        model=str(finetuned.folder / "finetune" / "bundle"),
        held_out=written("long.jsonl", ODD[2:] * 2 + GOOD),
    )
    evaluate.run(evaluation)
    config = PublishConfig(
        output=f"{evaluation.output}-publish", model=evaluation.model, name="of-long-rows",
        evaluation=evaluation.output, num_workers=0, tracking_uri=evaluation.tracking_uri,
    )  # fmt: skip
    assert publish.run(config).counts["is_champion"]
    card = Path(config.output, "model_card.md").read_text()
    assert "Of note: 2 rows cut." in card


def test_a_bundle_without_examples_is_published_if_all_rows_are_too_long_to_be_shown(
    evaluation: EvaluateConfig, written: Written
) -> None:
    from bert_core.bundle.format import load_bundle

    assert load_bundle(evaluation.model).examples == ()
    long = [row | {"text": row["text"] + " long" * LONGEST} for row in GOOD]
    evaluate.run(replace(evaluation, held_out=written("long.jsonl", long)))
    config = PublishConfig(
        output=f"{evaluation.output}-publish", model=evaluation.model, name="of-long-rows-only",
        evaluation=evaluation.output, num_workers=0, tracking_uri=evaluation.tracking_uri,
    )  # fmt: skip
    assert publish.run(config).counts["is_champion"]
    task = load_bundle(evaluation.model).task
    assert task is not None
    assert repr(task.examples[0]) in Path(config.output, "model_card.md").read_text()


def test_several_files_of_labelled_rows_are_one_set(
    evaluation: EvaluateConfig, written: Written, tmp_path: Path
) -> None:
    (tmp_path / "parts").mkdir()
    for number in range(2):
        written(f"parts/{number}.jsonl", GOOD[8 * number : 8 * number + 8])
    several = LabelledConfig(source=str(tmp_path / "parts" / "*.jsonl"))
    counts = evaluate.run(replace(evaluation, held_out=several)).counts
    assert counts["rows"] == 16
    written("parts/1.jsonl", GOOD[:3])
    with pytest.raises(ConfigError, match="made with another held_out"):
        evaluate.run(replace(evaluation, held_out=several))


def test_predicting_counts_the_rows_that_are_empty_or_cut(
    evaluation: EvaluateConfig, written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    config = PredictConfig(
        output=f"{evaluation.output}-predict",
        model=evaluation.model,
        source=written("odd.jsonl", GOOD + ODD).source,
        num_workers=0,
        tracking_uri=evaluation.tracking_uri,
    )
    counts = predict.run(config).counts
    assert (counts["rows"], counts["rows_with_empty_text"], counts["rows_cut"]) == (19, 2, 1)
    assert "predict: 2 rows with empty text in" in capsys.readouterr().out


def test_a_model_of_single_texts_refuses_pairs(
    evaluation: EvaluateConfig, written: Written
) -> None:
    pairs = written("pairs.jsonl", [*GOOD, GOOD[0] | {"text_pair": "Return a list."}])
    with pytest.raises(CorpusError, match="row 17: wanted no text_pair, as training"):
        evaluate.run(replace(evaluation, held_out=pairs))
    config = PredictConfig(
        output=f"{evaluation.output}-predict",
        model=evaluation.model,
        source=pairs.source,
        num_workers=0,
        tracking_uri=evaluation.tracking_uri,
    )
    counts = predict.run(config).counts
    assert (counts["rows"], counts["rejected"]) == (16, 1)
    (path,) = Path(config.output, "rejected").iterdir()
    (rejected,) = map(json.loads, path.read_text().splitlines())
    assert (rejected["kind"], rejected["row"]["text_pair"]) == (
        "without_the_input",
        "Return a list.",
    )
    assert "wanted no text_pair" in rejected["reason"]
