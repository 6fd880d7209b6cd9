"""Where BERT's normalizer and pre-tokenizer split, for bulk WordPiece."""

import string

import numpy as np
import pyarrow as pa
import tokenizers
from jaxtyping import Integer, UInt8
from tokenizers import models, normalizers, pre_tokenizers

from bert_core.data.bulk import BulkEncoder, words_at

WORDS_PER_TEXT = 256
WORD, SPACE, PUNCTUATION = 0, 1, 2
_LOWER = np.frombuffer(bytes(range(256)).lower(), dtype=np.uint8)  # of ASCII letters only
_MARKS = string.punctuation
_KIND = np.zeros(256, dtype=np.uint8)
_KIND[list(b" \t\n\r")] = SPACE
_KIND[list(_MARKS.encode())] = PUNCTUATION


class BulkWordPiece(BulkEncoder):
    """Words are cut at ASCII white space and punctuation.

    Why cutting first changes nothing: both steps before WordPiece look at one character at a time,
    except NFD, which moves only marks, and never across an ASCII character; ASCII white space and
    punctuation always end a word.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        super().__init__(inner)
        self._lowercase = inner.normalizer.lowercase
        # Words with a vocabulary entry that normalization does not change.
        self._entries = {
            token: number
            for token, number in inner.get_vocab(with_added_tokens=False).items()
            if _is_plain(token, self._lowercase, inner.model.max_input_chars_per_word)
        }
        # No other word contains it: by itself it is an entry, and no character turns into it.
        self._separator = next((mark for mark in ",.!-" if mark in self._entries), None)

    @classmethod
    def supports(cls, inner: tokenizers.Tokenizer) -> bool:
        return (
            isinstance(inner.normalizer, normalizers.BertNormalizer)
            and isinstance(inner.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
            and isinstance(inner.model, models.WordPiece)
            and not any(one.normalized for one in inner.get_added_tokens_decoder().values())
        )

    def cut(
        self, data: UInt8[np.ndarray, "bytes"], row_offsets: Integer[np.ndarray, "rows_1"]
    ) -> tuple[pa.BinaryArray, Integer[np.ndarray, "rows_1"]]:
        data = _LOWER[data] if self._lowercase else data
        kind = _KIND[data]
        begins_word = kind == PUNCTUATION
        follows = np.empty(len(data), dtype=bool)  # a word byte that a word byte precedes
        follows[:1] = False
        np.equal(kind[:-1], WORD, out=follows[1:])
        rows = row_offsets[:-1]
        follows[rows[rows < len(data)]] = False
        begins_word |= (kind == WORD) & ~follows
        starts = np.flatnonzero(begins_word)
        return words_at(starts, data, kind != SPACE), np.searchsorted(starts, row_offsets)

    def encode_new(
        self, words: list[str]
    ) -> tuple[Integer[np.ndarray, "ids"], Integer[np.ndarray, "words"]]:
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
            ids, _ = self.encode_texts(joined)
            places = np.flatnonzero(ids == self._entries[self._separator])
            if len(places) == len(words):
                return np.delete(ids, places), np.diff(np.append(places, len(ids))) - 1
        return self.encode_texts(words)


def _is_plain(token: str, lowercase: bool, most_characters: int) -> bool:
    """Whether the word `token` becomes the entry `token`: ASCII letters and digits, or a mark."""
    if not token.isascii() or len(token) > most_characters:
        return False
    return (token.isalnum() and not (lowercase and token != token.lower())) or token in {*_MARKS}
