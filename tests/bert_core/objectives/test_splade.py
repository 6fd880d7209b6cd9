"""Training of sparse vectors beside sentence-transformers', on the same numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_core.batches import pad
from bert_core.objectives import splade
from bert_core.objectives.base import OWN_ROWS, Batch, ObjectiveModel
from bert_core.objectives.splade import Flops, Splade
from bert_core.train.config import LoopConfig, OptimizerConfig
from bert_core.train.loop import training_steps
from bert_core.train.optim import build_optimizer
from tests import tiny

ROWS, TEXTS, WIDTH = 7, 4, 12
TOKENIZER = tiny.tokenizer()
CONFIG = tiny.encoder_config(TOKENIZER.vocab_size, initializer_range=0.5, dropout=0.0)
COST = Flops(queries=0.5, passages=0.3, warmup=0.25)


def objective_of(loss: Any = "contrastive", flops: Flops = COST) -> Splade:
    return Splade(CONFIG, loss=loss, flops=flops)


def batch_of(scores: Tensor) -> Batch:
    """The labels of rows with `TEXTS` texts each, all different; a teacher's scores."""
    own = torch.ones(len(scores), 1)
    return {
        "choices": torch.full((len(scores),), TEXTS),
        "texts": torch.arange(len(scores) * TEXTS),
        "similarities": torch.cat([own, scores], dim=1).flatten(),
    }


def vectors_and_scores() -> tuple[Tensor, Tensor]:
    """Weights of entries, half of which are 0, and a teacher's scores of each row's texts."""
    rng = torch.Generator().manual_seed(0)
    vectors = torch.randn(ROWS * TEXTS, WIDTH, generator=rng, dtype=torch.float64).relu()
    scores = torch.randn(ROWS, TEXTS - 1, generator=rng, dtype=torch.float64)
    return vectors.requires_grad_(), scores


@pytest.fixture(scope="module")
def losses() -> Any:
    """Those of sentence-transformers, whose import takes seconds."""
    from sentence_transformers.sparse_encoder import losses

    return losses


@pytest.mark.parametrize("loss", ["contrastive", "margin_mse", "kl"])
def test_loss_and_gradient_are_those_of_splade_loss(loss: str, losses: Any) -> None:
    vectors, scores = vectors_and_scores()
    model, labels = torch.nn.Identity(), None
    if loss == "contrastive":
        ranked = losses.SparseMultipleNegativesRankingLoss(model)
    elif loss == "margin_mse":
        ranked, labels = losses.SparseMarginMSELoss(model), scores[:, :1] - scores[:, 1:]
    else:
        ranked, labels = losses.SparseDistillKLDivLoss(model, temperature=1.0), scores
    theirs = losses.SpladeLoss(
        model, ranked, document_regularizer_weight=0.3, query_regularizer_weight=0.5
    )
    columns = list(vectors.view(ROWS, TEXTS, WIDTH).unbind(1))
    documents = theirs.document_regularizer.compute_loss_from_embeddings(torch.cat(columns[1:]))
    queries = theirs.query_regularizer.compute_loss_from_embeddings(columns[0])
    wanted = ranked.compute_loss_from_embeddings(columns, labels)
    wanted = wanted + 0.3 * documents + 0.5 * queries
    part = objective_of(loss).part(vectors, batch_of(scores))
    found = part.sum / part.count
    torch.testing.assert_close(found, wanted)
    ours, peers = (torch.autograd.grad(each, vectors)[0] for each in (found, wanted))
    torch.testing.assert_close(ours, peers)


@pytest.mark.parametrize("loss", ["contrastive", "margin_mse", "kl"])
def test_the_shares_of_rows_add_up_to_the_loss_of_all(loss: str) -> None:
    """However rows are divided among ranks: tevatron#36 had 2 and 4 times the weight."""
    vectors, scores = vectors_and_scores()
    batch, objective = batch_of(scores), objective_of(loss)
    whole = objective.part(vectors, batch)
    shares = [
        objective.part(vectors, batch | {OWN_ROWS: torch.tensor(own)})
        for own in ([0, 3, 4], [1], [2, 5, 6])
    ]
    assert sum(share.count for share in shares) == whole.count
    total = torch.stack([share.sum for share in shares]).sum()
    torch.testing.assert_close(total, whole.sum)
    ours, wanted = (torch.autograd.grad(each, vectors)[0] for each in (total, whole.sum))
    torch.testing.assert_close(ours, wanted)


def test_the_weights_rise_with_the_square_of_the_step_as_sentence_transformers_does(
    losses: Any,
) -> None:
    from sentence_transformers.sparse_encoder.callbacks import splade_callbacks

    theirs = losses.SpladeLoss(
        torch.nn.Identity(),
        losses.SparseMultipleNegativesRankingLoss(torch.nn.Identity()),
        document_regularizer_weight=0.3,
        query_regularizer_weight=0.5,
    )
    schedule: Any = splade_callbacks.SpladeRegularizerWeightSchedulerCallback
    callback = schedule(theirs, warmup_ratio=0.25)
    state = SimpleNamespace(max_steps=40, global_step=0)
    callback.on_train_begin(None, state, None)
    for step in range(40):
        state.global_step = step
        callback.on_step_begin(None, state, None)
        assert COST.at(step / 40) == pytest.approx(
            (theirs.query_regularizer_weight, theirs.document_regularizer_weight)
        )
    assert COST.at(0.0) == (0.0, 0.0)
    assert Flops(queries=0.5, passages=0.3).at(0.0) == (0.5, 0.3), "without a warm-up"


def test_the_loop_tells_how_far_it_is_and_a_measured_loss_has_the_final_weights() -> None:
    model = ObjectiveModel(CONFIG, [Splade(CONFIG, flops=COST)])
    [objective] = model.objectives.values()
    assert isinstance(objective, Splade)
    ids = TOKENIZER.encode(["the sea", "sea", "a tree", "tree is blue"], 8)
    batch = pad(ids, TOKENIZER.pad_id) | {
        "choices": torch.tensor([2, 2]),
        "texts": torch.arange(4),
        "similarities": torch.ones(4),
    }
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3))
    loop = LoopConfig(max_steps=8, precision="fp32")
    steps = training_steps(model, [[batch]] * 8, optimizer, lambda _: 0.0, loop)
    seen = [(objective.progress, float(step.loss_sums["splade"])) for step in steps]
    assert [progress for progress, _ in seen] == [done / 8 for done in range(8)]
    losses = dict(seen)
    model.eval()
    measured = float(model(batch)["splade"].sum.detach())
    # The learning rate is 0, so that only the weight changes: a quarter of it after half the rise.
    cost = measured - losses[0.0]
    assert cost > 0.01
    assert losses[1 / 8] - losses[0.0] == pytest.approx(cost / 4, rel=1e-4)
    assert losses[2 / 8] == pytest.approx(measured, rel=1e-5)


def test_scoring_a_few_rows_at_once_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = TOKENIZER.encode(["the sea", "sea", "a tree is blue", "tree is blue"], 8)
    batch = pad(ids, TOKENIZER.pad_id)
    model = ObjectiveModel(CONFIG, [Splade(CONFIG)]).double()

    def gradients() -> list[Tensor]:
        weighted = model.logits(batch)["mlm"].cumsum(0).square().sum()
        return list(torch.autograd.grad(weighted, list(model.parameters())))

    whole = gradients()
    monkeypatch.setattr(splade, "SCORES_AT_ONCE", 1)
    torch.testing.assert_close(gradients(), whole)
