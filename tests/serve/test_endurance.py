"""After very many requests, good and bad, a server is as it was after some."""

import asyncio
import json
import random
import re
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.serve import live, odd_requests
from tests.serve.conftest import Separate
from tests.serve.live import Server
from tests.serve.wire import Wire, request, wires

pytestmark = pytest.mark.drill

SEED, CONNECTIONS = 20261125, 8
MODELS = ("text-classification", "feature-extraction")
WHOLE, SHORT = (20_000, 200_000), (2_000, 12_000)
"""After how many requests the server is looked at for the first time, and for the last."""
MOST_GROWTH = 0.1
SPARE = 8
"""File descriptors that may be open at one moment and not at another, such as HAProxy's idle
connections to replicas."""
HAPROXY_KEEPS = 512 << 10
"""Bytes of freed memory that each of HAProxy's threads may keep, by default
(`tune.memory.hot-size`); they accumulate slowly."""
SPARE_THREADS = 4
"""Threads that a pool starts when it first needs them, which may be after the first look."""
TITLE = re.compile(r"ray::Serve(Replica:(?P<app>[^:]+)|(?P<other>Controller))")


@dataclass(frozen=True)
class Use:
    """What a process uses."""

    bytes: int
    """Memory that is its own, not shared with a file."""
    descriptors: int
    threads: int


def uses(server: Server) -> dict[tuple[str, int], Use]:
    """What the server's processes use, by what they are and their ids, but for other models."""
    found = {}
    for pid in server.pids():
        process = psutil.Process(pid)
        title = TITLE.match(" ".join(process.cmdline()))
        if process.name() == "haproxy":
            name = "haproxy"
        elif title:
            name = title["app"] or "controller"
            if name.startswith("model-") and name.removeprefix("model-") not in MODELS:
                continue
        else:
            continue
        status = Path(f"/proc/{pid}/status").read_text()
        anonymous_kb = int(status.partition("RssAnon:")[2].split()[0])
        found[name, pid] = Use(anonymous_kb << 10, process.num_fds(), process.num_threads())
    return found


def good(rng: random.Random) -> bytes:
    """A request with texts that were not sent before, below a model's URL or at the root."""
    words = ["array", "socket", "port", "string", "JSON", "fox", "dog", str(rng.random())]
    texts = [
        " ".join(rng.choices(words, k=rng.randint(1, 40))) for _ in range(rng.choice([1, 1, 4]))
    ]
    name, path, key = rng.choice(
        [
            ("text-classification", "", "inputs"),
            ("feature-extraction", "", "inputs"),
            ("feature-extraction", "/v1/embeddings", "input"),
            (None, "/predict", "inputs"),
            (None, "/v1/embeddings", "input"),
        ]
    )
    value = [[text] for text in texts] if path == "/predict" else texts
    prefix = "" if name is None else f"/v1/models/{name}"
    return request("POST", prefix + path, json.dumps({key: value}).encode())


def failure(why: str) -> str:
    """The key that a failed request is counted under, which is also printed."""
    print(f"failed: {why}", file=sys.stderr, flush=True)
    return f"failed: {why}"


async def load(port: int, count: int, seed: int) -> Counter[str]:
    """Send so many requests. Returns: how many were good, odd, given up, and failed, by reason."""
    found: Counter[str] = Counter()
    odd = odd_requests.odd_requests(seed, count, big_every=2_000)
    numbers = iter(range(count))

    async def go_on(wire: Wire, rng: random.Random) -> None:
        for _ in numbers:
            kind = rng.random()
            try:
                if kind < 0.88:
                    reply = await wire.ask(good(rng))
                    found["good"] += 1
                    if reply.status != 200:
                        found[failure(f"{reply.status} {reply.body[:300]!r}")] += 1
                elif kind < 0.98:
                    sent = next(odd)
                    reply = await wire.ask(sent.bytes(), has_body=sent.method != "HEAD")
                    found["odd"] += 1
                    if reply.status >= 500 and reply.status != 504:
                        what = f"{sent.kind} at {sent.path}"
                        found[failure(f"{what}: {reply.status} {reply.body[:300]!r}")] += 1
                else:  # a client that goes away before it has sent all, or before it is answered
                    whole = good(rng)
                    await wire.send(whole[: rng.choice([50, len(whole) - 5, len(whole)])])
                    wire.close()
                    found["given up"] += 1
            except (OSError, TimeoutError) as error:
                wire.close()
                found[failure(repr(error))] += 1

    async with wires(port, CONNECTIONS) as opened:
        each = (go_on(wire, random.Random(seed + at)) for at, wire in enumerate(opened))
        await asyncio.gather(*each)
    return found


def test_memory_descriptors_and_threads_stay_as_they_are(separate: Separate, whole: bool) -> None:
    """A replica of 270 MiB may grow by 27: by 150 bytes or 2.7 kB a request."""
    server = separate.server
    first, last = WHOLE if whole else SHORT
    step = (last - first) // 4
    counts = asyncio.run(load(server.port, first, SEED))
    before = now = uses(server)
    assert {name for name, _ in before} >= {"haproxy", "front", *(f"model-{m}" for m in MODELS)}
    for place in range(1, 5):
        counts += asyncio.run(load(server.port, step, SEED + 100 * place))
        now = uses(server)
        report(first + step * place, before, now)
    assert counts.keys() == {"good", "odd", "given up"}, counts
    assert now.keys() == before.keys()  # nothing was replaced
    with suppress(AssertionError):  # idle connections close after a while
        live.eventually(lambda: grown(before, uses(server)) == [], timeout_s=30)
    assert grown(before, uses(server)) == []


def grown(
    before: dict[tuple[str, int], Use], now: dict[tuple[str, int], Use]
) -> list[tuple[tuple[str, int], Use, Use]]:
    """The processes that use more than they may, with what they used before."""
    return [
        (process, before[process], use)
        for process, use in now.items()
        if use.bytes > (1 + MOST_GROWTH) * before[process].bytes + kept_bytes(process[0], use)
        or use.descriptors > before[process].descriptors + SPARE
        or use.threads > before[process].threads + SPARE_THREADS
    ]


def kept_bytes(name: str, use: Use) -> int:
    """What a process may keep of the memory that it has freed."""
    return HAPROXY_KEEPS * use.threads if name == "haproxy" else 0


def report(count: int, before: dict[tuple[str, int], Use], now: dict[tuple[str, int], Use]) -> None:
    """What changed, for whoever runs this with -s."""
    for process, use in now.items():
        earlier = before.get(process, use)
        megabytes, growth = use.bytes / 2**20, use.bytes / earlier.bytes - 1
        print(
            f"{count:7} {process[0]:28} {megabytes:7.1f} MiB ({growth:+.2%}), "
            f"{use.descriptors} descriptors ({use.descriptors - earlier.descriptors:+d}), "
            f"{use.threads} threads ({use.threads - earlier.threads:+d})",
            file=sys.stderr,
            flush=True,
        )
