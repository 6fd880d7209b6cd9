"""Vectors for texts, for search and similarity (Reimers and Gurevych 2019)."""

import base64
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Num

from bert_core.checks import PositiveFloat, PositiveInt, Range, check_fields
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Ids, Window
from bert_core.errors import ConfigError, CorpusError, InputError
from bert_core.metrics.regression import correlations
from bert_core.metrics.retrieval import ranks_of, retrieval_columns, retrieval_metrics
from bert_core.metrics.vector_forms import unit
from bert_core.model.config import EncoderConfig, Pooling
from bert_core.objectives import VectorLoss
from bert_core.objectives.graph_scores import VECTORS
from bert_core.tasks.base import Kind, Remarks, Task, numbered
from bert_core.tasks.compared_texts import (
    DISTILLED,
    OtherPassages,
    PromptOptions,
    TowerOptions,
    VectorParameters,
    check_pairs,
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
from bert_core.tasks.vector_rows import RowKind, kind_of, labels_of, loss_of

if TYPE_CHECKING:
    from bert_core.objectives.embedding import Embedding

POOLING = "1_Pooling/config.json"
_OF_OTHERS: Mapping[VectorLoss, tuple[str, ...]] = {
    "contrastive": ("highest_score",),
    "cosine": ("temperature",),
    "kl": ("highest_score",),
    "margin_mse": ("highest_score",),
}
"""Loss → the options that only others read."""
CONFIG, MATRYOSHKA = "config.json", "matryoshka_dimensions"
"""The file and the entry with the lengths to which vectors may be cut (vLLM's convention)."""
_CUT = re.compile(r"_dim_\d+$")
"""Ending of a column or metric that is of vectors cut to this length."""
_MODES: dict[Pooling, str] = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
}


@dataclass(frozen=True, kw_only=True)
class Likeness(OtherPassages):
    """Labels of a text and its `text_pair`: how similar they are, or that they belong together."""

    score: float | None = None
    """Similarity; texts of rows without a score belong together."""


@dataclass(frozen=True, kw_only=True)
class VectorOptions(PromptOptions):
    """How a model turns a text into a vector."""

    pooling: Pooling = "mean"
    """`mean` averages all tokens, special ones included; `cls` takes the first token's vector."""
    layer: PositiveInt | None = None
    """Number of layers to use; the encoder drops the rest. By default, all."""
    max_length: Annotated[int, Range(least=3)] | None = None
    """Tokens at which texts are cut, if lower than the model's positions."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


@dataclass(frozen=True, kw_only=True)
class FeatureExtractionOptions(VectorOptions, TowerOptions):
    """How a model turns a text into a vector, and how it is trained to do so."""

    own_names: ClassVar = frozenset({"layer", "dimensions"})
    former_names: ClassVar = {
        "group_size": "a row's negatives are the texts of its whole batch, so set batch_size"
    }

    normalize: bool = False
    """Whether vectors are scaled to length 1."""
    loss: VectorLoss | None = None
    """`contrastive` (also called InfoNCE or MNRL), for which the texts of the other rows of a
    batch, over all workers, are a row's negatives; `cosine` for training rows with a score; for
    rows with a teacher's scores `kl` (a row's texts as a list), or `margin_mse` (differences from
    the `text_pair`; Hofstätter et al. 2020). Detected from the rows; `kl` if they have scores."""
    highest_score: PositiveFloat | None = None
    """The score of texts with the same meaning; by default, the highest in the training rows."""
    temperature: PositiveFloat = 0.05
    """Divisor of the cosines (Gao et al. 2021, section 3); a teacher's scores are not divided."""
    dimensions: list[int] = field(default_factory=list)
    """Shorter lengths to which vectors may be cut; in training, each adds a loss of the vectors
    that are cut to it, and evaluation measures each (Matryoshka; Kusupati et al. 2022).
    `config.json` has them as `matryoshka_dimensions`."""

    def __post_init__(self) -> None:
        VectorOptions.__post_init__(self)
        TowerOptions.__post_init__(self)
        if any(size < 1 for size in self.dimensions):
            raise InputError(f"dimensions: wanted lengths of at least 1, got {self.dimensions}")


@dataclass(frozen=True, kw_only=True)
class FeatureExtractionParameters(VectorParameters):
    """Hugging Face's parameters for feature extraction."""

    normalize: bool | None = None
    """Whether vectors are scaled to length 1; None follows the model's option."""
    per_token: bool = False
    """Return one vector per token, special ones included, instead of one per text."""
    dimensions: PositiveInt | None = None
    """Length to which vectors are cut, for models that were trained for it."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64` returns each vector as the base64 of its little-endian fp32 numbers."""


