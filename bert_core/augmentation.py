"""Rows with other words in the place of their own, for a student to ask its teacher about
(TinyBERT, Jiao et al. 2019, algorithm 1)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch.nn import functional

from bert_core.bundle.format import load_bundle
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Ids, Pieces, Window, joined, pieces_of
from bert_core.predictor import Predictor
from bert_core.tasks.shapes import Row

AT_ONCE = 256
"""Words that are scored with the whole vocabulary at a time: 30 MB of 30,000 tokens."""
_EMBEDDINGS = "encoder.embeddings.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a text, and what may stand in its place."""

    start: int
    """Its first character."""
    end: int
    """The character after its last."""
    pieces: tuple[int, ...]
    """Which of the text's pieces it is."""
    candidates: tuple[str, ...] = ()
    """None where nothing may."""


def augmented(
    rows: Sequence[Row],
    fields: Sequence[str],
    source: "Candidates",
    *,
    copies: int,
    share: float,
    seed: int,
) -> list[dict[str, Any]]:
    """`copies` new rows of each row, in their order, with what is right of it.

    Args:
        fields: those that hold text; every one of them changes.
        share: probability that a word is replaced, by each of its candidates alike.
    """
    words: dict[str, dict[int, list[Word]]] = {}
    for name in fields:
        places = [place for place, row in enumerate(rows) if row.get(name) is not None]
        texts = [rows[place][name] for place in places]
        words[name] = dict(zip(places, source.words(texts), strict=True))
    made = []
    for place, row in enumerate(rows):
        for copy in range(copies):
            rng = np.random.default_rng([seed, place, copy])
            changed = {
                name: varied(row[name], its[place], share, rng)
                for name, its in words.items()
                if place in its
            }
            made.append(dict(row) | changed)
    return made


def varied(text: str, words: Sequence[Word], share: float, rng: np.random.Generator) -> str:
    """The text with some of its words replaced; they follow each other."""
    parts, end = [], 0
    for word in words:
        if word.candidates and rng.random() < share:
            parts += [text[end : word.start], word.candidates[rng.integers(len(word.candidates))]]
            end = word.end
    return "".join([*parts, text[end:]])


class Candidates:
    """What may stand for a word, as a bundle knows it: words of its vocabulary.

    A word that is one piece has those that the model finds most probable behind a mask in its
    place; one of several pieces, or where the model fills no masks, those whose embeddings are the
    nearest to the mean of its pieces' by the cosine. The paper takes GloVe's for the latter.
    """

    def __init__(self, folder: str | Path, *, count: int, fill_masks: bool) -> None:
        """Args:
            count: of candidates for a word.
        Raises: FormatError if the bundle cannot fill masks, and is to.
        """
        self._count = count
        self._predictor = Predictor(folder, task="fill-mask") if fill_masks else None
        bundle = load_bundle(folder)
        self._tokenizer = bundle.tokenizer
        self._table = functional.normalize(bundle.state[_EMBEDDINGS], dim=-1)
        self._surfaces = _surfaces(bundle.tokenizer, len(self._table))
        self._barred = torch.tensor([not one.isalpha() for one in self._surfaces])
        self._near: dict[tuple[int, ...], tuple[str, ...]] = {}

    def words(self, texts: Sequence[str]) -> list[list[Word]]:
        """The words of each text that are letters alone, in their order, with their candidates."""
        pieces = pieces_of(self._tokenizer, texts)
        found = [list(_words(text, its)) for text, its in zip(texts, pieces, strict=True)]
        behind_masks = self._behind_masks(pieces, found)
        self._look_up(
            {
                tuple(its.ids[list(word.pieces)].tolist())
                for number, its in enumerate(pieces)
                for word in found[number]
                if (number, word.pieces) not in behind_masks
            }
        )

        def with_candidates(number: int, word: Word) -> Word:
            ids = tuple(pieces[number].ids[list(word.pieces)].tolist())
            key = (number, word.pieces)
            known = behind_masks[key] if key in behind_masks else self._near[ids]
            return Word(word.start, word.end, word.pieces, known)

        return [[with_candidates(number, word) for word in its] for number, its in enumerate(found)]

    def _behind_masks(
        self, pieces: Sequence[Pieces], found: Sequence[Sequence[Word]]
    ) -> Mapping[tuple[int, tuple[int, ...]], tuple[str, ...]]:
        """Candidates of words that are one piece, by text and pieces, where the model reaches."""
        if self._predictor is None:
            return {}
        room = self._predictor.max_length - 2
        asked = [
            (number, word.pieces)
            for number, its in enumerate(found)
            for word in its
            if len(word.pieces) == 1 and word.pieces[0] < room
        ]
        known: dict[tuple[int, tuple[int, ...]], tuple[str, ...]] = {}
        for start in range(0, len(asked), AT_ONCE):
            some = asked[start : start + AT_ONCE]
            windows = [self._masked(pieces[number].ids, its[0]) for number, its in some]
            scores = np.concatenate(self._predictor.forward(windows))
            for one, best in zip(some, self._best(torch.from_numpy(scores)), strict=True):
                known[one] = best
        return known

    def _masked(self, ids: Ids, place: int) -> Window:
        assert self._predictor is not None
        ids = ids.copy()
        ids[place] = self._tokenizer.mask_id
        sequence = joined(self._tokenizer, ids, None, self._predictor.max_length)
        return Window(
            row=0,
            ids=(sequence.ids,),
            segment_b_start=(sequence.segment_b_start,),
            positions={"mlm_positions": np.array([place + 1])},
        )

    def _look_up(self, words: set[tuple[int, ...]]) -> None:
        """Learn the nearest words of those that are not known yet."""
        asked = sorted(words - self._near.keys())
        for start in range(0, len(asked), AT_ONCE):
            some = asked[start : start + AT_ONCE]
            vectors = torch.stack([self._table[list(ids)].mean(0) for ids in some])
            cosines = vectors @ self._table.mT
            for row, ids in enumerate(some):
                cosines[row, list(ids)] = float("-inf")
            self._near |= zip(some, self._best(cosines), strict=True)

    def _best(self, scores: Float[torch.Tensor, "words vocab"]) -> list[tuple[str, ...]]:
        scores = scores.masked_fill(self._barred[: scores.shape[1]], float("-inf"))
        best = scores.topk(min(self._count, scores.shape[1]))
        return [
            tuple(self._surfaces[index] for index, score in zip(*row, strict=True) if score > -1e30)
            for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


def _surfaces(tokenizer: Tokenizer, size: int) -> list[str]:
    """What each token of a vocabulary reads as; nothing of those that begin no word."""
    special, begins = set(tokenizer.special_ids.tolist()), tokenizer.begins_word
    return [
        tokenizer.inner.decode([index]).strip()
        if index < len(begins) and begins[index] and index not in special
        else ""
        for index in range(size)
    ]


def _words(text: str, pieces: Pieces) -> Iterator[Word]:
    """The words of a text that are letters alone."""
    for word in np.unique(pieces.words[pieces.words >= 0]):
        its = np.flatnonzero(pieces.words == word)
        start, end = pieces.offsets[its[0], 0], pieces.offsets[its[-1], 1]
        surface = text[start:end]
        start += len(surface) - len(surface.lstrip())  # which some vocabularies count to the word
        if surface.strip().isalpha():
            yield Word(int(start), int(end), tuple(its.tolist()))
