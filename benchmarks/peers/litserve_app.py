"""LitServe's example of embeddings, with its batches on.

`litserve_app.py MODEL PORT BATCH WORKERS`. It runs in a virtual environment of its own
(`litserve.txt`), where this project is not.
"""

import sys

import litserve
from litserve.specs import OpenAIEmbeddingSpec
from sentence_transformers import SentenceTransformer

BATCH_TIMEOUT_S = 0.005
"""How long a batch waits to fill."""


class Embeddings(litserve.LitAPI):
    """Vectors of sentences."""

    def setup(self, device: str) -> None:
        self.model = SentenceTransformer(sys.argv[1], device=device)

    def predict(self, inputs):
        return self.model.encode(inputs, batch_size=len(inputs), show_progress_bar=False)


if __name__ == "__main__":
    _, _, port, batch_size, workers = sys.argv
    api = Embeddings(
        max_batch_size=int(batch_size), batch_timeout=BATCH_TIMEOUT_S, spec=OpenAIEmbeddingSpec()
    )
    server = litserve.LitServer(
        api, accelerator="cpu", workers_per_device=int(workers), fast_queue=True
    )
    server.run(
        host="127.0.0.1",
        port=int(port),
        log_level="warning",
        access_log=False,
        generate_client_file=False,
    )
