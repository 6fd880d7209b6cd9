"""What the code tells people to run exists, with its options."""

import ast
import importlib
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from packaging.requirements import Requirement

from pipelines.configure import ALL, parser_for

ROOT = Path(__file__).parent.parent
COMMAND = re.compile(r"`raybert ([a-z][^`]*)`")
# A program with its arguments, or a call; pip also where nothing marks it.
PROGRAM = re.compile(r"`((?:[A-Z_]+=\S+ )?[a-z.…_-]+(?: |\()[^`\n]+)`|\b(pip install [^`:;,)]+)")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*[a-z]")


def texts_of(path: Path) -> Iterator[str]:
    """The strings of a module but for docstrings, with … for what is filled in."""
    apart = set[int]()  # docstrings, and the parts of strings with something filled in
    for node in ast.walk(ast.parse(path.read_text())):  # parents first
        if isinstance(node, ast.Expr):
            apart.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            apart.update(map(id, node.values))
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
            )
        elif isinstance(node, ast.Constant) and id(node) not in apart:
            yield str(node.value)


# NOTE: what is read here is read in the tests, by one process; cases of their own would have every
# process of a run read all modules while it collects.
@cache
def texts() -> frozenset[str]:
    packages = ("bert_core", "tracking", "pipelines", "raybert", "serve")
    paths = (path for package in packages for path in (ROOT / package).rglob("*.py"))
    return frozenset(text for path in paths for text in texts_of(path))


def commands() -> set[str]:
    """What follows `raybert` in them."""
    return {command for text in texts() for command in COMMAND.findall(text)}


def commands_of_others() -> set[str]:
    found = {match[1] or match[2] for text in texts() for match in PROGRAM.finditer(text)}
    return {command for command in found if not command.startswith("raybert")}


@cache
def options_of(word: str) -> frozenset[str]:
    return frozenset(name for each in parser_for(word)._actions for name in each.option_strings)


def test_a_command_that_the_code_names_exists_with_its_options() -> None:
    told = commands()
    assert {"finetune", "list tasks", "publish --hub owner/name"} <= told
    for command in told:
        word, *rest = command.split()
        assert word in ALL, command
        options = {part.partition("=")[0] for part in rest if part.startswith("--")}
        assert options - {"--…"} <= options_of(word), command


# Programs of others that messages name → where their command line is, as click has it.
CLICK = {
    "ray": "ray.scripts.scripts:cli",
    "serve": "ray.serve.scripts:cli",
    "mlflow": "mlflow.cli:cli",
    "hf": "huggingface_hub.cli.hf:app",
}
# What a system has or lacks → what its own help says of what is named.
SYSTEM = {"mount -o remount,size": "-o, --options", "timedatectl set-ntp true": "set-ntp BOOL"}
# Calls that tests/bert_core/data/test_remedies.py runs.
RUN = ("csv.writer(", "pandas.read_excel(", "pyarrow.parquet.write_table(", "….to_json(", "iconv ")
# Options of programs that are named apart from them.
OPTIONS_OF = {
    "--allowed-hosts": "mlflow server",
    "--serve-artifacts": "mlflow server",
    "--cacert": "curl",
    "--shm-size": "docker run",
    "--short": "git rev-parse",
    "--field": "an example",
    "--version": "raybert itself",
}


@cache
def click_command(program: str) -> Any:
    module, _, name = CLICK[program].partition(":")
    return getattr(importlib.import_module(module), name)


def check_click(words: list[str]) -> None:
    command = click_command(words[0])
    for word in words[1:]:
        if word.startswith("--"):
            options = {name for each in command.params for name in each.opts + each.secondary_opts}
            assert word in options, f"{word} is none of {options}"
        elif hasattr(command, "commands"):
            command = command.get_command(click.Context(command), word)
            assert command is not None, word


def check_pip(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().split()}
    for word in words[2:]:
        if extra := re.fullmatch(r"\.\[(\w+)\]", word):
            assert extra[1] in project["optional-dependencies"]
        elif word == "constraints.txt":
            assert (ROOT / word).exists()
        elif word not in ("--constraint", "-e", ".", "…", ".[…]"):
            assert Requirement(word).name in pinned, "which is how it is tested here"


def check_other(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    if "=" in words[0]:
        words = words[1:]
    if command.startswith((*RUN, *SYSTEM)) or words == ["…", "--help"]:
        return
    if words[0] in CLICK:
        check_click(words)
    elif words[0] == "pip":
        check_pip(words)
    elif words[:2] == ["chmod", "600"]:
        path = tmp_path / "key"
        path.touch(0o644)
        subprocess.run([*words[:2], path], check=True)
        assert path.stat().st_mode & 0o777 == 0o600
    else:
        assert words[0] == "list", f"no test knows `{command}`: check it here, or run it"
        assert "list" in ALL


def test_a_command_of_another_program_exists_with_its_options(tmp_path: Path) -> None:
    others = commands_of_others()
    assert {"ray get-auth-token --generate", "hf auth login", "chmod 600 …"} <= others
    assert any(command.startswith("pip install --constraint") for command in others)
    for command in others:
        check_other(command, tmp_path)


@pytest.mark.parametrize("command", SYSTEM)
def test_a_command_of_the_system_exists_with_its_options(command: str) -> None:
    assert any(other.startswith(command) for other in commands_of_others())
    program = command.split()[0]
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} here")
    told = subprocess.run([program, "--help"], capture_output=True, text=True, check=True)
    assert SYSTEM[command] in told.stdout


def test_every_option_that_a_message_names_is_one_of_a_command() -> None:
    known = {name for word in ALL for name in options_of(word)}
    for text in texts():
        apart = PROGRAM.sub("", text) if " " in text else ""  # a program's argument, otherwise
        for option in OPTION.findall(apart):
            keys = any(
                option.startswith(f"{name}.")
                for name in known
                if name.endswith(("adapter", "columns", "options", "parameters"))
            )
            assert option in known or keys or option in OPTIONS_OF, text
    for option, program in OPTIONS_OF.items():
        if program.split()[0] in CLICK:
            check_click([*program.split(), option])
