"""GLUE's score worked by hand, and the lines of a submission."""

import pytest

from bert_core.data.labelled_formats import FORMATS
from bert_core.errors import ConfigError
from bert_core.metrics.glue import SCORED_TASKS, SETS, submission_lines, task_scores

# Devlin et al. 2019, table 1, BERT-base on the test sets: in one number where the table has one.
MEASURED = {
    "cola": {"matthews": 0.521, "accuracy": 0.9},
    "sst2": {"accuracy": 0.935},
    "mrpc": {"f1_of_1": 0.889, "accuracy": 0.849},
    "stsb": {"pearson": 0.871, "spearman": 0.858, "mse": 0.4},
    "qqp": {"f1_of_1": 0.712, "accuracy": 0.892},
    "mnli": {"accuracy": 0.846},
    "mnli_mismatched": {"accuracy": 0.834},
    "qnli": {"accuracy": 0.905},
    "rte": {"accuracy": 0.664},
    "wnli": {"accuracy": 0.651},
    "ax": {"matthews": 0.342},
}


def test_a_task_is_the_mean_of_its_metrics_and_mnli_of_its_sets() -> None:
    scores = task_scores(MEASURED)
    wanted = [0.521, 0.935, 0.869, 0.8645, 0.802, 0.84, 0.905, 0.664, 0.651]
    assert list(scores) == SCORED_TASKS
    assert list(scores.values()) == pytest.approx(wanted)
    assert sum(scores.values()) / 9 == pytest.approx(7.0515 / 9)


def test_an_incomplete_task_has_no_score() -> None:
    some = {name: MEASURED[name] for name in ("sst2", "mnli", "ax")}
    assert task_scores(some) == {"sst2": 0.935}
    with pytest.raises(
        ConfigError, match="mrpc: wanted f1_of_1 and accuracy, got accuracy: evaluate"
    ):
        task_scores({"mrpc": {"accuracy": 0.8}})


def test_lines_are_numbered_from_0_and_numbers_stay_on_their_scale() -> None:
    lines = submission_lines(["entailment", "not_entailment"])
    assert lines == "index\tprediction\n0\tentailment\n1\tnot_entailment\n"
    numbers = submission_lines([5.2, -0.4, 2.34567, 4.0])
    assert [line.split("\t")[1] for line in numbers.splitlines()[1:]] == [
        "5.000", "0.000", "2.346", "4.000"
    ]  # fmt: skip


def test_a_submission_has_eleven_files_of_known_formats() -> None:
    files = [one.file for one in SETS.values()]
    assert sorted(files) == sorted(
        f"{name}.tsv"
        for name in ("AX", "CoLA", "MNLI-m", "MNLI-mm", "MRPC", "QNLI", "QQP", "RTE", "SST-2",
                     "STS-B", "WNLI")
    )  # fmt: skip
    assert len(SCORED_TASKS) == 9
    for test_set in SETS.values():
        assert test_set.format in FORMATS
        assert not test_set.labels or test_set.filler in test_set.labels
