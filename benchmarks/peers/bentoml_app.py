"""BentoML's example of embeddings, with its adaptive batches on.

`bentoml serve bentoml_app:Embeddings`, with MODEL and BATCH in the environment. It runs in a
virtual environment of its own (`bentoml.txt`), where this project is not.
"""

import os

import bentoml
import numpy as np
from sentence_transformers import SentenceTransformer


@bentoml.service(
    traffic={"timeout": 60, "max_concurrency": 1024},
    workers=int(os.environ["WORKERS"]),
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
)
class Embeddings:
    """Vectors of sentences."""

    def __init__(self) -> None:
        self.model = SentenceTransformer(os.environ["MODEL"], device="cpu")

    @bentoml.api(batchable=True, max_batch_size=int(os.environ["BATCH"]), max_latency_ms=10_000)
    def encode(self, sentences: list[str]) -> np.ndarray:
        return self.model.encode(sentences, batch_size=len(sentences), show_progress_bar=False)
