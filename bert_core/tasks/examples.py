"""Chooses labelled rows whose inputs show what a model reads."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from statistics import median_low
from typing import Any

from bert_core.tasks.base import Task
from bert_core.tasks.shapes import Row

READABLE = 1000
"""Characters of an input, as JSON, beyond which shorter ones are preferred."""
LONGEST = 4000
"""Characters of an input, as JSON, beyond which it is left out."""


def examples_of(task: Task, rows: Sequence[Row], count: int) -> tuple[Any, ...]:
    """Return the inputs of up to `count` rows as a caller sends them, without expected answers.

    Inputs of more than `LONGEST` characters are left out. Of the others, only those with the most
    fields are considered, so that a signature can be derived from them. Inputs whose length is
    closest to the median come first, or closest to `READABLE` characters if the median is above
    that; and every expected answer comes once before any comes again. Equal inputs count once, and
    the first of two equally good rows is taken.
    """
    targets = [one.name for one in fields(task.shapes(task.chosen)[1])]
    inputs: dict[str, tuple[Any, str]] = {}
    for row in rows:
        request = task.request_of(row)
        text = json.dumps(request, ensure_ascii=False)
        if len(text) <= LONGEST:
            answer = json.dumps([row.get(name) for name in targets])
            inputs.setdefault(text, (request, answer))
    if not inputs:
        return ()
    most = max(_fields_in(request) for request, _ in inputs.values())
    whole = [text for text, (request, _) in inputs.items() if _fields_in(request) == most]
    usual = min(median_low(map(len, whole)), READABLE)
    nearest = sorted(whole, key=lambda text: abs(len(text) - usual))
    before, turns = Counter[str](), dict[str, int]()
    for text in nearest:
        _, answer = inputs[text]
        turns[text] = before[answer]
        before[answer] += 1
    return tuple(inputs[text][0] for text in sorted(nearest, key=turns.__getitem__)[:count])


def _fields_in(request: Any) -> int:
    return 1 if isinstance(request, str) else len(request)
