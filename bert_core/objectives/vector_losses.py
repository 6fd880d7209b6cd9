"""Losses of vectors that are compared with each other, by their cosines or their products.

Each is a sum over the rows of a batch. `Embedding` computes them of dense vectors, `Splade` of
sparse ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from bert_core.objectives import VectorLoss
from bert_core.objectives.base import (
    OWN_ROWS,
    Batch,
    LossPart,
    cross_entropy,
    soft_cross_entropy,
)

SCORES_AT_ONCE = 1 << 20
"""Scores of rows against texts in memory at once, 4 MB in fp32; ten such tensors are needed."""


@dataclass(frozen=True)
class Compared:
    """Which texts are compared, by their places among all V texts of a batch: each of R rows' own
    text, and the C texts that the rows are compared with, row after row."""

    own_at: Int[Tensor, "rows"]
    others_at: Int[Tensor, "compared"]
    row_of: Int[Tensor, "compared"]
    """The row of each compared text."""
    targets: Int[Tensor, "rows"]
    """Place of each row's relevant text, its first, among the compared texts."""

    @classmethod
    def of(cls, choices: Int[Tensor, "rows"]) -> "Compared":
        """Return the places for rows with these numbers of texts."""
        own_at = choices.cumsum(0) - choices
        row_of = counted(choices)
        is_compared = torch.arange(len(row_of), device=choices.device) != own_at[row_of]
        others_at = is_compared.nonzero()[:, 0]
        targets = own_at - torch.arange(len(choices), device=choices.device)
        return cls(own_at, others_at, row_of[others_at], targets)


@dataclass(frozen=True)
class Compares:
    """How two vectors are compared."""

    temperature: float
    """Divisor of what is compared, unless a loss does not read it."""
    scaled: bool = True
    """Whether vectors are compared by their cosine; otherwise by their product."""

    def fitted(self, vectors: Float[Tensor, "items width"]) -> Float[Tensor, "items width"]:
        """Return vectors whose products are what is compared."""
        return functional.normalize(vectors, dim=-1) if self.scaled else vectors

    def similarities(
        self, vectors: Float[Tensor, "items width"], texts: Compared
    ) -> Float[Tensor, "compared"]:
        """Return how similar each compared text is to its row's own text, before the
        temperature."""
        fitted = self.fitted(vectors)
        own = fitted.index_select(0, texts.own_at[texts.row_of])
        return (own * fitted.index_select(0, texts.others_at)).sum(-1)


