"""Where texts were cut: what is before that character is what was read, for every tokenizer."""

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Encoding, normalizers

from bert_core.data.cuts import CutPlace, characters_of, places_of
from bert_core.data.tokenizer import Tokenizer, TokenizerKind
from bert_core.data.vocabulary import train_tokenizer
from bert_core.data.windows import Cut, ids_of, pieces_of
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.feature_extraction import FeatureExtraction, FeatureExtractionOptions
from tests import tiny

CORPUS = ["open the sea, don't! naïve a-b 海の ... été Ünder 2nd half"] * 5
KINDS = [
    "wordpiece-cased",
    "wordpiece-uncased",
    "bpe-cased",
    "bpe-uncased",
    "unigram-cased",
    "unigram-uncased",
    "cased-without-accents",
    "unigram-mapped",
    "bpe-nfc",
    "bpe-nfd",
    "xlm-roberta",
    "mpnet",
]


def sentence_pieces_map(characters: dict[str, str]) -> bytes:
    """What SentencePiece writes down of how characters are normalized (its Darts-clone trie).

    Each node has 256 units of its own, one per next byte; the first one holds the value.
    """
    units, nodes, normalized = [0] * 256, {b"": 256}, b""
    units += [0] * 256
    units[0] = 256 << 10
    for key, value in characters.items():
        encoded = key.encode()
        for end in range(1, len(encoded) + 1):
            parent, byte = nodes[encoded[: end - 1]], encoded[end - 1]
            if encoded[:end] not in nodes:
                nodes[encoded[:end]] = len(units)
                units += [0] * 256
                at = parent ^ byte
                units[at] = byte | (at ^ nodes[encoded[:end]]) << 10
        units[nodes[encoded[:-1]] ^ encoded[-1]] |= 1 << 8
        units[nodes[encoded]] = len(normalized) | 1 << 31
        normalized += value.encode() + b"\0"
    trie = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(trie)) + trie + normalized


MAP = {"½": "1⁄2", "ﬁ": "fi", "…": "...", "２": "2", "\u00a0": " ", "\u2028": " ", "\x0b": ""}


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    match kind:
        case "cased-without-accents":
            words = tokenizer_of("wordpiece-cased").vocabulary
            return Tokenizer.from_vocabulary(words, lowercase=False, strip_accents=True)
        case "unigram-mapped":
            return normalized_by("unigram-cased", normalizers.Precompiled(sentence_pieces_map(MAP)))
        case "bpe-nfc":  # ModernBERT's
            return normalized_by("bpe-cased", normalizers.NFC())
        case "bpe-nfd":
            return normalized_by("bpe-cased", normalizers.NFD())
        case "xlm-roberta":
            return Tokenizer(tiny.xlm_roberta_tokenizer()._tokenizer)
        case "mpnet":
            return Tokenizer(tiny.mpnet_tokenizer()._tokenizer)
    model, case = kind.split("-")
    return train_tokenizer(
        cast("TokenizerKind", model), CORPUS, vocab_size=330, lowercase=case == "uncased"
    )


def normalized_by(kind: str, normalizer: normalizers.Normalizer) -> Tokenizer:
    inner = tokenizers.Tokenizer.from_str(tokenizer_of(kind).inner.to_str())
    inner.normalizer = normalizer
    return Tokenizer(inner)


