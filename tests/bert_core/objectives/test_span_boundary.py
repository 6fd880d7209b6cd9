"""The span boundary objective, against a slow reading of the paper."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from bert_core.batches import pack, pad
from bert_core.data.masking import span_lengths
from bert_core.data.windows import PAD_MULTIPLE
from bert_core.model.size import training_flops
from bert_core.objectives.base import Batch, ObjectiveModel
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.objectives.span_boundary import SpanBoundary
from tests import tiny

WORDS, WIDTH, EPS = 60, 32, 1e-12
CONFIG = tiny.encoder_config(WORDS, hidden_size=WIDTH, dropout=0.0, layer_norm_eps=EPS)
# A row's tokens, and its spans: first and last token. One begins behind [CLS], one ends before
# [SEP], one is as long as its row lets it; two of the last row have one token between them.
ROWS = [(9, [(1, 2), (5, 7)]), (6, []), (14, [(1, 12)]), (12, [(3, 3), (5, 8), (10, 10)])]


def model_of() -> ObjectiveModel:
    model = tiny.model(CONFIG, MaskedLanguageModeling, SpanBoundary, noise=0.1)
    return model.double().eval()


def batch_of(layout: str) -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(5, WORDS, (length,), generator=generator) for length, _ in ROWS]
    ids = [row.numpy() for row in rows]
    batch = pack(ids) if layout == "packed" else pad(ids, 0)
    width = -(-max(length for length, _ in ROWS) // PAD_MULTIPLE) * PAD_MULTIPLE
    starts = batch["offsets"].tolist() if layout == "packed" else [i * width for i in range(4)]
    positions = torch.tensor(
        [
            start + place
            for start, (_, spans) in zip(starts, ROWS, strict=False)
            for first, last in spans
            for place in range(first, last + 1)
        ]
    )
    return batch | {
        "mlm_positions": positions,
        "mlm_labels": torch.randint(5, WORDS, positions.shape, generator=generator),
        "mlm_span_lengths": torch.from_numpy(span_lengths(positions.numpy())),
    }


def normalised(vector: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    spread = (vector - vector.mean()).square().mean()
    return (vector - vector.mean()) / (spread + EPS).sqrt() * weight + bias


def gelu(vector: Tensor) -> Tensor:
    return vector * 0.5 * (1 + torch.erf(vector / math.sqrt(2)))


def paper(model: ObjectiveModel, batch: Batch, layout: str) -> Tensor:
    """Scores of every word for every token of every span: equations of section 3.2, one by one."""
    weights = {
        name.removeprefix("objectives.span_boundary.head."): parameter
        for name, parameter in model.named_parameters()
    }
    hidden = model.encode(batch).hidden
    offsets = batch.get("offsets")
    scores = []
    for row, (_, spans) in enumerate(ROWS):
        x = hidden[row] if offsets is None else hidden[offsets[row] : offsets[row + 1]]
        for s, e in spans:
            for i in range(s, e + 1):
                p = weights["place_embeddings.weight"][i - s]
                h = torch.cat([x[s - 1], x[e + 1], p])
                for layer in ("inner", "transform"):
                    map_, bias = weights[f"{layer}.dense.weight"], weights[f"{layer}.dense.bias"]
                    norm = weights[f"{layer}.norm.weight"], weights[f"{layer}.norm.bias"]
                    h = normalised(gelu(map_ @ h + bias), *norm)
                words = model.encoder.embeddings.word_embeddings.weight
                scores.append(words @ h + weights["bias"])
    return torch.stack(scores)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_scores_loss_and_gradient_are_those_of_the_paper(layout: str) -> None:
    batch = batch_of(layout)
    ours, theirs = model_of(), model_of()
    part = ours(batch)["span_boundary"]
    part.sum.backward()
    scores = paper(theirs, batch, layout)
    labels = batch["mlm_labels"]
    lost = torch.zeros((), dtype=torch.float64)
    for row, label in zip(scores, labels, strict=True):
        lost = lost - (row[label] - row.logsumexp(0))
    lost.backward()
    torch.testing.assert_close(ours.logits(batch)["span_boundary"], scores, rtol=0, atol=1e-10)
    torch.testing.assert_close(part.sum, lost, rtol=1e-12, atol=0)
    assert part.count == len(labels) == 23
    assert part.correct == (scores.argmax(1) == labels).sum()
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if parameter.grad is None:
            assert name.startswith("objectives.mlm.")
            continue
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=1e-9, msg=name)


def test_the_tokens_beside_a_span_are_all_that_is_read_and_are_never_predicted() -> None:
    batch = batch_of("padded")
    places = SpanBoundary(CONFIG).places(batch).tolist()
    assert places == [0, 4, 32, 50, 52, 57, 3, 8, 45, 52, 57, 59]
    assert not set(places) & set(batch["mlm_positions"].tolist())


def test_the_work_of_both_heads_is_counted() -> None:
    model, batch = model_of(), batch_of("padded")
    tokens = len(batch["mlm_labels"])
    masked_words = WIDTH * WIDTH + WIDTH * WORDS
    boundary = (2 * WIDTH + 200) * WIDTH + WIDTH * WIDTH + WIDTH * WORDS
    config, lengths = model.encoder.config, np.array([length for length, _ in ROWS])
    encoder = training_flops(config, lengths, outputs=tokens + 2 * 6)
    assert model.flops(batch, lengths) == encoder + 6 * tokens * (masked_words + boundary)
    assert model.outputs(batch) == tokens + 2 * 6  # of the last layer: masked words, and beside
