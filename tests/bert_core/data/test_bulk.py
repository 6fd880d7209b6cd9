"""Bulk encoding gives the very ids of `tokenizers`, on everything that Unicode holds."""

import io
import json
import sys
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import sentencepiece
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from bert_core.data import bulk
from bert_core.data.bulk import BulkEncoder
from bert_core.data.byte_level import BECOMES_ASCII, BulkByteLevel
from bert_core.data.tokenizer import SPECIAL_TOKENS, Tokenizer, TokenizerKind
from bert_core.data.unigram import BulkUnigram
from bert_core.data.vocabulary import train_tokenizer
from bert_core.data.wordpiece import BulkWordPiece

ASCII = set(map(chr, range(128)))
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
CHARACTERS = [*LETTERS, *"0123456789!,.'?()[]#-", "é", "ß", "海", "A", "Z", "\u0301"]
VOCABULARY = [
    *SPECIAL_TOKENS,
    *(prefix + character for character in CHARACTERS for prefix in ("", "##")),
    *["the", "The", "sea", "##ing", "un", "##known", "don", "MASK"],
]
TRICKY = [
    "éSea éCAFÉ THE",
    "the;a \u037ea |||\u212a||| |||K||| K\u0301",
    "The sea, the sea! THE SEA",
    "Café CAFÉ cafe\u0301 , \u0301x !\u0301 naïve ß İstanbul ſ K",
    "海 海洋sea海 the海",
    "don't [MASK] the [SEP]sea [mask] [ MASK ] [UNK",
    "a <mask> b<mask>c <s>the</s> <MASK> ［ＭＡＳＫ］ ＜ｍａｓｋ＞",
    "a\x00b\u200bc\ufffdd\u2028e\xa0f\u3000g\tx\r\ny\x0bz\x0c",
    "≮ ≯ ≠ ; ` \u037e \u1fef",
    "🌊 the 🌊sea ﬁne Ⅳ ½ ！，．",
    "x" * 101 + " " + "a" * 100 + " " + "é" * 100,
    "##fe #sea # # ,,,",
    "I'll don't 'tis 's ''s !'s 5's it's5 x'LL ' s",
    " the  sea\n\n the\n sea \t",
    "\xa0the\xa0 sea \xa0 the\u3000\u3000sea \u2003",
    "“the” — sea… l’été×2÷É, ``the'' sea",
    "▁the ▁ sea▁ ▁▁the",
    "x ¨x \u0e33\u0338 \u2003\u0338 \u0600 \u0e33\u0338 \x0b",
    "ﬁ\u0301 \u0338 \x01 \ufeffx \x0c\xd6\t\x1c",
    "the\xad sea\u200d \U0001f3fb 👩\u200d🚀 \uff9e",
    "",
    "   ",
    "\n",
]


@cache
def charsmap() -> bytes:
    """The rules of normalization in SentencePiece's own models: XLM-RoBERTa's, DeBERTa v3's."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the sea is wide and the sky is blue"] * 9),
        model_writer=model,
        vocab_size=25,
        hard_vocab_limit=False,
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
    )
    parsed: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    parsed.ParseFromString(model.getvalue())
    return parsed.normalizer_spec.precompiled_charsmap


def with_steps(
    tokenizer: Tokenizer,
    normalizer: normalizers.Normalizer | None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
) -> tokenizers.Tokenizer:
    contents = json.loads(tokenizer.inner.to_str()) | {"normalizer": None}
    inner = tokenizers.Tokenizer.from_str(json.dumps(contents))
    if normalizer is not None:
        inner.normalizer = normalizer
    if pre_tokenizer is not None:
        inner.pre_tokenizer = pre_tokenizer
    return inner


def spaces(scheme: str = "always", *, at_white_space: bool = False) -> pre_tokenizers.PreTokenizer:
    """Unigram's pre-tokenizer, with or without a split at white space first."""
    first = [pre_tokenizers.WhitespaceSplit()] if at_white_space else []
    return pre_tokenizers.Sequence([*first, pre_tokenizers.Metaspace("▁", scheme)])


@cache
def trained(kind: TokenizerKind) -> Tokenizer:
    texts = [*TRICKY, "the sea and the whale, the whales' sea. I don't know!\n" * 9] * 2
    return train_tokenizer(kind, texts, vocab_size=500 if kind == "bpe" else 240, lowercase=False)


