"""Columns of text to ids, many times as fast as text by text: each distinct word is encoded once.

Words repeat. A column is cut into words where the tokenizer always splits; Arrow finds equal words,
`tokenizers` encodes each once, and the ids are gathered. A row that cannot be cut this way is
encoded whole. Where each kind of tokenizer splits is defined in `wordpiece`, `byte_level` and
`unigram`.
"""

import copy
import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
from jaxtyping import Bool, Integer, UInt8

from bert_core.data.ragged import offsets_of, ragged_ranges, starts_of

SLICE_BYTES = 4 << 20  # of text; working memory is about ten times as much
MOST_KNOWN_WORDS = 1 << 18
MOST_KNOWN_BYTES = 32 << 20  # a word may be long: some scripts have no spaces


class BulkEncoder(ABC):
    """Encodes columns of text, with the same ids as its tokenizer gives each text.

    Rows that contain an added token are encoded whole: the tokenizer looks for those in the raw
    text.
    """

    # A word's number n is its index in _known; its ids are _ids[_bounds[n] : _bounds[n + 1]]. Rows
    # that contain it are encoded whole if _in_context[n].
    _known: pa.BinaryArray
    _ids: np.ndarray
    _bounds: np.ndarray
    _in_context: np.ndarray

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        """Raises: ValueError if `supports(inner)` is false."""
        if not self.supports(inner):
            raise ValueError(f"{type(self).__name__}: wanted a tokenizer that it supports")
        self.inner = inner
        self._of_words = inner
        self._added = [token.content for token in inner.get_added_tokens_decoder().values()]
        self._forget()

    @classmethod
    @abstractmethod
    def supports(cls, inner: tokenizers.Tokenizer) -> bool:
        """Whether words cut out by this class get the same ids as within a text."""

    @abstractmethod
    def cut(
        self, data: UInt8[np.ndarray, "bytes"], row_offsets: Integer[np.ndarray, "rows_1"]
    ) -> tuple[pa.BinaryArray, Integer[np.ndarray, "rows_1"]]:
        """Cut all rows into words.

        Args:
            data: the UTF-8 of all rows, one after the other.
            row_offsets: where each row begins in `data`, and where the last one ends.
        Returns: the words, and the number of words before each row and before the end.
        """

    @abstractmethod
    def model_inputs(self, words: pa.StringArray) -> pa.StringArray:
        """Return each word as the normalizer and the pre-tokenizer leave it, if the model is known
        to see it as a single word; otherwise null. Encoding such words takes half the time."""

    def in_context(
        self,
        words: Sequence[str],
        ids: Integer[np.ndarray, "ids"],
        counts: Integer[np.ndarray, "words"],
    ) -> Bool[np.ndarray, "words"]:
        """Return which of these words may have other ids within a text than on their own.

        Args:
            ids: the flat ids of the words, each encoded on its own.
            counts: the number of ids of each word.
        """
        return np.zeros(len(words), dtype=bool)

    def _forget(self) -> None:
        self._known = pa.array([], pa.binary())
        self._ids = np.empty(0, dtype=np.uint32)
        self._bounds = np.zeros(1, dtype=np.int64)
        self._in_context = np.zeros(0, dtype=bool)

    def forgetful(self) -> "BulkEncoder":
        """Return a copy that knows no words yet, for use in another thread. It is cheap to make,
        and the words it learns are not added to the original."""
        empty = copy.copy(self)
        empty._forget()
        return empty

    def encode(
        self, texts: pa.StringArray
    ) -> tuple[Integer[np.ndarray, "ids"], Integer[np.ndarray, "texts"]]:
        """Return the flat uint32 ids of all texts, without special tokens, and the number of ids
        of each text.

        Nulls count as empty.
        """
        return in_slices(texts, self._encode_slice)

    def _encode_slice(self, texts: pa.StringArray) -> tuple[np.ndarray, np.ndarray]:
        words, words_before_row = self.cut(*_buffers(texts))
        number, known_ids, bounds, in_context = self._numbers(words)
        lengths = bounds[number + 1] - bounds[number]
        whole = self._holds_added_token(texts)
        if in_context.any():
            places = np.flatnonzero(in_context[number])
            whole[np.searchsorted(words_before_row, places, side="right") - 1] = True
        lengths[np.repeat(whole, np.diff(words_before_row))] = 0
        ids = known_ids[ragged_ranges(bounds[number], lengths)]
        counts = np.diff(offsets_of(lengths)[words_before_row])
        return self._with_whole_rows(texts, whole, ids, counts) if whole.any() else (ids, counts)

    def _with_whole_rows(
        self, texts: pa.StringArray, whole: np.ndarray, ids_of_words: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode the rows marked in `whole` and merge their ids with those of the other rows.

        Args:
            whole: which rows are encoded whole.
            ids_of_words: the flat ids of the rows that are cut into words.
            counts: the number of ids of each row; those of whole rows are filled in, in place.
        Returns: the flat ids of all rows, and `counts`.
        """
        rows = np.flatnonzero(whole)
        ids_of_whole, counts[rows] = encode_whole(self.inner, texts.take(pa.array(rows)))
        starts = starts_of(counts)
        ids = np.empty(counts.sum(), dtype=np.uint32)
        ids[ragged_ranges(starts[~whole], counts[~whole])] = ids_of_words
        ids[ragged_ranges(starts[whole], counts[whole])] = ids_of_whole
        return ids, counts

    def _holds_added_token(self, texts: pa.StringArray) -> Bool[np.ndarray, "texts"]:
        holds = np.zeros(len(texts), dtype=bool)
        data = _buffers(texts)[0].tobytes()
        for token in self._added:
            if token.encode() not in data:  # usually: a tenth of the time of a search by row
                continue
            holds |= pc.match_substring(texts, token).to_numpy(zero_copy_only=False)
        return holds

    def _numbers(
        self, words: pa.BinaryArray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return each word's number, and the ids, bounds and marks that the numbers index.

        New words are encoded, and remembered while there is room.
        """
        indices = pc.index_in(words, value_set=self._known)
        ids, bounds, in_context = self._ids, self._bounds, self._in_context
        if not indices.null_count:
            return indices.to_numpy(), ids, bounds, in_context
        missing = indices.is_null()
        new = words.filter(missing).dictionary_encode()
        distinct = new.dictionary.cast(pa.string(), safe=False)
        new_ids, counts = self._encode_words(distinct)
        ids = np.concatenate([ids, new_ids])
        bounds = np.concatenate([bounds, bounds[-1] + np.cumsum(counts)])
        in_context = np.append(in_context, self.in_context(distinct.to_pylist(), new_ids, counts))
        number = indices.fill_null(0).to_numpy().copy()
        number[missing.to_numpy(zero_copy_only=False)] = len(self._known) + new.indices.to_numpy()
        known = pa.concat_arrays([self._known, new.dictionary])
        if len(known) <= MOST_KNOWN_WORDS and known.nbytes <= MOST_KNOWN_BYTES:
            self._known = known
            self._ids, self._bounds, self._in_context = ids, bounds, in_context
        return number, ids, bounds, in_context

    def _encode_words(self, words: pa.StringArray) -> tuple[np.ndarray, np.ndarray]:
        """Return the flat ids of the words, and the number of ids of each."""
        inputs, tokenize = self.model_inputs(words), self.inner.model.tokenize
        others = words.filter(inputs.is_null()).to_pylist()
        encodings = iter(self._of_words.encode_batch_fast(others, add_special_tokens=False))
        return _flat(
            next(encodings).ids if known is None else [one.id for one in tokenize(known)]
            for known in inputs.to_pylist()
        )


def encode_whole(
    inner: tokenizers.Tokenizer, texts: pa.StringArray
) -> tuple[Integer[np.ndarray, "ids"], Integer[np.ndarray, "texts"]]:
    """Return the flat ids of texts as the library encodes them, and the number of ids of each."""
    encodings = inner.encode_batch_fast(texts.to_pylist(), add_special_tokens=False)
    return _flat(encoding.ids for encoding in encodings)


def in_slices(
    texts: pa.StringArray,
    encode: Callable[[pa.StringArray], tuple[np.ndarray, np.ndarray]],
) -> tuple[Integer[np.ndarray, "ids"], Integer[np.ndarray, "texts"]]:
    """Apply `encode` to a column in slices of about `SLICE_BYTES`. Nulls count as empty.

    Returns: the flat ids, and the number of ids of each text.
    """
    ids, counts = [np.empty(0, np.uint32)], [np.empty(0, np.int64)]
    texts = texts.fill_null("") if texts.null_count else texts
    for start, end in _slices(texts):
        some_ids, some_counts = encode(texts.slice(start, end - start))
        ids.append(some_ids)
        counts.append(some_counts)
    return np.concatenate(ids), np.concatenate(counts)


def words_at(
    begins: Bool[np.ndarray, "bytes"],
    data: UInt8[np.ndarray, "bytes"],
    row_offsets: Integer[np.ndarray, "rows_1"],
    is_kept: Bool[np.ndarray, "bytes"] | None = None,
) -> tuple[pa.BinaryArray, Integer[np.ndarray, "rows_1"]]:
    """Return the words that begin at the bytes marked in `begins`, in the form that
    `BulkEncoder.cut` returns.

    Each word extends to the beginning of the next one. Bytes not marked in `is_kept` are left out;
    None keeps all.
    """
    starts = np.flatnonzero(begins)
    words_before_row = np.searchsorted(starts, row_offsets)
    if is_kept is not None:
        starts, data = np.flatnonzero(begins[is_kept]), data[is_kept]
    offsets = np.append(starts, len(data)).astype(np.int32)
    words = pa.BinaryArray.from_buffers(
        pa.binary(), len(starts), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    return words, words_before_row


def settings_of(component: Any) -> dict[str, Any]:
    """Return the settings of a normalizer or pre-tokenizer, as in `tokenizer.json`; empty for
    None."""
    return json.loads(component.__getstate__()) if component is not None else {}


def steps_of(component: Any) -> list[dict[str, Any]]:
    """Return the settings of each step of a normalizer or pre-tokenizer; nested sequences are
    flattened."""

    def steps(settings: dict[str, Any]) -> list[dict[str, Any]]:
        if settings["type"] != "Sequence":
            return [settings]
        inside = settings.get("normalizers") or settings.get("pretokenizers") or []
        return [step for one in inside for step in steps(one)]

    return steps(settings) if (settings := settings_of(component)) else []


def _flat(lists: Iterable[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return all numbers in one array, and the length of each list. No list is kept: the garbage
    collector would visit tens of thousands of them again and again."""
    flat, counts = array("I"), array("q")
    for numbers in lists:
        flat.extend(numbers)
        counts.append(len(numbers))
    return np.array(flat, dtype=np.uint32), np.array(counts, dtype=np.int64)


def _slices(texts: pa.StringArray) -> list[tuple[int, int]]:
    """Return runs of rows (start, end), each with about `SLICE_BYTES` of text."""
    _, offsets = _buffers(texts)
    cuts = np.searchsorted(offsets, np.arange(SLICE_BYTES, int(offsets[-1]), SLICE_BYTES))
    bounds = np.unique(np.concatenate([[0], cuts, [len(texts)]]))
    return [(int(start), int(end)) for start, end in pairwise(bounds)]


def _buffers(texts: pa.StringArray) -> tuple[UInt8[np.ndarray, "bytes"], np.ndarray]:
    """Return the bytes of all texts and the offsets of the texts in them, without a copy."""
    _, offsets_buffer, data_buffer = texts.buffers()
    if len(texts) == 0 or data_buffer is None:
        return np.empty(0, np.uint8), np.zeros(len(texts) + 1, np.int32)
    offsets = np.frombuffer(offsets_buffer, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]], offsets - offsets[0]
