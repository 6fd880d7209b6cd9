"""Training is right: the same weights and batches give transformers' losses, step for step."""

import sysconfig
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from bert_core.batches import collate, pad
from bert_core.data.docstrings import docstrings_of
from bert_core.data.documents import clean, document_digest, split_sentences
from bert_core.data.draws import row_keys
from bert_core.data.masking import Masker, MaskingConfig
from bert_core.data.pairs import Documents, PairsConfig, assemble, make_rows
from bert_core.data.ragged import offsets_of
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.vocabulary import train_vocabulary
from bert_core.data.windows import Window
from bert_core.model.hf import encoder_config_from_huggingface, encoder_config_to_huggingface
from bert_core.model.hf_weights import to_huggingface
from bert_core.objectives.base import Batch, ObjectiveModel
from bert_core.objectives.classification import Classification, ProblemType
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.objectives.sentence_pairs import NextSentencePrediction
from bert_core.train.config import LoopConfig, OptimizerConfig
from bert_core.train.loop import training_steps
from bert_core.train.optim import build_optimizer
from bert_core.train.words import table_of, train_read_words

STEPS, ROWS, IGNORE = 200, 12, -100
CONFIG = encoder_config_from_huggingface(
    {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 40,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
)
OPTIMIZER = OptimizerConfig(lr=2e-3, max_grad_norm=1.0)


@dataclass(frozen=True)
class Row:
    """A row as shards hold it."""

    ids: np.ndarray
    split: int
    positions: np.ndarray
    labels: np.ndarray
    is_random: int


def rows_of_docstrings(rng: np.random.Generator) -> tuple[list[Row], int]:
    """Pairs of sentences that Python's own modules say of themselves, masked."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-p]*.py"))
    texts = [clean("\n\n".join(docstrings_of(path.read_bytes()))) for path in paths]
    texts = [text for text in texts if text]
    tokenizer = Tokenizer.from_vocabulary(
        train_vocabulary(texts, vocab_size=1000, lowercase=True), lowercase=True
    )
    sentences = [split_sentences(text) for text in texts]
    encoded = tokenizer.encode_column(pa.array([one for each in sentences for one in each]))
    documents = Documents(
        input_ids=encoded.values.to_numpy(),
        sentence_offsets=encoded.offsets.to_numpy().astype(np.int64),
        document_offsets=offsets_of([*map(len, sentences)]),
        digests=[document_digest(text) for text in texts],
        num_own=len(texts),
    )
    continues = np.array([token.startswith("##") for token in tokenizer.vocabulary])
    config = PairsConfig(max_length=CONFIG.max_length)
    pairs = make_rows(documents, ~continues[documents.input_ids], config, rng)
    pairs = pairs.take(rng.permutation(len(pairs))[: STEPS * ROWS])
    rows = assemble(documents.input_ids, pairs, cls_id=tokenizer.cls_id, sep_id=tokenizer.sep_id)
    masker = Masker(
        MaskingConfig(),
        vocab_size=tokenizer.vocab_size,
        special_ids=tokenizer.special_ids,
        mask_id=tokenizer.mask_id,
    )
    keys = row_keys(0, np.arange(len(pairs)))
    masked = masker(rows.input_ids, rows.offsets, ~continues[rows.input_ids], keys)
    found = []
    for index, (start, end) in enumerate(pairwise(rows.offsets)):
        inside = slice(*np.searchsorted(masked.positions, [start, end]))
        found.append(
            Row(
                ids=masked.input_ids[start:end],
                split=int(rows.segment_b_start[index]),
                positions=masked.positions[inside] - start,
                labels=masked.labels[inside].astype(np.int64),
                is_random=int(pairs.labels[index]),
            )
        )
    return found, tokenizer.vocab_size


def batch_of(rows: list[Row]) -> Batch:
    splits = np.array([row.split for row in rows])
    batch = pad([row.ids for row in rows], CONFIG.embeddings.pad_token_id, splits)
    width = batch["input_ids"].shape[1]
    positions = [index * width + row.positions for index, row in enumerate(rows)]
    return batch | {
        "mlm_positions": torch.from_numpy(np.concatenate(positions)),
        "mlm_labels": torch.from_numpy(np.concatenate([row.labels for row in rows])),
        "next_sentence_label": torch.tensor([row.is_random for row in rows]),
    }


def window_of(row: Row, kind: type) -> Window:
    """With what is right of it: whether its second sentence follows the first."""
    return Window(
        row=0,
        ids=(row.ids.astype(np.uint32),),
        segment_b_start=(row.split,),
        labels={"labels": np.array([row.is_random], kind)},
    )


def losses_of_ours(model: ObjectiveModel, steps: list[list[Batch]]) -> list[float]:
    losses = []
    for step in training_steps(
        model,
        steps,
        build_optimizer(model, OPTIMIZER),
        lambda step: OPTIMIZER.lr,
        LoopConfig(max_steps=len(steps), precision="fp32"),
        max_grad_norm=OPTIMIZER.max_grad_norm,
    ):
        losses.append(sum(float(step.loss_sums[name]) / step.counts[name] for name in step.counts))
    return losses


def as_transformers_asks(batch: Batch) -> Batch:
    """Masked words' labels as a row's, -100 where none was masked."""
    labels = torch.full_like(batch["input_ids"], IGNORE).flatten()
    labels[batch["mlm_positions"]] = batch["mlm_labels"]
    asked = {name: tensor for name, tensor in batch.items() if not name.startswith("mlm_")}
    return asked | {"labels": labels.view_as(batch["input_ids"])}


def losses_of_transformers(model: nn.Module, steps: list[Batch]) -> list[float]:
    model.train()
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups: list[dict] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups,
        lr=OPTIMIZER.lr,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    losses = []
    for batch in steps:
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.drill
def test_200_steps_give_the_losses_of_transformers_with_adamw() -> None:
    from transformers import BertConfig, BertForPreTraining

    rows, vocab_size = rows_of_docstrings(np.random.default_rng(0))
    steps = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    config = CONFIG.adapted(vocab_size=vocab_size)
    torch.manual_seed(0)
    ours = ObjectiveModel(config, [MaskedLanguageModeling(config), NextSentencePrediction(config)])
    theirs = BertForPreTraining(BertConfig(**encoder_config_to_huggingface(config)))
    theirs.load_state_dict(to_huggingface(ours.state_dict(), config), strict=False)
    # Ours in two micro-batches of unlike size and padding, theirs in one batch.
    ours_losses = losses_of_ours(ours, [[batch_of(each[:5]), batch_of(each[5:])] for each in steps])
    theirs_losses = losses_of_transformers(
        theirs, [as_transformers_asks(batch_of(each)) for each in steps]
    )
    assert len(ours_losses) == len(theirs_losses) == STEPS
    assert np.mean(ours_losses[-20:]) < np.mean(ours_losses[:5]) - 0.5  # it did learn
    np.testing.assert_allclose(ours_losses, theirs_losses, atol=1e-4, rtol=0)


@pytest.mark.drill
@pytest.mark.parametrize("problem_type", ["single_label_classification", "regression"])
def test_fine_tuning_gives_the_losses_of_transformers(problem_type: ProblemType) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    rows, vocab_size = rows_of_docstrings(np.random.default_rng(1))
    chosen = np.random.default_rng(2).integers(0, 8 * ROWS, (60, ROWS))  # rows come again
    kind = np.float32 if problem_type == "regression" else np.int64
    windows = [window_of(row, kind) for row in rows[: 8 * ROWS]]
    config = CONFIG.adapted(vocab_size=vocab_size)
    torch.manual_seed(0)
    labels = 1 if problem_type == "regression" else 2
    ours = ObjectiveModel(config, [Classification(config, labels, problem_type=problem_type)])
    entries = encoder_config_to_huggingface(config)
    entries |= {"num_labels": labels, "problem_type": problem_type}
    theirs = BertForSequenceClassification(BertConfig(**entries))
    theirs.load_state_dict(to_huggingface(ours.state_dict(), config), strict=False)
    pad_id = config.embeddings.pad_token_id
    train_read_words(ours, windows, pad_id)
    assert table_of(ours.encoder.embeddings.word_embeddings.weight) is not None
    # Ours end to end, theirs padded.
    steps = [[windows[place] for place in places] for places in chosen]
    ours_losses = losses_of_ours(ours, [[collate(each, pad_id, 0.0)] for each in steps])
    theirs_losses = losses_of_transformers(theirs, [collate(each, pad_id) for each in steps])
    assert len(ours_losses) == len(theirs_losses) == len(steps)
    assert np.mean(ours_losses[-10:]) < 0.9 * np.mean(ours_losses[:10])  # it did learn
    np.testing.assert_allclose(ours_losses, theirs_losses, atol=1e-4, rtol=0)
