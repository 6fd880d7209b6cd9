"""Defines a surface: the routes that one family of clients calls, and the shape of its errors.

A surface turns a request into inputs of a task, and answers into a response. It depends neither on
Ray nor on where a model runs. `serve.http.app` mounts every surface under each model. The front has
the same paths at the root, and passes their requests on to a model.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import orjson
import pydantic
from fastapi import Request, Response

from bert_core.checks import Range, ranges_of
from bert_core.errors import InputError, TooLongError
from bert_core.tasks.base import Parameters
from bert_core.wording import one_of, shortened, shown
from serve.model.answers import Answered
from serve.model.card import Card
from serve.model.shared_passes import passes_of_request
from serve.model.sizes import SMALL
from serve.observe.records import Spent, record_of
from serve.observe.tracing import add_spans
from serve.request.accept import chosen
from serve.request.auth import Caller
from serve.request.complaint import complaint, unknown_key
from serve.request.errors import (
    CodingError,
    DeadlineError,
    NotAcceptableError,
    NotJSONError,
    RequestError,
    TooLargeError,
)
from serve.request.inflating import CODINGS
from serve.request.limits import Limits, check_size

if TYPE_CHECKING:
    from serve.model.model import Model

Ignored = Annotated[Any, "sent by clients of other servers; changes nothing here"]
"""Type of a field that is accepted and ignored."""
Texts = Annotated[list[str], pydantic.Field(min_length=1)]
Count = Annotated[int, pydantic.Field(ge=1)]
JSON = "application/json"
LONG_BODY_BYTES = 1 << 16
"""A larger body may have so much text that others should not wait while it is tokenized."""
FEW_TOKENS = 256
"""Answers to fewer tokens are written on the event loop: it takes less than a millisecond."""

Encoded = tuple[bytes, dict[str, str]]
"""A body, and headers of its own."""


class Body(pydantic.BaseModel):
    """A request's body: unknown keys are refused, values are not converted."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, protected_namespaces=())


