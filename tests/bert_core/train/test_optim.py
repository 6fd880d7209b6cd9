"""AdamW as the paper of BERT sets it, with decay on matrices alone, LAMB and Muon."""

import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bert_core.errors import ConfigError
from bert_core.objectives.base import ObjectiveModel
from bert_core.objectives.catalog import PRETRAINING
from bert_core.scores import Precision
from bert_core.train.config import Algorithm, OptimizerConfig
from bert_core.train.optim import build_optimizer, parameter_groups
from bert_core.train.parallel import each_on_one_rank
from tests import tiny
from tests.ranks import on_ranks

CONFIG = tiny.encoder_config(40)
OF_BERT = [PRETRAINING[name] for name in ("mlm", "nsp", "sop")]


@pytest.fixture
def model() -> ObjectiveModel:
    return tiny.model(CONFIG, *OF_BERT)


def test_biases_and_layer_norms_have_no_decay_and_all_else_has(model: ObjectiveModel) -> None:
    decayed, others = parameter_groups(model, 0.01)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.01, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with_decay = {names[id(parameter)] for parameter in decayed["params"]}
    without = {names[id(parameter)] for parameter in others["params"]}
    assert with_decay | without == set(names.values())
    assert not with_decay & without
    assert all(name.endswith("bias") or "norm" in name.lower() for name in without)
    assert not any(name.endswith("bias") or "norm" in name.lower() for name in with_decay)


def test_frozen_parameters_are_left_out(model: ObjectiveModel) -> None:
    model.encoder.requires_grad_(False)
    groups = parameter_groups(model, 0.01)
    encoder = {id(parameter) for parameter in model.encoder.parameters()}
    assert not any(id(parameter) in encoder for group in groups for parameter in group["params"])


def test_a_layer_learns_more_slowly_than_the_one_above_it() -> None:
    model = tiny.model(replace(CONFIG, num_hidden_layers=3), *OF_BERT)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, 0.01, layer_decay=0.5)
    scales = {
        names[id(parameter)]: (group["lr_scale"], group["weight_decay"])
        for group in groups
        for parameter in group["params"]
    }
    assert scales.keys() == set(names.values())
    for name, (scale, decay) in scales.items():
        part = ".".join(name.split(".")[1:3]) if name.startswith("encoder.layers") else ""
        of_layer = {"layers.2": 0.5, "layers.1": 0.25, "layers.0": 0.125}
        expected = 0.0625 if name.startswith("encoder.embeddings") else of_layer.get(part, 1.0)
        assert scale == expected, name
        assert decay == (0.0 if dict(model.named_parameters())[name].ndim < 2 else 0.01)
    alike = parameter_groups(model, 0.01)
    assert [group["lr_scale"] for group in alike] == [1.0, 1.0]


def test_settings_reach_the_optimizer(model: ObjectiveModel) -> None:
    config = OptimizerConfig(lr=0.5, beta1=0.8, beta2=0.98, eps=1e-5, weight_decay=0.1)
    optimizer = build_optimizer(model, config)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.98), 1e-5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_a_step_is_the_one_written_in_the_paper_of_adamw(model: ObjectiveModel) -> None:
    config = OptimizerConfig(lr=0.1, weight_decay=0.3, eps=1e-6)
    optimizer = build_optimizer(model, config)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.grad is not None
        # Loshchilov and Hutter 2019, algorithm 2, first step: both moments are corrected to g, g².
        decay = 0.1 * 0.3 * old if parameter.ndim > 1 else 0.0
        expected = old - decay - 0.1 * parameter.grad / (parameter.grad.abs() + 1e-6)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-6)


def lamb_step(
    weight: np.ndarray, slope: np.ndarray, moments: list[np.ndarray], step: int, most_decay: float
) -> np.ndarray:
    """You et al. 2020, algorithm 2, for one tensor and lr 0.1; moments are changed in place."""
    moments[0][:] = 0.9 * moments[0] + (1 - 0.9) * slope
    moments[1][:] = 0.999 * moments[1] + (1 - 0.999) * slope**2
    unbiased = [moments[0] / (1 - 0.9**step), moments[1] / (1 - 0.999**step)]
    decay = most_decay if weight.ndim > 1 else 0.0
    update = unbiased[0] / (np.sqrt(unbiased[1]) + 1e-6) + decay * weight
    norms = np.sqrt((weight**2).sum()), np.sqrt((update**2).sum())
    ratio = norms[0] / norms[1] if weight.ndim > 1 and min(norms) > 0 else 1.0
    return weight - 0.1 * ratio * update


