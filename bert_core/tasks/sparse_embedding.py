"""Sparse vectors for search by words: a weight per entry of the vocabulary (SPLADE, Formal et al.
2021)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float

from bert_core.checks import PositiveInt, Range, check_fields
from bert_core.data.ragged import offsets_of
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Window
from bert_core.errors import ConfigError, InputError
from bert_core.metrics.retrieval import retrieval_columns, retrieval_metrics, sparse_ranks_of
from bert_core.model.config import EncoderConfig
from bert_core.objectives import EntryPooling, EntryWeight
from bert_core.objectives.graph_scores import SPARSE_VECTORS
from bert_core.tasks.base import Kind, Remarks, Task
from bert_core.tasks.compared_texts import (
    DISTILLED,
    OtherPassages,
    TowerOptions,
    VectorParameters,
    check_passages,
    named,
    remarks_on_negatives,
    search_of,
    sequences_of,
    texts_of,
)
from bert_core.tasks.evaluation import Columns, Evaluated
from bert_core.tasks.modules import (
    ABOUT,
    MODULES,
    SETTINGS,
    Read,
    SentenceTransformer,
    kinds_of,
    longest_of,
    lowers_case,
    modules_of,
    prompt_entries,
    prompts_of,
    unread_settings,
)
from bert_core.tasks.searching import Searching
from bert_core.tasks.shapes import Row
from bert_core.tasks.texts import TextInput

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    from bert_core.objectives.splade import Splade

SPLADE_POOLING = "1_SpladePooling/config.json"
_TYPES = [
    "sentence_transformers.sparse_encoder.models.MLMTransformer",
    "sentence_transformers.sparse_encoder.models.SpladePooling",
]
_FIRST = ("Transformer", "MLMTransformer")


@dataclass(frozen=True, kw_only=True)
class SparseEmbeddingOptions(TowerOptions):
    """How a model turns the scores of tokens into a vector; sentence-transformers' names."""

    pooling: EntryPooling = "max"
    """Maximum or sum over all tokens, special ones included."""
    activation: EntryWeight = "relu"
    """Weight of a score: log(1 + ReLU(score)), or the logarithm twice."""
    max_length: Annotated[int, Range(least=3)] | None = None
    """Tokens at which texts are cut, if lower than the model's positions."""


