"""What holds for every task of the registry: a new one is tested the day it is added."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa
import pytest
import torch

from bert_core.batches import collate
from bert_core.bundle.format import load_bundle
from bert_core.collation import collate as arrays_of
from bert_core.data.windows import Window
from bert_core.errors import ConfigError, FormatError
from bert_core.inference.export import Graph, largest_difference
from bert_core.inference.predictor import Predictor
from bert_core.metrics.bootstrap import intervals
from bert_core.model.hf import architecture
from bert_core.objectives.base import ObjectiveModel
from bert_core.objectives.distillation import Distillation
from bert_core.objectives.likelihood import MaskedWordLikelihood
from bert_core.tasks.base import Kind, Parameters, Task
from bert_core.tasks.catalog import TASKS, also
from bert_core.tasks.evaluation import Columns
from bert_core.tasks.shapes import Row, as_row, labelled
from bert_core.tasks.text_regression import TextRegression
from bert_core.tasks.zero_shot_classification import INFERENCE_LABELS
from bert_core.torch_scores import TorchBackend, scores_of
from tests import tiny
from tests.labelled_rows import EVERY_TRAINED_KIND

LONG = "sea sea the tree " * 20
ROWS: dict[str, list[Row]] = {
    "text-classification": [
        {"text": "the sea is blue", "text_pair": "", "label": "sea"},
        {"text": "a tree", "text_pair": "the tree is blue", "label": "land"},
        {"text": LONG, "text_pair": "a tree", "label": "sea"},
        {"text": "", "text_pair": LONG, "label": "land"},
    ],
    "text-regression": [
        {"text": "the sea is blue", "score": 4.0},
        {"text": "the tree", "score": -2.5},
        {"text": LONG, "score": 0.0},
    ],
    "zero-shot-classification": [
        {"text": "the sea is blue", "label": "sea"},
        {"text": LONG, "label": "tree"},
        {"text": "", "candidate_labels": ["tree"], "label": "tree"},
    ],
    "text-ranking": [
        {"text": "the sea is blue", "text_pair": "sea", "score": 1.0},
        {"text": "the sea is blue", "text_pair": LONG, "score": 0.0},
        {"text": "the sea is blue", "text_pair": "a tree", "score": 2.0},
        {"text": LONG, "text_pair": "a tree", "score": 0.0},
    ],
    "token-classification": [
        {"tokens": ["the", "blue", "Sea"], "tags": ["O", "B-place", "I-place"]},
        {"tokens": LONG.split(), "tags": ["B-place", "O", "O", "O"] * 20},
        {"tokens": ["a"], "tags": ["O"]},
    ],
    "span-classification": [
        {
            "text": "the blue Sea is",
            "spans": [
                {"start": 4, "end": 12, "label": "place"},
                {"start": 9, "end": 12, "label": "sea"},
            ],
        },
        {"text": LONG, "spans": [{"start": 0, "end": 7, "label": "sea"}]},
        {"text": "", "spans": []},
    ],
    "relation-classification": [
        {"text": "<e1>the sea</e1> is <e2>blue</e2>", "label": "colour(e1,e2)"},
        {"text": f"{LONG} <e2>a tree</e2> is <e1>the sea</e1>", "label": "Other"},
        {"text": f"<e1>sea <e2>tree</e2></e1> {LONG}", "label": "colour(e2,e1)"},
    ],
    "multiple-choice": [
        {"text": "the sea", "choices": ["is blue", "a tree", LONG], "label": 0},
        {"text": "", "choices": ["the tree is", "sea"], "label": 1},
    ],
    "next-sentence-prediction": [
        {"text": "the sea", "text_pair": "is blue", "label": "IsNext"},
        {"text": LONG, "text_pair": LONG, "label": "NotNext"},
    ],
    "feature-extraction": [
        {"text": "the sea is blue", "text_pair": "sea", "negatives": ["a tree", LONG]},
        {"text": "a tree", "text_pair": LONG},
        {"text": "the sea is blue", "text_pair": "blue"},
    ],
    "sentence-similarity": [
        {"source_sentence": "the sea", "sentences": ["a tree", LONG], "scores": [2.0, 1.0]},
        {"source_sentence": LONG, "sentences": ["blue"], "scores": [0.5]},
    ],
    "sparse-embedding": [
        {"text": "the sea is blue", "text_pair": "sea", "negatives": ["a tree", LONG]},
        {"text": "a tree", "text_pair": LONG},
    ],
    "minimal-pairs": [
        {"sentence_good": "the sea is blue", "sentence_bad": "the sea are", "UID": "sea"},
        {"sentence_good": LONG, "sentence_bad": "unseen"},
        {"sentence_good": "a tree", "sentence_bad": "", "field": "x", "linguistics_term": "y"},
    ],
    "fill-mask": [
        {"text": "the [MASK] is blue", "words": ["sea"]},
        {"text": "a <mask> [MASK] blue " + LONG, "words": ["tree", "is"]},
    ],
    "question-answering": [
        {
            "question": "is the sea blue",
            "context": "the tree is the tree, " * 8 + "the sea is blue",
            "answers": [{"text": "blue", "answer_start": 187}],
        },
        {
            "question": LONG,
            "context": "a tree",
            "answers": [{"text": "a tree", "answer_start": 0}],
            "id": "x",
        },
    ],
}
TOKENIZER = tiny.tokenizer()
CONFIG = tiny.encoder_config(
    TOKENIZER.vocab_size,
    hidden_size=16,
    num_hidden_layers=1,
    max_position_embeddings=16,
    initializer_range=0.5,
)


@pytest.fixture(params=TASKS, name="task")
def each_task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param].from_rows(ROWS[request.param])


@pytest.fixture(params=[name for name in TASKS if TASKS[name].trainable], name="trained")
def each_trained_task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param].from_rows(ROWS[request.param])


def model_of(task: Task) -> ObjectiveModel:
    return tiny.model(CONFIG, task.build_objective).eval()


def windows_of(task: Task, *, is_labelled: bool = False) -> list[Window]:
    return task.encode(ROWS[task.name], TOKENIZER, 16, labelled=is_labelled)


def columns_of(task: Task) -> Columns:
    """What metrics need of a model's answers, to plain inputs too."""
    rows, model = ROWS[task.name], model_of(task)

    def answered(inputs: list[Row]) -> list[Any]:
        windows = task.encode(inputs, TOKENIZER, 16)
        return task.decode(inputs, windows, scores_of(model, windows, TOKENIZER.pad_id))

    columns, plain = task.compare(rows, answered(rows)), task.plain(rows)
    if plain is not None:
        columns |= task.compare_plain(rows, answered(plain))
    return columns


