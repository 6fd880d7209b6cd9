"""Every command in the README runs.

Fences marked ```bash run from top to bottom in a checkout of their own, on configs that are made
small, and ```python fences with it. The targets of `make` are CI's to run. A line that ends in `&`
is a server: the next line waits until it answers, and the end of the fence ends it. Ports are
replaced by free ones.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import toml

from tracking.ports import free_ports

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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

TEXT = "text.txt"
ROWS = {"train": "rows.jsonl", "held_out": "rows.jsonl"}
SMALL: dict[str, dict[str, Any]] = {
    "vocab": {"vocab_size": 400, "corpus": {"source": TEXT}},
    "prepare": {"shard_bytes": 65536, "corpus": {"source": TEXT}},
    "pretrain": {"global_batch_size": 8, "micro_batch_tokens": 512, "loop": {"max_steps": 2}}
    | {"schedule": {"warmup_steps": 1}, "held_out_rows": 8},
    "finetune": {"epochs": 1.0, "rows_per_class": 8, "seeds": [0]}
    | {name: {"source": path} for name, path in ROWS.items()},
    "evaluate": {"held_out": {"source": "rows.jsonl"}},
    "publish": {},
}


def scripts(readme: str, ports: dict[int, int]) -> list[tuple[str, str]]:
    """Language and text of each fence, as it is to be run; `ports` says which stand for which."""
    found = []
    for language, text in FENCE.findall(readme):
        text = MAKE.sub("", text)
        for usual, free in ports.items():
            text = re.sub(rf"(127\.0\.0\.1|localhost):{usual}\b", rf"\1:{free}", text)
        if language == "bash":
            text = PROLOGUE + "\n".join(_waiting(line, ports) for line in _commands(text))
        found.append((language, text))
    return found


def _commands(text: str) -> list[str]:
    """Lines, with those that a backslash continues joined."""
    return text.replace("\\\n", " ").splitlines()


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
    rows = [
        {"text": text, "label": library}
        for library in ("asyncio", "email", "unittest")
        for text in _docstrings(library)
    ]
    (folder / TEXT).write_text("\n\n".join(row["text"] for row in rows))
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


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


@pytest.mark.ray
def test_every_command_in_the_readme_runs(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name[:3] != "RAY"}
    if "raybert submit" in readme:
        environment = request.getfixturevalue("head").environment
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    small_checkout(tmp_path)
    usual = [port for port, _ in SERVERS.values()]
    ports = dict(zip(usual, free_ports(len(usual)), strict=True))
    found = scripts(readme, ports)
    assert found, "README.md shows no command in a ```bash fence"
    for language, script in found:
        interpreter = "bash" if language == "bash" else "python"
        run([interpreter, "-c", script], tmp_path, environment)


def test_a_fence_is_run_as_it_stands_but_for_make_ports_and_servers() -> None:
    readme = (
        "```bash\nmake demo   # minutes\necho a \\\n  b\n"
        ".venv/bin/raybert serve --models m=x &\ncurl http://127.0.0.1:8000/v1\n```\n"
        "```text\nnot run\n```\n```python\nprint(8000)\n```\n"
    )
    (_, bash), (language, python) = scripts(readme, {8000: 1234, 5000: 1235})
    assert bash.removeprefix(PROLOGUE).splitlines() == [
        "echo a    b",
        ".venv/bin/raybert serve --models m=x  --port 1234 &",
        "wait_for http://127.0.0.1:1234/readyz",
        "curl http://127.0.0.1:1234/v1",
    ]
    assert (language, python) == ("python", "print(8000)\n")
