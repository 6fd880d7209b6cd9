"""Reads a request as it arrives: its body, within limits of size and time, and its deadline."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request

from serve.request.errors import (
    ClosedError,
    MediaTypeError,
    RequestError,
    SlowRequestError,
    TooLargeError,
)
from serve.request.inflating import coding_of
from serve.request.limits import Limits

TEXT_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
"""Types that a web page may post to any server without its consent."""
CODING = "content-encoding"
DEADLINE = "x-request-timeout-ms"
MAX_DIGITS = 18
"""Digits of a number that are read; more make it larger than any limit."""


def kind_of(request: Request) -> str:
    """Return the media type that the request gives for its body, without parameters; empty if
    missing."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def receive(request: Request, limits: Limits) -> bytes:
    """Return the request's body, decompressed if it came compressed.

    Raises: TooLargeError, SlowRequestError, MediaTypeError, CodingError; NotJSONError if it is not
        compressed in the way its header says; ClosedError if the client is gone.
    """
    kind = kind_of(request)
    # A web page may post without a type, as programs do, but programs send no Origin.
    is_of_page = kind in TEXT_TYPES or (not kind and "origin" in request.headers)
    if is_of_page and request.method == "POST":
        raise MediaTypeError(
            f"content-type: wanted application/json, got {kind or 'none'}: send the header "
            "Content-Type: application/json"
        )
    coding = coding_of(", ".join(request.headers.getlist(CODING)))
    declared = whole_number(request.headers.get("content-length", ""))
    if declared is not None and declared > limits.max_body_bytes:
        raise _too_large(limits, declared)
    body, received = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_timeout_s) as timeout:
            with receiving(request).counted(timeout):
                while (message := await request.receive())["type"] == "http.request":
                    part = message.get("body", b"")
                    received += len(part)
                    body += coding.feed(part, limits.max_body_bytes - len(body))
                    if max(received, len(body)) > limits.max_body_bytes:
                        raise _too_large(limits, max(received, len(body)))
                    if not message.get("more_body", False):
                        coding.end()
                        return bytes(body)
                    receiving(request).make_room(limits.max_receiving)
    except TimeoutError as error:
        raise SlowRequestError(
            f"the body: wanted all of it within {limits.body_timeout_s:g} s, got {received} "
            "bytes: send it again over a faster connection, or once fewer are being sent"
        ) from error
    raise ClosedError(
        f"the body: wanted all of it, the client closed its connection after {received} bytes"
    )


class Receiving:
    """The bodies that an application is receiving, counted because a slow sender takes a place from
    others."""

    def __init__(self) -> None:
        self._timeouts: dict[asyncio.Timeout, None] = {}  # in order of arrival

    @contextmanager
    def counted(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """Count a body that is received inside this context, until the given timeout."""
        self._timeouts[timeout] = None
        try:
            yield
        finally:
            self._timeouts.pop(timeout, None)

    def make_room(self, most: int) -> None:
        """Give up the body that began first, if more than `most` are being received."""
        if len(self._timeouts) > most:
            oldest = next(iter(self._timeouts))
            del self._timeouts[oldest]
            oldest.reschedule(0.0)


def receiving(request: Request) -> Receiving:
    """Return the bodies that the request's application is receiving."""
    state = request.app.state
    if not hasattr(state, "receiving"):
        state.receiving = Receiving()
    found: Receiving = state.receiving
    return found


def _too_large(limits: Limits, size_bytes: int) -> TooLargeError:
    return TooLargeError(
        f"the body: wanted at most {limits.max_body_bytes} bytes, got {size_bytes}: send several "
        "requests"
    )


def deadline_of(request: Request, limits: Limits) -> float:
    """Return the seconds within which the caller wants its answer. Raises: RequestError."""
    value = request.headers.get(DEADLINE)
    if value is None:
        return limits.deadline_s
    milliseconds = whole_number(value)
    if not milliseconds:
        raise RequestError(f"{DEADLINE}: wanted a whole number of milliseconds, got {value[:20]!r}")
    return min(limits.deadline_s, milliseconds / 1000)


def whole_number(value: str) -> int | None:
    """Return the whole number in a header's value; None if it is not one. Python refuses to read
    very long numbers, so they become a number beyond any limit."""
    if not (value.isascii() and value.isdigit()):
        return None
    return int(value.lstrip("0")[:MAX_DIGITS] or "0")
