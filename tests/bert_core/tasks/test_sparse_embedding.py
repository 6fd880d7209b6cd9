"""Sparse vectors beside SparseEncoder's own, both ways."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_core.batches import pack, pad
from bert_core.bundle.format import load_bundle
from bert_core.errors import ConfigError, CorpusError, FormatError, InputError
from bert_core.inference.predictor import Predictor
from bert_core.objectives import splade
from bert_core.tasks.fill_mask import FillMask
from bert_core.tasks.sparse_embedding import (
    SparseEmbedding,
    SparseEmbeddingOptions,
    SparseEmbeddingParameters,
)
from bert_core.tasks.text_classification import TextClassification
from tests import tiny

TOKENIZER = tiny.tokenizer([*tiny.WORDS[:-1], *tiny.pieces(tiny.ALPHABET)])
SIZES = tiny.entries(TOKENIZER.vocab_size, initializer_range=0.5)
CONFIG = tiny.encoder_config(TOKENIZER.vocab_size, initializer_range=0.5)
TEXTS = ["the sea is blue", "a tree", "", "the tree is not blue " * 20]
CUT = SparseEmbeddingParameters(truncate=True)
NAME = "sparse-embedding"
WAYS = [("max", "relu"), ("sum", "relu"), ("max", "log1p_relu")]


def dense(answers: list[Any]) -> np.ndarray:
    vectors = np.zeros((len(answers), TOKENIZER.vocab_size))
    for vector, answer in zip(vectors, answers, strict=True):
        indices = [entry["index"] for entry in answer]
        assert indices == sorted(set(indices))
        vector[indices] = [entry["value"] for entry in answer]
        assert np.count_nonzero(vector) == len(answer), "no entry is 0"
    return vectors


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A masked-word model that transformers wrote."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**SIZES))
    torch.nn.init.normal_(model.cls.predictions.bias)
    model.save_pretrained(tmp_path / "words")
    TOKENIZER.save(tmp_path / "words", 32)
    return tmp_path / "words"


@pytest.mark.filterwarnings("ignore")
def test_any_masked_word_model_can_be_asked_for_them(words: Path) -> None:
    from sentence_transformers import SparseEncoder

    predictor = Predictor(words, device="cpu")
    assert predictor.task.name == "fill-mask"
    assert NAME not in predictor.also, "nothing says that it was trained for them"
    ours = Predictor(words, "cpu", task=NAME)
    theirs = SparseEncoder(str(words), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False)
    np.testing.assert_allclose(dense(ours.predict(TEXTS, CUT)), theirs.numpy(), atol=1e-5)


@pytest.mark.parametrize("first", ["Transformer", "MLMTransformer"])
@pytest.mark.parametrize(("pooling", "activation"), WAYS)
@pytest.mark.filterwarnings("ignore")
def test_a_folder_that_sparse_encoder_saves_gives_its_vectors(
    words: Path, first: str, pooling: Any, activation: Any, tmp_path: Path
) -> None:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    module: Any = MLMTransformer(str(words), max_seq_length=16)
    if first == "Transformer":
        module = SparseEncoder(str(words), device="cpu")[0]
    peer = SparseEncoder(modules=[module, SpladePooling(pooling, activation)], device="cpu")
    peer.save_pretrained(str(tmp_path / "saved"))
    predictor = Predictor(tmp_path / "saved", device="cpu")
    assert predictor.task.record["options"] == {
        "pooling": pooling, "activation": activation,
        "max_length": 16 if first == "MLMTransformer" else 32, "prompts": {},
        "default_prompt": None, "query_prompt": None, "passage_prompt": None,
        "loss": None, "temperature": 1.0, "query_flops": 5e-5, "passage_flops": 3e-5,
        "flops_warmup": 0.33,
    }  # fmt: skip
    theirs = peer.encode(TEXTS, convert_to_sparse_tensor=False)
    np.testing.assert_allclose(dense(predictor.predict(TEXTS, CUT)), theirs.numpy(), atol=1e-5)
    (tmp_path / "saved" / "1_SpladePooling" / "config.json").write_text(
        json.dumps({"pooling_strategy": "median"})
    )
    task = load_bundle(tmp_path / "saved").task
    assert task is not None
    assert task.name == "fill-mask", "another pooling is not ours"
    with pytest.raises(ConfigError, match=r"SpladePooling\): set pooling to max or sum"):
        Predictor(tmp_path / "saved", "cpu", task=NAME)
    Predictor(tmp_path / "saved", "cpu", task=NAME, options={"pooling": pooling})


@pytest.mark.filterwarnings("ignore")
def test_vectors_that_sparse_encoder_would_truncate_are_not_given(
    words: Path, tmp_path: Path
) -> None:
    from sentence_transformers import SparseEncoder

    peer = SparseEncoder(str(words), device="cpu", max_active_dims=5)
    peer.save_pretrained(str(tmp_path / "five"))
    with pytest.raises(ConfigError, match=r"Pooling; max_active_dims\): set pooling to max or sum"):
        Predictor(tmp_path / "five", "cpu", task=NAME)


@pytest.mark.parametrize(("pooling", "activation"), WAYS)
@pytest.mark.filterwarnings("ignore")
def test_sparse_encoder_loads_a_bundle_and_what_is_written_for_it_is_read_again(
    pooling: Any, activation: Any, tmp_path: Path
) -> None:
    from sentence_transformers import SparseEncoder

    options = SparseEmbeddingOptions(pooling=pooling, activation=activation, max_length=16)
    task = SparseEmbedding(options=options)
    folder = tiny.bundle(tmp_path / "bundle", TOKENIZER, CONFIG, task=task)
    ours = Predictor(folder, device="cpu").predict(TEXTS, CUT)
    theirs = SparseEncoder(str(folder), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False)
    np.testing.assert_allclose(dense(ours), theirs.numpy(), atol=1e-5)
    (folder / "raybert.json").unlink()
    again = Predictor(folder, device="cpu")
    assert again.task.record == task.record
    assert again.predict(TEXTS, CUT) == ours


@pytest.mark.filterwarnings("ignore")
def test_prompts_are_those_of_sparse_encoder(words: Path, tmp_path: Path) -> None:
    from sentence_transformers import SparseEncoder

    prompts = {"query": "the blue ", "usual": "not a "}
    peer = SparseEncoder(str(words), device="cpu", prompts=prompts, default_prompt_name="usual")
    peer.save_pretrained(str(tmp_path / "saved"))
    ours = Predictor(tmp_path / "saved", device="cpu")
    assert isinstance(ours.task, SparseEmbedding)
    folder = tiny.bundle(tmp_path / "again", TOKENIZER, CONFIG, task=ours.task)
    again = SparseEncoder(str(folder), device="cpu")
    for predictor, theirs in ((ours, peer), (Predictor(folder, "cpu"), again)):
        for name in ("query", "usual", "document", None):  # that of documents is empty
            wanted = theirs.encode(TEXTS, prompt_name=name, convert_to_sparse_tensor=False)
            answers = predictor.predict(TEXTS, replace(CUT, prompt_name=name))
            np.testing.assert_allclose(dense(answers), wanted.numpy(), atol=1e-5)
    assert ours.predict(["a tree"]) == ours.predict(["a tree"], replace(CUT, prompt_name="usual"))
    assert ours.predict(["a tree"]) != ours.predict(["a tree"], replace(CUT, prompt_name="query"))
    with pytest.raises(
        InputError, match=r"prompt_name: wanted .*\(document, query, usual\), got 'passage'"
    ):
        ours.predict(TEXTS, replace(CUT, prompt_name="passage"))


@pytest.mark.parametrize(("pooling", "activation"), WAYS)
def test_rows_are_pooled_alike_padded_packed_and_a_few_at_once(
    pooling: Any, activation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = SparseEmbedding(options=SparseEmbeddingOptions(pooling=pooling, activation=activation))
    model = tiny.model(CONFIG, task.build_objective).eval()
    ids = TOKENIZER.encode(TEXTS, 32)
    with torch.inference_mode():
        padded, packed, short = (
            model.logits(batch)["mlm"]
            for batch in (pad(ids, TOKENIZER.pad_id), pack(ids), pack(ids[:3]))
        )
        alone = torch.cat([model.logits(pack([each]))["mlm"] for each in ids])
        monkeypatch.setattr(splade, "SCORES_AT_ONCE", 40 * TOKENIZER.vocab_size)
        few = model.logits(pad(ids, TOKENIZER.pad_id))["mlm"]
    for vectors in (packed, alone, few):
        torch.testing.assert_close(vectors, padded, atol=1e-5, rtol=0)
    torch.testing.assert_close(short, padded[:3], atol=1e-5, rtol=0)


def test_the_largest_entries_alone_can_be_asked_for(words: Path) -> None:
    predictor = Predictor(words, "cpu", task=NAME)
    (whole,) = predictor.predict(TEXTS[:1])
    (few,) = predictor.predict(TEXTS[:1], SparseEmbeddingParameters(top_k=3))
    largest = sorted(whole, key=lambda entry: -entry["value"])[:3]
    assert few == sorted(largest, key=lambda entry: entry["index"])
    with pytest.raises(InputError, match=r"inputs\[0\]: wanted at most 32 tokens .* truncate to"):
        predictor.predict(TEXTS[3:])


def test_a_pretrained_bundle_gives_them_and_a_classifier_does_not(tmp_path: Path) -> None:
    build = FillMask().build_objective
    bare = tiny.bundle(tmp_path / "bare", TOKENIZER, CONFIG, objectives=[build])
    assert Predictor(bare, "cpu", task=NAME).predict(TEXTS[:1])
    other = tiny.bundle(tmp_path / "other", TOKENIZER, CONFIG, task=TextClassification(["a", "b"]))
    message = "for text-classification: fine-tune it first with `raybert finetune`, or ask for feat"
    with pytest.raises(FormatError, match=message):
        Predictor(other, task=NAME)


def test_ranks_are_by_dot_product_among_all_passages() -> None:
    task = SparseEmbedding()
    rows: list[dict[str, Any]] = [
        {"text": "q", "text_pair": "north", "negatives": ["south"]},
        {"text": "r", "text_pair": "east"},
    ]

    def vector(**weights: float) -> list[dict[str, Any]]:
        return [{"index": int(name[1:]), "value": value} for name, value in sorted(weights.items())]

    north, south, east = vector(e1=1.0), vector(e2=1.0), vector(e1=0.5, e2=2.0)
    answers = [[vector(e1=3.0, e2=1.0), north, south], [vector(e9=1.0), east]]
    columns = task.compare(rows, answers)
    # For q: east 3.5, north 3; for r all have 0.
    assert columns["rank"].tolist() == [2, 2]
    assert columns["query_entries"].tolist() == [2, 1]
    assert columns["passage_entries"].tolist() == [1, 2], "those of a row's passages, on average"
    metrics = task.metrics(columns)
    assert (metrics["query_entries"], metrics["passage_entries"]) == (1.5, 1.5)
    assert task.cells(answers[0]) == {"indices": [1, 2], "values": [3.0, 1.0]}


def test_rows_say_which_loss_they_train() -> None:
    pair = {"text": "q", "text_pair": "north"}
    taught = {**pair, "negatives": ["south"], "scores": [3.0, 1.0]}

    def loss(rows: list[dict[str, Any]], **options: Any) -> str | None:
        chosen: Any = SparseEmbedding.options_of(options)
        return SparseEmbedding.from_rows(rows, chosen).chosen.loss

    assert loss([pair, pair]) == "contrastive"
    assert loss([taught]) == "kl"
    assert loss([taught], loss="margin_mse") == "margin_mse"
    with pytest.raises(
        CorpusError, match=r"loss margin_mse, got rows that have no score, .* contr"
    ):
        loss([pair], loss="margin_mse")
    with pytest.raises(
        CorpusError, match="row 2: wanted a teacher's scores in every row or in non"
    ):
        loss([pair, taught])
    with pytest.raises(ConfigError, match=r"flops_warmup: wanted .* below 1, got 1"):
        loss([pair], flops_warmup=1.0)
    labels = [
        each.labels for each in SparseEmbedding().encode([taught], TOKENIZER, 9, labelled=True)
    ]
    assert [each["similarities"].tolist() for each in labels] == [[1, 3, 1]]