def make(name: str) -> tokenizers.Tokenizer:
    """The pipelines of published tokenizers over small vocabularies."""
    one_space = normalizers.Replace(Regex(" {2,}"), " ")
    match name:
        case "wordpiece-uncased" | "wordpiece-cased":
            return Tokenizer.from_vocabulary(VOCABULARY, lowercase="uncased" in name).inner
        case "wordpiece-with-added-words":
            inner = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True).inner
            inner.add_tokens([AddedToken(one, normalized=False) for one in ("sea", "café", "x")])
            return inner
        case "roberta":
            return trained("bpe").inner
        case "roberta-uncased":
            return with_steps(trained("bpe"), normalizers.Lowercase())
        case "roberta-with-spaces":
            return with_steps(trained("bpe"), None, pre_tokenizers.ByteLevel(add_prefix_space=True))
        case "modernbert":
            inner = with_steps(trained("bpe"), normalizers.NFC())
            added = ["  ", "   ", "|||K|||", ";a"]
            inner.add_tokens([AddedToken(one, normalized=True) for one in added])
            return inner
        case "albert":
            return trained("unigram").inner
        case "xlm-roberta":
            only_rules = normalizers.Precompiled(charsmap())
            return with_steps(trained("unigram"), only_rules, spaces(at_white_space=True))
        case "xlm-roberta-of-sentencepiece":
            steps = [normalizers.Precompiled(charsmap()), one_space]
            return with_steps(trained("unigram"), normalizers.Sequence(steps), spaces())
        case "deberta-v3":
            rules = normalizers.Sequence(
                [normalizers.Strip(), normalizers.Precompiled(charsmap()), one_space]
            )
            inner = with_steps(trained("unigram"), rules, spaces())
            inner.add_special_tokens([AddedToken("[UNK]", normalized=True)])
            return inner
        case "deberta-v3-of-transformers":
            join = normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " ")
            steps = [join, normalizers.NFC(), normalizers.Strip(left=False, right=True)]
            return with_steps(trained("unigram"), normalizers.Sequence(steps), spaces())
        case "unigram-of-single-spaces":
            return with_steps(trained("unigram"), None, spaces("first"))
    raise AssertionError(name)


KINDS = [
    "wordpiece-uncased",
    "wordpiece-cased",
    "wordpiece-with-added-words",
    "roberta",
    "roberta-uncased",
    "roberta-with-spaces",
    "modernbert",
    "albert",
    "xlm-roberta",
    "xlm-roberta-of-sentencepiece",
    "deberta-v3",
    "deberta-v3-of-transformers",
    "unigram-of-single-spaces",
]


@pytest.fixture(scope="module", params=KINDS)
def inner(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return make(request.param)


def encoder(inner: tokenizers.Tokenizer) -> BulkEncoder:
    found = Tokenizer(inner)._bulk
    assert found is not None
    return found


@pytest.fixture(scope="module")
def encode(inner: tokenizers.Tokenizer) -> BulkEncoder:
    return encoder(inner)


def assert_equal_to_the_library(
    inner: tokenizers.Tokenizer, texts: Sequence[str], encode: BulkEncoder | None = None
) -> None:
    wanted = [e.ids for e in inner.encode_batch_fast(list(texts), add_special_tokens=False)]
    ids, counts = (encode or encoder(inner)).encode(pa.array(texts, pa.string()))
    rows = np.split(ids, np.cumsum(counts)[:-1]) if len(texts) else []
    for text, row, ids_of_row in zip(texts, rows, wanted, strict=True):
        assert row.tolist() == ids_of_row, ascii(text)


def test_tricky_texts(inner: tokenizers.Tokenizer) -> None:
    assert_equal_to_the_library(inner, TRICKY)
    assert_equal_to_the_library(inner, [])
    assert_equal_to_the_library(inner, ["[MASK]"])
    assert_equal_to_the_library(inner, ["<mask>", "a"])


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(
        st.text(
            st.one_of(
                st.sampled_from(
                    " \t\n\r\x0b\x1caAeEsS'3,.!;`<[]#▁—’海éÉ×\u0301\u0338\u0e33\u2003\x00"
                ),
                st.characters(exclude_categories=["Cs"]),
            ),
            max_size=40,
        )
        | st.lists(st.sampled_from([*TRICKY, *VOCABULARY]), max_size=6).map("".join),
        max_size=16,
    )
)
@example(texts=["[MASK]", "a [MASK]", "b", "[MASK][MASK]"])
def test_any_texts(inner: tokenizers.Tokenizer, encode: BulkEncoder, texts: list[str]) -> None:
    assert_equal_to_the_library(inner, texts, encode)


def code_points(whole: bool) -> list[str]:
    """All that are assigned; in the short form all that a rule may speak of, and every 97th."""
    assigned = [
        character
        for character in map(chr, range(sys.maxunicode + 1))
        if unicodedata.category(character) not in ("Cn", "Cs", "Co")
    ]
    assert len(assigned) > 140_000
    if whole:
        return assigned
    return [
        one for n, one in enumerate(assigned) if n % 97 == 0 or ord(one) < 0x400 or special(one)
    ]


