"""One model that serves many clients: a `Predictor` whose passes a `Batcher` fills."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_core.batches import PAD_MULTIPLE
from bert_core.data.windows import Window
from bert_core.predictor import Predictor
from bert_core.tasks.base import Parameters
from serve.batching import Batcher


@dataclass(frozen=True, kw_only=True)
class Card:
    """Information about a model for clients."""

    name: str
    task: str
    """Hugging Face's name for the task."""
    labels: list[str]
    example: Any
    """An input, as in a request."""
    metrics: dict[str, float]
    """Metrics stored in the bundle."""
    digest: str
    """sha256 of the bundle: servers with equal digests give equal answers."""


class ServedModel(ABC):
    """A model as the front sees it, in this or another process. Calls raise if it is down."""

    @abstractmethod
    async def card(self) -> Card: ...

    @abstractmethod
    async def check_ready(self) -> None:
        """Run a real forward pass."""


class Model(ServedModel):
    """A bundle behind a queue. Tokenizing, passes and decoding all run off the event loop."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        device: str,
        threads: int,
        max_batch_tokens: int,
        max_wait_ms: float,
    ) -> None:
        """Load the bundle and run it once, to make sure that it answers.

        Raises: FormatError if the bundle is damaged or answers no task.
        """
        self.predictor = Predictor(folder, device=device, threads=threads)
        self.predictor.predict(self.predictor.task.examples)
        self.name = name
        self.task = self.predictor.task
        self._texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="texts")
        self._batcher: Batcher[Window, np.ndarray] = Batcher(
            self._forward,
            length_of=lambda window: -(-window.tokens // PAD_MULTIPLE) * PAD_MULTIPLE,
            max_batch_tokens=max_batch_tokens,
            max_wait_ms=max_wait_ms,
        )

    async def predict(self, inputs: list[Any], parameters: Parameters | None) -> list[Any]:
        """One answer per input, as from `Predictor.predict`. Raises: InputError."""
        loop, model = asyncio.get_running_loop(), self.predictor
        rows = model.rows(inputs)
        windows = await loop.run_in_executor(self._texts, model.encode, rows, parameters)
        scores = await asyncio.gather(*map(self._batcher.submit, windows))
        return await loop.run_in_executor(
            self._texts, model.decode, rows, windows, scores, parameters
        )

    async def check_ready(self) -> None:
        await self.predict(list(self.task.examples), None)

    async def card(self) -> Card:
        return Card(
            name=self.name,
            task=self.task.name,
            labels=self.task.labels,
            example=self.task.examples[0],
            metrics=self.predictor.bundle.metrics,
            digest=self.predictor.bundle.digest,
        )

    async def close(self) -> None:
        """End the threads; requests in progress are cancelled."""
        await self._batcher.close()
        self._texts.shutdown(wait=False)

    def _forward(self, windows: list[Window]) -> Sequence[np.ndarray]:
        return self.predictor.forward(windows)