@dataclass(frozen=True)
class Contrastive(Compares):
    """Softmax over similarities divided by `temperature`, among the compared texts of all rows of
    the batch; the target is the row's first compared text. Also known as in-batch negatives,
    InfoNCE, or sentence-transformers' MultipleNegativesRankingLoss.

    Scores are computed in blocks of rows, so that memory does not grow with the square of the
    batch.

    Source: van den Oord et al. 2018, section 2.3; negatives from other rows as in Henderson et al.
        2017, section 4.4.
    """

    chooses: ClassVar[bool] = True
    joint: ClassVar[bool] = True

    def count(self, batch: Batch) -> int:
        return len(batch["choices"])

    def part(self, vectors: Float[Tensor, "items width"], batch: Batch) -> LossPart:
        """Return the loss of the rows `OWN_ROWS` against the texts of all rows."""
        return self._over_blocks(cross_entropy, (vectors,), batch)

    def soft_part(
        self,
        vectors: Float[Tensor, "items width"],
        teachers: Float[Tensor, "items other_width"],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        def loss(student: Tensor, teacher: Tensor, targets: Tensor) -> LossPart:
            return soft_cross_entropy(student, teacher, temperature)

        return self._over_blocks(loss, (vectors, teachers), batch)

    def _over_blocks(
        self, loss: Callable[..., LossPart], models: Sequence[Tensor], batch: Batch
    ) -> LossPart:
        """Return the sum of `loss`, a function of each model's scores (rows, compared) and of the
        targets (rows,), over blocks of rows.

        Args:
            models: each model's vectors of all texts.
        """
        texts = Compared.of(batch["choices"])
        wrong = FalseNegatives.among(texts, batch["texts"])
        units = [self.fitted(vectors) for vectors in models]

        def of_rows(rows: Tensor, owns: Sequence[Tensor], others: Sequence[Tensor]) -> LossPart:
            ruled_out = wrong.mask(rows)
            with torch.autocast(rows.device.type, enabled=False):  # bf16 has only three digits
                scores = [
                    (own @ other.mT / self.temperature).masked_fill(ruled_out, -inf)
                    for own, other in zip(owns, others, strict=True)
                ]  # (rows, C) each
                return loss(*scores, texts.targets[rows])

        own_rows = batch.get(OWN_ROWS, torch.arange(len(texts.own_at), device=texts.own_at.device))
        blocks = own_rows.split(max(1, SCORES_AT_ONCE // max(1, len(texts.others_at))))
        total, correct = _SumOfBlocks.apply(of_rows, blocks, texts, *units)
        return LossPart(total, len(own_rows), correct)


class _SumOfBlocks(torch.autograd.Function):
    """The sum of a loss over blocks of rows. A block's gradient is computed with its loss, so that
    its scores are computed once, and those of one block at a time are in memory.

    The first model's vectors get a gradient; a teacher's do not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        of_rows: Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], LossPart],
        blocks: Sequence[Int[Tensor, "rows"]],
        texts: Compared,
        *units: Float[Tensor, "items _"],
    ) -> tuple[Tensor, Tensor]:
        trains = ctx.needs_input_grad[3]
        others = [unit.index_select(0, texts.others_at) for unit in units]
        of_others = torch.zeros_like(others[0]) if trains else None
        slopes = torch.zeros_like(units[0]) if trains else None
        sums, correct = [], []
        for rows in blocks:
            at = texts.own_at[rows]
            owns = [unit.index_select(0, at) for unit in units]
            with torch.set_grad_enabled(trains):
                leaves = [vectors[0].requires_grad_(trains) for vectors in (owns, others)]
                part = of_rows(rows, owns, others)
            if slopes is not None and of_others is not None:
                of_own, of_other = torch.autograd.grad(part.sum, leaves)
                slopes.index_copy_(0, at, of_own)
                of_others += of_other
            sums.append(part.sum.detach())
            assert part.correct is not None
            correct.append(part.correct)
        if slopes is not None and of_others is not None:
            ctx.save_for_backward(slopes.index_copy_(0, texts.others_at, of_others))
        counted = torch.stack(correct).sum()
        ctx.mark_non_differentiable(counted)
        return torch.stack(sums).sum(), counted

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        without = (None,) * (len(ctx.needs_input_grad) - 4)
        return None, None, None, slope * slopes, *without


@dataclass(frozen=True)
class FalseNegatives:
    """The compared texts that are left out of a row's softmax, because they are not wrong: copies
    of the row's own text, and copies of any text that is relevant to the same own text."""

    anchors: Int[Tensor, "rows"]
    """A number for each row's own text, from 0."""
    firsts: Int[Tensor, "anchors_1"]
    """Where the right texts of each own text begin, and their number."""
    starts: Int[Tensor, "right"]
    lengths: Int[Tensor, "right"]
    """The copies of each right text among the compared texts: a range of `by_text`."""
    by_text: Int[Tensor, "compared"]
    """The compared texts in the order of their numbers."""
    targets: Int[Tensor, "rows"]
    """The relevant text of each row, which is never left out of the row's own softmax."""

    @classmethod
    def among(cls, texts: Compared, numbers: Int[Tensor, "items"]) -> "FalseNegatives":
        """Find them by the texts' numbers, which are equal for equal texts. Time and memory grow
        with the number of texts, not with its square."""
        own, compared = numbers[texts.own_at], numbers[texts.others_at]
        own_texts, anchors = own.unique(return_inverse=True)
        many = int(numbers.max()) + 1
        keys = (anchors.repeat(2) * many + torch.cat([compared[texts.targets], own])).unique()
        of_anchor, right = keys // many, keys % many  # sorted by both
        in_order, by_text = compared.sort(stable=True)
        starts = torch.searchsorted(in_order, right)
        ends = torch.searchsorted(in_order, right, right=True)
        firsts = torch.searchsorted(of_anchor, torch.arange(len(own_texts) + 1, device=own.device))
        return cls(anchors, firsts, starts, ends - starts, by_text, texts.targets)

    def mask(self, rows: Int[Tensor, "some"]) -> Bool[Tensor, "some compared"]:
        """Return which texts are left out of the softmax of these rows."""
        anchors = self.anchors[rows]
        row, right = expanded(self.firsts[anchors], self.firsts.diff()[anchors])
        of_right, at = expanded(self.starts[right], self.lengths[right])
        mask = torch.zeros(len(rows), len(self.by_text), dtype=torch.bool, device=rows.device)
        mask[row[of_right], self.by_text[at]] = True
        mask[torch.arange(len(rows), device=rows.device), self.targets[rows]] = False
        return mask


@dataclass(frozen=True)
class Cosine(Compares):
    """The squared error of each pair's similarity (Reimers and Gurevych 2019, section 3); no
    temperature is read."""

    chooses: ClassVar[bool] = False
    joint: ClassVar[bool] = False

    def count(self, batch: Batch) -> int:
        return len(batch["similarities"]) - len(batch["choices"])

    def part(self, vectors: Float[Tensor, "items width"], batch: Batch) -> LossPart:
        texts = Compared.of(batch["choices"])
        return self._squared_errors(
            self.similarities(vectors, texts), batch["similarities"][texts.others_at]
        )

    def soft_part(
        self,
        vectors: Float[Tensor, "items width"],
        teachers: Float[Tensor, "items other_width"],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        texts = Compared.of(batch["choices"])
        targets = self.similarities(teachers, texts)
        return self._squared_errors(self.similarities(vectors, texts), targets)

    def _squared_errors(
        self, scores: Float[Tensor, "compared"], targets: Float[Tensor, "compared"]
    ) -> LossPart:
        return LossPart((scores - targets).square().sum(), len(scores), None)


@dataclass(frozen=True)
class ListDivergence(Compares):
    """The divergence of two softmaxes over each row's compared texts: of similarities divided by
    `temperature`, and of a teacher's scores (Hinton et al. 2015; as in Ren et al. 2021, RocketQAv2,
    section 3.3).
    """

    chooses: ClassVar[bool] = True
    joint: ClassVar[bool] = False

    def count(self, batch: Batch) -> int:
        return len(batch["choices"])

    def part(self, vectors: Float[Tensor, "items width"], batch: Batch) -> LossPart:
        texts = Compared.of(batch["choices"])
        return self._divergence(vectors, batch["similarities"][texts.others_at], batch, 1.0)

    def soft_part(
        self,
        vectors: Float[Tensor, "items width"],
        teachers: Float[Tensor, "items other_width"],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        cosines = self.similarities(teachers, Compared.of(batch["choices"]))
        return self._divergence(vectors, cosines / self.temperature, batch, temperature)

    def _divergence(
        self,
        vectors: Float[Tensor, "items width"],
        scores: Float[Tensor, "compared"],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        sizes = batch["choices"]
        cosines = self.similarities(vectors, Compared.of(sizes)) / self.temperature
        lists = [
            pad_sequence(each.split((sizes - 1).tolist()), batch_first=True, padding_value=-inf)
            for each in (cosines, scores.to(cosines.dtype))
        ]  # (R, most texts in a row) each
        return soft_cross_entropy(lists[0], lists[1], temperature)


@dataclass(frozen=True)
class MarginError(Compares):
    """The squared error of each negative's margin: how far its similarity divided by `temperature`
    is below that of the row's relevant text, against the same difference of a teacher's scores
    (MarginMSE, Hofstätter et al. 2020, equation 4)."""

    chooses: ClassVar[bool] = False
    joint: ClassVar[bool] = False

    def count(self, batch: Batch) -> int:
        return len(batch["similarities"]) - 2 * len(batch["choices"])

    def part(self, vectors: Float[Tensor, "items width"], batch: Batch) -> LossPart:
        texts = Compared.of(batch["choices"])
        return self._squared_errors(vectors, batch["similarities"][texts.others_at], texts)

    def soft_part(
        self,
        vectors: Float[Tensor, "items width"],
        teachers: Float[Tensor, "items other_width"],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        texts = Compared.of(batch["choices"])
        scores = self.similarities(teachers, texts) / self.temperature
        return self._squared_errors(vectors, scores, texts)

    def _squared_errors(
        self,
        vectors: Float[Tensor, "items width"],
        scores: Float[Tensor, "compared"],
        texts: Compared,
    ) -> LossPart:
        gaps = self.similarities(vectors, texts) / self.temperature - scores
        errors = gaps[texts.targets[texts.row_of]] - gaps  # 0 for the relevant text itself
        return LossPart(errors.square().sum(), len(gaps) - len(texts.own_at), None)


Loss = Contrastive | Cosine | ListDivergence | MarginError
LOSSES: dict[VectorLoss, Callable[[float, bool], Loss]] = {
    "contrastive": Contrastive,
    "cosine": Cosine,
    "kl": ListDivergence,
    "margin_mse": MarginError,
}
"""A loss, from its temperature and whether vectors are scaled. It says how many items a batch has,
what they cost, and whether rows share it."""


def counted(sizes: Int[Tensor, "groups"]) -> Int[Tensor, "members"]:
    """Return the group of each member."""
    return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)


def expanded(
    starts: Int[Tensor, "ranges"], lengths: Int[Tensor, "ranges"]
) -> tuple[Int[Tensor, "members"], Int[Tensor, "members"]]:
    """Return the range of each member, and the member, of ranges one after the other."""
    range_of = counted(lengths)
    shifts = starts - (lengths.cumsum(0) - lengths)
    return range_of, shifts[range_of] + torch.arange(len(range_of), device=starts.device)