@pytest.mark.parametrize("decay", [0.3, 0.0])
def test_lamb_moves_as_its_paper_says_step_by_step(model: ObjectiveModel, decay: float) -> None:
    model = model.double()
    with torch.no_grad():
        model.get_parameter(
            "encoder.layers.0.feed_forward.up.weight"
        ).zero_()  # a norm of zero: not scaled
    optimizer = build_optimizer(model, OptimizerConfig(name="lamb", lr=0.1, weight_decay=decay))
    weights = [parameter.detach().numpy().copy() for parameter in model.parameters()]
    moments = [[np.zeros_like(weight), np.zeros_like(weight)] for weight in weights]
    for step in range(1, 8):
        for place, parameter in enumerate(model.parameters()):
            parameter.grad = torch.randn_like(parameter) * (place % 5 != 0)
            slope = parameter.grad.numpy()
            weights[place] = lamb_step(weights[place], slope, moments[place], step, decay)
        optimizer.step()
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            np.testing.assert_allclose(parameter.detach().numpy(), weight, rtol=1e-9, atol=1e-12)


def test_stable_adamw_takes_smaller_steps_where_gradients_outgrow_their_moments(
    model: ObjectiveModel,
) -> None:
    """Wortsman et al. 2023, algorithm 2, beside gradients of one size and of a jump."""
    model = model.double()
    config = OptimizerConfig(
        name="stable_adamw", lr=0.1, beta2=0.98, weight_decay=0.3, max_grad_norm=0.0
    )
    optimizer = build_optimizer(model, config)
    weights = [parameter.detach().numpy().copy() for parameter in model.parameters()]
    means = [[np.zeros_like(weight), np.zeros_like(weight)] for weight in weights]
    smaller = 0
    for step in range(1, 8):
        for place, parameter in enumerate(model.parameters()):
            parameter.grad = torch.randn_like(parameter) * (100 if step == 5 else 1)
            slope, weight = parameter.grad.numpy(), weights[place]
            for mean, beta, value in zip(means[place], (0.9, 0.98), (slope, slope**2), strict=True):
                hat = (
                    beta * (1 - beta ** (step - 1)) / (1 - beta**step)
                )  # bias-corrected as it runs
                mean[:] = hat * mean + (1 - hat) * value
            root = np.sqrt(means[place][1]) + 1e-6
            rms = np.sqrt(np.mean((slope / root) ** 2))
            smaller += rms > 1.5
            rate = 0.1 / max(1.0, rms)
            decay = 0.3 if weight.ndim > 1 else 0.0
            weights[place] = weight - rate * (decay * weight + means[place][0] / root)
        optimizer.step()
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            np.testing.assert_allclose(parameter.detach().numpy(), weight, rtol=1e-9, atol=1e-12)
    assert smaller == len(weights)  # the jump alone


def test_lamb_leaves_what_has_no_gradient_as_it_is(model: ObjectiveModel) -> None:
    optimizer = build_optimizer(model, OptimizerConfig(name="lamb", lr=0.1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)]
    assert moved == [True] + [False] * (len(before) - 1)


MUON = OptimizerConfig(name="muon", lr=0.1, weight_decay=0.3)


def of_layers(model: ObjectiveModel) -> set[str]:
    """Names of the matrices that Muon moves."""
    return {
        name
        for name, parameter in model.named_parameters()
        if ".layers." in name and parameter.ndim == 2
    }


def given_gradients(model: ObjectiveModel) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


@pytest.mark.parametrize("precision", get_args(Precision))
def test_muon_turns_the_gradients_of_layers_into_orthogonal_steps_of_adamws_size(
    model: ObjectiveModel, precision: Precision
) -> None:
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    given_gradients(model)
    build_optimizer(model, MUON, precision).step()
    for name in of_layers(model):
        moved = (before[name] * (1 - 0.1 * 0.3) - model.get_parameter(name).detach()) / 0.1
        longest = max(moved.shape)
        # Its five iterations leave singular values near 1; 0.2 is the root mean square of AdamW's.
        values = torch.linalg.svdvals(moved / (0.2 * longest**0.5))
        assert 0.3 < values.min() <= values.max() < 1.5, name


