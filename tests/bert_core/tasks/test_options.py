"""Every option of every task changes something that a user can see, or is refused."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

from bert_core.errors import CorpusError, RaybertError
from bert_core.model.config import EncoderConfig
from bert_core.tasks.base import Kind, Task
from bert_core.tasks.modules import SentenceTransformer
from bert_core.tasks.shapes import labelled
from bert_core.torch_scores import scores_of
from tests import tiny
from tests.labelled_rows import KINDS, rows_of

WORDS = tiny.tokenizer()
CONFIG = tiny.encoder_config(WORDS.vocab_size)
ABOUT = {"pairs": ["text_pair"], "scheme": ["options.entities"]}
"""What a refusal of an option may name instead."""
OPTIONS = [
    pytest.param(task, kind, option.name, id=f"{name}-{option.name}")
    for name, (task, kind) in KINDS.items()
    for option in fields(task.options)
]


@pytest.mark.parametrize(("task", "kind", "option"), OPTIONS)
def test_an_option_changes_something_or_is_refused(
    task: type[Task], kind: Kind, option: str
) -> None:
    records = rows_of(kind, 8)
    usual = task.options_of(kind.options)
    if option == "overlapping_spans":
        records = [_with_an_overlap(row) for row in records]
    try:
        before = seen(task, records, usual)
    except CorpusError as error:  # the spans overlap, which the default refuses
        before = str(error)
    for value in others(task, records, option, getattr(usual, option)):
        try:
            task.options.check_given({option: value})
            after = seen(task, records, task.options_of({**kind.options, option: value}))
        except RaybertError as error:
            after = str(error)
            if not any(name in after for name in (option, *ABOUT.get(option, ()))):
                continue
        if after != before:
            return
    pytest.fail(f"{option} changes nothing, and is not refused")


def others(task: type[Task], rows: list[dict[str, Any]], option: str, usual: Any) -> list[Any]:
    """Values that an option may have instead."""
    hint = get_type_hints(task.options)[option]
    kinds = [kind for kind in get_args(hint) or [hint] if kind is not type(None)]
    kind = hint if get_origin(hint) in (Literal, list, dict) else kinds[0]
    labels = sorted({label for row in rows for label in _labels(row)})
    known: Mapping[Any, list[Any]] = {
        bool: [True, False], int: [2, 5, 8], float: [7.0], str: [*labels, "Is it {}?"],
    }  # fmt: skip
    if get_origin(kind) is Literal:
        values = list(get_args(kind))
    elif get_origin(kind) is dict:
        numbers = get_args(kind)[1] is float
        values = [{label: 0.9} for label in labels] if numbers else [{"query": "the sea "}]
    elif get_origin(kind) is list:
        values = [[8], [*labels, "another"]] if get_args(kind) == (int,) else [[*labels, "another"]]
    else:
        values = known[kind]
    return [value for value in values if value != usual]


def _labels(row: Mapping[str, Any]) -> list[str]:
    one = row.get("label")
    return row.get("labels") or ([one] if isinstance(one, str) else [])


def _with_an_overlap(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with another span before its first, if it has spans."""
    first = {"start": 0, "end": 2, "label": "place"}
    return {**row, **({"spans": [first, *row["spans"]]} if "spans" in row else {})}


def seen(of: type[Task], records: list[dict[str, Any]], options: Any) -> str:
    """What can be seen of a task: what is read, learned, answered, measured and written.

    Raises: RaybertError if the options, or these rows with them, are refused.
    """
    records = [
        {**row, **({"tokens": [f"{word}.s" for word in row["tokens"]]} if "tokens" in row else {})}
        for row in records
    ]
    rows = labelled(records, of.shapes(options), {}, "rows")
    task = of.from_rows(rows, options)
    repeated = ("context", "question", "tokens", "tags")
    long = [
        {
            name: value * 8 if name in repeated or ("spans" in row and name == "text") else value
            for name, value in row.items()
        }
        for row in rows
    ]
    encoder = task.encoder_config(CONFIG)
    model = tiny.model(encoder, task.build_objective, seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # small ones give every input the same label
            parameter.mul_(20 if parameter.ndim == 2 else 1)
    windows = task.encode(long, WORDS, 24, labelled=task.trainable)
    unlabelled = task.encode(rows, WORDS, 24)
    answers = task.decode(rows, unlabelled, scores_of(model, unlabelled, WORDS.pad_id))
    texts = task.plain(rows) or []
    plain = task.encode(texts, WORDS, 24)
    of_texts = task.decode(texts, plain, scores_of(model, plain, WORDS.pad_id)) if texts else []
    (objective,) = model.objectives.values()
    numbers = {name: value for name, value in vars(objective).items() if _is_plain(value)}
    parts = [
        encoder, task.joint, task.max_length, numbers, type(objective), windows,
        np.round([float(number) for number in _numbers([*answers, *of_texts])], 5).tolist(),
        task.metrics(task.compare(rows, answers)), task.by_class(task.compare(rows, answers)),
        *files_of(task, encoder),
        task.labels, task.shapes(task.chosen),
    ]  # fmt: skip
    return repr(parts)


def files_of(task: Task, encoder: EncoderConfig) -> list[Any]:
    if isinstance(task, SentenceTransformer):
        return [task.files(encoder), task.config_entries()]
    return []


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) or is_dataclass(value)


def _numbers(value: Any) -> list[float]:
    if isinstance(value, Mapping):
        return _numbers(list(value.values()))
    if isinstance(value, list | tuple):
        return [number for each in value for number in _numbers(each)]
    return [value] if isinstance(value, int | float) else []
