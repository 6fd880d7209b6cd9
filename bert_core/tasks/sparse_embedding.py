"""Sparse vectors for search by words: a weight per entry of the vocabulary (SPLADE, Formal et al.
2021)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import numpy as np
import pyarrow as pa
from jaxtyping import Float

from bert_core.checks import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Range,
    ShareBelowOne,
    check_fields,
)
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
from bert_core.tasks.vector_rows import kind_of, labels_of, loss_of

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    from bert_core.objectives.splade import Splade

SPLADE_POOLING = "1_SpladePooling/config.json"
_TYPES = [
    "sentence_transformers.sparse_encoder.models.MLMTransformer",
    "sentence_transformers.sparse_encoder.models.SpladePooling",
]
_FIRST = ("Transformer", "MLMTransformer")


SparseLoss = Literal["contrastive", "kl", "margin_mse"]
QUERY_ENTRIES, PASSAGE_ENTRIES = "query_entries", "passage_entries"
"""Columns and metrics: the entries of a vector that are not 0."""


@dataclass(frozen=True, kw_only=True)
class SparseEmbeddingOptions(TowerOptions):
    """How a model turns the scores of tokens into a vector, by sentence-transformers' names, and
    how it is trained to do so."""

    free_names: ClassVar = frozenset(
        {"loss", "temperature", "query_flops", "passage_flops", "flops_warmup", "max_length"}
    )

    pooling: EntryPooling = "max"
    """Maximum or sum over all tokens, special ones included."""
    activation: EntryWeight = "relu"
    """Weight of a score: log(1 + ReLU(score)), or the logarithm twice."""
    max_length: Annotated[int, Range(least=3)] | None = None
    """Tokens at which texts are cut, if lower than the model's positions."""
    loss: SparseLoss | None = None
    """`contrastive`, for which the texts of the other rows of a batch, over all workers, are a
    row's negatives; for rows with a teacher's scores `kl` (a row's texts as a list), or
    `margin_mse` (differences from the `text_pair`). Detected from the rows; `kl` if they have
    scores."""
    temperature: PositiveFloat = 1.0
    """Divisor of the products of vectors; a teacher's scores are not divided."""
    query_flops: NonNegativeFloat = 5e-5
    """Weight of what the entries of queries (`text`) cost: of the squares of their mean weights
    over all rows of a batch (FLOPS; Paria et al. 2020). More gives sparser vectors."""
    passage_flops: NonNegativeFloat = 3e-5
    """The same for passages (`text_pair` and `negatives`)."""
    flops_warmup: ShareBelowOne = 0.33
    """Share of the training in which both weights rise, with the square of the step (Formal et al.
    2021)."""


@dataclass(frozen=True, kw_only=True)
class SparseEmbeddingParameters(VectorParameters):
    """Parameters of a request for sparse vectors."""

    top_k: PositiveInt | None = None
    """Keep the largest entries only; None keeps all that are not 0."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


class SparseEmbedding(Task, SentenceTransformer, Searching):
    """Rows are `{"text": query, "text_pair": passage}`, with or without `negatives`.

    A model for fill-mask is a good start, since its head is trained further.
    """

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
    joint = True

    @classmethod
    def from_rows(
        cls, rows: Sequence[Row], options: SparseEmbeddingOptions | None = None
    ) -> "SparseEmbedding":
        chosen = options or cls.options()
        loss = loss_of(kind_of(rows, cls.checked_row), chosen, cls.options(), {})
        return cls(options=replace(chosen, loss=cast("SparseLoss", loss)))

    @classmethod
    def from_huggingface(
        cls, entries: Mapping[str, Any], labels: list[str]
    ) -> "SparseEmbedding | None":
        return None  # nothing in a masked-word model says that it was trained for such vectors

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
        from bert_core.objectives.splade import Flops, Splade

        chosen = self.chosen
        return Splade(
            config,
            chosen.pooling,
            chosen.activation,
            chosen.loss or "contrastive",
            chosen.temperature,
            Flops(
                queries=chosen.query_flops,
                passages=chosen.passage_flops,
                warmup=chosen.flops_warmup,
            ),
        )

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: SparseEmbeddingParameters | None = None,
    ) -> list[Window]:
        """Return a window for each row, with a sequence per text."""
        parameters = parameters or self.parameters(truncate=True)
        limit = min(max_length, self.chosen.max_length or max_length)
        texts = [texts_of(row) for row in rows]
        all_texts = [text for row_texts in texts for text in row_texts]
        prompts = [self.chosen.prompts_before(len(each), parameters.prompt_name) for each in texts]
        before = list(chain.from_iterable(prompts))
        sequences = iter(sequences_of(tokenizer, all_texts, limit, parameters, before))
        labels: Iterator[dict[str, np.ndarray]] = iter(())
        if labelled:
            labels = labels_of(rows, kind_of(rows, self.checked_row))
        windows = []
        for number, (row, row_texts) in enumerate(zip(rows, texts, strict=True)):
            ids, cuts = zip(*(next(sequences) for _ in row_texts), strict=True)
            windows.append(
                Window(
                    row=number,
                    ids=ids,
                    segment_b_start=tuple(map(len, ids)),
                    labels=next(labels, {}),
                    cuts=tuple(chain.from_iterable(named(row, cuts))),
                )
            )
        return windows

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[Float[np.ndarray, "*texts vocab"]],
        parameters: SparseEmbeddingParameters | None = None,
    ) -> list[list[Any]]:
        """Return the non-zero entries of each row's vector, by index; a list of vectors for rows of
        several texts."""
        top_k = None if parameters is None else parameters.top_k
        every = [[_entries(each, top_k) for each in np.atleast_2d(own)] for own in scores]
        return [vectors if len(vectors) > 1 else vectors[0] for vectors in every]

    def matrix(
        self, windows: Sequence[Window], scores: Sequence[Float[np.ndarray, "*texts vocab"]]
    ) -> "csr_array":
        """Return the vectors, whose products count the words that both texts have or imply."""
        from scipy.sparse import csr_array, vstack

        return csr_array(vstack([csr_array(np.atleast_2d(vectors)) for vectors in scores]))

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
        entries = [np.count_nonzero(np.atleast_2d(each), axis=1) for each in scores]
        return [2 * int(np.minimum(each, top_k or each.max()).sum()) for each in entries]

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        """Return the columns with the rank of `text_pair`, by dot product, among all texts with
        which any row is compared, and with the entries of each row's query and, on average, of its
        passages."""
        search = search_of(rows)
        vectors = [vector for answer in answers for vector in answer[1:]]
        first = [answer[0] for answer in answers]
        both = _matrix([*first, *(vectors[place] for place in search.places)])
        ranks = sparse_ranks_of(both[: len(first)], both[len(first) :], search.targets)
        entries = [[len(vector) for vector in answer] for answer in answers]
        return retrieval_columns(ranks, search.queries) | {
            QUERY_ENTRIES: np.array([own[0] for own in entries], dtype=np.float64),
            PASSAGE_ENTRIES: np.array([np.mean(own[1:]) for own in entries]),
        }

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
        entries = {name: float(columns[name].mean()) for name in (QUERY_ENTRIES, PASSAGE_ENTRIES)}
        return retrieval_metrics(columns) | entries


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