def test_labels_are_sorted_and_do_not_depend_on_the_order_of_rows(task: Task) -> None:
    assert task.labels == sorted(task.labels)
    assert type(task).from_rows(ROWS[task.name][::-1]).labels == task.labels


def test_its_rows_are_those_of_its_shapes(task: Task) -> None:
    rows = ROWS[task.name]
    assert labelled(rows, task.shapes(task.chosen), {}, "rows") == rows


def test_rows_become_windows_of_limited_length_in_their_order(task: Task) -> None:
    windows = windows_of(task)
    rows = [window.row for window in windows]
    assert sorted(set(rows)) == list(range(len(ROWS[task.name])))
    assert rows == sorted(rows)
    assert max(len(ids) for window in windows for ids in window.ids) == 16
    for window in windows:
        assert len(window.segment_b_start) == len(window.ids)
        objective = task.build_objective(CONFIG)
        assert not window.labels or isinstance(objective, MaskedWordLikelihood)


def test_a_labelled_window_has_a_label_an_item(trained: Task) -> None:
    task = trained
    key = task.build_objective(CONFIG).position_key
    for window in windows_of(task, is_labelled=True):
        items = len(window.ids) if "texts" in window.labels else 1
        items = items if key is None else len(window.positions[key])
        assert {len(labels) for labels in window.labels.values()} == {items}


def test_the_scores_of_a_batch_are_picked_from_a_graph_without_torch(task: Task) -> None:
    """As torch picks them before the head, from the same encoder; graphs themselves are tested in
    `test_export`."""
    model, windows = model_of(task), windows_of(task)
    backend, graph_scores = TorchBackend(model), task.graph_scores
    assert graph_scores is backend.objective.graph_scores
    if graph_scores is None:
        with pytest.raises(FormatError, match="wanted a head that has an ONNX graph"):
            Graph(model)
        return
    assert (graph_scores.objective, graph_scores.position_key) == (
        backend.objective.name, backend.objective.position_key,
    )  # fmt: skip
    batch = arrays_of(windows, TOKENIZER.pad_id)
    batch.setdefault("attention_mask", np.ones_like(batch["input_ids"]))
    graph = Graph(model).eval()
    with torch.inference_mode():
        outputs = graph(*(torch.from_numpy(batch[name]) for name in graph.inputs))
    found = graph_scores.of_batch([output.numpy() for output in outputs], batch)
    wanted = backend.logits(batch)
    assert found.dtype == wanted.dtype == np.float32
    assert largest_difference([wanted], [found]) < 1e-5


