"""The Open Inference Protocol v2, as KServe's, MLServer's and `tritonclient` call it.

Inputs are BYTES tensors named like the fields of the task's input, `text` for most; outputs are the
columns that the task has for its best answer, such as `label` and `score`, or `vector`. Tensors may
be JSON or follow it as raw bytes (Triton's binary tensor data extension).

Of the parameters that the protocol and Triton's extensions give a meaning, a `timeout` is the
request's deadline; any `priority` is the same, as for Triton's models that have no levels of it;
a sequence, shared memory and `classification` are refused. The others are the task's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import pydantic
from fastapi import Response

from bert_core.tasks.base import Task
from bert_core.wording import nearest, one_of, shortened
from serve.request.body import whole_number
from serve.request.errors import RequestError, UnknownModelError
from serve.request.limits import check_count, check_size
from serve.surfaces.base import (
    JSON,
    Body,
    Call,
    Endpoint,
    Ignored,
    Probe,
    Surface,
    as_bad_request,
    check_distinct,
    cuts_of,
    headers,
    json_response,
    read,
)
from serve.surfaces.vectors import check_one_vector

if TYPE_CHECKING:
    from serve.model.model import Model

HEADER = "Inference-Header-Content-Length"
"""Length of the JSON before raw tensors."""
ALIASES = ("args", "inputs", "input-0", "input-1")
"""Names that MLServer's, MLflow's and KServe's clients give to an only text."""
TEXTS = "BYTES"
MAX_DIMENSIONS = 8
"""Maximum dimensions of a tensor; texts need one or two."""
BINARY = "application/octet-stream"
"""Media type of JSON with raw tensors behind it."""
SERVER = {"name": "raybert", "version": "2", "extensions": ["binary_tensor_data"]}
LIVE = {"live": True}


class TensorParameters(Body):
    """Parameters of an input tensor: how its texts are sent."""

    binary_data_size: Annotated[int, pydantic.Field(ge=0)] | None = None
    content_type: Literal["str"] | None = None
    """MLServer's name of how they are encoded: as they are."""


class WantedParameters(Body):
    """Parameters of an output: how it is to be sent."""

    binary_data: bool | None = None
    content_type: Literal["str", "np"] | None = None
    """MLServer's name of what its client makes of it."""


class InferParameters(Body):
    """Parameters of the protocol and its extensions; all others are the task's."""

    model_config = pydantic.ConfigDict(extra="allow")

    binary_data_output: bool = False
    timeout: Annotated[int, pydantic.Field(ge=0)] | None = None
    """Microseconds within which the answer must be ready; 0 takes the server's own limit."""
    priority: Annotated[int, pydantic.Field(ge=0)] = 0
    """Without effect, as there is one level of it."""
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    content_type: Literal["str", "pd"] | None = None
    """MLServer's name of what the inputs were made of."""


class Tensor(Body):
    """An input: texts."""

    name: str
    shape: Annotated[
        list[int],
        pydantic.Field(
            json_schema_extra={
                "items": {"type": "integer", "minimum": 1},
                "minItems": 1,
                "maxItems": MAX_DIMENSIONS,
            }
        ),
    ]
    datatype: Annotated[str, pydantic.WithJsonSchema({"const": TEXTS})]
    data: Any = None
    parameters: TensorParameters | None = None


class Wanted(Body):
    """An output that is asked for."""

    name: str
    parameters: WantedParameters | None = None


class Infer(Body):
    """A request for inference."""

    inputs: Annotated[list[Tensor], pydantic.Field(json_schema_extra={"minItems": 1})]
    outputs: list[Wanted] | None = None
    id: str | None = None
    parameters: InferParameters | None = None
    model_name: Ignored = None


@dataclass(frozen=True, kw_only=True)
class Described:
    """A tensor of an answer, or one that the model takes or gives."""

    name: str
    datatype: Literal["FP64", "FP32", "INT64", "BYTES"]
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Inferred:
    """The answer to a request for inference."""

    model_name: str
    model_version: str
    outputs: list[Described]
    id: str | None = None
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Inputs and outputs of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[Described]
    outputs: list[Described]


