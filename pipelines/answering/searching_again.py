"""Searches the retrieval set of an evaluation with another model, to compare the two."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool

from bert_core.data.splits import HELD_OUT
from bert_core.errors import RaybertError
from bert_core.manifest import Manifest
from pipelines.answering.embedding import embed
from pipelines.answering.searching import RetrievalConfig, search
from pipelines.corpus.labelled import LabelledConfig, labelled_input, retrieval_files_of
from pipelines.corpus.retrieval_sets import RetrievalSet, read_retrieval_set
from pipelines.runtime.stage_config import StageConfig

if TYPE_CHECKING:
    from bert_core.inference.predictor import Predictor
    from bert_core.metrics.bootstrap import Columns
    from bert_core.tasks.base import Task


def retrieval_set_again(evaluation: Manifest) -> RetrievalSet | str:
    """Return the retrieval set that was evaluated on, or, as a clause, why it is not to be had."""
    known = {each.name for each in fields(LabelledConfig)}
    given = {k: v for k, v in evaluation.config[HELD_OUT].items() if k in known}
    held_out = LabelledConfig(**given, source=str(evaluation.counts["source"]))
    try:
        digest = labelled_input(HELD_OUT, held_out, HELD_OUT).digest
        found = retrieval_files_of(held_out, HELD_OUT)
    except (RaybertError, OSError) as error:
        return f"the retrieval set of the evaluation cannot be read ({error})"
    if found is None or digest != evaluation.inputs[HELD_OUT]:
        return (
            f"{held_out.source} has changed since the evaluation, so run `raybert evaluate` again "
            "to compare them"
        )
    return read_retrieval_set(found, skip=held_out.bad_rows == "skip")


def seen_queries(
    predictor: "Predictor", task: "Task", retrieval_set: RetrievalSet
) -> Bool[np.ndarray, "queries"]:
    """Return which queries a model was trained on, each with a document that is relevant to it."""
    seen = predictor.bundle.has_seen(task, retrieval_set.pairs)
    sizes = [len(judged.places) for judged in retrieval_set.judgements]
    query_of = np.repeat(np.arange(len(sizes)), sizes)
    return np.bincount(query_of, weights=seen, minlength=len(sizes)) > 0


def searched_columns(folder: Path, retrieval_set: RetrievalSet, config: StageConfig) -> "Columns":
    """Return a column per metric, with an entry per query, of the bundle in `folder`."""
    documents = embed(folder, retrieval_set.documents, "document", config)
    queries = embed(folder, retrieval_set.queries, "query", config)
    full = RetrievalConfig(quantized=(), bm25=None)
    return next(search(retrieval_set, documents.vectors, queries.vectors, full)).columns
