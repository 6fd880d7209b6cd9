"""Word embeddings that two encoders share, each learning in its own way."""

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bert_core.model.encoder import Encoder


class GradientDisentangled(nn.Module):
    """A weight as another one, which gets no gradient from it, and a difference, which is learned.

    Source: He et al. 2021 (DeBERTaV3), section 3.3, E_D = sg(E_G) + E_Δ.
    """

    def __init__(self, shared: nn.Embedding) -> None:
        super().__init__()
        self._shared = (shared,)  # NOTE: in a tuple, or its weight would be a weight of this too

    def forward(
        self, difference: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "vocab embedding"]:
        return self._shared[0].weight.detach() + difference

    def right_inverse(
        self, weight: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "vocab embedding"]:
        """The difference that makes the weight this one: what is assigned to it is kept so."""
        return weight - self._shared[0].weight.detach()


def share_words(encoder: Encoder, generator: Encoder) -> None:
    """Make `encoder`'s word embeddings those of `generator` and a difference, which begins at 0."""
    own, other = (each.embeddings.word_embeddings for each in (encoder, generator))
    parametrize.register_parametrization(own, "weight", GradientDisentangled(other))
    own.weight = other.weight.detach().clone()


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """All weights as they are used: where one is made of others, itself in their place."""
    state = dict(model.state_dict())
    for part, name in _parametrized(model):
        module, _, weight = name.rpartition(".")
        del state[f"{module}.parametrizations.{weight}.original"]
        state[name] = getattr(part, weight).detach()
    return state


def load_plain_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put weights in place that `plain_state` gave, or some of them."""
    made = {name: part for part, name in _parametrized(model)}
    own = {name: weight for name, weight in state.items() if name not in made}
    model.load_state_dict(own, strict=False)
    for name in made.keys() & state.keys():  # after what they are made of
        setattr(made[name], name.rpartition(".")[2], state[name])


def _parametrized(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules whose weights are made of others, each with the whole name of one."""
    return [
        (part, f"{module}.{weight}")
        for module, part in model.named_modules()
        if parametrize.is_parametrized(part)
        for weight in part.parametrizations
    ]