@dataclass(frozen=True, kw_only=True)
class Ready:
    """That a model is ready; all of them where none is named."""

    name: str | None = None
    ready: Literal[True]


async def infer(call: Call) -> Response:
    """The task's columns for each row of the input tensors."""
    _check_version(call)
    request, texts = await call.model.off_loop(_request, call)
    task, chosen = call.model.task, request.parameters or InferParameters()
    check_distinct("inputs", [tensor.name for tensor in request.inputs])
    _check_outputs(task, request.outputs or [])
    if chosen.sequence_id or chosen.sequence_start or chosen.sequence_end:
        raise RequestError(
            f"sequence_id: wanted none, since {call.model.name} keeps nothing from one request to "
            "the next: leave sequence_id, sequence_start and sequence_end out"
        )
    tensors = {tensor.name: text for tensor, text in zip(request.inputs, texts, strict=True)}
    for tensor in tensors.values():
        check_count(tensor, call.model.limits)
    rows = _rows(task, tensors)
    values = chosen.model_extra or {}
    if values.get("encoding_format") == "base64":
        raise RequestError("encoding_format: wanted none, since tensors hold numbers: leave it out")
    parameters = call.parameters(task.name, values)
    check_one_vector(task, rows, parameters)
    if chosen.timeout:
        limit_s = call.model.limits.deadline_s if call.deadline_s is None else call.deadline_s
        call = replace(call, deadline_s=min(limit_s, chosen.timeout / 1e6))
    # The body says which tensors are raw.
    answered = await call.answer(None, rows, parameters, forms=())

    def body() -> tuple[bytes, dict[str, str]]:
        cells = [task.cells(answer) for answer in answered.answers]
        outputs = {name: _column(kind, [row[name] for row in cells])
                   for name, kind in task.cell_types.items()}  # fmt: skip
        return _response(call.model, request, outputs, cuts_of(answered))

    content, extra = await call.model.off_loop(body)
    check_size(content, call.model.limits)
    kind = BINARY if extra else JSON
    return Response(content, 200, headers(call.model, answered) | extra, kind)


def _version_of(model: "Model") -> str:
    return model.version or "1"


def _check_version(call: Call) -> None:
    """Check the version that the path names. Raises: UnknownModelError if that version does not
    answer."""
    known = _version_of(call.model)
    named = call.request.path_params.get("version", known)
    if named != known:
        raise UnknownModelError(
            f"there is no version {shortened(named)!r} of {call.model.name} here: ask version "
            f"{known}, or none"
        )


def _check_outputs(task: Task, outputs: Sequence[Wanted]) -> None:
    """Check the outputs that are asked for. Raises: RequestError for an unknown or repeated
    output."""
    names = [output.name for output in outputs]
    for name in names:
        if name not in task.cell_types:
            raise RequestError(
                f"outputs: wanted {one_of(task.cell_types)}, got {shortened(name)!r}"
                f"{nearest(name, task.cell_types)}"
            )
    check_distinct("outputs", names)


def _request(call: Call) -> tuple[Infer, list[np.ndarray]]:
    """Return the request, and the texts of each input as an array of its shape."""
    length = call.request.headers.get(HEADER)
    end = len(call.body) if length is None else whole_number(length)
    if end is None or end > len(call.body):
        raise RequestError(
            f"{HEADER}: wanted the length of the JSON in bytes, got {(length or '')[:20]!r}"
        )
    request, raw = read(Infer, call.body[:end]), call.body[end:]
    texts = []
    for tensor in request.inputs:
        size = None if tensor.parameters is None else tensor.parameters.binary_data_size
        if size is None:
            texts.append(_texts(tensor, None))
            continue
        if size > len(raw):
            raise RequestError(
                f"{tensor.name}: wanted a binary_data_size of at most the {len(raw)} bytes that "
                f"follow, got {size}"
            )
        texts.append(_texts(tensor, raw[:size]))
        raw = raw[size:]
    if raw:
        raise RequestError(
            f"the body: wanted as many bytes after the JSON as the inputs' binary_data_size say, "
            f"got {len(raw)} more"
        )
    return request, texts


