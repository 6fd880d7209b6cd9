"""Vectors as an answer: JSON, or by the header `Accept` raw numbers or Arrow.

Raw numbers are little-endian, row after row; the headers `X-Shape` and `X-Dtype` say the rest:
`np.frombuffer(body, dtype).reshape(shape)`. An Arrow stream has a row per input and names the model
in its schema. Vectors leave the model in base64, since a thousand Python numbers cost more than
their base64 both ways.
"""

from binascii import a2b_base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from fastapi import Response

from bert_core.data.ragged import offsets_of
from bert_core.tasks.base import Parameters, Task
from bert_core.tasks.compared_texts import PromptOptions
from bert_core.tasks.feature_extraction import (
    FeatureExtraction,
    FeatureExtractionOptions,
    FeatureExtractionParameters,
)
from bert_core.tasks.sparse_embedding import SparseEmbedding
from serve.model.answers import Answered
from serve.request.errors import NotAcceptableError, RequestError
from serve.surfaces.base import JSON, Call, Encoded

if TYPE_CHECKING:
    from serve.model.model import Model

VECTORS, SPARSE = FeatureExtraction.name, SparseEmbedding.name
ARROW = "application/vnd.apache.arrow.stream"
RAW = {f"application/octet-stream; dtype={dtype}": dtype for dtype in ("float32", "float16")}
EVEN = (JSON, *RAW, ARROW)
"""Forms of answers with one vector per input."""
UNEVEN = (JSON, ARROW)
"""Forms of answers whose inputs have different numbers of vectors, or of entries."""
FORMS = {VECTORS: EVEN, SPARSE: UNEVEN}
_LARGEST = float(np.finfo(np.float16).max)


def known_values(model: "Model") -> dict[str, list[Any]]:
    """Return the allowed values of parameters that depend on the model, if it gives vectors."""
    known: dict[str, list[Any]] = {}
    for predictor in model.predictors.values():
        chosen = predictor.task.chosen
        if isinstance(chosen, PromptOptions):
            known["prompt_name"] = [None, *chosen.prompts]
        if isinstance(chosen, FeatureExtractionOptions):
            sizes = sorted({predictor.bundle.encoder_config.hidden_size, *chosen.dimensions})
            known["dimensions"] = known["output_dimension"] = [None, *sizes]
    return known


async def embed(
    call: Call,
    rows: Sequence[Mapping[str, Any]],
    parameters: Parameters | None,
    content: Callable[[Answered], Any],
) -> Response:
    """Answer with the vectors of rows.

    Args:
        content: makes the JSON content. The answers that it gets are in base64: a text per row, or
            a list of texts for a row of several vectors; `vectors_of` decodes them.
    """
    chosen = FeatureExtractionParameters() if parameters is None else parameters
    assert isinstance(chosen, FeatureExtractionParameters)
    is_uneven = chosen.per_token or any(row.get("text_pair") is not None for row in rows)
    forms = UNEVEN if is_uneven else EVEN
    in_base64 = replace(chosen, encoding_format="base64")
    answered = await call.answer(VECTORS, list(rows), in_base64, forms)
    form, answers = call.form(forms), answered.answers
    if form == JSON:
        return await call.respond(answered, lambda: content(answered))
    if form == ARROW:
        column = _uneven if is_uneven else _even
        make = partial(_arrow, call.model, answered, lambda: {"embedding": column(answers)})
    else:
        make = partial(_raw, answers, RAW[form])
    return await call.send(answered, make, form)


async def embed_sparse(
    call: Call, rows: Sequence[Mapping[str, Any]], parameters: Parameters | None
) -> Response:
    """Answer with the sparse vectors of rows."""
    is_pair = any(row.get("text_pair") is not None for row in rows)
    forms = (JSON,) if is_pair else UNEVEN
    answered = await call.answer(SPARSE, list(rows), parameters, forms)
    if call.form(forms) == JSON:
        return await call.respond(answered, lambda: answered.answers)
    make = partial(_arrow, call.model, answered, lambda: _entries(answered.answers))
    return await call.send(answered, make, ARROW)


