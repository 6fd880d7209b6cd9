"""Where BERT's normalizer and pre-tokenizer split, for bulk WordPiece."""

import string

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
from jaxtyping import Integer, UInt8
from tokenizers import models, normalizers, pre_tokenizers

from bert_core.data.bulk import BulkEncoder, words_at

WORD, SPACE, PUNCTUATION = 0, 1, 2
_LOWER = np.frombuffer(bytes(range(256)).lower(), dtype=np.uint8)  # of ASCII letters only
_KIND = np.zeros(256, dtype=np.uint8)
_KIND[list(b" \t\n\r")] = SPACE
_KIND[list(string.punctuation.encode())] = PUNCTUATION
_PLAIN = r"^([0-9A-Za-z]+|[!-~])$"


class BulkWordPiece(BulkEncoder):
    """Words are cut at ASCII white space and punctuation.

    Cutting first does not change the ids. Both steps before WordPiece look at one character at a
    time, except NFD, which moves only marks, and never across an ASCII character; and ASCII white
    space and punctuation always end a word.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        super().__init__(inner)
        self._lowercase = inner.normalizer.lowercase
        # Without added tokens: words are in lower case, and may equal an added token that the text
        # does not contain.
        self._of_words = tokenizers.Tokenizer(inner.model)
        self._of_words.normalizer = inner.normalizer
        self._of_words.pre_tokenizer = inner.pre_tokenizer

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
        follows = np.empty(len(data), dtype=bool)  # whether a byte of a word precedes this byte
        follows[:1] = False
        np.equal(kind[:-1], WORD, out=follows[1:])
        rows = row_offsets[:-1]
        follows[rows[rows < len(data)]] = False
        begins_word |= (kind == WORD) & ~follows
        return words_at(begins_word, data, row_offsets, kind != SPACE)

    def model_inputs(self, words: pa.StringArray) -> pa.StringArray:
        return pc.if_else(pc.match_substring_regex(words, _PLAIN), words, None)