def _texts(tensor: Tensor, raw: bytes | None) -> np.ndarray:
    """Return the texts of a tensor, in its shape."""
    if tensor.datatype != TEXTS:
        raise RequestError(f"{tensor.name}: wanted the datatype {TEXTS}, got {tensor.datatype}")
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise RequestError(
            f"{tensor.name}: wanted a shape of at most {MAX_DIMENSIONS} dimensions, got "
            f"{len(tensor.shape)}"
        )
    values = _unpacked(tensor.name, raw) if raw is not None else _flat(tensor)
    if not all(isinstance(value, str) for value in values):
        raise RequestError(f"{tensor.name}: wanted texts as data")
    if not tensor.shape or min(tensor.shape) < 1 or math.prod(tensor.shape) != len(values):
        raise RequestError(
            f"{tensor.name}: wanted at least one text, and as many as the shape {tensor.shape} "
            f"says, got {len(values)}"
        )
    texts = np.empty(len(values), dtype=object)
    texts[:] = values
    return texts.reshape(tensor.shape)


def _flat(tensor: Tensor) -> list[Any]:
    """Return the data as a flat list; it may come nested like its shape, or flat."""
    values = tensor.data if isinstance(tensor.data, list) else [tensor.data]
    for _ in tensor.shape[1:]:
        if all(isinstance(value, list) for value in values):
            values = [item for value in values for item in value]
    return values


def _unpacked(name: str, raw: bytes) -> list[str]:
    """Return texts from bytes, in which the length of each text, four bytes little-endian, comes
    before it."""
    texts, place = [], 0
    while place < len(raw):
        size = int.from_bytes(raw[place : place + 4], "little")
        text = raw[place + 4 : place + 4 + size]
        if len(text) != size:
            raise RequestError(f"{name}: wanted a text of {size} bytes, got {len(text)}")
        try:
            texts.append(text.decode())
        except UnicodeDecodeError as error:
            raise RequestError(f"{name}: wanted UTF-8, got byte {text[error.start]:#x}") from error
        place += 4 + size
    return texts


