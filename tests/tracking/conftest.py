"""What the tests of tracking share: a store, and a tiny bundle."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URI of one SQLite store for all tests (making it takes seconds): experiments keep apart."""
    from tracking.store.server import connect

    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    connect(uri)  # so that no test's own time, which has limits, pays for the import of MLflow
    return uri


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three bundles of one task, alike but for their random weights."""
    from bert_core.tasks.text_classification import TextClassification
    from tests import tiny

    folder = tmp_path_factory.mktemp("bundles")
    tokenizer = tiny.tokenizer(tiny.pieces(tiny.LETTERS))
    task = TextClassification(["ham", "spam"])
    return [tiny.bundle(folder / f"{seed}", tokenizer, task=task, seed=seed) for seed in range(3)]
