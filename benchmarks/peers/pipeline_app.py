"""Ray Serve with transformers' pipeline and Ray's own proxy, as Ray's guides have it.

`pipeline_app.py MODEL PORT BATCH`: a thread per core, and dynamic batches unless BATCH is 1.
"""

import os
import sys
from typing import Any

import ray
from ray import serve as ray_serve
from starlette.requests import Request
from transformers import pipeline

CORES = os.cpu_count() or 1
BATCH_SIZE = int(sys.argv[3]) if len(sys.argv) > 3 else 1


@ray_serve.deployment(ray_actor_options={"num_cpus": CORES}, max_ongoing_requests=256)
class Classifier:
    """A classifier of texts, one after the other."""

    def __init__(self, model: str) -> None:
        self._classify = pipeline("text-classification", model=model, top_k=None, device="cpu")

    async def __call__(self, request: Request) -> Any:
        return self._classify([(await request.json())["inputs"]])[0]


@ray_serve.deployment(ray_actor_options={"num_cpus": CORES}, max_ongoing_requests=256)
class BatchedClassifier:
    """A classifier that answers what waits together."""

    def __init__(self, model: str) -> None:
        self._classify = pipeline("text-classification", model=model, top_k=None, device="cpu")

    @ray_serve.batch(max_batch_size=BATCH_SIZE, batch_wait_timeout_s=0.01)
    async def _answer(self, texts: list[str]) -> Any:
        return self._classify(texts, batch_size=len(texts))

    async def __call__(self, request: Request) -> Any:
        return await self._answer((await request.json())["inputs"])


if __name__ == "__main__":
    ray.init(address="local", num_cpus=CORES + 1, include_dashboard=False)
    ray_serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
    deployment: Any = Classifier if BATCH_SIZE == 1 else BatchedClassifier
    ray_serve.run(deployment.bind(sys.argv[1]), blocking=True)
