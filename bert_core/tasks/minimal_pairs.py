"""Which of two sentences a model finds more likely: grammar without training and without labels
(BLiMP, Warstadt et al. 2020)."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float

from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Pieces, Window, pieces_of, with_special_tokens
from bert_core.model.config import EncoderConfig
from bert_core.objectives.graph_scores import LIKELIHOOD
from bert_core.tasks.base import CuttingParameters, Kind, Task, check_length
from bert_core.tasks.evaluation import Columns, Evaluated
from bert_core.tasks.fill_mask import FillMask, FillMaskOptions
from bert_core.tasks.shapes import Row

if TYPE_CHECKING:
    from bert_core.objectives.likelihood import MaskedWordLikelihood

GOOD, BAD = SENTENCES = ("sentence_good", "sentence_bad")
CHANCE = 0.5
TOKENS_AT_ONCE = 4096
"""Most tokens in a window, which has the sentence once per mask; a longer sentence's masks are
shared out among windows."""


@dataclass(frozen=True, kw_only=True)
class MinimalPair:
    """Two sentences that differ in little."""

    sentence_good: str
    """The acceptable one."""
    sentence_bad: str
    """The other."""


@dataclass(frozen=True, kw_only=True)
class Phenomenon:
    """How the sentences of a pair differ; accuracy is reported for each."""

    field: str | None = None
    """Such as `syntax`."""
    linguistics_term: str | None = None
    """Such as `island_effects`."""
    UID: str | None = None
    """The set of pairs, such as `adjunct_island`."""


PHENOMENA = ("field", "linguistics_term", "UID")


class MinimalPairs(Task):
    """Rows are `{"sentence_good": …, "sentence_bad": …}`, as BLiMP's files have them.

    A sentence scores the sum, over its tokens, of the log probability of the token if it is masked
    together with those that follow in its word, which would give it away (Kauf and Ivanova 2023,
    PLL-word-l2r). A pair is right if the good sentence has the higher score; chance is 50 %.
    """

    name = "minimal-pairs"
    objective = "mlm"
    graph_scores = LIKELIHOOD
    inputs = MinimalPair
    target = Phenomenon
    kinds = (
        Kind(
            name="pairs",
            rows=(
                {
                    "sentence_good": "The files are open.",
                    "sentence_bad": "The files is open.",
                    "field": "morphology",
                    "linguistics_term": "subject_verb_agreement",
                    "UID": "regular_plural_subject_verb_agreement_1",
                },
                {"sentence_good": "A list holds objects.", "sentence_bad": "A list hold objects."},
            ),
        ),
    )
    primary_metric = "accuracy"
    pipeline_tag = FillMask.name
    trainable = False
    pretrained = True
    shares_head_with = (FillMask.name,)
    parameters = CuttingParameters
    options = FillMaskOptions
    examples = ({GOOD: "The files are open.", BAD: "The files is open."},)
    cell_types: Mapping[str, pa.DataType] = {
        "preferred": pa.string(),
        "score_good": pa.float64(),
        "score_bad": pa.float64(),
    }

    chosen: FillMaskOptions

    def adapted(self, tensors: Container[str]) -> "MinimalPairs":
        return MinimalPairs(options=FillMask().adapted(tensors).chosen)

    def is_comparable(self, other: Evaluated) -> bool:
        return self.name == other.name  # any decoder may be compared with any other

    def build_objective(self, config: EncoderConfig) -> "MaskedWordLikelihood":
        from bert_core.objectives.likelihood import (
            EnhancedMaskedWordLikelihood,
            MaskedWordLikelihood,
        )

        if self.chosen.enhanced and EnhancedMaskedWordLikelihood.fits(config):
            return EnhancedMaskedWordLikelihood(config)
        return MaskedWordLikelihood(config)

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: CuttingParameters | None = None,
    ) -> list[Window]:
        """Return the windows of each sentence, the good sentence of a row first. A window has a
        sequence for each masked token; only a long sentence has more than one window."""
        texts = [row[name] for row in rows for name in SENTENCES]
        return [
            window
            for place, (text, pieces) in enumerate(
                zip(texts, pieces_of(tokenizer, texts), strict=True)
            )
            for window in _windows(
                place // 2, SENTENCES[place % 2], text, pieces, tokenizer, max_length, parameters
            )
        ]

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[Float[np.ndarray, "_"]],
        parameters: CuttingParameters | None = None,
    ) -> list[dict[str, Any]]:
        """Return the scores of both sentences, in nats, and the name of the sentence with the
        higher score."""
        sums = [dict.fromkeys(SENTENCES, 0.0) for _ in rows]
        for window, of_window in zip(windows, scores, strict=True):
            sums[window.row][window.origin] += float(of_window.sum(dtype=np.float64))
        return [
            {
                "preferred": GOOD if both[GOOD] > both[BAD] else BAD,
                "score_good": both[GOOD],
                "score_bad": both[BAD],
            }
            for both in sums
        ]

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        margins = [answer["score_good"] - answer["score_bad"] for answer in answers]
        names = {name: np.array([row.get(name) or "" for row in rows]) for name in PHENOMENA}
        return {"margin": np.array(margins, dtype=np.float64), **names}

    def metrics(self, columns: Columns) -> dict[str, float]:
        return {"accuracy": float((columns["margin"] > 0).mean())}

    def baseline(self, rows: Sequence[Row]) -> dict[str, float]:
        return {"accuracy": CHANCE}

    def by_class(self, columns: Columns) -> dict[str, dict[str, float]] | None:
        """Return `accuracy` and `support` of every field, term and set that the rows name. If two
        of these have the same name, the second gets its kind in brackets."""
        is_right = columns["margin"] > 0
        figures: dict[str, dict[str, float]] = {}
        for column in PHENOMENA:
            for name in np.unique(columns[column][columns[column] != ""]).tolist():
                rows = columns[column] == name
                figures[f"{name} ({column})" if name in figures else name] = {
                    "accuracy": float(is_right[rows].mean()),
                    "support": int(rows.sum()),
                }
        return figures or None

    def faults(self, columns: Columns) -> Float[np.ndarray, "rows"]:
        """Return by how much the score of the bad sentence is higher; 0 if the good sentence's is
        higher. A tie is wrong too."""
        smallest = np.finfo(np.float64).tiny
        return np.where(columns["margin"] > 0, 0.0, np.maximum(-columns["margin"], smallest))

    def cells(self, answer: dict[str, Any]) -> dict[str, Any]:
        return dict(answer)


def _windows(
    row: int,
    name: str,
    text: str,
    pieces: Pieces,
    tokenizer: Tokenizer,
    max_length: int,
    parameters: CuttingParameters | None,
) -> Iterator[Window]:
    limit = max_length if parameters is None or parameters.truncation else None
    sequence = with_special_tokens(tokenizer, pieces.ids, None, limit)
    if parameters is not None:
        check_length(row, len(sequence.ids), max_length, parameters)
    count = sequence.lengths[0]
    masked = np.tile(sequence.ids, (max(1, count), 1))
    words = pieces.words[:count]
    # Row n is for piece n, which is masked with all later pieces of its word.
    later = np.arange(count) >= np.arange(count)[:, None]
    hidden = later & (words == words[:, None])
    masked[:count, 1:-1][hidden] = tokenizer.mask_id
    at_once = max(1, TOKENS_AT_ONCE // len(sequence.ids))
    for first in range(0, len(masked), at_once):
        part = masked[first : first + at_once]
        end = min(first + at_once, count)
        yield Window(
            row=row,
            ids=tuple(part),
            segment_b_start=(sequence.segment_b_start,) * len(part),
            positions={"mlm_positions": np.arange(first + 1, end + 1)},
            labels={"mlm_labels": pieces.ids[first:end].astype(np.int64)},
            origin=name,
            cuts=sequence.cuts((name, text, pieces.ids)),
        )
