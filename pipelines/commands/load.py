"""Sends requests to a server for a while, and times the answers.

A closed loop has some connections, each of which sends its next request as soon as the last one is
answered: it shows what a server can do. An open loop sends at a rate, at random intervals, whatever
comes back: it shows what users feel. Its latencies count from when a request was due, so that a
server that stalls is charged for all requests that would have been sent meanwhile ("coordinated
omission", G. Tene).
"""

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import aiohttp
import numpy as np

from bert_core.wording import in_one_line, shortened

OK = "ok"
"""Outcome of an answered request; other outcomes are its status or kind of failure."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where to send requests, and which."""

    url: str
    bodies: Sequence[bytes]
    """JSON, sent in turn."""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0


@dataclass(kw_only=True)
class Measured:
    """The measurements of one loop."""

    latencies_ms: list[float] = field(default_factory=list)
    """Latencies of answered requests."""
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    """Kind of failure → the message of its first request."""
    duration_s: float = 0.0
    client_cpu_s: float = 0.0
    """CPU time that asking took: near `duration_s`, the asking is what is slow."""

    @property
    def answered_per_s(self) -> float:
        return self.outcomes[OK] / self.duration_s if self.duration_s else 0.0

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the latencies in ms; NaN if nothing was answered."""
        return float(np.percentile(self.latencies_ms, percent)) if self.latencies_ms else np.nan


async def closed_loop(target: Target, connections: int, seconds: float) -> Measured:
    """Send requests over a number of connections, each as soon as its last one is answered."""
    measured, turns = Measured(), count()

    async def ask_until(session: aiohttp.ClientSession, end_s: float) -> None:
        while time.perf_counter() < end_s:
            await _ask(session, target, next(turns), time.perf_counter(), measured)

    async def loop(session: aiohttp.ClientSession) -> None:
        end_s = time.perf_counter() + seconds
        await asyncio.gather(*(ask_until(session, end_s) for _ in range(connections)))

    return await _timed(target, connections, measured, loop)


async def open_loop(target: Target, per_s: float, seconds: float, seed: int = 0) -> Measured:
    """Send requests at a fixed mean rate, at exponentially distributed intervals (a Poisson
    process)."""
    measured = Measured()
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(1 / per_s, size=int(per_s * seconds * 2) + 10))
    due_s = due_s[due_s < seconds]

    async def loop(session: aiohttp.ClientSession) -> None:
        began_s = time.perf_counter()
        asking = []
        for turn, after_s in enumerate(due_s):
            await asyncio.sleep(max(0.0, began_s + after_s - time.perf_counter()))
            asking.append(
                asyncio.create_task(_ask(session, target, turn, began_s + after_s, measured))
            )
        await asyncio.gather(*asking)

    return await _timed(target, 0, measured, loop)


async def _timed(
    target: Target,
    connections: int,
    measured: Measured,
    loop: Callable[[aiohttp.ClientSession], Awaitable[None]],
) -> Measured:
    """Run a loop with an HTTP session of its own; 0 connections means no limit."""
    connector = aiohttp.TCPConnector(limit=connections)
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    headers = {"Content-Type": "application/json", **target.headers}
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:
        began_s, used_s = time.perf_counter(), _cpu_s()
        await loop(session)
        measured.duration_s = time.perf_counter() - began_s
        measured.client_cpu_s = _cpu_s() - used_s
    return measured


async def _ask(
    session: aiohttp.ClientSession, target: Target, turn: int, due_s: float, measured: Measured
) -> None:
    body = target.bodies[turn % len(target.bodies)]
    try:
        async with session.post(target.url, data=body) as response:
            answer = await response.read()
            outcome = OK if response.status == 200 else str(response.status)
            if outcome != OK:
                said = shortened(in_one_line(answer.decode(errors="replace")))
                measured.reasons.setdefault(outcome, f"{outcome}: {said}" if said else outcome)
    except (aiohttp.ClientError, TimeoutError) as error:
        outcome = type(error).__name__
        why = f"no answer within {target.timeout_s:g} s" if str(error) == "" else str(error)
        measured.reasons.setdefault(outcome, in_one_line(why))
    if outcome == OK:
        measured.latencies_ms.append(1e3 * (time.perf_counter() - due_s))
    measured.outcomes[outcome] += 1


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
