"""The guides of docs/guides/ do what they say: their commands run one after the other, in one
process, on fewer rows and with fewer steps, and the changes of `extend.md` apply and work."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bert_core.manifest import read_manifest
from pipelines.cli import main
from pipelines.configure import ALL, STAGES, parser_for
from tests.test_readme import FEWER, scripts
from tracking.models.registry import champion
from tracking.store.ports import free_ports

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "docs" / "guides"
ORDER = (
    "index",
    "prepare",
    "pretrain",
    "continue",
    "finetune",
    "imbalance",
    "adapters",
    "tune_distill",
    "evaluate_publish",
    "answer",
    "search",
    "retrieval",
    "python",
)
"""The guides whose commands build on each other."""
FENCE = re.compile(r"^```(bash|python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SEARCHED = ["--max_length", "16", "--search.space", '{"lr": [5e-4], "epochs": [0.1]}']
COPIED = ("bert_core", "pipelines", "raybert", "serve", "tracking", "tests")
CHECKS = """
assert len(picked) == 10 and all(b - a == 1 for a, b in picked.reshape(5, 2).tolist()), picked
assert parameters == 2_090_560, parameters
assert documents[0].text == "Where is the sea?\\nBehind the tree.", documents
assert stars[0].keys() == {"score", "stars"} and 1 <= stars[0]["stars"] <= 5, stars
assert described["description"] == "The most probable label of each text.", described
"""


def fences(guide: str, *languages: str) -> list[tuple[str, str]]:
    text = (GUIDES / f"{guide}.md").read_text(encoding="utf-8")
    return [(language, body) for language, body in FENCE.findall(text) if language in languages]


def as_one_script(guide: str) -> str:
    """The blocks of a guide, those in Python as well, as one block of the shell."""
    ported = [
        text if language == "bash" else f"python - <<'END'\n{text}END\n"
        for language, text in fences(guide, "bash", "python")
    ]
    return "```bash\n" + "".join(ported) + "```\n"


def keep_few(folder: Path) -> None:
    """Cut what the guides work on: 8,000 characters per text, every 20th row."""
    for path in folder.glob("texts/*.txt"):
        path.write_text(path.read_text()[:8000])
    for path in folder.glob("*.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[::20]))


@pytest.mark.drill
def test_the_guides_go_from_texts_to_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # A guide sets MLflow's URI for its process, and with it the variable: both are undone.
    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    ran: list[str] = []
    for guide in ORDER:
        for language, text in fences(guide, "bash", "python"):
            if language == "python":
                exec(compile(text, f"{guide}.md", "exec"), {})
                continue
            for line in text.replace("\\\n", " ").splitlines():
                program, word, *rest = shlex.split(line, comments=True)
                assert program == "raybert", line
                fewer = SEARCHED if word == "tune" else FEWER.get(word, [])
                alone = ["--num_workers", "0"] if word in {*STAGES, "continue"} else []
                with pytest.raises(SystemExit) as ended:
                    main([word, *rest, *fewer, *alone])
                assert ended.value.code == 0, f"{line}\n{capsys.readouterr()}"
                ran.append(word)
        if guide == "index":
            keep_few(tmp_path)
    assert {*ran} >= STAGES.keys() - {"export", "extract", "glue"}
    rows = len(Path("test.jsonl").read_text().splitlines())
    assert read_manifest("runs/mine/answers").counts["rows"] == rows
    assert read_manifest("runs/mine/found").counts["queries"] == rows
    assert champion("packages", uri=f"sqlite:///{tmp_path}/runs/mlflow.db") is not None
    assert Path("runs/mine/inspect.html").stat().st_size > 10_000
    answered = serve_as_shown(tmp_path)
    assert re.search(r'^\[\[\{"label": ?"\w+", ?"score"', answered, re.MULTILINE), answered
    assert "TextClassificationOutputElement(label=" in answered
    assert "FillMaskOutputElement(" in answered
    assert re.search("^401$", answered, re.MULTILINE), answered


def serve_as_shown(folder: Path) -> str:
    """What the commands of the guide on serving print, which need a server between them."""
    (script,) = scripts(as_one_script("serve"), {8000: free_ports(1)[0]})
    ours = ("RAY", "MKL_CBWR")  # which users do not set
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    clean |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**clean, "RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.drill
def test_the_changes_that_extend_shows_apply_and_work(tmp_path: Path) -> None:
    for folder in COPIED:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.pyc"))
    changes = "".join(text for _, text in fences("extend", "diff"))
    applied = subprocess.run(
        ["git", "apply", "--verbose"], input=changes, cwd=tmp_path, capture_output=True, text=True
    )
    assert applied.returncode == 0, applied.stderr
    program = "\n".join(text for _, text in fences("extend", "python"))
    done = subprocess.run(
        [sys.executable, "-c", program + CHECKS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    style = ["check", "--isolated", "--select=E,F", "--line-length=100", "--ignore=F722,F821"]
    new = re.findall(r"^\+\+\+ b/(.*)$", changes, re.MULTILINE)
    checked = subprocess.run(
        [sys.executable, "-m", "ruff", *style, *new], cwd=tmp_path, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("guide", sorted(GUIDES.glob("*.md")), ids=lambda path: path.stem)
def test_every_command_of_a_guide_exists_with_its_options(guide: Path) -> None:
    from tests.test_docs import commands, options_of

    for program, word, *rest in commands(guide):
        if program == "raybert":
            known = {name for each in parser_for(word)._actions for name in each.option_strings}
            used = {name for name in options_of(rest) if not name.startswith("--options.")}
            held = {name for name in used if name.startswith(("--held_out.", "--then."))}
            assert word in ALL
            assert used - held <= known, (word, rest)
