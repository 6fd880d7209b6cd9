"""Every command in the README runs.

Fences marked ```bash run from top to bottom in a folder with texts and labelled rows, with fewer
steps of training. The targets of `make` are CI's to run. A line that ends in `&` is a server: the
next line waits until it answers, and the end of the fence ends it. Ports are replaced by free ones.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import toml

from pipelines.configure import STAGES
from tracking.store.ports import free_ports

ROOT = Path(__file__).parents[1]
BASH = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAKE = re.compile(r"^make (demo|test|drill)\b.*\n", re.MULTILINE)
# What a server listens on unless it is told, and where it says that it is up.
SERVERS = {"raybert serve": (8000, "readyz"), "raybert ui": (5000, "health")}

PROLOGUE = """\
set -euo pipefail
trap 'jobs -p | xargs -r kill; wait' EXIT
wait_for() {
    until curl -sf -o /dev/null "$1"; do
        kill -0 $! || { echo "$1 does not answer"; exit 1; }
        sleep 0.2
    done
}
"""

TRAINED = ["--epochs", "0.1", "--max_length", "16"]
FEWER = {
    "vocab": ["--vocab_size", "400"],
    "prepare": ["--pairs.dupe_factor", "1"],
    "pretrain": ["--loop.max_steps", "2", "--schedule.warmup_steps", "1", "--held_out_rows", "8"],
    "continue": ["--epochs", "0.05", "--held_out_rows", "8"],
    "finetune": TRAINED,
    "distill": TRAINED,
}
"""Options that are put after those of a command, and so come before them."""
TEXT = "text.txt"
ROWS = {"train": "rows.jsonl", "held_out": "rows.jsonl"}
SMALL: dict[str, dict[str, Any]] = {
    "vocab": {"vocab_size": 400, "corpus": {"source": TEXT}},
    "prepare": {"shard_bytes": 65536, "corpus": {"source": TEXT}},
    "pretrain": {"global_batch_size": 8, "micro_batch_tokens": 512, "loop": {"max_steps": 2}}
    | {"schedule": {"warmup_steps": 1}, "held_out_rows": 8},
    "finetune": {"epochs": 1.0, "rows_per_class": 8, "batch_size": 8, "seeds": [0]}
    | {name: {"source": path} for name, path in ROWS.items()},
    "evaluate": {"held_out": {"source": "rows.jsonl"}},
    "publish": {},
}


def scripts(readme: str, ports: dict[int, int]) -> list[str]:
    """Each fence, as it is to be run; `ports` says which stand for which."""
    found = []
    for text in BASH.findall(readme):
        text = MAKE.sub("", text)
        for usual, free in ports.items():
            text = re.sub(rf"(127\.0\.0\.1|localhost):{usual}\b", rf"\1:{free}", text)
        lines = [_waiting(_shorter(line), ports) for line in _commands(text)]
        found.append(PROLOGUE + "\n".join(lines))
    return found


def _commands(text: str) -> list[str]:
    """Lines, with those that a backslash continues joined."""
    return text.replace("\\\n", " ").splitlines()


def _shorter(line: str) -> str:
    """A stage with fewer steps, and without Ray unless it is a job."""
    words = line.split()
    if not words or words[0] != "raybert" or not (stages := [w for w in words[1:3] if w in STAGES]):
        return line
    fewer = [*FEWER.get(stages[0], []), "--num_workers", "1" if "submit" in words else "0"]
    return f"{line} {shlex.join(fewer)}"


def _waiting(line: str, ports: dict[int, int]) -> str:
    server = next((known for known in SERVERS if known in line), None)
    if server is None or not line.endswith("&"):
        return line
    usual, path = SERVERS[server]
    start = f"{line.removesuffix('&')} --port {ports[usual]} &"
    return f"{start}\nwait_for http://127.0.0.1:{ports[usual]}/{path}"


def small_checkout(folder: Path, *, num_workers: int = 0) -> None:
    """A folder with what the commands need: `.venv`, configs made small, text and labelled rows."""
    (folder / ".venv").symlink_to(sys.prefix)
    shutil.copytree(ROOT / "configs", folder / "configs")
    for word, changes in SMALL.items():
        for path in (folder / "configs" / word).glob("*.toml"):
            settings = tomllib.loads(path.read_text())
            for name, value in changes.items():
                settings[name] = (
                    settings.get(name, {}) | value if isinstance(value, dict) else value
                )
            for name in changes.keys() & {"corpus", "train", "held_out"}:
                # a job runs in another folder
                settings[name]["source"] = str(folder / settings[name]["source"])
            path.write_text(toml.dumps(settings | {"num_workers": num_workers}))
    write_texts_and_rows(folder / TEXT, folder / "rows.jsonl")


def write_texts_and_rows(texts: Path, labelled: Path) -> None:
    rows = [
        {"text": text, "label": library}
        for library in ("asyncio", "email", "unittest")
        for text in _docstrings(library)
    ]
    texts.write_text("\n\n".join(row["text"] for row in rows))
    labelled.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _docstrings(library: str) -> list[str]:
    """What the functions of a package of the standard library say they do, each once."""
    found: dict[str, None] = {}
    for path in sorted((Path(os.__file__).parent / library).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                found[" ".join(text.split())] = None
    return list(found)


def run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command[2]}\n\nended with {done.returncode}:\n{done.stdout}"


@pytest.mark.guard
def test_every_command_in_the_readme_runs(tmp_path: Path, head: Any) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    environment = dict(head.environment)
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "texts").mkdir()
    write_texts_and_rows(tmp_path / "texts" / TEXT, tmp_path / "train.jsonl")
    shutil.copy(tmp_path / "train.jsonl", tmp_path / "test.jsonl")
    usual = [port for port, _ in SERVERS.values()]
    ports = dict(zip(usual, free_ports(len(usual)), strict=True))
    found = scripts(readme, ports)
    assert found, "README.md shows no command in a ```bash fence"
    for script in found:
        run(["bash", "-c", script], tmp_path, environment)


def test_a_fence_is_run_as_it_stands_but_for_make_ports_servers_and_steps() -> None:
    readme = (
        "```bash\nmake demo   # minutes\necho a \\\n  b\nraybert vocab --config x.toml\n"
        "raybert submit pretrain --output y\n"
        "raybert serve --models m=x &\ncurl http://127.0.0.1:8000/v1\n```\n"
        "```text\nnot run\n```\n"
    )
    (script,) = scripts(readme, {8000: 1234, 5000: 1235})
    assert script.removeprefix(PROLOGUE).splitlines() == [
        "echo a    b",
        "raybert vocab --config x.toml --vocab_size 400 --num_workers 0",
        f"raybert submit pretrain --output y {shlex.join(FEWER['pretrain'])} --num_workers 1",
        "raybert serve --models m=x  --port 1234 &",
        "wait_for http://127.0.0.1:1234/readyz",
        "curl http://127.0.0.1:1234/v1",
    ]