WORDS = ["open", "the", "don't", "naïve", "e\u0301", "été", "海の", "ﬁ", "İ", "ß", "２", "🙂", "…"]
WORDS += [
    "👨\u200d👩\u200d👧",
    "[MASK]",
    "``",
    "''",
    "a\x00b",
    "\u0301",
    "각",
    "각",
    "½",
    "x" * 105,
]
SPACES = ["", " ", "  ", "\n", "\u00a0", "\u2028", "\x0b", "\x1c", "\x85", " " * 20]
TEXTS = st.lists(
    st.sampled_from([*WORDS, *SPACES]) | st.text(st.characters(codec="utf-8"), max_size=3),
    max_size=40,
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, part=st.floats(0, 1))
@example(text="naïve 🙂🙂 été e\u0301e\u0301e\u0301", part=0.5)
@example(text="½\x0ba", part=0.5)  # whose last offset is wrong where SentencePiece's map is used
def test_the_text_up_to_the_character_has_the_ids_that_were_read(
    kind: str, text: str, part: float
) -> None:
    tokenizer = tokenizer_of(kind)
    [pieces] = pieces_of(tokenizer, [text])
    assert pieces.ids.tolist() == ids_of(tokenizer, [text])[0].tolist()
    if len(pieces.ids) < 2:
        return
    kept = 1 + int(part * (len(pieces.ids) - 2))
    [character] = characters_of(tokenizer, [Cut(text, kept)])
    read = pieces.ids[:kept].tolist()

    def before(end: int) -> list[int]:
        [ids] = ids_of(tokenizer, [text[:end]])
        return list(map(int, ids))

    if before(character) != read:  # the last id ends within a character
        assert all(before(end) != read for end in range(max(0, character - 9), character + 9))
        if tokenizer.kind == "unigram":
            some = before(character)
            assert some == read[: len(some)]
        else:
            start, end = pieces.offsets[kept - 1]
            assert start <= character < end


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, part=st.floats(0, 1))
@example(text="\x0bopen openopenopenopen", part=0.0)
@example(text="open \x0bopen openopenopenopen", part=0.5)
def test_a_text_cut_at_its_start_begins_at_the_reported_character(
    kind: str, text: str, part: float
) -> None:
    tokenizer = tokenizer_of(kind)
    [pieces] = pieces_of(tokenizer, [text])
    if len(pieces.ids) < 2:
        return
    kept = 1 + int(part * (len(pieces.ids) - 2))
    [character] = characters_of(tokenizer, [Cut(text, kept, from_end=True)])
    [before] = ids_of(tokenizer, [text[:character]])
    if before.tolist() != pieces.ids[:-kept].tolist():  # an id ends within a character
        assert character == max(pieces.offsets[-kept - 1, 1], pieces.offsets[-kept, 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("from_end", [False, True])
def test_the_cut_in_a_book_is_found_in_a_part(kind: str, *, from_end: bool) -> None:
    book, tokenizer = "open the sea " * 100_000, tokenizer_of(kind)
    [character] = characters_of(tokenizer, [Cut(book, 30, from_end=from_end)])
    read = book[character:] if from_end else book[:character]
    assert len(ids_of(tokenizer, [read])[0]) == 30
    assert len(read) < 200


LONG = "the sea is blue a tree " * 20
BOOK = "the sea is blue a tree " * 20_000
TOKENIZER = tiny.tokenizer()
ROOM = 14  # of 16 tokens, special ones left out
ROWS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "text-classification": ({"text": LONG}, [""]),
    "text-regression": ({"text": LONG, "text_pair": LONG}, ["text", "text_pair"]),
    "text-ranking": ({"text": "the sea", "text_pair": LONG}, ["text_pair"]),
    "next-sentence-prediction": ({"text": LONG, "text_pair": "a tree"}, ["text"]),
    "multiple-choice": (
        {"text": "the sea", "choices": ["is blue", LONG, LONG]},
        ["choices[1]", "choices[2]"],
    ),
    "fill-mask": ({"text": f"a [MASK] {LONG}"}, [""]),
    "minimal-pairs": ({"sentence_good": LONG, "sentence_bad": "the sea"}, ["sentence_good"]),
    "question-answering": ({"question": LONG, "context": LONG}, ["question"]),
    "feature-extraction": ({"text": LONG}, [""]),
    "sentence-similarity": (
        {"source_sentence": "the sea", "sentences": ["a", LONG]},
        ["sentences[1]"],
    ),
    "sparse-embedding": ({"text": LONG, "text_pair": LONG}, ["text", "text_pair"]),
    "zero-shot-classification": ({"text": LONG, "candidate_labels": ["sea", "tree"]}, [""]),
    "relation-classification": ({"text": f"<e1>a</e1> <e2>tree</e2> {LONG}"}, [""]),
    "span-classification": ({"text": LONG}, []),
    "token-classification": ({"tokens": LONG.split(), "text": None}, []),
}


def text_of(row: dict[str, Any], name: str) -> str:
    field, _, place = name.removesuffix("]").partition("[")
    value = row[field or "text"]
    return value[int(place)] if place else value


@pytest.mark.parametrize("task", TASKS)
def test_every_task_says_which_of_its_texts_were_cut_and_where(task: str) -> None:
    row, names = ROWS[task]
    made = TASKS[task](["contradiction", "entailment"])
    short = {
        key: [item[:3] for item in value]
        if isinstance(value, list)
        else value and value[: 24 if "<e1>" in value else 14]
        for key, value in row.items()
    }
    windows = made.encode([short, row], TOKENIZER, 16)
    places = places_of(TOKENIZER, windows, 100)
    assert [(place.row, place.name) for place in places] == [(1, name) for name in names]
    # What minimal pairs mask stands in the labels.
    shown = [ids for window in windows for ids in (*window.ids, *window.labels.values())]
    read = np.concatenate([np.empty(0), *shown])
    for place in places:
        assert 0 < place.character < len(LONG)
        read_before = text_of(row, place.name)[: place.character]
        read_before = read_before.rpartition("</e2> ")[2]  # other ids stand around marked spans
        [ids] = ids_of(TOKENIZER, [read_before])
        assert 0 < len(ids) <= ROOM
        assert str(ids.tolist())[1:-1] in str(read.astype(int).tolist())
    assert [place.name for place in places_of(TOKENIZER, windows, 1)] == names[:1]


def test_the_characters_of_a_prompt_are_not_the_texts() -> None:
    options = FeatureExtractionOptions(prompts={"query": "a tree is "}, default_prompt="query")
    task = FeatureExtraction(options=options)
    for side in ("left", "right"):
        parameters = task.parameters(truncate=True, truncation_direction=side)
        windows = task.encode([{"text": LONG}], TOKENIZER, 16, parameters=parameters)
        [place] = places_of(TOKENIZER, windows, 100)
        read = LONG[place.character :] if side == "left" else LONG[: place.character]
        assert len(read.split()) == (ROOM if side == "left" else ROOM - 3)


def test_a_location_is_short_as_text() -> None:
    assert str(CutPlace(3, "", 512)) == "3@512"
    assert str(CutPlace(3, "text_pair", 512)) == "3.text_pair@512"
    assert str(CutPlace(0, "", 812, from_end=True)) == "0@812-"


class Counting(Tokenizer):
    """A tokenizer that counts the characters that it is given."""

    characters = 0

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        self.characters += sum(map(len, texts))
        return super().encode_batch(texts)


@pytest.mark.parametrize("task", [name for name, (_, names) in ROWS.items() if names])
def test_only_the_beginning_of_a_cut_text_is_tokenized(task: str) -> None:
    row, _ = ROWS[task]
    relation = f"<e1>a</e1> <e2>tree</e2> {BOOK}"
    own = {"fill-mask": f"a [MASK] {BOOK}", "relation-classification": relation}
    more = own.get(task, BOOK)
    long = {
        key: [more if len(item) > 50 else item for item in value]
        if isinstance(value, list)
        else more
        if len(value) > 50 and key != "context"
        else value
        for key, value in row.items()
    }
    made, tokenizer = TASKS[task](["contradiction", "entailment"]), Counting(TOKENIZER.inner)
    windows = made.encode([long], tokenizer, 16)
    if task != "text-regression":  # of two long texts of a pair, the longer one gets the odd place
        assert tokenizer.characters < 5_000
    wanted = made.encode([row], TOKENIZER, 16)
    for ours, theirs in zip(windows, wanted, strict=True):
        for one, other in zip(ours.ids, theirs.ids, strict=True):
            np.testing.assert_array_equal(one, other)
