"""Which tasks labelled rows train, and which rows their bundles show."""

import tracemalloc
from pathlib import Path

import pytest

from bert_core.data.windows import cut_rows
from bert_core.errors import ConfigError
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.digests import NO_ROWS
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.text_classification import TextClassification
from pipelines.corpus.labelled import LabelledConfig
from pipelines.finetune import FinetuneConfig
from pipelines.runtime.progress import BROKEN
from pipelines.training.labelled_sets import (
    LabelledSet,
    few_per_class,
    read_parts,
    remarks_of,
    shown_rows,
    trainable_task,
)
from pipelines.training.selection import SelectionConfig
from tests.labelled_rows import write


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_trained_or_refused_with_the_tasks_whose_models_answer_it(name: str) -> None:
    if TASKS[name].trainable:
        assert trainable_task(name) is TASKS[name]
        return
    others = ", ".join(TASKS[name].shares_head_with)
    message = f"got '{name}', which is not trained: train a model for {others}, and give --task"
    with pytest.raises(ConfigError, match=message):
        trainable_task(name)


def test_an_unknown_task_is_refused_with_those_that_are_trained() -> None:
    with pytest.raises(
        ConfigError, match=r"task: wanted one of text-classification, .*'magic'$"
    ) as raised:
        trainable_task("magic")
    assert "zero-shot" not in str(raised.value)


def test_rows_that_are_shown_were_not_trained_on_and_are_read_whole() -> None:
    from tests import tiny

    task = TextClassification(["a", "b"])

    def encoded(*texts: str) -> LabelledSet:
        rows = [{"text": text, "label": "a"} for text in texts]
        windows = task.encode(rows, tiny.tokenizer(), 8, labelled=True)
        return LabelledSet(rows, windows, cut_rows(windows))

    long = "the sea is blue " * 3
    sets = {"train": encoded("the sea"), "selection": encoded(long, "a tree", "the tree")}
    assert shown_rows(task, sets, 3) == ("a tree", "the tree")
    assert shown_rows(task, sets, 0) == ()
    sets["held_out"] = encoded("a blue sea", long)
    assert shown_rows(task, sets, 3) == ("a blue sea",)
    assert shown_rows(task, {"train": sets["train"]}, 3) == ()
    assert shown_rows(task, {"selection": encoded(long)}, 3) == ()


def test_few_rows_of_a_class_are_drawn_for_every_label_however_long() -> None:
    labels = ["a", "a\0", "x" * 100_000]
    rows = [{"text": f"{number}", "label": labels[number % 3]} for number in range(300)]
    tracemalloc.start()
    try:
        few = few_per_class(rows, 2)
        assert tracemalloc.get_traced_memory()[1] < 1e7
    finally:
        tracemalloc.stop()
    assert sorted(row["label"] for row in few) == sorted(2 * labels)
    assert [row for row in rows if row in few] == few, "in order"


def test_rows_with_one_loss_are_measured_in_the_batches_of_training_by_any_number_of_workers() -> (
    None
):
    import torch

    from pipelines.training.labelled_batches import LabelledRank
    from pipelines.training.worker import RankPlace
    from tests import tiny

    task = FeatureExtraction(options=FeatureExtraction.options(loss="contrastive"))
    rows = [{"text": "the sea", "text_pair": "a tree"} for _ in range(520)]
    sets = {"held_out": LabelledSet(rows, task.encode(rows, tiny.tokenizer(), 8, labelled=True), 0)}
    config = FinetuneConfig(output="a", model="b", task=task.name, batch_size=100, num_workers=0)
    encoder, device = tiny.encoder_config(tiny.tokenizer().vocab_size), torch.device("cpu")
    for workers in (1, 3, 8):
        sizes = [
            sum(len(batch["rows"]) for batch in micro_batches)
            for rank in range(workers)
            for micro_batches in LabelledRank(
                config, RankPlace(rank, workers, device), encoder, 0, task, sets
            )
            .batches("held_out", 0)
            .once()
        ]
        assert sorted(sizes) == [20, 100, 100, 100, 100, 100]