Shape = TypeVar("Shape", bound=Body)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request to a model: its body, and who sent it."""

    model: "Model"
    request: Request
    body: bytes
    deadline_s: float | None
    prepared: Any = None
    """The value of the surface's `prepare` for this model."""
    caller: Caller | None = None
    """The owner of the request's key; None on a server without keys."""
    shadow: Callable[[str | None, list[Any], Parameters | None, Answered], None] | None = None
    """Has a candidate answer the same inputs."""
    card: Callable[[], Card]
    """Makes the model's card."""

    @property
    def is_long(self) -> bool:
        """Whether the texts of the body may take seconds to tokenize."""
        return len(self.body) > LONG_BODY_BYTES

    async def read(self, shape: type[Shape]) -> Shape:
        """Return the body, parsed into this class. Raises: NotJSONError, RequestError."""
        return await self.model.run(read, shape, self.body, here=len(self.body) <= SMALL)

    async def names(self, key: str) -> bool:
        """Whether the body is an object with this key. Raises: NotJSONError."""
        if key.encode() not in self.body:
            return False
        value = await self.model.run(parsed, self.body, here=len(self.body) <= SMALL)
        return isinstance(value, dict) and key in value

    def form(self, forms: Sequence[str] = (JSON,)) -> str:
        """Return the media type that the client prefers. Raises: NotAcceptableError if it accepts
        none of these."""
        accept = ", ".join(self.request.headers.getlist("accept"))
        form = chosen(accept, forms)
        if form is None:
            raise NotAcceptableError(
                f"Accept: wanted {one_of(forms)}, got {accept[:100]!r}: ask for one of these, "
                "or leave the header out"
            )
        return form

    async def answer(
        self,
        task: str | None,
        inputs: list[Any],
        parameters: Parameters | None,
        forms: Sequence[str] = (JSON,),
    ) -> Answered:
        """Return the model's answers, and count them for the caller and the records.

        Args:
            forms: media types in which they can be sent; empty if `Accept` does not decide that.
        Raises: NotAcceptableError; see `Model.answer`.
        """
        if forms:
            self.form(forms)  # before doing work in vain
        began_ns = time.time_ns()
        answered = await self.model.answer(
            inputs,
            parameters,
            task,
            self.deadline_s,
            are_long=self.is_long,
            passes=passes_of_request(),
        )
        if self.caller is not None:
            self.caller.charge(answered.tokens)
        if self.shadow is not None:
            self.shadow(task, inputs, parameters, answered)
        spent = Spent(
            tokens=answered.tokens,
            tokenize_s=answered.tokenize_s,
            queue_s=answered.queue_s,
            compute_s=answered.compute_s,
        )
        record_of(self.request).spent = spent
        add_spans(self.model.name, self.model.version_label, spent, began_ns)
        return answered

    async def beside_queue(
        self, work: Callable[[], tuple[int, bytes]], *, is_long: bool
    ) -> tuple[int, bytes]:
        """Run `work` off the event loop, without a place in the queue.

        `work` returns a number of tokens, which count towards the key's limit, and a body.
        Raises: DeadlineError; what `work` raises.
        """
        limit_s = self.model.limits.deadline_s if self.deadline_s is None else self.deadline_s
        try:
            async with asyncio.timeout(limit_s):
                tokens, body = await self.model.off_loop(work, is_long=is_long)
        except TimeoutError as error:
            raise DeadlineError(
                f"wanted an answer within {limit_s:g} s, the request has waited longer: send less "
                "at once, or allow more time"
            ) from error
        if self.caller is not None:
            self.caller.charge(tokens)
        return tokens, body

    def parameters(self, task: str, values: Mapping[str, Any]) -> Parameters:
        """Return the parameters of a task from values by name; those that are None keep their
        defaults.

        Raises: WrongTaskError if the model does not do the task; RequestError for a parameter that
            the task does not have, or of another type; InputError for an invalid value.
        """
        kind = self.model.predictor_for(task).task.parameters
        given = {name: value for name, value in values.items() if value is not None}
        values = self.model.usual(kind) | given
        names = [field.name for field in fields(kind)]
        for name in values:
            if name not in names:
                raise RequestError(f"{unknown_key('parameters', name, names)}: leave it out")
        check_top_k(values, self.model.limits)
        return parameters_of(kind, values)

    async def respond(self, answered: Answered, content: Callable[[], Any]) -> Response:
        """Return a response of `content` as JSON, which may take long to make, with the headers of
        `answered`."""
        return await self.send(answered, lambda: (_dumped(content()), {}), JSON)

    async def send(self, answered: Answered, make: Callable[[], Encoded], form: str) -> Response:
        """Return a response with the body that `make` gives, as the media type `form`, with the
        headers of `answered`."""
        body, extra = await self.model.run(make, here=answered.tokens < FEW_TOKENS)
        check_size(body, self.model.limits)
        return Response(body, 200, headers(self.model, answered) | extra, form)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The front's own response at a path that asks about the whole server."""

    content: Any
    """The body, as JSON."""
    runs_passes: bool = True
    """Whether every model must run a forward pass first; otherwise it is an error."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A path of a surface, below the model's URL and at the root."""

    path: str
    answer: Callable[[Call], Awaitable[Response]]
    task: str | None = None
    """The task that a model must do to answer it; None if any model can."""
    method: str = "POST"
    is_open: bool = False
    """Whether it needs no key: probes send none."""
    at_root: Probe | None = None
    """The front's answer, if the path asks about the whole server at the root."""
    body: type[Body] | None = None
    """Shape of the body, for the API's documentation."""
    shape: Any = None
    """Type of its answers as JSON, for the API's documentation."""
    forms: tuple[str, ...] = (JSON,)
    """Media types that its answers can have, for the API's documentation."""
    nameless: tuple[str, ...] = ()
    """Media types of bodies that are no JSON, and name no model."""
    summary: str = ""
    cut: Callable[[str], dict[str, Any]] = lambda name: {"parameters": {name: True}}
    """The part of a body that has long texts cut, by the task's name for it."""
    document: Callable[[Any], dict[str, Any]] | None = None
    """Arguments of the route for the API's documentation, from what the surface prepared; where
    `body` does not say enough."""

    def explained(self, error: Exception) -> Exception:
        """Return the error with advice that applies to this path."""
        if not isinstance(error, TooLongError) or error.cut_by is None:
            return error
        return RequestError(error.told(f"send {json.dumps(self.cut(error.cut_by))} too"))


@dataclass(frozen=True, kw_only=True)
class Surface:
    """A family of clients: the paths that they call, and the errors that they understand."""

    name: str
    endpoints: tuple[Endpoint, ...]
    refuse: Callable[[RequestError], tuple[int, Any]]
    """Status and body of an error, as these clients read it."""
    error: type
    """Type of that body, for the API's documentation."""
    prefixes: tuple[str, ...] = ()
    """Beginnings of paths that its clients call; errors of unknown ones have its shape, too."""
    prepare: Callable[["Model"], Any] = lambda model: None
    """Made once per model, for all calls."""


