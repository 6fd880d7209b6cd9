"""Which words stand behind the masks of a text (Devlin et al. 2018, section 3.1)."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from bert_core.checks import PositiveInt, check_fields
from bert_core.data.tokenizer import MASK, OTHER_NAMES, Tokenizer
from bert_core.data.windows import Ids, Window, ids_of, joined
from bert_core.errors import CorpusError, InputError
from bert_core.metrics.language_model import masked_word_metrics
from bert_core.model.config import EncoderConfig
from bert_core.tasks.base import Columns, CuttingParameters, Kind, Options, Task
from bert_core.tasks.shapes import Row

if TYPE_CHECKING:
    from bert_core.objectives.mlm import MaskedLanguageModeling


@dataclass(frozen=True, kw_only=True)
class MaskedText:
    """A text with masks."""

    text: str
    """The text, with `[MASK]` or `<mask>` for each word to be found."""


@dataclass(frozen=True, kw_only=True)
class MaskedWords:
    """What is right of a text with masks."""

    words: list[str]
    """The word of each mask, each one token of the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class FillMaskOptions(Options):
    """How masks were filled in pretraining."""

    enhanced: bool = False
    """Whether DeBERTa's enhanced mask decoder fills them, where the encoder is one that has it. The
    weights say so, whatever is asked for."""


@dataclass(frozen=True, kw_only=True)
class FillMaskParameters(CuttingParameters):
    """Hugging Face's parameters of filling masks."""

    top_k: PositiveInt = 5
    """How many candidates for each mask, the best first."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


class FillMask(Task):
    """Rows are `{"text": "The [MASK] is blue.", "words": ["sea"]}`.

    A mask beyond `max_length` is not asked. Where its word is known it counts as wrong, and
    perplexity is without it; a row of which no mask is left teaches nothing, and has no candidates.
    """

    name = "fill-mask"
    objective = "mlm"
    inputs = MaskedText
    target = MaskedWords
    kinds = (
        Kind(
            name="masks",
            rows=(
                {"text": "Return the [MASK] of the [MASK].", "words": ["name", "file"]},
                {"text": "The file is not [MASK].", "words": ["open"]},
            ),
        ),
    )
    primary_metric = "accuracy"
    single_is_bare = True
    lower_is_better = frozenset({"perplexity"})
    pretrained = True
    parameters = FillMaskParameters
    options = FillMaskOptions
    examples = ("The capital of France is [MASK].",)
    cell_types: Mapping[str, pa.DataType] = {
        "words": pa.list_(pa.string()),
        "scores": pa.list_(pa.float64()),
    }

    chosen: FillMaskOptions

    def adapted(self, tensors: Container[str]) -> "FillMask":
        enhanced = "objectives.mlm.positions.weight" in tensors
        return FillMask(options=FillMaskOptions(enhanced=enhanced))

    def is_comparable(self, other: Task) -> bool:
        return self.name == other.name  # what decodes is a model's own affair

    def build_objective(self, config: EncoderConfig) -> "MaskedLanguageModeling":
        from bert_core.objectives.enhanced_mlm import EnhancedMaskedLanguageModeling
        from bert_core.objectives.mlm import MaskedLanguageModeling

        if self.chosen.enhanced and EnhancedMaskedLanguageModeling.fits(config):
            return EnhancedMaskedLanguageModeling(config)
        return MaskedLanguageModeling(config)

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: FillMaskParameters | None = None,
    ) -> list[Window]:
        limit = max_length if parameters is None or parameters.truncation else None
        windows = []
        texts = ids_of(tokenizer, [_with_masks_of(tokenizer, row["text"]) for row in rows])
        for number, (row, ids) in enumerate(zip(rows, texts, strict=True)):
            wanted = None
            if "words" in row:  # in the whole text: which words are left follows from what is cut
                masks = int(np.count_nonzero(ids == tokenizer.mask_id))
                wanted = _word_ids(row, number + 1, tokenizer, masks)
            sequence = joined(tokenizer, ids, None, limit)
            positions = np.flatnonzero(sequence.ids == tokenizer.mask_id)
            if wanted is not None:
                wanted = wanted[: len(positions)]
            elif not len(positions):
                raise InputError(
                    f"inputs[{number}]: wanted a text with {MASK} for each word to be found, got "
                    f"{row['text'][:80]!r}: put it in, where the model's positions reach"
                )
            windows.append(
                Window(
                    row=number,
                    ids=(sequence.ids,),
                    segment_b_start=(sequence.segment_b_start,),
                    positions={"mlm_positions": positions},
                    labels={"mlm_labels": wanted} if labelled and wanted is not None else {},
                    origin=_Masks(tokenizer, sequence.ids, positions, wanted),
                    is_cut=sequence.is_cut,
                )
            )
        return windows

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[Float[np.ndarray, "_ vocab"]],
        parameters: FillMaskParameters | None = None,
    ) -> list[Any]:
        """Candidates of the mask, or a list of them for each of several masks.

        Where a row has its words, the first candidate of each says how the word did; one whose
        masks are all cut off has an empty list.
        """
        parameters = parameters or self.parameters()
        answers: list[Any] = []
        for window, logits in zip(windows, scores, strict=True):
            masks: _Masks = window.origin
            found = [
                _candidates(masks, place, row, parameters.top_k) for place, row in enumerate(logits)
            ]
            answers.append(found[0] if len(found) == 1 else found)
        return answers

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        every = [[one[0]["wanted"] for one in by_mask(answer)] for answer in answers]
        return {
            "right": np.array([sum(one["rank"] == 1 for one in its) for its in every]),
            "log_share": np.array([sum((one["log_share"] for one in its), 0.0) for its in every]),
            "masks": np.array([len(row["words"]) for row in rows]),
            "asked": np.array([len(its) for its in every]),
        }

    def cells(self, answer: Any) -> dict[str, Any]:
        best = [its[0] for its in by_mask(answer)]
        return {
            "words": [one["token_str"] for one in best],
            "scores": [one["score"] for one in best],
        }

    def metrics(self, columns: Columns) -> dict[str, float]:
        return masked_word_metrics(
            columns["right"], columns["log_share"], columns["masks"], columns["asked"]
        )

    def confidence(self, answers: Sequence[Any]) -> Float[np.ndarray, "rows"]:
        """The product over the masks of the share of each one's best candidate; 0 of none."""
        best = ([one[0]["score"] for one in by_mask(answer)] for answer in answers)
        return np.array([np.prod(scores) if scores else 0.0 for scores in best])


