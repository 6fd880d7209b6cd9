"""Makes parts of the API's documentation (OpenAPI): bodies, answers and errors of a path."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_args

import pydantic

from serve.request.errors import Error, RequestError
from serve.request.inflating import CODINGS
from serve.surfaces.base import JSON, Surface, refusal

GATEWAY = {
    408: "The body did not arrive in time.",
    503: "No process of the model is ready.",
    504: "The model's process did not answer in time.",
}
"""Statuses that HAProxy answers with, whatever the surface, as `serve.request.errors.Error`."""
_HEADERS: Mapping[str, Any] = {
    "Retry-After": {
        "description": "Seconds after which to try again.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    },
    "WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}},
    "Accept-Encoding": {"schema": {"const": ", ".join(CODINGS)}},
}


def responses(forms: Sequence[str], shape: Any = None) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of an endpoint's answers.

    Args:
        shape: type of the JSON, if it is to be documented.
    """
    remember(shape)
    binary = {"schema": {"type": "string", "format": "binary"}}
    answer: dict[str, Any] = {} if shape is None else {"model": shape}
    others = {form: binary for form in forms if form != JSON}
    return {200: answer | ({"content": others} if others else {})}


def refusals(
    surface: Surface, kinds: Iterable[type[RequestError]]
) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of a path's errors, by status."""
    reasons: dict[int, list[str]] = {status: [reason] for status, reason in GATEWAY.items()}
    extra: dict[int, dict[str, Any]] = {status: {} for status in GATEWAY}
    for kind in kinds:
        refused = refusal(surface, kind(""))
        reason = f"{(kind.__doc__ or '').partition('.')[0]}."
        reasons.setdefault(refused.status_code, []).append(reason)
        extra.setdefault(refused.status_code, {}).update(
            {name: _HEADERS[name] for name in _HEADERS if name in refused.headers}
        )
    return {
        status: {
            "description": " ".join(dict.fromkeys(reasons[status])),
            "headers": extra[status],
            "content": error_content(surface.error, *([Error] if status in GATEWAY else [])),
        }
        for status in sorted(reasons)
    }


def error_content(*kinds: type) -> dict[str, Any]:
    """Return the documentation of JSON of one of these types."""
    # NOTE: FastAPI would make a validator for every status of every path whenever an app is made.
    schemas = [schema_of(kind) for kind in dict.fromkeys(kinds)]
    return {JSON: {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}


def request_body(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the documentation of a JSON body with this schema."""
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema, **more}}}}


@cache
def remember(shape: Any) -> None:
    """Store pydantic's schema of a type's dataclasses on them, as pydantic does for its own
    classes.

    Otherwise FastAPI would make it anew for every path of every app.
    """
    for part in get_args(shape):
        remember(part)
    if is_dataclass(shape):
        shape.__pydantic_core_schema__ = pydantic.TypeAdapter(shape).core_schema  # type: ignore[union-attr]


@cache
def schema_of(kind: type) -> dict[str, Any]:
    """Return the JSON Schema of a type, without references, which OpenAPI would look up in its own
    document."""
    schema = pydantic.TypeAdapter(kind).json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str):
                return inlined(definitions[reference.rpartition("/")[2]])
            return {name: inlined(item) for name, item in value.items()}
        return [inlined(item) for item in value] if isinstance(value, list) else value

    described: dict[str, Any] = inlined(schema)
    return described
