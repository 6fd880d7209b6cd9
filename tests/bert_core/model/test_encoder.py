"""What holds for the encoder by itself: padding, gradients, fresh weights."""

import math

import pytest
import torch

from bert_core.model.attention import packing
from bert_core.model.encoder import Encoder
from bert_core.model.variants import VARIANTS
from tests import tiny

CONFIG = tiny.encoder_config(200, max_position_embeddings=64, initializer_range=0.2)


def fresh(pooler: bool = True) -> Encoder:
    torch.manual_seed(0)
    return Encoder(CONFIG, pooler=pooler)


@pytest.mark.parametrize("padding", [1, 8, 40])
def test_a_row_does_not_see_its_padding(padding: int) -> None:
    encoder, length = fresh().eval(), 20
    row = torch.randint(1, 200, (1, length))
    alone = encoder(row, torch.zeros_like(row), None)
    # What stands under the padding must not matter either: garbage, not only [PAD].
    ids = torch.cat([row, torch.randint(0, 200, (1, padding))], dim=1)
    mask = (torch.arange(length + padding) < length).long()[None]
    padded = encoder(ids, torch.zeros_like(ids), mask)
    torch.testing.assert_close(padded.hidden[:, :length], alone.hidden, atol=1e-5, rtol=0)
    torch.testing.assert_close(padded.pooled, alone.pooled, atol=1e-5, rtol=0)


def test_a_row_does_not_see_the_other_rows() -> None:
    encoder = fresh().eval()
    rows = torch.randint(1, 200, (5, 16))
    together = encoder(rows, torch.zeros_like(rows), None).hidden
    for index in range(5):
        alone = encoder(rows[index : index + 1], torch.zeros(1, 16, dtype=torch.long), None)
        torch.testing.assert_close(together[index : index + 1], alone.hidden, atol=1e-5, rtol=0)


def test_no_mask_means_a_mask_of_ones() -> None:
    encoder = fresh().eval()
    rows, segments = torch.randint(1, 200, (3, 16)), torch.randint(0, 2, (3, 16))
    torch.testing.assert_close(
        encoder(rows, segments, None).hidden,
        encoder(rows, segments, torch.ones_like(rows)).hidden,
        atol=1e-5,
        rtol=0,
    )


def test_every_parameter_gets_a_gradient() -> None:
    encoder = fresh().eval()
    rows = torch.arange(1, 193).view(3, 64)
    encoded = encoder(rows, rows % 2, None)
    assert encoded.pooled is not None
    (encoded.hidden * torch.randn_like(encoded.hidden)).sum().add(encoded.pooled.sum()).backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad
        if name.endswith("qkv.bias"):  # the key's third is zero by theory
            query, _, value = gradient.chunk(3)
            gradient = torch.cat([query, value])
        if name.endswith("word_embeddings.weight"):
            gradient = gradient[1:193]  # the ids of `rows`
        assert (gradient != 0).all(dim=-1).all(), name


def test_without_a_pooler_there_is_neither_its_output_nor_its_weights() -> None:
    encoder = fresh(pooler=False)
    rows = torch.ones(1, 4, dtype=torch.long)
    assert encoder(rows, rows * 0, None).pooled is None
    assert not [name for name in encoder.state_dict() if "pooler" in name]


def test_fresh_weights_follow_the_rule() -> None:
    encoder = fresh()
    for name, parameter in encoder.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.full_like(parameter, float("weight" in name))), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            values = parameter[1:] if "word_embeddings" in name else parameter
            # Six standard errors of a sample's standard deviation: sigma / sqrt(2 n).
            bound = 6 * 0.2 / math.sqrt(2 * values.numel())
            assert abs(values.std().item() - 0.2) < bound, name
    assert not encoder.embeddings.word_embeddings.weight[0].any()  # [PAD]


def test_dropout_acts_in_training_only() -> None:
    encoder, rows = fresh(), torch.randint(1, 200, (2, 16))
    first, second = (encoder(rows, rows * 0, None).hidden for _ in range(2))
    assert not torch.equal(first, second)
    encoder.eval()
    first, second = (encoder(rows, rows * 0, None).hidden for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("name", "precision", "from_share"),
    [
        ("bert-base", "bf16", 0.0),
        ("modernbert-base", "bf16", 0.0),
        ("bert-base", "fp32", 1.0),  # its kernel is one of half precision
        ("deberta-base", "bf16", 1.0),  # and takes no bias
        ("tinybert-4", "bf16", 1.0),  # nor heads of 26
    ],
)
def test_a_gpu_packs_rows_where_it_has_the_kernel(
    name: str, precision: str, from_share: float
) -> None:
    config = VARIANTS[name].config.adapted(attention_dropout=0.0)
    assert packing(config, torch.device("cuda"), precision) == from_share
