"""Words for the masks in a text (Devlin et al. 2018, section 3.1)."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from bert_core.checks import PositiveInt, check_fields
from bert_core.data.special_tokens import MASK, OTHER_NAMES
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Ids, Window, first_ids_of, ids_of, kept_of, with_special_tokens
from bert_core.errors import CorpusError, InputError
from bert_core.metrics.language_model import masked_word_metrics
from bert_core.model.config import EncoderConfig
from bert_core.objectives.graph_scores import MASKED_WORDS
from bert_core.tasks.base import CuttingParameters, Kind, Options, Task
from bert_core.tasks.evaluation import Columns, Evaluated
from bert_core.tasks.shapes import Row

if TYPE_CHECKING:
    from bert_core.objectives.mlm import MaskedLanguageModeling


@dataclass(frozen=True, kw_only=True)
class MaskedText:
    """A text with masks."""

    text: str
    """The text, with `[MASK]` or `<mask>` for each word to predict."""


@dataclass(frozen=True, kw_only=True)
class MaskedWords:
    """The expected answer for a text with masks."""

    words: list[str]
    """The word behind each mask; each must be a single token of the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class FillMaskOptions(Options):
    """How pretraining filled masks."""

    read_names: ClassVar = frozenset({"enhanced"})

    enhanced: bool = False
    """Whether DeBERTa's enhanced mask decoder fills masks, if the encoder has one. Read from the
    weights, and refused as an option."""


