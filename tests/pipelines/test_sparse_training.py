"""Sparse vectors from rows to a bundle that others load."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_core.bundle.format import load_bundle
from bert_core.inference.predictor import Predictor
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.tasks.sparse_embedding import SparseEmbedding
from pipelines import finetune
from pipelines.corpus.labelled import LabelledConfig
from pipelines.finetune import FinetuneConfig
from tests import tiny
from tests.labelled_rows import write

TEXTS = ["the sea is blue", "a tree", "blue blue sea", "is a tree the sea"]


@pytest.mark.filterwarnings("ignore")
def test_a_trained_bundle_is_as_sparse_as_its_metrics_say_and_sparse_encoder_agrees(
    small: Any, tmp_path: Path
) -> None:
    words = tiny.tokenizer()
    config = tiny.encoder_config(words.vocab_size, initializer_range=0.2)
    start = tiny.bundle(tmp_path / "start", words, config, objectives=[MaskedLanguageModeling])
    rows = [{"text": TEXTS[n], "text_pair": TEXTS[n - 1]} for n in range(4)]
    source = LabelledConfig(source=write(tmp_path / "rows.jsonl", rows))

    def trained(name: str, **options: float) -> tuple[Path, dict[str, Any]]:
        counts = finetune.run(
            FinetuneConfig(
                output=str(tmp_path / name), model=str(start), task="sparse-embedding",
                options=options, train=source, held_out=source, batch_size=4, epochs=30.0,
                max_length=16, lr=1e-3, precision="fp32", num_workers=0,
                tracking_uri=small.tracking_uri,
            )
        ).counts  # fmt: skip
        return tmp_path / name / "bundle", counts

    bundle, counts = trained("trained")
    _, sparser = trained("sparser", query_flops=0.3, passage_flops=0.3)
    for entries in ("query_entries_mean", "passage_entries_mean"):
        assert 0 < sparser[entries] < counts[entries]
    task = load_bundle(bundle).task
    assert isinstance(task, SparseEmbedding)
    assert task.chosen.loss == "contrastive"

    from sentence_transformers import SparseEncoder

    theirs = SparseEncoder(str(bundle), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False)
    ours = np.zeros_like(theirs.numpy())
    for vector, entries in zip(ours, Predictor(bundle, device="cpu").predict(TEXTS), strict=True):
        vector[[entry["index"] for entry in entries]] = [entry["value"] for entry in entries]
    np.testing.assert_array_equal(ours != 0, theirs.numpy() != 0)
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)
    assert np.count_nonzero(ours) / 4 == counts["query_entries_mean"]
