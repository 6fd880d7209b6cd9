"""Weights that encoders share: embeddings in training, with or without disentangled gradients, and
a digest by which equal encoders are recognized."""

import hashlib
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bert_core.model.encoder import Encoder
from bert_core.model.low_rank import without_changes


class GradientDisentangled(nn.Module):
    """A weight as the sum of another weight, through which no gradient flows, and a learned
    difference.

    Source: He et al. 2021 (DeBERTaV3), section 3.3, E_D = sg(E_G) + E_Δ.
    """

    def __init__(self, shared: nn.Embedding) -> None:
        super().__init__()
        self._shared = (shared,)  # NOTE: in a tuple, or its weight would be registered here too

    def forward(
        self, difference: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "vocab embedding"]:
        return self._shared[0].weight.detach() + difference

    def right_inverse(
        self, weight: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "vocab embedding"]:
        """Return the difference that gives this weight, so that assigning to the weight works."""
        return weight - self._shared[0].weight.detach()


def share_words(encoder: Encoder, generator: Encoder) -> None:
    """Make `encoder`'s word embeddings those of `generator` plus a difference that starts at 0."""
    words, shared = (model.embeddings.word_embeddings for model in (encoder, generator))
    parametrize.register_parametrization(words, "weight", GradientDisentangled(shared))
    words.weight = shared.weight.detach().clone()


def share_embeddings(encoder: Encoder, generator: Encoder) -> None:
    """Make the tables of words, positions and segments, and their LayerNorm, the same weights in
    both encoders, which train them together (Clark et al. 2020, section 3.2)."""
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings", "norm"):
        setattr(generator.embeddings, name, getattr(encoder.embeddings, name))


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights as used; a parametrized or low-rank weight replaces the tensors that it is
    computed from."""
    state = without_changes(model.state_dict(), model)
    for part, name in _parametrized(model):
        module, _, weight = name.rpartition(".")
        del state[f"{module}.parametrizations.{weight}.original"]
        state[name] = getattr(part, weight).detach()
    return state


def encoder_digest(encoder: Encoder) -> str:
    """Return a sha256 over the config and the weights, names included, of an encoder without its
    pooler, which each head has trained for itself."""
    digest = hashlib.sha256(repr(encoder.config).encode())
    for name, weight in sorted(plain_state(encoder).items()):
        if not name.startswith("pooler."):
            digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
            digest.update(weight.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_plain_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the weights that `plain_state` returned, or some of them."""
    parametrized = {name: part for part, name in _parametrized(model)}
    plain = {name: weight for name, weight in state.items() if name not in parametrized}
    model.load_state_dict(plain, strict=False)
    for name in parametrized.keys() & state.keys():  # after the weights that they are computed from
        setattr(parametrized[name], name.rpartition(".")[2], state[name])


def _parametrized(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the modules with parametrized weights, one entry per weight with its full name."""
    return [
        (part, f"{module}.{weight}")
        for module, part in model.named_modules()
        if parametrize.is_parametrized(part)
        for weight in part.parametrizations
    ]
