"""Questions: where answers stand in windows, how windows compete, and every message."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_core.data.tokenizer import TokenizerKind
from bert_core.data.vocabulary import train_tokenizer
from bert_core.data.windows import Window, cut_rows
from bert_core.errors import CorpusError, InputError
from bert_core.tasks.question_answering import (
    QuestionAnswering,
    QuestionAnsweringOptions,
    QuestionAnsweringParameters,
)
from bert_core.tasks.text_classification import TextClassification
from tests import tiny

TOKENIZER = tiny.tokenizer([*tiny.pieces(tiny.LETTERS), ".", "?"])
OPTIONS = QuestionAnsweringOptions(doc_stride=4, max_question_length=6)
TASK = QuestionAnswering(options=OPTIONS)
WITH_NONE = QuestionAnswering(
    options=QuestionAnsweringOptions(doc_stride=4, max_question_length=6, no_answer=True)
)
WORDS = st.lists(st.text(tiny.LETTERS + "AB.", min_size=1, max_size=5), min_size=1, max_size=40)


BARE = QuestionAnsweringParameters(align_to_words=False)


def row_of(context: str, answer: str | None = None) -> dict[str, Any]:
    answers = [] if answer is None else [{"text": answer, "answer_start": context.index(answer)}]
    return {"question": "a b?", "context": context, "answers": answers}


@settings(max_examples=200)
@given(WORDS, st.data())
def test_a_labelled_window_holds_the_words_of_the_answer(words: list[str], data: Any) -> None:
    context = " ".join(words)
    first = data.draw(st.integers(0, len(words) - 1))
    last = data.draw(st.integers(first, len(words) - 1))
    start = len(" ".join(words[:first])) + bool(first)
    answer = " ".join(words[first : last + 1])
    row = {
        "question": "a b?", "context": context,
        "answers": [{"text": answer, "answer_start": start}],
    }  # fmt: skip
    windows = TASK.encode([row], TOKENIZER, 24, labelled=True, parameters=BARE)
    for window in windows:
        second, offsets = window.origin
        begin, end = (int(window.labels[f"{side}_positions"][0]) for side in ("start", "end"))
        if begin:
            assert context[offsets[begin - second, 0] : offsets[end - second, 1]] == answer
        else:  # it is not whole in this window
            assert end == 0
            assert start < offsets[0, 0] or start + len(answer) > offsets[-1, 1]
    assert any(window.labels["start_positions"][0] for window in windows) or len(windows) > 1
    pieces = sum(len(word) for word in words)
    assert len(windows) > 1 or pieces <= 24


def scores_of(windows: list[Window], likes: dict[tuple[int, int], float]) -> list[np.ndarray]:
    """Scores that give characters (start, end) of the passage their value, others less than 0."""
    scores = []
    for window in windows:
        second, offsets = window.origin
        logits = np.full((len(window.ids[0]) + 3, 2), -np.inf, np.float32)  # padding
        logits[: len(window.ids[0])] = -3.0
        for (start, end), value in likes.items():
            for side, places in ((0, offsets[:, 0] == start), (1, offsets[:, 1] == end)):
                logits[second : second + len(offsets), side][places] = value / 2
        scores.append(logits)
    return scores


def test_the_best_of_all_windows_wins_with_its_characters() -> None:
    context = "ab cd. ef gh " * 8
    row = row_of(context)
    windows = TASK.encode([row], TOKENIZER, 24)
    assert len(windows) > 3
    likes = {(91, 93): 4.0, (0, 2): 3.0}
    (answer,) = TASK.decode([row], windows, scores_of(windows, likes))
    assert (answer["start"], answer["end"], answer["answer"]) == (91, 93, context[91:93])
    best = QuestionAnsweringParameters(top_k=3)
    (three,) = TASK.decode([row], windows, scores_of(windows, likes), best)
    assert [(one["start"], one["end"]) for one in three[:2]] == [(91, 93), (0, 2)]
    assert len(three) == 3
    assert three[0]["score"] / three[1]["score"] == pytest.approx(np.exp(4.0 - 3.0))
    assert sum(one["score"] for one in three) <= 1.0


def test_an_answer_ends_after_it_begins_and_is_not_too_long() -> None:
    row = row_of("ab cd ef gh ab cd")
    windows = TASK.encode([row], TOKENIZER, 32, parameters=BARE)
    (logits,) = scores_of(windows, {})
    second, offsets = windows[0].origin
    logits[second + 9, 0] = logits[second + 1, 1] = 9.0  # backwards
    logits[second + 2, 0], logits[second + 3, 1] = 2.0, 1.0
    (answer,) = TASK.decode([row], windows, [logits])
    assert answer["start"] < answer["end"]
    for most in (1, 2, 5):
        parameters = QuestionAnsweringParameters(max_answer_len=most, top_k=400)
        (answers,) = TASK.decode([row], windows, [logits], parameters)
        for one in answers:
            inside = (offsets[:, 0] >= one["start"]) & (offsets[:, 1] <= one["end"])
            assert 1 <= inside.sum() <= most


KINDS: tuple[TokenizerKind, ...] = ("wordpiece", "bpe", "unigram")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("context", "wanted"),
    [
        ("in Wenchuan.", {"in", "Wenchuan", "."}),
        ("an O'Brien, no", {"an", "O", "'", "Brien", ",", "no"}),
        ("我住在北京。", {*"我住在北京。"}),  # huggingface_hub 1.x's schema: might hurt
    ],
)
def test_answers_are_whole_words_whatever_tokenizer_reads_them(
    kind: TokenizerKind, context: str, wanted: set[str]
) -> None:
    tokenizer = train_tokenizer(kind, [context, "a b ?"], vocab_size=300, lowercase=False)
    row = row_of(context)
    windows = TASK.encode([row], tokenizer, 64)
    second, offsets = windows[0].origin
    found = set()
    for place in range(len(offsets)):
        (logits,) = scores_of(windows, {})
        logits[second + place] = 9.0
        (answer,) = TASK.decode([row], windows, [logits])
        found.add(answer["answer"].strip())
    if kind == "bpe" and not context.isascii():  # whose pieces may be of two characters
        assert all(text in context for text in found)
    else:
        assert found - {""} == wanted


def test_no_answer_competes_where_a_passage_may_hold_none() -> None:
    row = row_of("ab cd ef gh " * 6)
    windows = WITH_NONE.encode([row], TOKENIZER, 24)
    scores = scores_of(windows, {(0, 2): 4.0})
    for logits, at_first in zip(scores, (5.0, 1.0, 7.0, 7.0, 7.0), strict=False):
        logits[0] = at_first / 2
    (answer,) = WITH_NONE.decode([row], windows, scores)
    # The first token's least is 1, so a span of 4 wins by 3.
    assert answer["answer"] == answer["best_span"] == "ab"
    assert answer["advantage"] == pytest.approx(3.0)
    for logits in scores:
        logits[0] = 3.0
    (answer,) = WITH_NONE.decode([row], windows, scores)
    assert (answer["answer"], answer["start"], answer["end"]) == ("", 0, 0)
    assert (answer["best_span"], answer["advantage"]) == ("ab", pytest.approx(-2.0))
    columns = WITH_NONE.compare([row], [answer])
    assert columns["exact_match"].tolist() == columns["f1"].tolist() == [1.0]
    never = QuestionAnsweringParameters(handle_impossible_answer=False)
    assert WITH_NONE.decode([row], windows, scores, never)[0]["answer"] == "ab"


def test_a_long_question_is_cut_and_an_empty_passage_has_no_answer() -> None:
    rows = [row_of("ab cd") | {"question": "abcdefgh " * 9}, row_of("")]
    windows = TASK.encode(rows, TOKENIZER, 16)
    assert [window.origin[0] for window in windows] == [6 + 2, 3 + 2]
    scores = [np.zeros((16, 2), np.float32) for _ in windows]
    answers = TASK.decode(rows, windows, scores)
    assert answers[1] == {"score": 1.0, "start": 0, "end": 0, "answer": ""}


def test_a_misplaced_answer_is_found_or_named() -> None:
    row = row_of("ab cd ab", "ab") | {"answers": [{"text": "ab", "answer_start": 5}]}
    (window,) = TASK.encode([row], TOKENIZER, 32, labelled=True)
    second, offsets = window.origin
    begin = int(window.labels["start_positions"][0]) - second
    assert offsets[begin, 0] == 6
    assert TASK.remarks([row])["answers_not_where_they_are_said_to_be"] == 1
    answers = [{"text": "gh", "answer_start": 0}]
    with pytest.raises(CorpusError, match="row 1: wanted an answer that is in the passage"):
        TASK.encode([row | {"answers": answers}], TOKENIZER, 32, labelled=True)


def test_an_answer_may_reach_into_the_white_space_around() -> None:
    for context, answer in (
        ("b b paris ", "paris "),
        (" ab", " ab"),
        ("ab cafe\u0301", "cafe\u0301"),
    ):
        (window,) = TASK.encode([row_of(context, answer)], TOKENIZER, 32, labelled=True)
        assert window.labels["start_positions"][0] > 0


def test_an_answer_that_no_window_holds_is_counted() -> None:
    context = "a b c d e f " * 5
    rows = [row_of(context, answer) for answer in (context.strip(), "c d", "f a")]
    windows = TASK.encode(rows, TOKENIZER, 16, labelled=True)
    assert {window.row for window in windows if window.is_cut} == {0}
    assert cut_rows(TASK.encode(rows, TOKENIZER, 16)) == 0


def test_windows_overlap_by_half_at_most() -> None:
    row = row_of("a " * 2000)
    task = QuestionAnswering()  # 128 tokens shared of 128
    assert len(task.encode([row], TOKENIZER, 128)) < 40


def test_rows_without_an_answer_are_scored_for_a_model_that_gives_always_one() -> None:
    rows = [row_of("ab cd", "ab"), row_of("ab cd")]
    columns = TASK.compare(rows, [{"answer": "ab"}, {"answer": "cd"}])
    found = TASK.metrics(columns)
    assert (found["f1"], found["no_answer_f1"]) == (0.5, 0.0)
    assert "best_f1" not in found


def test_a_question_without_an_answer_needs_its_option() -> None:
    (fault,) = TASK.fitting([row_of("ab")], trained=True)
    assert "wanted an answer, got none: set options.no_answer" in str(fault)
    assert isinstance(fault, InputError)
    assert WITH_NONE.fitting([row_of("ab")], trained=True) == [row_of("ab")]


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="top_k: wanted at least 1, got 0"):
        QuestionAnsweringParameters(top_k=0)
    with pytest.raises(InputError, match="doc_stride: wanted at least 0, got -1"):
        QuestionAnsweringOptions(doc_stride=-1)


def test_windows_are_as_long_as_in_training_unless_others_are_asked_for() -> None:
    row = row_of("ab cd ef gh " * 8)
    task = TASK.to_learn([], 24)
    assert task.chosen == replace(OPTIONS, max_length=24)
    assert task.to_learn([], 16).max_length == 16, "a student may be trained on shorter ones"
    assert task.to_learn([], 48).max_length == 24
    lengths = [
        max(window.tokens for window in each)
        for each in (
            task.encode([row], TOKENIZER, 64),
            task.encode([row], TOKENIZER, 16),
            TASK.encode([row], TOKENIZER, 64),
            task.encode(
                [row], TOKENIZER, 64, parameters=QuestionAnsweringParameters(max_seq_len=32)
            ),
        )
    ]
    assert lengths == [24, 16, 64, 32]


def test_models_with_other_windows_are_compared_but_not_with_those_that_may_not_answer() -> None:
    assert TASK.is_comparable(TASK.to_learn([], 24))
    assert not TASK.is_comparable(WITH_NONE)
    assert not TASK.is_comparable(TextClassification(["a", "b"]))
