"""Tagging: words and their pieces, long texts, entities with their characters, every message."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_core.bundle.format import load_bundle
from bert_core.bundle.layout import RECORD
from bert_core.data.labelled_formats import labelled_records
from bert_core.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from bert_core.data.vocabulary import train_tokenizer
from bert_core.data.windows import Window
from bert_core.errors import ConfigError, CorpusError, InputError
from bert_core.inference.predictor import Predictor
from bert_core.metrics.entities import SCHEMES, Entity, Scheme, entities_of, tags_of
from bert_core.objectives import IGNORE
from bert_core.tasks.shapes import as_row, labelled
from bert_core.tasks.tagged_words import marks_of_row
from bert_core.tasks.token_classification import (
    TokenClassification,
    TokenClassificationOptions,
    TokenClassificationParameters,
    TokenInput,
)
from tests import tiny

WORDPIECE = tiny.tokenizer([*tiny.pieces(tiny.LETTERS), ".", "-"])
BPE = train_tokenizer("bpe", ["abc def gh. a-b"] * 3, vocab_size=280, lowercase=False)
LABELS = ["B-loc", "B-per", "I-loc", "I-per", "O"]
TASK = TokenClassification(LABELS, TokenClassificationOptions(stride=3))
WORD = st.text(tiny.LETTERS + "AB.-", min_size=1, max_size=6)


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
def test_scored_entities_come_with_their_characters(
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


def test_a_text_is_split_as_the_tokenizer_splits_it() -> None:
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


PARTS = TokenClassification(LABELS, TokenClassificationOptions(stride=3, label_parts=True))


@pytest.mark.parametrize("task", [TASK, PARTS], ids=["words", "parts"])
@pytest.mark.parametrize("tokenizer", [WORDPIECE, BPE], ids=["wordpiece", "bpe"])
@pytest.mark.parametrize("nothing", ["\x00", "\u200b", "\ufe0f", "\u0301", "\u00ad", "\u2060", ""])
@pytest.mark.parametrize("tag", ["I-per", "O"])
def test_a_word_that_normalizes_to_nothing_is_no_evidence(
    task: TokenClassification, tokenizer: Tokenizer, nothing: str, tag: str
) -> None:
    # Of Unicode's categories Cc, Cf and Mn: BERT's normalizer removes them, or some of them.
    row = {"tokens": ["ab", nothing, "c", nothing], "tags": ["B-per", tag, "I-per", "B-loc"]}
    windows = task.encode([row], tokenizer, 16, labelled=True)
    assert windows[0].labels["token_labels"].tolist() == [1, 3]
    (answer,) = task.decode([row], windows, scored(windows, [row["tags"]]))
    [found] = [(one["entity_group"], one["word"], one["score"]) for one in answer]
    assert found == ("per", f"ab {nothing} c", pytest.approx(np.exp(5) / (np.exp(5) + 4)))
    assert task.metrics(task.compare([row], [answer]))["f1"] == 1.0
    [text] = task.plain([row]) or []
    windows = task.encode([text], tokenizer, 16)
    (answer,) = task.decode([text], windows, scored(windows, [["B-per", "I-per"]]))
    assert task.metrics(task.compare([row], [answer]) | task.compare_plain([row], [answer])) == {
        **dict.fromkeys(("precision", "recall", "f1", "surface_f1"), 1.0),
        **dict.fromkeys(("text_precision", "text_recall", "text_f1"), 1.0),
    }


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
    both = dict.fromkeys(("accuracy", "text_accuracy"), pytest.approx(1 / 3))
    assert task.metrics(task.constant(rows)) == both
    assert task.remarks(rows) == {
        "rows_with_empty_text": 0, "words_with_unknown_tags": 0, "unknown_tags": "",
        "tags_mark_no_entities": "accuracy decides (DET, NOUN, VERB)",
    }  # fmt: skip


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
    rows = [{"tokens": ["a", "b", "a", "b"], "tags": ["B-loc", "O", "B-loc", "O"]}] * 2
    rows.append({"tokens": ["a", "b"], "tags": ["O", "I-per"]})
    told = TASK.remarks(rows)
    assert (told["tag_scheme"], told["tags_that_break_their_scheme"]) == ("BIO", 1)
    assert TASK.compare(rows, [[], [], []])["wanted"].sum() == 5


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a"], "tags": ["B-per", "O"]}, "row 1: wanted one tag per word, got 2 tags"),
        (
            {"tokens": ["a"], "tags": ["NOUN"]},
            r"row 1: wanted entity tags .*, got 'NOUN': corr",
        ),
    ],
)
def test_tags_that_do_not_fit_are_refused(row: dict, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        TASK.encode([row], WORDPIECE, 16, labelled=True)
    with pytest.raises(CorpusError, match=message):
        TASK.compare([row], [[]])


def test_one_tag_alone_is_no_training_set() -> None:
    with pytest.raises(CorpusError, match=r"wanted at least two tags, found 1 \(O\)"):
        TokenClassification.from_rows([{"tokens": ["a"], "tags": ["O"]}])


def test_tags_of_entities_with_others_among_them_are_refused() -> None:
    rows = [{"tokens": ["a", "b"], "tags": ["B-PER", "O"]}, {"tokens": ["a"], "tags": ["I_PER"]}]
    with pytest.raises(CorpusError, match=r"\(B-PER, I-PER, O\), or none, got I_PER among them"):
        TokenClassification.from_rows(rows)
    chosen = TokenClassificationOptions(entities=False)
    assert TokenClassification.from_rows(rows, chosen).primary_metric == "accuracy"


@pytest.mark.parametrize("value", [{}, {"text": "a", "tokens": ["a"]}])
def test_an_input_has_a_text_or_words(value: dict) -> None:
    with pytest.raises(InputError, match="inputs: wanted either text or tokens"):
        as_row(TokenInput, value, "inputs")


def rewritten(rows: list[dict[str, Any]], scheme: Scheme) -> list[dict[str, Any]]:
    """The same rows with their entities in another scheme."""
    return [
        row | {"tags": tags_of(entities_of(row["tags"]), len(row["tags"]), scheme)} for row in rows
    ]


IOB1_ROWS: list[dict[str, Any]] = [
    {"tokens": ["a", "b", "c", "d"], "tags": ["I-per", "I-per", "B-per", "O"]},
    {"tokens": ["a", "b"], "tags": ["O", "I-loc"]},
]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_of_entities_learns_the_same_tags_whatever_their_scheme(scheme: Scheme) -> None:
    rows = rewritten(IOB1_ROWS, scheme)
    task = TokenClassification.from_rows(rows)
    assert task.labels == ["B-loc", "B-per", "I-loc", "I-per", "O"]
    assert task.record["options"]["scheme"] == scheme
    windows = task.encode(rows, WORDPIECE, 16, labelled=True)
    learned = [[task.labels[at] for at in one.labels["token_labels"]] for one in windows]
    assert learned == [["B-per", "I-per", "B-per", "O"], ["O", "B-loc"]]
    assert task.remarks(rows)["tags_that_break_their_scheme"] == 0


def test_a_scheme_that_is_given_has_to_be_the_rows() -> None:
    chosen = TokenClassificationOptions(scheme="IOB1")
    assert TokenClassification.from_rows(IOB1_ROWS, chosen).chosen.scheme == "IOB1"
    either = [{"tokens": ["a", "b"], "tags": ["O", "O"]}, {"tokens": ["a"], "tags": ["S-loc"]}]
    with pytest.raises(CorpusError, match=r"scheme IOB1, more of them fit BIOES: set options\.sch"):
        TokenClassification.from_rows(either, chosen)
    with pytest.raises(CorpusError, match=r"\(B-PER, I-PER, O\), or none, got DET, NOUN among"):
        TokenClassification.from_rows([{"tokens": ["a", "b"], "tags": ["DET", "NOUN"]}], chosen)
    with pytest.raises(ConfigError, match="scheme: wanted none with entities = false, got BIO"):
        TokenClassification.options_of({"scheme": "BIO", "entities": False})
    with pytest.raises(
        ConfigError, match=r"wanted one of BIO, IOB1, BIOES, BILOU, got text .*BMES"
    ):
        TokenClassification.options_of({"scheme": "BMES"})


# Words with punctuation inside, as CoNLL-2003, JNLPBA and BC5CDR have them, and what a tagger may
# say of the parts of each (transformers#23322).
DIVIDED = ["U.S.", "Jean-Pierre", "AT&T", "O'Brien", "IL-2", "a.smith@mail.example", "+1-555-0100"]
UNIGRAM = train_tokenizer("unigram", [" ".join(DIVIDED), "We saw , of the ."] * 3, vocab_size=70,
    lowercase=False)  # fmt: skip
MARKS = tiny.tokenizer([*tiny.pieces(tiny.LETTERS), *".,-'&@+", *tiny.pieces("0125iltpmsuvx")])


@pytest.mark.parametrize("tokenizer", [MARKS, BPE, UNIGRAM], ids=lambda one: one.kind)
@pytest.mark.parametrize("word", DIVIDED)
@pytest.mark.parametrize("strategy", ["simple", "first", "average", "max"])
def test_a_word_of_several_parts_is_one_entity_in_words_and_in_a_text(
    tokenizer: Tokenizer, word: str, strategy: str
) -> None:
    row = {"tokens": ["saw", word, ",", "of"], "tags": ["O", "B-loc", "O", "O"]}
    windows = PARTS.encode([row], tokenizer, 64, labelled=True)
    labels = [PARTS.labels[at] for at in windows[0].labels["token_labels"]]
    parts = len(labels) - 3
    assert labels == ["O", "B-loc", *["I-loc"] * (parts - 1), "O", "O"]
    assert parts > 1
    parameters = TokenClassificationParameters(aggregation_strategy=strategy)  # type: ignore[arg-type]
    text = f"saw {word}, of"
    for learned in (labels, ["O", *["B-loc"] * parts, "O", "O"]):  # joined either way
        for each in (row, {"text": text}):
            windows = PARTS.encode([each], tokenizer, 64, parameters=parameters)
            of_units = [scores_of(window.origin.units, learned) for window in windows]
            (answer,) = PARTS.decode([each], windows, of_units, parameters)
            [found] = [(one["entity_group"], one["word"], one["start"]) for one in answer]
            assert found == ("loc", word, 4)
            assert answer[0]["score"] == pytest.approx(np.exp(5) / (np.exp(5) + 4))
    bare = TokenClassificationParameters(aggregation_strategy="none")
    windows = PARTS.encode([{"text": text}], tokenizer, 64, parameters=bare)
    of_units = [scores_of(window.origin.units, labels) for window in windows]
    (answer,) = PARTS.decode([{"text": text}], windows, of_units, bare)
    assert [(one["entity"], one["word"]) for one in answer] == [("B-loc", word)]


def scores_of(units: np.ndarray, tags: list[str]) -> np.ndarray:
    scores = np.zeros((len(units), len(LABELS)), np.float32)
    scores[np.arange(len(units)), [LABELS.index(tags[unit]) for unit in units]] = 5.0
    return scores


@pytest.mark.parametrize("tokenizer", [MARKS, BPE, UNIGRAM], ids=lambda one: one.kind)
def test_words_and_the_text_that_they_make_are_read_alike(tokenizer: Tokenizer) -> None:
    rows: list[dict[str, Any]] = [{"tokens": ["saw", "(", word, ")", ",", word, "."]}
        for word in DIVIDED]  # fmt: skip
    texts = PARTS.plain(rows) or []
    assert texts[0] == {"text": "saw (U.S.), U.S. ."}
    for known, plain in zip(
        PARTS.encode(rows, tokenizer, 64), PARTS.encode(texts, tokenizer, 64), strict=True
    ):
        assert known.ids[0].tolist() == plain.ids[0].tolist()
        assert known.positions["token_positions"].tolist() == (
            plain.positions["token_positions"].tolist()
        )


def test_no_later_part_of_a_word_outside_has_a_label() -> None:
    row = {"tokens": ["a.b-c", "x", "a.b-c"], "tags": ["O", "B-loc", "O"]}
    [window] = PARTS.encode([row], MARKS, 32, labelled=True)
    none = [IGNORE] * 4
    assert window.labels["token_labels"].tolist() == [4, *none, 0, 4, *none]


def test_words_joined_by_a_mark_have_the_tag_of_the_first_part() -> None:
    rows = [{"tokens": ["non-a", "at", "a-t"], "tags": ["O", "O", "B-loc"]}]
    task = TokenClassification.from_rows(rows)
    assert task.chosen.inner_marks == "-"
    text = {"text": "non-a at a-t/b."}
    windows = task.encode([text], MARKS, 32)
    tags = ["O", "O", "B-loc", "O", "B-loc", "O", "O", "B-loc", "I-loc", "O"]
    scores = np.zeros((len(tags), 3), np.float32)
    scores[np.arange(len(tags)), [task.labels.index(tag) for tag in tags]] = 5.0
    (answer,) = task.decode([text], windows, [scores])
    assert [one["word"] for one in answer] == ["a-t/b"]
    assert task.record["options"]["inner_marks"] == "-"


def test_a_piece_that_would_cross_two_words_is_kept_apart_by_a_space() -> None:
    pieces = [*SPECIAL_TOKENS, "▁etc.", "▁etc", "▁abc", "▁", "."]
    merged = Tokenizer.from_pieces([(piece, -1.0) for piece in pieces], lowercase=False)
    row = {"tokens": ["abc", "etc", "."], "tags": ["O", "O", "B-loc"]}
    [window] = PARTS.encode([row], merged, 16, labelled=True)
    assert window.origin.words.tolist() == [0, 1, 2]
    [plain] = PARTS.encode([{"text": "abc etc."}], merged, 16)
    assert [(start, end) for start, end in plain.origin.spans] == [(0, 3), (4, 8)]


def test_neighbours_in_a_script_without_spaces_are_two_words() -> None:
    tokenizer = tiny.tokenizer([*"張三李四在京"])
    row = {"text": "張三李四在京"}
    windows = PARTS.encode([row], tokenizer, 16)
    tags = ["B-per", "I-per", "B-per", "I-per", "O", "B-loc"]
    (answer,) = PARTS.decode([row], windows, scored(windows, [tags]))
    assert [one["word"] for one in answer] == ["張三", "李四", "京"]


def test_tags_of_no_entities_are_of_all_parts_and_joined_if_they_are_alike() -> None:
    task = TokenClassification(["NUM", "PUNCT", "X"], TokenClassificationOptions(label_parts=True))
    row = {"tokens": ["1.5", "U.S.", ".", "..."], "tags": ["NUM", "X", "PUNCT", "PUNCT"]}
    [window] = task.encode([row], MARKS, 32, labelled=True)
    assert window.labels["token_labels"].tolist() == [0] * 3 + [2] * 4 + [1] * 2
    text = {"text": "1.5 U.S. . ..."}
    windows = task.encode([text], MARKS, 32)
    answers = task.decode(
        [text], windows, [np.eye(3, dtype=np.float32)[window.labels["token_labels"]]]
    )
    assert [(one["entity"], one["word"]) for one in answers[0]] == [
        ("NUM", "1.5"), ("X", "U.S."), ("PUNCT", "."), ("PUNCT", "..."),
    ]  # fmt: skip
    assert task.plain([row]) == [text]
    wrong = [[{"entity": "NUM", "start": 0, "end": 1}, {"entity": "X", "start": 4, "end": 8}]]
    known = task.compare([row], [[]]) | task.compare_plain([row], wrong)
    assert task.metrics(known) == {"accuracy": 0.0, "text_accuracy": 0.25}


def test_a_model_that_does_not_say_how_it_was_trained_answers_as_before() -> None:
    row = {"tokens": ["U.S."], "tags": ["B-loc"]}
    [window] = TASK.encode([row], MARKS, 16, labelled=True)
    assert window.labels["token_labels"].tolist() == [0]
    windows = TASK.encode([{"text": "U.S."}], MARKS, 16)
    (answer,) = TASK.decode([{"text": "U.S."}], windows, scored(windows, [["B-loc", "O"] * 2]))
    assert [one["word"] for one in answer] == ["U", "S"]
    assert TokenClassification.from_rows(IOB1_ROWS).chosen.label_parts is True
    chosen = TokenClassificationOptions(label_parts=False)
    assert TokenClassification.from_rows(IOB1_ROWS, chosen).chosen.label_parts is False


NAMELESS_ROWS: list[dict[str, Any]] = [
    {"tokens": ["colon", "cancer", "is", "bad"], "tags": ["B", "I", "O", "O"]},
    {"tokens": ["a", "cancer", "b"], "tags": ["O", "B", "B"]},
]


@pytest.mark.parametrize("entities", [None, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_prefixes_alone_mark_entities_of_one_type_without_a_name(
    scheme: Scheme, entities: bool | None
) -> None:
    rows = rewritten(NAMELESS_ROWS, scheme)
    task = TokenClassification.from_rows(rows, TokenClassificationOptions(entities=entities))
    assert (task.labels, task.primary_metric) == (["B", "I", "O"], "f1")
    assert (task.chosen.entities, task.chosen.scheme) == (True, scheme)
    assert task.kinds_found == ["_"]  # as seqeval 1.2.2 names it
    windows = task.encode(rows, WORDPIECE, 16, labelled=True)
    learned = [window.labels["token_labels"].tolist() for window in windows]
    assert learned == [[0, 1, 2, 2], [2, 0, 0]]
    right = [np.eye(3, dtype=np.float32)[labels] for labels in learned]
    answers = task.decode(rows, windows, right)
    assert [[(one["entity_group"], one["word"]) for one in each] for each in answers] == [
        [("_", "colon cancer")], [("_", "cancer"), ("_", "b")],
    ]  # fmt: skip
    columns = task.compare(rows, answers)
    assert task.metrics(columns)["f1"] == 1.0
    assert task.by_class(columns) == {
        "_": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 3}
    }
    asked = TokenClassificationParameters(scheme=scheme, ignore_labels=[])
    told = task.decode(rows, windows, right, asked)
    assert [[one["entity"] for one in each] for each in told] == [row["tags"] for row in rows]
    assert TokenClassification(["O", "B", "I"]).chosen.entities, "a model of others is read alike"
    with pytest.raises(CorpusError, match=r"wanted entity tags \(B, I, O\), .* got 'B-per'"):
        task.compare([{"tokens": ["a"], "tags": ["B-per"]}], [[]])
    with pytest.raises(CorpusError, match=r"wanted entity tags \(B-PER, I-PER, O\), .* got 'B'"):
        TASK.compare([{"tokens": ["a"], "tags": ["B"]}], [[]])


@pytest.mark.parametrize(
    ("tags", "shown"),
    [
        (["S", "O", "V"], "O, S, V"),  # subject, object, verb
        (["PER", "O"], "O, PER"),
        (["B_PER", "I_PER", "O"], "B_PER, I_PER, O"),
        (["b-per", "o"], "b-per, o"),
        ([*"abcdefghij"], "a, b, c, d, e, f, g, h and 2 more"),
    ],
)
def test_tags_that_mark_no_entities_are_reported_with_what_they_look_like(
    tags: list[str], shown: str
) -> None:
    rows = [{"tokens": tags, "tags": tags}]
    task = TokenClassification.from_rows(rows)
    assert task.primary_metric == "accuracy"
    assert task.remarks(rows)["tags_mark_no_entities"] == f"accuracy decides ({shown})"


@pytest.mark.parametrize("kind", ["O", "_", "B", "text_f1"])
def test_a_type_may_have_any_name(kind: str) -> None:
    rows = [{"tokens": ["a", "b"], "tags": [f"B-{kind}", "O"]}]
    task = TokenClassification.from_rows(rows)
    windows = task.encode(rows, WORDPIECE, 16, labelled=True)
    answers = task.decode(
        rows, windows, [np.eye(3, dtype=np.float32)[windows[0].labels["token_labels"]]]
    )
    assert [(one["entity_group"], one["word"]) for one in answers[0]] == [(kind, "a")]
    assert task.kinds_found == [kind]
    assert task.metrics(task.compare(rows, answers))["f1"] == 1.0


PLACES = st.lists(
    st.tuples(st.sampled_from(["per", "loc", "new", None]), st.integers(1, 3)), max_size=6
)


@pytest.mark.parametrize("scheme", SCHEMES)
@given(sentences=st.lists(st.tuples(PLACES, PLACES), min_size=1, max_size=4))
def test_metrics_are_conllevals_in_every_scheme(scheme: Scheme, sentences: list[Any]) -> None:
    rows, answers, sums = [], [], np.zeros(3)
    for wanted, found in sentences:
        words = max(sum(length for _, length in each) for each in (wanted, found))
        both = []
        for layout in (wanted, found):
            ends = np.cumsum([length for _, length in layout], dtype=int)
            both.append(
                [
                    Entity(kind, int(end) - length, int(end))
                    for (kind, length), end in zip(layout, ends, strict=True)
                    if kind
                ]
            )
        found_known = [one for one in both[1] if one.type != "new"]  # no label of the model
        rows.append({"tokens": ["a"] * words, "tags": tags_of(both[0], words, scheme)})
        answers.append(
            [
                {"entity_group": one.type, "start": 2 * one.first, "end": 2 * one.end - 1}
                for one in found_known
            ]
        )
        sums += len({*both[0]} & {*found_known}), len(found_known), len(both[0])
    metrics = TASK.metrics(TASK.compare(rows, answers))
    correct, predicted, wanted_ones = sums
    assert metrics["precision"] == pytest.approx(correct / max(1, predicted))
    assert metrics["recall"] == pytest.approx(correct / max(1, wanted_ones))
    assert metrics["f1"] == pytest.approx(2 * correct / max(1, predicted + wanted_ones))


@pytest.mark.drill
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_real_set_has_the_same_entities_in_every_scheme(scheme: Scheme, data_dir: Path) -> None:
    path = "wnut17/emerging.dev.conll"
    found = labelled_records((data_dir / path).read_bytes(), path, "conll")
    rows = labelled(found.records, TokenClassification.shapes(), found.columns, path)
    assert TASK.remarks(rows)["tag_scheme"] == "BIO"
    written = rewritten(rows, scheme)
    task = TokenClassification.from_rows(written)
    assert task.labels == TokenClassification.from_rows(rows).labels
    assert task.chosen.scheme == scheme
    assert task.remarks(written)["tags_that_break_their_scheme"] == 0
    marks = [sorted(marks_of_row(row, _spans(row), of_entities=True)) for row in rows]
    answers = [
        [
            {"entity_group": kind, "start": start, "end": end}
            for kind, start, end in of_row[number % 2 :]
        ]
        for number, of_row in enumerate(marks)
    ]
    metrics = task.metrics(task.compare(written, answers))
    assert metrics == task.metrics(task.compare(rows, answers))
    assert metrics["precision"] == 1.0 > metrics["recall"] > 0.5


def _spans(row: dict[str, Any]) -> np.ndarray:
    ends = np.cumsum([len(token) + 1 for token in row["tokens"]]) - 1
    return np.stack([ends - [len(token) for token in row["tokens"]], ends], axis=1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_entities_are_answered_as_tags_of_the_scheme_that_is_asked_for(scheme: Scheme) -> None:
    row = {"tokens": ["a", "b", "c", "d", "e"]}
    windows = TASK.encode([row], WORDPIECE, 16)
    scores = scored(windows, [["I-per", "I-per", "B-per", "O", "I-loc"]])  # breaks BIO
    asked = as_row(TASK.parameters, {"scheme": scheme, "ignore_labels": []}, "parameters")
    (answer,) = TASK.decode([row], windows, scores, TASK.parameters(**asked))
    entities = [Entity("per", 0, 2), Entity("per", 2, 3), Entity("loc", 4, 5)]
    assert [one["entity"] for one in answer] == tags_of(entities, 5, scheme)
    assert [one["word"] for one in answer] == row["tokens"]
    (short,) = TASK.decode([row], windows, scores, TokenClassificationParameters(scheme=scheme))
    assert short == [one for one in answer if one["entity"] != "O"]


def test_a_scheme_is_asked_for_of_tags_of_entities_only() -> None:
    with pytest.raises(
        InputError, match="with aggregation_strategy = 'simple', which returns enti"
    ):
        TokenClassificationParameters(scheme="BIO", aggregation_strategy="simple")
    with pytest.raises(InputError, match="wanted one of BIO, IOB1, BIOES, BILOU, got text"):
        as_row(TASK.parameters, {"scheme": "BMES"}, "parameters")
    of_words = TokenClassification(["DET", "NOUN"])
    with pytest.raises(
        InputError, match=r"wanted aggregation_strategy .* ignore_labels .* got .*sch"
    ):
        as_row(of_words.parameters, {"scheme": "BIO"}, "parameters")


@pytest.mark.parametrize(
    ("labels", "tags", "learned"),
    [
        (LABELS, ["B-new", "I-new", "O", "I-per"], [IGNORE, IGNORE, 4, 1]),
        (["DET", "NOUN"], ["DET", "X", "NOUN", "DET"], [0, IGNORE, 1, 0]),
    ],
)
def test_labels_unseen_in_training_are_wrong_and_reported_without_a_loss(
    labels: list[str], tags: list[str], learned: list[int]
) -> None:
    task, row = TokenClassification(labels), {"tokens": ["a", "b", "c", "d"], "tags": tags}
    windows = task.encode([row], WORDPIECE, 16, labelled=True)
    assert windows[0].labels["token_labels"].tolist() == learned
    assert len(windows[0].positions["token_positions"]) == 4, "they are scored all the same"
    told = task.remarks([row])
    assert told["words_with_unknown_tags"] == learned.count(IGNORE)
    assert told["unknown_tags"] == {"B-new": "new", "DET": "X"}[tags[0]]
    key = "entity_group" if task.chosen.entities else "entity"
    known = [tag if key == "entity" else tag[2:] for tag in tags]
    answers = [
        {key: kind, "start": 2 * place, "end": 2 * place + 1, "score": 0.9}
        for place, kind in enumerate(known)
        if kind not in ("", "new")
    ]
    if key == "entity":
        answers[1]["entity"] = "NOUN"
    columns = task.compare([row], [answers])
    assert columns["wanted"].sum() - columns["correct"].sum() == 1
    assert task.faults(columns).tolist() == [1]


def test_models_compare_whatever_schemes_they_were_trained_on() -> None:
    one = TokenClassification.from_rows(rewritten(IOB1_ROWS, "IOB1"))
    other = TokenClassification.from_rows(rewritten(IOB1_ROWS, "BIOES"))
    assert one.is_comparable(other)
    assert one.is_comparable(TASK), "which has no scheme in its record"
    assert not one.is_comparable(TokenClassification(["DET", "NOUN"]))


OLD: dict[Scheme, list[str]] = {
    "IOB1": ["B-loc", "I-loc", "I-per", "O"],
    "BIO": ["B-loc", "B-per", "I-loc", "O"],
    "BIOES": ["B-loc", "B-per", "E-loc", "E-per", "I-loc", "I-per", "O", "S-loc", "S-per"],
    "BILOU": ["B-loc", "B-per", "I-loc", "I-per", "L-loc", "L-per", "O", "U-loc", "U-per"],
}


@pytest.mark.parametrize("scheme", OLD)
def test_a_bundle_with_other_labels_and_no_scheme_answers_as_before(
    scheme: Scheme, tmp_path: Path
) -> None:
    tiny.bundle(tmp_path / "old", WORDPIECE, task=TokenClassification(OLD[scheme]))
    record = json.loads((tmp_path / "old" / RECORD).read_text())
    del record["options"]["scheme"], record["digest"]
    record["format_version"] = 1
    (tmp_path / "old" / RECORD).write_text(json.dumps(record))
    again = load_bundle(tmp_path / "old").task
    assert isinstance(again, TokenClassification)
    assert again.labels == OLD[scheme]
    assert Predictor(tmp_path / "old", device="cpu").predict(["a b c"])
    # Rows of another scheme are learned from in its own, as far as it has labels for them.
    rows = [{"tokens": ["a", "b"], "tags": ["B-loc", "I-loc"]}]
    for other in SCHEMES:
        (window,) = again.encode(rewritten(rows, other), WORDPIECE, 16, labelled=True)
        learned = [OLD[scheme][label] for label in window.labels["token_labels"]]
        assert learned == rewritten(rows, scheme)[0]["tags"]
    if scheme == "BIO":  # nobody has seen how an entity of persons goes on
        row = {"tokens": ["a", "b"], "tags": ["I-per", "I-per"]}
        (window,) = again.encode([row], WORDPIECE, 16, labelled=True)
        assert window.labels["token_labels"].tolist() == [1, IGNORE]