@dataclass(frozen=True, kw_only=True)
class SparseEmbeddingParameters(VectorParameters):
    """Parameters of a request for sparse vectors."""

    top_k: PositiveInt | None = None
    """Keep the largest entries only; None keeps all that are not 0."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


class SparseEmbedding(Task, SentenceTransformer, Searching):
    """Rows are `{"text": query, "text_pair": passage}`, with or without `negatives`."""

    name = "sparse-embedding"
    objective = "mlm"
    graph_scores = SPARSE_VECTORS
    inputs = TextInput
    target = OtherPassages
    kinds = (
        Kind(
            name="pairs",
            rows=(
                {
                    "text": "how do I open a file",
                    "text_pair": "Use open to read a file.",
                    "negatives": ["A list holds objects in order."],
                },
                {"text": "what is a list", "text_pair": "A list holds objects in order."},
            ),
        ),
        DISTILLED,
    )
    primary_metric = "mrr"
    decide_space = ("pooling", "activation")
    is_sparse = True
    pipeline_tag = "feature-extraction"
    trainable = False
    pretrained = True
    shares_head_with = ("fill-mask",)
    shared = ("text",)
    parameters = SparseEmbeddingParameters
    options = SparseEmbeddingOptions
    examples = ("A text to find again.",)
    cell_types: Mapping[str, pa.DataType] = {
        "indices": pa.list_(pa.int64()),
        "values": pa.list_(pa.float64()),
    }

    chosen: SparseEmbeddingOptions

    @classmethod
    def from_modules(cls, read: Read) -> "SparseEmbedding | None":
        kinds, settings = kinds_of(read), read(SPLADE_POOLING) or {}
        if len(kinds) != 2 or kinds[0] not in _FIRST or kinds[1] != "SpladePooling":
            return None
        if lowers_case(read) or unread_settings(read):
            return None
        chosen = {
            "pooling": settings.get("pooling_strategy", "max"),
            "activation": settings.get("activation_function", "relu"),
            "max_length": longest_of(read),
            **prompts_of(read(ABOUT) or {}),
        }
        try:
            return cls(options=cls.options_of(chosen))
        except ConfigError:
            return None

    def files(self, config: EncoderConfig) -> dict[str, Any]:
        """Return the files with which sentence-transformers computes the same vectors from the
        bundle."""
        return {
            MODULES: modules_of(_TYPES),
            ABOUT: {"model_type": "SparseEncoder"}
            | prompt_entries(self.chosen.prompts, self.chosen.default_prompt),
            SPLADE_POOLING: {
                "pooling_strategy": self.chosen.pooling,
                "activation_function": self.chosen.activation,
                "word_embedding_dimension": config.vocab_size,
            },
            SETTINGS: {
                "max_seq_length": self.chosen.max_length or config.max_length,
                "do_lower_case": False,
            },
        }

    @classmethod
    def checked_row(cls, row: Row, options: Any = None, *, learned: bool = True) -> Row:
        check_passages(row)
        return row

    def remarks(self, rows: Sequence[Row]) -> Remarks:
        return super().remarks(rows) | remarks_on_negatives(rows)

    @property
    def max_length(self) -> int | None:
        return self.chosen.max_length

    def is_comparable(self, other: Evaluated) -> bool:
        return self.name == other.name  # however a model computes its vectors

    def request_of(self, row: Row) -> str:
        """Return the row's `text` only, without texts to compare it with: a vector is for one
        text."""
        return row["text"]

    def build_objective(self, config: EncoderConfig) -> "Splade":
        from bert_core.objectives.splade import Splade

        return Splade(config, self.chosen.pooling, self.chosen.activation)

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: SparseEmbeddingParameters | None = None,
    ) -> list[Window]:
        """Return a window for each text of each row."""
        parameters = parameters or self.parameters(truncate=True)
        limit = min(max_length, self.chosen.max_length or max_length)
        texts = [texts_of(row) for row in rows]
        all_texts = [text for row_texts in texts for text in row_texts]
        prompts = [self.chosen.prompts_before(len(each), parameters.prompt_name) for each in texts]
        before = list(chain.from_iterable(prompts))
        sequences = iter(sequences_of(tokenizer, all_texts, limit, parameters, before))
        windows = []
        for number, (row, row_texts) in enumerate(zip(rows, texts, strict=True)):
            all_ids, cuts = zip(*(next(sequences) for _ in row_texts), strict=True)
            windows += [
                Window(row=number, ids=(ids,), segment_b_start=(len(ids),), cuts=own)
                for ids, own in zip(all_ids, named(row, cuts), strict=True)
            ]
        return windows

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[Float[np.ndarray, "vocab"]],
        parameters: SparseEmbeddingParameters | None = None,
    ) -> list[list[Any]]:
        """Return the non-zero entries of each row's vector, by index; a list of vectors for rows of
        several texts."""
        top_k = None if parameters is None else parameters.top_k
        remaining = iter(scores)
        answers = []
        for row in rows:
            vectors = [_entries(next(remaining), top_k) for _ in texts_of(row)]
            answers.append(vectors if len(vectors) > 1 else vectors[0])
        return answers

    def matrix(
        self, windows: Sequence[Window], scores: Sequence[Float[np.ndarray, "vocab"]]
    ) -> "csr_array":
        """Return the vectors, whose products count the words that both texts have or imply."""
        from scipy.sparse import csr_array, vstack

        return csr_array(vstack([csr_array(vector[None]) for vector in scores]))

    def numbers(
        self,
        windows: Sequence[Window],
        hidden_size: int,
        scores: Sequence[np.ndarray] | None = None,
        parameters: SparseEmbeddingParameters | None = None,
    ) -> list[int]:
        """Return two numbers per entry: its index and its weight."""
        top_k = None if parameters is None else parameters.top_k
        if scores is None:
            return super().numbers(windows, hidden_size)
        entries = [int(np.count_nonzero(each)) for each in scores]
        return [2 * (each if top_k is None else min(each, top_k)) for each in entries]

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        """Return the columns with the rank of `text_pair`, by dot product, among all texts with
        which any row is compared."""
        search = search_of(rows)
        vectors = [vector for answer in answers for vector in answer[1:]]
        first = [answer[0] for answer in answers]
        both = _matrix([*first, *(vectors[place] for place in search.places)])
        ranks = sparse_ranks_of(both[: len(first)], both[len(first) :], search.targets)
        return retrieval_columns(ranks, search.queries)

    def constant(self, rows: Sequence[Row]) -> Columns:
        entry = [{"index": 0, "value": 1.0}]
        return self.compare(rows, [[entry] * len(texts_of(row)) for row in rows])

    def cells(self, answer: list[Any]) -> dict[str, Any]:
        """Return the vector; the first if there are several."""
        vector = answer[0] if answer and isinstance(answer[0], list) else answer
        return {
            "indices": [entry["index"] for entry in vector],
            "values": [entry["value"] for entry in vector],
        }

    def metrics(self, columns: Columns) -> dict[str, float]:
        return retrieval_metrics(columns)


def _entries(vector: Float[np.ndarray, "vocab"], top_k: int | None) -> list[dict[str, Any]]:
    indices = np.flatnonzero(vector)
    if top_k is not None:
        indices = np.sort(indices[np.argsort(-vector[indices], kind="stable")[:top_k]])
    values = vector[indices].tolist()
    return [
        {"index": index, "value": value}
        for index, value in zip(indices.tolist(), values, strict=True)
    ]


def _matrix(vectors: Sequence[Sequence[Mapping[str, Any]]]) -> "csr_array":
    """Return a matrix with a row per vector, as wide as the largest index needs."""
    from scipy.sparse import csr_array

    indices = [entry["index"] for vector in vectors for entry in vector]
    values = [entry["value"] for vector in vectors for entry in vector]
    offsets = offsets_of([len(vector) for vector in vectors])
    shape = (len(vectors), 1 + max(indices, default=0))
    return csr_array((values, indices, offsets), shape=shape, dtype=np.float64)