def test_every_row_gets_an_answer_that_json_can_hold(task: Task) -> None:
    rows, windows = ROWS[task.name], windows_of(task)
    answers = task.decode(rows, windows, scores_of(model_of(task), windows, TOKENIZER.pad_id))
    assert len(answers) == len(rows)
    assert json.loads(json.dumps(answers)) == answers
    cells = [task.cells(answer) for answer in answers]
    assert {tuple(each) for each in cells} == {tuple(task.cell_types)}
    for name, kind in task.cell_types.items():
        column = pa.array([each[name] for each in cells], kind)
        assert column.null_count == 0 or name in ("start", "end")
    assert isinstance(task.parameters(), Parameters)


def test_metrics_hold_for_any_selection_of_rows(task: Task) -> None:
    rows, columns = ROWS[task.name], columns_of(task)
    assert {len(column) for column in columns.values()} == {len(rows)}
    metrics = task.metrics(columns)
    assert task.primary_metric in metrics
    assert all(np.isfinite(value) for value in metrics.values())
    for low, high in intervals(task.metrics, columns, samples=20).values():
        assert low <= high
    baseline = task.constant(rows)
    assert baseline is None or task.metrics(baseline).keys() == metrics.keys()


def test_an_evaluations_report_holds_for_any_selection_of_rows(task: Task) -> None:
    rows, columns = ROWS[task.name], columns_of(task)
    faults = task.faults(columns)
    assert faults.shape == (len(rows),)
    assert (faults >= 0).all()
    last = {name: column[-1:] for name, column in columns.items()}
    assert task.faults(last).tolist() == faults[-1:].tolist()
    classes = task.by_class(columns)
    for figures in (classes or {}).values():
        assert list(figures) in (["precision", "recall", "f1", "support"], ["accuracy", "support"])
        assert all(0 <= figures[name] <= 1 for name in list(figures)[:-1])
    assert task.baseline(rows).keys() in (set(), task.metrics(columns).keys())


def test_probabilities_are_of_every_row_or_of_what_is_in_the_answers(task: Task) -> None:
    rows, windows = ROWS[task.name], windows_of(task)
    answers = task.decode(rows, windows, scores_of(model_of(task), windows, TOKENIZER.pad_id))
    confidence, claims = task.confidence(answers), task.claims(rows, answers)
    assert confidence is None or confidence.shape == (len(rows),)
    if claims is not None:
        scores, right = claims
        assert scores.shape == right.shape
        assert ((scores > 0) & (scores <= 1)).all()


class Plain(TextRegression):
    """A task that says nothing of itself beyond what it must, with a metric of rows."""

    faults = Task.faults
    primary_metric = "closeness"

    def metrics(self, columns: Columns) -> dict[str, float]:
        return {"closeness": float(np.exp(-np.abs(columns["predicted"] - columns["label"])).mean())}


def test_a_task_without_faults_of_its_own_uses_its_metric() -> None:
    rows = ROWS["text-regression"]
    answers = [{"score": row["score"] + add} for row, add in zip(rows, (0, 1, 2), strict=True)]
    faults = Plain().faults(Plain().compare(rows, answers))
    np.testing.assert_allclose(faults, 1 - np.exp([0.0, -1.0, -2.0]), atol=1e-12)
    assert Plain().by_class({}) is None
    assert Plain().claims(rows, answers) is None


def test_its_objective_and_its_class_at_hugging_face_exist(task: Task) -> None:
    import transformers

    with torch.device("meta"):
        model = ObjectiveModel(CONFIG, [task.build_objective(CONFIG)])
    assert list(model.objectives) == [task.objective]
    assert hasattr(transformers, architecture(CONFIG, model.in_transformers))


def test_a_student_learns_from_the_scores_of_a_wider_teacher(trained: Task) -> None:
    task = trained
    wide = replace(CONFIG, hidden_size=32, num_hidden_layers=2)
    windows = windows_of(task, is_labelled=True)
    batch = collate(windows, TOKENIZER.pad_id) | {"groups": torch.tensor([len(windows)])}
    student = model_of(task)
    teacher = ObjectiveModel(wide, [task.build_objective(wide)])
    model = Distillation(student, teacher, {"soft": 1.0}, temperature=2.0)
    objective = task.build_objective(CONFIG)
    scores = teacher.logits(batch)[task.objective]
    same = objective.soft_part(scores, scores, batch, 2.0)
    assert same.sum.item() == pytest.approx(0.0, abs=1e-5)
    assert same.count == model.counts(batch)["soft"] == student.counts(batch)[objective.key]
    assert same.correct is None if not objective.chooses else same.correct == same.count
    optimizer, losses = torch.optim.Adam(student.parameters(), lr=3e-3), []
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(batch)["soft"].sum
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert 0 < losses[-1] < 0.7 * losses[0]


