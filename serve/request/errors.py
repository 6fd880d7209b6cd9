"""Why a request is not answered. `serve.surfaces` puts these into each client's own shape.

The first sentence of a class's docstring is its description in the API's documentation; the
rest says what a client can do, for docs/reference/errors.md.
"""

from dataclasses import dataclass
from typing import ClassVar

from bert_core.errors import RaybertError
from bert_core.wording import shortened

LONGEST_MESSAGE = 1_000
"""Characters of a message: it may name what was sent, but not send it back."""


@dataclass(frozen=True)
class Error:
    """The body of an error on a path that belongs to no surface, or to Hugging Face's."""

    error: str
    error_type: str


class RequestError(RaybertError):
    """The request cannot be answered. The message names the field, what was wanted and what came:
    correct it."""

    status: ClassVar[int] = 422
    error_type: ClassVar[str] = "invalid_request"
    retry_after_s: int | None = None
    """When to try again; None if trying again does not help."""

    def __str__(self) -> str:
        return shortened(str(self.args[0]), LONGEST_MESSAGE)


class NotJSONError(RequestError):
    """The body is not JSON. Send a JSON object, in UTF-8."""

    status = 400
    error_type = "not_json"


class MediaTypeError(RequestError):
    """The body claims to be something other than JSON. Send the header
    `Content-Type: application/json`."""

    status = 415
    error_type = "unsupported_media_type"


class CodingError(RequestError):
    """The body is compressed in a way that is not read here. Use one that the header
    `Accept-Encoding` names, or send the body as it is."""

    status = 415
    error_type = "unsupported_content_encoding"


class NotAcceptableError(RequestError):
    """The answer cannot be had in a form that the header `Accept` names. Ask for one that the
    message lists, or leave the header out."""

    status = 406
    error_type = "not_acceptable"


class SlowRequestError(RequestError):
    """The body did not arrive in time. Send it again over a faster connection, or once fewer are
    being sent."""

    status = 408
    error_type = "request_timeout"


class ClosedError(RequestError):
    """The client has closed its connection. Nobody sees the status, nginx's, but logs."""

    status = 499
    error_type = "client_closed"


class TooLargeError(RequestError):
    """The request exceeds a limit of the server. Send several requests, or shorter texts; a model's
    card has its limits."""

    status = 413
    error_type = "too_large"


class UnauthorizedError(RequestError):
    """There is no valid key. Send one in the header `Authorization: Bearer …`; the server's
    operator creates it, or another if it has expired."""

    status = 401
    error_type = "unauthorized"


class ForbiddenError(RequestError):
    """The key may not ask this model. Ask one that the message lists, or get a key for this one."""

    status = 403
    error_type = "forbidden"


class WrongTaskError(RequestError):
    """The model is not trained for what is asked of it. Ask another: `/v1/models` lists them."""

    error_type = "wrong_task"


class UnknownModelError(RequestError):
    """The request names a model that is not served here. Ask one that `/v1/models` lists."""

    status = 404
    error_type = "not_found"


class UnknownPathError(RequestError):
    """There is no such path. `/openapi.json` has those that there are."""

    status = 404
    error_type = "not_found"


class MethodError(RequestError):
    """The path has other methods. Send one that the header `Allow` names."""

    status = 405
    error_type = "method_not_allowed"


class OverloadedError(RequestError):
    """More work is waiting than the model may queue. Try again after `Retry-After`. A key
    that has reached its own limit gets this, too."""

    status = 429
    error_type = "overloaded"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s


class DeadlineError(RequestError):
    """The answer was not ready before the deadline. Send fewer texts at once, or try later."""

    status = 504
    error_type = "deadline_exceeded"


class NotReadyError(RequestError):
    """A model did not answer in time, or answered with an error. Try again after `Retry-After`."""

    status = 503
    error_type = "not_ready"
    retry_after_s = 5


class FailedError(NotReadyError):
    """The model failed at this request. Try again; if that fails too, its log says why."""

    error_type = "model_failed"


class OutOfMemoryError(NotReadyError):
    """There is not enough memory for this request. Send fewer or shorter texts at once."""

    error_type = "out_of_memory"


class InternalError(RequestError):
    """The server's own fault. Its log says where and of what type, under the request's id."""

    status = 500
    error_type = "internal"
