"""Optimizers and their parameter groups."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from bert_core.errors import ConfigError
from bert_core.scores import Precision
from bert_core.train.config import OptimizerConfig
from bert_core.train.parallel import each_on_one_rank, is_part, norms, own_part
from bert_core.train.words import table_of

MUON_MOMENTUM = 0.95
ADAMW_STEP = 0.2
"""Usual root mean square of AdamW's steps, in units of the learning rate (Liu et al. 2025)."""
_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")


def parameter_groups(
    model: nn.Module, weight_decay: float, layer_decay: float = 1.0
) -> list[dict[str, Any]]:
    """Return the parameter groups: matrices and embeddings with weight decay, vectors (biases,
    LayerNorms) without. With `layer_decay` below 1, there are two such groups per layer, whose
    `lr_scale` multiplies the learning rate.

    Source: google-research/bert, optimization.py, `exclude_from_weight_decay`.
    """
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    layers = 1 + max((int(match[1]) for match in map(_LAYER.match, trained) if match), default=-1)
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        below = 0 if layer_decay == 1.0 else _layers_below_head(name, layers)
        groups.setdefault((below, parameter.ndim < 2), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": 0.0 if is_vector else weight_decay,
            "lr_scale": layer_decay**below,
        }
        for (below, is_vector), parameters in sorted(groups.items(), key=lambda item: item[0])
    ]


def _layers_below_head(name: str, layers: int) -> int:
    """Return how many layers a parameter is below the heads and the pooler: 1 for the top layer,
    `layers` + 1 for what is below the first."""
    if match := _LAYER.match(name):
        return layers - int(match[1])
    if name.startswith("encoder.convolution."):  # parallel to the first layer
        return layers
    return layers + 1 if name.startswith(("encoder.embeddings.", "encoder.shared.")) else 0


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, precision: Precision = "bf16"
) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter 2019) in torch's fused form, StableAdamW, LAMB, or Muon.

    Args:
        precision: of Muon's matrix products; all else is fp32.
    Raises: ConfigError if the weights are sharded and the optimizer needs whole ones, or if only
        the word embeddings that are read are trained (`train.words`) by an optimizer other than
        AdamW.
    """
    config.check_sharding(any(map(is_part, model.parameters())))
    if config.name != "adamw" and any(map(table_of, model.parameters())):
        raise ConfigError(
            f"optimizer.name: wanted adamw, got {config.name}: only adamw moves unread words by "
            "weight decay alone, and only the word embeddings that are read are trained here; "
            "train all of them to use another optimizer"
        )
    groups = parameter_groups(model, config.weight_decay, config.layer_decay)
    betas = (config.beta1, config.beta2)
    if config.name in ("lamb", "stable_adamw"):
        moments = Lamb if config.name == "lamb" else StableAdamW
        return moments(groups, lr=config.lr, betas=betas, eps=config.eps)
    if config.name == "muon":
        groups = list(_by_algorithm(groups, model))
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        return Muon(groups, lr=config.lr, betas=betas, eps=config.eps, dtype=dtype)
    return AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def _by_algorithm(groups: list[dict[str, Any]], model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield groups with the matrices of layers, which are `orthogonalized`, and groups with
    everything else."""
    matrices = {
        weight
        for name, weight in model.named_parameters()
        if _LAYER.search(name) and weight.ndim == 2
    }
    for group in groups:
        for orthogonalized in (True, False):
            chosen = [
                weight for weight in group["params"] if (weight in matrices) == orthogonalized
            ]
            if chosen:
                yield {**group, "params": chosen, "orthogonalized": orthogonalized}


class Eager(torch.optim.Optimizer):
    """An optimizer without the wrappers by which torch keeps its methods out of compiled graphs.

    They import `torch._dynamo`, which takes as long as torch itself: up to 3 s. Our compiled graphs
    contain no optimizer.
    """

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)


