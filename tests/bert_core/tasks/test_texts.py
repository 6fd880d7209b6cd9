"""Texts by themselves and pairs: a model of one kind does not take the other for its own."""

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import CorpusError, InputError, TooLongError
from bert_core.inference.predictor import Predictor
from bert_core.tasks import texts
from bert_core.tasks.base import CuttingParameters, Task
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.feature_extraction import FeatureExtraction, FeatureExtractionParameters
from bert_core.tasks.fill_mask import FillMask
from bert_core.tasks.minimal_pairs import MinimalPairs
from bert_core.tasks.multiple_choice import MultipleChoice
from bert_core.tasks.shapes import labelled
from bert_core.tasks.text_classification import TextClassification
from bert_core.tasks.text_ranking import TextRanking
from bert_core.tasks.text_regression import TextRegression
from bert_core.tasks.texts import TextInput, TextTask
from bert_core.tasks.zero_shot_classification import ZeroShotClassification, ZeroShotParameters
from tests import tiny

TOKENIZER = tiny.tokenizer(["a", "b"])
KINDS: list[tuple[type[TextTask], dict[str, list]]] = [
    (TextClassification, {"label": ["x", "y", "x"]}),
    (TextRegression, {"score": [1.0, 2.0, 3.0]}),
]
kinds = pytest.mark.parametrize(("kind", "targets"), KINDS)


def rows_of(targets: dict[str, list], *pairs: str | None) -> list[dict[str, Any]]:
    ((name, values),) = targets.items()
    return [
        {"text": "a", name: value} | ({} if pair is None else {"text_pair": pair})
        for pair, value in zip(pairs, values, strict=True)
    ]


@kinds
def test_a_task_takes_pairs_if_its_training_rows_are_pairs(
    kind: type[TextTask], targets: dict[str, list]
) -> None:
    pairs = rows_of(targets, "b", "b", "b")
    task = kind.from_rows(pairs)
    assert isinstance(task, TextTask)
    assert task.chosen.pairs is True
    shapes = task.shapes(task.chosen)
    assert labelled(pairs, shapes, {}, "a") == pairs
    with pytest.raises(CorpusError, match="a, row 1: wanted text in the column 'text_pair', got n"):
        labelled(rows_of(targets, None, "b", "b"), shapes, {}, "a")

    texts = rows_of(targets, None, None, None)
    task = kind.from_rows(texts)
    assert isinstance(task, TextTask)
    assert task.chosen.pairs is False
    shapes = task.shapes(task.chosen)
    assert labelled(texts, shapes, {}, "a") == texts
    message = r'a, row 2: wanted no text_pair, as training rows had none, got text \("b"\)'
    with pytest.raises(CorpusError, match=message):
        labelled(rows_of(targets, None, "b", None), shapes, {}, "a")


@kinds
def test_rows_that_are_pairs_and_others_that_are_not_are_no_training_set(
    kind: type[TextTask], targets: dict[str, list]
) -> None:
    with pytest.raises(CorpusError, match="row 3: wanted a text_pair, as row 1 has one, got none"):
        kind.from_rows(rows_of(targets, "b", "b", None))


@kinds
def test_an_empty_second_text_makes_a_pair_but_a_column_of_them_does_not(
    kind: type[TextTask], targets: dict[str, list]
) -> None:
    shapes = kind.shapes()
    rows = labelled(rows_of(targets, "b", "", "b"), shapes, {}, "a")
    task = kind.from_rows(rows)
    assert task.remarks(rows)["rows_with_empty_text"] == 1
    windows = task.encode(rows, TOKENIZER, 16, labelled=True)
    assert [len(window.ids[0]) for window in windows] == [5, 4, 5]

    rows = labelled(rows_of(targets, "", "", ""), shapes, {}, "a")
    assert rows == rows_of(targets, None, None, None)
    task = kind.from_rows(rows)
    (window,) = task.encode([{"text": "a", "text_pair": ""}], TOKENIZER, 16)
    assert len(window.ids[0]) == 3, "one text, as in training"


@kinds
def test_a_model_that_does_not_say_takes_both(
    kind: type[TextTask], targets: dict[str, list]
) -> None:
    told = kind.from_rows(rows_of(targets, "b", "b", "b"))
    task = kind(told.labels)
    assert task.inputs is TextInput
    assert task.is_comparable(told)
    assert told.is_comparable(task)
    single = kind.from_rows(rows_of(targets, None, None, None))
    assert not told.is_comparable(single)
    assert not single.is_comparable(told)