def parsed(body: bytes, example: Any = None) -> Any:
    """Return the JSON value of a body.

    It must be strict JSON in UTF-8, without a byte order mark, NaN or half a surrogate pair. The
    front and every surface parse bodies with this function, so that they agree on what a body says.
    Raises: NotJSONError.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        got = f"it is not JSON ({error})" if body.strip() else "it is empty"
        way_out = "" if example is None else f": send {json.dumps(example)}"
        raise NotJSONError(f"the body: wanted a JSON object, {got}{way_out}") from error


def read(shape: type[Shape], body: bytes) -> Shape:
    """Return a body, parsed into this class. Raises: NotJSONError, RequestError."""
    value = parsed(body)
    if not isinstance(value, dict):
        raise RequestError(f"the body: wanted a JSON object, got {shown(value)}")
    try:
        return shape.model_validate(value)
    except pydantic.ValidationError as error:
        raise RequestError(complaint(error, shape)) from error


_CHECKED: dict[type[Parameters], type[pydantic.BaseModel]] = {}


def checked(kind: type[Parameters]) -> type[pydantic.BaseModel]:
    """Return a pydantic model that checks the types of a task's parameters. It documents their
    ranges, which the parameters check themselves."""
    if kind not in _CHECKED:
        hints, ranges = get_type_hints(kind), ranges_of(kind)
        definitions: dict[str, Any] = {
            field.name: (hints[field.name], _default(field, ranges.get(field.name)))
            for field in fields(kind)
        }
        config = pydantic.ConfigDict(
            extra="forbid", strict=True, **getattr(kind, "__pydantic_config__", {})
        )
        _CHECKED[kind] = pydantic.create_model(kind.__name__, __config__=config, **definitions)
    return _CHECKED[kind]


def parameters_of(kind: type[Parameters], values: Mapping[str, Any], where: str = "") -> Parameters:
    """Return the parameters of a task with these values.

    Args:
        where: prefix of a parameter's name in a message.
    Raises: RequestError for a value of another type; InputError for a value out of range.
    """
    try:
        known = checked(kind).model_validate(values)
    except pydantic.ValidationError as error:
        raise RequestError(f"{where}{complaint(error)}") from error
    return kind(**known.model_dump(exclude_unset=True))


def _default(field: "Field[Any]", allowed: Range | None) -> Any:
    known = {} if allowed is None else {"minimum": allowed.least, "maximum": allowed.most}
    documented: dict[str, Any] = {
        name: number for name, number in known.items() if number is not None
    }
    if field.default_factory is not MISSING:
        return pydantic.Field(default_factory=field.default_factory, json_schema_extra=documented)
    default = ... if field.default is MISSING else field.default
    return pydantic.Field(default, json_schema_extra=documented)


def check_top_k(values: Mapping[str, Any], limits: Limits) -> None:
    """Check `top_k` against the limit. Raises: TooLargeError."""
    top_k = values.get("top_k")
    if isinstance(top_k, int) and top_k > limits.max_top_k:
        raise TooLargeError(f"top_k: wanted at most {limits.max_top_k}, got {top_k}: ask for fewer")


def check_distinct(where: str, names: Sequence[str]) -> None:
    """Check that no name occurs twice, since a value would be lost. Raises: RequestError."""
    for name, count in Counter(names).items():
        if count > 1:
            raise RequestError(
                f"{where}: wanted different names, got {shortened(name)!r} {count} times"
            )


def headers(model: "Model", answered: Answered | None = None) -> dict[str, str]:
    """Return the headers of the model that answered, with its times (`Server-Timing`, in
    milliseconds)."""
    named = {"X-Model": model.name, "X-Model-Digest": model.digest}
    if model.version:
        named["X-Model-Version"] = model.version
    if answered is None:
        return named
    spans = {
        "tokenize": answered.tokenize_s,
        "queue": answered.queue_s,
        "compute": answered.compute_s,
    }
    named["Server-Timing"] = ", ".join(f"{name};dur={s * 1e3:.2f}" for name, s in spans.items())
    named["X-Tokens"] = str(answered.tokens)
    if answered.space is not None:
        named["X-Vector-Space"] = answered.space
    if answered.hits is not None:
        all_or_none = {0: "miss", len(answered.answers): "hit"}
        named["X-Cache"] = all_or_none.get(answered.hits, "partial")
    if answered.cut:
        named["X-Cut-Inputs"] = cuts_of(answered)
    return named


def cuts_of(answered: Answered) -> str:
    """Return where texts were cut, as in the header: `0@512,3.text_pair@498`."""
    return ",".join(map(str, answered.cut))


def json_response(model: "Model", content: Any, status: int = 200) -> Response:
    """Return a response that needs no pass of the model."""
    return Response(orjson.dumps(content), status, headers(model), JSON)


def as_bad_request(error: RequestError) -> int:
    """Return the error's status; 400 in place of 413 and 422, for clients that only know 400."""
    return 400 if error.status in (413, 422) else error.status


def refusal(surface: Surface, error: Exception) -> Response:
    """Return the response to an error, in the surface's own shape."""
    if isinstance(error, InputError):
        error = RequestError(str(error))
    assert isinstance(error, RequestError)
    status, content = surface.refuse(error)
    extra = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if status == 401:
        extra["WWW-Authenticate"] = "Bearer"
    if isinstance(error, CodingError):  # RFC 9110, section 15.5.16
        extra["Accept-Encoding"] = ", ".join(CODINGS)
    # ASCII: a lone surrogate from a caller, repeated in a message, cannot be encoded as UTF-8.
    return Response(json.dumps(content), status, extra, JSON)


def _dumped(content: Any) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
