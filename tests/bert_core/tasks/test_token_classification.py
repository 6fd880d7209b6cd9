"""Tagging: words and their pieces, long texts, entities with their characters, every message."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_core.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from bert_core.data.vocabulary import train_tokenizer
from bert_core.data.windows import Window
from bert_core.errors import CorpusError, InputError
from bert_core.tasks.rows import as_row
from bert_core.tasks.token_classification import (
    TokenClassification,
    TokenClassificationOptions,
    TokenClassificationParameters,
    TokenInput,
)

LETTERS = "abcdefgh"
WORDPIECE = Tokenizer.from_vocabulary(
    [*SPECIAL_TOKENS, *LETTERS, *(f"##{letter}" for letter in LETTERS), ".", "-"], lowercase=True
)
BPE = train_tokenizer("bpe", ["abc def gh. a-b"] * 3, vocab_size=280, lowercase=False)
LABELS = ["B-loc", "B-per", "I-loc", "I-per", "O"]
TASK = TokenClassification(LABELS, TokenClassificationOptions(stride=3))
WORD = st.text(LETTERS + "AB.-", min_size=1, max_size=6)


def scored(windows: list[Window], tags: list[list[str]]) -> list[np.ndarray]:
    """Scores by which every word gets the tag that it is to have."""
    scores = []
    for window in windows:
        rows = np.zeros((len(window.positions["token_positions"]), len(LABELS)), np.float32)
        for row, word in zip(rows, window.origin.words, strict=True):
            row[LABELS.index(tags[window.row][word])] = 5.0
        scores.append(rows)
    return scores


@pytest.mark.parametrize("tokenizer", [WORDPIECE, BPE], ids=["wordpiece", "bpe"])
@given(tokens=st.lists(WORD, min_size=1, max_size=30), max_length=st.integers(8, 24))
def test_every_word_is_scored_once_at_its_first_piece(
    tokenizer: Tokenizer, tokens: list[str], max_length: int
) -> None:
    windows = TASK.encode([{"tokens": tokens}], tokenizer, max_length)
    words = np.concatenate([window.origin.words for window in windows])
    assert words.tolist() == list(range(len(tokens)))
    for window in windows:
        assert len(window.ids[0]) <= max_length
        for place, word in zip(
            window.positions["token_positions"], window.origin.words, strict=True
        ):
            first = tokenizer.inner.decode([int(window.ids[0][place])]).strip()
            assert tokens[word].lower().startswith(first.lower().removeprefix("##"))


@given(st.lists(st.tuples(WORD, st.sampled_from(LABELS)), min_size=1, max_size=25))
def test_what_is_scored_comes_back_as_entities_with_their_characters(
    pairs: list[tuple[str, str]],
) -> None:
    row = {"tokens": [word for word, _ in pairs], "tags": [tag for _, tag in pairs]}
    windows = TASK.encode([row], WORDPIECE, 12)
    scores = scored(windows, [row["tags"]])
    answers = TASK.decode([row], windows, scores)
    columns = TASK.compare([row], answers)
    counts = [columns[name].sum() for name in ("correct", "predicted", "wanted")]
    assert counts == [len(answers[0])] * 3
    assert TASK.faults(columns).tolist() == [0]
    text = " ".join(row["tokens"])
    assert all(text[one["start"] : one["end"]] == one["word"] for one in answers[0])
    plain = TokenClassificationParameters(aggregation_strategy="none", ignore_labels=[])
    (each,) = TASK.decode([row], windows, scores, plain)
    assert [one["entity"] for one in each] == row["tags"]
    assert [one["word"] for one in each] == row["tokens"]


def test_a_text_is_divided_as_the_tokenizer_divides_it() -> None:
    row = {"text": " Abc, de-f."}
    windows = TASK.encode([row], WORDPIECE, 32)
    tags = ["B-per", "O", "B-loc", "I-loc", "I-loc", "O"]
    (answer,) = TASK.decode([row], windows, scored(windows, [tags]))
    assert [(one["entity_group"], one["word"], one["start"]) for one in answer] == [
        ("per", "Abc", 1),
        ("loc", "de-f", 6),
    ]
    assert answer[0]["score"] == pytest.approx(np.exp(5) / (np.exp(5) + 4))


@pytest.mark.parametrize(
    ("tokenizer", "text", "words"),
    [
        (BPE, " abc  def gh.", ["abc", "def", "gh", "."]),
        (WORDPIECE, "ab海cd", ["ab", "海", "cd"]),
        (WORDPIECE, "", []),
    ],
)
def test_words_of_a_text_are_those_of_the_tokenizer_without_spaces(
    tokenizer: Tokenizer, text: str, words: list[str]
) -> None:
    [window] = TASK.encode([{"text": text}], tokenizer, 16)
    assert [text[start:end] for start, end in window.origin.spans] == words
    assert len(window.positions["token_positions"]) == len(words)


def test_a_word_of_which_nothing_is_left_is_outside() -> None:
    row = {"tokens": ["ab", "\x00", "c"], "tags": ["B-per", "I-per", "I-per"]}
    windows = TASK.encode([row], WORDPIECE, 16, labelled=True)
    assert windows[0].labels["token_labels"].tolist() == [1, 3]
    (answer,) = TASK.decode([row], windows, scored(windows, [row["tags"]]))
    assert [one["word"] for one in answer] == ["ab", "c"]


def test_tags_that_are_of_no_entities_are_counted_one_by_one() -> None:
    rows = [{"tokens": ["a", "b", "c"], "tags": ["DET", "NOUN", "VERB"]}]
    task = TokenClassification.from_rows(rows)
    assert (task.chosen.entities, task.primary_metric) == (False, "accuracy")
    tags = ["DET", "VERB", "VERB"]
    answers = [
        [
            {"entity": tag, "start": 2 * place, "end": 2 * place + 1, "score": 0.9}
            for place, tag in enumerate(tags)
        ]
    ]
    columns = task.compare(rows, answers)
    assert task.metrics(columns) == {"accuracy": pytest.approx(2 / 3)}
    assert task.faults(columns).tolist() == [1]
    assert task.claims(rows, answers)[1].tolist() == [True, False, True]
    assert task.by_class(columns) == {
        "DET": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 1},
        "NOUN": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1},
        "VERB": {"precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3), "support": 1},
    }
    assert task.metrics(task.constant(rows)) == {"accuracy": pytest.approx(1 / 3)}
    assert task.remarks(rows) == {"rows_with_empty_text": 0}


def test_different_entities_count_once_in_the_surface_score() -> None:
    # "a" is found twice and missed once: as an entity two of three, as a form found.
    rows: list[dict[str, Any]] = [{"tokens": ["a"], "tags": ["B-per"]}] * 3
    hit = [{"entity_group": "per", "start": 0, "end": 1}]
    metrics = TASK.metrics(TASK.compare(rows, [hit, hit, []]))
    assert metrics["recall"] == pytest.approx(2 / 3)
    assert metrics["surface_f1"] == 1.0


def test_each_type_of_entity_has_its_own_figures_and_an_unknown_one_counts_as_wrong() -> None:
    rows: list[dict[str, Any]] = [
        {"tokens": ["a", "b", "c"], "tags": ["B-per", "O", "B-loc"]},
        {"tokens": ["a"], "tags": ["O"]},
    ]
    answers = [
        [
            {"entity_group": kind, "start": start, "end": start + 1, "score": score}
            for kind, start, score in (("per", 0, 0.8), ("per", 2, 0.6), ("org", 4, 0.7))
        ],
        [],
    ]
    columns = TASK.compare(rows, answers)
    assert TASK.by_class(columns) == {
        "loc": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1},
        "per": {"precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3), "support": 1},
    }
    assert TASK.metrics(columns)["precision"] == pytest.approx(1 / 3)
    assert TASK.faults(columns).tolist() == [2, 0]
    scores, right = TASK.claims(rows, answers)
    assert (scores.tolist(), right.tolist()) == ([0.8, 0.6, 0.7], [True, False, False])


def test_tags_that_break_their_scheme_are_counted_not_lost() -> None:
    rows = [{"tokens": ["a", "b"], "tags": ["O", "I-per"]}]
    assert TASK.remarks(rows)["tags_that_break_their_scheme"] == 1
    assert TASK.compare(rows, [[]])["wanted"].sum() == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a"], "tags": ["B-per", "O"]}, "row 1: wanted a tag a word, got 2 tags for 1"),
        ({"tokens": ["a"], "tags": ["B-org"]}, "row 1: its tag 'B-org' is not one of the training"),
    ],
)
def test_tags_that_do_not_fit_are_refused(row: dict, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        TASK.encode([row], WORDPIECE, 16, labelled=True)


def test_one_tag_alone_is_no_training_set() -> None:
    with pytest.raises(CorpusError, match=r"wanted at least two tags, found 1 \(O\)"):
        TokenClassification.from_rows([{"tokens": ["a"], "tags": ["O"]}])


def test_tags_of_entities_with_others_among_them_are_refused() -> None:
    rows = [{"tokens": ["a", "b"], "tags": ["B-PER", "O"]}, {"tokens": ["a"], "tags": ["I_PER"]}]
    with pytest.raises(CorpusError, match=r"\(B-PER, I-PER, O\) or none, got both: I_PER is none"):
        TokenClassification.from_rows(rows)
    chosen = TokenClassificationOptions(entities=False)
    assert TokenClassification.from_rows(rows, chosen).primary_metric == "accuracy"


@pytest.mark.parametrize("value", [{}, {"text": "a", "tokens": ["a"]}])
def test_an_input_has_a_text_or_words(value: dict) -> None:
    with pytest.raises(InputError, match="inputs: wanted text, or tokens, one of them"):
        as_row(TokenInput, value, "inputs")
