"""A tiny bundle for the server's tests: real formats and code, weights drawn at random."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from jaxtyping import config as checks

from bert_core.bundle.format import load_bundle, save_bundle
from bert_core.bundle.layout import GRAPHS
from bert_core.cache import FOLDER
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.vocabulary import train_vocabulary
from bert_core.export import export_graph
from bert_core.predictor import Predictor
from bert_core.tasks.base import Task
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.sparse_embedding import SparseEmbedding
from bert_core.tasks.text_classification import TextClassification
from tests import tiny
from tests.serve import live

TEXTS = [
    "Return the sorted values of an array along an axis.",
    "Open a socket and listen on a port for requests.",
    "Parse a string as JSON and return the object.",
    "The quick brown fox jumps over the lazy dog.",
]


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Downloads, and what servers remember, in a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer.from_vocabulary(
        train_vocabulary(TEXTS, vocab_size=200, lowercase=True, min_frequency=1), lowercase=True
    )
    # Weights far from zero, so that texts get scores of their own.
    config = tiny.encoder_config(
        tokenizer.vocab_size, max_position_embeddings=128, initializer_range=0.5
    )
    return tiny.bundle(
        tmp_path_factory.mktemp("serve") / "bundle",
        tokenizer,
        config,
        task=TextClassification(["json", "numpy", "socket"]),
        metrics={"accuracy": 0.75},
        seed=7,
    )


LABELS = {
    "token-classification": ["B-place", "I-place", "O"],
    "text-classification": ["json", "numpy", "socket"],
}


@pytest.fixture(scope="session")
def bundles(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bundle per task, all with the same tokenizer."""
    loaded, folder = load_bundle(bundle), tmp_path_factory.mktemp("bundles")
    tasks: dict[str, Task] = {
        name: task(LABELS.get(name, [])) for name, task in TASKS.items() if task.trainable
    }
    tasks["nli"] = TextClassification(["contradiction", "entailment", "neutral"])
    tasks["sparse-embedding"] = SparseEmbedding()
    return {
        name: tiny.bundle(folder / name, loaded.tokenizer, loaded.encoder_config, task=task, seed=7)
        for name, task in tasks.items()
    }


@pytest.fixture(scope="session")
def front(bundles: dict[str, Path]) -> Iterator[str]:
    """URL of a live server of a model per task, named like its task."""
    with live.fronted(bundles) as url:
        yield url


@pytest.fixture(scope="session")
def exported(bundle: Path) -> Path:
    """The same with an ONNX graph."""
    predictor, folder = Predictor(bundle, device="cpu"), bundle.parent / "exported"
    checks.update("jaxtyping_disable", True)  # sizes are symbols while it is traced
    try:
        save_bundle(
            folder,
            predictor.model,
            predictor.bundle.tokenizer,
            task=predictor.task,
            metrics={},
            lineage={},
            graph=(GRAPHS["fp32"], partial(export_graph, predictor.model)),
        )
    finally:
        checks.update("jaxtyping_disable", False)
    return folder
