"""What is installed is what pyproject.toml says, pinned, and nothing else comes along."""

import re
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

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


def all_requirements() -> list[str]:
    extras = PROJECT["optional-dependencies"].values()
    return [*PROJECT["dependencies"], *(line for lines in extras for line in lines)]


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
    assert folders == {"bert_core", "pipelines", "serve", "tracking"}
    assert "pipelines/runtime/ray_data_logging.yaml" in names
    page = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("serve/page/**/*.*")}
    assert {*page, "serve/page/vendor/LICENSE", "tracking/palette.css"} <= set(names)
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


def test_the_changelog_and_the_release_notes_tell_of_this_version() -> None:
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
