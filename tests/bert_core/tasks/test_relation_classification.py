"""Relations between two marked spans: the model sees the marks, and the score is the official
one."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_core.data.labelled_formats import labelled_records
from bert_core.data.windows import ids_of
from bert_core.errors import ConfigError, InputError
from bert_core.metrics.relations import relation_f1
from bert_core.tasks.relation_classification import (
    MARKS,
    RelationClassification,
    RelationParameters,
    marked,
)
from bert_core.torch_scores import scores_of
from tests import tiny
from tests.serve.example_models import trained

TOKENIZER = tiny.tokenizer([*tiny.pieces("abcdefghi"), "the", "sea", "is", "blue", "tree", *MARKS])
SENTENCE = "the <e1>sea</e1> is <e2>blue</e2>"
LABELS = ["A(e1,e2)", "A(e2,e1)", "B(e1,e2)", "Other"]


def read_as(text: str, length: int = 64) -> list[str]:
    """The words and pieces that a model reads, and after a `^` those that it decides by."""
    [window] = RelationClassification(LABELS).encode([{"text": text}], TOKENIZER, length)
    words = [str(TOKENIZER.inner.id_to_token(int(each))) for each in window.ids[0]]
    for name in ("first_positions", "second_positions"):
        [place] = window.positions[name]
        words[place] = f"^{words[place]}"
    return words[1:-1]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (SENTENCE, "the ^$ sea $ is ^# blue #"),
        ("<e2>the</e2> <e1>sea is</e1>", "^# the # ^$ sea is $"),
        ("the <e1>sea <e2>blue</e2></e1> is", "the ^$ sea ^# blue # $ is"),
        ("the <e1>sea</e1><e2>a</e2>", "the ^$ sea $ ^# ##a #"),
        ("<e1>the</e1> <e2>sea</e2> is", "^$ the $ ^# sea # is"),
    ],
)
def test_marks_stand_around_the_spans_and_the_first_of_each_is_read(text: str, wanted: str) -> None:
    assert read_as(text) == wanted.split()


@given(
    before=st.integers(0, 30), between=st.integers(0, 30), after=st.integers(0, 30),
    size=st.integers(1, 9), length=st.integers(12, 40),
)  # fmt: skip
def test_a_long_text_is_cut_around_its_spans(
    before: int, between: int, after: int, size: int, length: int
) -> None:
    span = " ".join(["blue"] * size)
    text = f"{'sea ' * before}<e1>{span}</e1> {'is ' * between}<e2>{span}</e2>{' tree' * after}"
    [window] = RelationClassification(LABELS).encode([{"text": text}], TOKENIZER, length)
    [[dollar], [sharp]] = ids_of(TOKENIZER, list(MARKS))
    ids = window.ids[0]
    assert len(ids) <= length
    assert ids[window.positions["first_positions"][0]] == dollar
    assert ids[window.positions["second_positions"][0]] == sharp
    assert (np.sum(ids == dollar), np.sum(ids == sharp)) == (2, 2)
    fits = before + between + after + 2 * size + 6 <= length
    assert bool(window.cuts) == (not fits)
    assert fits == (len(ids) == before + between + after + 2 * size + 6)


@pytest.mark.parametrize(
    "text",
    ["the sea", "<e1>sea</e1>", f"{SENTENCE} <e1>sea</e1>", "<e1> </e1> <e2>sea</e2>",
     "</e1>sea<e1> <e2>sea</e2>"],
)  # fmt: skip
def test_a_text_without_two_marked_spans_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"wanted two marked spans, each once, such as 'The <e1>"):
        marked(text)


def test_texts_in_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match="pairs: wanted none, since both spans are marked in one"):
        RelationClassification.options_of({"pairs": True})


def test_a_request_for_a_text_that_is_too_long_is_told_how_to_have_it_cut() -> None:
    row = {"text": f"{SENTENCE} {'tree ' * 90}"}
    task = RelationClassification(LABELS)
    with pytest.raises(InputError, match=r"wanted at most 64 tokens"):
        task.encode([row], TOKENIZER, 64, parameters=RelationParameters())
    [window] = task.encode([row], TOKENIZER, 64, parameters=RelationParameters(truncation=True))
    assert len(window.ids[0]) == 64
    with pytest.raises(InputError, match="truncation_direction: wanted none, since a text that"):
        RelationParameters(truncation_direction="left")


def test_a_model_learns_which_span_is_which() -> None:
    turned = SENTENCE.translate(str.maketrans("12", "21"))
    rows = [
        {"text": SENTENCE, "label": "A(e1,e2)"},
        {"text": turned, "label": "A(e2,e1)"},
        {"text": "the <e1>sea</e1> is the <e2>tree</e2>", "label": "Other"},
    ]
    task = RelationClassification.from_rows(rows)
    assert task.chosen.out_of_scope == "Other"
    model = trained(task, rows, TOKENIZER).eval()
    windows = task.encode(rows, TOKENIZER, 64)
    answers = task.decode(rows, windows, scores_of(model, windows, TOKENIZER.pad_id))
    assert [answer[0]["label"] for answer in answers] == [row["label"] for row in rows]
    metrics = task.metrics(task.compare(rows, answers))
    assert (metrics["relation_f1"], metrics["accuracy"]) == (1.0, 1.0)


def official(predicted: list[str], wanted: list[str]) -> float:
    """The rule of SemEval's scorer for nine-way evaluation with directionality, counted by hand."""
    scores = []
    for relation in sorted({label.partition("(")[0] for label in wanted + predicted} - {"Other"}):
        right = predictions = annotated = 0
        for one, other in zip(predicted, wanted, strict=True):
            predictions += one.startswith(f"{relation}(")
            annotated += other.startswith(f"{relation}(")
            right += one == other and one.startswith(f"{relation}(")
        precision = right / predictions if predictions else 0.0
        recall = right / annotated if annotated else 0.0
        both = precision + recall
        scores.append(2 * precision * recall / both if both else 0.0)
    return sum(scores) / len(scores)


@pytest.mark.parametrize("seed", range(5))
def test_the_score_is_the_official_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    wanted = rng.integers(0, len(LABELS), 60)
    predicted = np.where(rng.random(60) < 0.5, wanted, rng.integers(-1, len(LABELS), 60))
    names = [LABELS[place] if place >= 0 else "Other" for place in predicted]
    assert relation_f1(predicted, wanted, LABELS, "Other") == pytest.approx(
        official(names, [LABELS[place] for place in wanted])
    )


def test_the_real_set_has_its_published_counts(data_dir: Path) -> None:
    labels = Counter[str]()
    for name, rows in (("TRAIN_FILE.TXT", 8000), ("TEST_FILE_FULL.TXT", 2717)):
        path = data_dir / "semeval2010_task8" / name
        found = labelled_records(path.read_bytes(), str(path), "semeval2010_task8")
        assert (len(found.records), len(found.unread)) == (rows, 0)
        for record in found.records:
            labels[record["label"]] += 1
            text = marked(record["text"])
            assert all(text.text[start:end].strip() for start, end in text.spans)
    assert len(labels) == 19


def test_a_record_of_another_form_is_named_and_the_others_are_read() -> None:
    data = f'1\t"{SENTENCE}"\r\nOther\r\nComment: x\r\n\r\n2\tsea\r\nOther\r\n\r\n'.encode()
    found = labelled_records(data, "a.txt", "semeval2010_task8")
    assert [record["label"] for record in found.records] == ["Other"]
    assert found.unused == {"comments": 1}
    assert found.unread[2].startswith("line 5: wanted a number, a tab and a sentence in")
