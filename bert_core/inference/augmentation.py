"""Copies of rows with some words replaced, as additional text for distillation (TinyBERT, Jiao et
al. 2019, algorithm 1)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch.nn import functional

from bert_core.bundle.format import load_bundle
from bert_core.bundle.weights import require_weights
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Ids, Pieces, Window, pieces_of, with_special_tokens
from bert_core.inference.predictor import Predictor
from bert_core.tasks.shapes import Row

AT_ONCE = 256
"""Words scored against the whole vocabulary at once: 30 MB for 30,000 tokens."""
_EMBEDDINGS = "encoder.embeddings.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a text, and its possible replacements."""

    start: int
    """Its first character."""
    end: int
    """The character after its last."""
    pieces: tuple[int, ...]
    """Positions of its pieces among the text's."""
    candidates: tuple[str, ...] = ()
    """Possible replacements; empty if there are none."""


def augmented(
    rows: Sequence[Row],
    fields: Sequence[str],
    source: "Candidates",
    *,
    copies: int,
    share: float,
    seed: int,
) -> list[dict[str, Any]]:
    """Return `copies` variants of each row, in order; labels and other fields are kept.

    Args:
        fields: the fields that hold text; all of them are varied.
        source: suggests replacements for words.
        share: probability that a word is replaced; its candidates are equally likely.
    """
    words: dict[str, dict[int, list[Word]]] = {}
    for name in fields:
        places = [place for place, row in enumerate(rows) if row.get(name) is not None]
        texts = [rows[place][name] for place in places]
        words[name] = dict(zip(places, source.words(texts), strict=True))
    variants = []
    for place, row in enumerate(rows):
        for copy in range(copies):
            rng = np.random.default_rng([seed, place, copy])
            changed = {
                name: varied(row[name], words_by_place[place], share, rng)
                for name, words_by_place in words.items()
                if place in words_by_place
            }
            variants.append(dict(row) | changed)
    return variants


def varied(text: str, words: Sequence[Word], share: float, rng: np.random.Generator) -> str:
    """Return the text with a random choice of `words` replaced; `words` are in order of position.

    Args:
        share: probability that a word is replaced.
    """
    parts, end = [], 0
    for word in words:
        if word.candidates and rng.random() < share:
            parts += [text[end : word.start], word.candidates[rng.integers(len(word.candidates))]]
            end = word.end
    return "".join([*parts, text[end:]])


