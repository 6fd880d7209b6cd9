"""Rows that may be written in several forms: words with tags, or a text with its spans.

A target shape says so in `forms`, a tuple of tuples of fields: a row has all fields of one of them,
and those of the others are not read. In `other_names` it may say field → further usual names of its
column.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from bert_core.errors import CorpusError

Form = tuple[str, ...]


def with_other_names(
    columns: Mapping[str, str], shapes: Sequence[type], records: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Return field → its column, with the other usual name of a column that no record has."""
    found = dict(columns)
    for shape in shapes:
        for field, names in getattr(shape, "other_names", {}).items():
            if field in found or any(field in record for record in records):
                continue
            known = [name for name in names if any(name in record for record in records)]
            if known and known[0] not in found.values():
                found[field] = known[0]
    return found


def in_order(forms: Sequence[Form], given: Set[str]) -> list[Form]:
    """Return the forms, those with more fields whose column the user names first."""
    return sorted(forms, key=lambda form: -len(given & {*form}))


def form_of(record: Mapping[str, Any], forms: Sequence[Form], column_of: Mapping[str, str]) -> Form:
    """Return the form of a record: the first of which it has most fields; no field if there are no
    forms."""

    def share(form: Form) -> float:
        return sum(record.get(column_of.get(name, name)) is not None for name in form) / len(form)

    return max(forms, key=share, default=())


def check_forms(
    records: Iterable[Mapping[str, Any]],
    forms: Sequence[Form],
    column_of: Mapping[str, str],
    source: str,
    setting: str,
) -> None:
    """Check that some record has all columns of a form. Raises: CorpusError if none has."""
    present: dict[str, None] = {}
    for record in records:
        for form in forms:
            if all(column_of.get(name, name) in record for name in form):
                return
        present |= dict.fromkeys(map(str, record))
    if not forms:
        return
    wanted = ", or ".join(
        " and ".join(repr(column_of.get(name, name)) for name in form) for form in forms
    )
    first = min(forms, key=lambda form: sum(column_of.get(n, n) not in present for n in form))
    missing = next(name for name in first if column_of.get(name, name) not in present)
    raise CorpusError(
        f"{source}: wanted the columns {wanted}, there are: {', '.join(present)}: say with "
        f"{setting}.{missing} which holds the {missing}"
    )
