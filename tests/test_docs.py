"""What documents show: the walk of docs/bert_from_scratch.md runs as it stands, but for fewer steps
of training; what docs/operations.md and SECURITY.md tell people to do can be done."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from bert_core.bundle.layout import RECORD, read_json
from bert_core.files import write_json
from bert_core.tasks.text_classification import TextClassification
from pipelines.configure import ALL, parser_for
from tests import tiny
from tests.test_readme import PROLOGUE
from tracking.models.registry import Release, champion, publish

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(bash|python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:ray|raybert|make) [^`]+)`")
LINK = re.compile(r"\]\(([^)#]*)(#[^)]*)?\)")
OPERATIONS, SECURITY = (ROOT / name for name in ("docs/operations.md", "SECURITY.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STEPS = re.compile(r"^STEPS = \d+$", re.MULTILINE)

ALONE = """\
import sys
sys.modules["ray"] = sys.modules["mlflow"] = None  # importing them fails
"""
CHECKS = """\
assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 1, losses
assert after["mlm"] < before["mlm"] - 1, (before, after)
assert [one["token"] for one in answer] == best.tolist()
assert Path("attention.png").stat().st_size > 10_000
assert abs(seen.weights.sum(-1) - 1).max() < 1e-5
"""


@pytest.mark.drill
def test_the_walk_ends_with_an_answer_and_a_picture_without_ray_and_mlflow(tmp_path: Path) -> None:
    walk = (ROOT / "docs" / "bert_from_scratch.md").read_text(encoding="utf-8")
    program, shortened = STEPS.subn("STEPS = 120", "\n".join(BLOCK.findall(walk)))
    assert shortened == 1
    done = subprocess.run(
        [sys.executable, "-c", ALONE + program + CHECKS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def fences(document: Path, *languages: str, section: str = "") -> list[tuple[str, str]]:
    text = document.read_text(encoding="utf-8")
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = FENCE.findall(text)
    return [(language, text) for language, text in found if language in languages]


def commands(document: Path) -> list[list[str]]:
    """The words of every command of ray, raybert and make that a document shows, but for blocks
    that are run and `raybert <word>`."""
    texts = [text.replace("\\\n", " ") for _, text in fences(document, "text")]
    lines = [line for text in texts for line in text.splitlines()]
    prose = FENCE.sub("", document.read_text(encoding="utf-8"))
    lines += [" ".join(each.split()) for each in INLINE.findall(prose)]
    found = [shlex.split(line, comments=True) for line in lines]
    found = [[word for word in words if "=" not in word or word[0] == "-"] for words in found]
    return [
        [Path(words[0]).name, *words[1:]]
        for words in found
        if len(words) > 1
        and Path(words[0]).name in ("ray", "raybert", "make")
        and words[1][0] != "<"
    ]


def options_of(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


@pytest.mark.guard
def test_operations_from_rolling_back_to_restoring_run_as_they_stand(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/runs/mlflow.db"
    tokenizer = tiny.tokenizer(tiny.pieces(tiny.ALPHABET))
    task = TextClassification(["ham", "spam"])
    for seed in range(2):
        bundle = tiny.bundle(tmp_path / f"{seed}", tokenizer, task=task, seed=seed)
        publish(
            Release(bundle=bundle, name="docstrings", metrics={}, input_example=["abc"]),
            uri=store,
            force=True,
        )
    before = champion("docstrings", uri=store)
    assert before is not None
    assert before.version == "2"
    shown = run(fences(OPERATIONS, "bash", "python"), tmp_path)
    after = champion("docstrings", uri=store)
    assert after is not None
    assert after.version == "1"  # rolled back, lost and restored
    assert "revoked the key of alice:" in shown
    assert (tmp_path / "runs/restored.html").stat().st_size > 1_000


def run(blocks: list[tuple[str, str]], folder: Path) -> str:
    """What blocks print, which all must succeed, in a folder with `runs/mlflow.db`."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAYBERT_CACHE": str(folder / "cache"),  # so that the bundle is read from the registry
    }
    shown = ""
    for language, text in blocks:
        program = ["bash", "-c", PROLOGUE + text] if language == "bash" else ["python", "-c", text]
        done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        shown += done.stdout
    return shown


