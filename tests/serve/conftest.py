"""Tiny bundles for the server's tests: real formats and code, weights drawn at random; and the live
servers that tests share."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.serve import live
from tests.serve.live import Server

if TYPE_CHECKING:
    from tests.serve.faults import Mortal

TEXTS = [
    "Return the sorted values of an array along an axis.",
    "Open a socket and listen on a port for requests.",
    "Parse a string as JSON and return the object.",
    "The quick brown fox jumps over the lazy dog.",
]


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Downloads, and what servers remember, in a folder of the tests."""
    from bert_core.cache import FOLDER

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from bert_core.data.tokenizer import Tokenizer
    from bert_core.data.vocabulary import train_vocabulary
    from bert_core.tasks.text_classification import TextClassification
    from tests import tiny

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
    "relation-classification": ["Origin(e1,e2)", "Origin(e2,e1)", "Other"],
    "span-classification": ["person", "place"],
    "text-classification": ["json", "numpy", "socket"],
}


@pytest.fixture(scope="session")
def bundles(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bundle per task, all with the same tokenizer."""
    from bert_core.bundle.format import load_bundle
    from bert_core.tasks.base import Task
    from bert_core.tasks.catalog import TASKS
    from bert_core.tasks.minimal_pairs import MinimalPairs
    from bert_core.tasks.sparse_embedding import SparseEmbedding
    from bert_core.tasks.text_classification import TextClassification
    from tests import tiny

    loaded, folder = load_bundle(bundle), tmp_path_factory.mktemp("bundles")
    tasks: dict[str, Task] = {
        name: task(LABELS.get(name, [])) for name, task in TASKS.items() if task.trainable
    }
    tasks["nli"] = TextClassification(["contradiction", "entailment", "neutral"])
    tasks["sparse-embedding"] = SparseEmbedding()
    tasks["minimal-pairs"] = MinimalPairs()
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
def apart(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A live server of two models, each in a process of its own behind a front: `docs`, and
    `other`, which is slow, and may be asked for more. Otherwise nothing is changed from how users
    start it."""
    config = (
        f'[models]\ndocs = "{bundle}"\n[models.other]\nmodel = "{bundle}"\nmax_batch_tokens = 64\n'
        "limits.max_inputs = 4096\nlimits.max_request_tokens = 1_000_000\n"
        "limits.max_queue_tokens = 1_000_000\n"
    )
    with live.running_alone(tmp_path_factory.mktemp("apart"), config=config) as server:
        yield server


@pytest.fixture(scope="session")
def together(
    bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A live server of a model per task, all in one process, which no test ends.

    A pass has one text, so that answers are the same to the last bit, whoever else asks.
    """
    options = ("--max_batch_tokens", "8", "--limits.body_timeout_s", "10")
    folder = tmp_path_factory.mktemp("together")
    with live.running_together(bundles, folder, *options) as server:
        yield server


FOLLOWING = (
    "text-classification",
    "token-classification",
    "question-answering",
    "feature-extraction",
    "fill-mask",
)
"""The tasks whose models are named by an alias in `separate`."""


@dataclass(frozen=True)
class Separate:
    """A live server of a model per task, each in a process of its own behind a front."""

    server: Server
    versions: dict[str, dict[str, Path]]
    """A model's bundles, by its name and their versions."""
    tracking_uri: str

    def point(self, name: str, version: str) -> None:
        """Move the alias of a model of `FOLLOWING`."""
        from tracking.store.server import connect

        connect(self.tracking_uri).set_registered_model_alias(name, "champion", version)


@pytest.fixture(scope="session")
def separate(
    bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Separate]:
    """For tests that leave its processes as they were."""
    from bert_core.bundle.format import load_bundle
    from tests import tiny
    from tracking.models.registry import Release, publish
    from tracking.store.server import connect

    folder = tmp_path_factory.mktemp("separate")
    versions = {name: {"1": bundle} for name, bundle in bundles.items()}
    uri = f"sqlite:///{folder}/mlflow.db"
    for name in FOLLOWING:
        loaded = load_bundle(bundles[name])
        assert loaded.task is not None
        versions[name]["2"] = tiny.bundle(
            folder / name, loaded.tokenizer, loaded.encoder_config, task=loaded.task, seed=8
        )
        for bundle in versions[name].values():
            example = list(loaded.task.examples)
            publish(Release(bundle=bundle, name=name, metrics={}, input_example=example), uri=uri)
        connect(uri).set_registered_model_alias(name, "champion", "1")
    models = [
        f"{name}={f'models:/{name}@champion' if name in FOLLOWING else bundle}"
        for name, bundle in bundles.items()
    ]
    options = ("--num_cpus", "0.1", "--follow_s", "1", "--tracking_uri", uri)
    with live.running_alone(folder, "--models", *models, *options) as server:
        yield Separate(server, versions, uri)


@pytest.fixture(scope="session")
def versions(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles by their versions: 1, 2 and 4 are sound and give other answers, 3 fails late."""
    from tests.serve import faults

    return faults.versions_of(bundle, tmp_path_factory.mktemp("versions"))


@pytest.fixture(scope="session")
def mortal_server(
    bundle: Path, versions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[Mortal]":
    """The live server whose processes, registry and disk tests take away. The disk of its downloads
    is a small one, where this process may mount one."""
    from tests.mlflow_server import Server as Registry
    from tests.serve import faults
    from tracking.models.registry import Release, publish
    from tracking.store.ports import free_ports

    cache = tmp_path_factory.mktemp("cache")
    command = ["mount", "-t", "tmpfs", "-o", f"size={faults.DISK_BYTES}", "tmpfs", str(cache)]
    is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    registry = Registry(tmp_path_factory.mktemp("registry"))
    folder, (port,) = tmp_path_factory.mktemp("mortal"), free_ports(1)
    alone, wide = (tmp_path_factory.mktemp(name) / "bundle" for name in (faults.ALONE, faults.WIDE))
    bundles = {
        faults.ALONE: faults.another(bundle, alone),
        faults.WIDE: faults.wide_bundle(bundle, wide),
    }
    mortal = faults.Mortal(registry, cache, folder, port, bundles)
    try:
        registry.start()
        for version in versions.values():
            publish(
                Release(bundle=version, name=faults.DOCS, metrics={}, input_example=faults.SHORT),
                uri=registry.uri,
            )
        mortal.start()
        yield mortal
    finally:
        mortal.stop()
        registry.stop()
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(cache)], check=True)


@pytest.fixture(scope="session")
def exported(bundle: Path) -> Path:
    """The same with an ONNX graph."""
    from jaxtyping import config as checks

    from bert_core.bundle.format import About
    from bert_core.bundle.layout import GRAPHS
    from bert_core.bundle.writing import Graph, save_bundle
    from bert_core.inference.export import export_graph
    from bert_core.inference.predictor import Predictor

    predictor, folder = Predictor(bundle, device="cpu"), bundle.parent / "exported"
    checks.update("jaxtyping_disable", True)  # sizes are symbols while it is traced
    try:
        save_bundle(
            folder,
            predictor.model,
            predictor.bundle.tokenizer,
            About(task=predictor.task),
            Graph(name=GRAPHS["fp32"], write=partial(export_graph, predictor.model)),
        )
    finally:
        checks.update("jaxtyping_disable", False)
    return folder
