"""The server as a user runs it, in the hands of those who mean it harm, or do not know better."""

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from serve.cluster.haproxy_launcher import SLOW_REQUEST_S
from serve.request.limits import Limits
from serve.surfaces.catalog import surface_of
from tests.serve import odd_requests
from tests.serve.live import Server
from tests.serve.odd_requests import Sent, good_requests
from tests.serve.wire import Reply, Wire, in_chunks, request, wires

pytestmark = pytest.mark.guard

SEED = 20261125
CONNECTIONS = 8
AT_ONCE_S = 5.0
"""A request that waits for longer is held up by somebody."""
NUMBER_OF_ANSWER = re.compile(rb'"id":"[0-9a-f-]{36}"')
LEAK = re.compile(rb'Traceback|site-packages|File \\?"|/tmp/|/root/|/home/|\.py\b|object at 0x')
HAPROXY = b"<html><body><h1>400 Bad request</h1>\nYour browser sent an invalid request.\n"
"""What HAProxy says to what is no HTTP."""
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "huggingface": {"error": str, "error_type": str},
    "openai": {"error": dict},
    "tei": {"error": str, "error_type": str},
    "rerank": {"message": str, "detail": str},
    "open_inference": {"error": str},
    "invocations": {"error_code": str, "message": str},
    "attention": {"error": str, "error_type": str},
}
"""Keys of each surface's errors."""


@pytest.fixture
def answers(together: Server) -> Iterator[dict[bytes, bytes]]:
    """Good requests, and what is answered to them; after the test the same is, by the same
    process."""
    found = asyncio.run(answered(together.port))
    loaded = {each["id"]: each["created"] for each in listed(together)}
    yield found
    assert asyncio.run(answered(together.port)) == found
    assert {each["id"]: each["created"] for each in listed(together)} == loaded
    assert httpx.get(f"{together.url}/readyz", timeout=30).status_code == 200


async def answered(port: int) -> dict[bytes, bytes]:
    async with wires(port, 1) as (wire,):
        found = {}
        for good in good_requests():
            reply = await wire.ask(good.bytes())
            assert reply.status == 200, (good, reply)
            found[good.bytes()] = content(reply)
        return found


def content(reply: Reply) -> bytes:
    """A body without what differs by design."""
    return NUMBER_OF_ANSWER.sub(b"", reply.body)


def listed(together: Server) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = httpx.get(f"{together.url}/v1/models", timeout=30).json()[
        "data"
    ]
    return entries


async def is_answered(wire: Wire, good: bytes, wanted: bytes) -> bool:
    reply = await wire.ask(good)
    return reply.status == 200 and content(reply) == wanted


# -- bodies ----------------------------------------------------------------------------------------


def complaint(sent: Sent, reply: Reply) -> str | None:
    """What is wrong with the answer to an odd request, if anything."""
    if reply.status >= 500 and not (reply.status == 504 and "X-Request-Timeout-Ms" in sent.headers):
        return "a server's error"
    if LEAK.search(reply.body) and not LEAK.search(sent.body):
        return "a path or a traceback"
    if reply.status == 400 and reply.body.startswith(HAPROXY):
        return None if may_be_no_http(sent) else "HTML"
    if sent.method == "HEAD" or reply.status == 307:
        return None
    if not reply.is_json:
        return "no JSON"
    try:
        value = json.loads(reply.body, parse_constant=refuse_constant)
    except ValueError:
        return "JSON that is none"
    return None if reply.status == 200 else odd_error(sent, value)


def may_be_no_http(sent: Sent) -> bool:
    """Whether HAProxy may refuse it: its path, method or a header is none."""
    return sent.kind in ("path", "method") or any(not v.isascii() for v in sent.headers.values())


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def odd_error(sent: Sent, value: Any) -> str | None:
    # Where no surface's path was asked, errors have the shape of the nearest.
    path = sent.path.partition("?")[0]
    nearest = surface_of(sent.method, path).name if path.startswith("/") else sent.surface
    shapes = [SHAPES[name] for name in (sent.surface, nearest, "huggingface")]
    if not any(
        isinstance(value, dict) and all(isinstance(value.get(k), t) for k, t in shape.items())
        for shape in shapes
    ):
        return "an error of another shape"
    error = value.get("error", value.get("message"))
    message = error["message"] if isinstance(error, dict) else error
    return None if 0 < len(message) <= 1_000 else "a message without end"


