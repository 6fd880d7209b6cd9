"""The calls in docs/serving/clients.md give the answers that stand there.

```console fences are run by bash, a command per `$`; ```pycon fences by Python, all in one session.
What they print is compared without regard to white space, and numbers with a tolerance, since
models that are trained on another machine differ in the last digits.
"""

import contextlib
import doctest
import io
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import InferenceClient

from bert_core.tasks.catalog import TASKS
from pipelines.configure import parse
from serve.config import ServeConfig
from tests.serve import example_models, live

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving" / "clients.md"
SERVER = "http://127.0.0.1:8000"
FENCE = re.compile(r"^```(console|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+\.\d*(?:e[+-]?\d+)?|-?\d+e[+-]?\d+")
WORD = re.compile(rf"{NUMBER.pattern}|\w+|\S")
TOLERANCE = 0.02


@dataclass(frozen=True)
class Call:
    """A command or statements, and what they print."""

    language: str
    source: str
    shown: str


def sections(document: str) -> dict[str, str]:
    """The text of each task's section, and of what is before them under ``."""
    [chapter] = re.findall(r"^## Every task\n(.*?)(?=^## )", document, re.MULTILINE | re.DOTALL)
    first, *others = re.split(r"^### ", chapter, flags=re.MULTILINE)
    return {"": first, **dict(other.split("\n", 1) for other in others)}


def calls(section: str) -> Iterator[Call]:
    for language, text in FENCE.findall(section):
        if language == "pycon":
            for example in doctest.DocTestParser().get_examples(text):
                yield Call(language, example.source, example.want)
        else:
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                lines = part.splitlines(keepends=True)
                # The command ends with the first line that leaves nothing open.
                end = next(
                    number
                    for number in range(1, len(lines) + 1)
                    if not lines[number - 1].endswith("\\\n")
                    and "".join(lines[:number]).count("'") % 2 == 0
                )
                yield Call(language, "".join(lines[:end]), "".join(lines[end:]))


def printed(call: Call, url: str, session: dict[str, Any]) -> str:
    """What a call prints when it is run against a server at another address."""
    source = call.source.replace(SERVER, url)
    if call.language == "console":
        done = subprocess.run(["bash", "-c", source], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(source, str(DOCUMENT), "single"), session)
    return output.getvalue()


def differs(came: str, shown: str) -> str | None:
    """The first difference; None if there is none that counts."""
    ours, theirs = WORD.findall(came), WORD.findall(shown)
    for one, other in zip(ours, theirs, strict=False):
        if NUMBER.fullmatch(one) and NUMBER.fullmatch(other):
            if abs(float(one) - float(other)) > TOLERANCE:
                return f"{one} for {other}"
        elif one != other:
            return f"{one} for {other}"
    return None if len(ours) == len(theirs) else f"{len(ours)} words for {len(theirs)}"


SECTIONS = sections(DOCUMENT.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    return example_models.write(folder)


@pytest.fixture(scope="module")
def server(models: dict[str, Path]) -> Iterator[str]:
    with live.fronted(models) as url:
        yield url


@pytest.mark.drill
@pytest.mark.parametrize("task", TASKS)
def test_the_calls_of_a_task_give_the_answers_that_stand_there(task: str, server: str) -> None:
    session: dict[str, Any] = {}
    for call in [*calls(SECTIONS[""]), *calls(SECTIONS[task])]:
        came = printed(call, server, session)
        difference = differs(came, call.shown)
        assert difference is None, f"{difference}:\n{call.source}{came}instead of\n{call.shown}"


@pytest.mark.drill
def test_the_config_that_is_written_beside_the_models_serves_them(
    folder: Path, models: dict[str, Path]
) -> None:
    config = parse("serve", ["--config", str(folder / "serve.toml")])
    assert isinstance(config, ServeConfig)
    assert {entry.partition("=")[0] for entry in config.models} == models.keys()


@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_called_in_every_way_that_there_is(task: str) -> None:
    section = SECTIONS[task]
    method = task.replace("-", "_")
    assert "$ curl --json" in section
    assert (f"client.{method}(" in section) == hasattr(InferenceClient, method)
    assert ("openai." in section) == (task == "feature-extraction")
    assert all(call.shown for call in calls(section) if "=" not in call.source.split("(")[0])


def test_a_fence_is_split_into_calls_and_compared_with_a_tolerance() -> None:
    section = (
        "```console\n$ echo a \\\n    b\na b\n$ echo 'c\n   d'\nc d\n```\n"
        "```pycon\n>>> x = 0.25\n>>> [x,\n...  1]\n[0.26, 1]\n```\n"
    )
    session: dict[str, Any] = {}
    found = list(calls(section))
    assert [call.shown for call in found] == ["a b\n", "c d\n", "", "[0.26, 1]\n"]
    assert [differs(printed(call, "", session), call.shown) for call in found] == [None] * 4
    assert differs("[0.25, 1]", "[0.29, 1]") == "0.25 for 0.29"
    assert differs("[0.25, 1]", "[0.25, 2]") == "1 for 2"
    assert differs("[1.2e-05]", "[\n  0.0\n]") is None
    assert differs("a b", "a") == "2 words for 1"