@dataclass(frozen=True, kw_only=True)
class FillMaskParameters(CuttingParameters):
    """Hugging Face's parameters for filling masks."""

    top_k: PositiveInt = 5
    """Number of candidates per mask, best first."""
    targets: list[str] | None = None
    """The only words to choose from, each one token of the vocabulary; None means all. Scores are
    shares of all tokens nevertheless, as in transformers."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


class FillMask(Task):
    """Rows are `{"text": "The [MASK] is blue.", "words": ["sea"]}`.

    A mask beyond `max_length` is not predicted. If its word is known it counts as wrong, and is
    left out of perplexity; a row with no mask left trains nothing, and has no candidates.
    """

    name = "fill-mask"
    objective = "mlm"
    graph_scores = MASKED_WORDS
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

    def is_comparable(self, other: Evaluated) -> bool:
        return self.name == other.name  # any decoder may be compared with any other

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
        from_end = tokenizer.keeps_end
        targets = None if parameters is None else _target_ids(tokenizer, parameters.targets)
        windows = []
        texts = [_with_masks_of(tokenizer, row["text"]) for row in rows]
        # Words are checked against all masks of the whole text, so it is tokenized before cutting.
        if limit is None or any("words" in row for row in rows):
            all_ids = ids_of(tokenizer, texts)
        else:
            all_ids = first_ids_of(tokenizer, texts, limit, from_end=from_end)
        for number, (row, text, ids) in enumerate(zip(rows, texts, all_ids, strict=True)):
            words = None
            if "words" in row:
                masks = int(np.count_nonzero(ids == tokenizer.mask_id))
                words = _word_ids(row, number + 1, tokenizer, masks)
            sequence = with_special_tokens(tokenizer, ids, None, limit, from_end=from_end)
            positions = np.flatnonzero(sequence.ids == tokenizer.mask_id)
            if words is not None:
                words = kept_of(words, len(positions), from_end=from_end)
            elif not len(positions):
                raise InputError(
                    f"inputs[{number}]: wanted a text with {MASK} for each word to predict, got "
                    f"{row['text'][:80]!r}: add one, within the model's positions"
                )
            windows.append(
                Window(
                    row=number,
                    ids=(sequence.ids,),
                    segment_b_start=(sequence.segment_b_start,),
                    positions={"mlm_positions": positions},
                    labels={"mlm_labels": words} if labelled and words is not None else {},
                    origin=_Masks(tokenizer, sequence.ids, positions, words, targets),
                    cuts=sequence.cuts(("", text, ids)),
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
        """Return the candidates for the mask, or a list of candidates per mask if there are
        several; an empty list if all masks of a row were cut off.

        If the row's words are known, the first candidate for each mask also has the rank and log
        probability of the right word.
        """
        parameters = parameters or self.parameters()
        answers: list[Any] = []
        for window, logits in zip(windows, scores, strict=True):
            masks: _Masks = window.origin
            candidates = [
                _candidates(masks, place, row, parameters.top_k) for place, row in enumerate(logits)
            ]
            answers.append(candidates[0] if len(candidates) == 1 else candidates)
        return answers

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        words = [[mask[0]["wanted"] for mask in by_mask(answer)] for answer in answers]
        log_shares = [sum((word["log_share"] for word in row), 0.0) for row in words]
        return {
            "right": np.array([sum(word["rank"] == 1 for word in row) for row in words]),
            "log_share": np.array(log_shares),
            "masks": np.array([len(row["words"]) for row in rows]),
            "asked": np.array([len(row) for row in words]),
        }

    def cells(self, answer: Any) -> dict[str, Any]:
        best = [candidates[0] for candidates in by_mask(answer)]
        return {
            "words": [candidate["token_str"] for candidate in best],
            "scores": [candidate["score"] for candidate in best],
        }

    def metrics(self, columns: Columns) -> dict[str, float]:
        return masked_word_metrics(
            columns["right"], columns["log_share"], columns["masks"], columns["asked"]
        )

    def confidence(self, answers: Sequence[Any]) -> Float[np.ndarray, "rows"]:
        """Return the product over the masks of the best candidate's probability; 0 without
        masks."""
        best = ([candidates[0]["score"] for candidates in by_mask(answer)] for answer in answers)
        return np.array([np.prod(scores) if scores else 0.0 for scores in best])


@dataclass(frozen=True, slots=True)
class _Masks:
    """The masks of a text, and the right words if they are known."""

    tokenizer: Tokenizer
    ids: Ids
    positions: Int[np.ndarray, "masks"]
    words: Int[np.ndarray, "masks"] | None
    """Ids of the right words."""
    targets: Int[np.ndarray, "targets"] | None
    """Ids of the only candidates; None means all."""


def _with_masks_of(tokenizer: Tokenizer, text: str) -> str:
    """Return the text with the vocabulary's mask token in place of either usual one. Both are six
    characters long, so that other characters keep their positions."""
    for name in (MASK, OTHER_NAMES[MASK]):
        text = text.replace(name, tokenizer.mask_token)
    return text


def _word_ids(row: Row, number: int, tokenizer: Tokenizer, masks: int) -> Int[np.ndarray, "masks"]:
    """Return the ids of the row's words.

    Args:
        number: number of the row, from 1, for the message.
        masks: the number of masks in the row's text.
    Raises: CorpusError unless there is a word for each mask, and each is a single token.
    """
    words = row["words"]
    if len(words) != masks or not masks:
        raise CorpusError(
            f"row {number}: wanted a word for each mask of its text, got {len(words)} for {masks}: "
            "correct the row, or remove it"
        )
    ids = _ids_of_words(tokenizer, words)
    for word, tokens in zip(words, ids, strict=True):
        if len(tokens) != 1:
            raise CorpusError(
                f"row {number}: wanted words that are one token of the vocabulary, {word!r} is "
                f"{len(tokens)}: remove the row, or use that many masks for the word"
            )
    return np.concatenate(ids).astype(np.int64)


def _target_ids(
    tokenizer: Tokenizer, targets: Sequence[str] | None
) -> Int[np.ndarray, "targets"] | None:
    """Return the ids of the targets, ascending; None for None. Raises: InputError if the list is
    empty, or a target is not a single token."""
    if targets is None:
        return None
    if not targets:
        raise InputError("targets: wanted at least one word, got an empty list: leave it out")
    ids = _ids_of_words(tokenizer, targets)
    for word, tokens in zip(targets, ids, strict=True):
        if len(tokens) != 1 or int(tokens[0]) == tokenizer.unk_id:
            raise InputError(
                f"targets: wanted words that are one token of the vocabulary, {word!r} is not: "
                "leave it out"
            )
    return np.unique(np.concatenate(ids).astype(np.int64))


def _ids_of_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[Ids]:
    """Return the ids of each word as it would be within a text."""
    return ids_of(tokenizer, [f" {word}" if tokenizer.reads_spaces else word for word in words])


def _candidates(
    masks: _Masks, place: int, logits: Float[np.ndarray, "vocab"], top_k: int
) -> list[dict[str, Any]]:
    wide = logits.astype(np.float64)
    log_shares = wide - wide.max()
    log_shares -= np.log(np.exp(log_shares).sum())
    known = np.arange(len(log_shares)) if masks.targets is None else masks.targets
    best = known[np.argsort(-log_shares[known], kind="stable")[:top_k]]
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
    if masks.words is not None:
        word = int(masks.words[place])
        rank = int((log_shares > log_shares[word]).sum()) + 1
        candidates[0]["wanted"] = {"rank": rank, "log_share": float(log_shares[word])}
    return candidates


def by_mask(answer: Any) -> list[list[dict[str, Any]]]:
    """Return the candidates per mask of an answer, whether it has one mask, several or none."""
    return answer if not answer or isinstance(answer[0], list) else [answer]
