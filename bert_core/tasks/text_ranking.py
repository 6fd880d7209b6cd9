"""How well a passage answers a query, for reranking what a search finds (Nogueira and Cho 2019).

The model reads both texts together, as sentence-transformers' CrossEncoder does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from jaxtyping import Float

from bert_core.checks import PositiveFloat, Range, check_fields
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Window
from bert_core.errors import ConfigError, CorpusError, InputError
from bert_core.metrics.retrieval import ranking_columns, ranking_metrics
from bert_core.model.config import EncoderConfig
from bert_core.objectives import ListLoss
from bert_core.objectives.graph_scores import CLASSIFICATION
from bert_core.tasks.base import Kind, Options, Task, numbered
from bert_core.tasks.evaluation import Columns, Evaluated
from bert_core.tasks.modules import (
    SAYS,
    Activation,
    SentenceTransformer,
    activation_entry,
    activation_of,
)
from bert_core.tasks.shapes import Row
from bert_core.tasks.texts import PairInput, TextParameters, numbers_of, sigmoid, text_windows

if TYPE_CHECKING:
    from bert_core.objectives.classification import Classification

MOST_RELEVANT = 60
"""The highest grade whose gain, two to its power, leaves room for sums in fp32."""
RankingLoss = Literal["pointwise", ListLoss]


@dataclass(frozen=True, kw_only=True)
class Relevance:
    """The expected answer for a query and a passage."""

    score: float
    """How relevant the passage is, at least 0: 1 or 0, or a grade."""


@dataclass(frozen=True, kw_only=True)
class TextRankingOptions(Options):
    """How a model scores a query and a passage."""

    free_names: ClassVar = frozenset({"highest_score", "loss", "max_length"})

    activation: Activation = "sigmoid"
    """Function from the model's output to a score: `sigmoid` gives 0 to 1, `identity` the output
    itself. Read from CrossEncoder's files."""
    loss: RankingLoss = "pointwise"
    """`pointwise` learns the score of each row by itself; `listnet` and `lambda` learn the order of
    the passages that a query has in a batch (Cao et al. 2007; LambdaLoss, Wang et al. 2018), which
    follow one another in training."""
    highest_score: PositiveFloat | None = None
    """The highest grade, which trains the score 1; by default, the highest in the training rows,
    but at least 1."""
    max_length: Annotated[int, Range(least=5)] | None = None
    """Tokens at which query and passage together are cut, if lower than the model's positions."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


@dataclass(frozen=True, kw_only=True)
class TextRankingParameters(TextParameters):
    """Parameters of a request to score pairs."""

    raw_scores: bool = False
    """Return the model's output as it is, whatever the option `activation` says."""