class FeatureExtraction(Task, SentenceTransformer, Searching):
    """Rows are `{"text": …, "text_pair": …}` with a `score`, with `negatives`, or with neither."""

    name = "feature-extraction"
    objective = "embedding"
    graph_scores = VECTORS
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
        DISTILLED,
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
    decide_space = ("pooling",)
    parameters_at_root = True
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
        self.joint = self.chosen.loss == "contrastive"

    @classmethod
    def from_rows(
        cls, rows: Sequence[Row], options: FeatureExtractionOptions | None = None
    ) -> "FeatureExtraction":
        chosen = options or cls.options()
        loss = loss_of(_kind_of(rows), chosen, cls.options(), _OF_OTHERS)
        highest = chosen.highest_score
        if loss == "cosine" and highest is None:
            highest = float(max(row["score"] for row in rows))
            if not highest > 0:
                raise CorpusError(
                    f"training rows: wanted a score above 0, the highest is {highest:g}: set "
                    "the option highest_score, the score of texts with the same meaning"
                )
        return cls(options=replace(chosen, loss=loss, highest_score=highest))

    @classmethod
    def checked_row(
        cls, row: Row, options: FeatureExtractionOptions | None = None, *, learned: bool = True
    ) -> Row:
        score, highest = row.get("score"), None if options is None else options.highest_score
        if score is not None and row.get("negatives"):
            raise InputError("wanted a score or negatives, got both: remove one of them")
        check_passages(row)
        if learned and score is not None and highest is not None and abs(score) > highest:
            raise InputError(
                f"wanted a score from {-highest:g} to {highest:g}, that of texts with the same "
                f"meaning, got {score:g}: correct the row, or set the option highest_score"
            )
        return row

    @classmethod
    def from_modules(cls, read: Read) -> "FeatureExtraction | None":
        kinds, config = kinds_of(read), read(POOLING) or {}
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            return None
        if config.get("include_prompt") is False or lowers_case(read) or unread_settings(read):
            return None
        modes = [name for name, value in config.items() if name[:13] == "pooling_mode_" and value]
        for pooling, mode in _MODES.items():
            if modes == [mode] or config.get("pooling_mode") == pooling:
                chosen = cls.options(
                    pooling=pooling,
                    normalize=len(kinds) == 3,
                    max_length=longest_of(read),
                    dimensions=list((read(CONFIG) or {}).get(MATRYOSHKA) or ()),
                    **prompts_of(read(ABOUT) or {}),
                )
                return cls(options=chosen)
        return None

    @property
    def max_length(self) -> int | None:
        return self.chosen.max_length

    def files(self, config: EncoderConfig) -> dict[str, Any]:
        """Return the files with which sentence-transformers computes the same vectors from the
        bundle."""
        kinds = ["Transformer", "Pooling", *(["Normalize"] if self.chosen.normalize else [])]
        modes = {mode: self.chosen.pooling == name for name, mode in _MODES.items()}
        longest = self.chosen.max_length or config.max_length
        files = {
            MODULES: modules_of([f"sentence_transformers.models.{kind}" for kind in kinds]),
            POOLING: {"word_embedding_dimension": config.hidden_size, **modes},
            SETTINGS: {"max_seq_length": longest, "do_lower_case": False},
        }
        if self.chosen.prompts:
            files[ABOUT] = prompt_entries(self.chosen.prompts, self.chosen.default_prompt)
        return files

    def request_of(self, row: Row) -> str:
        """Return the row's `text` only, without texts to compare it with: a vector is for one
        text."""
        return row["text"]

    def config_entries(self) -> dict[str, Any]:
        """Return the lengths to which vectors may be cut, as vLLM reads them."""
        return {MATRYOSHKA: self.chosen.dimensions} if self.chosen.dimensions else {}

    def encoder_config(self, config: EncoderConfig) -> EncoderConfig:
        longest = max(self.chosen.dimensions, default=0)
        if longest > config.hidden_size:
            raise ConfigError(
                f"options.dimensions: wanted at most {config.hidden_size}, the length of the "
                f"model's vectors, got {longest}: leave it out"
            )
        layer = self.chosen.layer
        if layer is None:
            return config
        if layer > config.num_hidden_layers:
            raise ConfigError(
                f"options.layer: wanted at most {config.num_hidden_layers}, the number of layers "
                f"of the model, got {layer}"
            )
        return replace(config, num_hidden_layers=layer)

    def build_objective(self, config: EncoderConfig) -> "Embedding":
        from bert_core.objectives.embedding import Embedding

        return Embedding(
            self.chosen.loss or "contrastive",
            self.chosen.temperature,
            self._lengths(config.hidden_size),
        )

    def _lengths(self, size: int) -> list[int]:
        """Return the lengths to which vectors of `size` numbers are cut, longest first."""
        return sorted({length for length in self.chosen.dimensions if length < size}, reverse=True)

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
        texts = [texts_of(row) for row in rows]
        all_texts = [text for row_texts in texts for text in row_texts]
        prompts = [self.chosen.prompts_before(len(each), parameters.prompt_name) for each in texts]
        before = list(chain.from_iterable(prompts))
        sequences = iter(sequences_of(tokenizer, all_texts, limit, parameters, before))
        labels: Iterator[dict[str, np.ndarray]] = iter(())
        if labelled:
            labels = self._labels(rows)
        windows = []
        for number, row_texts in enumerate(texts):
            if parameters.per_token and len(row_texts) > 1:
                raise InputError(
                    f"inputs[{number}]: wanted one text, since per_token is set, got "
                    f"{len(row_texts)}: leave text_pair or per_token out"
                )
            ids, cuts = zip(*(next(sequences) for _ in row_texts), strict=True)
            windows.append(
                Window(
                    row=number,
                    ids=ids,
                    segment_b_start=tuple(map(len, ids)),
                    positions=self._runs(ids, per_token=parameters.per_token),
                    labels=next(labels, {}),
                    cuts=tuple(chain.from_iterable(named(rows[number], cuts))),
                )
            )
        return windows

    def _runs(self, ids: tuple[Ids, ...], *, per_token: bool) -> dict[str, np.ndarray]:
        """Return the range of tokens that each vector averages: where it starts and ends."""
        if per_token:
            places = np.arange(len(ids[0]))
            return {"vector_starts": places, "vector_ends": places + 1}
        mean = self.chosen.pooling == "mean"
        ends = np.array([len(each) if mean else 1 for each in ids], dtype=np.int64)
        return {"vector_starts": np.zeros_like(ends), "vector_ends": ends}

    def _labels(self, rows: Sequence[Row]) -> Iterator[dict[str, np.ndarray]]:
        """Yield the labels of every row. Raises: CorpusError naming a row that does not fit."""
        kind = _kind_of(rows)
        for number, row in enumerate(rows, 1):
            with numbered(number):
                self.checked_row(row, self.chosen)
        yield from labels_of(rows, kind, self.chosen.highest_score)

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[Float[np.ndarray, "_ size"]],
        parameters: FeatureExtractionParameters | None = None,
    ) -> list[list[Any] | str]:
        """Return one vector per row; a list of vectors for rows of several texts, or with
        `per_token`."""
        parameters = parameters or self.parameters()
        scaled = self.chosen.normalize if parameters.normalize is None else parameters.normalize
        answers: list[list[Any] | str] = []
        for window, vectors in zip(windows, scores, strict=True):
            several = parameters.per_token or len(window.ids) > 1
            cut = self._cut(vectors, parameters.dimensions)
            whole = unit(cut) if scaled else cut
            answer: list[Any] = whole.tolist()
            if parameters.encoding_format == "base64":
                answer = [base64_of(vector) for vector in whole]
            answers.append(answer if several else answer[0])
        return answers

    def numbers(
        self,
        windows: Sequence[Window],
        hidden_size: int,
        scores: Sequence[np.ndarray] | None = None,
        parameters: FeatureExtractionParameters | None = None,
    ) -> list[int]:
        return [hidden_size * len(window.positions["vector_starts"]) for window in windows]

    def matrix(
        self, windows: Sequence[Window], scores: Sequence[Float[np.ndarray, "_ size"]]
    ) -> Float[np.ndarray, "texts size"]:
        """Return the vectors of length 1, so that a product is a cosine."""
        return unit(np.concatenate(list(scores)).astype(np.float32, copy=False))

    def _cut(self, vectors: Float[np.ndarray, "_ size"], size: int | None) -> np.ndarray:
        """Return the first `size` numbers of each vector; None keeps all. Raises: InputError if the
        model was not trained for vectors of this size."""
        if size is None or size == vectors.shape[-1]:
            return vectors
        if size not in self.chosen.dimensions:
            known = ", ".join(map(str, sorted({vectors.shape[-1], *self.chosen.dimensions})))
            raise InputError(
                f"dimensions: wanted one that the model was trained for ({known}), got {size}: "
                "leave it out"
            )
        return vectors[..., :size]

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        """Return the columns for `metrics`. For rows with a score, `predicted` is the cosine. For
        other rows, `rank` is that of `text_pair` among all texts with which any row is compared.
        Columns of vectors that are cut to one of the task's lengths end in `_dim_` and the
        length."""
        check_pairs(rows)
        vectors = [np.array(answer, dtype=np.float32) for answer in answers]
        columns = _columns(rows, vectors)
        for length in self._lengths(vectors[0].shape[-1]):
            of_cut = _columns(rows, [texts[:, :length] for texts in vectors])
            columns |= {f"{name}_dim_{length}": column for name, column in of_cut.items()}
        return columns

    def constant(self, rows: Sequence[Row]) -> Columns:
        vector = [1.0] * (1 + max(self.chosen.dimensions, default=0))
        return self.compare(rows, [[vector] * len(texts_of(row)) for row in rows])

    def cells(self, answer: list[Any] | str) -> dict[str, Any]:
        """Return the vector; the first if there are several, which with `per_token` is that of
        `[CLS]`."""
        return {"vector": answer[0] if isinstance(answer[0], list) else answer}

    def metrics(self, columns: Columns) -> dict[str, float]:
        """Return the metrics of whole vectors, and those of vectors cut to each length."""
        metrics: dict[str, float] = {}
        endings = [match[0] if (match := _CUT.search(name)) else "" for name in columns]
        for ending in dict.fromkeys(endings):
            of_length = {
                name.removesuffix(ending): column
                for (name, column), its in zip(columns.items(), endings, strict=True)
                if its == ending
            }
            metrics |= {f"{name}{ending}": value for name, value in _metrics(of_length).items()}
        return metrics

    def faults(self, columns: Columns) -> Num[np.ndarray, "rows"]:
        """For rows with a score, return how far the rank of the cosine is from the rank of the
        score, from 0 to 1."""
        if "rank" in columns:
            return super().faults(columns)
        from scipy.stats import rankdata  # takes a second to import

        predicted, label = (rankdata(columns[name]) for name in ("predicted", "label"))
        return np.abs(predicted - label) / max(1, len(label) - 1)

    def wrong(self, columns: Columns) -> Bool[np.ndarray, "rows"] | None:
        return super().wrong(columns) if "rank" in columns else None

    def remarks(self, rows: Sequence[Row]) -> Remarks:
        return super().remarks(rows) | remarks_on_negatives(rows)

    def is_comparable(self, other: Evaluated) -> bool:
        return self.name == other.name  # however a model computes its vectors

    def main_metric(self, metrics: Collection[str]) -> str:
        return "spearman" if "spearman" in metrics else self.primary_metric


