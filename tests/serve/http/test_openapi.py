"""What the API's description says of errors and bodies; `test_schemas` holds the server to it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pydantic
import pytest

from serve.request.errors import (
    ClosedError,
    ForbiddenError,
    MethodError,
    RequestError,
    UnauthorizedError,
)
from serve.surfaces.base import Surface
from serve.surfaces.catalog import SURFACES

UNSEEN = (ClosedError, UnauthorizedError, ForbiddenError, MethodError)
"""Errors that a server without keys tells nobody who takes one of its paths and methods."""


@pytest.fixture(scope="module")
def paths(front: str) -> dict[str, Any]:
    """What `/openapi.json` says of each path."""
    text = httpx.get(f"{front}/openapi.json", timeout=30).text
    assert "#/$defs" not in text  # which is nowhere in it
    described: dict[str, Any] = json.loads(text)["paths"]
    return described


def kinds(of: type[RequestError] = RequestError) -> Iterator[type[RequestError]]:
    yield of
    for kind in of.__subclasses__():
        yield from kinds(kind)


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.name)
def test_every_error_is_described_in_the_shape_of_its_surface(
    surface: Surface, paths: dict[str, Any]
) -> None:
    shape: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(surface.error)
    posts = [each for each in surface.endpoints if each.method == "POST"]
    assert posts
    for kind in kinds():
        error = kind("wrong")
        status, body = surface.refuse(error)
        assert shape.dump_python(shape.validate_json(json.dumps(body))) == body
        for endpoint in posts if kind not in UNSEEN else []:
            described = paths[endpoint.path or "/"]["post"]["responses"][str(status)]
            assert "application/json" in described["content"]
            assert ("Retry-After" in described["headers"]) == (error.retry_after_s is not None)


def test_an_unsupported_method_is_answered_with_the_supported_ones(front: str) -> None:
    for method, path, allowed in (
        ("GET", "/embed", "POST"),
        ("PUT", "/", "GET, HEAD, POST"),
        ("OPTIONS", "/info", "GET, HEAD"),
        ("PUT", "/v1/models/text-classification", "GET, HEAD, POST"),
        ("DELETE", "/v1/models/text-classification/predict", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("POST", "/openapi.json", "GET, HEAD"),
    ):
        response = httpx.request(method, f"{front}{path}", timeout=30)
        assert (response.status_code, response.headers["Allow"]) == (405, allowed), path
        said = allowed if path == "/openapi.json" else allowed.replace(", HEAD", "")
        assert f"wanted the method {said.replace(', ', ' or ')}" in response.text


@pytest.mark.parametrize(
    "path",
    ["/", "/healthz", "/readyz", "/v1/models", "/v1/models/text-classification", "/info",
     "/openapi.json", "/v2/health/live", "/nothing", "/embed"],
)  # fmt: skip
def test_head_is_answered_as_get_without_the_body(front: str, path: str) -> None:
    """RFC 9110, 9.1: a server must support GET and HEAD; 9.3.2: the same header fields."""
    get, head = (httpx.request(method, f"{front}{path}", timeout=30) for method in ("GET", "HEAD"))
    assert (head.status_code, head.content) == (get.status_code, b"")
    names = ("Content-Type", "Content-Length", "Allow")
    assert [head.headers.get(name) for name in names] == [get.headers.get(name) for name in names]


def test_values_that_depend_on_the_model_are_described_below_its_url(paths: dict[str, Any]) -> None:
    def properties(path: str) -> dict[str, Any]:
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        found: dict[str, Any] = content["schema"]["properties"]
        return found

    for path in ("/v1/models/feature-extraction/embed", "/v1/models/feature-extraction"):
        assert properties(path)["dimensions"] == {"enum": [None, 32]}
        assert properties(path)["prompt_name"] == {"enum": [None]}
    assert properties("/embed")["dimensions"]["anyOf"][0] == {"minimum": 1, "type": "integer"}
    classes = properties("/v1/models/text-classification")["parameters"]["properties"]
    assert (classes["top_k"]["minimum"], classes["top_k"]["maximum"]) == (1, 100)
