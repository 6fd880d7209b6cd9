"""Encoders that read rows of several low-rank adapters in one pass.

The weights are computed with once for all tokens; then each group of tokens gets the low-rank
product of its own adapter added. A group's result does not depend on the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from bert_core.errors import ConfigError
from bert_core.model.config import DisentangledAttentionConfig, EncoderConfig
from bert_core.model.encoder import Encoder

Factors = tuple[Float[Tensor, "low inputs"], Float[Tensor, "outputs low"]]
"""A and B of the change `B @ A` of a weight."""


@dataclass(frozen=True)
class Group:
    """The tokens from `start` up to, not including, `end`, which are those of an adapter."""

    adapter: str
    start: int
    end: int


_GROUPS: ContextVar[Sequence[Group]] = ContextVar("groups", default=())


class Mixed(nn.Module):
    """A linear layer with changes for the groups of tokens of the current pass."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.factors: dict[str, Factors] = {}
        """By adapter; those that leave the layer as it is are not listed."""

    def forward(self, hidden: Float[Tensor, "tokens inputs"]) -> Float[Tensor, "tokens outputs"]:
        changed = self.base(hidden)
        for group in _GROUPS.get():
            if (factors := self.factors.get(group.adapter)) is not None:
                a, b = factors
                tokens = slice(group.start, group.end)
                changed[tokens] += functional.linear(functional.linear(hidden[tokens], a), b)
        return changed


def check_mixable(config: EncoderConfig) -> None:
    """Raise ConfigError if an encoder cannot read rows of several adapters in one pass."""
    if isinstance(config.attention, DisentangledAttentionConfig):
        raise ConfigError(
            f"adapters: wanted a family whose linear layers read tokens alone, got "
            f"{config.family}, in which distances pass through them too: merge each adapter into "
            "the base with raybert export --adapter, and use the whole models"
        )


def make_mixed(encoder: Encoder) -> None:
    """Make the linear layers of an encoder, except for its pooler, take changes."""
    linear = [
        name
        for name, module in encoder.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith("pooler.")
    ]
    for name in linear:
        owner, _, child = name.rpartition(".")
        setattr(encoder.get_submodule(owner), child, Mixed(encoder.get_submodule(name)))


def mixed_layers(encoder: Encoder) -> dict[str, Mixed]:
    """Return the layers that take changes, by name."""
    return {name: part for name, part in encoder.named_modules() if isinstance(part, Mixed)}


def set_adapter(encoder: Encoder, adapter: str, changes: Mapping[str, Factors]) -> None:
    """Set an adapter's factors, by layer; without any, forget the adapter."""
    for name, layer in mixed_layers(encoder).items():
        layer.factors.pop(adapter, None)
        if name in changes:
            layer.factors[adapter] = changes[name]


@contextmanager
def adapted_by(groups: Sequence[Group]) -> Iterator[None]:
    """Change the tokens of passes inside the context, whose rows are packed, by their adapters."""
    token = _GROUPS.set(groups)
    try:
        yield
    finally:
        _GROUPS.reset(token)