def test_after_every_odd_request_a_good_one_is_answered_as_before(
    together: Server, answers: dict[bytes, bytes], whole: bool
) -> None:
    odd = odd_requests.odd_requests(SEED, 20_000 if whole else 2_000)
    problems: list[str] = []
    statuses: Counter[int] = Counter()
    asked = list(answers.items())

    async def go_on(wire: Wire, turn: int) -> None:
        for sent in odd:
            turn += 1
            try:
                reply = await wire.ask(sent.bytes(), has_body=sent.method != "HEAD")
                statuses[reply.status] += 1
                if problem := complaint(sent, reply):
                    problems.append(f"{problem}: {sent!r:.300}\n  {reply!r:.400}")
                if not await is_answered(wire, *asked[turn % len(asked)]):
                    problems.append(f"another answer after {sent!r:.300}")
            except (OSError, TimeoutError) as error:
                problems.append(f"{error!r} after {sent!r:.300}")
                wire.close()

    async def all_of_them() -> None:
        async with wires(together.port, CONNECTIONS) as opened:
            await asyncio.gather(*(go_on(wire, place) for place, wire in enumerate(opened)))

    asyncio.run(all_of_them())
    assert not problems, f"{len(problems)} problems, such as\n" + "\n".join(problems[:20])
    assert {200, 400, 404, 405, 413, 415, 421, 422} <= statuses.keys()


def test_equal_seeds_give_equal_requests() -> None:
    first, second = (list(odd_requests.odd_requests(SEED, 500)) for _ in range(2))
    assert first == second
    assert first != list(odd_requests.odd_requests(SEED + 1, 500))


def test_a_text_of_megabytes_delays_nobody(together: Server, answers: dict[bytes, bytes]) -> None:
    """The longest text that may be sent takes seconds; others are answered meanwhile."""
    path = "/v1/models/token-classification"
    good, wanted = next(item for item in answers.items() if f" {path} ".encode() in item[0])

    async def both() -> int:
        async with wires(together.port, 2) as (one, other):
            long = asyncio.create_task(
                one.ask(
                    request("POST", path, b'{"inputs": "%s"}' % (b"- " * (2 << 20))[:4_194_000])
                )
            )
            meanwhile = 0
            while not long.done():
                assert await is_answered(other, good, wanted)
                meanwhile += not long.done()
            assert (await long).status == 413
            return meanwhile

    assert asyncio.run(both()) >= 10


# -- connections -----------------------------------------------------------------------------------

HEAD = b"POST /v1/models/text-classification HTTP/1.1\r\nHost: 127.0.0.1\r\n"
TYPED = HEAD + b"Content-Type: application/json\r\n"
BODY = b'{"inputs": "Open a socket."}'


def test_requests_that_do_not_come_to_an_end_hold_up_nobody_and_are_cut_off(
    together: Server, answers: dict[bytes, bytes]
) -> None:
    """Two that come byte by byte, some that are shorter than they say, and hundreds that stop in
    the middle of a long body."""

    async def scenario() -> None:
        await asyncio.gather(
            slow_and_short(together.port, answers), stopped(together.port, answers)
        )

    asyncio.run(scenario())


async def slow_and_short(port: int, answers: Mapping[bytes, bytes]) -> None:
    slow = [TYPED + b"Content-Length: 500\r\n\r\n" + b'{"inputs": "', HEAD + b"X-A: "]

    async def drip(wire: Wire, beginning: bytes) -> bytes:
        await wire.send(beginning)
        cut_off = asyncio.create_task(wire.until_closed())
        while not cut_off.done():
            await asyncio.wait([cut_off], timeout=1)
            if not cut_off.done():
                await wire.send(b"a")
        return await cut_off

    async with (
        wires(port, len(slow)) as opened,
        wires(port, 3) as (quick, short, ended),
    ):
        for wire in (short, ended):  # their bodies are shorter than they say
            await wire.send(TYPED + b"Content-Length: 500\r\n\r\n" + BODY)
        ended.end()  # no more will come
        began_s = time.monotonic()
        dripping = [
            asyncio.create_task(drip(wire, beginning))
            for wire, beginning in zip(opened, slow, strict=True)
        ]
        while time.monotonic() < began_s + SLOW_REQUEST_S - AT_ONCE_S:
            assert not any(each.done() for each in dripping)
            for good, wanted in answers.items():
                async with asyncio.timeout(AT_ONCE_S):
                    assert await is_answered(quick, good, wanted)
        ends = await asyncio.gather(*dripping)
        assert (await short.until_closed()).startswith(b"HTTP/1.1 408 ")
        assert await ended.until_closed() == b""
        assert time.monotonic() < began_s + 2 * SLOW_REQUEST_S
    for beginning, end in zip(slow, ends, strict=True):
        assert end.startswith(b"HTTP/1.1 408 ")
        if b"Content-Length" in beginning:  # of headers alone HAProxy says so in HTML
            body = end.partition(b"\r\n\r\n")[2]
            assert json.loads(body)["error_type"] == "request_timeout"


async def stopped(port: int, answers: Mapping[bytes, bytes]) -> None:
    """HAProxy passes on a body of more than 16 kB before it has all of it."""
    beginning = TYPED + b"Content-Length: 50000\r\n\r\n" + b'{"inputs": "' + b"a" * 20_000
    async with wires(port, 300) as opened, wires(port, 1) as (quick,):
        for wire in opened:
            await wire.send(beginning)
        replies = [asyncio.create_task(wire.reply()) for wire in opened]
        for good, wanted in answers.items():
            async with asyncio.timeout(AT_ONCE_S):
                assert await is_answered(quick, good, wanted)
        kept = Limits().max_receiving
        assert sum(not each.done() for each in replies) <= kept
        assert {(await reply).status for reply in replies} == {408}


