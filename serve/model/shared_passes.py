"""Shares passes between the models of one request: texts that they read alike are encoded once.

Each model answers its part of the request like any other, with its own limits, cache and candidate.
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
    """How the windows of the current request get their passes; None for a request to one model."""
    return _PASSES.get()


class SharedPasses:
    """The passes of a request to several models. One event loop's."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names`: of the models."""
        self._awaited = set(names)
        self._windows: dict[Model, Sequence[Window]] = {}
        self._passes: dict[Model, list[asyncio.Task[dict[Model, Pass]]]] = {}
        self._begun = asyncio.Event()

    @contextmanager
    def part_of(self, name: str) -> Iterator[None]:
        """Inside, a model answers its part. If that fails, the others are not to go on."""
        token = _PASSES.set(self.compute)
        try:
            yield
        finally:
            _PASSES.reset(token)
        self._await_no_more(name)  # it may have needed no pass

    async def compute(self, model: "Model", windows: Sequence[Window]) -> "Sequence[Pass]":
        """The passes of a model's windows, once all models have theirs or need none."""
        if model.name not in self._awaited:
            return await model.own_passes(windows)
        self._windows[model] = windows
        self._await_no_more(model.name)
        await self._begun.wait()
        try:
            done = await asyncio.gather(*map(asyncio.shield, self._passes[model]))
        except Exception:  # perhaps that of another model
            return await model.own_passes(windows)
        return [each[model] for each in done]

    def close(self) -> None:
        """Drop passes that nobody waits for any more."""
        for passes in self._passes.values():
            for task in passes:
                task.cancel()
        # NOTE: tasks that began in the context of this request, such as a batcher's, keep this.
        self._windows, self._passes = {}, {}

    def _await_no_more(self, name: str) -> None:
        if name in self._awaited:
            self._awaited.remove(name)
            if not self._awaited:
                self._begin()

    def _begin(self) -> None:
        windows_by_key: dict[Any, WindowByModel] = {}
        keys_by_model: dict[Model, list[Any]] = {}
        # Ordered, so that requests that name the same models have passes in common.
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
