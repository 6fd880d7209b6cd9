"""The built-in corpus: held-out modules share no docstring with training ones."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bert_core.data.docstrings import normalised
from bert_core.tasks.text_classification import OneLabel
from bert_core.tasks.texts import TextInput
from pipelines import prepare, vocab
from pipelines.corpus import docstrings
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.docstrings import DocstringsConfig
from pipelines.corpus.labelled import LabelledConfig, labelled_rows
from pipelines.corpus.sources import list_corpus
from pipelines.prepare import PrepareConfig
from pipelines.vocab import VocabConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with the corpus of the short modules of two libraries and the standard library."""
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("corpus")
        patch.chdir(place)
        patch.setattr(docstrings, "LARGEST_MODULE_BYTES", 12_000)
        patch.setattr(docstrings, "LIBRARIES", {"networkx": "networkx", "numpy": "numpy"})
        # As `docstrings.corpus` finds it from then on; the quickstart has workers make it.
        config = DocstringsConfig(output=docstrings.folder(), num_workers=0)
        manifest = docstrings.run(config)
        assert manifest.counts["duplicates_left_out"] > 0
        yield place


def test_no_module_and_no_docstring_is_in_both_splits(folder: Path) -> None:
    (file,) = list_corpus(CorpusConfig()).files
    rows = pq.read_table(file.path).to_pylist()
    assert {row["library"] for row in rows} == {"networkx", "numpy", "python"}
    modules: dict[str, set[str]] = {"train": set(), "held_out": set()}
    paragraphs: dict[str, set[str]] = {"train": set(), "held_out": set()}
    for row in rows:
        modules[row["split"]].add(row["module"])
    assert modules["train"]
    assert modules["held_out"]
    assert not modules["train"] & modules["held_out"]
    for split in modules:
        lines = Path(docstrings.labelled_file(split)).read_text().splitlines()
        labelled = [json.loads(line) for line in lines]
        assert {row["module"] for row in labelled} <= modules[split]
        paragraphs[split] = {normalised(row["text"]) for row in labelled}
        assert len(paragraphs[split]) == len(labelled), "no opening twice"
    assert not paragraphs["train"] & paragraphs["held_out"]
    shapes = (TextInput, OneLabel)
    first = labelled_rows(LabelledConfig(source="docstrings"), "held_out", shapes).rows[0]
    assert first.keys() == {"text", "label"}


def test_pairs_are_summaries_with_what_follows_them(folder: Path) -> None:
    for split in ("train", "held_out"):
        lines = Path(docstrings.pairs_file(split)).read_text().splitlines()
        pairs = [json.loads(line) for line in lines]
        assert pairs
        assert all(pair.keys() == {"text", "text_pair"} for pair in pairs)
        assert all(len(pair["text"]) >= 20 <= len(pair["text_pair"]) for pair in pairs)


def test_held_out_modules_are_in_no_training_shard(folder: Path) -> None:
    """Preparing the training modules alone gives the same training shards, byte for byte."""
    shared = {"num_workers": 0, "tracking_uri": f"sqlite:///{folder}/runs/mlflow.db"}
    vocab.run(VocabConfig(output="runs/vocab", vocab_size=2000, **shared))  # type: ignore[arg-type]
    prepare.run(PrepareConfig(output="runs/all", tokenizer="runs/vocab", **shared))  # type: ignore[arg-type]
    (file,) = list_corpus(CorpusConfig()).files
    rows = pq.read_table(file.path).to_pylist()
    texts = [row for row in rows if row["split"] == "train"]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    alone = PrepareConfig(
        output="runs/alone",
        tokenizer="runs/vocab",
        corpus=CorpusConfig(source="train.jsonl", held_out_share=0.0),
        **shared,  # type: ignore[arg-type]
    )
    prepare.run(alone)
    (both,) = Path("runs/all").glob("train-*.arrow")
    (one,) = Path("runs/alone").glob("train-*.arrow")
    assert both.read_bytes() == one.read_bytes()
    assert list(Path("runs/all").glob("held_out-*.arrow"))
