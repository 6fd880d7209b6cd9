"""Shares passes between the models of one request: texts that they read alike are encoded only
once.

Each model answers its part like any other request, with its own limits, cache and candidate.
Only the passes are shared: they wait until every part has its windows.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from bert_core.data.windows import Window

if TYPE_CHECKING:
    from serve.model.model import Model, Passes, WindowByModel
    from serve.model.work import Pass

_PASSES: ContextVar["Passes | None"] = ContextVar("passes", default=None)


def passes_of_request() -> "Passes | None":
    """Return the function that computes passes for the windows of the current request; None for a
    request to one model."""
    return _PASSES.get()


class SharedPasses:
    """The passes of a request to several models, used on one event loop."""

    def __init__(self, names: Iterable[str]) -> None:
        """Wait for windows of the models with these names."""
        self._awaited = set(names)
        self._windows: dict[Model, Sequence[Window]] = {}
        self._passes: dict[Model, list[asyncio.Task[dict[Model, Pass]]]] = {}
        self._begun = asyncio.Event()

    @contextmanager
    def part_of(self, name: str) -> Iterator[None]:
        """Let a model answer its part inside this context.

        If that raises, the passes may never start: the other models must be cancelled.
        """
        token = _PASSES.set(self.compute)
        try:
            yield
        finally:
            _PASSES.reset(token)
        self._await_no_more(name)  # the model may have needed no pass

    async def compute(self, model: "Model", windows: Sequence[Window]) -> "Sequence[Pass]":
        """Return the passes of a model's windows, once every model has its windows or needs no
        pass."""
        if model.name not in self._awaited:
            return await model.own_passes(windows)
        self._windows[model] = windows
        self._await_no_more(model.name)
        await self._begun.wait()
        try:
            done = await asyncio.gather(*map(asyncio.shield, self._passes[model]))
        except Exception:  # perhaps another model's error
            return await model.own_passes(windows)
        return [each[model] for each in done]

    def close(self) -> None:
        """Cancel passes that nobody waits for any more."""
        for passes in self._passes.values():
            for task in passes:
                task.cancel()
        # NOTE: tasks started in this request's context, such as a batcher's, keep this in memory.
        self._windows, self._passes = {}, {}

    def _await_no_more(self, name: str) -> None:
        if name in self._awaited:
            self._awaited.remove(name)
            if not self._awaited:
                self._begin()

    def _begin(self) -> None:
        windows_by_key: dict[Any, WindowByModel] = {}
        keys_by_model: dict[Model, list[Any]] = {}
        # Sorted, so that requests that name the same models can share batches.
        for model in sorted(self._windows, key=lambda each: each.name):
            encoder, seen = model.predictor.backend.encoder_key, Counter[Any]()
            keys_by_model[model] = []
            for window in self._windows[model]:
                ids = (*(part.tobytes() for part in window.ids), window.segment_b_start)
                seen[ids] += 1
                key = (encoder, ids, seen[ids])
                windows_by_key.setdefault(key, {})[model] = window
                keys_by_model[model].append(key)
        loop = asyncio.get_running_loop()
        tasks = {
            key: loop.create_task(next(iter(windows)).submit(windows))
            for key, windows in windows_by_key.items()
        }
        self._passes = {
            model: [tasks[key] for key in keys] for model, keys in keys_by_model.items()
        }
        self._begun.set()
