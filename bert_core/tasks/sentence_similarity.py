"""How similar sentences are to another: cosines of their vectors (Reimers and Gurevych 2019)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float

from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Cut, Window
from bert_core.errors import InputError
from bert_core.metrics.regression import correlations
from bert_core.metrics.vector_forms import unit
from bert_core.model.config import EncoderConfig
from bert_core.objectives.graph_scores import VECTORS
from bert_core.tasks.base import Kind, Task, numbered
from bert_core.tasks.compared_texts import VectorParameters
from bert_core.tasks.evaluation import Columns, Evaluated
from bert_core.tasks.feature_extraction import (
    FeatureExtraction,
    FeatureExtractionOptions,
    FeatureExtractionParameters,
    VectorOptions,
)
from bert_core.tasks.modules import SentenceTransformer
from bert_core.tasks.shapes import Row

if TYPE_CHECKING:
    from bert_core.objectives.embedding import Embedding


@dataclass(frozen=True, kw_only=True)
class SimilarityInput:
    """A sentence, and others to compare it with."""

    source_sentence: str
    """The sentence."""
    sentences: list[str]
    """The others, at least one."""

    def __post_init__(self) -> None:
        if not self.sentences:
            raise InputError("sentences: wanted at least one sentence, got an empty list")


@dataclass(frozen=True, kw_only=True)
class Similarities:
    """The expected answer."""

    scores: list[float]
    """How similar each of the sentences is, on any scale."""


class SentenceSimilarity(Task, SentenceTransformer):
    """Rows are `{"source_sentence": …, "sentences": [...], "scores": [...]}`."""

    name = "sentence-similarity"
    objective = "embedding"
    graph_scores = VECTORS
    inputs = SimilarityInput
    target = Similarities
    kinds = (
        Kind(
            name="sentences",
            rows=(
                {
                    "source_sentence": "Open the file.",
                    "sentences": ["The file is opened.", "Return the sum."],
                    "scores": [4.5, 0.5],
                },
                {
                    "source_sentence": "Add the numbers.",
                    "sentences": ["Close the file.", "Return the sum.", "Read a line."],
                    "scores": [0.0, 4.0, 0.5],
                },
            ),
        ),
    )
    primary_metric = "spearman"
    trainable = False
    headless = True
    shares_head_with = ("feature-extraction",)
    single_is_bare = True
    parameters = VectorParameters
    options = VectorOptions
    examples = (
        {
            "source_sentence": "Open the file.",
            "sentences": ["The file is opened.", "Return the sum."],
        },
    )
    cell_types: Mapping[str, pa.DataType] = {"scores": pa.list_(pa.float64())}

    chosen: VectorOptions

    def __init__(self, labels: Sequence[str] = (), options: VectorOptions | None = None) -> None:
        super().__init__(labels, options)
        self._vectors = FeatureExtraction(options=FeatureExtractionOptions(**asdict(self.chosen)))

    @classmethod
    def from_head(cls, other: Task) -> "SentenceSimilarity":
        """Return the task for a model that computes vectors."""
        names = [one.name for one in fields(cls.options)]
        return cls(options=cls.options(**{name: getattr(other.chosen, name) for name in names}))

    @classmethod
    def checked_row(cls, row: Row, options: Any = None, *, learned: bool = True) -> Row:
        if len(row["scores"]) != len(row["sentences"]):
            raise InputError(
                f"wanted a score for each of {len(row['sentences'])} sentences, got "
                f"{len(row['scores'])}: correct the row, or remove it"
            )
        return row

    @property
    def max_length(self) -> int | None:
        return self.chosen.max_length

    def is_comparable(self, other: Evaluated) -> bool:
        return self.name == other.name  # however a model computes its vectors

    def encoder_config(self, config: EncoderConfig) -> EncoderConfig:
        return self._vectors.encoder_config(config)

    def files(self, config: EncoderConfig) -> dict[str, Any]:
        return self._vectors.files(config)

    def build_objective(self, config: EncoderConfig) -> "Embedding":
        return self._vectors.build_objective(config)

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: VectorParameters | None = None,
    ) -> list[Window]:
        """Return a window per row, with the source sentence before the sentences to compare it
        with."""
        texts = [{"text": row["source_sentence"], "negatives": row["sentences"]} for row in rows]
        cutting = FeatureExtractionParameters(**asdict(parameters)) if parameters else None
        windows = self._vectors.encode(texts, tokenizer, max_length, parameters=cutting)
        return [
            replace(window, cuts=tuple(map(_named, window.cuts))) if window.cuts else window
            for window in windows
        ]

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[Float[np.ndarray, "_ size"]],
        parameters: VectorParameters | None = None,
    ) -> list[list[float]]:
        """Return the cosine of each of the row's sentences with its source sentence."""
        scaled = [unit(vectors.astype(np.float64)) for vectors in scores]
        return [(vectors[1:] @ vectors[0]).tolist() for vectors in scaled]

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        """Return cosines and scores, (rows, most sentences in a row); NaN past the last sentence of
        a row."""
        for number, row in enumerate(rows, 1):
            with numbered(number):
                self.checked_row(row)
        most = max(len(row["sentences"]) for row in rows)
        columns = {
            "predicted": np.full((len(rows), most), np.nan),
            "label": np.full((len(rows), most), np.nan),
        }
        for place, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            columns["predicted"][place, : len(answer)] = answer
            columns["label"][place, : len(answer)] = row["scores"]
        return columns

    def constant(self, rows: Sequence[Row]) -> Columns:
        return self.compare(rows, [[1.0] * len(row["sentences"]) for row in rows])

    def cells(self, answer: list[float]) -> dict[str, Any]:
        return {"scores": answer}

    def metrics(self, columns: Columns) -> dict[str, float]:
        """Return `spearman` and `pearson` over the sentences of all rows together."""
        real = ~np.isnan(columns["label"])
        metrics = correlations(columns["predicted"][real], columns["label"][real])
        return {name: metrics[name] for name in ("spearman", "pearson")}

    def faults(self, columns: Columns) -> Float[np.ndarray, "rows"]:
        """Return for each row the share of pairs of its sentences, with different scores, that the
        cosines order wrongly; equal cosines count half."""
        expected, predicted = (
            np.sign(columns[name][:, :, None] - columns[name][:, None, :])
            for name in ("label", "predicted")
        )
        differ = np.abs(np.nan_to_num(expected))
        wrong = np.abs(np.nan_to_num(expected - predicted) * differ) / 2
        return wrong.sum((1, 2)) / np.maximum(1, differ.sum((1, 2)))


def _named(cut: Cut) -> Cut:
    """Return a cut made by feature extraction with the field's name in this task."""
    name = "source_sentence" if cut.name == "text" else cut.name.replace("negatives", "sentences")
    return replace(cut, name=name)
