"""Decides which engine computes a bundle's scores, and at which precision."""

import time
from collections.abc import Sequence
from pathlib import Path

from bert_core.bundle.format import Bundle
from bert_core.bundle.layout import WEIGHTS, Execution
from bert_core.data.windows import Window
from bert_core.errors import ConfigError
from bert_core.inference.engines.base import is_installed
from bert_core.inference.engines.catalog import ENGINES
from bert_core.scores import Backend

AUTO = "auto"
"""Measures, and takes the fastest."""
ROUNDS = 3
"""Passes that are timed, after one that is not: the fastest counts."""
FULL_TOKENS = 2048
"""Tokens of a full batch, unless the texts are longer."""


def possible_executions(
    bundle: Bundle, where: Path | str, engine: str, precision: str | None
) -> list[Execution]:
    """Return the ways in which a bundle may be run here, preferred ones first.

    Args:
        where: the bundle, for messages.
        engine: the engine to use; `auto` allows any.
        precision: the precision to use; None allows any of a graph's, and fp32 for weights.
    Raises: ConfigError if the bundle may not be run so.
    """
    if bundle.graph is None:
        possible = [Execution("torch", "fp32"), Execution("torch", "bf16")]
        chosen = [way for way in possible if way.precision == (precision or "fp32")]
        way_out = "export it as a graph, or give the bundle that was exported"
        held = WEIGHTS
    else:
        possible = list(bundle.executions)
        chosen = [way for way in possible if precision in (None, way.precision)]
        way_out = "leave both out, or export the model again, with all engines installed"
        held = bundle.graph
    chosen = [way for way in chosen if engine in (AUTO, way.engine)]
    if not chosen:
        setting = f"backend {engine}" + ("" if precision is None else f" and precision {precision}")
        raise ConfigError(
            f"backend, precision: wanted one of {', '.join(map(str, possible))} for {where}, which "
            f"holds {held}, got {setting}: {way_out}"
        )
    installed = [way for way in chosen if way.engine not in ENGINES or is_installed(way.engine)]
    return installed or chosen  # loading one of `chosen` says what is missing


def seconds_per_token(backend: Backend, windows: Sequence[Window], pad_id: int) -> float:
    """Return how long a backend takes per token in full batches, which decide what load a server
    can take; for a single text, the engines differ by only a millisecond."""
    tokens = sum(window.tokens for window in windows)
    batch = list(windows) * max(1, FULL_TOKENS // tokens)
    times = []
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        backend.scores(batch, pad_id)
        times.append(time.perf_counter() - began)
    return min(times[1:]) / sum(window.tokens for window in batch)
