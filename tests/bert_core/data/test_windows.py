"""Pairs as transformers joins them, and slices that own every piece once."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bert_core.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from bert_core.data.vocabulary import train_tokenizer
from bert_core.data.windows import first_ids_of, ids_of, pieces_of, slices, with_special_tokens
from tests import tiny

TEXTS = ["the sea", "", "a tree is blue and the sea is not", "sea " * 30, "blue"]
WORDS = ["the", "sea", "tree", "is", "blue", "and", "not", "a", "s", "##e", "##a"]
THEIRS = {"xlm-roberta": tiny.xlm_roberta_tokenizer, "mpnet": tiny.mpnet_tokenizer}
WORDPIECE = Tokenizer.from_vocabulary([*SPECIAL_TOKENS, *WORDS], lowercase=True)


@pytest.mark.parametrize("max_length", [8, 9, 16, 512])
@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "xlm-roberta", "mpnet"])
def test_pairs_are_transformers(kind: str, max_length: int, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = WORDPIECE
    if kind == "bpe":
        tokenizer = train_tokenizer("bpe", TEXTS * 3, vocab_size=300, lowercase=False)
    if kind in THEIRS:
        THEIRS[kind]().save_pretrained(tmp_path / "theirs")
        tokenizer = Tokenizer.load(tmp_path / "theirs")
        assert tokenizer.separators == 2
    tokenizer.save(tmp_path, segments=kind == "wordpiece")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = ids_of(tokenizer, TEXTS)
    for a, first in zip(TEXTS, ids, strict=True):
        for b, second in zip(TEXTS, ids, strict=True):
            many = theirs([a], [b], truncation=True, max_length=max_length)
            wanted = {name: value[0] for name, value in many.items()}
            ours = with_special_tokens(tokenizer, first, second, max_length)
            assert ours.ids.tolist() == wanted["input_ids"]
            segments = np.arange(len(ours.ids)) >= ours.segment_b_start
            types = wanted.get("token_type_ids", [0] * len(ours.ids))
            if kind == "wordpiece":
                assert segments.astype(int).tolist() == types
            else:
                assert not segments.any()
            keep = len(ours.ids) - ours.second_start - 1
            assert ours.ids[ours.second_start : -1].tolist() == second[:keep].tolist()


def test_pieces_know_their_characters() -> None:
    text = "Is  the SEAe blue"
    (found,) = pieces_of(WORDPIECE, [text])
    assert found.ids.tolist() == ids_of(WORDPIECE, [text])[0].tolist()
    words = [text[start:end] for start, end in found.offsets]
    assert words == ["Is", "the", "SEA", "e", "blue"]


@given(st.integers(0, 300), st.integers(1, 40), st.integers(0, 39))
def test_every_piece_is_one_slices_own(pieces: int, room: int, stride: int) -> None:
    if stride >= room:
        with pytest.raises(ValueError, match="stride: wanted"):
            slices(pieces, room, stride)
        return
    found = slices(pieces, room, stride)
    own_first = 0
    for part in found:
        assert part.first <= own_first <= part.own_end <= part.end
        assert part.end - part.first <= room
        own_first = part.own_end
    assert own_first == pieces
    for before, after in pairwise(found):
        assert before.end - after.first >= stride
        # What a slice owns is at least half the stride from where it is cut.
        assert before.own_end - after.first == stride // 2


WORDS = [
    "open",
    "the",
    "sea",
    "x" * 150,
    "海の",
    "naïve",
    "e\u0301",
    "...",
    "[MASK]",
    "don't",
    "a-b",
]
SPACES = [" ", "  ", "\n", "\t ", "\u00a0", " " * 40, "\x1c", "\x85", "\u2028"]
LONG = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(SPACES)), max_size=120)
KINDS = {
    kind: train_tokenizer(
        kind, ["open the sea, don't! naïve a-b 海の ..."] * 5, vocab_size=320, lowercase=True
    )
    for kind in ("wordpiece", "bpe", "unigram")
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("from_end", [False, True])
@given(pieces=LONG, enough=st.integers(1, 30))
@example(pieces=[("open" * 15, "\x1c"), ("open" * 15, "")], enough=1)  # one word to BERT
def test_the_ids_at_one_end_of_a_text_are_those_of_the_whole(
    kind: str, pieces: list[tuple[str, str]], enough: int, *, from_end: bool
) -> None:
    tokenizer, text = KINDS[kind], "".join(word + space for word, space in pieces)
    [whole], [part] = (
        ids_of(tokenizer, [text]),
        first_ids_of(tokenizer, [text], enough, from_end=from_end),
    )
    if len(whole) <= enough:
        assert part.tolist() == whole.tolist()
    else:
        assert len(part) > enough
        kept = slice(-enough, None) if from_end else slice(None, enough)
        assert part[kept].tolist() == whole[kept].tolist()


def test_only_the_beginning_of_a_book_is_tokenized() -> None:
    tokenizer = KINDS["wordpiece"]
    [ids] = first_ids_of(tokenizer, ["open the sea " * 1_000_000], 512)
    assert 512 < len(ids) < 5_000