class Candidates:
    """Replacements for words, as a bundle suggests them: words of its vocabulary.

    A word of a single piece is masked, and its candidates are the model's most probable predictions
    for the mask. A word of several pieces, or any word if the model does not fill masks, gets the
    words whose embeddings are nearest, by cosine, to the mean of its pieces' embeddings. For those
    words, the paper uses GloVe.
    """

    def __init__(self, folder: str | Path, *, count: int, fill_masks: bool) -> None:
        """Load the bundle in `folder`.

        Args:
            count: candidates per word.
            fill_masks: whether the model predicts the candidates of words of a single piece.
        Raises: FormatError if `fill_masks` is set and the bundle cannot fill masks.
        """
        self._count = count
        self._predictor = Predictor(folder, task="fill-mask") if fill_masks else None
        bundle = require_weights(load_bundle(folder))
        self._tokenizer = bundle.tokenizer
        self._table = functional.normalize(bundle.state[_EMBEDDINGS], dim=-1)
        self._surfaces = _surfaces(bundle.tokenizer, len(self._table))
        self._barred = torch.tensor([not surface.isalpha() for surface in self._surfaces])
        self._near: dict[tuple[int, ...], tuple[str, ...]] = {}

    def words(self, texts: Sequence[str]) -> list[list[Word]]:
        """Return the words of each text that consist of letters only, in order, with their
        candidates."""
        pieces = pieces_of(self._tokenizer, texts)
        words = [list(_words(*pair)) for pair in zip(texts, pieces, strict=True)]
        behind_masks = self._behind_masks(pieces, words)
        self._look_up(
            {
                tuple(text_pieces.ids[list(word.pieces)].tolist())
                for number, text_pieces in enumerate(pieces)
                for word in words[number]
                if (number, word.pieces) not in behind_masks
            }
        )

        def with_candidates(number: int, word: Word) -> Word:
            ids = tuple(pieces[number].ids[list(word.pieces)].tolist())
            key = (number, word.pieces)
            known = behind_masks[key] if key in behind_masks else self._near[ids]
            return Word(word.start, word.end, word.pieces, known)

        return [
            [with_candidates(number, word) for word in text_words]
            for number, text_words in enumerate(words)
        ]

    def _behind_masks(
        self, pieces: Sequence[Pieces], words: Sequence[Sequence[Word]]
    ) -> Mapping[tuple[int, tuple[int, ...]], tuple[str, ...]]:
        """Predict the candidates of words of a single piece that are within the model's length, by
        text and pieces."""
        if self._predictor is None:
            return {}
        room = self._predictor.max_length - 2
        masked = [
            (number, word.pieces)
            for number, text_words in enumerate(words)
            for word in text_words
            if len(word.pieces) == 1 and word.pieces[0] < room
        ]
        known: dict[tuple[int, tuple[int, ...]], tuple[str, ...]] = {}
        for start in range(0, len(masked), AT_ONCE):
            batch = masked[start : start + AT_ONCE]
            windows = [self._masked(pieces[number].ids, place) for number, (place,) in batch]
            scores = np.concatenate(self._predictor.forward(windows))
            for key, best in zip(batch, self._best(torch.from_numpy(scores)), strict=True):
                known[key] = best
        return known

    def _masked(self, ids: Ids, place: int) -> Window:
        assert self._predictor is not None
        ids = ids.copy()
        ids[place] = self._tokenizer.mask_id
        sequence = with_special_tokens(self._tokenizer, ids, None, self._predictor.max_length)
        return Window(
            row=0,
            ids=(sequence.ids,),
            segment_b_start=(sequence.segment_b_start,),
            positions={"mlm_positions": np.array([place + 1])},
        )

    def _look_up(self, words: set[tuple[int, ...]]) -> None:
        """Find the nearest words of those not looked up before, and add them to `_near`."""
        unknown = sorted(words - self._near.keys())
        for start in range(0, len(unknown), AT_ONCE):
            batch = unknown[start : start + AT_ONCE]
            vectors = torch.stack([self._table[list(ids)].mean(0) for ids in batch])
            cosines = vectors @ self._table.mT
            for row, ids in enumerate(batch):
                cosines[row, list(ids)] = float("-inf")
            self._near |= zip(batch, self._best(cosines), strict=True)

    def _best(self, scores: Float[torch.Tensor, "words vocab"]) -> list[tuple[str, ...]]:
        scores = scores.masked_fill(self._barred[: scores.shape[1]], float("-inf"))
        best = scores.topk(min(self._count, scores.shape[1]))
        return [
            tuple(self._surfaces[index] for index, score in zip(*row, strict=True) if score > -1e30)
            for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


def _surfaces(tokenizer: Tokenizer, size: int) -> list[str]:
    """Return the text of each token of a vocabulary; empty for special tokens and for parts of
    words."""
    special, begins = set(tokenizer.special_ids.tolist()), tokenizer.begins_word
    return [
        tokenizer.inner.decode([index]).strip()
        if index < len(begins) and begins[index] and index not in special
        else ""
        for index in range(size)
    ]


def _words(text: str, pieces: Pieces) -> Iterator[Word]:
    """Yield the words of a text that consist of letters only."""
    for word in np.unique(pieces.words[pieces.words >= 0]):
        positions = np.flatnonzero(pieces.words == word)
        start, end = pieces.offsets[positions[0], 0], pieces.offsets[positions[-1], 1]
        surface = text[start:end]
        start += len(surface) - len(surface.lstrip())  # some vocabularies include the space
        if surface.strip().isalpha():
            yield Word(int(start), int(end), tuple(positions.tolist()))
