"""What stages do with rows that people labelled in annotation tools: annotators are chosen, labels
named, positions counted in characters, and what is not used is told."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from bert_core import files
from bert_core.data.formats import decode_utf8
from bert_core.data.labelled_formats import LabelledFile
from bert_core.data.positions import in_characters as positions_in_characters
from bert_core.errors import ConfigError, CorpusError, InputError
from bert_core.tasks.annotators import EACH, MAJORITY, agreement, items_of, names_of, taken_of
from bert_core.tasks.row_forms import with_other_names
from bert_core.tasks.shapes import Row, label_fields
from pipelines.runtime.progress import counted, say

if TYPE_CHECKING:
    from bert_core.tasks.base import Remarks

Checked = Callable[[Sequence[Row]], list[Row | InputError]]
"""`Task.checked` with the task's options."""
AGREEMENT = "agreement_of_annotators"
SHOWN_NAMES = 10


def say_unused(source: str, found: Iterable[LabelledFile]) -> None:
    """Report the rows that their tool says not to use, and what no task reads."""
    left_out, unused = Counter[str](), Counter[str]()
    for of_file in found:
        left_out.update(of_file.left_out)
        unused.update(of_file.unused)
    if left_out:
        told = ", ".join(f"{count:,} {why}" for why, count in left_out.items())
        say(f"{source}: left out {counted(left_out.total(), 'row')}: {told}")
    if unused:
        told = ", ".join(f"{count:,} {what}" for what, count in unused.items())
        say(f"{source}: not used: {told}")


def with_chosen_annotators(
    found: Mapping[str, LabelledFile],
    columns_of: Mapping[str, Mapping[str, str]],
    source: str,
    choice: str | None,
) -> tuple[dict[str, LabelledFile], "Remarks"]:
    """Return the files, by path, with the records of the annotators that are chosen, and a remark
    on how far they agree.

    Args:
        columns_of: path → field of the task → its column.
        choice: `EACH`, `MAJORITY`, the name of one, or None for no choice.

    Raises: ConfigError if several labelled the same text and none are chosen, or the one that is
        chosen labelled nothing.
    """
    records = [record for of_file in found.values() for record in of_file.records]
    texts = [
        f"{record.get(columns_of[path].get('text', 'text'))}"
        for path, of_file in found.items()
        for record in of_file.records
    ]
    items, names = items_of(records, texts), names_of(records)
    if items and choice is None:
        raise ConfigError(
            f"{source}: wanted to know whose labels to take, since {len(items):,} texts are "
            f"labelled by several of {', '.join(names[:SHOWN_NAMES])}: set annotators beside the "
            f'source to "{EACH}", "{MAJORITY}", or the name of one'
        )
    if choice not in (None, EACH, MAJORITY, *names):
        raise ConfigError(
            f"annotators: wanted {EACH}, {MAJORITY} or the name of one who labelled "
            f"{source} ({', '.join(names[:SHOWN_NAMES]) or 'it names nobody'}), got {choice}"
        )
    agreed: Remarks = {}
    if items:
        agreed[AGREEMENT] = agreement(records, items, texts)
    if choice is None:
        return dict(found), agreed
    taken = taken_of(records, items, choice)
    rest = iter(taken.records)
    chosen: dict[str, LabelledFile] = {}
    for path, of_file in found.items():
        kept = [
            (number, record)
            for number, record in zip(of_file.numbers, rest, strict=False)
            if record is not None
        ]
        chosen[path] = replace(
            of_file,
            records=[record for _, record in kept],
            numbers=[number for number, _ in kept],
            left_out=Counter(of_file.left_out) + (Counter() if chosen else taken.left_out),
        )
    return chosen, agreed


def label_names(path: str) -> list[str]:
    """Return the names of labels by their numbers, one per line of a file; none without a file.

    Raises: CorpusError if a name occurs twice.
    """
    if not path:
        return []
    text = decode_utf8(files.read_contents(path), path)
    names = [line.strip() for line in text.removeprefix("\ufeff").splitlines() if line.strip()]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None or not names:
        raise CorpusError(
            f"{path}: wanted the name of each label once, one per line, got "
            f"{'none' if twice is None else f'{twice!r} {names.count(twice)} times'}: correct it"
        )
    return names


def checking_names(
    names: Sequence[str], labels: Set[str], source: str, checked: Checked | None
) -> Checked:
    """Return the check `checked` that also rejects rows with labels that are not in a file."""

    def check(rows: Sequence[Row]) -> list[Row | InputError]:
        taken: list[Row | InputError] = [*rows] if checked is None else checked(rows)
        for place, row in enumerate(taken):
            cells = [] if isinstance(row, InputError) else [row.get(name) for name in labels]
            given = [one for cell in cells for one in (cell if isinstance(cell, list) else [cell])]
            odd = [one for one in given if isinstance(one, str) and one not in names]
            if odd:
                taken[place] = InputError(
                    f"wanted a label of {source}, or its number from 0 to {len(names) - 1}, got "
                    f"{odd[0]!r}: correct the row, or remove it"
                )
        return taken

    return check


def with_label_names(
    classes: Mapping[str, list[str]], names: list[str], target: type, columns: Mapping[str, str]
) -> Mapping[str, list[str]]:
    """Return the names of classes by column, with those of the target's labels."""
    if not names:
        return classes
    return {**classes, **{columns.get(name, name): names for name in label_fields(target)}}


def in_characters(
    of_file: LabelledFile, path: str, shapes: tuple[type, type], columns: Mapping[str, str]
) -> LabelledFile:
    """Return the file with its spans, if the shapes have spans, at positions of characters."""
    if "spans" not in {field.name for field in fields(shapes[1])} or not of_file.records:
        return of_file
    column_of = {"text": "text", "spans": "spans"}
    column_of |= with_other_names(columns, shapes, of_file.records)
    records, unit = positions_in_characters(of_file.records, column_of["text"], column_of["spans"])
    if unit != "characters":
        say(
            f"{path}: its positions count {unit}, as the spans' own texts say: they are converted "
            "to positions of characters"
        )
    return replace(of_file, records=records)