class AdamW(Eager, torch.optim.AdamW):
    """torch's AdamW (Loshchilov and Hutter 2019)."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class Muon(Eager):
    """Muon (Jordan et al. 2024) for matrices of layers, and torch's AdamW for all other weights.

    A matrix moves by its momentum with all singular values made nearly equal. Ranks divide this
    work among themselves and exchange the results. Steps have the size of AdamW's (Liu et al. 2025,
    Muon is scalable for LLM training, section 2.2), so that both take the same learning rate and
    decay.

    torch's own Muon computes in bfloat16 on every processor. On a processor that lacks it, that
    takes 20 times as long as fp32 for the matrices of BERT-tiny.
    """

    def __init__(
        self,
        groups: list[dict],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(groups, {"lr": lr})
        self.dtype = dtype
        # AdamW adds its defaults to the groups, which it shares with this optimizer.
        self._adamw = AdamW(self._groups(False), betas=betas, eps=eps, fused=True)

    def _groups(self, orthogonalized: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["orthogonalized"] == orthogonalized]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        self._adamw.state = self.state  # the state may have been loaded since
        self._adamw.param_groups = self._groups(False)
        self._adamw.step()
        moved = [
            (weight, group)
            for group in self._groups(True)
            for weight in group["params"]
            if weight.grad is not None
        ]
        momenta = [self._momentum(weight, weight.grad) for weight, _ in moved]
        work = partial(orthogonalized, dtype=self.dtype)
        directions = each_on_one_rank(work, momenta, self.dtype)
        for (weight, group), direction in zip(moved, directions, strict=True):
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            size = group["lr"] * ADAMW_STEP * max(weight.shape) ** 0.5
            weight.add_(direction, alpha=-size)

    def _momentum(self, weight: Tensor, slope: Tensor) -> Tensor:
        """Return Nesterov's momentum: the mean of gradients so far, with the current one counted
        again."""
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        mean = state["momentum_buffer"].lerp_(slope, 1 - MUON_MOMENTUM)
        return slope.lerp(mean, MUON_MOMENTUM)


def orthogonalized(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix with the same singular vectors and singular values near 1.

    Source: Jordan et al. 2024, five Newton-Schulz iterations with their coefficients.
    Args:
        matrix: (rows, columns).
        dtype: to compute in.
    """
    upright = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if upright else matrix).to(dtype)  # fewer rows than columns make products cheaper
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        products = x @ x.T
        factors = torch.addmm(products, products, products, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, factors, x, beta=3.4445)
    return x.T if upright else x


class Lamb(Eager):
    """Layerwise adaptive moments for large batches (You et al. 2020, algorithm 2).

    Adam's direction plus weight decay, scaled per tensor by the ratio of the weight's norm to the
    direction's. Vectors (biases, LayerNorms) are not scaled, as in the authors' code
    (tensorflow/addons, `exclude_from_layer_adaptation`) and NVIDIA's. Moments are bias-corrected.
    """

    def __init__(
        self,
        groups: list[dict],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            moved = [(weight, weight.grad) for weight in group["params"] if weight.grad is not None]
            if moved:
                weights, slopes = (list(column) for column in zip(*moved, strict=True))
                self._move(weights, slopes, group)

    def _move(self, weights: list[Tensor], slopes: list[Tensor], group: dict[str, Any]) -> None:
        """Update weights in place; for sharded weights, this rank's part."""
        states = [self._state_of(weight) for weight in weights]
        first = [own_part(state["exp_avg"]) for state in states]
        second = [own_part(state["exp_avg_sq"]) for state in states]
        slopes, weights = [own_part(s) for s in slopes], [own_part(w) for w in weights]
        beta1, beta2 = group["betas"]
        for state in states:
            state["step"] += 1
        steps = float(states[0]["step"])
        torch._foreach_lerp_(first, slopes, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, slopes, slopes, 1 - beta2)
        roots = torch._foreach_div(second, 1 - beta2**steps)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        directions = torch._foreach_div(first, 1 - beta1**steps)
        torch._foreach_div_(directions, roots)
        if group["weight_decay"]:
            torch._foreach_add_(directions, weights, alpha=group["weight_decay"])
        torch._foreach_mul_(directions, self._scales(weights, directions, slopes, roots, states))
        torch._foreach_add_(weights, directions, alpha=-group["lr"])

    def _scales(
        self,
        weights: Sequence[Tensor],
        directions: Sequence[Tensor],
        slopes: Sequence[Tensor],
        roots: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
    ) -> list[Tensor]:
        """Return what each tensor's direction is multiplied by.

        Args:
            roots: of the second moments, with eps added; like the others, this rank's part.
            states: with whole tensors.
        """
        if weights[0].ndim < 2:
            return [torch.ones_like(weight[:1]) for weight in weights]
        sharded = is_part(states[0]["exp_avg"])
        both = zip(norms(weights, sharded), norms(directions, sharded), strict=True)
        return [
            torch.where((weight > 0) & (direction > 0), weight / direction, 1.0)
            for weight, direction in both
        ]

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        return state


class StableAdamW(Lamb):
    """AdamW whose steps are made smaller, tensor by tensor, where gradients outgrow their moments:
    divided by the root mean square of gradient / root of the second moment, if that is above 1
    (Wortsman et al. 2023, algorithm 2). Clipping the gradient's norm is then not needed."""

    def _scales(
        self,
        weights: Sequence[Tensor],
        directions: Sequence[Tensor],
        slopes: Sequence[Tensor],
        roots: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
    ) -> list[Tensor]:
        sharded = is_part(states[0]["exp_avg"])
        outgrown = norms(torch._foreach_div(tuple(slopes), tuple(roots)), sharded)
        sizes = [state["exp_avg"].numel() ** 0.5 for state in states]
        return [
            1 / (norm / size).clamp(min=1.0) for norm, size in zip(outgrown, sizes, strict=True)
        ]
