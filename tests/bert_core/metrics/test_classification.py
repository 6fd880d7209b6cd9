"""Metrics of labels beside their definitions."""

import numpy as np
import pytest

from bert_core.metrics.classification import (
    by_label,
    f1_names,
    multi_label_metrics,
    single_label_metrics,
    wrong_labels,
)


def drawn(labels: int, rows: int = 200) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, labels, rows), rng.integers(0, labels, rows)


def test_accuracy_is_the_share_that_is_right() -> None:
    metrics = single_label_metrics(np.array([0, 1, 2, 2]), np.array([0, 1, 1, 2]))
    assert metrics["accuracy"] == 0.75
    assert list(metrics) == ["accuracy", "macro_f1", "matthews"]


def test_macro_f1_is_the_mean_of_each_class_f1() -> None:
    predicted, labels = drawn(4)
    scores = []
    for label in range(4):
        hit = ((predicted == label) & (labels == label)).sum()
        scores.append(2 * hit / ((predicted == label).sum() + (labels == label).sum()))
    metrics = single_label_metrics(predicted, labels)
    assert metrics["macro_f1"] == pytest.approx(np.mean(scores))


def test_a_class_never_predicted_counts_zero() -> None:
    metrics = single_label_metrics(np.array([0, 0, 0]), np.array([0, 0, 1]), f1_of={1: "f1_of_b"})
    assert metrics["macro_f1"] == pytest.approx(0.8 / 2)
    assert metrics["f1_of_b"] == metrics["matthews"] == 0.0
    alone = single_label_metrics(np.array([1, 1]), np.array([1, 1]), f1_of={1: "f1_of_b"})
    assert (alone["accuracy"], alone["f1_of_b"], alone["matthews"]) == (1.0, 1.0, 0.0)


