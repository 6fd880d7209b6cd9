"""The measures of a task: how evaluation compares its answers with labelled rows.

Every task has `compare` and `metrics`; the rest has defaults that follow from them.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float, Num

from bert_core.tasks.shapes import Row

Columns = dict[str, np.ndarray]
"""Input of metrics: arrays with one entry per row, so that any subset of rows has metrics."""


class Evaluated(ABC):
    """The measures of a task's answers."""

    name: ClassVar[str]
    chosen: Any
    primary_metric: str
    """The metric that decides between two models by default; higher is better."""
    lower_is_better: ClassVar[frozenset[str]] = frozenset()
    """Metrics that never decide between two models, because lower is better."""
    error_metric: ClassVar[str | None] = None
    """The one of `lower_is_better` that is an error in the unit of the rows' numbers, if there is
    one."""

    @abstractmethod
    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        """The columns for `metrics`, from labelled rows and their answers (with default
        parameters)."""

    @abstractmethod
    def metrics(self, columns: Columns) -> dict[str, float]:
        """All metrics by name, including the main one, over at least one row."""

    def plain(self, rows: Sequence[Row]) -> list[Row] | None:
        """The inputs of labelled rows as most callers send them, to be scored too; None if that is
        what the rows have."""
        return None

    def compare_plain(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        """Further columns for `metrics`, from the answers to the `plain` inputs of the rows."""
        raise NotImplementedError

    def main_metric(self, metrics: Collection[str]) -> str:
        """The metric that decides by default, for rows that have these metrics."""
        return self.primary_metric

    def is_comparable(self, other: "Evaluated") -> bool:
        """Whether metrics can rank a model for this task against a model for the other."""
        return (self.name, self.chosen) == (other.name, other.chosen)

    def constant(self, rows: Sequence[Row]) -> Columns | None:
        """`compare` for the best answer that ignores the input: the baseline.

        None if there is no such answer.
        """
        return None

    def baseline(self, rows: Sequence[Row]) -> dict[str, float]:
        """The metrics of `constant`; empty if that is None."""
        columns = self.constant(rows)
        return {} if columns is None else self.metrics(columns)

    def by_class(self, columns: Columns) -> dict[str, dict[str, float]] | None:
        """`precision`, `recall`, `f1`, or `accuracy`, and `support` (its number of rows or other
        items) per class; None if there are no classes.
        """
        return None

    def faults(self, columns: Columns) -> Num[np.ndarray, "rows"]:
        """How wrong the answer to each row is: 0 if it is right.

        By default, 1 minus the primary metric of the row alone.
        """
        (rows,) = {len(column) for column in columns.values()}
        metrics_of_rows = (
            self.metrics({name: column[row : row + 1] for name, column in columns.items()})
            for row in range(rows)
        )
        return np.array([1.0 - metrics[self.primary_metric] for metrics in metrics_of_rows])

    def wrong(self, columns: Columns) -> Bool[np.ndarray, "rows"] | None:
        """Which rows are answered wrong; None if answers are only nearer or farther, not right or
        wrong."""
        return self.faults(columns) > 0

    def confidence(self, answers: Sequence[Any]) -> Float[np.ndarray, "rows"] | None:
        """The probability that each answer assigns to itself; None if answers have none."""
        return None

    def claims(
        self, rows: Sequence[Row], answers: Sequence[Any]
    ) -> tuple[Float[np.ndarray, "claims"], Bool[np.ndarray, "claims"]] | None:
        """Every probability that calibration checks, and whether what it is assigned to is right.

        By default, that of each row's answer. None if answers have none.
        """
        confidence = self.confidence(answers)
        if confidence is None:
            return None
        return confidence, self.faults(self.compare(rows, answers)) == 0
