"""Where the pre-tokenizer of Unigram splits (ALBERT, XLM-RoBERTa, DeBERTa v3)."""

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
from jaxtyping import Bool, Integer, UInt8
from tokenizers import models

from bert_core.data.bulk import BulkEncoder, steps_of, words_at

WHITE_SPACE = " \t\n\r"
_WHITE = np.zeros(256, dtype=bool)
_WHITE[list(WHITE_SPACE.encode())] = True
_PLAIN = frozenset(map(chr, range(ord("!"), ord("~") + 1)))
"""The characters of ASCII that are neither white space nor control characters."""
_ALL_PLAIN = r"^[!-~]+$"
_LOCAL = {"NFC", "NFD", "NFKC", "NFKD", "StripAccents", "Lowercase", "Strip", "Precompiled"}
_PATTERNS = {" {2,}", r"\s{2,}|[\n\r\t]"}
"""Regular expressions that join white space, as published tokenizers have them."""
_META = "▁"
# Characters that may form a grapheme with the space before them; `Precompiled` maps graphemes.
_JOINING_CATEGORIES = {"Mn", "Mc", "Me", "Cc", "Cf", "Cn", "Co", "Sk"}
_JOINING = {"\u0e33", "\u0eb3", "\uff9e", "\uff9f"}


