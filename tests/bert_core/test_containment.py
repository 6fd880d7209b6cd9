"""No name and no link leads out of a folder, through any door that reads one."""

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bert_core.bundle.format import bundle_digest, bundle_files, load_bundle
from bert_core.bundle.listing import needed_files
from bert_core.bundle.record import renew
from bert_core.containment import check_name, file_in, has_file
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import FormatError
from bert_core.inference.predictor import Predictor
from bert_core.manifest import Manifest, Output, read_manifest, write_manifest
from bert_core.tasks.text_classification import TextClassification
from tests import tiny

OUTSIDE = ("../secret", "a/../../secret", "/etc/hostname", "", ".", "..", "a//b", "a/", "a\\..\\b")
DOORS: dict[str, Callable[[Path], object]] = {
    "load": load_bundle,
    "digest": bundle_digest,
    "list": bundle_files,  # what is published and uploaded
    "predict": Predictor,
    "tokenizer": Tokenizer.load,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "bundle"
    return tiny.bundle(folder, tiny.tokenizer(), task=TextClassification(["a", "b"]))


@pytest.fixture
def foreign(whole: Path, tmp_path: Path) -> Path:
    """A folder as transformers writes it, with a secret beside it."""
    folder = shutil.copytree(whole, tmp_path / "foreign")
    (folder / "raybert.json").unlink()
    (tmp_path / "secret").write_text("{}")
    return folder


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leaves_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="index: wanted names of files in the folder, got"):
        check_name(name, "index")
    with pytest.raises(FormatError, match="wanted names of files in the folder, got"):
        file_in(tmp_path, name)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname"])
@pytest.mark.parametrize("door", ["load", "digest", "list", "predict"])
def test_a_name_in_a_record_or_an_index_stays_in_the_folder(
    door: str, name: str, whole: Path, foreign: Path, tmp_path: Path
) -> None:
    ours = shutil.copytree(whole, tmp_path / "ours")
    record = json.loads((ours / "raybert.json").read_text())
    record["files"][name] = "0" * 64
    del record["digest"]
    (ours / "raybert.json").write_text(json.dumps(record | {"format_version": 1}))
    (foreign / "model.safetensors").unlink()
    index = {"weight_map": {"a": name}}
    (foreign / "model.safetensors.index.json").write_text(json.dumps(index))
    for folder in (ours, foreign):
        with pytest.raises(FormatError, match=f"wanted names of files in the folder, got '{name}'"):
            DOORS[door](folder)
    for contents, names in ((record, ["raybert.json"]), (index, ["model.safetensors.index.json"])):
        with pytest.raises(FormatError, match=f"wanted names of files in the folder, got '{name}'"):
            needed_files(names, {names[0]: contents}.__getitem__)
    with pytest.raises(FormatError, match="wanted names of files in the folder"):
        renew(ours)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "special_tokens_map.json", "tokenizer_config.json"]
)
def test_a_link_stays_in_the_folder(door: str, name: str, foreign: Path, tmp_path: Path) -> None:
    (foreign / name).rename(tmp_path / name)
    (foreign / name).symlink_to(f"../{name}")
    with pytest.raises(FormatError, match=rf"{name}: wanted a file in the folder, .* \(cp -rL\)"):
        DOORS[door](foreign)
    copy = tmp_path / "copy"
    assert os.system(f"cp -rL {foreign} {copy}") == 0
    DOORS[door](copy)
    (copy / name).rename(copy / "elsewhere")
    (copy / name).symlink_to("elsewhere")
    DOORS[door](copy)


def test_the_links_of_the_hubs_cache_are_followed_to_its_blobs_alone(
    foreign: Path, tmp_path: Path
) -> None:
    model = tmp_path / "models--owner--name"
    snapshot = model / "snapshots" / ("4" * 40)
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for path in foreign.iterdir():
        path.rename(model / "blobs" / f"sha-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/sha-{path.name}")
    for door in DOORS.values():
        door(snapshot)
    (model / "blobs" / "sha-vocab.txt").unlink()
    (model / "blobs" / "sha-vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(
        FormatError, match=r"vocab\.txt: wanted a file in the folder, got a link to"
    ):
        bundle_files(snapshot)


@pytest.fixture(params=["pipe", "folder", "socket"])
def odd(request: pytest.FixtureRequest, foreign: Path) -> Iterator[str]:
    """A name in a folder that is no regular file."""
    (foreign / "tokenizer_config.json").unlink()
    if request.param == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            here = os.getcwd()
            os.chdir(foreign)  # a socket's path has at most 107 bytes
            listening.bind("tokenizer_config.json")
            os.chdir(here)
            yield "a device or socket"
        return
    make = os.mkfifo if request.param == "pipe" else os.mkdir
    make(foreign / "tokenizer_config.json")
    yield {"pipe": "a named pipe", "folder": "a folder"}[request.param]


def test_special_files_are_refused_without_waiting(odd: str, foreign: Path) -> None:
    for door in DOORS.values():
        with pytest.raises(
            FormatError, match=f"tokenizer_config.json: wanted a regular file, got {odd}"
        ):
            door(foreign)


def test_a_name_that_no_disk_can_have_is_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name in ("a" * 300, "\ud800", "loop", "loop/a"):
        assert not has_file(tmp_path, name)


def test_a_manifest_names_only_files_in_its_folder(tmp_path: Path) -> None:
    for name in OUTSIDE:
        outputs = {name: Output(size_bytes=0, sha256="")}
        write_manifest(
            str(tmp_path), Manifest(stage="prepare", digest="", config={}, outputs=outputs)
        )
        with pytest.raises(
            FormatError, match=r"manifest.json: .*outputs: wanted names of files in"
        ):
            read_manifest(str(tmp_path))
