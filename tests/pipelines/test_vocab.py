"""The vocabulary is the same bytes for any number of workers and in every process."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bert_core.errors import CorpusError
from bert_core.manifest import read_manifest
from pipelines import vocab
from pipelines.sources import CorpusConfig


def digests(folder: Path) -> dict[str, str]:
    return {name: output.sha256 for name, output in read_manifest(str(folder)).outputs.items()}


@pytest.mark.ray
def test_a_fresh_process_with_two_workers_gives_the_same_bytes(
    prepared: Any, tmp_path: Path
) -> None:
    arguments = ["vocab", "--corpus.source", str(prepared.text), "--corpus.held_out_share", "0.1"]
    arguments += ["--vocab_size", "1000", "--num_workers", "2"]
    arguments += ["--tracking_uri", prepared.tracking_uri, "--output", str(tmp_path / "vocab")]
    subprocess.run([sys.executable, "-m", "pipelines.cli", *arguments], check=True, timeout=120)
    assert digests(tmp_path / "vocab") == digests(prepared.folder / "vocab")
    assert len(digests(tmp_path / "vocab")) == 4


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_one_worker_changes_nothing(prepared: Any, tmp_path: Path) -> None:
    vocab.run(replace(prepared.vocab(tmp_path / "vocab"), num_workers=1))
    assert digests(tmp_path / "vocab") == digests(prepared.folder / "vocab")


def test_a_missing_corpus_is_an_error_that_names_it(small: Any, tmp_path: Path) -> None:
    config = replace(small.vocab(tmp_path / "v"), corpus=CorpusConfig(source=str(tmp_path / "no")))
    with pytest.raises(CorpusError, match="no: wanted a file, a folder or a glob"):
        vocab.run(config)
    assert not (tmp_path / "v").exists()


@pytest.mark.parametrize("text", ["", " \n\n \n"])
def test_an_empty_corpus_is_an_error(small: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "empty.txt").write_text(text)
    corpus = CorpusConfig(source=str(tmp_path / "empty.txt"))
    with pytest.raises(CorpusError, match=r"empty.txt: wanted text.*(is|only) empty"):
        vocab.run(replace(small.vocab(tmp_path / "v"), corpus=corpus))
