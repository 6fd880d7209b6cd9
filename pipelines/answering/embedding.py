"""Vectors of many texts, by workers, as one matrix in this process."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bert_core.data.windows import cut_rows
from pipelines.answering.predictors import NO_OPTIONS, predictor_of
from pipelines.runtime.distribute import run_tasks
from pipelines.runtime.progress import meter
from pipelines.runtime.stage_config import StageConfig

if TYPE_CHECKING:
    from bert_core.inference.predictor import Predictor
    from bert_core.tasks.searching import Matrix, Searching, Side

TEXTS_PER_TASK = 512

Packed = Mapping[str, Any]
"""Arrays in base64, with their types, and the size of the vectors: what JSON can hold."""


@dataclass(frozen=True)
class Embedded:
    """The vectors of texts, in order."""

    vectors: "Matrix"
    tokens: int
    """Tokens that went through the model."""
    cut: int
    """Texts of which a part was left out, since they are longer than the model reads."""


def embed(
    folder: Path,
    texts: Sequence[str],
    side: "Side",
    config: StageConfig,
    task: str | None = None,
    options: str = NO_OPTIONS,
) -> Embedded:
    """Embed every text with a model, as a query or as a document.

    Args:
        options: as JSON.
    """
    starts = range(0, len(texts), TEXTS_PER_TASK)
    parts = [list(texts[start : start + TEXTS_PER_TASK]) for start in starts]
    packed: list[Packed] = [{}] * len(parts)
    tokens = cut = 0
    work = partial(_embed, folder.absolute(), config.threads_per_worker, task, options, side)
    with meter(f"embedding {side} texts", len(texts), "texts") as progress:
        for index, part in run_tasks(work, parts, config, use_gpu=True):
            packed[index] = part["vectors"]
            tokens, cut = tokens + part["tokens"], cut + part["cut"]
            progress.add(len(parts[index]))
    return Embedded(unpacked(packed), tokens, cut)


def _embed(
    folder: Path,
    threads: int,
    name: str | None,
    options: str,
    side: "Side",
    texts: Sequence[str],
) -> dict[str, Any]:
    done = embedded(predictor_of(folder, threads, name, options), texts, side)
    return {"vectors": pack(done.vectors), "tokens": done.tokens, "cut": done.cut}


def embedded(predictor: "Predictor", texts: Sequence[str], side: "Side") -> Embedded:
    """Embed texts, at least one, in this process."""
    task, rows = cast("Searching", predictor.task), [{"text": text} for text in texts]
    windows = predictor.task.encode(
        rows, predictor.bundle.tokenizer, predictor.max_length, parameters=task.side(side)
    )
    vectors = task.matrix(windows, predictor.forward(windows))
    return Embedded(vectors, sum(window.tokens for window in windows), cut_rows(windows))


def pack(vectors: "Matrix") -> Packed:
    """Return vectors in a form that JSON can hold."""
    if isinstance(vectors, np.ndarray):
        arrays = {"numbers": vectors.astype("<f4", copy=False)}
    else:
        arrays = {
            "numbers": vectors.data.astype("<f4", copy=False),
            "indices": vectors.indices.astype("<i4", copy=False),
            "offsets": vectors.indptr.astype("<i8", copy=False),
        }
    encoded = {
        name: base64.b64encode(np.ascontiguousarray(array).data).decode()
        for name, array in arrays.items()
    }
    return {"size": vectors.shape[1], **encoded}


def unpacked(parts: Sequence[Packed]) -> "Matrix":
    """Return the vectors of all parts, one part after another."""
    size = parts[0]["size"]
    if "indices" not in parts[0]:
        return np.concatenate([_array(part, "numbers", "<f4").reshape(-1, size) for part in parts])
    from scipy.sparse import csr_array, vstack

    matrices = []
    for part in parts:
        offsets = _array(part, "offsets", "<i8")
        arrays = _array(part, "numbers", "<f4"), _array(part, "indices", "<i4"), offsets
        matrices.append(csr_array(arrays, shape=(len(offsets) - 1, size)))
    return csr_array(vstack(matrices))


def _array(part: Packed, name: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(part[name]), kind)
