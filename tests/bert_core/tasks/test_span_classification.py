"""Nested and overlapping spans: what is learned of them comes back, and how they are measured."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bert_core.batches import collate
from bert_core.errors import CorpusError, InputError
from bert_core.objectives import IGNORE
from bert_core.tasks.span_classification import (
    SpanClassification,
    SpanClassificationOptions,
    SpanParameters,
)
from bert_core.tasks.span_rows import marks_in
from bert_core.torch_scores import scores_of
from tests import tiny
from tests.serve.example_models import nested, trained

WORDPIECE = tiny.tokenizer([*tiny.pieces(tiny.LETTERS), ".", "-", "海", "é", "😀"])
TEXT = st.text("abcA .-海é\u0301😀\u200b\n", max_size=40)
ENDS = st.lists(st.tuples(st.integers(0, 39), st.integers(1, 8)), max_size=8)
BANK: dict[str, Any] = {
    "text": "the Bank of England is",
    "spans": [
        {"start": 4, "end": 19, "label": "organisation"},
        {"start": 12, "end": 19, "label": "place"},
        {"start": 12, "end": 19, "label": "country"},
    ],
}


def perfect(task: SpanClassification, windows: list[Any]) -> list[np.ndarray]:
    """The scores of a model that has learned exactly what it was taught, and nothing of the spans
    that another window scores."""
    return [
        np.where(window.labels["span_labels"] == 1, 9.0, -9.0).astype(np.float32)
        for window in windows
    ]


@given(text=TEXT, ends=ENDS)
def test_spans_come_back_as_they_are_annotated_whatever_they_overlap(
    text: str, ends: list[tuple[int, int]]
) -> None:
    bounds = [(start, min(start + size, len(text))) for start, size in ends if start < len(text)]
    spans = [
        {"start": start, "end": end, "label": "ab"[place % 2]}
        for place, (start, end) in enumerate(bounds)
    ]
    row = {"text": text, "spans": spans}
    task = SpanClassification(["a", "b"])
    windows = task.encode([row], WORDPIECE, 128, labelled=True)
    [answer] = task.decode([row], windows, perfect(task, windows))
    found = {(span["entity_group"], span["start"], span["end"]) for span in answer}
    wanted = {*marks_in(row)}
    if not task.remarks([row])["spans_that_cut_a_word"]:
        assert found == wanted
    assert len(found) <= len(wanted)
    for span in answer:
        assert text[span["start"] : span["end"]] == span["word"]


def test_a_span_is_scored_once_in_a_long_text_and_one_over_an_edge_is_told() -> None:
    words = ["ab", "c", "a", "bc"] * 12
    text = " ".join(words)
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])
    spans: list[dict[str, Any]] = [
        {"start": int(starts[first]), "end": int(starts[first + size] - 1), "label": "x"}
        for first in range(len(words))
        for size in (1, 2)
        if first + size <= len(words)
    ]
    row = {"text": text, "spans": spans}
    task = SpanClassification.from_rows([row], SpanClassificationOptions(stride=6))
    windows = task.encode([row], WORDPIECE, 16, labelled=True)
    assert len(windows) > 3
    [answer] = task.decode([row], windows, perfect(task, windows))
    assert [(span["start"], span["end"]) for span in answer] == sorted(
        ((span["start"], span["end"]) for span in spans), key=lambda ends: (ends[0], -ends[1])
    )
    owned = sum(int((window.labels["span_labels"][:, 0, 0] != IGNORE).sum()) for window in windows)
    assert owned == len(words), "a part of a word is learned in one window"
    assert not any(window.is_cut for window in windows)
    [*most, last] = SpanClassification(["x"], SpanClassificationOptions(stride=0)).encode(
        [row], WORDPIECE, 16, labelled=True
    )
    assert all(window.is_cut for window in most)
    assert not last.is_cut


def test_a_model_learns_nested_spans_with_several_labels() -> None:
    rows: list[dict[str, Any]] = [BANK, {"text": "England is the place", "spans": []}]
    tokenizer = tiny.tokenizer(["the", "bank", "of", "england", "is", "place"])
    task = SpanClassification.from_rows(rows)
    assert task.chosen.max_span_length == 3
    model = trained(task, rows, tokenizer).eval()
    windows = task.encode(rows, tokenizer, 64)
    answers = task.decode(rows, windows, scores_of(model, windows, tokenizer.pad_id))
    assert task.metrics(task.compare(rows, answers)) == dict.fromkeys(
        ("precision", "recall", "f1", "partial_precision", "partial_recall", "partial_f1"), 1.0
    )
    assert [(span["entity_group"], span["word"]) for span in answers[0]] == [
        ("organisation", "Bank of England"),
        ("country", "England"),
        ("place", "England"),
    ]
    every = task.decode(
        rows, windows, scores_of(model, windows, tokenizer.pad_id), SpanParameters(threshold=0.0)
    )
    assert len(every[0]) == 3 * (5 + 4 + 3), "all spans of up to three words"


def test_the_loss_and_scores_are_those_of_each_span_by_itself() -> None:
    """Compared with the biaffine form written out, for padded and for packed rows."""
    rows = [BANK, {"text": "the sea is", "spans": [{"start": 4, "end": 7, "label": "place"}]}]
    tokenizer = tiny.tokenizer(["the", "bank", "of", "england", "is", "sea"])
    config = tiny.encoder_config(tokenizer.vocab_size, dropout=0.0, initializer_range=0.3)
    task = SpanClassification.from_rows(rows)
    model = tiny.model(config, task.build_objective).eval()
    windows = task.encode(rows, tokenizer, 32, labelled=True)
    head: Any = next(iter(model.objectives.values())).head
    total = 0.0
    for window in windows:
        batch = collate([window], tokenizer.pad_id)
        with torch.no_grad():
            hidden = model.encode(batch).hidden.flatten(0, 1)[batch["token_positions"]]
            start = torch.nn.functional.gelu(head.start(hidden))
            end = torch.nn.functional.gelu(head.end(hidden))
            weight = head.pair.weight.unflatten(0, (len(task.labels), head.SIZE))
            for first in range(len(hidden)):
                for last in range(first, min(first + 3, len(hidden))):
                    pair = torch.einsum("i,lji,j->l", start[first], weight, end[last])
                    logit = pair / head.SIZE**0.5 + head.left(start[first]) + head.right(end[last])
                    wanted = batch["span_labels"][first, last - first].float()
                    loss = torch.nn.functional.binary_cross_entropy_with_logits
                    total += float(loss(logit, wanted, reduction="sum"))
    for packed_from in (1.0, 0.0):
        with torch.no_grad():
            part = model(collate(windows, tokenizer.pad_id, packed_from))["span_classification"]
        assert float(part.sum) == pytest.approx(total, rel=1e-5)
        assert part.count == 5 + 3


def test_partial_metrics_count_spans_that_overlap_one_of_their_label() -> None:
    task = SpanClassification.from_rows([BANK])
    answer = [
        {"entity_group": "organisation", "start": 0, "end": 8, "score": 0.9},
        {"entity_group": "place", "start": 12, "end": 19, "score": 0.8},
        {"entity_group": "place", "start": 0, "end": 3, "score": 0.7},
        {"entity_group": "organisation", "start": 12, "end": 14, "score": 0.6},
    ]
    columns = task.compare([BANK], [answer])
    metrics = task.metrics(columns)
    assert (metrics["precision"], metrics["recall"]) == (1 / 4, 1 / 3)
    assert (metrics["partial_precision"], metrics["partial_recall"]) == (3 / 4, 2 / 3)
    assert metrics["partial_f1"] == pytest.approx(12 / 17)
    assert task.by_class(columns)["place"]["precision"] == 0.5
    scores, is_right = task.claims([BANK], [answer])
    assert [*zip(scores, is_right, strict=True)] == [
        (0.9, False), (0.8, True), (0.7, False), (0.6, False),
    ]  # fmt: skip


def test_what_cannot_be_found_is_told() -> None:
    options = SpanClassificationOptions(max_span_length=2)
    task = SpanClassification.from_rows([BANK], options)
    other = {"text": "Rome", "spans": [{"start": 0, "end": 4, "label": "town"}]}
    remarks = task.remarks([BANK, other])
    assert remarks["spans_longer_than_the_model_finds"] == 1
    assert remarks["spans_with_unknown_labels"] == 1
    assert remarks["unknown_labels_of_spans"] == "town"
    assert remarks["spans_left_out_since_they_overlap"] == 0


def test_bad_rows_and_parameters_are_refused() -> None:
    with pytest.raises(CorpusError, match=r"training rows: wanted spans, found none: add rows"):
        SpanClassification.from_rows([{"text": "a", "spans": []}])
    with pytest.raises(InputError, match=r"wanted spans within the text's 1 characters"):
        SpanClassification.checked_row(
            {"text": "a", "spans": [{"start": 0, "end": 2, "label": "x"}]}
        )
    with pytest.raises(InputError, match=r"threshold: wanted"):
        SpanParameters(threshold=1.5)


def test_the_rows_of_the_documents_example_are_nested() -> None:
    assert SpanClassification.from_rows(nested()).labels == ["bank", "place"]