def check_one_vector(task: Task, rows: Sequence[Any], parameters: Parameters | None) -> None:
    """Check that each input has a single vector, for answers with a place for only one.

    Raises: RequestError.
    """
    if task.name not in FORMS:
        return
    if getattr(parameters, "per_token", False):
        raise RequestError(
            "per_token: wanted none, since a row of this answer has one vector: leave it out, or "
            "ask at the model's URL"
        )
    for number, row in enumerate(rows):
        if isinstance(row, Mapping) and row.get("text_pair") is not None:
            raise RequestError(
                f"inputs[{number}]: wanted one text, since a row of this answer has one vector, "
                "got a text_pair too: make it a row, or ask at the model's URL"
            )


def vectors_of(answers: Sequence[Any]) -> Any:
    """Return the numbers of answers in base64, as fp32: (rows, size), or a list with an array per
    row if some rows have several vectors."""
    if all(isinstance(answer, str) for answer in answers):
        return _matrix(answers)
    return [_matrix(each) if isinstance(each, list) else _matrix([each])[0] for each in answers]


def _matrix(vectors: Sequence[str]) -> np.ndarray:
    """Return vectors in base64 as numbers, (vectors, size)."""
    return np.frombuffer(b"".join(map(a2b_base64, vectors)), "<f4").reshape(len(vectors), -1)


def _raw(answers: Sequence[str], dtype: str) -> Encoded:
    """Return vectors as raw numbers, with the headers that describe them.
    Raises: NotAcceptableError for numbers that do not fit into float16.
    """
    vectors = _matrix(answers)
    if dtype == "float16" and (largest := float(np.abs(vectors).max())) > _LARGEST:
        raise NotAcceptableError(
            f"Accept: wanted numbers up to {_LARGEST:.0f} for float16, got {largest:g}: ask for "
            "float32"
        )
    shape = ",".join(map(str, vectors.shape))
    body = vectors.astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes()
    return body, {"X-Shape": shape, "X-Dtype": dtype}


def _arrow(
    model: "Model", answered: Answered, columns: Callable[[], dict[str, pa.Array]]
) -> Encoded:
    """Return an Arrow stream of one batch, with the model and the vectors' space in its schema's
    metadata."""
    about = {
        "model": model.name,
        "version": model.version,
        "digest": model.digest,
        "space": answered.space,
    }
    known = {name: value for name, value in about.items() if value}
    table = pa.table(columns()).replace_schema_metadata(known)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes(), {}


def _fixed(vectors: np.ndarray) -> pa.Array:
    """Return a column with one vector per entry."""
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])


def _even(answers: Sequence[str]) -> pa.Array:
    return _fixed(_matrix(answers))


def _uneven(answers: Sequence[list[str] | str]) -> pa.Array:
    """Return a column with a list of vectors per entry."""
    lists = [answer if isinstance(answer, list) else [answer] for answer in answers]
    vectors = _fixed(_matrix([vector for each in lists for vector in each]))
    return pa.ListArray.from_arrays(_offsets(lists), vectors)


def _entries(answers: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, pa.Array]:
    """Return columns `indices` and `values`, whose lists are as long as the row has entries."""
    entries = [entry for answer in answers for entry in answer]
    columns = {
        "indices": pa.array([entry["index"] for entry in entries], pa.int32()),
        "values": pa.array([entry["value"] for entry in entries], pa.float32()),
    }
    offsets = _offsets(answers)
    return {name: pa.ListArray.from_arrays(offsets, each) for name, each in columns.items()}


def _offsets(lists: Sequence[Sequence[Any]]) -> pa.Array:
    return pa.array(offsets_of([len(row) for row in lists]), pa.int32())
