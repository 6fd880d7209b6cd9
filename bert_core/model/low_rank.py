"""Linear layers with low-rank changes (LoRA, Hu et al. 2022): `W + scale * B @ A`, of which only A
and B learn."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from bert_core.model.dropout import Dropout


class Adapted(nn.Module):
    """A linear layer, and a low-rank change of some of its outputs.

    Query, key and value are one matrix here and may be changed apart: the outputs are equal parts,
    each of which has factors of its own or none.
    """

    def __init__(
        self, base: nn.Module, parts: Sequence[bool], *, rank: int, scale: float, dropout: float
    ) -> None:
        """Start with a change of zero: A is drawn as torch draws linear layers, B is zero.

        Args:
            base: has a `weight` (outputs, inputs) and a `bias`; it is frozen.
            parts: whether each part of the outputs is changed, at least one.
            dropout: of the input of A.
        """
        super().__init__()
        weight = base.get_parameter("weight")
        outputs, inputs = weight.shape
        self.base = base.requires_grad_(False)
        self.parts, self.rank, self.scale = tuple(parts), rank, scale
        self.dropout = Dropout(dropout)
        rows = sum(parts) * (outputs // len(parts))
        self.lora_a = nn.Parameter(weight.new_empty(sum(parts) * rank, inputs))
        self.lora_b = nn.Parameter(weight.new_zeros(rows, rank))
        nn.init.uniform_(self.lora_a, -(inputs**-0.5), inputs**-0.5)

    def forward(self, hidden: Float[Tensor, "*tokens inputs"]) -> Float[Tensor, "*tokens outputs"]:
        low = functional.linear(self.dropout(hidden), self.lora_a)  # (*tokens, parts × rank)
        plain = self.base(hidden)
        changed = torch.addmm(plain.flatten(0, -2), low.flatten(0, -2), self._spread().T)
        return changed.view_as(plain)

    def _spread(self) -> Float[Tensor, "outputs low"]:
        """Return B, scaled, with the factor of every part in its own rows and columns."""
        factors = iter((self.lora_b * self.scale).chunk(sum(self.parts)))
        size = self.lora_b.shape[0] // sum(self.parts)
        none = self.lora_b.new_zeros(size, 0)
        return torch.block_diag(*(next(factors) if chosen else none for chosen in self.parts))

    @property
    def weight(self) -> Float[Tensor, "outputs inputs"]:
        """Return the changed weight, for what reads it otherwise than by a forward pass."""
        return self.base.get_parameter("weight") + self._spread() @ self.lora_a

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias  # type: ignore[return-value]

    def factors(self) -> Iterator[tuple[Tensor, Tensor] | None]:
        """Yield A (rank, inputs) and B (size, rank) of every part; None where it is not changed."""
        count = sum(self.parts)
        pairs = zip(self.lora_a.chunk(count), self.lora_b.chunk(count), strict=True)
        return (next(pairs) if chosen else None for chosen in self.parts)


def adapted_modules(model: nn.Module) -> dict[str, Adapted]:
    """Return the changed layers of a model, by name."""
    return {name: part for name, part in model.named_modules() if isinstance(part, Adapted)}


def without_changes(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state with the weights that its changed layers compute, added up in fp64, in
    place of what they are computed from, under the names that the layers have without changes."""
    plain = dict(state)
    for name, part in adapted_modules(model).items():
        for key in [key for key in plain if key.startswith(f"{name}.")]:
            inner = key.removeprefix(f"{name}.base.")
            tensor = plain.pop(key)
            if inner == "weight":
                low = part._spread().detach().double() @ part.lora_a.detach().double()
                tensor = (tensor.double() + low).to(tensor.dtype)
            if inner != key:
                plain[f"{name}.{inner}"] = tensor
    return plain
