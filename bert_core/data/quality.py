"""Which documents of a corpus are dropped, and why: length, language, similarity, contamination.

These are functions of text. `pipelines.prepare` calls them, counts what is dropped, and drops exact
duplicates itself, since it has the digests. Where words are counted, they are separated by white
space; where texts are compared, words are runs of letters and digits in lower case, which in a
script without spaces are whole phrases.
"""

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Int32, Integer, UInt32, UInt64

from bert_core.checks import NonNegativeInt, PositiveInt, PositiveShare, Share, check_fields
from bert_core.data.ragged import ragged_ranges, starts_of
from bert_core.errors import ConfigError

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

PERMUTATIONS = 128  # an estimate's standard deviation is at most 0.5 / √128 = 0.044
SHINGLE_WORDS = 5
SHORTEST_ROW_WORDS = 8
LANGUAGE_CHARACTERS = 2000  # py3langid reads some 2 MB/s; a paragraph is enough for it
ALONE = -1  # in place of a bucket that no other document is in

DropReason = Literal["too_short", "too_long", "other_language"]
OnContamination = Literal["report", "drop"]
EvaluationRow = tuple[str, int]
"""The row's source, and its number there."""

_WORD = re.compile(r"\w+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, bits without a pattern: 2^64 / golden ratio


@dataclass(frozen=True, kw_only=True)
class QualityConfig:
    """Which documents are dropped; none by default."""

    min_words: NonNegativeInt = 0
    """Drop documents with fewer words."""
    max_words: PositiveInt | None = None
    """Drop documents with more words; no limit by default."""
    languages: tuple[str, ...] = ()
    """ISO 639-1 codes of the languages to keep, as detected by py3langid; all by default.
    Unreliable below about five words."""
    min_language_probability: Share = 0.0
    """Also drop a document if py3langid gives its language a lower probability."""
    exact_duplicates: bool = False
    """Keep only one of several documents with the same text."""
    near_duplicates: PositiveShare | None = None
    """Jaccard similarity of word 5-grams from which two documents count as duplicates, such as 0.8;
    one of them is kept."""
    contamination: tuple[str, ...] = field(default=(), metadata={"input": True})
    """Evaluation sets whose rows are looked for in the documents."""
    contamination_ngram: PositiveInt = 13
    """Consecutive words that a document must share with an evaluation row. Brown et al. 2020,
    appendix C."""
    on_contamination: OnContamination = "report"
    """`report` counts documents that share them, `drop` drops them."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="quality.")
        if self.max_words is not None and self.max_words < self.min_words:
            raise ConfigError(
                f"quality.max_words: wanted at least min_words = {self.min_words}, got "
                f"{self.max_words}: leave it unset to keep long documents"
            )
        if self.languages and (unknown := set(self.languages) - set(_identifier().labels)):
            raise ConfigError(
                f"quality.languages: wanted codes of {', '.join(sorted(_identifier().labels))}, "
                f"got {', '.join(map(repr, sorted(unknown)))}"
            )
        if self.min_language_probability and not self.languages:
            raise ConfigError(
                f"quality.min_language_probability: wanted 0 without languages, got "
                f'{self.min_language_probability}: set languages too, such as ["en"]'
            )


@cache
def _identifier() -> "LanguageIdentifier":
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # half a second

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def drop_reason(text: str, config: QualityConfig) -> DropReason | None:
    """Return why a document is dropped regardless of the others; None if it is kept.

    Its language is detected from the 2,000 characters in its middle: its ends may be boilerplate.
    """
    if config.min_words or config.max_words is not None:
        words = len(text.split())
        if words < config.min_words:
            return "too_short"
        if config.max_words is not None and words > config.max_words:
            return "too_long"
    if config.languages:
        start = max(0, (len(text) - LANGUAGE_CHARACTERS) // 2)
        language, probability = _identifier().classify(text[start : start + LANGUAGE_CHARACTERS])
        if language not in config.languages or probability < config.min_language_probability:
            return "other_language"
    return None


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _hashed(words: list[str]) -> UInt64[np.ndarray, "words"]:
    encoded = " ".join(words).encode().split(b" ")  # half the time of encoding word by word
    return np.fromiter(map(zlib.crc32, encoded), np.uint64, len(words))


def _gram_hashes(hashed: UInt64[np.ndarray, "words"], length: int) -> UInt64[np.ndarray, "grams"]:
    """Return a hash of every run of `length` words, in order: a polynomial of the words' hashes,
    modulo 2^64."""
    grams = np.zeros(max(0, len(hashed) - length + 1), dtype=np.uint64)
    for word in range(length):
        grams += hashed[word : word + len(grams)]
        grams *= _MULTIPLIER
    return grams


@cache
def _permutations() -> UInt32[np.ndarray, "2 permutations"]:
    from datasketch import MinHash  # half a second, for scipy

    return MinHash(num_perm=PERMUTATIONS, seed=1, scheme="affine32").permutations


def signatures(texts: Sequence[str]) -> UInt32[np.ndarray, "texts permutations"]:
    """Return the MinHash of the set of word 5-grams of each text.

    A text of fewer than 5 words is a single gram, the same for all texts without a word. The share
    of positions where two rows are equal estimates the texts' Jaccard similarity.

    Source: a row is the `hashvalues` of datasketch's MinHash (seed 1, affine32) of its gram hashes;
    here a whole block is permuted at once, in a tenth of the time.
    """
    if not texts:
        return np.empty((0, PERMUTATIONS), dtype=np.uint32)
    missing = [""] * SHINGLE_WORDS
    rows = [_hashed(words + missing[len(words) :]) for words in map(_words, texts)]
    sizes = np.array([len(row) for row in rows])
    grams = sizes - SHINGLE_WORDS + 1
    picked = ragged_ranges(starts_of(sizes), grams)  # those within one text
    hashes = _gram_hashes(np.concatenate(rows), SHINGLE_WORDS)[picked]
    hashes_32 = _finalised((hashes >> np.uint64(32)).astype(np.uint32))
    minima = np.empty((PERMUTATIONS, len(texts)), dtype=np.uint32)
    for row, (factor, summand) in zip(minima, _permutations().T, strict=True):
        np.minimum.reduceat(hashes_32 * factor + summand, starts_of(grams), out=row)
    return np.ascontiguousarray(minima.T)


def _finalised(hashes: UInt32[np.ndarray, "grams"]) -> UInt32[np.ndarray, "grams"]:
    """Apply MurmurHash3's 32-bit finalizer, with which datasketch mixes hashes before permuting."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashes = (hashes ^ (hashes >> np.uint32(shift))) * np.uint32(factor)
    return hashes ^ (hashes >> np.uint32(16))


def near_duplicates(
    digests: Sequence[bytes],
    signatures: UInt32[np.ndarray, "texts permutations"],
    threshold: float,
    weights: Sequence[float] | None = None,
) -> Integer[np.ndarray, "dropped"]:
    """Return the positions of the documents to drop, ascending. Which they are does not depend on
    the order of the documents.

    Documents are visited by weight, highest first, and by digest among equal weights. Each is
    compared with those kept so far, and dropped if its estimated similarity with any of them is
    `threshold` or more. That includes exact duplicates.

    Only documents that share a band of their signatures are compared. There is one more band than
    positions in which two documents above the threshold may differ, so no such pair is missed; a
    low threshold means short bands, and many comparisons.

    Args:
        weights: one per document; equal by default.
    """
    permutations = signatures.shape[1]
    agreeing = math.ceil(threshold * permutations)
    buckets = _buckets(signatures, bands=permutations - agreeing + 1)
    sizes = np.bincount(buckets[buckets != ALONE])
    starts = starts_of(sizes)
    kept_counts = np.zeros(len(sizes), dtype=np.int64)
    kept_documents = np.zeros(sizes.sum(), dtype=np.int64)  # per bucket, from its start on
    dropped = []
    candidates = np.flatnonzero((buckets != ALONE).any(axis=1)).tolist()
    weights = weights or [1.0] * len(digests)
    for document in sorted(candidates, key=lambda at: (-weights[at], digests[at])):
        shared = buckets[document][buckets[document] != ALONE]
        rivals = np.unique(kept_documents[ragged_ranges(starts[shared], kept_counts[shared])])
        equal = np.count_nonzero(signatures[rivals] == signatures[document], axis=1)
        if equal.max(initial=0) >= agreeing:
            dropped.append(document)
        else:
            kept_documents[starts[shared] + kept_counts[shared]] = document
            kept_counts[shared] += 1
    return np.sort(np.array(dropped, dtype=np.int64))


def _buckets(
    signatures: UInt32[np.ndarray, "texts permutations"], bands: int
) -> Int32[np.ndarray, "texts bands"]:
    """Return each document's bucket in each band, numbered through all bands; ALONE if no other
    document is in it."""
    buckets = np.full((len(signatures), bands), ALONE, dtype=np.int32)
    first = 0
    for band, columns in enumerate(np.array_split(signatures, bands, axis=1)):
        keys = np.zeros(len(signatures), dtype=np.uint64)
        for column in columns.T:
            keys = (keys + column) * _MULTIPLIER
        _, key, counts = np.unique(keys, return_inverse=True, return_counts=True)
        numbers = np.where(counts > 1, first + np.cumsum(counts > 1) - 1, ALONE)
        buckets[:, band] = numbers[key]
        first += int(np.count_nonzero(counts > 1))
    return buckets


class EvaluationGrams:
    """Word n-grams of evaluation rows, to look for in documents.

    A row of fewer than `ngram` words is a single, shorter gram. A row of fewer than 8 words (or
    fewer than `ngram`, if that is less) is not looked for, since so short a text may occur by
    chance.
    """

    def __init__(self, rows: Iterable[tuple[str, int, str]], ngram: int) -> None:
        """Index the rows, given as (source, number, text); a row with several texts is given
        several times."""
        self.ngram = ngram
        self.looked_for: Counter[str] = Counter()  # texts by source
        self.too_short: Counter[str] = Counter()
        self._head_words = min(SHORTEST_ROW_WORDS, ngram)
        self._rows: list[EvaluationRow] = []
        self._texts: list[str] = []
        words: list[str] = []
        sizes: list[int] = []
        for source, number, text in rows:
            row_words = _words(text)
            if len(row_words) < self._head_words:
                self.too_short[source] += 1
                continue
            self.looked_for[source] += 1
            self._rows.append((source, number))
            self._texts.append(f" {' '.join(row_words)} ")
            words += row_words
            sizes.append(len(row_words))
        row_sizes = np.array(sizes, dtype=np.int64)
        gram_words = np.minimum(row_sizes, ngram)
        grams = row_sizes - gram_words + 1
        # Grams of any length are looked up by their first words, and then compared as a whole.
        picked = ragged_ranges(starts_of(row_sizes), grams)
        heads = _gram_hashes(_hashed(words), self._head_words)[picked]
        self._gram_words: list[int] = gram_words.tolist()
        order = np.argsort(heads, kind="stable")
        self._heads = heads[order]
        self._owners = np.repeat(np.arange(len(grams), dtype=np.int32), grams)[order]
        # This table rules out nine in ten of a document's heads without a search.
        bits = max(1, (8 * len(heads)).bit_length())
        self._shift = np.uint64(64 - bits)
        self._may_be_there = np.zeros(2**bits, dtype=bool)
        self._may_be_there[self._heads >> self._shift] = True

    def overlaps(self, text: str) -> list[EvaluationRow]:
        """Return the rows with a gram in `text`, each once, in the order in which they were
        given."""
        words = _words(text)
        heads = _gram_hashes(_hashed(words), self._head_words)
        positions = np.flatnonzero(self._may_be_there[heads >> self._shift])
        first = np.searchsorted(self._heads, heads[positions])
        hits = np.searchsorted(self._heads, heads[positions], side="right") - first
        starts = np.repeat(positions, hits).tolist()
        owners = self._owners[ragged_ranges(first, hits)].tolist()
        matches: set[int] = set()
        for start, owner in zip(starts, owners, strict=True):
            gram = words[start : start + self._gram_words[owner]]
            if len(gram) == self._gram_words[owner] and f" {' '.join(gram)} " in self._texts[owner]:
                matches.add(owner)
        return list(dict.fromkeys(self._rows[owner] for owner in sorted(matches)))
