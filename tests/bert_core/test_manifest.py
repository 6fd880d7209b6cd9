"""The manifest, which makes a folder complete."""

import json
from pathlib import Path

import pytest

from bert_core.errors import FormatError
from bert_core.manifest import (
    FORMAT_VERSION,
    NAME,
    Manifest,
    Output,
    is_complete,
    read_manifest,
    stage_digest,
    write_manifest,
)

MANIFEST = Manifest(
    stage="prepare",
    digest="ab",
    config={"seed": 0, "pairs": {"max_length": 128}},
    inputs={"corpus": "cd"},
    outputs={"a.arrow": Output(size_bytes=3, sha256="ef")},
    counts={"rows": 3, "loss": 0.5},
    code_version="0.1.0",
)


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path, object_store: str) -> None:
    for folder in (str(tmp_path), f"{object_store}/run"):
        assert not is_complete(folder)
        write_manifest(folder, MANIFEST)
        assert is_complete(folder)
        assert read_manifest(folder) == MANIFEST


def test_an_output_is_described_by_its_size_and_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    output = Output.of(str(tmp_path / "a"))
    assert output.size_bytes == 3
    assert output.sha256.startswith("ba7816bf")  # FIPS 180-2, appendix B.1


def test_the_digest_is_over_stage_config_and_inputs_whatever_their_order() -> None:
    digest = stage_digest("prepare", {"seed": 0, "pairs": {"a": 1, "b": 2}}, {"x": "1", "y": "2"})
    same = stage_digest("prepare", {"pairs": {"b": 2, "a": 1}, "seed": 0}, {"y": "2", "x": "1"})
    assert digest == same
    others = {
        stage_digest("vocab", {"seed": 0}, {}),
        stage_digest("prepare", {"seed": 0}, {}),
        stage_digest("prepare", {"seed": 1}, {}),
        stage_digest("prepare", {"seed": 0}, {"corpus": "1"}),
        stage_digest("prepare", {}, {}),
    }
    assert len(others) == 5


def test_a_folder_without_a_manifest_is_unfinished(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(
            FormatError, match=f"{folder}: wanted the folder of a finished stage, it has no man"
        ):
            read_manifest(str(folder))


def test_a_newer_manifest_is_refused(tmp_path: Path) -> None:
    newer = {"format_version": FORMAT_VERSION + 1, "anything": "else"}
    (tmp_path / NAME).write_text(json.dumps(newer))
    with pytest.raises(
        FormatError,
        match=f"{NAME}: wanted format_version {FORMAT_VERSION} or older, got {FORMAT_VERSION + 1}: "
        "it was made by a newer raybert",
    ):
        read_manifest(str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"format_version": 1, "stage": ',
        "\xff",
        "[]",
        "{}",
        '{"format_version": "1"}',
        '{"format_version": 1}',
        '{"format_version": 1, "outputs": []}',
        '{"format_version": 1, "outputs": {"a": {"size_bytes": 1}}}',
        '{"format_version": 1, "outputs": {}, "stage": "x"}',
    ],
)
def test_a_damaged_manifest_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(
        FormatError,
        match=rf"{tmp_path}/{NAME}: wanted a raybert manifest, this one cannot be read \(.*\): run",
    ):
        read_manifest(str(tmp_path))
