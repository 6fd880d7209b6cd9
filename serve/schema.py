"""Bodies in Hugging Face's inference schema, checked against the task's dataclasses.

`{"inputs": …, "parameters": {…}}`: an input of the task, or a list of them; parameters may be next
to `inputs` if Hugging Face's schema allows it for the task. Other keys are rejected. `serve.api`
decides which path takes a body.
"""

import json
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar, get_args, get_type_hints

import pydantic

from bert_core.errors import RaybertError
from bert_core.tasks.base import Parameters, Task
from bert_core.tasks.shapes import as_row
from bert_core.wording import as_json, nearest, shown


class RequestError(RaybertError):
    """A request that cannot be answered. Subclasses define the status."""

    status: ClassVar[int] = 422
    error_type: ClassVar[str] = "invalid_request"


class NotJSONError(RequestError):
    """The body is not JSON."""

    status = 400
    error_type = "not_json"


class UnknownModelError(RequestError):
    """The path names a model that is not served here."""

    status = 404
    error_type = "not_found"


class NotReadyError(RequestError):
    """A model did not answer in time, or answered with an error."""

    status = 503
    error_type = "not_ready"


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
        hints = get_type_hints(task.parameters)
        definitions: dict[str, Any] = {
            field.name: (hints[field.name], _default(field)) for field in fields(task.parameters)
        }
        self._checked = pydantic.create_model(
            task.parameters.__name__,
            __config__=pydantic.ConfigDict(extra="forbid", strict=True),
            **definitions,
        )
        answers = get_type_hints(task.decode)["return"]
        (answer,) = get_args(answers)
        self.response: Any = answers | answer if task.single_is_bare else answers
        """Type of the response body."""

    @property
    def openapi(self) -> dict[str, Any]:
        """The request schema for the model's OpenAPI page."""
        single = pydantic.TypeAdapter(self._task.inputs).json_schema()
        single["additionalProperties"] = False
        one_text = [{"type": "string"}] if len(single.get("required", ())) <= 1 else []
        kinds = [*one_text, single]
        several = {"type": "array", "items": {"anyOf": kinds}, "minItems": 1}
        parameters = self._checked.model_json_schema()
        schema = {
            "type": "object",
            "required": ["inputs"],
            "additionalProperties": False,
            "properties": {
                "inputs": {"anyOf": [*kinds, several]},
                "parameters": parameters,
                **(parameters["properties"] if self._task.parameters_at_root else {}),
            },
        }
        content = {"application/json": {"schema": schema, "example": self._example}}
        return {"requestBody": {"required": True, "content": content}}

    @property
    def _example(self) -> dict[str, Any]:
        return {"inputs": self._task.examples[0]}

    def parse(self, body: bytes) -> PredictRequest:
        """Validate a body. Raises: NotJSONError, RequestError."""
        way_out = f"send {json.dumps(self._example)}, or a list of such inputs"
        if not body.strip():
            raise NotJSONError(f"the body: wanted a JSON object, it is empty: {way_out}")
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise NotJSONError(
                f"the body: wanted a JSON object, it is not JSON ({error}): {way_out}"
            ) from error
        if not isinstance(request, dict):
            raise RequestError(f"the body: wanted a JSON object, got {shown(request)}: {way_out}")
        at_top = self._checked.model_fields if self._task.parameters_at_root else ()
        unknown = sorted(request.keys() - {"inputs", "parameters", *at_top})
        if unknown:
            raise RequestError(
                f'the body: wanted the keys "inputs" and "parameters", got {as_json(unknown[0])} '
                "too: leave it out, or put a parameter of the task under parameters"
            )
        if "inputs" not in request:
            raise RequestError(f'the body: wanted the key "inputs", it is missing: {way_out}')
        inputs = request["inputs"]
        several = isinstance(inputs, list)
        if several and not inputs:
            raise RequestError("inputs: wanted at least one input, got an empty list")
        rows = [
            as_row(self._task.inputs, each, f"inputs[{place}]" if several else "inputs")
            for place, each in enumerate(inputs if several else [inputs])
        ]
        top_level = {name: request[name] for name in at_top if name in request}
        parameters = self._parse_parameters(request.get("parameters"), top_level)
        return PredictRequest(rows, several, parameters)

    def body(self, request: PredictRequest, answers: list[Any]) -> Any:
        """The response body: a list, or for a single input a bare answer, if the task does so."""
        return answers[0] if self._task.single_is_bare and not request.several else answers

    def _parse_parameters(self, values: Any, top_level: dict[str, Any]) -> Parameters | None:
        if values is None and not top_level:
            return None
        if values is not None and not isinstance(values, dict):
            raise RequestError(f"parameters: wanted a JSON object, got {shown(values)}")
        values = top_level | (values or {})
        names = list(self._checked.model_fields)
        for name in values:
            if name not in names:
                raise RequestError(
                    f"parameters: wanted some of {', '.join(names)}, got {as_json(name)}"
                    f"{nearest(name, names)}"
                )
        try:
            checked = self._checked.model_validate(values)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise RequestError(
                f"parameters.{where}: {first['msg']}, got {shown(first['input'])}"
            ) from error
        return self._parameters(**checked.model_dump(exclude_unset=True))


def _default(field: "Field[Any]") -> Any:
    if field.default_factory is not MISSING:
        return pydantic.Field(default_factory=field.default_factory)
    return ... if field.default is MISSING else field.default
