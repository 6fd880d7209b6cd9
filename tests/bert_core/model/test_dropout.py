"""Dropout: what torch's does, drawn faster."""

import math

import pytest
import torch

from bert_core.model.dropout import Dropout, dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(400, 1001), (3, 5, 7)])
def test_as_many_are_dropped_as_asked_and_the_mean_stays(p: float, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    found = dropout(torch.ones(shape), p)
    count = found.numel()
    dropped = int((found == 0).sum())
    assert abs(dropped - p * count) < 4 * math.sqrt(count * p * (1 - p))
    torch.testing.assert_close(
        found[found > 0].unique(), torch.tensor([1 / (1 - p)]), rtol=2e-4, atol=0
    )


def test_neighbours_and_columns_are_dropped_by_themselves() -> None:
    torch.manual_seed(0)
    kept = (dropout(torch.ones(2000, 64), 0.5) > 0).double()
    together = torch.corrcoef(kept.T) - torch.eye(64)
    assert together.abs().max() < 5 / math.sqrt(2000)


def test_gradients_pass_where_values_do() -> None:
    values = torch.randn(50, 50, requires_grad=True)
    found = dropout(values, 0.3)
    found.sum().backward()
    torch.testing.assert_close(values.grad, found.detach() / values.detach())


def test_one_seed_drops_the_same_and_nothing_is_dropped_in_evaluation() -> None:
    layer, values = Dropout(0.2), torch.randn(30, 30)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(layer(values))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(layer.eval()(values), values)
    assert torch.equal(dropout(values, 0.0), values)
