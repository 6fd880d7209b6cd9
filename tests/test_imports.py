"""The house rules that a parse can check, over every source file.

Which package and which room may import which is for import-linter (`make lint`, contracts in
pyproject.toml); here is what it cannot say.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("bert_core", "tracking", "pipelines", "serve", "raybert")

# What comes from elsewhere and must not come in.
FORBIDDEN = {"bert_core": {"http.client", "urllib.request"}}  # other parts of both may
PICKLES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "ray.cloudpickle", "shelve"}
PICKLE_CALLS = {"torch.load", "torch.save"}
MAY_READ_ENVIRONMENT = (
    "bert_core/storage/config.py",
    "pipelines/runtime/cluster.py",
    "pipelines/runtime/nodes.py",
    "pipelines/runtime/ray_token.py",
    "tracking/",
    "serve/cluster/haproxy_launcher.py",
    "serve/cluster/pass_of_proxy.py",
)
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
    if name.split(".")[0] in ("tests", "benchmarks"):
        yield "the packages stand alone"
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


def test_every_file_keeps_the_import_rules() -> None:
    paths = sources()
    assert len(paths) > 250
    found = [
        breach for path in paths for breach in breaches(path, (ROOT / path).read_text("utf-8"))
    ]
    assert found == []


def test_the_tests_shadow_no_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("pipelines/prepare.py", "import benchmarks.prepare", "the packages stand alone"),
        ("bert_core/files.py", "from urllib.request import urlopen", "bert_core is free of"),
        ("serve/app.py", "from ray import serve", "wants `from ray import serve as ray_serve`"),
        ("serve/app.py", "from ray import serve as s", "wants `from ray import serve"),
        ("serve/app.py", "import ray.serve", "wants `from ray import serve as ray_serve`"),
        ("serve/app.py", "import os\nos.environ['A']", "environment variables are read in"),
        ("pipelines/vocab.py", "import os\nx = os.getenv('A')", "environment variables"),
        ("pipelines/vocab.py", "from os import environ", "environment variables are read in"),
        ("bert_core/bundle/format.py", "import pickle", "our formats hold no pickle"),
        ("pipelines/tune.py", "from ray import cloudpickle", "our formats hold no pickle"),
        ("bert_core/train/checkpoint.py", "torch.save(x, y)", "our formats hold no pickle"),
        ("bert_core/scores.py", "torch.load(x, weights_only=False)", "our formats hold no pickle"),
    ],
)  # fmt: skip
def test_a_breach_is_found(path: str, source: str, reason: str) -> None:
    assert any(reason in breach for breach in breaches(path, source)), breaches(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("bert_core/files.py", "from urllib.parse import quote"),
        ("pipelines/runtime/cluster.py", "import os\nos.environ['A'] = 'b'"),
        ("bert_core/bundle/format.py", "torch.load(path, weights_only=True)"),
        ("serve/app.py", "from ray import serve as ray_serve\nfrom ray.serve.config import X"),
    ],
)
def test_permitted_imports_are_not_breaches(path: str, source: str) -> None:
    assert breaches(path, source) == []


def test_data_tasks_and_every_config_load_without_torch_or_ray() -> None:
    """Also through what they import: data workers start fast, help and errors are instant."""
    modules = [
        path.removesuffix(".py").replace("/", ".")
        for path in sources()
        if path.startswith(("bert_core/data/", "bert_core/tasks/")) or _holds_a_config(ROOT / path)
    ]
    assert len(modules) > 5, modules
    assert_loads_without({"torch", "ray", "mlflow"}, modules)


def test_the_front_and_the_commands_of_serving_load_without_torch() -> None:
    """Only what computes takes the time and the memory."""
    assert_loads_without({"torch", "mlflow"}, ["serve.cluster.deployments", "serve.app"])


def test_what_serves_and_predicts_loads_without_torch() -> None:
    """Only weights need it: a replica of a graph does without."""
    modules = ["bert_core.predictor", "serve.cluster.model_table", "pipelines.predict"]
    assert_loads_without({"torch", "mlflow", "pandas"}, modules)


def test_training_in_the_calling_process_loads_without_ray() -> None:
    """Which takes a second of a command that asks for no workers."""
    modules = [
        "pipelines.training.driver",
        "pipelines.training.worker",
        "pipelines.training.labelled_batches",
        "pipelines.training.shard_batches",
        "pipelines.training.seeds",
    ]
    assert_loads_without({"ray", "mlflow", "pandas", "torch._dynamo"}, modules)


def assert_loads_without(heavy: set[str], modules: list[str]) -> None:
    program = (
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = {heavy} & sys.modules.keys()\n"
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