SMUGGLED = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
CHUNKS = b"".join(in_chunks(BODY, 7))
REFUSED: dict[str, bytes] = {
    "a negative length": b"Content-Length: -5\r\n\r\n" + BODY,
    "a length with a sign": b"Content-Length: +28\r\n\r\n" + BODY,
    "a hexadecimal length": b"Content-Length: 0x1c\r\n\r\n" + BODY,
    "a length that is no number": b"Content-Length: many\r\n\r\n" + BODY,
    "a length of 24 digits": b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    "two lengths": b"Content-Length: 28\r\nContent-Length: 5\r\n\r\n" + BODY,
    "two lengths in one": b"Content-Length: 28, 5\r\n\r\n" + BODY,
    "an unknown encoding": b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS + SMUGGLED,
    "two encodings": b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS + SMUGGLED,
    "encodings in two lines": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n"
    + CHUNKS,
    "a blank before the colon": b"Transfer-Encoding : chunked\r\n\r\n" + CHUNKS,
    "a control character": b"Transfer-Encoding: \x0bchunked\r\n\r\n" + CHUNKS,
    "a chunk that is none": b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "a chunk below zero": b"Transfer-Encoding: chunked\r\n\r\n-1\r\nabc\r\n0\r\n\r\n",
    "a chunk beyond all": b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\na\r\n0\r\n\r\n",
    "5,000 headers": b"".join(b"X-%d: a\r\n" % number for number in range(5_000)) + b"\r\n",
    "a header of a megabyte": b"X: " + b"a" * 1_000_000 + b"\r\n\r\n",
    "a header without a name": b": a\r\nContent-Length: 28\r\n\r\n" + BODY,
    "NUL in a header": b"X: a\0b\r\nContent-Length: 28\r\n\r\n" + BODY,
    "two hosts": b"Host: example.com\r\nContent-Length: 28\r\n\r\n" + BODY,
}
"""What follows the first headers of a request."""


def test_a_request_whose_end_is_in_doubt_is_refused_and_its_connection_closed(
    together: Server, answers: dict[bytes, bytes]
) -> None:
    asked = list(answers.items())

    async def refused(place: int, what: str) -> None:
        async with wires(together.port, 2) as (wire, other):
            await wire.send(TYPED + REFUSED[what])
            statuses = re.findall(rb"HTTP/1.1 (\d+)", await wire.until_closed())
            assert statuses in ([b"400"], [b"422"]), what
            assert await is_answered(other, *asked[place % len(asked)]), what

    async def scenario() -> None:
        await asyncio.gather(*(refused(place, what) for place, what in enumerate(REFUSED)))

    asyncio.run(scenario())


def test_a_length_that_is_too_small_yields_no_second_answer(
    together: Server, answers: dict[bytes, bytes]
) -> None:
    """What is left over is a request of its own, of the same client, as HTTP says."""

    async def scenario(length: int) -> list[bytes]:
        async with wires(together.port, 1) as (wire,):
            await wire.send(TYPED + b"Content-Length: %d\r\n\r\n" % length + BODY)
            return re.findall(rb"HTTP/1.1 (\d+)", await wire.until_closed())

    assert asyncio.run(scenario(5)) == [b"400", b"400"]
    assert asyncio.run(scenario(len(BODY) - 1)) == [b"400", b"400"]


def test_chunks_win_over_a_length_and_end_the_connection(
    together: Server, answers: dict[bytes, bytes]
) -> None:
    async def scenario() -> bytes:
        async with wires(together.port, 1) as (wire,):
            head = TYPED + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
            await wire.send(head + CHUNKS + SMUGGLED)
            return await wire.until_closed()

    assert re.findall(rb"HTTP/1.1 (\d+)", asyncio.run(scenario())) == [b"200"]


def test_requests_that_are_sent_at_once_are_answered_in_order(
    together: Server, answers: dict[bytes, bytes]
) -> None:
    order = random.Random(SEED).choices(list(answers), k=20)

    async def scenario() -> list[bytes]:
        async with wires(together.port, 1) as (wire,):
            await wire.send(b"".join(order))
            return [content(await wire.reply()) for _ in order]

    assert asyncio.run(scenario()) == [answers[good] for good in order]


def test_a_hundred_headers_and_one_of_14_kb_are_no_flood(
    together: Server, answers: dict[bytes, bytes]
) -> None:
    async def scenario() -> list[int]:
        async with wires(together.port, 1) as (wire,):
            path = "/v1/models/text-classification"
            many = {f"X-{number}": "a" for number in range(90)}
            return [
                (await wire.ask(request("POST", path, BODY, headers))).status
                for headers in (many, {"X": "a" * 14_000}, many)
            ]

    assert asyncio.run(scenario()) == [200, 200, 200]
