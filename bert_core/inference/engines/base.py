"""Base class of the engines that run ONNX graphs; `export` writes the graphs.

A graph scores every token or row of padded rows; `GraphScores` says how the requested scores are
picked from these. A process that only runs graphs never imports torch.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np

from bert_core.collation import Arrays, buckets, collate, longest_row
from bert_core.data.windows import PAD_MULTIPLE, Window
from bert_core.errors import FormatError, ResourceError
from bert_core.objectives.graph_scores import GraphScores
from bert_core.scores import Backend

TOKENS_PER_THREAD = 512
"""Tokens per pass and thread: what operators pass to each other then stays in the cache."""
WIDTH_MULTIPLE = 16
"""Rows of a graph are padded to a multiple of this. It is larger than for torch: more of 32 to 64
waiting texts then pass together, and an engine prepares itself for fewer shapes."""
MOST_SCORES = 1 << 26
"""Most scores per pass: a masked-word head has one per vocabulary entry at every token."""


class GraphBackend(Backend):
    """An engine with a graph, on the CPU. Safe to call from several threads at once.

    The same window gets the same numbers in any batch: it is batched only with windows of its own
    padded width, and the engines compute each row of a product alike for any number of rows.
    """

    runs: ClassVar[Mapping[str, tuple[str, ...]]]
    """Precision that a graph was exported with → those that it can be run at."""

    def __init__(
        self,
        path: Path,
        graph_scores: GraphScores,
        positions: int,
        threads: int,
        precision: str = "fp32",
    ) -> None:
        """Load the graph.

        Args:
            graph_scores: the scores that its outputs are for.
            positions: the number of the encoder's positions.
            threads: threads that compute.
            precision: one of those in `runs` for the precision of the graph.
        Raises: ResourceError if the engine is not installed, or the CPU cannot compute at the
            precision; FormatError if the engine cannot run the graph, or the graph has another
            head.
        """
        check_installed(self.requirements, f"{path}: a graph for {self.engine}")
        super().__init__(
            graph_scores.objective, graph_scores.position_key, 1.0, TOKENS_PER_THREAD * threads
        )
        self.graph_scores, self.precision, self.threads = graph_scores, precision, threads
        self._inputs, outputs = self._open(path)
        self._longest = longest_row(positions)
        if not outputs.keys() >= set(graph_scores.outputs):
            raise FormatError(
                f"{path}: wanted a graph for {self.name} with the outputs "
                f"{', '.join(graph_scores.outputs)}, got {', '.join(outputs)}: export the model "
                "for this task"
            )
        scores = outputs[graph_scores.outputs[0]] or 1
        self.budget_tokens = max(PAD_MULTIPLE, min(self.budget_tokens, MOST_SCORES // scores))

    @abstractmethod
    def _open(self, path: Path) -> tuple[list[str], dict[str, int | None]]:
        """Load the graph; return the names of its inputs, and each output's name with the size of
        its last dimension, None if that is not fixed."""

    @abstractmethod
    def run(self, feed: Mapping[str, np.ndarray], names: Sequence[str]) -> list[np.ndarray]:
        """Run the graph and return the outputs with these names.

        Args:
            feed: a value for each of the graph's inputs.
        """

    def logits(self, batch: Arrays) -> np.ndarray:
        feed = {name: array for name, array in batch.items() if name in self._inputs}
        if "attention_mask" not in feed:
            feed["attention_mask"] = np.ones_like(feed["input_ids"])
        return self.graph_scores.of_batch(self.run(feed, self.graph_scores.outputs), batch)

    def computed_tokens(self, windows: Sequence[Window]) -> int:
        return sum(self._width([window]) * len(window.ids) for window in windows)

    def _collated(self, windows: Sequence[Window], pad_id: int) -> Arrays:
        return collate(windows, pad_id, width=self._width(windows))

    def _width(self, windows: Sequence[Window]) -> int:
        """Return the width to which the rows of windows that run together are padded."""
        tokens = max(len(ids) for window in windows for ids in window.ids)
        return max(tokens, min(-(-tokens // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, self._longest))

    def _groups(self, windows: Sequence[Window]) -> list[np.ndarray]:
        return groups_of_width(windows, self.budget_tokens)


def groups_of_width(windows: Sequence[Window], most_tokens: int) -> list[np.ndarray]:
    """Return the indices of the windows in groups of one padded width and at most `most_tokens`
    tokens each."""
    longest = np.array([max(map(len, window.ids)) for window in windows], dtype=np.int64)
    tokens = np.array([window.tokens for window in windows], dtype=np.int64)
    widths = -(-longest // WIDTH_MULTIPLE)
    return [
        members[group]
        for width in np.unique(widths)
        for members in [np.flatnonzero(widths == width)]
        for group in buckets(tokens[members], most_tokens)
    ]


def check_installed(packages: tuple[str, ...], purpose: str) -> None:
    """Check that packages are installed. Raises: ResourceError naming `purpose` and the missing
    packages."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ResourceError(
            f"{purpose} needs the packages {', '.join(packages)}, {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed: "
            "pip install --constraint constraints.txt '.[export]'"
        )


def is_installed(engine: str) -> bool:
    """Whether an engine's package, which has its name, is installed."""
    return find_spec(engine) is not None


def cannot_run(path: Path, engine: str, error: Exception) -> FormatError:
    """Return the error for a graph that an engine rejects."""
    return FormatError(
        f"{path}: wanted a graph that {engine} can run: {error}: export the bundle again, or "
        f"install another {engine.partition(' ')[0]}"
    )
