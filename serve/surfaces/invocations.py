"""MLflow's and SageMaker's `/invocations` and `/ping`.

A body is JSON or, as `text/csv`, a table with the names of its columns first. Its cells are texts
as they stand (MLflow's own server reads `NA` as missing, and `007` as a number); empty ones are
missing. Answers are those of the model that `raybert publish` registers: a record per row with the
task's columns, such as `label` and `score`.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from fastapi import Response

from bert_core.tasks.base import Task
from bert_core.tasks.shapes import rows_of
from bert_core.wording import nearest, shown
from serve.model.sizes import SMALL
from serve.request.body import kind_of
from serve.request.errors import RequestError
from serve.request.limits import Limits, check_count
from serve.surfaces.base import (
    Body,
    Call,
    Endpoint,
    Probe,
    Surface,
    as_bad_request,
    check_distinct,
    json_response,
)
from serve.surfaces.vectors import check_one_vector

FORMS = ("inputs", "instances", "dataframe_split", "dataframe_records")
CSV = "text/csv"
INPUTS = "inputs"
"""MLflow's name of an only column."""


class Split(Body):
    """A table as columns and rows."""

    columns: list[str]
    data: list[list[Any]]
    index: list[Any] | None = None


class Invocation(Body):
    """A request in one of MLflow's forms."""

    inputs: Any = None
    instances: Any = None
    dataframe_split: Split | None = None
    dataframe_records: list[dict[str, Any]] | None = None
    params: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """A record per row."""

    predictions: list[dict[str, Any]]


async def invoke(call: Call) -> Response:
    """A record per row, of JSON or CSV."""
    limits = call.model.limits
    if kind_of(call.request) == CSV:
        is_short = len(call.body) <= SMALL
        request = await call.model.run(_table, call.body, limits, here=is_short)
    else:
        request = await call.read(Invocation)
    forms = [name for name in FORMS if getattr(request, name) is not None]
    if len(forms) != 1:
        raise RequestError(
            f"the body: wanted one of {', '.join(FORMS)}, got {', '.join(forms) or 'none'}"
        )
    task, names = call.model.task, []
    if request.dataframe_split is not None:
        names, rows = request.dataframe_split.columns, _rows(request.dataframe_split, limits)
    elif isinstance(value := getattr(request, forms[0]), dict):
        names, rows = list(value), rows_of(task.inputs, value)
    else:
        rows = value
    parameters = call.parameters(task.name, request.params or {})
    if names and not rows:  # a frame without rows, such as an empty partition
        _check_names(task, names)
        return json_response(call.model, {"predictions": []})
    if not isinstance(rows, list) or not rows:
        raise RequestError(f"{forms[0]}: wanted a list of at least one row, got {shown(rows)}")
    check_count(rows, limits)  # before work for each row
    inputs = [_input(task, row) for row in rows]
    check_one_vector(task, inputs, parameters)
    answered = await call.answer(None, inputs, parameters)
    return await call.respond(
        answered,
        lambda: {"predictions": [_record(task, parameters, each) for each in answered.answers]},
    )


def _rows(split: Split, limits: Limits) -> list[dict[str, Any]]:
    """Return the rows of a table. Raises: TooLargeError; RequestError for columns of the same name,
    or a row of another length."""
    check_count(split.data, limits)
    check_distinct("dataframe_split.columns", split.columns)
    for number, row in enumerate(split.data):
        _check_width(f"dataframe_split.data[{number}]", row, split.columns)
    return [dict(zip(split.columns, row, strict=True)) for row in split.data]


def _table(body: bytes, limits: Limits) -> Invocation:
    """Return the table in a CSV body, as pandas writes it.

    Raises: TooLargeError; RequestError for what is no CSV, columns of the same name, or a row of
        another length, with the line where it ends.
    """
    try:
        reader = csv.reader(io.StringIO(body.decode("utf-8-sig"), newline=""), strict=True)
        lines = [(reader.line_num, row) for row in reader if row]  # without blank lines
    except (UnicodeDecodeError, csv.Error) as error:
        raise RequestError(
            f"the body: wanted CSV in UTF-8, it cannot be read ({error}): correct it, or send JSON"
        ) from error
    if not lines:
        raise RequestError("the body: wanted a line with the names of columns, got nothing")
    (first, columns), *rest = lines
    check_count(rest, limits)
    check_distinct(f"line {first}", columns)
    for number, row in rest:
        _check_width(f"line {number}", row, columns)
    data = [[cell or None for cell in row] for _, row in rest]
    return Invocation(dataframe_split=Split(columns=columns, data=data))


def _check_width(where: str, row: Sequence[Any], columns: Sequence[str]) -> None:
    """Check that a row has a cell per column. Raises: RequestError."""
    if len(row) != len(columns):
        raise RequestError(
            f"{where}: wanted {len(columns)} cells, as there are columns, got {len(row)}"
        )


def _check_names(task: Task, names: Sequence[str]) -> None:
    """Check the names of columns. Raises: RequestError if a column is not a field of the task's
    inputs."""
    known = [field.name for field in fields(task.inputs)]
    for name in names:
        if name not in (*known, INPUTS):
            raise RequestError(
                f"inputs: wanted columns {', '.join(known)}, got {shown(name)}"
                f"{nearest(name, known)}"
            )


def _input(task: Task, row: Any) -> Any:
    """Return a row as the task takes it: a bare text, or its fields without empty cells."""
    if not isinstance(row, dict):
        return row[0] if isinstance(row, Sequence) and len(row) == 1 else row
    names = [field.name for field in fields(task.inputs)]
    filled = {name: value for name, value in row.items() if value is not None}
    if len(filled) == 1 and next(iter(filled)) == INPUTS and INPUTS not in names:
        return next(iter(filled.values()))
    return filled


def _record(task: Task, parameters: Any, answer: Any) -> dict[str, Any]:
    """Return the columns of an answer; all candidates if `top_k` was asked for."""
    if getattr(parameters, "top_k", None) != getattr(task.parameters(), "top_k", None):
        return {"answers": answer}
    return task.cells(answer)


async def ping(call: Call) -> Response:
    """200 if the model has just run a forward pass."""
    await call.model.check_ready()
    return json_response(call.model, {})


@dataclass(frozen=True)
class ScoringError:
    """The body of an error, as MLflow's clients read it."""

    error_code: Literal[
        "RESOURCE_DOES_NOT_EXIST",
        "RESOURCE_EXHAUSTED",
        "INVALID_PARAMETER_VALUE",
        "TEMPORARILY_UNAVAILABLE",
    ]
    message: str


def refuse(error: RequestError) -> tuple[int, Any]:
    status = as_bad_request(error)
    code = {404: "RESOURCE_DOES_NOT_EXIST", 429: "RESOURCE_EXHAUSTED"}
    kinds = "INVALID_PARAMETER_VALUE" if status < 500 else "TEMPORARILY_UNAVAILABLE"
    return status, {"error_code": code.get(status, kinds), "message": str(error)}


SURFACE = Surface(
    name="invocations",
    endpoints=(
        Endpoint(
            path="/invocations",
            answer=invoke,
            body=Invocation,
            shape=Predictions,
            cut=lambda name: {"params": {name: True}},
            nameless=(CSV,),
        ),
        Endpoint(
            path="/ping",
            is_open=True,
            answer=ping,
            method="GET",
            shape=dict[str, Any],
            at_root=Probe(content={}),
        ),
    ),
    refuse=refuse,
    error=ScoringError,
)
