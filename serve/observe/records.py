"""Records requests and passes for metrics, the log and traces, but never a text.

`Observed` wraps an application, and handlers add what they know to `record_of(request)`. All other
events go to a `Recorder`; the class here does nothing, so that models and routes need no Ray. Log
lines go to Serve's logger, which writes text or JSON and adds the replica.
"""

import logging
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("ray.serve")

NONE = "-"
"""Stands for what a request has none of, as a model where it was refused before one was chosen. No
model can have this name."""
CLIENT_CLOSED, CANCELLED = 499, "cancelled"
"""Status and error of a request whose client went away; nobody receives them."""
PART = "x-part"
"""Header of a model's part of a request to several models (`serve.http.routes.joint`)."""
DEPENDENCY_FAILED, DROPPED = 424, "dropped"
"""Status and error of a part that was dropped, since another model refused its own or the client
went away; nobody receives them. The front records once that a client went away."""
PROBES = ("/healthz", "/readyz", "/metrics")
"""Ends of the routes that machines ask all the time: counted nowhere, logged only if they fail."""
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods that are recorded by their name; HEAD is recorded as GET."""
MAX_ID_LENGTH = 128
_KEY = "raybert.record"


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Tokens and times that the answers to a request took."""

    tokens: int
    """Tokens that were read, special ones included."""
    tokenize_s: float
    queue_s: float
    compute_s: float


@dataclass(kw_only=True)
class RequestRecord:
    """The record of a request. Except for numbers and the id, every value is from a small set."""

    method: str
    request_id: str | None = None
    route: str = NONE
    """The path, with names in place of the values of its parameters."""
    surface: str = NONE
    model: str = NONE
    version: str = NONE
    """As `Model.version_label`."""
    status: int = CLIENT_CLOSED
    error_type: str | None = None
    spent: Spent | None = None
    is_probe: bool = False
    was_forwarded: bool = False
    """Whether another application answers the request, and so records it."""
    began_s: float = field(default_factory=time.perf_counter)
    total_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A served model at some moment."""

    model: str
    version: str
    """As `Model.version_label`."""
    digest: str
    queue_tokens: int
    max_queue_tokens: int
    has_problem: bool
    """Whether the version that its alias points to is not served."""


class Recorder:
    """Receives events, from any thread; this class ignores them."""

    def finished(self, request: RequestRecord) -> None:
        """Record a request that has been answered or refused."""

    def passed(self, model: str, version: str, *, tokens: int, computed: int, fill: float) -> None:
        """Record a pass that has been computed.

        Args:
            tokens: tokens without padding.
            computed: tokens with padding.
            fill: share of a pass's token budget that the batch used.
        """

    def recalled(self, model: str, version: str, *, hits: int, misses: int) -> None:
        """Record that the inputs of a request were looked up in the cache.

        Args:
            hits: number of inputs that need not be computed.
            misses: number of different inputs that must be computed.
        """

    def rolled_over(self, model: str, version: str, change: str | None = None) -> None:
        """Record that this version answers from now on, in place of another.

        Args:
            change: the kind of change in its answers (`serve.model.changes`); None without any.
        """

    def watch(self, look: Callable[[], Snapshot]) -> None:
        """Look at a model's state from time to time."""

    def forget(self, look: Callable[[], Snapshot]) -> None:
        """Stop looking at the state of a model that is gone."""


NO_RECORDER = Recorder()


def record_of(request: Request) -> RequestRecord:
    """Return the record of a request, for its handler to add to."""
    return request.scope[_KEY]


class Observed:
    """Wraps an application, and records and logs every request once it is answered.

    It also answers if the application fails: Ray Serve and uvicorn would log an exception that they
    catch with its message.
    """

    def __init__(
        self, app: ASGIApp, *, recorder: Recorder, apology: Callable[[Request], Response]
    ) -> None:
        """Wrap `app`; `apology` makes the response to a request whose handler fails."""
        self._app, self._recorder, self._apology = app, recorder, apology

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else NONE
        record = RequestRecord(method=method, request_id=_request_id(scope))
        scope[_KEY] = record

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            request = Request(scope)
            log_failure(request, error)
            record.error_type = "internal"
            if record.status == CLIENT_CLOSED:  # the response has not begun
                await self._apology(request)(scope, receive, watched)
        finally:
            self._finish(record, scope)

    def _finish(self, record: RequestRecord, scope: Scope) -> None:
        record.total_s = time.perf_counter() - record.began_s
        record.route = _route(scope)
        record.is_probe |= record.route.endswith(PROBES)
        if record.status == CLIENT_CLOSED and _is_part(scope):
            record.status, record.error_type = DEPENDENCY_FAILED, DROPPED
        elif record.status == CLIENT_CLOSED:
            record.error_type = CANCELLED
        elif record.status >= 400 and record.error_type is None:
            record.error_type = "other"
        if record.was_forwarded:
            return
        if not record.is_probe:
            self._recorder.finished(record)
        _log(record)


def _route(scope: Scope) -> str:
    route = scope.get("route")
    return NONE if route is None else route.path or "/"


def _is_part(scope: Scope) -> bool:
    return any(name == PART.encode() for name, _ in scope["headers"])


def _request_id(scope: Scope) -> str | None:
    """Return the id that the client has given, without blanks, by which it could pass for other
    parts of a line of the log; None leaves it to Ray Serve."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return re.sub(r"\s", "_", value.decode("latin-1")[:MAX_ID_LENGTH])
    return None


def _log(record: RequestRecord) -> None:
    level = logging.DEBUG if record.is_probe and record.status < 400 else logging.INFO
    if not logger.isEnabledFor(level):
        return
    values: dict[str, Any] = {
        "model": record.model,
        "version": record.version,
        "surface": record.surface,
    }
    if record.error_type is not None:
        values["error_type"] = record.error_type
    values["total_ms"] = _ms(record.total_s)
    if record.spent is not None:
        values["tokens"] = record.spent.tokens
        values["tokenize_ms"] = _ms(record.spent.tokenize_s)
        values["queue_ms"] = _ms(record.spent.queue_s)
        values["compute_ms"] = _ms(record.spent.compute_s)
    shown = " ".join(f"{name}={value}" for name, value in values.items())
    # NOTE: Serve's JSON log has all of `extra`, its text log only the id.
    extra = {"method": record.method, "route": record.route, "status": record.status, **values}
    if record.request_id is not None:
        extra["request_id"] = record.request_id
    message = f"{record.method} {record.route} {record.status} {shown}"
    logger.log(level, "%s", message, extra=extra)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def log_failure(request: Request, error: BaseException) -> None:
    """Log which exceptions a request failed with, and where in the code."""
    where = _route(request.scope)
    logger.error("%s %s failed: %s", record_of(request).method, where, trace_of(error))


def trace_of(error: BaseException) -> str:
    """Return types and places in the code of an exception and its causes.

    Their messages are left out, since they hold excerpts of the data that they are about.
    """
    lines: list[str] = []
    known: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in known:
        known.add(id(cause))
        lines.append(f"{type(cause).__module__}.{type(cause).__qualname__}, raised at")
        lines += [line.rstrip() for line in traceback.format_tb(cause.__traceback__)]
        cause = cause.__cause__ or cause.__context__
    return "\n".join(lines)