def test_f1_and_matthews_of_two_labels_are_those_of_their_table() -> None:
    predicted, labels = drawn(2)
    tp = int(((predicted == 1) & (labels == 1)).sum())
    fp, fn = int(((predicted == 1) & (labels == 0)).sum()), int((predicted < labels).sum())
    tn = len(labels) - tp - fp - fn
    metrics = single_label_metrics(predicted, labels, f1_of={1: "f1_of_b"})
    assert metrics["f1_of_b"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    below = np.sqrt(float((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
    assert metrics["matthews"] == pytest.approx((tp * tn - fp * fn) / below)


def test_rows_out_of_scope_are_counted_apart() -> None:
    predicted, labels = np.array([0, 1, 2, 2, 0]), np.array([0, 0, 2, 0, 2])
    metrics = single_label_metrics(predicted, labels, out_of_scope=2)
    assert metrics["in_scope_accuracy"] == pytest.approx(1 / 3)
    assert metrics["out_of_scope_recall"] == 0.5
    none = single_label_metrics(predicted[:2], labels[:2], out_of_scope=2)
    assert "out_of_scope_recall" not in none


def test_several_labels_are_counted_one_by_one() -> None:
    predicted, labels = np.array([[1, 0, 1], [1, 1, 0]]), np.array([[1, 0, 1], [0, 1, 0]])
    metrics = multi_label_metrics(predicted, labels)
    assert metrics["accuracy"] == 0.5
    assert metrics["micro_f1"] == pytest.approx(2 * 3 / (4 + 3))
    assert metrics["macro_f1"] == pytest.approx((2 / 3 + 1 + 1) / 3)


def test_a_label_by_itself_has_precision_recall_f1_and_its_rows() -> None:
    predicted, labels = np.array([0, 0, 1, -1]), np.array([0, 1, 1, 1])
    assert by_label(predicted, labels, ["ham", "spam", "none"]) == {
        "ham": {"precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3), "support": 1},
        "spam": {"precision": 1.0, "recall": pytest.approx(1 / 3), "f1": 0.5, "support": 3},
        "none": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0},
    }
    assert wrong_labels(predicted, labels).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("count", [1, 3])
def test_the_mean_f1_of_all_labels_is_macro_f1(count: int) -> None:
    predicted, labels = drawn(count + 1)
    figures = by_label(predicted, labels, [f"{n}" for n in range(count + 1)])
    mean = np.mean([each["f1"] for each in figures.values()])
    metrics = single_label_metrics(predicted, labels)
    assert mean == pytest.approx(metrics["macro_f1"])


def test_labels_of_a_multi_label_row_are_independent_even_if_there_is_one() -> None:
    predicted = np.array([[1, 0], [1, 1], [0, 0]])
    labels = np.array([[1, 1], [0, 1], [0, 0]])
    figures = by_label(predicted, labels, ["a", "b"])
    assert figures["a"] == {
        "precision": 0.5,
        "recall": 1.0,
        "f1": pytest.approx(2 / 3),
        "support": 1,
    }
    assert figures["b"] == {
        "precision": 1.0,
        "recall": 0.5,
        "f1": pytest.approx(2 / 3),
        "support": 2,
    }
    assert by_label(predicted[:, :1], labels[:, :1], ["a"]) == {"a": figures["a"]}
    assert wrong_labels(predicted, labels).tolist() == [1, 1, 0]


@pytest.mark.parametrize("labels", [1, 2, 3, 20])
@pytest.mark.parametrize("rows", [1, 2, 30, 500])
def test_figures_are_those_of_scikit_learn(labels: int, rows: int) -> None:
    from sklearn.metrics import f1_score, matthews_corrcoef, precision_recall_fscore_support

    rng = np.random.default_rng(rows)
    wanted = rng.integers(0, labels, rows)
    given = np.where(rng.random(rows) < 0.5, wanted, rng.integers(-1, labels, rows))
    metrics = single_label_metrics(given, wanted, f1_of={1: "f1_of_b"})
    varies = len(np.union1d(given, wanted)) > 1
    macro = {"average": "macro", "zero_division": 0}
    assert metrics["macro_f1"] == pytest.approx(f1_score(wanted, given, **macro), abs=1e-12)
    matthews = matthews_corrcoef(wanted, given) if varies else 0.0
    assert metrics["matthews"] == pytest.approx(matthews, abs=1e-12)
    if labels == 2:
        f1 = f1_score(wanted == 1, given == 1, zero_division=0)
        assert metrics["f1_of_b"] == pytest.approx(f1, abs=1e-12)
    names = [str(label) for label in range(labels)]
    figures_by_label = precision_recall_fscore_support(
        wanted, given, labels=range(labels), average=None, zero_division=0
    )
    for name, *figures in zip(names, *figures_by_label, strict=True):
        assert list(by_label(given, wanted, names)[name].values()) == pytest.approx(figures)


@pytest.mark.parametrize("rows", [1, 2, 30])
def test_figures_of_several_labels_are_those_of_scikit_learn(rows: int) -> None:
    from sklearn.metrics import accuracy_score, f1_score

    rng = np.random.default_rng(rows)
    given, wanted = (rng.integers(0, 2, (rows, 4)) for _ in range(2))
    metrics = multi_label_metrics(given, wanted)
    assert metrics["accuracy"] == pytest.approx(accuracy_score(wanted, given))
    for average in ("micro", "macro"):
        f1 = f1_score(wanted, given, average=average, zero_division=0)
        assert metrics[f"{average}_f1"] == pytest.approx(f1, abs=1e-12)


@pytest.mark.parametrize(
    ("labels", "positive", "names"),
    [
        (["0", "1"], None, {1: "f1_of_1"}),  # scikit-learn's pos_label=1
        (["False", "True"], None, {1: "f1_of_True"}),
        # scikit-learn refuses: "pos_label=1 is not a valid label".
        (["fraud", "legit"], None, {0: "f1_of_fraud", 1: "f1_of_legit"}),
        (["fraud", "legit"], "fraud", {0: "f1_of_fraud"}),
        (["a", "b", "c"], None, {}),
        (["a", "b", "c"], "b", {1: "f1_of_b"}),
        (["a/b", "a?b"], None, {0: "f1_of_a_b", 1: "f1_of_a_b_1"}),
    ],
)
def test_f1_is_named_after_its_label(
    labels: list[str], positive: str | None, names: dict[int, str]
) -> None:
    assert f1_names(labels, positive) == names


def test_the_names_of_metrics_are_taken_by_mlflow() -> None:
    from mlflow.utils.validation import _validate_metric_name

    for name in f1_names(["caf\u00e9 \u00fcber", "a/b?#%\n" * 100]).values():
        _validate_metric_name(name)