@pytest.mark.parametrize("pair", ["b", None])
@kinds
def test_a_bundle_keeps_what_it_was_trained_for(
    kind: type[TextTask], targets: dict[str, list], pair: str | None, tmp_path: Path
) -> None:
    task = TASKS[kind.name].from_rows(rows_of(targets, pair, pair, pair))
    predictor = Predictor(tiny.bundle(tmp_path / "bundle", TOKENIZER, task=task), device="cpu")
    assert len(predictor.predict(predictor.task.examples)) == 1
    if pair:
        assert predictor.predict([{"text": "a", "text_pair": "b"}])
        for single in ("a", {"text": "a"}, {"text": "a", "text_pair": None}):
            with pytest.raises(InputError, match=r"inputs\[0\].*text_pair"):
                predictor.predict([single])
    else:
        assert predictor.predict(["a", {"text": "a"}, {"text": "a", "text_pair": None}])
        with pytest.raises(InputError, match=r"inputs\[1\]: wanted no text_pair, as training rows"):
            predictor.predict(["a", {"text": "a", "text_pair": "b"}])


@pytest.mark.parametrize("cuts", [True, False])
def test_a_text_of_many_rows_is_tokenized_once_to_the_windows_of_each_row(
    monkeypatch: pytest.MonkeyPatch, *, cuts: bool
) -> None:
    query = "a b " * 40 if cuts else "a b a"
    passages = ["a", "b b", "b " * 90 if cuts else "", "a " * 70 if cuts else "b", "a"]
    rows = [{"text": query, "text_pair": passage} for passage in passages]
    parameters = TextRanking.parameters(truncation=cuts)
    by_row = [TextRanking().encode([row], TOKENIZER, 16, parameters=parameters)[0] for row in rows]
    read: dict[str, list[str]] = {"ids_of": [], "first_ids_of": []}

    def counting(name: str) -> Any:
        tokenize = getattr(texts, name)

        def counted(tokenizer: Tokenizer, given: Sequence[str], *more: Any, **named: Any) -> Any:
            read[name] += given
            return tokenize(tokenizer, given, *more, **named)

        return counted

    for name in read:
        monkeypatch.setattr(texts, name, counting(name))
    windows = TextRanking().encode(rows, TOKENIZER, 16, parameters=parameters)
    assert [window.row for window in windows] == list(range(len(rows)))
    for window, alone in zip(windows, by_row, strict=True):
        assert window.ids[0].tolist() == alone.ids[0].tolist()
        assert (window.segment_b_start, window.cuts) == (alone.segment_b_start, alone.cuts)
    assert sorted(read["first_ids_of"]) == sorted({query, *passages})
    assert sorted(read["ids_of"]) == sorted({query, *passages[2:4]} if cuts else [])


LONG = "a b " * 20
SEVERAL: list[tuple[Task, dict[str, Any], CuttingParameters]] = [
    (TextRanking(), {"text": LONG, "text_pair": "a"}, TextRanking.parameters()),
    (MultipleChoice(), {"text": LONG, "choices": ["a", "b b"]}, MultipleChoice.parameters()),
    (MinimalPairs(), {"sentence_good": LONG, "sentence_bad": "a"}, MinimalPairs.parameters()),
    (
        ZeroShotClassification(),
        {"text": LONG, "candidate_labels": ["a", "b"]},
        ZeroShotParameters(hypothesis_template="{}"),
    ),
]