def _columns(rows: Sequence[Row], vectors: Sequence[Float[np.ndarray, "_ size"]]) -> Columns:
    """Return `FeatureExtraction.compare` for vectors of one length."""
    scaled = [unit(texts) for texts in vectors]
    firsts, pairs = (np.stack([texts[place] for texts in scaled]) for place in (0, 1))
    if _kind_of(rows) == "score":
        scores = np.array([row["score"] for row in rows], dtype=np.float64)
        return {"predicted": (firsts * pairs).sum(-1, dtype=np.float64), "label": scores}
    search = search_of(rows)
    passages = np.concatenate([texts[1:] for texts in scaled])[search.places]
    return retrieval_columns(ranks_of(firsts, passages, search.targets), search.queries)


def _metrics(columns: Columns) -> dict[str, float]:
    """Return `FeatureExtraction.metrics` for vectors of one length."""
    if "rank" in columns:
        return retrieval_metrics(columns)
    metrics = correlations(columns["predicted"], columns["label"])
    return {name: metrics[name] for name in ("spearman", "pearson")}


def _kind_of(rows: Sequence[Row]) -> RowKind:
    """Return the kind of these rows. Raises: CorpusError as `kind_of` does."""
    return kind_of(rows, FeatureExtraction.checked_row)


def base64_of(vector: Float[np.ndarray, "size"]) -> str:
    """Return the base64 of a vector's little-endian fp32 numbers."""
    return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").data).decode()
