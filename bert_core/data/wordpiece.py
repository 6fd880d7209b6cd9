"""Bulk WordPiece: columns of text to ids, many times as fast as text by text.

Words repeat. A column is split into words where BERT splits too, at ASCII white space and
punctuation; Arrow finds equal words, `tokenizers` encodes each once, and the ids are gathered. Text
that cannot be split this way is encoded whole.
"""

import copy
import string
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
from jaxtyping import Bool, Integer, UInt8
from tokenizers import models, normalizers, pre_tokenizers

SLICE_BYTES = 4 << 20  # of text; working memory is about ten times as much
MOST_KNOWN_WORDS = 1 << 18
WORDS_PER_TEXT = 256
WORD, SPACE, PUNCTUATION = 0, 1, 2
_LOWER = np.frombuffer(bytes(range(256)).lower(), dtype=np.uint8)  # of ASCII letters only
_MARKS = string.punctuation
_KIND = np.zeros(256, dtype=np.uint8)
_KIND[list(b" \t\n\r")] = SPACE
_KIND[list(_MARKS.encode())] = PUNCTUATION


class BulkWordPiece:
    """Encodes columns with BERT's normalizer, pre-tokenizer and WordPiece, exactly as they do.

    Why splitting first changes nothing: both steps before WordPiece look at one character at a
    time, except NFD, which moves only marks, and never across an ASCII character; ASCII white space
    and punctuation always end a word. Added tokens, which are looked for in the raw text, are the
    exception: rows that contain one are encoded whole.
    """

    # A word's number n is its index in _known; its ids are _ids[_bounds[n] : _bounds[n + 1]].
    _known: pa.BinaryArray
    _ids: np.ndarray
    _bounds: np.ndarray

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        """Raises: ValueError if `supports(inner)` is false."""
        if not supports(inner):
            raise ValueError("wanted BERT's normalizer, pre-tokenizer and WordPiece")
        self._inner = inner
        self._lowercase = inner.normalizer.lowercase
        self._added = [token.content for token in inner.get_added_tokens_decoder().values()]
        # Words with a vocabulary entry that normalization does not change.
        self._entries = {
            token: number
            for token, number in inner.get_vocab(with_added_tokens=False).items()
            if _is_plain(token, self._lowercase, inner.model.max_input_chars_per_word)
        }
        # No other word contains it: by itself it is an entry, and no character turns into it.
        self._separator = next((mark for mark in ",.!-" if mark in self._entries), None)
        self._forget()

    def _forget(self) -> None:
        self._known = pa.array([], pa.binary())
        self._ids = np.empty(0, dtype=np.uint32)
        self._bounds = np.zeros(1, dtype=np.int64)

    def forgetful(self) -> "BulkWordPiece":
        """The same without the words that this one has met, for another thread: it costs nothing,
        and what it meets is not kept."""
        other = copy.copy(self)
        other._forget()
        return other

    def encode(
        self, texts: pa.StringArray
    ) -> tuple[Integer[np.ndarray, "ids"], Integer[np.ndarray, "texts"]]:
        """Flat uint32 ids of all texts, without special tokens, and how many each text has.

        Nulls count as empty.
        """
        ids, counts = [], []
        texts = texts.fill_null("") if texts.null_count else texts
        for start, end in _slices(texts):
            part = texts.slice(start, end - start)
            whole = self._holds_added_token(part)
            some_ids, some_counts = self._encode_words(
                pc.if_else(pa.array(whole), "", part) if whole.any() else part
            )
            if whole.any():
                some_ids, some_counts = self._with_whole_rows(part, whole, some_ids, some_counts)
            ids.append(some_ids)
            counts.append(some_counts)
        return (
            np.concatenate([np.empty(0, np.uint32), *ids]),
            np.concatenate([np.empty(0, np.int64), *counts]),
        )

    def _holds_added_token(self, texts: pa.StringArray) -> Bool[np.ndarray, "texts"]:
        holds = np.zeros(len(texts), dtype=bool)
        data = _buffers(texts)[0].tobytes()
        for token in self._added:
            if token.encode() not in data:  # usually: a tenth of the time of a search by row
                continue
            holds |= pc.match_substring(texts, token).to_numpy(zero_copy_only=False)
        return holds

    def _with_whole_rows(
        self, texts: pa.StringArray, whole: np.ndarray, ids: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Insert the ids of the whole rows, which were encoded as empty."""
        rows = np.flatnonzero(whole)
        lists = self._encode_texts(texts.take(pa.array(rows)).to_pylist())
        places = np.cumsum(counts)[rows]  # an empty row's ids would end, and begin, here
        pieces = np.split(ids, places)
        merged = [pieces[0]]
        for row_ids, following in zip(lists, pieces[1:], strict=True):
            merged += [np.array(row_ids, dtype=np.uint32), following]
        counts = counts.copy()
        counts[rows] = [len(row_ids) for row_ids in lists]
        return np.concatenate(merged), counts

    def _encode_words(self, texts: pa.StringArray) -> tuple[np.ndarray, np.ndarray]:
        data, row_offsets = _buffers(texts)
        words, words_before_row = _cut(_LOWER[data] if self._lowercase else data, row_offsets)
        number, known_ids, bounds = self._numbers(words)
        lengths = bounds[number + 1] - bounds[number]
        ends = np.cumsum(lengths)
        ids_before_word = np.concatenate([[0], ends])
        total = int(ids_before_word[-1])
        shift = bounds[number] - ids_before_word[:-1]
        ids = known_ids[np.arange(total) + np.repeat(shift, lengths)]
        return ids, np.diff(ids_before_word[words_before_row])

    def _numbers(self, words: pa.BinaryArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each word's number, and the ids and bounds that the numbers index.

        New words are encoded, and known from then on as long as there is room.
        """
        indices = pc.index_in(words, value_set=self._known)
        ids, bounds = self._ids, self._bounds
        if not indices.null_count:
            return indices.to_numpy(), ids, bounds
        missing = indices.is_null()
        new = words.filter(missing).dictionary_encode()
        new_ids, counts = self._encode_new(new.dictionary.cast(pa.string(), safe=False).to_pylist())
        ids = np.concatenate([ids, new_ids])
        bounds = np.concatenate([bounds, bounds[-1] + np.cumsum(counts)])
        number = indices.fill_null(0).to_numpy().copy()
        number[missing.to_numpy(zero_copy_only=False)] = len(self._known) + new.indices.to_numpy()
        if len(self._known) + len(new.dictionary) <= MOST_KNOWN_WORDS:
            self._known = pa.concat_arrays([self._known, new.dictionary])
            self._ids, self._bounds = ids, bounds
        return number, ids, bounds

    def _encode_new(self, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Flat ids of words, and how many ids each has."""
        single = [self._entries.get(word, -1) for word in words]
        others = [word for word, number in zip(words, single, strict=True) if number < 0]
        ids_of_others, counts_of_others = self._encode_joined(others)
        counts = np.ones(len(words), dtype=np.int64)
        numbers = np.array(single, dtype=np.int64)
        counts[numbers < 0] = counts_of_others
        ids = np.repeat(numbers, counts)
        ids[ids < 0] = ids_of_others
        return ids.astype(np.uint32), counts

    def _encode_joined(self, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The same for words that are not entries, many joined into one text: half the time."""
        if self._separator is not None:
            joined = [
                "".join(
                    f"{self._separator}{word}" for word in words[start : start + WORDS_PER_TEXT]
                )
                for start in range(0, len(words), WORDS_PER_TEXT)
            ]
            ids = _flat(self._encode_texts(joined))
            places = np.flatnonzero(ids == self._entries[self._separator])
            if len(places) == len(words):
                counts = np.diff(np.append(places, len(ids))) - 1
                return np.delete(ids, places), counts
        lists = self._encode_texts(words)
        return _flat(lists), np.array([len(ids) for ids in lists], dtype=np.int64)

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def _flat(lists: list[list[int]]) -> Integer[np.ndarray, "ids"]:
    return np.fromiter((i for ids in lists for i in ids), np.uint32)


def _is_plain(token: str, lowercase: bool, most_characters: int) -> bool:
    """Whether the word `token` becomes the entry `token`: ASCII letters and digits, or a mark."""
    if not token.isascii() or len(token) > most_characters:
        return False
    return (token.isalnum() and not (lowercase and token != token.lower())) or token in {*_MARKS}


def supports(inner: tokenizers.Tokenizer) -> bool:
    """Whether text may be split into words before this tokenizer encodes them."""
    return (
        isinstance(inner.normalizer, normalizers.BertNormalizer)
        and isinstance(inner.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
        and isinstance(inner.model, models.WordPiece)
        and not any(
            token.normalized or token.lstrip or token.rstrip or token.single_word
            for token in inner.get_added_tokens_decoder().values()
        )
    )


def _slices(texts: pa.StringArray) -> list[tuple[int, int]]:
    """Runs of rows with about `SLICE_BYTES` of text each."""
    _, offsets = _buffers(texts)
    cuts = np.searchsorted(offsets, np.arange(SLICE_BYTES, int(offsets[-1]), SLICE_BYTES))
    bounds = np.unique(np.concatenate([[0], cuts, [len(texts)]]))
    return [(int(start), int(end)) for start, end in pairwise(bounds)]


def _buffers(texts: pa.StringArray) -> tuple[UInt8[np.ndarray, "bytes"], np.ndarray]:
    """The bytes of all texts and where each begins in them, without a copy."""
    _, offsets_buffer, data_buffer = texts.buffers()
    if len(texts) == 0 or data_buffer is None:
        return np.empty(0, np.uint8), np.zeros(len(texts) + 1, np.int32)
    offsets = np.frombuffer(offsets_buffer, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]], offsets - offsets[0]


def _cut(
    data: UInt8[np.ndarray, "bytes"], row_offsets: np.ndarray
) -> tuple[pa.BinaryArray, np.ndarray]:
    """The words of all rows, and how many come before each row and before the end."""
    kind = _KIND[data]
    starts = kind == PUNCTUATION
    follows = np.empty(len(data), dtype=bool)  # a word byte that a word byte precedes
    follows[:1] = False
    np.equal(kind[:-1], WORD, out=follows[1:])
    begins = row_offsets[:-1]
    follows[begins[begins < len(data)]] = False
    starts |= (kind == WORD) & ~follows
    kept = kind != SPACE
    compact = data[kept]
    offsets = np.append(np.flatnonzero(starts[kept]), len(compact)).astype(np.int32)
    words = pa.BinaryArray.from_buffers(
        pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(compact)]
    )
    return words, np.searchsorted(np.flatnonzero(starts), row_offsets)
