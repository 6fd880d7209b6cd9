"""Compares the answers of a model and its candidate."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa

from bert_core.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """The two versions that are compared."""

    name: str
    """The model's name."""
    version: str
    digest: str
    candidate_version: str
    candidate_digest: str


@dataclass(kw_only=True)
class Tally:
    """Sums over the inputs that both models have answered."""

    inputs: int = 0
    decided: int = 0
    """Inputs whose answer is a decision: a label, a word, a span."""
    agreed: int = 0
    """Inputs that the candidate decided the same way."""
    scored: int = 0
    """Inputs whose scores can be compared: vectors, or scores of the same decision."""
    difference: float = 0.0
    """Sum of the mean absolute difference of scores; for vectors, of 1 - cosine."""
    requests: int = 0
    latency_ms: float = 0.0
    candidate_latency_ms: float = 0.0
    failed: int = 0
    """Requests that the candidate did not answer."""

    def add(self, other: "Tally") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the run; those that no input contributes to are left out."""
        values = {"inputs": float(self.inputs), "failed_requests": float(self.failed)}
        if self.decided:
            values["agreement"] = self.agreed / self.decided
        if self.scored:
            values["score_difference"] = self.difference / self.scored
        if self.requests:
            values["latency_ms"] = self.latency_ms / self.requests
            values["candidate_latency_ms"] = self.candidate_latency_ms / self.requests
        return values


Report = Callable[[Pairing, Tally], None]
"""Takes a replica's tally of a pairing."""


def compared(task: Task, answers: Sequence[Any], others: Sequence[Any]) -> Tally:
    """Return the tally of two models' answers to the same inputs."""
    tally = Tally(inputs=len(answers))
    decisions = [name for name, kind in task.cell_types.items() if not _is_score(kind)]
    for answer, other in zip(answers, others, strict=True):
        cells, other_cells = task.cells(_decoded(answer)), task.cells(_decoded(other))
        agrees = all(cells[name] == other_cells[name] for name in decisions)
        tally.decided += bool(decisions)
        tally.agreed += bool(decisions) and agrees
        if agrees and (differences := _differences(task, cells, other_cells)):
            tally.scored += 1
            tally.difference += sum(differences) / len(differences)
    return tally


def _decoded(answer: Any) -> Any:
    """Return the numbers of a vector in base64, or of several; any other answer unchanged."""
    if isinstance(answer, list) and answer and isinstance(answer[0], str):
        return [_decoded(each) for each in answer]
    if not isinstance(answer, str):
        return answer
    return np.frombuffer(base64.b64decode(answer), dtype="<f4").tolist()


def _is_score(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind.value_type if pa.types.is_list(kind) else kind)


def _differences(
    task: Task, cells: Mapping[str, Any], other_cells: Mapping[str, Any]
) -> list[float]:
    differences = []
    for name, kind in task.cell_types.items():
        if not _is_score(kind) or cells.get(name) is None or other_cells.get(name) is None:
            continue
        first, second = (
            np.atleast_1d(np.asarray(each[name], float)) for each in (cells, other_cells)
        )
        if first.shape != second.shape or not first.size:
            continue
        if kind == pa.list_(pa.float32()):  # a vector
            lengths = np.linalg.norm(first) * np.linalg.norm(second)
            differences.append(float(1 - first @ second / lengths) if lengths else 0.0)
        else:
            differences.append(float(np.abs(first - second).mean()))
    return differences
