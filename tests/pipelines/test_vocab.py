"""The vocabulary is the same bytes for any number of workers and in every process."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bert_core.errors import CorpusError
from bert_core.manifest import read_manifest
from pipelines import prepare, vocab
from pipelines.corpus.config import CorpusConfig
from tests.commands import raybert


def digests(folder: Path) -> dict[str, str]:
    return {name: output.sha256 for name, output in read_manifest(str(folder)).outputs.items()}


@pytest.mark.ray
@pytest.mark.drill
def test_a_fresh_process_with_two_workers_gives_the_same_bytes(
    prepared: Any, tmp_path: Path
) -> None:
    arguments = ["vocab", "--corpus.source", str(prepared.text), "--corpus.held_out_share", "0.1"]
    arguments += ["--vocab_size", "1000", "--num_workers", "2"]
    arguments += ["--tracking_uri", prepared.tracking_uri, "--output", str(tmp_path / "vocab")]
    subprocess.run(raybert(*arguments), check=True, timeout=120)
    assert digests(tmp_path / "vocab") == digests(prepared.folder / "vocab")
    assert len(digests(tmp_path / "vocab")) == 4


@pytest.mark.usefixtures("forked")
def test_workers_change_nothing(prepared: Any, tmp_path: Path) -> None:
    vocab.run(replace(prepared.vocab(tmp_path / "vocab"), num_workers=2))
    assert digests(tmp_path / "vocab") == digests(prepared.folder / "vocab")


@pytest.mark.parametrize("stage", [vocab, prepare], ids=["vocab", "prepare"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "corpus.txt: wanted a file, a folder or a glob with at least one file, found none"),
        ("", "corpus.txt: wanted text, every file there is empty: check the path"),
        (
            " \n\n\t\n",
            "corpus.txt: wanted .*text.*(only empty documents|none .no document at all.): check",
        ),
    ],
    ids=["missing", "empty", "blank"],
)
def test_a_corpus_without_text_is_refused_and_nothing_looks_finished(
    prepared: Any, tmp_path: Path, stage: Any, content: str | None, message: str
) -> None:
    path = tmp_path / "corpus.txt"
    if content is not None:
        path.write_text(content)
    make = prepared.vocab if stage is vocab else prepared.prepare
    config = replace(make(tmp_path / "out"), corpus=CorpusConfig(source=str(path)))
    with pytest.raises(CorpusError, match=message):
        stage.run(config)
    written = [path.name for path in (tmp_path / "out").glob("*")]
    assert "manifest.json" not in written
    assert not written or content  # the file was read before anything was written
