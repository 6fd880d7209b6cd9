"""Which engine computes a bundle's scores, and at which precision."""

import time
from collections.abc import Sequence
from pathlib import Path

from bert_core.bundle.format import Bundle
from bert_core.bundle.layout import WEIGHTS, Run
from bert_core.data.windows import Window
from bert_core.engines.base import is_installed
from bert_core.engines.catalog import ENGINES
from bert_core.errors import ConfigError
from bert_core.scores import Backend

AUTO = "auto"
"""Measures, and takes the fastest."""
ROUNDS = 3
"""Passes that are timed, after one that is not: the fastest counts."""
FULL_TOKENS = 2048
"""Tokens of a full batch, unless the texts are longer."""


def possible_runs(
    bundle: Bundle, where: Path | str, engine: str, precision: str | None
) -> list[Run]:
    """How a bundle may be run here by `engine`, `auto` meaning any, at `precision`, None meaning
    any that a graph may be run at, and fp32 for weights. Preferred ones first.

    Raises: ConfigError if it may not, or not here.
    """
    if bundle.graph is None:
        may = [Run("torch", "fp32"), Run("torch", "bf16")]
        wanted = [run for run in may if run.precision == (precision or "fp32")]
        way = "export it as a graph, or give the bundle that was exported"
        held = WEIGHTS
    else:
        may = list(bundle.runs)
        wanted = [run for run in may if precision in (None, run.precision)]
        way = "leave both out, or export the model again, with all engines installed"
        held = bundle.graph
    wanted = [run for run in wanted if engine in (AUTO, run.engine)]
    if not wanted:
        asked = f"backend {engine}" + ("" if precision is None else f" and precision {precision}")
        raise ConfigError(
            f"backend, precision: wanted one of {', '.join(map(str, may))} for {where}, which "
            f"holds {held}, got {asked}: {way}"
        )
    here = [run for run in wanted if run.engine not in ENGINES or is_installed(run.engine)]
    return here or wanted  # of those, loading one says what is missing


def seconds_per_token(backend: Backend, windows: Sequence[Window], pad_id: int) -> float:
    """How long a backend takes for a token in full batches, which decide what a loaded server
    bears; of a single text, the engines' times differ by a millisecond."""
    tokens = sum(window.tokens for window in windows)
    batch = list(windows) * max(1, FULL_TOKENS // tokens)
    times = []
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        backend.scores(batch, pad_id)
        times.append(time.perf_counter() - began)
    return min(times[1:]) / sum(window.tokens for window in batch)
