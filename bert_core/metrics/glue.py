"""GLUE: its sets, their scored metrics, the overall score, and the files that its server accepts.

Source: Wang et al. 2019, and gluebenchmark.com (the files of a submission and their contents).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bert_core.errors import ConfigError

LIKENESS = (0.0, 5.0)
"""Lowest and highest of STS-B's numbers."""
_YES_NO = ("0", "1")
_ENTAILED = ("entailment", "not_entailment")
_THREE = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True, kw_only=True)
class GlueSet:
    """A test set, and its file in a submission."""

    file: str
    """The file's name."""
    format: str
    """Its name in `labelled_formats.FORMATS`."""
    rows: int
    """Rows of the test set as it is published."""
    filler: str
    """The answer for every row if there is no model: the most frequent label."""
    labels: tuple[str, ...] = ()
    """Its labels as published; empty if rows have numbers."""
    metrics: tuple[str, ...] = ()
    """The metrics that count, by our names; none for the diagnostic set, which is not scored."""
    task: str | None = None
    """The task that it belongs to, if that has more than one set."""


SETS: dict[str, GlueSet] = {
    "cola": GlueSet(
        file="CoLA.tsv", format="cola", rows=1063, labels=_YES_NO, filler="1",
        metrics=("matthews",),
    ),
    "sst2": GlueSet(
        file="SST-2.tsv", format="sst2", rows=1821, labels=_YES_NO, filler="1",
        metrics=("accuracy",),
    ),
    "mrpc": GlueSet(
        file="MRPC.tsv", format="mrpc", rows=1725, labels=_YES_NO, filler="1",
        metrics=("f1_of_1", "accuracy"),
    ),
    "stsb": GlueSet(
        file="STS-B.tsv", format="stsb", rows=1379, filler="2.500",
        metrics=("pearson", "spearman"),
    ),
    "qqp": GlueSet(
        file="QQP.tsv", format="qqp", rows=390_965, labels=_YES_NO, filler="0",
        metrics=("f1_of_1", "accuracy"),
    ),
    "mnli": GlueSet(
        file="MNLI-m.tsv", format="mnli", rows=9796, labels=_THREE, filler="entailment",
        metrics=("accuracy",),
    ),
    "mnli_mismatched": GlueSet(
        file="MNLI-mm.tsv", format="mnli", rows=9847, labels=_THREE, filler="entailment",
        metrics=("accuracy",), task="mnli",
    ),
    "qnli": GlueSet(
        file="QNLI.tsv", format="qnli", rows=5463, labels=_ENTAILED, filler="entailment",
        metrics=("accuracy",),
    ),
    "rte": GlueSet(
        file="RTE.tsv", format="rte", rows=3000, labels=_ENTAILED, filler="entailment",
        metrics=("accuracy",),
    ),
    "wnli": GlueSet(
        file="WNLI.tsv", format="wnli", rows=146, labels=_YES_NO, filler="0",
        metrics=("accuracy",),
    ),
    "ax": GlueSet(
        file="AX.tsv", format="ax", rows=1104, labels=_THREE, filler="entailment", task="mnli",
    ),
}  # fmt: skip
SCORED_TASKS = [name for name, one in SETS.items() if one.task is None]


def task_scores(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the score of each task: the mean of its metrics; for MNLI, over both of its sets.

    Args:
        metrics: name of a set → its metrics.
    Returns: task → score, for tasks all of whose sets are given. The mean of all nine is GLUE's
        score.
    Raises: ConfigError if a set lacks a metric that is scored.
    """
    values: dict[str, list[float]] = {}
    for name, glue_set in SETS.items():
        if not glue_set.metrics:
            continue
        for metric in glue_set.metrics if name in metrics else ():
            if metric not in metrics[name]:
                raise ConfigError(
                    f"{name}: wanted {' and '.join(glue_set.metrics)}, got "
                    f"{', '.join(metrics[name]) or 'none'}: evaluate a model for this set's task"
                )
            values.setdefault(glue_set.task or name, []).append(metrics[name][metric])
    metrics_of = dict.fromkeys(SCORED_TASKS, 0)
    for name, glue_set in SETS.items():
        metrics_of[glue_set.task or name] += len(glue_set.metrics)
    return {
        task: sum(values[task]) / count
        for task, count in metrics_of.items()
        if len(values.get(task, [])) == count
    }


def submission_lines(answers: Sequence[str | float]) -> str:
    """Return the contents of a submission's file: a header, then each row's number, from 0, and its
    answer.

    Args:
        answers: labels as published, or numbers, which are clipped to STS-B's scale and written
            with three decimals.
    """
    low, high = LIKENESS
    shown = (
        answer if isinstance(answer, str) else f"{min(max(answer, low), high):.3f}"
        for answer in answers
    )
    lines = (f"{number}\t{answer}\n" for number, answer in enumerate(shown))
    return "".join(["index\tprediction\n", *lines])
