"""Prodigy's JSONL, as `db-out` writes it: spans, choices, labels that were accepted or rejected.

Source: Prodigy's documentation, "Annotation interfaces"; `answer` is `accept`, `reject` or
`ignore`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bert_core.data.json_rows import Unread, json_rows
from bert_core.data.labelled.lines import LeftOut, Line, Unused, cats_of, with_labels
from bert_core.wording import shown

Row = Mapping[str, Any]
NOT = "not "
"""Before the label of a rejected row, if all rows ask about that label: two labels in all."""
ANSWERS = ("accept", "reject", "ignore")


def prodigy(data: bytes, source: str) -> list[Line]:
    """Read a row per task that was answered.

    A row about one `label` says whether its text has that label. If all rows ask about the same
    label, a rejected one has the label `not …`, or none of several; if rows ask about several, the
    answers of an annotator about a text are one record. Other rejected rows are left out, and so
    are ignored ones.
    """
    rows = json_rows(data, source, keep=True)
    asked = {row["label"] for row in rows if _is_binary(row)}
    given = _accepted(rows)
    lines: list[Line] = []
    for number, row in enumerate(rows, 1):
        if not _is_binary(row):
            lines += [row] if isinstance(row, Unread) else _read(row, number)
        elif len(asked) == 1:
            label = row["label"] if row["answer"] == "accept" else f"{NOT}{row['label']}"
            labels = [row["label"]] if row["answer"] == "accept" else []
            lines.append(with_labels(_record(row), labels, label))
        elif (labels_of := given.pop(_asked_of(row), None)) is not None:
            lines.append(with_labels(_record(row), labels_of))
        else:
            lines.append(Unused("rows that are merged into the one about the same text"))
    return lines


def _is_binary(row: Any) -> bool:
    """Whether a row is an answer to whether its text has a label."""
    return (
        isinstance(row, Mapping)
        and isinstance(row.get("label"), str)
        and row.get("answer") in ("accept", "reject")
        and not {"accept", "spans"} & {*row}
    )


def _asked_of(row: Row) -> tuple[str, str]:
    return f"{_annotator(row)}", f"{row.get('text')}"


def _accepted(rows: Sequence[Any]) -> dict[tuple[str, str], list[str]]:
    """Return annotator and text → the accepted ones of the labels that were asked about."""
    given: dict[tuple[str, str], list[str]] = {}
    for row in filter(_is_binary, rows):
        labels = given.setdefault(_asked_of(row), [])
        if row["answer"] == "accept" and row["label"] not in labels:
            labels.append(row["label"])
    return given


def _annotator(row: Row) -> Any:
    return row.get("_annotator_id") or row.get("_session_id")


def _record(row: Row) -> dict[str, Any]:
    return {**row, "item": row.get("_input_hash"), "annotator": _annotator(row)}


def _read(row: Row, number: int) -> Iterator[Line]:
    for name, what in (("relations", "relations"), ("versions", "versions before a review")):
        if isinstance(row.get(name), list):
            yield Unused(what, len(row[name]))
    answer = row.get("answer", "accept")
    if answer not in ANSWERS:
        yield Unread(
            f"row {number}: wanted the answer accept, reject or ignore, got {shown(answer)}: "
            "correct the row, or remove it"
        )
    elif answer != "accept":
        yield LeftOut("rejected" if answer == "reject" else "ignored")
    elif row.get("_is_binary") and row.get("spans"):
        yield LeftOut("about one span of a text (_is_binary)")
    elif isinstance(row.get("accept"), list):
        yield with_labels(_record(row), row["accept"])
    elif isinstance(row.get("cats"), Mapping):  # of spaCy, by `data-to-spacy` and recipes of users
        yield with_labels(_record(row), cats_of(row["cats"]))
    else:
        try:
            spans = [_span(span, row.get("tokens") or ()) for span in row.get("spans") or ()]
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            yield Unread(
                f"row {number}: wanted spans with start and end, or with token_start and token_end "
                f"within the tokens, got others ({error!r}): correct the row, or remove it"
            )
            return
        yield with_labels(_record(row), []) | {"spans": spans}


def _span(span: Row, tokens: Sequence[Row]) -> Row:
    """Return a span with characters, if it only has tokens; `token_end` is the last token."""
    if span.get("start") is not None and span.get("end") is not None:
        return span
    first, last = span["token_start"], span["token_end"]
    if not 0 <= first <= last:
        raise IndexError(f"tokens {first} to {last}")
    return {**span, "start": tokens[first]["start"], "end": tokens[last]["end"]}