class BulkUnigram(BulkEncoder):
    """Words are cut at white space.

    The pre-tokenizer splits at every space before the model sees the text, so the best path through
    a text consists of the best paths through its words. A test finds out whether all white space
    only separates words; if not, words are cut at single spaces only, and other white space is part
    of a word. The normalizer may join white space with some characters outside ASCII: characters
    at which words begin or end are tested between separators, and if one makes a difference, rows
    that contain such a word are encoded whole.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        super().__init__(inner)
        self._at_any_white_space = all(
            _ids(inner, f"{edge}a{white}a{edge}") == 2 * _ids(inner, "a")
            for white in _white_space()
            for edge in ("", white)
        )
        # Added tokens that may occur in normalized text only.
        self._normalized = {
            number: self._normalize(token.content)
            for number, token in inner.get_added_tokens_decoder().items()
            if token.normalized and inner.normalizer is not None
        }
        self._known_edges = set(_PLAIN)
        self._safe_edges = set(_PLAIN)

    @classmethod
    def supports(cls, inner: tokenizers.Tokenizer) -> bool:
        splits = steps_of(inner.pre_tokenizer)
        kinds = [step["type"] for step in splits]
        return (
            isinstance(inner.model, models.Unigram)
            and inner.model.alpha is None
            and kinds in (["Metaspace"], ["WhitespaceSplit", "Metaspace"])
            and splits[-1]["split"]
            and splits[-1]["replacement"] == _META
            # Without a split at white space, words other than the first have the mark of a space.
            and splits[-1]["prepend_scheme"]
            in (["always", "first"] if kinds == ["Metaspace"] else ["always"])
            and all(map(_is_local, steps_of(inner.normalizer)))
            and _keeps_plain_text(inner)
            and not any(
                token.normalized and not _PLAIN.issuperset(token.content)
                for token in inner.get_added_tokens_decoder().values()
            )
            and _ids(inner, "a a") == 2 * _ids(inner, "a")
        )

    def cut(
        self, data: UInt8[np.ndarray, "bytes"], row_offsets: Integer[np.ndarray, "rows_1"]
    ) -> tuple[pa.BinaryArray, Integer[np.ndarray, "rows_1"]]:
        begins_row = np.zeros(len(data) + 1, dtype=bool)
        begins_row[row_offsets] = True
        separates = _WHITE[data]
        if not self._at_any_white_space:
            # Beside white space, or at the end of a row.
            beside = begins_row[:-1] | begins_row[1:]
            beside[1:] |= separates[:-1]
            beside[:-1] |= separates[1:]
            separates = (data == ord(" ")) & ~beside
        begins_word = ~separates
        begins_word[1:] &= separates[:-1] | begins_row[1:-1]
        return words_at(begins_word, data, row_offsets, ~separates)

    def model_inputs(self, words: pa.StringArray) -> pa.StringArray:
        plain = pc.match_substring_regex(words, _ALL_PLAIN)
        normal = self._normalize(" ".join(words.filter(plain).to_pylist()))
        if any(content in normal for content in self._normalized.values()):
            return pa.nulls(len(words), pa.string())
        known = pa.array([_META + word for word in normal.split(" ") if word], pa.string())
        return pc.replace_with_mask(pa.nulls(len(words), pa.string()), plain, known)

    def in_context(
        self,
        words: Sequence[str],
        ids: Integer[np.ndarray, "ids"],
        counts: Integer[np.ndarray, "words"],
    ) -> Bool[np.ndarray, "words"]:
        has_added_token = np.zeros(len(words), dtype=bool)
        word_of_id = np.repeat(np.arange(len(words)), counts)
        has_added_token[word_of_id[np.isin(ids, [*self._normalized])]] = True
        return has_added_token | self._depend_on_neighbours(words)

    def _depend_on_neighbours(self, words: Sequence[str]) -> Bool[np.ndarray, "words"]:
        """Return which words may have other ids in a text than on their own, because normalization
        may join their first or last character with what is beside it.

        Only words whose first or last character is not plain are tested: others never have.
        """
        depend = np.zeros(len(words), dtype=bool)
        unusual = [n for n, word in enumerate(words) if not _PLAIN.issuperset(word[0] + word[-1])]
        self._learn({edge for n in unusual for edge in words[n][0] + words[n][-1]})
        depend[[n for n in unusual if not self._stands_alone(words[n])]] = True
        return depend

    def _stands_alone(self, word: str) -> bool:
        return (
            word[0] not in _JOINING
            and unicodedata.category(word[0]) not in _JOINING_CATEGORIES
            and self._safe_edges.issuperset(word[0] + word[-1])
            and _is_solid(self._normalize(word))
        )

    def _learn(self, edges: set[str]) -> None:
        """Add to `_safe_edges` the characters that are safe as the first and last of a word:
        between words "a" and white space they have the same ids as on their own.

        Several threads may do so at once: they find the same, and a character that is not tested
        yet counts as unsafe.
        """
        new = sorted(edges - self._known_edges)
        self._known_edges.update(new)
        new = [edge for edge in new if _is_solid(self._normalize(edge))]
        spaces = [" ", "\n", "\r\n", "\t", "  "] if self._at_any_white_space else [" "]
        texts = [edge + "".join(f"{one}a{one}{edge}" for one in spaces) for edge in new]
        for edge, text in zip(new, texts, strict=True):
            alone, a = _ids(self.inner, edge), _ids(self.inner, "a")
            if _ids(self.inner, text) == alone + len(spaces) * (a + alone):
                self._safe_edges.add(edge)

    def _normalize(self, text: str) -> str:
        normalizer = self.inner.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)


def _white_space() -> Iterator[str]:
    """Yield every character of white space, and every sequence of two."""
    for length in (1, 2):
        yield from map("".join, product(WHITE_SPACE, repeat=length))


def _is_local(step: dict[str, Any]) -> bool:
    """Whether a normalizer changes a word in a text as it does on its own, apart from white space
    around it."""
    if step["type"] != "Replace":
        return step["type"] in _LOCAL
    pattern, content = step["pattern"], step["content"]
    if "Regex" in pattern:
        return pattern["Regex"] in _PATTERNS and content == " "
    return _PLAIN.issuperset(pattern["String"] + content) and bool(content)


def _keeps_plain_text(inner: tokenizers.Tokenizer) -> bool:
    if inner.normalizer is None:
        return True
    normal = {one: inner.normalizer.normalize_str(one) for one in ["a a", *_PLAIN]}
    return all(after in (before, before.lower()) for before, after in normal.items())


def _is_solid(text: str) -> bool:
    """Whether a text is not empty and neither begins nor ends with what the pre-tokenizer takes for
    a space."""
    return bool(text) and not any(end == _META or end.isspace() for end in (text[0], text[-1]))


def _ids(inner: tokenizers.Tokenizer, text: str) -> list[int]:
    return inner.encode(text, add_special_tokens=False).ids
