"""What is frozen stays as it is, costs no gradient, and changes no gradient of what learns."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bert_core.batches import pad
from bert_core.errors import ConfigError
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import Batch, ObjectiveModel
from bert_core.objectives.classification import Classification
from bert_core.objectives.token_classification import TokenClassification
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.train.config import Frozen, LoopConfig, OptimizerConfig
from bert_core.train.freezing import check_frozen, freeze
from bert_core.train.loop import training_steps
from bert_core.train.optim import build_optimizer
from pipelines.finetune import FinetuneConfig
from tests import tiny

NAMES = ("bert-tiny", "albert-base", "roberta-base", "deberta-tiny", "deberta-v3-tiny",
         "distilbert-base", "mpnet-base", "modernbert-base", "electra-small")  # fmt: skip
LAYERS = 3
PAD = 1  # as MPNet and RoBERTa have it
PARTS: list[tuple[Frozen, int]] = [("embeddings", 0), ("nothing", 2), ("encoder", 0)]


def model_of(name: str, dropout: float = 0.0) -> ObjectiveModel:
    """A small encoder of a family, with a head that reads its pooled vector."""
    config = replace(
        VARIANTS[name].config,
        hidden_size=48,
        num_hidden_layers=LAYERS,
        initializer_range=0.2,
        feed_forward=replace(VARIANTS[name].config.feed_forward, intermediate_size=64),
    ).adapted(
        vocab_size=40, pad_token_id=PAD, hidden_dropout_prob=dropout, attention_dropout=dropout
    )
    return tiny.model(config, lambda each: Classification(each, 3, dropout))


def batch_of() -> Batch:
    rows = [torch.arange(4, 4 + length).numpy() for length in (5, 9, 12)]
    return pad(rows, PAD) | {"labels": torch.tensor([0, 2, 1])}


def gradients(model: ObjectiveModel) -> dict[str, Tensor]:
    part = model(batch_of())["classification"]
    assert part.sum is not None
    part.sum.backward()
    return {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


@pytest.mark.parametrize(("part", "layers"), PARTS)
@pytest.mark.parametrize("name", [name for name in NAMES if name in VARIANTS])
def test_what_learns_has_the_gradient_that_it_has_when_everything_learns(
    name: str, part: Frozen, layers: int
) -> None:
    if layers and VARIANTS[name].config.shared_layers:
        return  # one layer that is used again and again is refused
    whole = gradients(model_of(name))
    model = model_of(name)
    freeze(model, part, layers)
    learned = gradients(model)
    assert learned.keys() < whole.keys()
    assert not any(key.startswith("encoder.embeddings.") for key in learned)
    numbers = {int(key.split(".")[2]) for key in learned if key.startswith("encoder.layers.")}
    frozen = LAYERS if part == "encoder" else layers
    assert numbers == {*range(len(model.encoder.layers))} - {*range(frozen)}
    assert any(key.startswith("objectives.") for key in learned)
    for key, slope in learned.items():
        torch.testing.assert_close(slope, whole[key], rtol=1e-4, atol=1e-6)


def kept_bytes(model: ObjectiveModel) -> int:
    """What a forward pass keeps for the backward pass, without weights."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(batch_of())
    return sum(kept.values())


def test_the_more_is_frozen_the_less_is_kept_and_computed() -> None:
    kept, flops = [], []
    for part, layers in (("nothing", 0), ("nothing", 1), ("nothing", 2), ("encoder", 0)):
        model = model_of("bert-tiny")
        freeze(model, part, layers)  # type: ignore[arg-type]
        kept.append(kept_bytes(model))
        batch = batch_of()
        flops.append(model.flops(batch, batch["attention_mask"].sum(1).numpy()))
    assert kept == sorted(kept, reverse=True)
    assert kept[1] < 0.8 * kept[0]
    assert kept[3] < 0.1 * kept[0], "the head alone"
    assert flops == sorted(flops, reverse=True)
    assert flops[3] == pytest.approx(flops[0] / 3, rel=0.1), "no backward pass"


def test_frozen_parts_stay_as_they_are_without_dropout() -> None:
    model = model_of("bert-tiny", dropout=0.5)
    freeze(model, "nothing", 2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.train()
    first, second = (model.encoder.embeddings(*_inputs(model)) for _ in range(2))
    assert torch.equal(first, second)
    assert not model.encoder.layers[1].training
    assert model.encoder.layers[2].training
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
    steps = training_steps(
        model, [[batch_of()]] * 3, optimizer, lambda _: 1e-2,
        LoopConfig(max_steps=3, precision="fp32"), max_grad_norm=1.0,
    )  # fmt: skip
    assert len(list(steps)) == 3
    still = {
        name for name, weight in model.state_dict().items() if torch.equal(weight, before[name])
    }
    frozen = ("encoder.embeddings.", "encoder.layers.0.", "encoder.layers.1.")
    assert still == {name for name in before if name.startswith(frozen)}


def _inputs(model: ObjectiveModel) -> tuple:
    batch = batch_of()
    rows = model.encoder._rows(batch["input_ids"], batch["attention_mask"], None)
    return batch["input_ids"], batch["token_type_ids"], rows


def test_parts_that_cannot_be_frozen_are_refused() -> None:
    config = VARIANTS["bert-tiny"].config
    head = TokenClassification(config, 2)
    check_frozen(config, "encoder", 0, head)
    check_frozen(config, "nothing", 1, head)
    with pytest.raises(ConfigError, match="freeze_layers: wanted at most 1, all layers but the la"):
        check_frozen(config, "nothing", 2, head)
    with pytest.raises(ConfigError, match="freeze_layers: wanted 0 for an encoder whose 2 layers"):
        check_frozen(replace(config, shared_layers=True), "nothing", 1, head)
    vectors = FeatureExtraction().build_objective(config)
    with pytest.raises(ConfigError, match=r"freeze: wanted a part of .* no head"):
        check_frozen(config, "encoder", 0, vectors)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"freeze_layers": 2}, "freeze_layers, which it incl"),
        ({"from_scratch": True}, "random"),
    ],
)
def test_settings_that_contradict_a_frozen_encoder_are_refused(settings: dict, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"freeze: wanted nothing .*{wanted}"):
        FinetuneConfig(output="o", model="m", freeze="encoder", **settings)
