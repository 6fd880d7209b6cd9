"""The workflows of GitHub Actions, by actionlint and zizmor. Nothing is run here."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def run(*command: str | Path) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_zizmor_finds_nothing(tool: Any) -> None:
    run(tool("zizmor", "pip install '.[deploy]'"), "--offline", ".github")


def test_actionlint_finds_nothing(tool: Any) -> None:
    module = "github.com/rhysd/actionlint/cmd/actionlint@v1.7.12"
    run(tool("actionlint", f"go install {module}"), *WORKFLOWS)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_may_do_no_more_than_they_must(path: Path) -> None:
    workflow: dict[str, Any] = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["permissions"]
        assert job["timeout-minutes"]
    for action in re.findall(r"uses: (.*)", path.read_text()):
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_ci_tests_every_python_that_is_supported() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == supported


def test_workflows_run_targets_that_the_makefile_has() -> None:
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    targets = set(re.findall(r"(?:run: |sudo )make (\S+)", text))
    everyday = {".venv/installed", "lint", "test", "guard", "docs", "demo"}
    assert targets >= everyday | {"drill", "test-cluster"}
    makefile = (ROOT / "Makefile").read_text()
    assert targets <= set(re.findall(r"^([^\s:=]+):", makefile, flags=re.MULTILINE))
