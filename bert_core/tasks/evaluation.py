"""The methods of a task with which evaluation compares its answers with labelled rows.

Every task implements `compare` and `metrics`; the others have defaults that follow from them.
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
    """A task whose answers can be evaluated."""

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
        """Return the columns for `metrics`, from labelled rows and the answers to them with default
        parameters."""

    @abstractmethod
    def metrics(self, columns: Columns) -> dict[str, float]:
        """Return all metrics by name, including the main metric, over at least one row."""

    def plain(self, rows: Sequence[Row]) -> list[Row] | None:
        """Return the inputs of labelled rows in the form in which most callers send them, to be
        evaluated too; None if the rows already have that form."""
        return None

    def compare_plain(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        """Return further columns for `metrics`, from the answers to the `plain` inputs of the
        rows."""
        raise NotImplementedError

    def main_metric(self, metrics: Collection[str]) -> str:
        """Return the metric that decides by default, for rows that have these metrics."""
        return self.primary_metric

    def is_comparable(self, other: "Evaluated") -> bool:
        """Whether metrics can rank a model for this task against a model for `other`."""
        return (self.name, self.chosen) == (other.name, other.chosen)

    def constant(self, rows: Sequence[Row]) -> Columns | None:
        """Return the columns of `compare` for the baseline: the best answer that ignores the input.

        None if there is no such answer.
        """
        return None

    def baseline(self, rows: Sequence[Row]) -> dict[str, float]:
        """Return the metrics of `constant`; empty if that is None."""
        columns = self.constant(rows)
        return {} if columns is None else self.metrics(columns)

    def by_class(self, columns: Columns) -> dict[str, dict[str, float]] | None:
        """Return per class `support` (its number of rows or other items), and `precision`, `recall`
        and `f1`, or `accuracy`; None if there are no classes.
        """
        return None

    def faults(self, columns: Columns) -> Num[np.ndarray, "rows"]:
        """Return how wrong the answer to each row is: 0 if it is right.

        By default, 1 minus the primary metric computed on that row only.
        """
        (rows,) = {len(column) for column in columns.values()}
        metrics_of_rows = (
            self.metrics({name: column[row : row + 1] for name, column in columns.items()})
            for row in range(rows)
        )
        return np.array([1.0 - metrics[self.primary_metric] for metrics in metrics_of_rows])

    def wrong(self, columns: Columns) -> Bool[np.ndarray, "rows"] | None:
        """Return which rows are answered wrong; None if answers are not right or wrong, but more or
        less close."""
        return self.faults(columns) > 0

    def confidence(self, answers: Sequence[Any]) -> Float[np.ndarray, "rows"] | None:
        """Return the probability that each answer states for itself; None if answers have none."""
        return None

    def claims(
        self, rows: Sequence[Row], answers: Sequence[Any]
    ) -> tuple[Float[np.ndarray, "claims"], Bool[np.ndarray, "claims"]] | None:
        """Return every probability whose calibration is checked, and whether the claim that it
        belongs to is right.

        By default, each row's answer is a claim. None if answers have no probabilities.
        """
        confidence = self.confidence(answers)
        if confidence is None:
            return None
        return confidence, self.faults(self.compare(rows, answers)) == 0
