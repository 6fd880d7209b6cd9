"""Tasks as help, `raybert list tasks` and docs/tasks.md show them: a row of every kind, and every
option and parameter with its meaning.

All of it is read off the tasks, so that a new one explains itself. Imports neither torch nor Ray.
"""

import inspect
import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

from docstring_parser import parse_from_object

from bert_core.model.families import ARCHITECTURES
from bert_core.tasks.base import Kind, Task
from bert_core.tasks.catalog import TASKS

HEAD = """\
# Tasks

Written by `tests/bert_core/tasks/test_guide.py` from the tasks themselves; `raybert list tasks` and
the `--help` of the stages show the same. A task is named by `--task`, and learns from rows in CSV,
TSV, JSONL or Parquet with the columns shown here (`--train.columns` maps other names), or in the
format of a published set (`raybert list formats`). Fields that are lists need JSONL or Parquet.
Options are given as `--options.<name>` when a model is trained, parameters as `--parameters.<name>`
to `raybert predict`, or in a request's `parameters`.
"""


def guide(*, metrics: bool = False) -> str:
    """All tasks as plain text.

    Args:
        metrics: say by which one each is decided too, which takes two seconds to find out.
    """
    return "\n\n".join(_described(task, metrics=metrics) for task in TASKS.values())


def _described(task: type[Task], *, metrics: bool) -> str:
    lines = [f"{task.name}: {summary(task)}"]
    lines += [f"  {_origin(task)}"] if metrics else []
    for title, entries in (
        ("rows", [(kind.name, f"{shown_row(kind)}{_needs(kind)}") for kind in task.kinds]),
        ("options", meanings(task.options)),
        ("parameters", meanings(task.parameters)),
    ):
        width = max((len(name) for name, _ in entries), default=0)
        lines += [f"  {title}"] if entries else []
        lines += [f"    {name:{width}}  {text}" for name, text in entries]
    return "\n".join(lines)


def summary(task: type[Task]) -> str:
    """The first paragraph of the docstring of the task's module."""
    about = inspect.getdoc(inspect.getmodule(task)) or ""
    return " ".join(about.partition("\n\n")[0].split()).rstrip(".")


def shown_row(kind: Kind) -> str:
    """The kind's first row as JSON."""
    return json.dumps(kind.rows[0], ensure_ascii=False)


def _needs(kind: Kind) -> str:
    """The options that such rows need, as on the command line."""
    options = (f"--options.{name} {json.dumps(value)}" for name, value in kind.options.items())
    return "".join(f"  (with {option})" for option in options)


def _origin(task: type[Task]) -> str:
    """What decides between two models of the task, and the Hugging Face class that has its head."""
    architecture = ARCHITECTURES.get(frozenset({task.objective}), "Model")
    return f"decided by {_metrics(task)}; a Hugging Face …{architecture}"


def meanings(kind: type[Any]) -> list[tuple[str, str]]:
    """Name of each field of a dataclass, and its docstring with the default."""
    documented = {
        one.arg_name: " ".join((one.description or "").split())
        for each in reversed(kind.__mro__[:-1])
        for one in parse_from_object(each).params
    }
    return [(one.name, f"{documented[one.name]}{_default(one)}") for one in fields(kind)]


def _default(field: Field) -> str:
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return "" if value is None else f" (default: {json.dumps(value)})"


def markdown() -> str:
    """All tasks as docs/tasks.md has them."""
    return "\n".join([HEAD, *("\n".join(_section(task)) for task in TASKS.values())])


def _section(task: type[Task]) -> Iterator[str]:
    yield f"## `{task.name}`\n"
    yield f"{summary(task)}; {_origin(task)}.\n"
    for kind in task.kinds:
        yield f"Rows of the kind *{kind.name}*{_needs(kind)}:\n"
        yield f"```json\n{shown_row(kind)}\n```\n"
    for title, shape in (("option", task.options), ("parameter", task.parameters)):
        if entries := meanings(shape):
            yield f"| {title} | meaning |\n|---|---|"
            yield from (
                f"| `{name}` | {text.replace('|', chr(92) + '|')} |" for name, text in entries
            )
            yield ""


def _metrics(task: type[Task]) -> str:
    """The metric that decides, of each kind where they differ."""
    found = {kind.name: _metric(task, kind) for kind in task.kinds}
    if len(set(found.values())) == 1:
        return found[task.kinds[0].name]
    return ", ".join(f"{metric} ({name})" for name, metric in found.items())


def _metric(task: type[Task], kind: Kind) -> str:
    learned = task.from_rows(kind.rows, task.options_of(kind.options))
    return learned.main_metric(learned.baseline(kind.rows))