@dataclass(frozen=True, slots=True)
class _Masks:
    """The masks of a text, and the words that are right where they are known."""

    tokenizer: Tokenizer
    ids: Ids
    positions: Int[np.ndarray, "masks"]
    wanted: Int[np.ndarray, "masks"] | None


def _with_masks_of(tokenizer: Tokenizer, text: str) -> str:
    for name in (MASK, OTHER_NAMES[MASK]):
        text = text.replace(name, tokenizer.mask_token)
    return text


def _word_ids(row: Row, number: int, tokenizer: Tokenizer, masks: int) -> Int[np.ndarray, "masks"]:
    """Raises: CorpusError if there is not a word for each of the text's masks."""
    words = row["words"]
    if len(words) != masks or not masks:
        raise CorpusError(
            f"row {number}: wanted a word for each mask of its text, got {len(words)} for {masks}: "
            "correct the row, or take it out"
        )
    ids = ids_of(tokenizer, [f" {word}" if tokenizer.reads_spaces else word for word in words])
    for word, its in zip(words, ids, strict=True):
        if len(its) != 1:
            raise CorpusError(
                f"row {number}: wanted words that are one token of the vocabulary, {word!r} is "
                f"{len(its)}: take the row out, or mask it with as many masks"
            )
    return np.concatenate(ids).astype(np.int64)


def _candidates(
    masks: _Masks, place: int, logits: Float[np.ndarray, "vocab"], top_k: int
) -> list[dict[str, Any]]:
    wide = logits.astype(np.float64)
    log_shares = wide - wide.max()
    log_shares -= np.log(np.exp(log_shares).sum())
    best = np.argsort(-log_shares, kind="stable")[:top_k]
    candidates = []
    for index in best.tolist():
        ids = masks.ids.copy()
        ids[masks.positions[place]] = index
        inner = masks.tokenizer.inner
        candidates.append(
            {
                "score": float(np.exp(log_shares[index])),
                "token": index,
                "token_str": inner.decode([index], skip_special_tokens=False).strip(),
                "sequence": inner.decode(
                    ids[1:-1].tolist(), skip_special_tokens=len(masks.positions) == 1
                ),
            }
        )
    if masks.wanted is not None:
        wanted = int(masks.wanted[place])
        rank = int((log_shares > log_shares[wanted]).sum()) + 1
        candidates[0]["wanted"] = {"rank": rank, "log_share": float(log_shares[wanted])}
    return candidates


def by_mask(answer: Any) -> list[list[dict[str, Any]]]:
    """The candidates of each mask, of an answer about one, several or none."""
    return answer if not answer or isinstance(answer[0], list) else [answer]
