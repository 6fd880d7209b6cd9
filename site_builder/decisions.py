"""The index of decisions, from the pages of docs/decisions/ and what stands at their beginnings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from site_builder.links import DOCS, ROOT

FOLDER = "decisions/"
INDEX = f"{FOLDER}index.md"
ROOMS = {
    "files": "Files, stores and references",
    "data": "From text to rows",
    "model": "The encoder",
    "objectives": "What is minimised",
    "training": "Training",
    "cluster": "Workers and clusters",
    "tasks": "Tasks and metrics",
    "export": "Export and engines",
    "serving": "Serving",
    "tests": "Tests",
}
"""Rooms of the project, in which a decision holds."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A page of docs/decisions/."""

    page: str
    title: str
    date: str
    room: str

    @classmethod
    def all(cls) -> Iterator["Decision"]:
        """By date. Raises: KeyError for a room that is not in `ROOMS`."""
        found = []
        for path in (ROOT / DOCS / FOLDER).glob("*.md"):
            _, head, body = path.read_text(encoding="utf-8").split("---\n", 2)
            meta = yaml.safe_load(head)
            title = body.strip().partition("\n")[0].removeprefix("# ")
            decision = cls(page=path.name, title=title, date=str(meta["date"]), room=meta["room"])
            assert decision.room in ROOMS, f"{path}: room {decision.room}, wanted one of {[*ROOMS]}"
            found.append(decision)
        yield from sorted(found, key=lambda each: (each.date, each.page))


def nav() -> list[Any]:
    """The index, and a section per room."""
    pages: dict[str, list[dict[str, str]]] = {room: [] for room in ROOMS}
    for each in Decision.all():
        pages[each.room].append({each.title.replace("`", ""): FOLDER + each.page})
    return [INDEX, *({title: pages[room]} for room, title in ROOMS.items())]


def index() -> str:
    lines = [
        "# Decisions",
        "",
        "What was decided, instead of what, and why: a page each, by the room in which it holds.",
        "[Design](../design.md) shows the rooms. A decision that is taken back keeps its page,",
        "which then says so.",
    ]
    decisions = [*Decision.all()]
    for room, title in ROOMS.items():
        lines += ["", f"## {title}", "", "| date | decision |", "|---|---|"]
        lines += [
            f"| {_unbroken(each.date)} | [{each.title}]({each.page}) |"
            for each in decisions
            if each.room == room
        ]
    return "\n".join(lines) + "\n"


def _unbroken(date: str) -> str:
    return date.replace("-", "\N{NON-BREAKING HYPHEN}")


def headed(markdown: str, meta: Mapping[str, Any]) -> str:
    """A decision's text with its date and room below the title."""
    title, _, rest = markdown.strip().partition("\n")
    return f"{title}\n\n*{ROOMS[meta['room']]} · {meta['date']}*\n{rest}\n"
