"""What holds on every surface: errors of paths that do not exist, and of values of other kinds."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import httpx
import pydantic
import pytest

from bert_core.errors import InputError
from bert_core.tasks.base import Parameters
from bert_core.tasks.catalog import TASKS
from serve.request.complaint import complaint
from serve.request.errors import RequestError
from serve.surfaces.base import Body, Surface, checked, parameters_of
from serve.surfaces.catalog import SURFACES

MESSAGE: dict[str, Callable[[Any], str]] = {
    "huggingface": lambda error: error["error"],
    "openai": lambda error: error["error"]["message"],
    "tei": lambda error: error["error"],
    "rerank": lambda error: error["message"],
    "open_inference": lambda error: error["error"],
    "invocations": lambda error: error["message"],
    "attention": lambda error: error["error"],
}
UNKNOWN = {
    "huggingface": "/anything",
    "openai": "/v1/chat/completions",
    "tei": "/embed/anything",
    "rerank": "/v2/chat",
    "open_inference": "/v2/models/docs/config",
    "invocations": "/invocations/anything",
    "attention": "/attention/anything",
}
"""A path that the surface's clients may call, and that there is not."""


def adapter(surface: Surface) -> "pydantic.TypeAdapter[Any]":
    return pydantic.TypeAdapter(surface.error)


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.name)
@pytest.mark.parametrize("base", ["", "/v1/models/text-classification"])
def test_an_unknown_path_is_an_error_in_its_surfaces_format(
    front: str, base: str, surface: Surface
) -> None:
    path = f"{base}{UNKNOWN[surface.name]}"
    response = httpx.post(f"{front}{path}", json={}, timeout=30)
    assert response.status_code == 404
    adapter(surface).validate_json(response.text, strict=True)
    told = MESSAGE[surface.name](response.json())
    assert told == f"POST {path}: there is no such path, see /openapi.json"


def test_openais_client_learns_that_there_is_no_chat(front: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{front}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="no such path") as caught:
        client.chat.completions.create(model="a", messages=[{"role": "user", "content": "a"}])
    assert (caught.value.type, caught.value.code) == ("invalid_request_error", "not_found")


@pytest.mark.parametrize("path", ["/v2", "/info", "/v1/models", "/v1/models/fill-mask"])
def test_a_slash_at_the_end_changes_nothing(front: str, path: str) -> None:
    plain, slashed = (httpx.get(f"{front}{each}", timeout=30) for each in (path, f"{path}/"))
    assert (plain.status_code, plain.json()) == (slashed.status_code, slashed.json())
    assert plain.status_code == 200


MANY = 2_049
"""One input more than a request may have."""


@pytest.mark.parametrize(
    ("path", "model", "body"),
    [
        ("", "text-classification", {"inputs": [7] * MANY}),
        ("/predict", "text-classification", {"inputs": [["a"] * 3] * MANY}),
        ("/v1/embeddings", "feature-extraction", {"input": [[7]] * MANY}),
        ("/v1/rerank", "text-ranking", {
            "query": "a", "documents": ["a"] * MANY, "max_tokens_per_doc": 1,
        }),
        ("/v2/models/{model}/infer", "feature-extraction", {"inputs": [
            {"name": name, "shape": [MANY], "datatype": "BYTES", "data": ["a"] * MANY}
            for name in ("text", "text_pair")
        ]}),
    ],
)  # fmt: skip
def test_too_many_inputs_are_refused_before_any_of_them_is_looked_at(
    front: str, path: str, model: str, body: dict[str, Any]
) -> None:
    """Each of them, or what is asked besides, has another fault, which would be reported. A body
    may have a million inputs: all other requests would wait."""
    url = f"{front}/v1/models/{model}{path.format(model=model)}"
    response = httpx.post(url, json=body, timeout=30)
    assert response.status_code in (400, 413)
    assert f"inputs: wanted at most 2048 per request, got {MANY}: send" in response.text


# -- values of another kind ------------------------------------------------------------------------

ODD: list[Any] = [None, True, 7, 7.5, "a", [], [7], ["a", 7], {}, {"a": 1}, [[1.5]], [{}], [[{}]]]


@dataclass(frozen=True)
class Field:
    """A field, on the way to which are others."""

    shape: type[Body]
    path: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.shape.__name__}.{'.'.join(self.path)}"