def special(character: str) -> bool:
    """Whether it may be white space, or become ASCII."""
    normal = unicodedata.normalize("NFKC", character)
    return character.isspace() or (len(normal) == 1 and normal.isascii())


@pytest.mark.drill
def test_every_code_point_that_is_assigned(inner: tokenizers.Tokenizer, whole: bool) -> None:
    """Alone, doubled, in a word after a letter that it may combine with, beside white space, marks
    and an apostrophe."""
    texts = [
        text
        for c in code_points(whole)
        for text in (f"{c} a{c}b,{c}", f"{c}{c} {c}1\n{c}", f"a {c} '{c} 'b {c}", c)
    ]
    assert_equal_to_the_library(inner, texts)


def test_words_are_forgotten_before_they_fill_the_memory(
    inner: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "SLICE_BYTES", 16)
    for name, most in (("MOST_KNOWN_WORDS", 3), ("MOST_KNOWN_BYTES", 40)):
        with monkeypatch.context() as patch:
            patch.setattr(bulk, name, most)
            encode = encoder(inner)
            assert_equal_to_the_library(inner, TRICKY * 2, encode)
            assert len(encode._known) <= 40


def test_a_slice_of_a_column_and_nulls(inner: tokenizers.Tokenizer) -> None:
    encode = encoder(inner)
    column = pa.array(["unknown", None, "the sea", "[SEP]x <mask>", "the", " \xa0"])
    every, counts = encode.encode(column)
    assert counts[1] == 0
    ids, some = encode.encode(column.slice(2, 2))
    assert some.tolist() == counts[2:4].tolist()
    assert ids.tolist() == every[counts[:2].sum() : counts[:4].sum()].tolist()


def test_rows_with_a_word_that_depends_on_its_neighbours_are_encoded_whole() -> None:
    inner = make("xlm-roberta")
    before, after = inner.encode("a \u0e33\u0338").ids, inner.encode("\u0e33\u0338").ids
    assert before[-len(after) :] != after  # one grapheme with the space: its marks are kept
    assert_equal_to_the_library(inner, ["a \u0e33\u0338 b", "a b", "\u0e33\u0338"])


