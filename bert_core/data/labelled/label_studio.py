"""Label Studio's exports: JSON, with all annotations of a task, and JSON-MIN, a flat row for each.

Source: Label Studio 1.23, "Export data" and "Tags"; label-studio-sdk, `converter/converter.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bert_core.data.json_rows import Unread, json_rows
from bert_core.data.labelled.lines import LeftOut, Line, Unused, with_labels
from bert_core.wording import shown

Row = Mapping[str, Any]
SPANS = ("labels", "hypertextlabels")
"""Types of results that mark spans of a text."""


def label_studio(data: bytes, source: str) -> list[Line]:
    """Read a row for each annotation of a task, with the task's data under their own names.

    Annotations that were cancelled (skipped), drafts, and predictions of a model are left out.
    """
    lines: list[Line] = []
    for number, task in enumerate(json_rows(data, source, keep=True), 1):
        if isinstance(task, Unread):
            lines.append(task)
        elif "annotations" in task or "completions" in task:
            lines += _annotations(task, number)
        elif isinstance(task.get("data"), Mapping):
            lines.append(LeftOut("without an annotation"))
        else:
            lines += _flat(task)
    return lines


def _annotations(task: Row, number: int) -> Iterator[Line]:
    """Yield the rows of a task as JSON has it; `completions` are annotations before version 1.0."""
    annotations = task.get("annotations", task.get("completions"))
    if not isinstance(annotations, list) or not isinstance(task.get("data"), Mapping):
        yield Unread(
            f"task {number}: wanted an object with data and a list of annotations, got "
            f"{shown(task)}: correct the task, or remove it"
        )
        return
    for name, what in (("drafts", "drafts"), ("predictions", "predictions of models")):
        if isinstance(task.get(name), list):
            yield Unused(what, len(task[name]))
    for annotation in annotations:
        if not isinstance(annotation, Mapping):
            yield Unread(
                f"task {number}: wanted objects as annotations, got {shown(annotation)}: export "
                "all data as JSON (with `download_all_tasks`), or remove the task"
            )
        elif annotation.get("was_cancelled") or annotation.get("skipped"):
            yield LeftOut("cancelled")
        else:
            yield from _annotation(task, annotation)
    if not annotations:
        yield LeftOut("without an annotation")


def _annotation(task: Row, annotation: Row) -> Iterator[Line]:
    results = [each for each in annotation.get("result") or () if isinstance(each, Mapping)]
    spans: list[Row] = []
    choices: dict[str, list[str]] = {}
    others: dict[str, Any] = {}
    ranked: list[dict[str, Any]] = []
    for result in results:
        kind, value = str(result.get("type")), result.get("value")
        name = str(result.get("from_name"))
        if not isinstance(value, Mapping):
            yield Unused(_plural(kind))
        elif kind in SPANS and (marked := _spans(value, value.get(kind))):
            spans += marked
        elif kind == "choices" and "start" not in value:
            choices.setdefault(name, []).extend(_listed(value.get("choices")))
        elif kind == "pairwise":
            others["selected"] = value.get("selected")
        elif kind in ("rating", "number"):
            others[name] = value.get(kind)
        elif kind == "ranker" and (of_list := _ranked(value.get(kind), task["data"])):
            ranked += of_list
        else:
            yield Unused(_plural(kind) if kind != "choices" else "choices about spans")
    record = {
        **task["data"],
        **others,
        **{name: chosen[0] if len(chosen) == 1 else chosen for name, chosen in choices.items()},
        "item": task.get("id"),
        "annotator": _annotator(annotation.get("completed_by")),
        "spans": spans,
    }
    if ranked:
        for item in ranked:  # several annotators' are compared item by item
            yield {**record, **item, "item": f"{task.get('id')}/{item['item']}"}
        return
    # With several questions about a text, `columns` says which of them holds the label.
    yield with_labels(record, next(iter(choices.values()), [])) if len(choices) < 2 else record


def _ranked(ranker: Any, data: Row) -> list[dict[str, Any]]:
    """Return a row for each item of a List that a Ranker has put in order, the best with the
    highest score, the last with 0; with buckets, the item's `label` is its bucket.

    Args:
        ranker: the Ranker's name, or each bucket's → ids of items in order. `_` holds the items
            that are in no bucket.
    """
    lists = [cell for cell in data.values() if isinstance(cell, list)]
    items = [each for cell in lists for each in cell if isinstance(each, Mapping) and "id" in each]
    by_id = {f"{item['id']}": item for item in items}
    groups = dict(ranker) if isinstance(ranker, Mapping) else {}
    has_buckets = len(groups) > 1
    if has_buckets:
        groups.pop("_", None)
    rows: list[dict[str, Any]] = []
    for bucket, ids in groups.items():
        known = [by_id[f"{each}"] for each in ids if f"{each}" in by_id]
        for place, item in enumerate(known):
            text = next((item[name] for name in ("body", "html", "title") if item.get(name)), "")
            answer = {"label": bucket} if has_buckets else {"score": float(len(known) - 1 - place)}
            rows.append({"text_pair": text, "item": item["id"], **answer})
    return rows


def _spans(value: Row, labels: Any) -> list[Row]:
    """Return a span for each label of a region; none if its place is no range of characters."""
    place = value.get("globalOffsets", value)
    start, end = (place.get("start"), place.get("end")) if isinstance(place, Mapping) else (0, 0)
    if type(start) is not int or type(end) is not int:
        return []
    own = {"text": value["text"]} if isinstance(value.get("text"), str) else {}
    return [{"start": start, "end": end, "label": label, **own} for label in _listed(labels)]


def _flat(task: Row) -> Iterator[Line]:
    """Yield the row of an annotation as JSON-MIN has it: results under the names of their tags."""
    spans: list[Row] = []
    record = dict(task)
    for name, value in task.items():
        if isinstance(value, Mapping) and [*value] == ["choices"]:
            record[name] = value["choices"]
        elif isinstance(value, list) and value and all(map(_is_region, value)):
            del record[name]
            for region in value:
                spans += _spans(region, next(region[kind] for kind in SPANS if kind in region))
    record |= {"item": task.get("id"), "annotator": _annotator(task.get("annotator"))}
    yield record if "spans" in record else record | {"spans": spans}


def _is_region(value: Any) -> bool:
    return isinstance(value, Mapping) and "start" in value and any(kind in value for kind in SPANS)


def _listed(value: Any) -> list[str]:
    """Return labels or choices as texts; a choice within others is a list of their names."""
    values: Sequence[Any] = value if isinstance(value, list) else [value]
    return ["/".join(map(str, each)) if isinstance(each, list) else str(each) for each in values]


def _annotator(given: Any) -> str | None:
    """Return the name of an annotator: an address if the export has it, otherwise a number."""
    if isinstance(given, Mapping):
        given = given.get("email") or given.get("id")
    return None if given is None else str(given)


def _plural(kind: str) -> str:
    return kind if kind.endswith("s") else f"{kind}s"
