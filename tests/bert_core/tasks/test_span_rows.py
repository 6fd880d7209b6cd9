"""Rows that mark spans of a text: what is learned of them comes back as the same spans."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bert_core.data.labelled_formats import FORMATS, labelled_records
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.vocabulary import train_tokenizer
from bert_core.data.windows import pieces_of
from bert_core.data.words import parts_of, units_of
from bert_core.errors import ConfigError, CorpusError, InputError
from bert_core.objectives import IGNORE
from bert_core.tasks.shapes import labelled
from bert_core.tasks.span_rows import longest, marks_in
from bert_core.tasks.token_classification import TokenClassification, TokenClassificationOptions
from tests import tiny

WORDPIECE = tiny.tokenizer([*tiny.pieces(tiny.LETTERS), ".", "-", "$", "海", "é", "😀"])
BPE = train_tokenizer("bpe", ["abc (def). gh. a-b"] * 3, vocab_size=300, lowercase=False)
UNIGRAM = train_tokenizer("unigram", ["abc def gh. a - b 海 😀"] * 3, vocab_size=40, lowercase=True)
KINDS = ("place", "place", "O", "a-b")
TEXT = st.text("abcA .-$海é\u0301😀\u200b\x00\n", max_size=60)


def span(start: int, end: int, label: Any = "place", **more: Any) -> dict[str, Any]:
    return {"start": start, "end": end, "label": label, **more}


def task_of(rows: list[dict[str, Any]], **options: Any) -> TokenClassification:
    return TokenClassification.from_rows(rows, TokenClassificationOptions(stride=3, **options))


def learned(
    task: TokenClassification, rows: list[dict[str, Any]], tokenizer: Tokenizer, length: int = 12
) -> list[list[tuple[str, int, int]]]:
    """The spans that a model answers which has learned exactly what it was taught."""
    windows = task.encode(rows, tokenizer, length, labelled=True)
    scores = []
    for window in windows:
        labels = window.labels["token_labels"]
        assert IGNORE not in labels
        scores.append(9.0 * np.eye(len(task.labels), dtype=np.float32)[labels])
    answers = task.decode([{"text": row["text"]} for row in rows], windows, scores)
    for row, answer in zip(rows, answers, strict=True):
        assert all(row["text"][one["start"] : one["end"]] == one["word"] for one in answer)
    columns = task.compare(rows, answers)
    right, wanted = columns["correct"].sum(), columns["wanted"].sum()
    assert wanted == sum(len(longest(marks_in(row))) for row in rows)
    assert right == wanted or task.remarks(rows)["spans_that_cut_a_word"]
    return [[(one["entity_group"], one["start"], one["end"]) for one in each] for each in answers]


@pytest.mark.parametrize("tokenizer", [WORDPIECE, BPE, UNIGRAM], ids=lambda each: each.kind)
@given(text=TEXT, ends=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=12))
@example(text="a.b$c", ends=[(0, 1)] * 5)
@example(text="海海海", ends=[(0, 2), (0, 1)])
def test_spans_of_whole_parts_come_back_as_they_are(
    tokenizer: Tokenizer, text: str, ends: list[tuple[int, int]]
) -> None:
    """Spans that touch, that begin within a word, and that lie over the edges of windows too."""
    [pieces] = pieces_of(tokenizer, [text])
    units = units_of(parts_of(text), pieces.offsets).spans
    spans, at = [], 0
    for number, (gap, size) in enumerate(ends):
        first, last = at + gap, at + gap + size - 1
        if last >= len(units):
            break
        spans.append(span(int(units[first, 0]), int(units[last, 1]), KINDS[number % 4]))
        at = last + 1
    row = {"text": text, "spans": spans}
    task = task_of([row, *({"text": "a", "spans": [span(0, 1, kind)]} for kind in KINDS)])
    [found] = learned(task, [row], tokenizer)
    assert found == [(one["label"], one["start"], one["end"]) for one in spans]


@given(
    text=TEXT,
    ends=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=5),
)
def test_any_span_is_learned_as_the_parts_of_words_that_it_touches(
    text: str, ends: list[tuple[int, int]]
) -> None:
    spans = [span(start, min(len(text), start + size)) for start, size in ends if start < len(text)]
    row = {"text": text, "spans": spans}
    marks = longest(marks_in(row))
    assert all(not text[start].isspace() and not text[end - 1].isspace() for _, start, end in marks)
    task = task_of([row, {"text": "a", "spans": [span(0, 1)]}], overlapping_spans="longest")
    [found] = learned(task, [row], WORDPIECE)
    parts = parts_of(text)
    touched = [
        np.flatnonzero((parts[:, 0] < end) & (start < parts[:, 1])) for _, start, end in marks
    ]
    taken = np.concatenate([*touched, np.empty(0, int)])
    if len(set(taken.tolist())) == len(taken):  # no part is cut between two spans
        assert found == [("place", parts[own[0], 0], parts[own[-1], 1]) for own in touched]


def test_what_is_not_learned_as_annotated_is_reported() -> None:
    rows = [
        {"text": "A Londoner left.", "spans": [span(2, 8)]},
        {"text": "in  Rome \u200b now", "spans": [span(3, 10), span(3, 4)]},
        {"text": "New York City", "spans": [span(0, 8), span(4, 13), span(0, 3)]},
    ]
    with pytest.raises(CorpusError, match="row 3: wanted spans that do not overlap"):
        task_of(rows).encode(rows, WORDPIECE, 32, labelled=True)
    remarks = task_of(rows, overlapping_spans="longest").remarks(rows)
    assert remarks["spans_that_cut_a_word"] == "1 ([London]er)"
    assert remarks["spans_with_white_space_removed"] == 1
    assert remarks["spans_without_a_word"] == 1
    assert remarks["spans_left_out_since_they_overlap"] == 1
    clean = [{"text": "Rome", "spans": [span(0, 4)]}]
    assert not any(v for name, v in task_of(clean).remarks(clean).items() if "spans" in name)


def test_a_text_without_a_word_has_an_empty_answer() -> None:
    task = task_of([{"text": "a", "spans": [span(0, 1)]}])
    texts = [{"text": ""}, {"text": " \u200b "}]
    windows = task.encode(texts, WORDPIECE, 12)
    assert task.decode(texts, windows, [np.zeros((0, 3), np.float32)] * 2) == [[], []]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([span(0, 9)], "wanted spans within the text's 8 characters, got one from 0 to 9 (place)"),
        ([span(3, 3)], "wanted spans within the text's 8 characters, got one from 3 to 3 (place)"),
        ([span(-1, 3)], "within the text's 8 characters, got one from -1 to 3"),
        ([{"start": 0, "end": 3}], "wanted spans with whole numbers start and end, and a label"),
        ([{"start": 0.5, "end": 3, "label": "x"}], "wanted spans with whole numbers start and end"),
        ([{"start": 0, "end": True, "label": "x"}], "wanted spans with whole numbers start and en"),
        ([span(0, 3, " ")], "wanted a label in every span, got {"),
        (
            [span(0, 3, text="new")],
            'wanted the span\'s own text, "new", at 0 to 3, got "New": correct the row',
        ),
        (
            [span(0, 5), span(4, 8, "city")],
            'spans that do not overlap, since a word has one tag, got "New Y" (place, 0 to 5) and '
            '"York" (city, 4 to 8): correct the row, remove it, or set '
            'options.overlapping_spans = "longest"',
        ),
    ],
)  # fmt: skip
def test_a_span_that_does_not_fit_its_text_is_refused(
    spans: list[dict[str, Any]], message: str
) -> None:
    row = {"text": "New York", "spans": spans}
    [fault] = TokenClassification.checked([row])
    assert isinstance(fault, InputError)
    assert message in str(fault)


def test_spans_that_only_share_a_space_do_not_overlap() -> None:
    row = {"text": "New York", "spans": [span(0, 4), span(3, 8), span(3, 8)]}
    assert TokenClassification.checked([row]) == [row]
    assert marks_in(row) == [("place", 0, 3), ("place", 4, 8)]


@pytest.mark.parametrize(
    ("record", "row"),
    [
        ({"text": "Rome", "entities": [span(0, 4)]}, {"text": "Rome", "spans": [span(0, 4)]}),
        ({"text": "Rome", "spans": [[0, 4, "place"]]}, {"text": "Rome", "spans": [span(0, 4)]}),
        ({"text": "Rome", "spans": []}, {"text": "Rome", "spans": []}),
        (
            {"text": "Rome", "spans": {"start": [0], "end": [4], "label": ["place "]}},
            {"text": "Rome", "spans": [span(0, 4)]},
        ),
        (
            {"text": "Rome", "spans": [span(0, 4, score=1.0, label=3)]},
            {"text": "Rome", "spans": [span(0, 4, "3")]},
        ),
        (  # Prodigy's and spaCy's tokens are no words of ours
            {"text": "Rome", "tokens": [{"text": "Rome", "id": 0}], "spans": [span(0, 4)]},
            {"text": "Rome", "spans": [span(0, 4)]},
        ),
        (
            {"text": "Rome .", "tokens": ["Rome", "."], "tags": ["B-place", "O"], "entities": 1},
            {"tokens": ["Rome", "."], "tags": ["B-place", "O"]},
        ),
    ],
)
def test_a_row_has_words_with_tags_or_a_text_with_spans(
    record: dict[str, Any], row: dict[str, Any]
) -> None:
    assert labelled([record], TokenClassification.shapes(), {}, "a.jsonl") == [row]


def test_a_file_may_have_rows_of_both_forms_and_other_columns() -> None:
    shapes = TokenClassification.shapes()
    words: dict[str, Any] = {"tokens": ["a"], "tags": ["O"]}
    records: list[dict[str, Any]] = [words, {"text": "b", "spans": [[0, 1, "x"]]}]
    rows = labelled(records, shapes, {}, "a.jsonl")
    assert rows == [words, {"text": "b", "spans": [span(0, 1, "x")]}]
    task = task_of(rows)
    assert task.labels == ["B-x", "I-x", "O"]
    assert task.chosen.begin_within
    assert set(task.metrics(task.compare(rows, [[], []]))) >= {"f1", "precision"}
    assert [row["text"] for row in task.plain(rows) or ()] == ["a", "b"]
    named = {"text": "body", "spans": "ents"}
    [row] = labelled([{"body": "b", "ents": [], **words}], shapes, named, "a.jsonl")
    assert row == {"text": "b", "spans": []}
    broken = [*records, {"text": "c"}, {"tokens": ["a"]}]
    with pytest.raises(CorpusError, match="row 3: wanted a list of objects in the column 'spans'"):
        labelled(broken, shapes, {}, "a.jsonl")
    with pytest.raises(
        CorpusError,
        match="wanted the columns 'tokens' and 'tags', or 'text' and 'spans', there are: text, lab",
    ):
        labelled([{"text": "c", "label": "x"}], shapes, {}, "a.jsonl")


def test_rows_of_spans_say_what_they_lack() -> None:
    with pytest.raises(CorpusError, match="training rows: wanted spans, found none: add rows with"):
        task_of([{"text": "a", "spans": []}])
    rows = [{"text": "a", "spans": [span(0, 1)]}]
    unfit = {"entities": False, "label_parts": False, "inner_marks": "-", "scheme": "BIO"}
    for name, value in unfit.items():
        with pytest.raises(CorpusError, match=rf"options\.{name} = {json.dumps(value)}, got spans"):
            task_of(rows, **{name: value})
    words = [{"tokens": ["a", "b"], "tags": ["O", "B-x"]}]
    with pytest.raises(CorpusError, match=r'options\.overlapping_spans = "longest", got tokens'):
        task_of(words, overlapping_spans="longest")
    with pytest.raises(ConfigError, match=r"options\.begin_within: wanted none, since it follows"):
        TokenClassification.options.check_given({"begin_within": True})
    tagger = task_of([{"tokens": ["a", "b"], "tags": ["DET", "NOUN"]}])
    [fault] = tagger.fitting(rows)
    assert "since the model's tags mark no entities (DET, NOUN), got spans" in str(fault)


def test_a_model_of_one_nameless_type_learns_spans_with_its_name() -> None:
    task = task_of([{"tokens": ["a", "b", "c"], "tags": ["B", "I", "O"]}])
    rows = [{"text": "a b c", "spans": [span(0, 3, "_")]}]
    assert learned(task, rows, WORDPIECE) == [[("_", 0, 3)]]


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("doccano_bsner/admin.jsonl", "doccano"),
        ("prodigy/food_ingredients_first200.jsonl", "prodigy"),
        ("prodigy/rel_annotations.jsonl", "prodigy"),
        ("materials_brat/10101*.ann", "brat"),
        ("litbank/brat/11*.ann", "brat"),
    ],
)
def test_real_spans_come_back_but_for_those_that_cut_a_word(
    pattern: str, name: str, data_dir: Path
) -> None:
    records: list[Any] = []
    for path in sorted(data_dir.glob(pattern)):
        beside = path.with_suffix(FORMATS[name].beside).read_bytes() if name == "brat" else None
        records += labelled_records(path.read_bytes(), str(path), name, beside).records
    rows = labelled(records, TokenClassification.shapes(), {}, pattern)
    task = task_of(rows, overlapping_spans="longest")
    assert task.checked(rows, task.chosen) == rows
    found = learned(task, rows, WORDPIECE, length=64)
    wanted = [longest(marks_in(row)) for row in rows]
    wrong = sum(len({*marks} - {*spans}) for marks, spans in zip(wanted, found, strict=True))
    told = str(task.remarks(rows)["spans_that_cut_a_word"] or "0").partition(" ")[0]
    assert wrong == int(told)
    assert sum(map(len, wanted)) > 50 * (1 + wrong)