@pytest.mark.parametrize(
    ("task", "row", "parameters"), SEVERAL, ids=[task.name for task, *_ in SEVERAL]
)
def test_a_text_that_is_too_long_is_refused_before_other_windows_repeat_it(
    task: Task, row: dict[str, Any], parameters: CuttingParameters
) -> None:
    message = (
        r"inputs\[0\]: wanted at most 16 tokens .* set the parameter truncation to have it cut"
    )
    with pytest.raises(InputError, match=message):
        task.encode([row], TOKENIZER, 16, parameters=parameters)
    assert task.encode([row], TOKENIZER, 16)  # which cuts


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_cut_where_and_at_the_end_that_the_tokenizer_says(
    side: str, tmp_path: Path
) -> None:
    from transformers import pipeline

    task = TextClassification(["entailment", "neutral", "contradiction"])
    config = tiny.encoder_config(TOKENIZER.vocab_size, initializer_range=0.5)
    folder = tiny.bundle(tmp_path / "bundle", TOKENIZER, config, task=task)
    for name in ("raybert.json", "special_tokens_map.json"):
        (folder / name).unlink()
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"truncation_side": side, "model_max_length": 20}
    path.write_text(json.dumps(settings))
    cut, long = {"truncation": True}, "a " * 40 + "b " * 25
    rows = [{"text": long}, *({"text": long, "text_pair": pair} for pair in ("b a", "b a " * 30))]
    ours = Predictor(folder, device="cpu")
    theirs: Any = pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
    for row, answer in zip(rows, ours.predict(rows, ours.task.parameters(**cut)), strict=True):
        for each, other in zip(answer, theirs(row, truncation="longest_first"), strict=True):
            assert each["label"] == other["label"]
            assert each["score"] == pytest.approx(other["score"], abs=1e-5)
    fits = "a b " * 13  # more than 20 tokens, but not more than the model's positions
    for each, other in zip(ours.predict([fits])[0], theirs({"text": fits}), strict=True):
        assert each["score"] == pytest.approx(other["score"], abs=1e-5)
    zero_shot = ours.also["zero-shot-classification"]
    asked = ZeroShotParameters(candidate_labels=["a", "b"], hypothesis_template="a {}", **cut)
    [answer] = zero_shot.predict([{"text": long}], asked)
    peer: Any = pipeline("zero-shot-classification", model=str(folder), device="cpu")
    wanted = peer(long, candidate_labels=["a", "b"], hypothesis_template="a {}", truncation=True)
    assert [each["label"] for each in answer] == wanted["labels"]
    assert [each["score"] for each in answer] == pytest.approx(wanted["scores"], abs=1e-5)
    [window] = ours.encode(ours.rows(rows[:1]), ours.task.parameters(**cut))
    assert [each.from_end for each in window.cuts] == [side == "left"]
    again = tmp_path / "again"
    Tokenizer.load(folder).save(again)
    assert Tokenizer.load(again).keeps_end is (side == "left")


def test_vectors_and_masks_are_of_the_end_that_the_tokenizer_keeps() -> None:
    tokenizer = tiny.tokenizer(["a", "b"])
    tokenizer.keeps_end = True
    a, b = (int(tokenizer.ids([word])[0][0]) for word in ("a", "b"))
    text = "a " * 20 + "b " * 20
    cut = FeatureExtractionParameters(truncate=True)
    for parameters, kept in ((cut, b), (replace(cut, truncation_direction="right"), a)):
        [window] = FeatureExtraction().encode(
            [{"text": text}], tokenizer, 10, parameters=parameters
        )
        assert window.ids[0].tolist() == [tokenizer.cls_id, *[kept] * 8, tokenizer.sep_id]
    row = {"text": "[MASK] " * 3 + text + "[MASK]", "words": ["a", "a", "a", "b"]}
    [window] = FillMask().encode([row], tokenizer, 10, labelled=True)
    assert window.ids[0].tolist()[-3:] == [b, tokenizer.mask_id, tokenizer.sep_id]
    assert window.labels["mlm_labels"].tolist() == [b]
    choices = {"text": text, "choices": ["a b", "b a"], "label": 0}
    [window] = MultipleChoice().encode([choices], tokenizer, 10)
    assert [each.tolist()[1:6] for each in window.ids] == [[b] * 5] * 2


def test_an_input_that_is_too_long_survives_pickling_with_its_message() -> None:
    error = TooLongError("inputs[0]: wanted at most 16 tokens, got 20", "truncate")
    copied = copy.copy(error)  # by the same methods
    assert str(copied) == str(error)
    assert copied.cut_by == "truncate"
    assert str(TooLongError("a: got 20", None)) == "a: got 20: split the text"


@pytest.mark.parametrize("kind", [TextClassification, TextRegression, TextRanking])
@pytest.mark.parametrize("keeps_end", [False, True])
def test_a_request_says_which_end_is_cut_whatever_the_tokenizer_says(
    kind: type[Task], keeps_end: bool
) -> None:
    task = kind(["x", "y"] if kind is TextClassification else [])
    rows = [{"text": "a " * 30 + "b", "text_pair": "b " * 9 + "a"}]

    def ids(usual: bool, side: str | None) -> list[int]:
        tokenizer = tiny.tokenizer(["a", "b"])
        tokenizer.keeps_end = usual
        parameters: Any = kind.parameters
        chosen = parameters(truncation=True, truncation_direction=side)
        [window] = task.encode(rows, tokenizer, 16, parameters=chosen)
        return [int(each) for each in window.ids[0]]

    assert ids(keeps_end, "left") == ids(True, None)
    assert ids(keeps_end, "right") == ids(False, None)
    assert ids(True, None) != ids(False, None)
