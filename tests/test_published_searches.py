"""A published model and a published set give the published figures, by `raybert evaluate` and by
the vectors of a server."""

import base64
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.checkpoints import ABSENT, MINILM, checkpoint
from pipelines import evaluate
from pipelines.answering.embedding import embed
from pipelines.answering.searching import RetrievalConfig, search
from pipelines.corpus.labelled import LabelledConfig, retrieval_files_of
from pipelines.corpus.retrieval_sets import read_retrieval_set
from pipelines.evaluate import EvaluateConfig
from tests.serve import live

DATA = os.environ.get("RAYBERT_DATA")
pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(DATA is None, reason="RAYBERT_DATA names no real data sets"),
]
NDCG, RECALL = 0.64508, 0.925
"""nDCG@10 and recall@100 of all-MiniLM-L6-v2 on SciFact's test queries: embeddings-benchmark's
results, commit f4cc6c8b."""
BM25_NDCG = 0.679, 0.688
"""nDCG@10 of BM25: Anserini's, and that of bm25s with a stemmer among MTEB's results."""


@dataclass(frozen=True)
class Measured:
    """An evaluation of MiniLM on SciFact."""

    model: Path
    source: str
    counts: dict[str, Any]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = checkpoint(MINILM)
    if folder is None:
        pytest.skip(ABSENT)
    output, source = tmp_path_factory.mktemp("scifact"), f"{DATA}/scifact"
    manifest = evaluate.run(
        EvaluateConfig(
            output=str(output / "evaluate"),
            model=str(folder),
            held_out=LabelledConfig(source=source),
            num_workers=0,
            threads_per_worker=os.cpu_count() or 1,
            tracking_uri=f"sqlite:///{output}/mlflow.db",
        )
    )
    return Measured(folder, source, dict(manifest.counts))


def test_minilm_on_scifact_is_as_mteb_has_it(measured: Measured) -> None:
    counts = measured.counts
    assert counts["ndcg_at_10"] == pytest.approx(NDCG, abs=0.001)
    assert counts["recall_at_100"] == pytest.approx(RECALL, abs=0.001)
    assert BM25_NDCG[0] <= counts["ndcg_at_10_bm25"] <= BM25_NDCG[1]
    assert counts["ndcg_at_10_int8"] == pytest.approx(counts["ndcg_at_10"], abs=0.005)
    assert counts["ndcg_at_10_binary"] > 0.5
    assert (counts["rows"], counts["documents"]) == (300, 5183)


def test_a_server_gives_the_same_vectors_and_so_the_same_figure(measured: Measured) -> None:
    found = retrieval_files_of(LabelledConfig(source=measured.source), "held_out")
    assert found is not None
    read = read_retrieval_set(found)
    alone: Any = SimpleNamespace(num_workers=0, threads_per_worker=os.cpu_count() or 1)
    documents = embed(measured.model, read.documents, "document", alone).vectors
    with live.served(measured.model) as url:
        queries = asked(url, read.queries)
        some = asked(url, read.documents[::20])
    assert np.array_equal(some, documents[::20]), "to the bit"
    (full,) = search(read, documents, queries, RetrievalConfig(quantized=(), bm25=None))
    assert full.metrics["ndcg_at_10"] == pytest.approx(NDCG, abs=0.001)
    assert full.metrics["ndcg_at_10"] == pytest.approx(measured.counts["ndcg_at_10"], abs=1e-12)


def asked(url: str, texts: list[str]) -> np.ndarray:
    """The vectors of texts by OpenAI's API, as its client asks for them."""
    vectors = []
    for start in range(0, len(texts), 16):
        body = {"input": texts[start : start + 16], "encoding_format": "base64", "truncate": True}
        answer = httpx.post(f"{url}/v1/embeddings", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        vectors += [base64.b64decode(each["embedding"]) for each in answer.json()["data"]]
    return np.frombuffer(b"".join(vectors), "<f4").reshape(len(texts), -1)
