"""What every objective keeps: sums and counts, whole gradients, fp32 losses, room for DDP."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from bert_core.model.variants import EncoderConfig
from bert_core.objectives.base import Batch, Objective, ObjectiveModel, cross_entropy
from bert_core.objectives.classification import Classification
from bert_core.objectives.registry import PRETRAINING

CONFIG = EncoderConfig(
    vocab_size=120,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    initializer_range=0.2,
)
OBJECTIVES: dict[str, Callable[[EncoderConfig], Objective]] = PRETRAINING | {
    "classification": lambda config: Classification(config, 3)
}


def model_of(*names: str) -> ObjectiveModel:
    torch.manual_seed(0)
    return ObjectiveModel(CONFIG, [OBJECTIVES[name](CONFIG) for name in names])


def batch_of(rows: int = 6, seq: int = 16, masked_per_row: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(seq // 2, seq + 1, (rows,), generator=generator)
    mask = (torch.arange(seq) < lengths[:, None]).long()
    starts = torch.arange(rows)[:, None] * seq
    positions = torch.stack([torch.randperm(seq // 2, generator=generator) for _ in range(rows)])
    positions = (starts + positions[:, :masked_per_row]).flatten()
    return {
        "input_ids": torch.randint(1, 120, (rows, seq), generator=generator) * mask,
        "token_type_ids": torch.zeros(rows, seq, dtype=torch.int64),
        "attention_mask": mask,
        "mlm_positions": positions,
        "mlm_labels": torch.randint(1, 120, positions.shape, generator=generator),
        "next_sentence_label": torch.randint(0, 2, (rows,), generator=generator),
        "labels": torch.randint(0, 3, (rows,), generator=generator),
    }


def halves(batch: Batch, rows: int) -> list[Batch]:
    """The batch as two micro-batches, the first of `rows` rows."""
    seq = batch["input_ids"].shape[1]
    first = batch["mlm_positions"] < rows * seq
    positions = {"mlm_positions", "mlm_labels"}
    low = {key: value[first] if key in positions else value[:rows] for key, value in batch.items()}
    high = {
        key: value[~first] if key in positions else value[rows:] for key, value in batch.items()
    }
    high["mlm_positions"] = high["mlm_positions"] - rows * seq
    return [low, high]


def gradient(model: ObjectiveModel) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_part_is_a_sum_with_its_count_and_its_number_right(name: str) -> None:
    model, batch = model_of(name).eval(), batch_of()
    part = model(batch)[name]
    logits, labels = model.logits(batch)[name], batch[OBJECTIVES[name](CONFIG).label_key]
    losses = functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(part.sum, losses.sum())
    assert part.count == len(labels) == model.counts(batch)[name]
    assert part.correct == (logits.argmax(-1) == labels).sum()
    assert not part.correct.requires_grad


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("names", [("mlm",), ("mlm", "nsp"), ("classification",)])
def test_micro_batches_add_up_to_the_whole_gradient(names: tuple[str, ...], rows: int) -> None:
    batch, gradients = batch_of(), []
    for micro_batches in ([batch], halves(batch, rows)):
        model = model_of(*names).double()
        for each in micro_batches:
            parts = model(each).values()
            torch.stack([part.sum for part in parts]).sum().backward()
        gradients.append(gradient(model))
    whole, added = gradients
    assert (whole - added).norm() / whole.norm() < 1e-12


@pytest.mark.parametrize("names", [("mlm", "nsp"), ("mlm",), ("nsp",), ("classification",)])
def test_every_parameter_gets_a_gradient(names: tuple[str, ...]) -> None:
    model, batch = model_of(*names), batch_of()
    torch.stack([part.sum for part in model(batch).values()]).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert (model.encoder.pooler is None) == (names == ("mlm",))


def test_a_batch_without_masked_positions_gives_zero_and_zero_gradients() -> None:
    model = model_of("mlm")
    part = model(batch_of(masked_per_row=0))["mlm"]
    assert (part.sum.item(), part.count, part.correct.item()) == (0.0, 0, 0)
    part.sum.backward()
    assert not gradient(model).any()


def test_under_bf16_autocast_the_loss_is_summed_in_fp32() -> None:
    model, batch = model_of("mlm", "nsp"), batch_of(rows=32)
    exact = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        parts, logits = model(batch), model.logits(batch)
    for name, part in parts.items():
        assert logits[name].dtype == torch.bfloat16
        labels = batch[OBJECTIVES[name](CONFIG).label_key]
        wide = functional.cross_entropy(logits[name].float(), labels, reduction="sum")
        assert part.sum.dtype == torch.float32
        assert torch.equal(part.sum, wide)
        torch.testing.assert_close(part.sum, exact[name].sum, rtol=0.02, atol=0)


def test_fp64_logits_keep_their_precision() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64)
    assert cross_entropy(logits, torch.arange(5)).sum.dtype == torch.float64


def test_distributed_data_parallel_gives_the_same_gradient(tmp_path: Path) -> None:
    batch = batch_of()
    alone = model_of("mlm", "nsp")
    torch.stack([part.sum for part in alone(batch).values()]).sum().backward()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = model_of("mlm", "nsp")
        wrapped = DistributedDataParallel(model, find_unused_parameters=False)
        for _ in range(2):  # a parameter without a gradient fails the second pass
            model.zero_grad()
            torch.stack([part.sum for part in wrapped(batch).values()]).sum().backward()
        torch.testing.assert_close(gradient(model), gradient(alone))
    finally:
        dist.destroy_process_group()