@pytest.mark.guard
def test_examples_withdrawn_as_operations_describes_are_gone(tmp_path: Path) -> None:
    about: dict[str, Any] = {
        "name": "docstrings", "metrics": {}, "input_example": ["abc"],
    }  # fmt: skip
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    tokenizer = tiny.tokenizer(tiny.pieces(tiny.ALPHABET))
    task = TextClassification(["ham", "spam"])
    for seed in range(2):
        row = f"row {seed}"
        folder = tmp_path / f"{seed}"
        bundle = tiny.bundle(folder, tokenizer, task=task, seed=seed, examples=[row])
        publish(Release(bundle=bundle, **about), uri=uri, force=True)
    record = read_json(bundle / RECORD)
    del record["examples"]
    write_json(str(bundle / RECORD), record)
    assert not publish(Release(bundle=bundle, **about), uri=uri).is_new, (
        "its digest is that of version 2"
    )
    assert stored_examples(tmp_path / "runs") == ["row 0", "row 1"]
    run(fences(OPERATIONS, "bash", "python", section="Withdraw examples"), tmp_path)
    assert stored_examples(tmp_path / "runs") == ["row 0"]
    again = publish(Release(bundle=bundle, **about), uri=uri)
    assert (again.version.version, again.is_new, again.is_champion) == ("3", True, True)
    assert stored_examples(tmp_path / "runs") == ["row 0"]


def stored_examples(folder: Path) -> list[str]:
    """The examples of all bundles in a folder and its subfolders."""
    records = [read_json(path) for path in folder.rglob(RECORD)]
    return sorted(example for record in records for example in record.get("examples", ()))


@pytest.mark.parametrize("document", [OPERATIONS, SECURITY], ids=lambda path: path.name)
def test_every_command_that_is_not_run_exists_with_its_options(document: Path) -> None:
    from ray.scripts.scripts import cli

    targets = re.findall(r"^([^\s:=]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets.append(".venv/installed")
    found = commands(document)
    assert found
    for program, word, *rest in found:
        if program == "make":
            assert word in targets
        elif program == "raybert":
            known = {name for each in parser_for(word)._actions for name in each.option_strings}
            assert word in ALL
            assert set(options_of(rest)) <= known, (word, rest)
        else:
            command = cli.commands[word]
            if isinstance(command, click.Group):
                command, rest = command.commands[rest[0]], rest[1:]
            known = {name for each in command.params for name in each.opts}
            assert set(options_of(rest)) <= known, (word, rest)


@pytest.mark.parametrize("document", [OPERATIONS, SECURITY], ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    for path, anchor in LINK.findall(document.read_text(encoding="utf-8")):
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", each).lower().replace(" ", "-") for each in headings}
            assert anchor.removeprefix("#") in slugs, f"{path}{anchor}"


def test_commands_of_a_block_do_not_stand_in_prose() -> None:
    """Without its indentation, the first line of a block is shown as a sentence."""
    lost = []
    for document in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        text = re.sub(r"^```.*?^ *```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
        found = re.findall(r"^(?:raybert \w+ .*--|pip install |export \w+=).*", text, re.MULTILINE)
        lost += [f"{document.name}: {line}" for line in found]
    assert lost == []


def test_every_alert_is_in_the_table_of_operations_with_its_severity() -> None:
    files = [ROOT / "deploy/prometheus" / name for name in ("alerts.yml", "cluster_alerts.yml")]
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    rules = [rule for group in groups for rule in group["rules"]]
    table = re.findall(
        r"^\| \[(\w+)\]\(runbook\.md#\w+\) \|.*\| (\w+) \|$",
        OPERATIONS.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert table == [(rule["alert"], rule["labels"]["severity"]) for rule in rules]