def bodies() -> Iterator[type[Body]]:
    kinds = {each.body for surface in SURFACES for each in surface.endpoints}
    some = (kind for kind in kinds if kind is not None)
    yield from sorted(some, key=lambda kind: (kind.__name__, kind.__module__))


def fields_of(shape: type[Body], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in shape.model_fields.items():
        yield (*above, name)
        for inner in inside(field.annotation):
            yield from fields_of(inner, (*above, name))


def inside(annotation: Any) -> Iterator[type[Body]]:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        yield annotation
    for part in get_args(annotation):
        yield from inside(part)


FIELDS = [Field(shape, path) for shape in bodies() for path in fields_of(shape)]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_value_of_the_wrong_kind_is_answered_with_the_expected_one(field: Field) -> None:
    for value in ODD:
        for name in field.path[::-1]:
            value = {name: value}
        try:
            field.shape.model_validate(value)
        except pydantic.ValidationError as error:
            told = complaint(error, field.shape)
            assert ": wanted " in told
            assert "Input should" not in told
            for fault in error.errors():  # whichever of them is told
                alone = pydantic.ValidationError.from_exception_data(
                    "a", [{"type": fault["type"], "loc": fault["loc"], "input": fault["input"],
                           "ctx": fault.get("ctx", {})}]
                )  # fmt: skip
                assert "Input should" not in complaint(alone, field.shape)


@pytest.mark.parametrize("name", TASKS)
def test_a_parameter_of_the_wrong_type_is_answered_with_the_expected_one(name: str) -> None:
    kind = TASKS[name].parameters
    for parameter in checked(kind).model_fields:
        told = [refusal_of(kind, {parameter: value}) for value in ODD]
        assert all(": wanted " in each for each in told if each)
        assert not any("Input should" in each for each in told)


def refusal_of(kind: type[Parameters], values: dict[str, Any]) -> str:
    """Empty if they are of the right kind."""
    try:
        parameters_of(kind, values)
    except (RequestError, InputError) as error:
        return str(error)
    return ""


def test_an_unknown_key_is_answered_with_the_keys_of_its_object(front: str) -> None:
    for path, body, message in (
        ("/similarity", {"inputs": {"source_sentence": "a", "sentence": []}},
         'inputs: wanted some of source_sentence, sentences, got "sentence" (did you mean'),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["a"]},
                         "parameters": {"trunc": True}},
         'parameters: wanted some of truncate, truncation_direction, '),
        ("/v2/embed", {"inputs": [{"content": [{"type": "text", "image_url": "a"}]}]},
         'inputs.0.content.0: wanted some of type, text, got "image_url"'),
    ):  # fmt: skip
        response = httpx.post(f"{front}{path}", json=body, timeout=30)
        assert message in json.dumps(response.json()).replace('\\"', '"')


# The table of clients in docs/serving/clients.md.

TABLE = re.findall(
    r"^\| (.+) \| (.+) \| `(\w+)\.py` \|$",
    (Path(__file__).parents[3] / "docs" / "serving" / "clients.md").read_text(),
    re.MULTILINE,
)


def paths_in(cell: str) -> set[str]:
    """The paths of a row; `…` stands for the last one that is written out."""
    paths: list[str] = []
    for quoted in re.findall(r"`([^`]+)`", cell):
        if quoted.startswith("/"):
            paths.append(quoted)
        elif quoted.startswith("…"):
            [whole] = [path for path in paths if path.endswith("{model}")]
            below = [path.removeprefix(whole) for path in paths if path.startswith(whole)]
            added = whole + quoted.removeprefix("…")
            paths += [added, *(added + path for path in below)] if "versions" in quoted else [added]
    return set(paths)


def test_the_documented_paths_are_the_existing_ones() -> None:
    documented = {name: paths_in(cell) for _, cell, name in TABLE}
    assert documented.keys() == {surface.name for surface in SURFACES}
    every = {each.path for surface in SURFACES for each in surface.endpoints}
    assert every - {""} == set().union(*documented.values())
    for surface in SURFACES:
        assert {each.path for each in surface.endpoints} - {""} <= documented[surface.name]


@pytest.mark.parametrize("name", sorted({name for clients, *_ in TABLE for name in
                                         re.findall(r"`(\w+)[^`]*`", clients)}))  # fmt: skip
def test_every_documented_client_is_in_a_test(name: str) -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert re.search(rf"\b{name}\b", tests)
