"""Vectors of texts, for search and similarity (Reimers and Gurevych 2019)."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Num

from bert_core.checks import PositiveFloat, PositiveInt, Range, check_fields
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Ids, Window, ids_of, joined
from bert_core.errors import ConfigError, CorpusError, InputError
from bert_core.metrics.regression import correlations
from bert_core.metrics.retrieval import ranks_of, retrieval_columns, retrieval_metrics
from bert_core.model.config import EncoderConfig
from bert_core.tasks.base import Columns, Kind, Options, Parameters, Task
from bert_core.tasks.shapes import Row
from bert_core.tasks.texts import TextInput

if TYPE_CHECKING:
    from bert_core.objectives.embedding import Embedding

Loss = Literal["contrastive", "cosine"]
Pooling = Literal["mean", "cls"]
Side = Literal["left", "right"]
MODULES, POOLING, SETTINGS = "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"
"""Files of sentence-transformers, which say how its models make a vector of a text."""
_MODES: dict[Pooling, str] = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
}


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """What is right of a text and its `text_pair`: how alike they are, or that they belong."""

    score: float | None = None
    """How alike; rows without are texts that belong together."""
    negatives: list[str] | None = None
    """Texts that the first one does not belong to."""


@dataclass(frozen=True, kw_only=True)
class FeatureExtractionOptions(Options):
    """How a model makes a vector of a text, and how it is trained to."""

    pooling: Pooling = "mean"
    """The `mean` of all tokens, special ones included, or the vector of `cls`, the first."""
    layer: PositiveInt | None = None
    """After how many layers; the encoder has no others then. All where this is not given."""
    normalize: bool = False
    """Whether vectors are scaled to length 1."""
    max_length: Annotated[int, Range(least=3)] | None = None
    """Where texts are cut, if sooner than the model's positions end."""
    loss: Loss | None = None
    """`cosine` where training rows have a score, else `contrastive`, which the rows say."""
    highest_score: PositiveFloat | None = None
    """The score of texts that mean the same; the highest of the training rows where not given."""
    group_size: Annotated[int, Range(least=2)] = 16
    """Rows whose texts are each other's negatives. They are computed together, so each is a
    micro-batch at least, and `batch_size` holds one for each worker."""
    temperature: PositiveFloat = 0.05
    """What cosines are divided by (Gao et al. 2021, section 3)."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


@dataclass(frozen=True, kw_only=True)
class FeatureExtractionParameters(Parameters):
    """Hugging Face's parameters of feature extraction."""

    cut_by: ClassVar[str | None] = "truncate"

    normalize: bool | None = None
    """Whether vectors are scaled to length 1; None does as the model was made for."""
    truncate: bool = False
    """Whether to cut a text that is longer than the model's positions; else it is refused."""
    truncation_direction: Side = "right"
    """Which end of it is cut off."""
    per_token: bool = False
    """Whether to give a vector for every token, special ones included, instead of one."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


class FeatureExtraction(Task):
    """Rows are `{"text": …, "text_pair": …}` with a `score`, or with `negatives` or nothing."""

    name = "feature-extraction"
    objective = "embedding"
    inputs = TextInput
    target = Likeness
    kinds = (
        Kind(
            name="pairs",
            rows=(
                {"text": "how do I open a file", "text_pair": "Use open to read a file."},
                {"text": "what is a list", "text_pair": "A list holds objects in order."},
            ),
        ),
        Kind(
            name="negatives",
            rows=(
                {
                    "text": "how do I open a file",
                    "text_pair": "Use open to read a file.",
                    "negatives": ["A list holds objects in order."],
                },
                {
                    "text": "what is a list",
                    "text_pair": "A list holds objects in order.",
                    "negatives": ["Use open to read a file.", "A set has no order."],
                },
            ),
        ),
        Kind(
            name="scores",
            rows=(
                {"text": "Open the file.", "text_pair": "The file is opened.", "score": 4.5},
                {"text": "Open the file.", "text_pair": "Return the sum.", "score": 0.5},
            ),
        ),
    )
    primary_metric = "mrr"
    headless = True
    parameters_beside = True
    shared = ("text",)
    parameters = FeatureExtractionParameters
    options = FeatureExtractionOptions
    examples = ("A text to find again.",)
    cell_types: Mapping[str, pa.DataType] = {"vector": pa.list_(pa.float32())}

    chosen: FeatureExtractionOptions

    def __init__(
        self, labels: Sequence[str] = (), options: FeatureExtractionOptions | None = None
    ) -> None:
        super().__init__(labels, options)
        if self.chosen.loss == "contrastive":
            self.group_rows = self.chosen.group_size

    @classmethod
    def from_rows(
        cls, rows: Sequence[Row], options: FeatureExtractionOptions | None = None
    ) -> "FeatureExtraction":
        chosen, loss = options or cls.options(), _loss_of(rows)
        if chosen.loss not in (None, loss):
            has = "have" if loss == "cosine" else "have no"
            raise CorpusError(
                f"training rows: wanted rows for the loss {chosen.loss}, got rows that {has} "
                f"score, which are for {loss}: leave the option out, or give other rows"
            )
        highest = chosen.highest_score
        if loss == "cosine" and highest is None:
            highest = float(max(row["score"] for row in rows))
            if not highest > 0:
                raise CorpusError(
                    f"training rows: wanted a score above 0, the highest is {highest:g}: give "
                    "the option highest_score, the score of texts that mean the same"
                )
        return cls(options=replace(chosen, loss=loss, highest_score=highest))

    @classmethod
    def from_modules(cls, read: Callable[[str], Any]) -> "FeatureExtraction | None":
        """The task of a model of sentence-transformers; None where it makes other vectors.

        Args:
            read: gives the JSON value of one of its files; None where there is no such file.
        """
        kinds = [str(one.get("type", "")).rpartition(".")[2] for one in read(MODULES) or ()]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            return None
        says = read(POOLING) or {}
        modes = [name for name, value in says.items() if name[:13] == "pooling_mode_" and value]
        for pooling, mode in _MODES.items():
            if modes == [mode] or says.get("pooling_mode") == pooling:
                longest = (read(SETTINGS) or {}).get("max_seq_length")
                chosen = cls.options(pooling=pooling, normalize=len(kinds) == 3, max_length=longest)
                return cls(options=chosen)
        return None

    def files(self, config: EncoderConfig) -> dict[str, Any]:
        """Those by which sentence-transformers makes the same vectors of the bundle."""
        kinds = ["Transformer", "Pooling", *(["Normalize"] if self.chosen.normalize else [])]
        modules = [
            {
                "idx": place,
                "name": str(place),
                "path": f"{place}_{kind}" if place else "",
                "type": f"sentence_transformers.models.{kind}",
            }
            for place, kind in enumerate(kinds)
        ]
        modes = {mode: self.chosen.pooling == name for name, mode in _MODES.items()}
        longest = self.chosen.max_length or config.max_length
        return {
            MODULES: modules,
            POOLING: {"word_embedding_dimension": config.hidden_size, **modes},
            SETTINGS: {"max_seq_length": longest, "do_lower_case": False},
        }

    def request_of(self, row: Row) -> str:
        """The row's own text, whatever it is compared with: a vector is of one text."""
        return row["text"]

    def encoder_config(self, config: EncoderConfig) -> EncoderConfig:
        layer = self.chosen.layer
        if layer is None:
            return config
        if layer > config.num_hidden_layers:
            raise ConfigError(
                f"options.layer: wanted at most {config.num_hidden_layers}, the layers that the "
                f"model has, got {layer}"
            )
        return replace(config, num_hidden_layers=layer)

    def build_objective(self, config: EncoderConfig) -> "Embedding":
        from bert_core.objectives.embedding import Embedding

        return Embedding(self.chosen.loss or "contrastive", self.chosen.temperature)

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: FeatureExtractionParameters | None = None,
    ) -> list[Window]:
        parameters = parameters or self.parameters(truncate=True)
        limit = min(max_length, self.chosen.max_length or max_length)
        texts = [_texts_of(row) for row in rows]
        every = [text for its in texts for text in its]
        sequences = iter(self._sequences(tokenizer, every, limit, parameters))
        labels: Iterator[dict[str, np.ndarray]] = iter(())
        if labelled:
            labels = self._labels(rows, texts, every)
        windows = []
        for number, its in enumerate(texts):
            if parameters.per_token and len(its) > 1:
                raise InputError(
                    f"inputs[{number}]: wanted one text, for a vector a token, got {len(its)}: "
                    "leave text_pair or per_token out"
                )
            ids = tuple(next(sequences) for _ in its)
            windows.append(
                Window(
                    row=number,
                    ids=ids,
                    segment_b_start=tuple(map(len, ids)),
                    positions=self._runs(ids, per_token=parameters.per_token),
                    labels=next(labels, {}),
                )
            )
        return windows

    def _sequences(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[str],
        limit: int,
        parameters: FeatureExtractionParameters,
    ) -> Iterator[Ids]:
        for ids in ids_of(tokenizer, texts):
            if parameters.truncate and parameters.truncation_direction == "left":
                ids = ids[-(limit - 2) :]
            yield joined(tokenizer, ids, None, limit if parameters.truncate else None).ids

    def _runs(self, ids: tuple[Ids, ...], *, per_token: bool) -> dict[str, np.ndarray]:
        """The tokens that each vector is the mean of."""
        if per_token:
            places = np.arange(len(ids[0]))
            return {"vector_starts": places, "vector_ends": places + 1}
        mean = self.chosen.pooling == "mean"
        ends = np.array([len(each) if mean else 1 for each in ids], dtype=np.int64)
        return {"vector_starts": np.zeros_like(ends), "vector_ends": ends}

    def _labels(
        self, rows: Sequence[Row], texts: Sequence[Sequence[str]], every: Sequence[str]
    ) -> Iterator[dict[str, np.ndarray]]:
        """For each text of a row how alike it is to the first, and a number that names it."""
        scored = _loss_of(rows) == "cosine"
        names = np.unique(every, return_inverse=True)[1].astype(np.int64)
        ends = np.cumsum([len(its) for its in texts])
        for row, own in zip(rows, np.split(names, ends[:-1]), strict=True):
            alike = np.zeros(len(own), dtype=np.float32)
            alike[:2] = 1
            if scored:
                alike[1] = row["score"] / (self.chosen.highest_score or 1.0)
            yield {"similarities": alike, "texts": own}

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[Float[np.ndarray, "_ size"]],
        parameters: FeatureExtractionParameters | None = None,
    ) -> list[list[Any]]:
        """A vector for each row; of a row of several texts, or with `per_token`, a list of them."""
        parameters = parameters or self.parameters()
        scaled = self.chosen.normalize if parameters.normalize is None else parameters.normalize
        answers = []
        for window, vectors in zip(windows, scores, strict=True):
            found = (unit(vectors) if scaled else vectors).tolist()
            answers.append(found if parameters.per_token or len(window.ids) > 1 else found[0])
        return answers

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        """Rows with a score: `predicted`, the cosine. Others: the rank of `text_pair` among all
        texts that rows of the set are compared with."""
        vectors = [unit(np.array(answer, dtype=np.float32)) for answer in answers]
        firsts, pairs = (np.stack([each[place] for each in vectors]) for place in (0, 1))
        if _loss_of(rows) == "cosine":
            scores = np.array([row["score"] for row in rows], dtype=np.float64)
            return {"predicted": (firsts * pairs).sum(-1, dtype=np.float64), "label": scores}
        texts = [_texts_of(row) for row in rows]
        compared = [text for its in texts for text in its[1:]]
        _, places, names = np.unique(compared, return_index=True, return_inverse=True)
        passages = np.concatenate([each[1:] for each in vectors])[places]
        sizes = np.array([len(its) - 1 for its in texts])
        right = names[np.cumsum(sizes) - sizes]
        queries = np.unique([its[0] for its in texts], return_inverse=True)[1]
        return retrieval_columns(ranks_of(firsts, passages, right), queries)

    def constant(self, rows: Sequence[Row]) -> Columns:
        return self.compare(rows, [[[1.0]] * len(_texts_of(row)) for row in rows])

    def cells(self, answer: list[Any]) -> dict[str, Any]:
        """The vector; the first where there are several, so `[CLS]`'s of those of tokens."""
        return {"vector": answer[0] if isinstance(answer[0], list) else answer}

    def metrics(self, columns: Columns) -> dict[str, float]:
        if "rank" in columns:
            return retrieval_metrics(columns)
        found = correlations(columns["predicted"], columns["label"])
        return {name: found[name] for name in ("spearman", "pearson")}

    def faults(self, columns: Columns) -> Num[np.ndarray, "rows"]:
        """Of rows with a score, by how much of all ranks the cosine's rank misses the score's."""
        if "rank" in columns:
            return super().faults(columns)
        from scipy.stats import rankdata  # takes a second to import

        predicted, label = (rankdata(columns[name]) for name in ("predicted", "label"))
        return np.abs(predicted - label) / max(1, len(label) - 1)

    def wrong(self, columns: Columns) -> Bool[np.ndarray, "rows"] | None:
        return super().wrong(columns) if "rank" in columns else None

    def is_comparable(self, other: Task) -> bool:
        return self.name == other.name  # how a model makes vectors is its own affair

    def main_metric(self, metrics: Collection[str]) -> str:
        return "spearman" if "spearman" in metrics else self.primary_metric


def _texts_of(row: Row) -> list[str]:
    """A row's own text, and those that it is compared with."""
    pair = row.get("text_pair")
    return [row["text"], *([] if pair is None else [pair]), *(row.get("negatives") or ())]


def _loss_of(rows: Sequence[Row]) -> Loss:
    """What rows are for. Raises: CorpusError if one lacks a pair, or only some have a score."""
    scored = rows[0].get("score") is not None
    for number, row in enumerate(rows, 1):
        if row.get("text_pair") is None:
            raise CorpusError(
                f"row {number}: wanted a text_pair, the text that is compared with the first, "
                f"there is none: name its column, or take the row out"
            )
        if (row.get("score") is not None) != scored:
            raise CorpusError(
                f"row {number}: wanted a score in every row or in none, row 1 has "
                f"{'one' if scored else 'none'}: give both kinds apart"
            )
        if scored and row.get("negatives"):
            raise CorpusError(
                f"row {number}: wanted a score or negatives, got both: take one of them out"
            )
    return "cosine" if scored else "contrastive"


def unit(vectors: Float[np.ndarray, "*rows size"]) -> Float[np.ndarray, "*rows size"]:
    """The vectors scaled to length 1; of zeros alone they stay zeros."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(lengths, 1e-12)