def test_a_bundle_restores_it_and_answers_its_examples(task: Task, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    tiny.bundle(folder, TOKENIZER, CONFIG, task=task)
    again = load_bundle(folder).task
    assert type(again) is type(task)
    assert again is not None
    assert again.record == task.record
    answers = Predictor(folder, device="cpu").predict(task.examples)
    assert len(answers) == len(task.examples)


def test_the_tasks_that_share_its_head_exist_and_score_alike(task: Task) -> None:
    assert task.trainable or task.shares_head_with
    for name in task.shares_head_with:
        made = task.from_head(TASKS[name](INFERENCE_LABELS))
        if made is not None:
            assert type(made) is type(task)
            assert made.objective == TASKS[name].objective
            assert task.name in [other.name for other in also(TASKS[name](INFERENCE_LABELS))]


@pytest.mark.parametrize("name", [name for name in TASKS if TASKS[name].shares_head_with])
def test_tasks_that_share_a_head_share_a_pass(name: str, tmp_path: Path) -> None:
    for other in TASKS[name].shares_head_with:
        source = TASKS[other](INFERENCE_LABELS)
        predictor = Predictor(
            tiny.bundle(tmp_path / other, TOKENIZER, CONFIG, task=source), device="cpu"
        )
        asked = Predictor(tmp_path / other, device="cpu", task=name)
        assert asked.task.name == name
        assert asked.predict(asked.task.examples)
        assert name in predictor.also or asked.task.pretrained
        if name not in predictor.also:
            continue
        both = [predictor.also[name], predictor]
        rows = [one.rows(one.task.examples) for one in both]
        windows = [one.encode(each) for one, each in zip(both, rows, strict=True)]
        scores = predictor.forward([*windows[0], *windows[1]])
        answers = predictor.also[name].decode(rows[0], windows[0], scores[: len(windows[0])])
        assert len(answers) == len(rows[0])
        assert predictor.task is not both[0].task


@pytest.mark.parametrize(("kind_of_task", "kind"), EVERY_TRAINED_KIND)
def test_rows_to_train_on_fit_a_task_whose_labels_are_not_known_yet(
    kind_of_task: type[Task], kind: Kind
) -> None:
    task = kind_of_task(options=kind_of_task.options_of(kind.options))
    assert task.fitting(kind.rows, trained=True) == [dict(row) for row in kind.rows]


def test_unknown_options_are_refused_by_name(task: Task) -> None:
    with pytest.raises(ConfigError, match=r'options: wanted .*, got "colour"'):
        task.options_of({"colour": "blue"})
    assert task.options_of({}) == task.options()


def test_parameters_are_taken_by_name(task: Task) -> None:
    kind = task.parameters
    given = {} if kind.cut_by is None else {kind.cut_by: True}
    assert as_row(kind, given, "parameters") == given
    assert {one.name for one in fields(kind)} >= given.keys()


def test_its_fields_have_docstrings_and_names_of_their_own(task: Task) -> None:
    shapes = task.shapes(task.chosen)
    names = [one.name for shape in shapes for one in fields(shape)]
    assert len(set(names)) == len(names)


OPTIONS_OF_TEXT = [
    (name, option)
    for name, kind in TASKS.items()
    for option, hint in get_type_hints(kind.options).items()
    if hint in (str, str | None) and option != "hypothesis_template"  # which is no label
]


@pytest.mark.parametrize(("name", "option"), OPTIONS_OF_TEXT)
def test_a_numeric_label_may_be_given_without_quotes(name: str, option: str) -> None:
    assert ("text-classification", "out_of_scope") in OPTIONS_OF_TEXT
    needed = {"prompts": {"0": "a prompt "}} if option.endswith("_prompt") else {}
    for zero in (0, "0"):
        assert getattr(TASKS[name].options_of({option: zero, **needed}), option) == "0"
    for told in (0.5, True, [0]):
        with pytest.raises(ConfigError, match=f"options.{option}: wanted text, got a"):
            TASKS[name].options_of({option: told})
