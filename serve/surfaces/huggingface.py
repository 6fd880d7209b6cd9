"""Hugging Face's inference API, as `huggingface_hub.InferenceClient` and Chroma call it.

`POST` to the model's URL: `{"inputs": …, "parameters": {…}}`, an input of the task or a list of
them, checked against the task's dataclasses; parameters may be next to `inputs` if Hugging Face's
schema allows it for the task. `options` is accepted and ignored; other keys are rejected. Of the
tasks that a model does, a body is for the first whose inputs and parameters it has.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from fastapi import Response

from bert_core.tasks.base import Parameters, Task
from bert_core.tasks.shapes import as_row
from bert_core.wording import as_json, nearest, shown
from serve.model.sizes import SMALL
from serve.request.complaint import unknown_key
from serve.request.errors import Error, RequestError
from serve.request.limits import Limits, check_count
from serve.surfaces import vectors
from serve.surfaces.base import (
    JSON,
    Call,
    Endpoint,
    Probe,
    Surface,
    check_top_k,
    checked,
    json_response,
    parameters_of,
    parsed,
)
from serve.surfaces.openapi import request_body, responses, schema_of

if TYPE_CHECKING:
    from serve.model.model import Model

IGNORED = frozenset({"options", "model"})
"""Keys that clients of other servers send, and that change nothing here."""


HEALTHY = {"status": "ok"}


@dataclass(frozen=True)
class PredictRequest:
    """A validated body."""

    inputs: list[Any]
    several: bool
    """Whether the inputs were given as a list."""
    parameters: Parameters | None


class Shapes:
    """A task's request and response over HTTP, derived from its dataclasses."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._parameters = task.parameters
        self._checked = checked(task.parameters)
        answers = get_type_hints(task.decode)["return"]
        (answer,) = get_args(answers)
        self.response: Any = answers | answer if task.single_is_bare else answers
        """Type of the response body."""

    def openapi(self, limits: Limits) -> dict[str, Any]:
        """Return the request schema for the model's OpenAPI page."""
        single = schema_of(self._task.inputs) | {"additionalProperties": False}
        one_text = [{"type": "string"}] if len(single.get("required", ())) <= 1 else []
        kinds = [*one_text, single]
        several = {"type": "array", "items": {"anyOf": kinds}, "minItems": 1}
        parameters = schema_of(self._checked) | {"type": ["object", "null"]}
        if "top_k" in (known := parameters["properties"]):
            bounded = known["top_k"] | {"maximum": limits.max_top_k}
            parameters["properties"] = known | {"top_k": bounded}
        schema = {
            "type": "object",
            "required": ["inputs"],
            "additionalProperties": False,
            "properties": {
                "inputs": {"anyOf": [*kinds, several]},
                "parameters": parameters,
                **(parameters["properties"] if self._task.parameters_at_root else {}),
                **{name: {} for name in sorted(IGNORED)},
            },
        }
        return request_body(schema, example=self.example)

    @property
    def forms(self) -> tuple[str, ...]:
        """Media types that answers can have."""
        return vectors.FORMS.get(self._task.name, (JSON,))

    @property
    def example(self) -> dict[str, Any]:
        """A body, as shown in docs and messages."""
        return {"inputs": self._task.examples[0]}

    @property
    def _way_out(self) -> str:
        return f"send {json.dumps(self.example)}, or a list of such inputs"

    def fits(self, request: Mapping[str, Any]) -> bool:
        """Whether a body has an input of this task, and no parameter that the task lacks."""
        parameters = request.get("parameters")
        chosen = set(parameters) if isinstance(parameters, dict) else set()
        if self._task.parameters_at_root:
            chosen |= request.keys() - {"inputs", "parameters", *IGNORED}
        if not chosen <= set(self._checked.model_fields):
            return False
        inputs = request.get("inputs")
        first = inputs[0] if isinstance(inputs, list) and inputs else inputs
        names = {field.name for field in fields(self._task.inputs)}
        return not isinstance(first, dict) or first.keys() <= names

    def check(
        self, request: Any, limits: Limits, usual: Mapping[str, Any] | None = None
    ) -> PredictRequest:
        """Validate the JSON value of a body.

        Args:
            usual: the parameters that apply where a request gives none.
        Raises: RequestError.
        """
        if not isinstance(request, dict):
            raise RequestError(
                f"the body: wanted a JSON object, got {shown(request)}: {self._way_out}"
            )
        at_top = self._checked.model_fields if self._task.parameters_at_root else ()
        unknown = sorted(request.keys() - {"inputs", "parameters", *at_top, *IGNORED})
        if unknown:
            raise RequestError(
                f'the body: wanted the keys "inputs" and "parameters", got {as_json(unknown[0])} '
                f"too{nearest(unknown[0], [*at_top, 'inputs', 'parameters'])}: leave it out, or "
                "put a parameter of the task under parameters"
            )
        if "inputs" not in request:
            raise RequestError(f'the body: wanted the key "inputs", it is missing: {self._way_out}')
        inputs = request["inputs"]
        several = isinstance(inputs, list)
        if several and not inputs:
            raise RequestError("inputs: wanted at least one input, got an empty list")
        check_count(inputs if several else [inputs], limits)  # before each input is looked at
        rows = [
            as_row(self._task.inputs, value, f"inputs[{place}]" if several else "inputs")
            for place, value in enumerate(inputs if several else [inputs])
        ]
        top_level = {name: request[name] for name in at_top if name in request}
        given = request.get("parameters")
        parameters = self._parse_parameters(given, top_level, limits, usual or {})
        return PredictRequest(rows, several, parameters)

    def body(self, request: PredictRequest, answers: list[Any]) -> Any:
        """Return the response body: a list, or for a single input a bare answer if the task answers
        so."""
        return answers[0] if self._task.single_is_bare and not request.several else answers

    def _parse_parameters(
        self,
        values: Any,
        top_level: dict[str, Any],
        limits: Limits,
        usual: Mapping[str, Any],
    ) -> Parameters | None:
        if values is None and not top_level and not usual:
            return None
        if values is not None and not isinstance(values, dict):
            raise RequestError(f"parameters: wanted a JSON object, got {shown(values)}")
        if top_level:  # also those that `parameters` overrides
            parameters_of(self._parameters, top_level, "parameters.")
        values = {**usual, **top_level, **(values or {})}
        check_top_k(values, limits)
        names = list(self._checked.model_fields)
        for name in values:
            if name not in names:
                raise RequestError(unknown_key("parameters", name, names))
        return parameters_of(self._parameters, values, "parameters.")


