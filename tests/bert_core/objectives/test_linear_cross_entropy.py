"""Scores in chunks: the same loss, count and gradients as with all scores at once."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from bert_core.objectives import linear_cross_entropy as module
from bert_core.objectives.base import LossPart, cross_entropy
from bert_core.objectives.linear_cross_entropy import linear_cross_entropy

ITEMS, SIZE, CLASSES = 23, 3, 40


@pytest.fixture(params=[1, 5, ITEMS, 100], ids=lambda items: f"{items} items a chunk")
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", request.param * 4 * CLASSES)


def inputs_of(dtype: torch.dtype, items: int = ITEMS) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(items, SIZE), (CLASSES, SIZE), (CLASSES,)]
    learned: list[Tensor] = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes
    ]
    rows, weight, bias = learned
    labels = functional.linear(rows, weight, bias).argmax(-1)
    labels[::3] = torch.randint(CLASSES, labels[::3].shape, generator=generator)
    return learned, labels


def in_chunks(learned: list[Tensor], labels: Tensor) -> LossPart:
    rows, weight, bias = learned
    return linear_cross_entropy(rows, weight, bias, labels)


def at_once(learned: list[Tensor], labels: Tensor) -> LossPart:
    rows, weight, bias = learned
    return cross_entropy(functional.linear(rows, weight, bias), labels)


def gradients(part: LossPart, of: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(part.sum * 0.3, of)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_and_gradients_are_those_of_all_scores_at_once(
    dtype: torch.dtype, most: float
) -> None:
    learned, labels = inputs_of(dtype)
    ours = in_chunks(learned, labels)
    theirs = at_once(learned, labels)
    torch.testing.assert_close(ours.sum, theirs.sum, atol=most * ITEMS, rtol=0)
    assert ours.correct is not None
    assert (ours.count, ours.correct) == (theirs.count, theirs.correct)
    assert 0 < ours.correct < ITEMS
    for mine, other in zip(gradients(ours, learned), gradients(theirs, learned), strict=True):
        torch.testing.assert_close(mine, other, atol=most, rtol=0)


@pytest.mark.usefixtures("chunked")
def test_under_autocast_the_sum_is_fp32_and_gradients_are_those_of_bf16() -> None:
    learned, labels = inputs_of(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = in_chunks(learned, labels), at_once(learned, labels)
    assert ours.sum.dtype == torch.float32
    torch.testing.assert_close(ours.sum, theirs.sum, rtol=1e-2, atol=0)
    for mine, other in zip(gradients(ours, learned), gradients(theirs, learned), strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, atol=0.05, rtol=0.05)


def test_no_items_give_zero_and_zero_gradients() -> None:
    learned, labels = inputs_of(torch.float32, items=0)
    part = in_chunks(learned, labels)
    assert part.correct is not None
    assert (float(part.sum.detach()), part.count, int(part.correct)) == (0.0, 0, 0)
    assert not any(gradient.any() for gradient in gradients(part, learned))


def test_the_scores_of_all_items_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 4 * 4 * CLASSES)

    class Largest(TorchDispatchMode):
        scores = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, Tensor) and CLASSES in tensor.shape and tensor.ndim == 2:
                    self.scores = max(self.scores, min(tensor.shape))
            return out

    learned, labels = inputs_of(torch.float32)
    with Largest() as seen:
        gradients(in_chunks(learned, labels), learned)
    assert seen.scores == 4
