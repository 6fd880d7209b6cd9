"""Losses of lists beside sentence-transformers' and their definitions."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_core.objectives.base import OWN_ROWS, Batch
from bert_core.objectives.listwise import Listwise
from tests import tiny

CONFIG = tiny.encoder_config(9)
QUERIES = [1, 0, 1, 2, 1, 0, 2, 1]
GRADES = [0.0, 2.0, 3.0, 1.0, 0.0, 1.0, 1.0, 1.0]


@pytest.fixture(scope="module")
def losses() -> Any:
    """Those of sentence-transformers, whose import takes seconds."""
    from sentence_transformers.cross_encoder import losses

    return losses


def batch_of(queries: list[int], grades: list[float]) -> Batch:
    numbers = torch.tensor(queries)
    return {
        "queries": numbers,
        "labels": torch.tensor(grades)[:, None],
        "query_shares": 1 / numbers.bincount()[numbers],
    }


def scores_of(count: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(count, 1, generator=rng)).requires_grad_()


def theirs(kind: Any, scores: Tensor, **settings: Any) -> Tensor:
    """The loss of `QUERIES`, in their order, as sentence-transformers computes it."""
    rows = [[n for n, query in enumerate(QUERIES) if query == each] for each in range(3)]
    model: Any = lambda tokens: {"scores": scores[[int(row) for _, row in tokens["pairs"]]]}  # noqa: E731
    fake = SimpleNamespace(preprocess=lambda pairs, **_: {"pairs": pairs}, device="cpu")

    class Model:
        preprocess, device = staticmethod(fake.preprocess), "cpu"

        def __call__(self, tokens: Any) -> Any:
            return model(tokens)

    settings = {"activation_fn": torch.nn.Identity(), "mini_batch_size": None, **settings}
    loss = SimpleNamespace(model=Model(), **settings)
    documents = [[str(row) for row in each] for each in rows]
    labels = [torch.tensor([GRADES[row] for row in each]) for each in rows]
    return kind.forward(loss, [["q", "r", "s"], documents], labels)


def test_listnet_is_that_of_sentence_transformers(
    losses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sentence_transformers.cross_encoder.losses.list_net.batch_to_device",
        lambda tokens, device: tokens,
        raising=False,
    )
    scores, batch = scores_of(8), batch_of(QUERIES, GRADES)
    objective = Listwise(CONFIG, "listnet")
    part = objective.part(scores, batch)
    wanted = theirs(losses.ListNetLoss, scores, cross_entropy_loss=torch.nn.CrossEntropyLoss())
    assert objective.divisor(batch) == pytest.approx(3), "queries"
    compare(part.sum / 3, wanted, scores)


def test_lambda_loss_is_that_of_sentence_transformers(losses: Any) -> None:
    scores = scores_of(8)
    part = Listwise(CONFIG, "lambda").part(scores, batch_of(QUERIES, GRADES))
    wanted = theirs(
        losses.LambdaLoss, scores, weighting_scheme=losses.NDCGLoss2PPScheme(), k=None, sigma=1.0,
        eps=1e-10, reduction_log="binary",
    )  # fmt: skip
    pairs = 1 + 5 + 0  # of different grades: their loss is the mean over these
    compare(part.sum / pairs, wanted, scores)


def compare(ours: Tensor, wanted: Tensor, scores: Tensor) -> None:
    torch.testing.assert_close(ours, wanted)
    [slopes], [expected] = (torch.autograd.grad(loss, scores) for loss in (ours, wanted))
    torch.testing.assert_close(slopes, expected)


@pytest.mark.parametrize("loss", ["listnet", "lambda"])
def test_each_list_counts_where_its_first_row_is(loss: Any) -> None:
    objective, scores, batch = Listwise(CONFIG, loss), scores_of(8), batch_of(QUERIES, GRADES)
    teachers = scores_of(8, seed=1).detach()
    for part in (objective.part, lambda *of: objective.soft_part(of[0], teachers, of[1], 2.0)):
        whole = part(scores, batch)
        shares = [
            part(scores, batch | {OWN_ROWS: torch.tensor(rows)})
            for rows in ([0, 2, 3], [1, 4], [5, 6, 7])
        ]
        torch.testing.assert_close(torch.stack([each.sum for each in shares]).sum(), whole.sum)
        assert sum(each.count for each in shares) == whole.count == 8
        assert shares[2].sum == 0, "rows that are first of no query"


def test_a_list_of_one_passage_or_of_equal_ones_teaches_nothing_to_lambda_loss() -> None:
    scores = scores_of(3)
    part = Listwise(CONFIG, "lambda").part(scores, batch_of([0, 1, 1], [1.0, 0.0, 0.0]))
    [slopes] = torch.autograd.grad(part.sum, scores)
    assert part.sum == 0
    assert not slopes.any()