def _rows(task: Task, tensors: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return one input of the task per row of the tensors."""
    names = _names(task)
    if len(tensors) == 1 and (only := next(iter(tensors))) in ALIASES:
        tensors = {names[0]: tensors[only]}
    for name in tensors:
        if name not in names:
            raise RequestError(
                f"inputs: wanted {one_of(names)}, got {name!r}{nearest(name, names)}"
            )
    sizes = {len(tensor) for tensor in tensors.values()}
    if len(sizes) != 1 or 0 in sizes:
        raise RequestError(
            "inputs: wanted at least one tensor, all with the same number of rows, got "
            f"{ {name: list(tensor.shape) for name, tensor in tensors.items()} }"
        )
    columns = {
        name: tensor.reshape(len(tensor)).tolist()
        if tensor.size == len(tensor)
        else tensor.tolist()
        for name, tensor in tensors.items()
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _names(task: Task) -> list[str]:
    return [field.name for field in fields(task.inputs)]


def _column(kind: pa.DataType, values: Sequence[Any]) -> np.ndarray:
    """Return a column of answers as a tensor; columns of lists and objects as JSON."""
    if pa.types.is_floating(kind):
        return np.array(values, dtype=np.float64)
    if pa.types.is_integer(kind):
        return np.array(values, dtype=np.int64)
    if _is_vector(kind):
        return np.array(values, dtype=np.float32)
    texts = np.empty(len(values), dtype=object)
    texts[:] = values if pa.types.is_string(kind) else [_as_json(value) for value in values]
    return texts


def _is_vector(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) and pa.types.is_float32(kind.value_type)


def _as_json(value: Any) -> str:
    return orjson.dumps(value).decode()


_DATATYPES = {"f8": "FP64", "f4": "FP32", "i8": "INT64", "O": TEXTS}


def _datatype(tensor: np.ndarray) -> str:
    return _DATATYPES["O" if tensor.dtype == object else tensor.dtype.str[1:]]


def _response(
    model: "Model", request: Infer, outputs: Mapping[str, np.ndarray], cuts: str
) -> tuple[bytes, dict[str, str]]:
    """Return the body, and the header that it needs if raw tensors follow the JSON."""
    requested = request.outputs or [Wanted(name=name) for name in outputs]
    all_raw = request.parameters is not None and request.parameters.binary_data_output
    described, raw = [], []
    for output in requested:
        tensor = outputs[output.name]
        entry: dict[str, Any] = {
            "name": output.name,
            "shape": list(tensor.shape),
            "datatype": _datatype(tensor),
        }
        is_raw = None if output.parameters is None else output.parameters.binary_data
        if all_raw if is_raw is None else is_raw:
            packed = _packed(tensor)
            entry["parameters"] = {"binary_data_size": len(packed)}
            raw.append(packed)
        else:
            entry["data"] = tensor.ravel().tolist()
        described.append(entry)
    content: dict[str, Any] = {
        "model_name": model.name,
        "model_version": _version_of(model),
        "outputs": described,
    }
    if cuts:
        content["parameters"] = {"cut_inputs": cuts}
    if request.id is not None:
        content["id"] = request.id
    head = orjson.dumps(content)
    return b"".join([head, *raw]), {HEADER: str(len(head))} if raw else {}


def _packed(tensor: np.ndarray) -> bytes:
    if tensor.dtype != object:
        return np.ascontiguousarray(tensor).tobytes()
    texts = [text.encode() for text in tensor.ravel()]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


async def metadata(call: Call) -> Response:
    """Names, shapes and types of the inputs and outputs."""
    _check_version(call)
    task = call.model.task
    outputs = [
        {"name": name, "datatype": _datatype(_column(kind, [])),
         "shape": [-1, -1] if _is_vector(kind) else [-1]}
        for name, kind in task.cell_types.items()
    ]  # fmt: skip
    content = {
        "name": call.model.name,
        "versions": [_version_of(call.model)],
        "platform": "raybert",
        "inputs": [{"name": name, "datatype": TEXTS, "shape": [-1]} for name in _names(task)],
        "outputs": outputs,
    }
    return json_response(call.model, content)


async def ready(call: Call) -> Response:
    """200 if the model has just run a forward pass."""
    _check_version(call)
    await call.model.check_ready()
    return json_response(call.model, {"name": call.model.name, "ready": True})


async def server(call: Call) -> Response:
    """The server's name, and which extensions it has."""
    return json_response(call.model, SERVER)


async def live(call: Call) -> Response:
    return json_response(call.model, LIVE)


@dataclass(frozen=True)
class InferError:
    """The body of an error, as the protocol has it."""

    error: str


def refuse(error: RequestError) -> tuple[int, Any]:
    status = as_bad_request(error)
    return status, {"error": str(error)}


def _of_model(path: str) -> tuple[Endpoint, ...]:
    """Return the paths of a model, or of a version of it."""
    return (
        Endpoint(path=path, answer=metadata, method="GET", shape=Metadata),
        Endpoint(path=f"{path}/ready", answer=ready, method="GET", shape=Ready),
        Endpoint(
            path=f"{path}/infer", answer=infer, body=Infer, shape=Inferred, forms=(JSON, BINARY)
        ),
    )


SURFACE = Surface(
    name="open_inference",
    endpoints=(
        Endpoint(
            path="/v2",
            answer=server,
            method="GET",
            shape=dict[str, Any],
            at_root=Probe(content=SERVER, runs_passes=False),
        ),
        Endpoint(
            path="/v2/health/live",
            is_open=True,
            answer=live,
            method="GET",
            shape=dict[str, Any],
            at_root=Probe(content=LIVE, runs_passes=False),
        ),
        Endpoint(
            path="/v2/health/ready",
            is_open=True,
            answer=ready,
            method="GET",
            shape=Ready,
            at_root=Probe(content={"ready": True}),
        ),
        *_of_model("/v2/models/{model}"),
        *_of_model("/v2/models/{model}/versions/{version}"),
    ),
    refuse=refuse,
    error=InferError,
)