class Bodies:
    """The shapes of every task that a model does, its own first."""

    def __init__(self, model: "Model") -> None:
        self._model = model  # whose limits may change
        self._shapes = {
            name: Shapes(predictor.task) for name, predictor in model.predictors.items()
        }
        self.own = self._shapes[model.task.name]

    def parse(self, body: bytes) -> tuple[str, Shapes, PredictRequest]:
        """Return the task that a body is for, and the checked body. Raises: NotJSONError,
        RequestError."""
        request = parsed(body, self.own.example)
        names = list(self._shapes)
        if isinstance(request, dict):
            names = [name for name in names if self._shapes[name].fits(request)] or names
        shapes = self._shapes[names[0]]
        usual = self._model.usual(self._model.predictors[names[0]].task.parameters)
        return names[0], shapes, shapes.check(request, self._model.limits, usual)

    @property
    def openapi(self) -> dict[str, Any]:
        """The request schema of the model's own task, for its OpenAPI page."""
        return self.own.openapi(self._model.limits)


async def predict(call: Call) -> Response:
    """A list of answers to a list of inputs, in order. A single input is answered as Hugging
    Face's clients expect for the task: with a bare answer, or with a list of one."""
    bodies: Bodies = call.prepared
    here = len(call.body) <= SMALL
    name, shapes, request = await call.model.run(bodies.parse, call.body, here=here)
    if name == vectors.VECTORS:
        return await vectors.embed(
            call,
            request.inputs,
            request.parameters,
            lambda answered: _numbers(request, answered.answers),
        )
    if name == vectors.SPARSE:
        return await vectors.embed_sparse(call, request.inputs, request.parameters)
    answered = await call.answer(name, request.inputs, request.parameters)
    return await call.respond(answered, lambda: shapes.body(request, answered.answers))


def _numbers(request: PredictRequest, answers: list[Any]) -> Any:
    """Decode vectors in base64 to numbers, unless the request asked for base64."""
    is_asked_for = getattr(request.parameters, "encoding_format", None) == "base64"
    return answers if is_asked_for else vectors.vectors_of(answers)


def _documented(bodies: Bodies | None) -> dict[str, Any]:
    if bodies is None:  # the front, whose models differ
        known = {"inputs": {}, "parameters": {"type": ["object", "null"]}}
        schema = {"type": "object", "required": ["inputs"], "properties": known}
        return {"openapi_extra": request_body(schema), "responses": responses(vectors.EVEN)}
    return {
        "openapi_extra": bodies.openapi,
        "responses": responses(bodies.own.forms, bodies.own.response),
    }


async def health(call: Call) -> Response:
    """200 if the model has just run a forward pass."""
    await call.model.check_ready()
    return json_response(call.model, HEALTHY)


def refuse(error: RequestError) -> tuple[int, Any]:
    return error.status, {"error": str(error), "error_type": error.error_type}


SURFACE = Surface(
    name="huggingface",
    endpoints=(
        Endpoint(
            path="",
            answer=predict,
            summary="Hugging Face's inference API",
            document=_documented,
        ),
        Endpoint(
            path="/health",
            is_open=True,
            answer=health,
            method="GET",
            shape=dict[str, str],
            at_root=Probe(content=HEALTHY),
        ),
    ),
    refuse=refuse,
    error=Error,
    prepare=Bodies,
)
