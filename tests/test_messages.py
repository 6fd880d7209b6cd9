"""What the code tells people to run exists, with its options."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.configure import ALL, parser_for

ROOT = Path(__file__).parent.parent
COMMAND = re.compile(r"`raybert ([a-z][^`]*)`")


def texts_of(path: Path) -> Iterator[str]:
    """The strings of a module but for docstrings, with … for what is filled in."""
    tree = ast.parse(path.read_text())
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
             for part in node.values}  # fmt: skip
    notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
            )
        elif isinstance(node, ast.Constant) and id(node) not in parts | notes:
            yield str(node.value)


TOLD = sorted(
    {
        command
        for package in ("bert_core", "tracking", "pipelines", "serve")
        for path in (ROOT / package).rglob("*.py")
        for text in texts_of(path)
        for command in COMMAND.findall(text)
    }
)


@pytest.mark.parametrize("command", TOLD)
def test_a_command_that_the_code_names_exists_with_its_options(command: str) -> None:
    word, *rest = command.split()
    assert word in ALL
    options = {part.partition("=")[0] for part in rest if part.startswith("--")}
    known = {name for each in parser_for(word)._actions for name in each.option_strings}
    assert options <= known


def test_commands_are_found() -> None:
    assert {"finetune", "list tasks", "publish --hub owner/name"} <= {*TOLD}
