"""The import rule and the house rules that a parse can check, over every source file."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("bert_core", "tracking", "pipelines", "serve")

# Which packages a package may import, beside itself.
MAY_IMPORT = {
    "bert_core": set(),
    "tracking": {"bert_core"},
    "pipelines": {"bert_core", "tracking"},
    "serve": {"bert_core", "tracking"},
}
# The same for the parts of bert_core.
BASE = {"errors", "files", "manifest"}
MAY_IMPORT_INSIDE = {
    "errors": set(),
    "files": {"errors"},
    "manifest": {"errors", "files"},
    "data": BASE,
    "model": BASE,
    "metrics": BASE,
    "objectives": BASE | {"model"},
    "batches": BASE | {"data", "objectives"},
    "scores": BASE | {"batches", "data", "objectives"},
    "graph": BASE | {"batches", "objectives", "scores"},
    "export": BASE | {"graph", "objectives", "scores"},
    "train": BASE | {"batches", "data", "model", "objectives", "scores"},
    "tasks": BASE | {"data", "metrics", "model", "objectives"},
    "bundle": BASE | {"data", "metrics", "model", "objectives", "tasks"},
    "predictor": BASE
    | {"batches", "bundle", "data", "graph", "metrics", "model", "objectives", "scores", "tasks"},
    "inspection": BASE | {"batches", "data", "model", "objectives", "tasks"},
    "augmentation": BASE | {"bundle", "data", "predictor", "tasks"},
}
# What comes from elsewhere and must not come in.
NETWORK = {"aiohttp", "ftplib", "http.client", "httpx", "requests", "socket", "urllib.request"}
FORBIDDEN = {
    "bert_core": {"ray", "mlflow"} | NETWORK,
    "bert_core/data": {"torch"},
    "tracking": {"ray"},
}
PICKLES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "ray.cloudpickle", "shelve"}
PICKLE_CALLS = {"torch.load", "torch.save"}
MAY_READ_ENVIRONMENT = ("pipelines/runtime/cluster.py", "tracking/")
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def imported_names(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted absolute name of everything imported, wherever in the file it stands."""
    package = path.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = [*above, *([node.module] if node.module else [])]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called, first = ast.unparse(node.func), node.args[0]
            by_name = called.split(".")[-1] in ("import_module", "__import__")
            if by_name and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def breaches(path: str, source: str) -> list[str]:
    """What in a file breaks the rules, one line each; `path` is relative to the repository."""
    tree = ast.parse(source)
    found = [
        f"{path}:{line} imports {name}: {reason}"
        for line, name in imported_names(path, tree)
        for reason in _import_breaches(path, name)
    ]
    safe = {id(call.func) for call in ast.walk(tree) if _loads_tensors_only(call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and not _names_ray_serve_well(node):
            found.append(f"{path}:{node.lineno} wants `from ray import serve as ray_serve`")
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in ENVIRONMENT and not path.startswith(MAY_READ_ENVIRONMENT):
                found.append(f"{path}:{node.lineno} uses {name}: {_environment_rule()}")
            if name in PICKLE_CALLS and id(node) not in safe:
                found.append(f"{path}:{node.lineno} uses {name}: our formats hold no pickle")
    return found


def _loads_tensors_only(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether this is `torch.load(…, weights_only=True)`, which runs no code of the file."""
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "torch.load"
        and any(
            one.arg == "weights_only" and ast.unparse(one.value) == "True" for one in node.keywords
        )
    )


def _environment_rule() -> str:
    return f"environment variables are read in {', '.join(MAY_READ_ENVIRONMENT)} only"


def _import_breaches(path: str, name: str) -> Iterator[str]:
    package, imported = path.split("/")[0], name.split(".")[0]
    allowed = {package, *MAY_IMPORT[package]}
    dispatch = path == "pipelines/cli.py" and within(name, "serve.app")
    if imported in PACKAGES and imported not in allowed and not dispatch:
        yield f"{package} may import {sorted(MAY_IMPORT[package])}"
    if imported in ("tests", "benchmarks"):
        yield "the packages stand alone"
    if within(name, "pipelines.cli"):
        yield "nothing imports the command line"
    if package == imported == "bert_core" and "." in name:
        part, other = (Path(path).with_suffix("").parts[1], name.split(".")[1])
        if part != other and other not in MAY_IMPORT_INSIDE.get(part, set()):
            yield f"bert_core/{part} may import {sorted(MAY_IMPORT_INSIDE.get(part, set()))}"
    for place, names in FORBIDDEN.items():
        if path.startswith(f"{place}/") and any(within(name, other) for other in names):
            yield f"{place} is free of {', '.join(sorted(names))}"
    if any(within(name, other) for other in PICKLES):
        yield "our formats hold no pickle"
    if name in ENVIRONMENT and not path.startswith(MAY_READ_ENVIRONMENT):
        yield _environment_rule()


def _names_ray_serve_well(node: ast.Import | ast.ImportFrom) -> bool:
    """Plain `serve` is ours, in every file."""
    if isinstance(node, ast.Import):
        return all(alias.name != "ray.serve" for alias in node.names)
    return node.module != "ray" or all(
        alias.asname == "ray_serve" for alias in node.names if alias.name == "serve"
    )


def sources() -> list[str]:
    return sorted(
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    )


@pytest.mark.parametrize("path", sources())
def test_a_file_keeps_the_import_rule(path: str) -> None:
    assert breaches(path, (ROOT / path).read_text(encoding="utf-8")) == []


def test_every_part_of_bert_core_has_its_place_in_the_rule() -> None:
    parts = {Path(path).with_suffix("").parts[1] for path in sources() if path[:4] == "bert"}
    assert parts - {"__init__"} <= MAY_IMPORT_INSIDE.keys()


def test_the_rule_names_nothing_that_is_not_there() -> None:
    parts = {f"bert_core/{part}" for part in MAY_IMPORT_INSIDE}
    places = [*MAY_READ_ENVIRONMENT, *FORBIDDEN, *parts]
    there = [(ROOT / one).exists() or (ROOT / f"{one}.py").exists() for one in places]
    assert [one for one, exists in zip(places, there, strict=True) if not exists] == []


def test_the_tests_hijack_no_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("bert_core/bundle.py", "from tracking.runs import x", "bert_core may import []"),
        ("tracking/runs.py", "import pipelines.runtime.stage", "tracking may import ['bert_core']"),
        ("tracking/runs.py", "def f():\n    import ray", "tracking is free of ray"),
        ("pipelines/commands/quickstart.py", "from serve.app import x", "pipelines may import"),
        ("pipelines/commands/quickstart.py", "import_module('serve.app')", "pipelines may import"),
        ("pipelines/cli.py", "from serve import batching", "pipelines may import"),
        ("serve/app.py", "from pipelines.runtime import cluster", "serve may import"),
        ("serve/app.py", "from pipelines import cli", "nothing imports the command line"),
        ("pipelines/prepare.py", "from .cli import main", "nothing imports the command line"),
        ("pipelines/prepare.py", "import benchmarks.prepare", "the packages stand alone"),
        ("bert_core/data/masking.py", "import torch.nn", "bert_core/data is free of torch"),
        ("bert_core/predictor.py", "from ray import train", "bert_core is free of"),
        ("bert_core/predictor.py", "import mlflow", "bert_core is free of"),
        ("bert_core/files.py", "from urllib.request import urlopen", "bert_core is free of"),
        ("bert_core/model/hf.py", "from bert_core.data import tokenizer", "bert_core/model may"),
        ("bert_core/model/hf.py", "from ..data import tokenizer", "bert_core/model may"),
        ("bert_core/train/loop.py", "from bert_core.tasks.base import Task", "bert_core/train may"),
        ("bert_core/objectives/mlm.py", "import bert_core.tasks", "bert_core/objectives may"),
        ("bert_core/errors.py", "from bert_core import files", "bert_core/errors may import []"),
        ("bert_core/new.py", "from bert_core import errors", "bert_core/new may import []"),
        ("serve/app.py", "from ray import serve", "wants `from ray import serve as ray_serve`"),
        ("serve/app.py", "from ray import serve as s", "wants `from ray import serve"),
        ("serve/app.py", "import ray.serve", "wants `from ray import serve as ray_serve`"),
        ("serve/app.py", "import os\nos.environ['A']", "environment variables are read in"),
        ("pipelines/vocab.py", "import os\nx = os.getenv('A')", "environment variables"),
        ("pipelines/vocab.py", "from os import environ", "environment variables are read in"),
        ("bert_core/bundle.py", "import pickle", "our formats hold no pickle"),
        ("pipelines/tune.py", "from ray import cloudpickle", "our formats hold no pickle"),
        ("bert_core/train/checkpoint.py", "torch.save(x, y)", "our formats hold no pickle"),
        ("bert_core/bundle.py", "torch.load(x, weights_only=False)", "our formats hold no pickle"),
    ],
)  # fmt: skip
def test_a_breach_is_found(path: str, source: str, reason: str) -> None:
    assert any(reason in breach for breach in breaches(path, source)), breaches(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("bert_core/predictor.py", "from bert_core.bundle import load_bundle\nimport torch"),
        ("bert_core/data/shards.py", "from bert_core import files\nfrom .order import x"),
        ("bert_core/train/loop.py", "from bert_core.objectives.base import Part\nimport torch"),
        ("bert_core/files.py", "from urllib.parse import quote"),
        ("pipelines/cli.py", "from serve.app import run\nfrom serve import app"),
        ("pipelines/runtime/cluster.py", "import os\nos.environ['A'] = 'b'"),
        ("bert_core/bundle.py", "torch.load(path, weights_only=True)"),
        ("serve/app.py", "from ray import serve as ray_serve\nfrom ray.serve.config import X"),
        ("serve/app.py", "from tracking.resolve import resolve\nfrom serve import api"),
    ],
)
def test_what_the_rule_allows_is_no_breach(path: str, source: str) -> None:
    assert breaches(path, source) == []


def test_data_tasks_and_every_config_load_without_torch_or_ray() -> None:
    """Also through what they import: data workers start fast, help and errors are instant."""
    modules = [
        path.removesuffix(".py").replace("/", ".")
        for path in sources()
        if path.startswith(("bert_core/data/", "bert_core/tasks/")) or _holds_a_config(ROOT / path)
    ]
    assert len(modules) > 5, modules
    program = (
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'ray', 'mlflow'} & sys.modules.keys()\n"
        "    assert not heavy, f'{name} brings in {heavy}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr


def _holds_a_config(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.ClassDef) and node.name.endswith("Config") for node in tree.body
    )