def test_f1_is_that_of_a_named_label() -> None:
    two = ["accuracy", "f1_of_fraud", "f1_of_legit"]
    config = SelectionConfig(share=0.1, metric="f1")
    assert config.named(["accuracy", "f1_of_fraud"]) == "f1_of_fraud"
    assert SelectionConfig(share=0.1, metric="f1_of_legit").named(two) == "f1_of_legit"
    assert config.named(["accuracy", "f1"]) == "f1", "of entities"
    with pytest.raises(ConfigError, match="got 'f1', which is of one label: name it, or set opt"):
        config.named(two)
    with pytest.raises(ConfigError, match=r"wanted one of loss, accuracy, got 'f1'$"):
        config.named(["accuracy"])


@pytest.mark.parametrize("word", ["finetune", "tune", "distill", "evaluate"])
def test_a_stage_without_labelled_rows_asks_for_them(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not learn from those of the quickstart, and no run is recorded."""
    from pipelines import cli
    from tests import tiny

    searched = ["--search.space", '{"lr": [1e-4]}', "--selection.share", "0.5"]
    options = searched if word == "tune" else []
    bundle = str(
        tiny.bundle(tmp_path / "bundle", tiny.tokenizer(), task=TextClassification(["a", "b"]))
    )
    model = "teacher" if word == "distill" else "model"
    rows = "held_out" if word == "evaluate" else "train"
    arguments = [word, f"--{model}", bundle, "--output", str(tmp_path / "out"), *options]
    uri = ["--tracking_uri", f"sqlite:///{tmp_path}/mlflow.db", "--num_workers", "0"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, *uri])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"{rows}.source: wanted labelled rows, got none: give --{rows}.source with a" in told
    assert not (tmp_path / "mlflow.db").exists()


def test_lines_that_are_broken_as_published_are_counted_in_training_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of QQP, where a question with a line break is two lines."""
    path = tmp_path / "train.tsv"
    lines = ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "1\t2\t3\ta\tb\t1"]
    path.write_text("\n".join([*lines, "4\t5\t6\tone", "two?\tc\t0", "7\t8\t9\td\te\t0\n"]))
    rows = LabelledConfig(source=str(path), format="qqp")
    config = FinetuneConfig(output="out", model="bundle", train=rows, held_out=rows)
    parts = read_parts(config, TextClassification, TextClassification.options())
    sets = {
        name: LabelledSet(parts.rows[name], [], 0, read=parts.read[name]) for name in parts.rows
    }
    remarks = remarks_of("finetune", config, parts.task, sets, NO_ROWS)
    counts = {name: count for name, count in remarks.items() if name.endswith(BROKEN)}
    assert counts == {f"train_{BROKEN}": 2, f"held_out_{BROKEN}": 2}
    assert capsys.readouterr().out.count("2 broken lines") == 2, "once for each set"


def test_a_positive_label_is_given_before_the_labels_are_known(tmp_path: Path) -> None:
    from bert_core.bundle.format import load_bundle
    from pipelines.training.labelled_sets import read_sets
    from tests import tiny

    rows = [{"text": f"the sea {n}", "label": ("ham", "spam")[n % 2]} for n in range(8)]
    config = FinetuneConfig(
        output="out", model="model", options={"positive_label": "spam"}, batch_size=4,
        train=LabelledConfig(source=write(tmp_path / "rows.jsonl", rows)), max_length=16,
    )  # fmt: skip
    bundle = load_bundle(tiny.bundle(tmp_path / "bundle", tiny.tokenizer()))
    task, sets = read_sets(config, bundle)
    assert {"f1_of_spam"} == {name for name in task.baseline(sets["train"].rows) if "f1_of" in name}
