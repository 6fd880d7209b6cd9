"""What every objective keeps: sums and counts, whole gradients, fp32 losses, room for DDP."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from bert_core.model.config import EncoderConfig
from bert_core.objectives import IGNORE
from bert_core.objectives.base import Batch, Objective, ObjectiveModel, cross_entropy
from bert_core.objectives.catalog import PRETRAINING
from bert_core.objectives.classification import Classification
from bert_core.objectives.multiple_choice import MultipleChoice
from bert_core.objectives.span import Span
from bert_core.objectives.token_classification import (
    FeatureBasedTokenClassification,
    TokenClassification,
)
from tests import tiny
from tests.ranks import on_ranks

CONFIG = tiny.encoder_config(120, dropout=0.0)
DEBERTA = tiny.encoder_config(
    120,
    model_type="deberta-v2",
    dropout=0.0,
    relative_attention=True,
    position_biased_input=False,
    pos_att_type="p2c|c2p",
    share_att_key=True,
    norm_rel_ebd="layer_norm",
)
FEATURES = FeatureBasedTokenClassification.name
OBJECTIVES: dict[str, tiny.Build] = {
    **PRETRAINING,
    "classification": lambda config: Classification(config, 3),
    "token_classification": lambda config: TokenClassification(config, 3),
    FEATURES: lambda config: FeatureBasedTokenClassification(config, 3),
}
POSITIONS = {
    "mlm_positions": ("mlm_labels", "mlm_draws"),
    "token_positions": ("token_labels",),
}


def config_for(*names: str) -> EncoderConfig:
    return DEBERTA if {"emd_mlm", "rtd"} & set(names) else CONFIG


def model_of(*names: str) -> ObjectiveModel:
    builds = OBJECTIVES | {"span": Span}
    return tiny.model(config_for(*names), *(builds[name] for name in names))


def runs(positions: Iterable[int]) -> list[list[int]]:
    """Positions that follow each other, together."""
    found: list[list[int]] = []
    for position in positions:
        if found and found[-1][-1] == position - 1:
            found[-1].append(position)
        else:
            found.append([position])
    return found


def batch_of(rows: int = 6, seq: int = 16, masked_per_row: int = 3) -> Batch:
    """Neither the first nor the last token of a row is among those that are predicted."""
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(seq // 2, seq + 1, (rows,), generator=generator)
    mask = (torch.arange(seq) < lengths[:, None]).long()
    starts = torch.arange(rows)[:, None] * seq
    inner = [torch.randperm(seq // 2 - 2, generator=generator) for _ in range(rows)]
    positions = 1 + torch.stack(inner)[:, :masked_per_row].sort(1).values
    positions = (starts + positions).flatten()
    return {
        "input_ids": torch.randint(1, 120, (rows, seq), generator=generator) * mask,
        "token_type_ids": torch.zeros(rows, seq, dtype=torch.int64),
        "attention_mask": mask,
        "mlm_positions": positions,
        "mlm_labels": torch.randint(1, 120, positions.shape, generator=generator),
        "mlm_draws": torch.linspace(0, 0.999, len(positions)).double(),
        "mlm_span_lengths": torch.tensor([*map(len, runs(positions.tolist()))], dtype=torch.int64),
        "token_positions": positions,
        "token_labels": torch.randint(0, 3, positions.shape, generator=generator),
        "next_sentence_label": torch.randint(0, 2, (rows,), generator=generator),
        "sentence_order_label": torch.randint(0, 2, (rows,), generator=generator),
        "start_positions": torch.randint(0, seq // 2, (rows,), generator=generator),
        "end_positions": torch.randint(0, seq // 2, (rows,), generator=generator),
        "labels": torch.randint(0, 3, (rows,), generator=generator),
    }


def halves(batch: Batch, rows: int) -> list[Batch]:
    """The batch as two micro-batches, the first of `rows` rows."""
    tokens = rows * batch["input_ids"].shape[1]
    low, high = ({key: value[part] for key, value in batch.items()} for part in _parts(rows))
    for positions, along in POSITIONS.items():
        first = batch[positions] < tokens
        for half, chosen, start in ((low, first, 0), (high, ~first, tokens)):
            half[positions] = batch[positions][chosen] - start
            half.update({name: batch[name][chosen] for name in along})
    for half in (low, high):
        lengths = [*map(len, runs(half["mlm_positions"].tolist()))]
        half["mlm_span_lengths"] = torch.tensor(lengths, dtype=torch.int64)
    return [low, high]


def _parts(rows: int) -> tuple[slice, slice]:
    return slice(None, rows), slice(rows, None)


def gradient(model: ObjectiveModel) -> Tensor:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([parameter.grad.flatten() for parameter in trained])  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "rtd"])  # which draws
def test_a_part_is_a_sum_with_its_count_and_its_number_right(name: str) -> None:
    model, batch = model_of(name).eval(), batch_of()
    [objective] = model.objectives.values()
    assert isinstance(objective, Objective)
    name = objective.name
    part = model(batch)[name]
    logits, labels = model.logits(batch)[name], batch[objective.label_key]
    losses = functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(part.sum, losses.sum())
    assert part.count == len(labels) == model.counts(batch)[name]
    assert part.correct == (logits.argmax(-1) == labels).sum()
    assert not part.correct.requires_grad


def test_a_span_is_scored_within_its_row_and_both_its_ends_must_be_right() -> None:
    model, batch = model_of("span").eval(), batch_of()
    part, logits = model(batch)["span"], model.logits(batch)["span"]
    losses, right = [], 0
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        assert logits[row, length:].isneginf().all()
        begin, end = batch["start_positions"][row], batch["end_positions"][row]
        scores = logits[row, :length].log_softmax(0)
        losses.append(-(scores[begin, 0] + scores[end, 1]) / 2)
        right += int(scores[:, 0].argmax() == begin and scores[:, 1].argmax() == end)
    torch.testing.assert_close(part.sum, torch.stack(losses).sum())
    assert (part.count, part.correct) == (6, right)


def test_choices_of_a_question_compete_with_each_other() -> None:
    model = tiny.model(CONFIG, MultipleChoice).eval()
    batch = batch_of() | {"labels": torch.tensor([2, 0]), "choices": torch.tensor([3, 3])}
    part, logits = model(batch)["multiple_choice"], model.logits(batch)["multiple_choice"]
    assert logits.shape == (2, 3)
    wanted = functional.cross_entropy(logits, batch["labels"], reduction="sum")
    torch.testing.assert_close(part.sum, wanted)
    assert part.count == 2
    alone = model.logits(halves(batch, 3)[1] | {"choices": torch.tensor([3])})["multiple_choice"]
    torch.testing.assert_close(alone, logits[1:])
    fewer = model.logits(batch | {"choices": torch.tensor([4, 2])})["multiple_choice"]
    assert fewer[1].isneginf().tolist() == [False, False, True, True]
    torch.testing.assert_close(fewer[0, :3], logits[0])


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    "names",
    [
        ("mlm",),
        ("mlm", "nsp"),
        ("mlm", "span_boundary"),
        ("sop",),
        ("permuted_mlm",),
        ("emd_mlm",),
        ("rtd",),
        ("sop", "rtd"),
        ("classification",),
        ("token_classification",),
        ("span",),
        (FEATURES,),
    ],
)
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


@pytest.mark.parametrize(
    "names",
    [
        ("mlm", "nsp"),
        ("mlm",),
        ("mlm", "span_boundary"),
        ("nsp",),
        ("classification",),
        ("permuted_mlm",),
        ("emd_mlm",),
        ("rtd",),
        ("sop", "rtd"),
    ],
)
def test_every_parameter_gets_a_gradient(names: tuple[str, ...]) -> None:
    model, batch = model_of(*names), batch_of()
    torch.stack([part.sum for part in model(batch).values()]).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    without = [("mlm",), ("permuted_mlm",), ("mlm", "span_boundary"), ("emd_mlm",), ("rtd",)]
    assert (model.encoder.pooler is None) == (names in without)


def test_an_encoder_that_gives_features_alone_stays_as_it_is() -> None:
    config = CONFIG.adapted(hidden_dropout_prob=0.5, attention_dropout=0.5)
    model = tiny.model(config, OBJECTIVES[FEATURES]).train()
    batch = batch_of()
    seen = [model.encode(batch, all_layers=True).layers[-1] for _ in range(2)]
    assert torch.equal(*seen)  # it drops nothing
    model(batch)[FEATURES].sum.backward()
    without = {name for name, each in model.named_parameters() if each.grad is None}
    assert without == {name for name, _ in model.named_parameters() if name.startswith("encoder.")}


@pytest.mark.parametrize("row_by_row", [0, 1000])
def test_features_are_read_the_same_where_rows_lie_end_to_end(
    row_by_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bert_core.model.layout.ROW_BY_ROW", row_by_row)
    model, batch = model_of(FEATURES).eval(), batch_of()
    real = batch["attention_mask"].bool()
    flat = real.flatten().cumsum(0) - 1
    packed = {
        "input_ids": batch["input_ids"][real],
        "token_type_ids": batch["token_type_ids"][real],
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), real.sum(1).cumsum(0)]),
        "token_positions": flat[batch["token_positions"]],
    }
    wanted = model.logits(batch)[FEATURES]
    torch.testing.assert_close(model.logits(packed)[FEATURES], wanted)


@pytest.mark.parametrize(
    ("name", "part_name"),
    [("mlm", "mlm"), ("emd_mlm", "mlm"), ("span_boundary", "span_boundary")],
)
def test_a_batch_without_masked_positions_gives_zero_and_zero_gradients(
    name: str, part_name: str
) -> None:
    model = model_of(name)
    part = model(batch_of(masked_per_row=0))[part_name]
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
        torch.testing.assert_close(part.sum, wide, rtol=1e-6, atol=0)
        torch.testing.assert_close(part.sum, exact[name].sum, rtol=0.02, atol=0)


def test_fp64_logits_keep_their_precision() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64)
    assert cross_entropy(logits, torch.arange(5)).sum.dtype == torch.float64


def test_distributed_data_parallel_gives_the_same_gradient(tmp_path: Path) -> None:
    together = [("mlm", "nsp"), ("emd_mlm",), ("rtd",)]
    [wrapped] = on_ranks(1, partial(gradients_by_ranks, together), tmp_path)
    for names, found in zip(together, wrapped, strict=True):
        alone = model_of(*names)
        loss(alone, batch_of()).backward()
        torch.testing.assert_close(found, gradient(alone), msg=str(names))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return torch.stack([part.sum for part in model(batch).values()]).sum()


def gradients_by_ranks(together: list[tuple[str, ...]]) -> list[Tensor]:
    found = []
    for names in together:
        model = model_of(*names)
        wrapped = DistributedDataParallel(model, find_unused_parameters=False)
        for _ in range(2):  # a parameter without a gradient fails the second pass
            model.zero_grad()
            loss(wrapped, batch_of()).backward()
        found.append(gradient(model))
    return found


@pytest.mark.parametrize("name", ["token_classification", FEATURES])
def test_tokens_whose_label_no_model_has_are_scored_without_a_loss(name: str) -> None:
    model, batch = model_of(name), batch_of()
    model.eval()
    scores = model.logits(batch)[name]
    kept = torch.arange(len(scores)) % 3 != 0
    some = batch | {"token_labels": batch["token_labels"].masked_fill(~kept, IGNORE)}
    torch.testing.assert_close(model.logits(some)[name], scores)
    wanted = cross_entropy(scores[kept], batch["token_labels"][kept])
    part = model(some)[name]
    torch.testing.assert_close(part.sum, wanted.sum)
    assert part.correct == wanted.correct
    assert part.count == model.counts(some)[name] == kept.sum() < model.counts(batch)[name]
    objective: Any = model.objectives[name]
    soft = objective.soft_part(scores, scores.flip(-1), some, 2.0)
    assert soft.count == part.count
    nothing = batch | {"token_labels": torch.full_like(batch["token_labels"], IGNORE)}
    assert (model(nothing)[name].sum, model(nothing)[name].count) == (0, 0)
