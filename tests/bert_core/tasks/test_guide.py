"""Every task shows its rows and options wherever people look for them."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from bert_core.tasks.base import Kind, Task
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.guide import markdown, meanings
from bert_core.tasks.shapes import labelled
from pipelines import cli
from pipelines.configure import STAGES
from tests.labelled_rows import EVERY_KIND, rows_of

TRAINING = ["finetune", "tune", "distill", "evaluate", "predict", "mine", "export"]


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_a_row_of_every_kind_and_every_option_with_its_meaning_are_shown_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = printed(["list", "tasks"], capsys)
    for task in TASKS.values():
        for kind in task.kinds:
            assert json.dumps(kind.rows[0]) in shown
        for name, meaning in [*meanings(task.options), *meanings(task.parameters)]:
            assert any(name in line and meaning in line for line in shown.splitlines())


def test_a_meaning_ends_with_the_range_or_the_choices_and_the_default() -> None:
    parameters = dict(meanings(TASKS["question-answering"].parameters))
    assert parameters["top_k"].endswith(" (at least 1; default: 1)")
    assert parameters["doc_stride"].endswith(" (at least 0)")
    options = dict(meanings(TASKS["feature-extraction"].options))
    assert options["pooling"].endswith(' (one of mean, cls; default: "mean")')


def test_every_stage_that_is_told_options_explains_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    explaining = [
        word
        for word in STAGES
        if "`raybert list tasks TASK` shows" in printed([word, "--help"], capsys)
    ]
    assert sorted(explaining) == sorted(TRAINING)


def test_the_page_on_tasks_is_what_the_tasks_say() -> None:
    """Writes `docs/tasks.md` again where it says something else."""
    path = Path(__file__).parents[3] / "docs" / "tasks.md"
    before = path.read_text() if path.exists() else ""
    path.write_text(markdown())
    assert before == markdown(), "docs/tasks.md is written again: look at it, and commit it"


@pytest.mark.parametrize(("task", "kind"), EVERY_KIND)
def test_the_rows_of_a_kind_have_the_columns_that_the_task_reads(
    task: type[Task], kind: Kind
) -> None:
    options = task.options_of(kind.options)
    shapes = task.shapes(options)
    assert labelled(kind.rows, shapes, {}, "rows") == [dict(row) for row in kind.rows]
    names = [one.name for shape in shapes for one in fields(shape)]
    assert set(kind.rows[0]) <= set(names)
    for row in kind.rows:
        assert set(row) <= set(kind.rows[0])
    learned = task.from_rows(kind.rows, options)
    rows = rows_of(kind, 20)
    assert len(set(learned.digests(rows, learned.chosen))) == 20
    constant = learned.constant(rows)
    assert constant is None or learned.metrics(constant)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_field_of_a_tasks_rows_belongs_to_a_kind(task: type[Task]) -> None:
    shown = {name for kind in task.kinds for name in kind.rows[0]}
    wanted = {
        one.name
        for kind in task.kinds
        for shape in task.shapes(task.options_of(kind.options))
        for one in fields(shape)
    }
    assert shown == wanted