OTHERS: dict[str, tuple[TokenizerKind, Any, Any]] = {
    "no rule for words": (
        "bpe",
        None,
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
    "characters become spaces": ("bpe", normalizers.NFKC(), None),
    "the text is one word": ("unigram", None, pre_tokenizers.Metaspace("▁", "always", split=False)),
    "no space before the first word": ("unigram", None, spaces("never")),
    "a space before the first word only": (
        "unigram",
        None,
        spaces("first", at_white_space=True),
    ),
    "another mark for spaces": ("unigram", None, pre_tokenizers.Metaspace("_", "always")),
    "spaces become marks": ("unigram", normalizers.Replace(" ", "-"), spaces()),
    "marks become a space": ("unigram", normalizers.Replace("--", " "), spaces()),
    "something at either end": ("unigram", normalizers.Prepend("x"), spaces()),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_other_pipelines_are_not_cut_but_encoded_all_the_same(reason: str) -> None:
    kind_of_model, *steps = OTHERS[reason]
    inner = with_steps(trained(kind_of_model), *steps)
    tokenizer = Tokenizer(inner)
    assert tokenizer._bulk is None
    kind = BulkByteLevel if isinstance(inner.model, models.BPE) else BulkUnigram
    with pytest.raises(ValueError, match=f"{kind.__name__}: wanted a tokenizer that it supports"):
        kind(inner)
    texts = [*TRICKY, "Foo-Bar foo-bar -- a--b"]
    wanted = [e.ids for e in inner.encode_batch_fast(texts, add_special_tokens=False)]
    assert tokenizer.encode_column(pa.array(texts)).to_pylist() == wanted


@pytest.mark.parametrize("at_white_space", [False, True])
@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_unigram_that_does_not_know_the_letter_a(scheme: str, *, at_white_space: bool) -> None:
    pieces = [(one, -1.0) for one in (*SPECIAL_TOKENS, "b", "▁b", "c", "_b")]
    inner = Tokenizer.from_pieces(pieces, lowercase=False).inner
    for splits in (
        spaces(scheme, at_white_space=at_white_space),
        pre_tokenizers.Metaspace("_", scheme),
    ):
        inner.pre_tokenizer = splits
        wanted = [e.ids for e in inner.encode_batch_fast(["b b", " b"], add_special_tokens=False)]
        tokenizer = Tokenizer(inner)
        assert tokenizer.encode_column(pa.array(["b b", " b"])).to_pylist() == wanted


def test_a_column_that_is_not_cut_is_encoded_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(with_steps(trained("bpe"), normalizers.NFKC()))
    texts = [*TRICKY, None]
    wanted = tokenizer.encode_column(pa.array(texts)).to_pylist()
    assert wanted[:-1] == [ids.tolist() for ids in tokenizer.ids(TRICKY)]
    assert wanted[-1] == []
    monkeypatch.setattr(bulk, "SLICE_BYTES", 16)
    assert tokenizer.encode_column(pa.array(texts)).to_pylist() == wanted


@pytest.mark.parametrize("column", [pa.chunked_array([["a"]]), pa.array(["a"], pa.large_string())])
def test_columns_of_other_types_are_refused(column: Any) -> None:
    for name in ("wordpiece-cased", "roberta"):
        with pytest.raises(TypeError, match="texts: wanted a pyarrow array of strings, got"):
            Tokenizer(make(name)).encode_column(column)


def test_all_that_nfc_turns_into_ascii_is_known() -> None:
    others = map(chr, [*range(0x80, 0xD800), *range(0xE000, sys.maxunicode + 1)])
    found = [one for one in others if not set(unicodedata.normalize("NFC", one)) - ASCII]
    assert found == [*BECOMES_ASCII]


def test_bpe_that_drops_merges_at_random_is_not_cut() -> None:
    inner = trained("bpe").inner
    assert BulkByteLevel.supports(inner)
    contents = json.loads(inner.to_str())
    contents["model"]["dropout"] = 0.5
    assert not BulkByteLevel.supports(tokenizers.Tokenizer.from_str(json.dumps(contents)))


def test_bpe_with_an_added_token_that_normalized_text_may_hold_is_not_cut() -> None:
    inner = make("roberta-uncased")
    assert BulkByteLevel.supports(inner)
    inner.add_tokens([AddedToken("Foo-Bar", normalized=True)])
    assert not BulkByteLevel.supports(inner)


def test_other_wordpiece_is_not_cut_but_encoded_all_the_same() -> None:
    tokenizer = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True)
    plain = tokenizer.encode_column(pa.array(TRICKY)).to_pylist()
    other = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True)
    other.inner.normalizer = normalizers.Sequence([other.inner.normalizer])
    assert not BulkWordPiece.supports(other.inner)
    assert other.encode_column(pa.array(TRICKY)).to_pylist() == plain
    with pytest.raises(ValueError, match="BulkWordPiece: wanted a tokenizer that it supports"):
        BulkWordPiece(other.inner)
    other.inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert not BulkWordPiece.supports(other.inner)
    normalised = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True)
    normalised.inner.add_tokens([AddedToken("unknown", normalized=True)])
    assert not BulkWordPiece.supports(normalised.inner)
    assert normalised.encode_column(pa.array(["UNKNOWN"])).to_pylist() == [[len(VOCABULARY)]]


@pytest.mark.drill
def test_wikitext_and_the_classic_books(
    inner: tokenizers.Tokenizer, data_dir: Path, whole: bool
) -> None:
    """Lines and paragraphs: some, or all."""
    wikitext = [data_dir / "wikitext2" / name for name in ("train.txt", "valid.txt")]
    books = sorted((data_dir / "classic_books").rglob("*.md"))
    assert len(books) > 100
    encode = encoder(inner)
    for path in [*wikitext, *books] if whole else [wikitext[1], *books[::80]]:
        text = path.read_text(encoding="utf-8")
        lines, paragraphs = text.split("\n"), text.split("\n\n")
        step = 1 if whole else 100
        assert_equal_to_the_library(inner, [*lines[::step], *paragraphs[::step]], encode)


@pytest.mark.drill
@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_rows_of_labelled_sets(kind: TokenizerKind, data_dir: Path, whole: bool) -> None:
    """With a vocabulary of usual size."""
    texts = (data_dir / "wikitext2" / "valid.txt").read_text(encoding="utf-8").split("\n")
    tokenizer = train_tokenizer(kind, texts[:2000], vocab_size=4000, lowercase=kind != "bpe")
    files = [
        path
        for path in sorted(data_dir.rglob("*"))
        if path.suffix in (".tsv", ".csv", ".conll", ".conllu", ".json") and path.is_file()
    ]
    assert len(files) > 10
    encode = encoder(tokenizer.inner)
    for path in files:
        lines = path.read_text(encoding="utf-8").replace('", "', '"\n"').split("\n")
        assert_equal_to_the_library(tokenizer.inner, lines if whole else lines[:100], encode)