def test_muon_moves_as_torchs_does(model: ObjectiveModel) -> None:
    other = tiny.model(CONFIG, *OF_BERT)
    other.load_state_dict(model.state_dict())
    ours = build_optimizer(model, MUON)
    torchs = torch.optim.Muon(
        [other.get_parameter(name) for name in of_layers(model)],
        lr=MUON.lr,
        weight_decay=MUON.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    for _ in range(3):
        given_gradients(model)
        for name in of_layers(model):
            other.get_parameter(name).grad = model.get_parameter(name).grad
        ours.step()
        torchs.step()
    for name in of_layers(model):
        assert torch.equal(model.get_parameter(name), other.get_parameter(name)), name


def after_three_steps() -> dict[str, Tensor]:
    """A model's weights after steps of Muon by gradients that are the same on all ranks."""
    model = tiny.model(CONFIG, *OF_BERT)
    optimizer = build_optimizer(model, MUON)
    torch.manual_seed(0)
    for _ in range(3):
        given_gradients(model)
        optimizer.step()
    return model.state_dict()


def test_ranks_that_share_muons_work_end_with_the_weights_of_one(tmp_path: Path) -> None:
    alone = after_three_steps()
    for weights, doubled in on_ranks(2, share_the_work, tmp_path):
        assert weights.keys() == alone.keys()
        assert all(torch.equal(weight, alone[name]) for name, weight in weights.items())
        assert torch.equal(doubled, torch.full((2, 3), 2.0))


def share_the_work() -> tuple[dict[str, Tensor], Tensor]:
    weights = after_three_steps()
    # One matrix: a rank has nothing to do.
    [doubled] = each_on_one_rank(lambda matrix: matrix * 2, [torch.ones(2, 3)], torch.float32)
    return weights, doubled


def test_muon_in_fp32_computes_nothing_in_bfloat16(model: ObjectiveModel) -> None:
    optimizer = build_optimizer(model, MUON, "fp32")
    given_gradients(model)
    made: set[torch.dtype] = set()

    class Dtypes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            made.update(each.dtype for each in tree_leaves(result) if isinstance(each, Tensor))
            return result

    with Dtypes():
        optimizer.step()
    assert made == {torch.float32}


def test_muon_leaves_everything_else_to_adamw(model: ObjectiveModel) -> None:
    other = tiny.model(CONFIG, *OF_BERT)
    other.load_state_dict(model.state_dict())
    given_gradients(model)
    for parameter, alike in zip(model.parameters(), other.parameters(), strict=True):
        assert parameter.grad is not None
        alike.grad = parameter.grad.clone()
    build_optimizer(model, MUON).step()
    build_optimizer(other, replace(MUON, name="adamw")).step()
    differs = {
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, other.get_parameter(name))
    }
    assert differs == of_layers(model)


def test_a_saved_muon_resumes_exactly(model: ObjectiveModel) -> None:
    first = build_optimizer(model, MUON)
    given_gradients(model)
    first.step()
    other = tiny.model(CONFIG, *OF_BERT)
    other.load_state_dict(model.state_dict())
    second = build_optimizer(other, MUON)
    second.load_state_dict(deepcopy(first.state_dict()))
    given_gradients(model)
    for parameter, alike in zip(model.parameters(), other.parameters(), strict=True):
        assert parameter.grad is not None
        alike.grad = parameter.grad.clone()
    for optimizer in (first, second):
        optimizer.step()
    for parameter, alike in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, alike)


def test_muon_refuses_sharded_weights() -> None:
    with pytest.raises(ConfigError, match="wanted adamw or lamb with fsdp, got muon"):
        MUON.check_sharding(True)


def test_adamw_moves_weights_as_torchs_does(model: ObjectiveModel) -> None:
    other = deepcopy(model)
    config = OptimizerConfig(lr=1e-2)
    ours, theirs = (
        build_optimizer(model, config),
        torch.optim.AdamW(
            parameter_groups(other, config.weight_decay),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        ),
    )
    for seed in range(3):
        for optimized, optimizer in ((model, ours), (other, theirs)):
            generator = torch.Generator().manual_seed(seed)
            for parameter in optimized.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert one.grad is None
        assert torch.equal(one, another)


TRAINS = """
import sys
import torch
from bert_core.model.size import count_parameters
from bert_core.model.variants import VARIANTS
from bert_core.train.config import OptimizerConfig
from bert_core.train.optim import build_optimizer

for variant in VARIANTS.values():
    count_parameters(variant.config)
for name in sys.argv[1:]:
    layer = torch.nn.Linear(4, 4)
    optimizer = build_optimizer(layer, OptimizerConfig(name=name))
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.drill
def test_neither_optimizers_nor_models_without_values_import_the_compiler() -> None:
    """That takes seconds."""
    names = get_args(Algorithm)
    assert names
    subprocess.run([sys.executable, "-c", TRAINS, *names], check=True)
