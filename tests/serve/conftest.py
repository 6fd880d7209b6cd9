"""A tiny bundle for the server's tests: real formats and code, weights drawn at random."""

from functools import partial
from pathlib import Path

import pytest
import torch
from jaxtyping import config as checks

from bert_core.bundle.format import save_bundle
from bert_core.bundle.layout import GRAPHS
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.vocabulary import train_vocabulary
from bert_core.export import export_graph
from bert_core.model.hf import encoder_config_from_huggingface
from bert_core.objectives.base import ObjectiveModel
from bert_core.predictor import Predictor
from bert_core.tasks.text_classification import TextClassification

TEXTS = [
    "Return the sorted values of an array along an axis.",
    "Open a socket and listen on a port for requests.",
    "Parse a string as JSON and return the object.",
    "The quick brown fox jumps over the lazy dog.",
]


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    tokenizer = Tokenizer.from_vocabulary(
        train_vocabulary(TEXTS, vocab_size=200, lowercase=True, min_frequency=1), lowercase=True
    )
    config = encoder_config_from_huggingface(
        {
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 128,
            "initializer_range": 0.5,  # so that texts get scores of their own
        }
    )
    task = TextClassification(["json", "numpy", "socket"])
    model = ObjectiveModel(config, [task.build_objective(config)])
    folder = tmp_path_factory.mktemp("serve") / "bundle"
    metrics = {"accuracy": 0.75}
    save_bundle(folder, model, tokenizer, task=task, metrics=metrics, lineage={})
    return folder


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
            graph=(GRAPHS[None], partial(export_graph, predictor.model)),
        )
    finally:
        checks.update("jaxtyping_disable", False)
    return folder
