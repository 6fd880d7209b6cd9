"""What the tests of tracking share: a store, and a tiny bundle."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URI of one SQLite store for all tests (making it takes seconds): experiments keep apart."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three bundles of one task, alike but for their random weights."""
    import torch

    from bert_core.bundle.format import save_bundle
    from bert_core.data.tokenizer import SPECIAL_TOKENS, Tokenizer
    from bert_core.model.hf import encoder_config_from_huggingface
    from bert_core.objectives.base import ObjectiveModel
    from bert_core.tasks.text_classification import TextClassification

    folder = tmp_path_factory.mktemp("bundles")
    letters = "abcdefgh"
    tokenizer = Tokenizer.from_vocabulary(
        [*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters)], lowercase=True
    )
    config = encoder_config_from_huggingface(
        {
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 32,
        }
    )
    task = TextClassification(["ham", "spam"])
    for seed in range(3):
        torch.manual_seed(seed)
        model = ObjectiveModel(config, [task.build_objective(config)])
        save_bundle(folder / f"{seed}", model, tokenizer, task=task, metrics={}, lineage={})
    return [folder / f"{seed}" for seed in range(3)]
