"""Scores of several heads from one pass of their encoder: those of each head alone."""

from dataclasses import replace

import numpy as np
import pytest

from bert_core.data.windows import Window
from bert_core.model.config import Pooling
from bert_core.model.variants import VARIANTS
from bert_core.tasks.base import Task
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.fill_mask import FillMask
from bert_core.tasks.shapes import as_row
from bert_core.tasks.text_classification import TextClassification
from bert_core.tasks.token_classification import TokenClassification, TokenClassificationOptions
from bert_core.torch_scores import TorchBackend
from tests import tiny
from tests.exactness import TOLERANCE

TOKENIZER = tiny.tokenizer()
SIZES = tiny.encoder_config(TOKENIZER.vocab_size)
FAMILIES = {each.config.family: name for name, each in VARIANTS.items()}
"""A variant of each."""
TAGS = ["B-place", "I-place", "O"]
TASKS: list[Task] = [
    TokenClassification(TAGS),
    TextClassification(["ham", "spam"]),
    TextClassification(["long", "medium", "short"]),
    TokenClassification(TAGS, TokenClassificationOptions(feature_based=True)),
    FillMask(),
    FeatureExtraction(),
]


def texts() -> list[str]:
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 28, 25)
    return ["[MASK] " + " ".join(rng.choice(tiny.WORDS, length)) for length in lengths]


def backends(variant: str, pooling: Pooling) -> list[TorchBackend]:
    """A backend per task; the encoder is that of the first, and poolers are their own."""
    config = VARIANTS[variant].config
    pad_id = 1 if config.family == "mpnet" else TOKENIZER.pad_id
    vocab_size = TOKENIZER.vocab_size
    config = config.adapted(vocab_size=vocab_size, pad_token_id=pad_id, sizes_of=SIZES)
    config = replace(config, head=replace(config.head, pooling=pooling))
    found: list[TorchBackend] = []
    for seed, task in enumerate(TASKS):
        model = tiny.model(config, task.build_objective, seed=seed, noise=0.1).eval()
        if found:
            for name, part in found[0].model.encoder.named_children():
                setattr(model.encoder, name, part)
        found.append(TorchBackend(model, packed_from=0.1, most_tokens=200))
    return found


@pytest.mark.drill
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("variant", FAMILIES.values())
def test_heads_of_one_encoder_score_together_as_alone(variant: str, pooling: Pooling) -> None:
    heads = backends(variant, pooling)
    assert len({each.encoder_key for each in heads}) == 1
    windows: list[list[Window]] = []
    for task in TASKS:
        rows = [as_row(task.inputs, text, "inputs") for text in texts()]
        windows.append(task.encode(rows, TOKENIZER, SIZES.max_length))
    for chosen in ([0], [1, 2], [0, 3], [4, 5], [1, 4], range(len(heads))):
        together = heads[chosen[0]].joint_scores(
            [heads[place] for place in chosen], [windows[place] for place in chosen], 0
        )
        for place, found in zip(chosen, together, strict=True):
            alone = heads[place].scores(windows[place], 0)
            for one, other in zip(found, alone, strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE)
