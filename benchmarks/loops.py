"""Load on a server, and what comes of it: closed loops, open loops, and the highest rate within a
limit."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from pipelines.commands.load import OK, Measured, Target, closed_loop, open_loop

LIMIT_MS = 100.0
"""What the 99th percentile has to stay below for a rate to count as within the limit."""


class UnansweredError(RuntimeError):
    """A server refused or failed requests."""


def closed(target: Target, connections: int, seconds: float) -> Measured:
    """A closed loop. Raises: UnansweredError if any request failed: its rate would mean nothing."""
    measured = asyncio.run(closed_loop(target, connections, seconds))
    if set(measured.outcomes) != {OK}:
        raise UnansweredError(f"{target.url}: wanted answers alone, got {dict(measured.outcomes)}")
    return measured


def opened(target: Target, per_s: float, seconds: float) -> Measured:
    """An open loop at a rate."""
    return asyncio.run(open_loop(target, per_s, seconds))


def p99_of(measured: Measured) -> float:
    """The 99th percentile in ms; infinite if any request failed, which no percentile shows."""
    return measured.percentile_ms(99) if set(measured.outcomes) == {OK} else np.inf


def highest_rate(
    p99_at: Callable[[float], float], most: float, *, limit_ms: float = LIMIT_MS, tries: int = 5
) -> float:
    """The highest of some rates at which the 99th percentile is within the limit, by bisection.

    Args:
        p99_at: measures it in ms at a rate.
        most: a rate that it is not within the limit at, such as what a closed loop reaches.
        tries: rates to measure; what is found is within `most / 2**tries`.
    Returns: 0 if it was never within the limit.
    """
    low, high = 0.0, most
    for _ in range(tries):
        middle = (low + high) / 2
        if p99_at(middle) <= limit_ms:
            low = middle
        else:
            high = middle
    return low


def shown(measured: Measured) -> dict[str, Any]:
    """What a loop showed, for a result's settings."""
    failed = {name: number for name, number in measured.outcomes.items() if name != OK}
    return {
        "answers_per_s": round(measured.answered_per_s, 1),
        "p50_ms": round(measured.percentile_ms(50), 2),
        "p99_ms": round(measured.percentile_ms(99), 2),
        "client_cpus": round(measured.client_cpu_s / measured.duration_s, 3),
        **({"failed": failed} if failed else {}),
    }
