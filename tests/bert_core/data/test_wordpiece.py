"""Bulk WordPiece gives the very ids of `tokenizers`, on everything that Unicode holds."""

import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from bert_core.data import wordpiece
from bert_core.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from bert_core.data.vocabulary import train_vocabulary
from bert_core.data.wordpiece import BulkWordPiece, supports

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
CHARACTERS = [*LETTERS, *"0123456789!,.'?()[]#-", "é", "ß", "海", "A", "Z", "\u0301"]
VOCABULARY = [
    *SPECIAL_TOKENS,
    *(prefix + character for character in CHARACTERS for prefix in ("", "##")),
    *["the", "The", "sea", "##ing", "un", "##known", "don", "MASK"],
]
TRICKY = [
    "The sea, the sea! THE SEA",
    "Café CAFÉ cafe\u0301 , \u0301x !\u0301 naïve ß İstanbul ſ K",
    "海 海洋sea海 the海",
    "don't [MASK] the [SEP]sea [mask] [ MASK ] [UNK",
    "a\x00b\u200bc\ufffdd\u2028e\xa0f\u3000g\tx\r\ny\x0bz\x0c",
    "≮ ≯ ≠ ; ` \u037e \u1fef",
    "🌊 the 🌊sea ﬁne Ⅳ ½ ！，．",
    "x" * 101 + " " + "a" * 100 + " " + "é" * 100,
    "##fe #sea # # ,,,",
    "",
    "   ",
]


@pytest.fixture(scope="module", params=[True, False], ids=["uncased", "cased"])
def inner(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return Tokenizer.from_vocabulary(VOCABULARY, lowercase=request.param).inner


def assert_equal_to_the_library(inner: tokenizers.Tokenizer, texts: Sequence[str]) -> None:
    wanted = [e.ids for e in inner.encode_batch_fast(list(texts), add_special_tokens=False)]
    ids, counts = BulkWordPiece(inner).encode(pa.array(texts, pa.string()))
    assert counts.tolist() == [len(each) for each in wanted]
    np.testing.assert_array_equal(ids, [i for each in wanted for i in each])


def test_tricky_texts(inner: tokenizers.Tokenizer) -> None:
    assert_equal_to_the_library(inner, TRICKY)
    assert_equal_to_the_library(inner, [])
    assert_equal_to_the_library(inner, ["[MASK]"])


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(
        st.text(
            st.one_of(
                st.sampled_from(" \t\n\raAeEsS,.!;`<'[]#海éÉ\u0301\u0338\u200b\x00"),
                st.characters(exclude_categories=["Cs"]),
            ),
            max_size=40,
        )
        | st.lists(st.sampled_from([*TRICKY, *VOCABULARY]), max_size=6).map("".join),
        max_size=8,
    )
)
@example(texts=["[MASK]", "a [MASK]", "b", "[MASK][MASK]"])
def test_any_texts(inner: tokenizers.Tokenizer, texts: list[str]) -> None:
    assert_equal_to_the_library(inner, texts)


@pytest.mark.drill
def test_every_code_point_that_is_assigned(inner: tokenizers.Tokenizer) -> None:
    """Alone, in a word after a letter that it may combine with, and beside a mark."""
    assigned = [
        character
        for character in map(chr, range(sys.maxunicode + 1))
        if unicodedata.category(character) not in ("Cn", "Cs", "Co")
    ]
    assert len(assigned) > 140_000
    assert_equal_to_the_library(inner, [f"{c} a{c}b,{c}" for c in assigned])


def test_words_are_forgotten_before_they_fill_the_memory(
    inner: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wordpiece, "MOST_KNOWN_WORDS", 3)
    monkeypatch.setattr(wordpiece, "SLICE_BYTES", 16)
    assert_equal_to_the_library(inner, TRICKY * 3)


def test_a_vocabulary_without_marks_to_separate_words_by(
    inner: tokenizers.Tokenizer,
) -> None:
    rest = [token for token in VOCABULARY if token not in (",", ".", "!", "-")]
    lowercase = inner.normalizer.lowercase
    assert_equal_to_the_library(Tokenizer.from_vocabulary(rest, lowercase=lowercase).inner, TRICKY)


def test_a_slice_of_a_column_and_nulls(inner: tokenizers.Tokenizer) -> None:
    bulk = BulkWordPiece(inner)
    column = pa.array(["unknown", None, "the sea", "[SEP]x", "the"])
    every, counts = bulk.encode(column)
    assert counts[1] == 0
    ids, some = bulk.encode(column.slice(2, 2))
    assert some.tolist() == counts[2:4].tolist()
    assert ids.tolist() == every[counts[:2].sum() : counts[:4].sum()].tolist()


def test_other_kinds_of_tokenizers_are_not_cut_but_encoded_all_the_same() -> None:
    tokenizer = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True)
    plain = tokenizer.encode_column(pa.array(TRICKY)).to_pylist()
    other = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True)
    other.inner.normalizer = normalizers.Sequence([other.inner.normalizer])
    assert not supports(other.inner)
    assert other.encode_column(pa.array(TRICKY)).to_pylist() == plain
    with pytest.raises(ValueError, match="wanted BERT's normalizer"):
        BulkWordPiece(other.inner)
    other.inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert not supports(other.inner)
    normalised = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True)
    normalised.inner.add_tokens([tokenizers.AddedToken("unknown", normalized=True)])
    assert not supports(normalised.inner)
    assert normalised.encode_column(pa.array(["UNKNOWN"])).to_pylist() == [[len(VOCABULARY)]]


@pytest.mark.drill
@pytest.mark.parametrize("lowercase", [True, False], ids=["uncased", "cased"])
def test_articles_of_wikitext(data_dir: Path, lowercase: bool) -> None:
    texts = (data_dir / "wikitext2" / "valid.txt").read_text(encoding="utf-8").split("\n")
    vocabulary = train_vocabulary(texts[:1000], vocab_size=4000, lowercase=lowercase)
    inner = Tokenizer.from_vocabulary(vocabulary, lowercase=lowercase).inner
    assert_equal_to_the_library(inner, texts)


@pytest.mark.drill
@pytest.mark.parametrize("lowercase", [True, False], ids=["uncased", "cased"])
def test_all_of_wikitext_and_of_the_classic_books(
    data_dir: Path, lowercase: bool, whole: bool
) -> None:
    """Every eighth line of each text, or all lines."""
    lines = slice(None) if whole else slice(int(lowercase), None, 8)
    wikitext = [data_dir / "wikitext2" / name for name in ("train.txt", "valid.txt")]
    books = sorted((data_dir / "classic_books").rglob("*.md"))
    assert len(books) > 100
    texts = [path.read_text(encoding="utf-8").split("\n")[lines] for path in [*wikitext, *books]]
    vocabulary = train_vocabulary(
        ["\n".join(text) for text in texts[:10]], vocab_size=30_522, lowercase=lowercase
    )
    inner = Tokenizer.from_vocabulary(vocabulary, lowercase=lowercase).inner
    for text in texts:
        assert_equal_to_the_library(inner, text)