class TextRanking(Task, SentenceTransformer):
    """Rows are `{"text": query, "text_pair": passage, "score": 1.0}`, several per query.

    The loss is binary cross-entropy against the score as a share of the highest, as CrossEncoder
    is trained by default, or one of a query's passages together.
    """

    name = "text-ranking"
    objective = "classification"
    graph_scores = CLASSIFICATION
    inputs = PairInput
    target = Relevance
    kinds = (
        Kind(
            name="pairs",
            rows=(
                {
                    "text": "how do I open a file",
                    "text_pair": "Use open to read a file.",
                    "score": 1.0,
                },
                {
                    "text": "how do I open a file",
                    "text_pair": "A list holds objects in order.",
                    "score": 0.0,
                },
            ),
        ),
    )
    primary_metric = "ndcg_at_10"
    shares_head_with = ("text-regression",)
    replaceable = ("text", "text_pair")
    shared = ("text",)
    parameters = TextRankingParameters
    options = TextRankingOptions
    examples = ({"text": "how do I open a file", "text_pair": "Use open to read a file."},)
    cell_types: Mapping[str, pa.DataType] = {"score": pa.float64()}

    chosen: TextRankingOptions

    def __init__(
        self, labels: Sequence[str] = (), options: TextRankingOptions | None = None
    ) -> None:
        super().__init__(labels or ["score"], options)
        self.joint = self.chosen.loss != "pointwise"
        self.kept_together = "queries" if self.joint else None

    @classmethod
    def from_rows(
        cls, rows: Sequence[Row], options: TextRankingOptions | None = None
    ) -> "TextRanking":
        options, scores = options or cls.options(), _scores_of(rows)
        if len(np.unique(scores)) < 2:
            raise CorpusError(
                f"training rows: wanted at least two different scores, found {len(rows)} rows with "
                "one or none: add passages that are less relevant"
            )
        if options.loss != "pointwise":
            _check_lists(rows, scores, options)
            return cls(options=options)
        if options.highest_score is None:
            options = replace(options, highest_score=max(1.0, float(scores.max())))
        return cls(options=options)

    @classmethod
    def checked_row(
        cls, row: Row, options: TextRankingOptions | None = None, *, learned: bool = True
    ) -> Row:
        score, highest = row["score"], None if options is None else options.highest_score
        if score < 0:
            raise InputError(
                f"wanted a score of at least 0, which means not relevant, got {score:g}: correct "
                "the row, or use the task text-regression"
            )
        if learned and highest is not None and score > highest:
            raise InputError(
                f"wanted a score of at most {highest:g}, the highest that the model is trained "
                f"on, got {score:g}: correct the row, or set the option highest_score"
            )
        return row

    @classmethod
    def from_huggingface(
        cls, entries: Mapping[str, Any], labels: list[str]
    ) -> "TextRanking | None":
        activation = activation_of(entries, len(labels))
        if activation is None:
            return None
        longest = entries[SAYS].get("max_seq_length")
        return cls(labels, cls.options(activation=activation, max_length=longest))

    @classmethod
    def from_head(cls, other: Task) -> "TextRanking | None":
        """Return the task for a regression model, with CrossEncoder's default activation. None if
        the model's files name an activation that is not implemented here, or if the model is for
        single texts."""
        if not getattr(other, "ranks", True):
            return None
        return None if getattr(other.chosen, "pairs", None) is False else cls(other.labels)

    def config_entries(self) -> dict[str, Any]:
        return activation_entry(self.chosen.activation)

    @property
    def max_length(self) -> int | None:
        return self.chosen.max_length

    def is_comparable(self, other: Evaluated) -> bool:
        return self.name == other.name  # only the order counts

    def build_objective(self, config: EncoderConfig) -> "Classification":
        from bert_core.objectives.classification import Classification
        from bert_core.objectives.listwise import Listwise

        if self.chosen.loss != "pointwise":
            return Listwise(config, self.chosen.loss)
        # transformers' name for binary cross-entropy, here of one output.
        return Classification(config, 1, problem_type="multi_label_classification")

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: TextRankingParameters | None = None,
    ) -> list[Window]:
        limit = min(max_length, self.chosen.max_length or max_length)
        labels = self._labels(rows) if labelled else {}
        has_own = parameters is None or self.chosen.max_length is not None
        cut_at = None if has_own else tokenizer.longest
        return text_windows(rows, tokenizer, limit, labels, parameters, cut_at)

    def _labels(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        """Return the shares that rows are trained on or, for a loss of lists, their grades, the
        number of each row's query, and the row's share of the query's rows."""
        if self.chosen.loss == "pointwise":
            return {"labels": self._shares(rows)}
        queries = numbers_of(row["text"] for row in rows)
        return {
            "labels": _scores_of(rows, self.chosen)[:, None].astype(np.float32),
            "queries": queries,
            "query_shares": (1 / np.bincount(queries)[queries]).astype(np.float32),
        }

    def _shares(self, rows: Sequence[Row]) -> Float[np.ndarray, "rows 1"]:
        """Return the scores as shares of the highest."""
        highest = self.chosen.highest_score or 1.0
        scores = _scores_of(rows, replace(self.chosen, highest_score=highest))
        return (scores[:, None] / highest).astype(np.float32)

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[Float[np.ndarray, "1"]],
        parameters: TextRankingParameters | None = None,
    ) -> list[dict[str, float]]:
        raw = parameters is not None and parameters.raw_scores
        outputs = np.array([score for (score,) in scores], dtype=np.float64)
        if not raw and self.chosen.activation == "sigmoid":
            outputs = sigmoid(outputs)
        return [{"score": score} for score in outputs.tolist()]

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        """Return for each row the metrics of its query, over all rows with the same query."""
        predicted = np.array([answer["score"] for answer in answers], dtype=np.float64)
        queries = numbers_of(row["text"] for row in rows)
        return ranking_columns(predicted, _scores_of(rows), queries)

    def constant(self, rows: Sequence[Row]) -> Columns:
        return self.compare(rows, [{"score": 0.0}] * len(rows))

    def cells(self, answer: dict[str, float]) -> dict[str, Any]:
        return dict(answer)

    def metrics(self, columns: Columns) -> dict[str, float]:
        return ranking_metrics(columns)

    def faults(self, columns: Columns) -> Float[np.ndarray, "rows"]:
        """Return for each row, of the query's passages with another score, the share that is ranked
        on the wrong side of the row's passage."""
        return columns["misplaced"]


def _check_lists(
    rows: Sequence[Row], scores: Float[np.ndarray, "rows"], options: TextRankingOptions
) -> None:
    """Check rows for a loss of lists.

    Raises: CorpusError if no query has passages to order, or if a gain is too large; ConfigError
        for an option that such a loss does not use.
    """
    if options.highest_score is not None:
        raise ConfigError(
            f"options.highest_score: wanted none with the loss {options.loss}, which reads scores "
            f"as they are, got {options.highest_score:g}: leave it out"
        )
    queries = numbers_of(row["text"] for row in rows)
    grades = np.unique(np.stack([queries, scores]), axis=1).shape[1]
    if grades == queries.max() + 1:
        raise CorpusError(
            f"training rows: wanted a query with passages of different scores, which the loss "
            f"{options.loss} compares, got {grades:,} queries without: add rows, or set "
            "options.loss = 'pointwise'"
        )
    if options.loss == "lambda" and scores.max() > MOST_RELEVANT:
        raise CorpusError(
            f"training rows: wanted scores of at most {MOST_RELEVANT} for the loss lambda, whose "
            f"gain is two to their power, got {scores.max():g}: scale them, or set options.loss = "
            "'listnet'"
        )


def _scores_of(
    rows: Sequence[Row], options: TextRankingOptions | None = None
) -> Float[np.ndarray, "rows"]:
    """Return the scores of the rows. Raises: CorpusError naming a row whose score is below 0 or,
    with options, above the highest."""
    for number, row in enumerate(rows, 1):
        with numbered(number):
            TextRanking.checked_row(row, options)
    return np.array([row["score"] for row in rows], dtype=np.float64)
