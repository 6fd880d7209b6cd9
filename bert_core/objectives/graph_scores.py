"""How each objective's scores are taken from the outputs of its ONNX graph, with NumPy alone.

A graph scores every token or row of padded rows (`Objective.every`). Here are the outputs that it
has, and how the scores of a batch (`Objective.logits`) are picked from them, so that a process that
runs graphs needs no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from jaxtyping import Float

Pick = Callable[[np.ndarray, Mapping[str, np.ndarray]], np.ndarray]
"""Takes the scores of every token or row, and the batch that they are for."""


@dataclass(frozen=True)
class GraphScores:
    """The scores of one objective, as its graph has them."""

    objective: str
    """`Objective.name`."""
    outputs: tuple[str, ...] = ("logits",)
    """Outputs of the graph, by optimum's names: the result of `Objective.every`, split along its
    last dimension if there are several names."""
    position_key: str | None = None
    """`Objective.position_key`."""
    pick: Pick | None = None
    """Selects the scores of the batch; None takes those of every row, or, with `position_key`,
    those of the tokens at the positions."""

    def of_batch(
        self, outputs: list[np.ndarray], batch: Mapping[str, np.ndarray]
    ) -> Float[np.ndarray, "..."]:
        """Return the scores of a padded batch.

        Args:
            outputs: what the graph gives for the batch, in the order of the names in `outputs`.
        """
        every = outputs[0] if len(outputs) == 1 else np.stack(outputs, axis=-1)
        if self.pick is not None:
            return self.pick(every, batch)
        return every if self.position_key is None else _tokens(every)[batch[self.position_key]]


def _tokens(every: np.ndarray) -> np.ndarray:
    """Return the values of all tokens, row after row."""
    return every.reshape(-1, every.shape[-1])


def _choices(
    every: np.ndarray, batch: Mapping[str, np.ndarray]
) -> Float[np.ndarray, "questions choices"]:
    """Return the scores of every question's choices, padded with -inf."""
    sizes = batch["choices"]
    real = np.arange(sizes.max()) < sizes[:, None]
    scores = np.full(real.shape, -np.inf, dtype=every.dtype)
    scores[real] = every[:, 0]
    return scores


def _means(every: np.ndarray, batch: Mapping[str, np.ndarray]) -> Float[np.ndarray, "items hidden"]:
    """Return the mean of each run of tokens.

    It averages each run in place: many times as fast as gathering the tokens of all runs first.
    """
    tokens = _tokens(every)
    runs = zip(batch["vector_starts"].tolist(), batch["vector_ends"].tolist(), strict=True)
    return np.stack([tokens[start:end].mean(0) for start, end in runs])


def _pairs(every: np.ndarray, batch: Mapping[str, np.ndarray]) -> Float[np.ndarray, "rows labels"]:
    """Return the scores of two tokens of each row, from the parts that `model.heads.PairHead` gives
    for every token."""
    tokens = _tokens(every)
    first, _ = np.split(tokens[batch["first_positions"]], 2, axis=-1)
    _, second = np.split(tokens[batch["second_positions"]], 2, axis=-1)
    return first + second


def _log_shares(every: np.ndarray, batch: Mapping[str, np.ndarray]) -> Float[np.ndarray, "items"]:
    """Return the log probability of the label at each chosen position; computed in fp64."""
    labels = batch["mlm_labels"]
    shares = np.empty(len(labels), dtype=np.float32)
    tokens = _tokens(every)
    for item, (place, label) in enumerate(zip(batch["mlm_positions"], labels, strict=True)):
        scores = tokens[place].astype(np.float64)
        best = scores.max()
        shares[item] = scores[label] - best - np.log(np.exp(scores - best).sum())
    return shares


CLASSIFICATION = GraphScores("classification")
NEXT_SENTENCE = GraphScores("nsp")
TOKEN_CLASSIFICATION = GraphScores("token_classification", position_key="token_positions")
SPAN = GraphScores("span", outputs=("start_logits", "end_logits"))
MULTIPLE_CHOICE = GraphScores("multiple_choice", pick=_choices)
MASKED_WORDS = GraphScores("mlm", position_key="mlm_positions")
LIKELIHOOD = GraphScores("mlm", position_key="mlm_positions", pick=_log_shares)
VECTORS = GraphScores(
    "embedding",
    outputs=("last_hidden_state",),
    position_key="vector_starts",
    pick=_means,
)
RELATIONS = GraphScores("relation_classification", pick=_pairs)
SPARSE_VECTORS = GraphScores("mlm", outputs=("sparse_embedding",))


@cache  # a task and its objective have the same one
def span_scores(labels: int, most: int) -> GraphScores:
    """Return the scores of spans of 1 to `most` units, by label, from what `model.heads.SpanHead`
    gives for every token."""
    pick = partial(_spans, labels=labels, most=most)
    return GraphScores("span_classification", position_key="token_positions", pick=pick)


def _spans(
    every: np.ndarray, batch: Mapping[str, np.ndarray], *, labels: int, most: int
) -> Float[np.ndarray, "units most labels"]:
    """Return the score of each span from each unit, by its length and label: -inf if it would end
    in another row."""
    positions = batch["token_positions"]
    tokens, rows = _tokens(every)[positions], positions // every.shape[1]
    units, size = len(tokens), (tokens.shape[1] - 2 * labels) // (labels + 1)
    starts = tokens[:, : labels * size].reshape(units, labels, size)
    ends = tokens[:, labels * size : -2 * labels]
    scores = np.full((units, most, labels), -np.inf, dtype=every.dtype)
    for more in range(min(most, units)):
        last = slice(more, None)
        paired = np.einsum("uld,ud->ul", starts[: units - more], ends[last])
        paired += tokens[: units - more, -2 * labels : -labels] + tokens[last, -labels:]
        inside = rows[: units - more] == rows[last]
        scores[: units - more, more][inside] = paired[inside]
    return scores
