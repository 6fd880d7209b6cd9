"""The digest by which equal encoders are known."""

from dataclasses import replace

import pytest
import torch

from bert_core.model.sharing import encoder_digest
from bert_core.objectives.classification import Classification
from bert_core.objectives.mlm import MaskedLanguageModeling
from tests import tiny

CONFIG = tiny.encoder_config(20)


def digest(seed: int = 0) -> str:
    return encoder_digest(tiny.model(CONFIG, seed=seed).encoder)


def test_equal_encoders_have_equal_digests_whatever_head_and_pooler_are_on_them() -> None:
    bare = tiny.model(CONFIG).encoder
    pooled = tiny.model(CONFIG, lambda config: Classification(config, 3), seed=1).encoder
    tied = tiny.model(CONFIG, MaskedLanguageModeling, seed=2).encoder
    for encoder in (pooled, tied):
        encoder.load_state_dict(bare.state_dict(), strict=False)
    assert {encoder_digest(each) for each in (bare, pooled, tied)} == {digest()}


@pytest.mark.parametrize("name", sorted(tiny.model(CONFIG).encoder.state_dict()))
def test_any_other_weight_has_another_digest(name: str) -> None:
    encoder = tiny.model(CONFIG).encoder
    with torch.no_grad():
        weight = encoder.state_dict()[name].view(-1)[-1:]
        weight.copy_(torch.nextafter(weight, torch.tensor(9.0)))
    assert encoder_digest(encoder) != digest()
    assert digest(seed=1) != digest()


def test_equal_weights_that_compute_something_else_have_another_digest() -> None:
    feed_forward = replace(CONFIG.feed_forward, activation="relu")
    other = tiny.model(replace(CONFIG, feed_forward=feed_forward)).encoder
    same = tiny.model(CONFIG).encoder
    other.load_state_dict(same.state_dict())
    assert encoder_digest(other) != encoder_digest(same)
