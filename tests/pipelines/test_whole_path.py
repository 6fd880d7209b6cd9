"""Every family from text to an answer: vocabulary, rows, pretraining, fine-tuning, prediction.

Encoders have the sizes of bert-tiny: `test_variants.py` has their own.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bert_core.data.masking import MaskingConfig
from bert_core.data.pairs import PairsConfig, PairsKind
from bert_core.data.shards import ShardSet
from bert_core.data.tokenizer import TokenizerKind
from bert_core.train.config import LoopConfig
from pipelines import finetune, prepare, pretrain, vocab

# Variant → its vocabulary's kind, and what its rows are.
PATHS: dict[str, tuple[TokenizerKind, PairsKind]] = {
    "distilbert": ("wordpiece", "full_sentences"),
    "roberta-base": ("bpe", "full_sentences"),
    "xlm-roberta-base": ("unigram", "full_sentences"),
    "mpnet-base": ("bpe", "full_sentences"),  # wordpiece here gives padding another id than 1
    "electra-small": ("wordpiece", "doc_sentences"),
    "albert-base": ("unigram", "sop"),
    "deberta-base": ("bpe", "doc_sentences"),
    "deberta-v3-xsmall": ("unigram", "full_sentences"),
    "modernbert-base": ("bpe", "full_sentences"),
}


Inputs = Callable[[TokenizerKind, PairsKind], tuple[Path, Path]]


@pytest.fixture(scope="module")
def inputs(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Gives a vocabulary and its shards, which several families may share."""

    @cache
    def words(kind: TokenizerKind) -> Path:
        folder = tmp_path_factory.mktemp(kind) / "vocab"
        lowercase = kind != "bpe"
        vocab.run(replace(small.vocab(folder), kind=kind, lowercase=lowercase, vocab_size=1500))
        return folder

    @cache
    def inputs(kind: TokenizerKind, rows: PairsKind) -> tuple[Path, Path]:
        shards = tmp_path_factory.mktemp(f"{kind}-{rows}") / "shards"
        prepare.run(
            replace(
                small.prepare(shards),
                tokenizer=str(words(kind)),
                pairs=PairsConfig(kind=rows, max_length=48, dupe_factor=1),
                masking=MaskingConfig(strategy="whole_word", max_predictions_per_seq=8),
            )
        )
        return words(kind), shards

    return inputs


@pytest.mark.drill
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", PATHS)
def test_a_family_goes_from_text_to_an_answer(
    small: Any, inputs: Inputs, tmp_path: Path, variant: str
) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from bert_core.bundle.format import load_bundle
    from bert_core.inference.predictor import Predictor

    kind, rows = PATHS[variant]
    words, shards = inputs(kind, rows)
    made = ShardSet.read(str(shards))
    unknown = made.manifest.counts["unknown_tokens"] / made.manifest.counts["tokens"]
    assert unknown < 0.01
    pretrain.run(
        replace(
            small.pretrain(tmp_path / "pretrain"),
            variant=variant,
            sizes_of="bert-tiny",
            shards=str(shards),
            tokenizer=str(words),
            held_out_rows=8,
            global_batch_size=8,
            checkpoint_every_steps=4,
            loop=LoopConfig(max_steps=2, precision="fp32"),
        )
    )
    pretrained = load_bundle(tmp_path / "pretrain" / "bundle")
    trained_on = {name.split(".")[1] for name in pretrained.state if name.startswith("objectives")}
    assert trained_on == ({"mlm", "sop"} if rows == "sop" else {"mlm"})
    finetune.run(
        replace(
            small.finetune(tmp_path / "finetune"),
            model=str(tmp_path / "pretrain" / "bundle"),
            rows_per_class=8,
            seeds=(0,),
            epochs=1.0,
        )
    )
    folder = tmp_path / "finetune" / "bundle"
    texts = ["Return the mean of two numbers.", "Open a socket, then close it.", "x"]
    answers = Predictor(folder).predict(texts)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    if variant in ("distilbert", "modernbert-base"):
        encoded.pop("token_type_ids", None)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        scores = model(**encoded).logits.softmax(-1)
    for row, answer in zip(scores, answers, strict=True):
        for label in answer:
            wanted = float(row[model.config.label2id[label["label"]]])
            assert label["score"] == pytest.approx(wanted, abs=1e-5)
