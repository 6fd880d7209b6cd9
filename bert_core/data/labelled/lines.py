"""What a reader of labelled files gives: records, and what else is in a file. Pure: no files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from bert_core.data.formats import decode_utf8
from bert_core.data.json_rows import Unread, json_value
from bert_core.errors import ResourceError

Record = Mapping[str, Any]


class Comment(str):
    """A line that was taken for a comment, in a format that does not say how they are marked."""

    __slots__ = ()


class LeftOut(str):
    """In place of a row that its tool marks as not to be used: why, such as "rejected"."""

    __slots__ = ()


@dataclass(frozen=True)
class Unused:
    """What a file says and no task reads, such as relations."""

    what: str
    """Its plural."""
    count: int = 1


Line = Record | Comment | Unread | LeftOut | Unused | None
Reader = Callable[[bytes, str], Sequence[Line]]
TwoFileReader = Callable[[bytes, str, bytes], Sequence[Line]]


@dataclass(frozen=True, kw_only=True)
class LabelledFormat:
    """How to read one kind of file."""

    read: Reader | TwoFileReader
    """Bytes and their source's name → records, those that cannot be read, and what else the file
    says; None stands for a broken line, in sets that are published with such lines. If the format
    has a file `beside` each, its contents are the third argument.
    Raises: CorpusError for a file that is not of this kind."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Field of the task → the column that holds it, if that has another name."""
    source: str
    """Who publishes it."""
    suffix: str = ""
    """That of its files, with the dot, if there are others in a folder of them."""
    beside: str = ""
    """The suffix, instead of `suffix`, of the file that belongs to each; after a slash, the name of
    one in the same folder that belongs to all."""

    def beside_of(self, path: str) -> str:
        """Return the path of the file that belongs to the file at `path`; empty if none does."""
        if self.beside.startswith("/"):
            folder, slash, _ = path.rpartition("/")
            return f"{folder}{slash}{self.beside[1:]}"
        return f"{path.rpartition('.')[0]}{self.beside}" if self.beside else ""


def with_labels(record: Record, labels: Sequence[Any], label: str | None = None) -> dict[str, Any]:
    """Return a record with its labels in both forms that tasks read: `labels`, a list, and `label`,
    the only one of them.

    Args:
        label: the `label`, if it is not the only one of `labels`.
    """
    only = labels[0] if len(labels) == 1 else [*labels]
    return {**record, "labels": [*labels], "label": only if label is None else label}


def cats_of(cats: Mapping[str, float]) -> list[str]:
    """Return spaCy's categories of a text that apply: those with at least 0.5."""
    return [name for name, share in cats.items() if share >= 0.5]


def needed(module: str, extra: str, source: str) -> ModuleType:
    """Import a module that only one format needs. Raises: ResourceError naming its extra."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ResourceError(
            f"{source}: wanted the package {module.partition('.')[0]}, which reads this format, it "
            f"cannot be imported ({error}): pip install --constraint constraints.txt '.[{extra}]'"
        ) from error


def json_of(data: bytes, source: str, name: str) -> Any:
    """Return the JSON value of a file. Raises: CorpusError naming the format `name`."""
    text = decode_utf8(data, source).removeprefix("\ufeff")
    way_out = "copy it again" if text.lstrip()[:1] in ("{", "[") else "give its own format"
    return json_value(text, f"{source}: wanted JSON, as in the format {name}", way_out)


def lines_of(data: bytes) -> list[str]:
    """Return the lines. Bytes that are not UTF-8 are kept as surrogates, so that they make only
    their own line unreadable."""
    return data.decode(errors="surrogateescape").removeprefix("\ufeff").split("\n")
