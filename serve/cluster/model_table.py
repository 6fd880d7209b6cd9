"""Holds the models of one process, and keeps each at its plan while it answers."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from serve.http.app import LocalModel
from serve.model.card import Card, Response, ServedModel
from serve.observe.records import Recorder
from serve.request.auth import Keys
from serve.request.errors import NotReadyError
from serve.versions.comparison import Report
from serve.versions.follower import LONGEST_WAIT_S, RETRY_S, reason_of
from serve.versions.loaded_model import LoadedModel
from serve.versions.plan import PLAN, Plan

logger = logging.getLogger("ray.serve")

MOST_LOADS = 8
"""Models that are loaded at once; others wait."""


class ModelTable:
    """Models in this process, by name, which change with their plans."""

    def __init__(self, recorder: Recorder, report: Report) -> None:
        """Start without models; `report` receives how candidates compare, request by request."""
        self.models: dict[str, LoadedModel] = {}
        self.recorder, self._report = recorder, report
        self._plans: dict[str, Plan] = {}
        self._failed: dict[str, str] = {}
        self._when_changed: Callable[[], None] = lambda: None
        self._adding: dict[str, Plan] = {}
        """Plans of models that are being loaded beside others."""
        self._tasks: set[asyncio.Task[None]] = set()
        # NOTE: asyncio's own threads, of which there are few, also read bodies: a load may take
        # minutes, and a store that is away keeps its thread for as long.
        self._loaders = ThreadPoolExecutor(MOST_LOADS, thread_name_prefix="load")

    async def change(self, plans: Mapping[str, Any], when_changed: Callable[[], None]) -> None:
        """Serve these models from now on, and no others.

        Serve sends no request to a replica while it is reconfigured. So this returns at once:
        models that are served continue, and new models are loaded in the background. Only a process
        that serves nothing yet waits for its models.

        Args:
            plans: plan by name of the model.
            when_changed: called when models have been added or removed.
        Raises: any error of a model, if nothing is served yet.
        """
        self._when_changed = when_changed
        is_new = not self._plans
        self._plans = {
            name: PLAN.validate_python({"name": name, **content}) for name, content in plans.items()
        }
        self._adding = {
            name: plan for name, plan in self._adding.items() if self._plans.get(name) == plan
        }
        for name, plan in self._plans.items():
            if name in self.models:
                self.models[name].change(plan)
            elif is_new:
                self.models[name] = await self._load(plan)
            elif name not in self._adding:
                self._adding[name] = plan
                self._failed.pop(name, None)  # that was another plan
                task = asyncio.get_running_loop().create_task(self._add(plan))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        gone = [self.models.pop(name) for name in [*self.models] if name not in self._plans]
        self._failed = {name: why for name, why in self._failed.items() if name in self._plans}
        when_changed()
        for model in gone:
            model.close()

    def served(self, keys: Keys | None) -> dict[str, ServedModel]:
        """Return the models in the order of their plans, including those that are not loaded."""
        return {
            name: LocalModel(self.models[name].slot, keys)
            if name in self.models
            else AbsentModel(name, self._failed.get(name))
            for name in self._plans
        }

    async def check_health(self) -> None:
        """Check the models as `Model.check_health` does; if it raises, Serve replaces this
        process."""
        for model in tuple(self.models.values()):
            await model.check_health()

    async def _load(self, plan: Plan) -> LoadedModel:
        loop = asyncio.get_running_loop()
        load = partial(LoadedModel, plan, self._report, self.recorder)
        return await loop.run_in_executor(self._loaders, load)

    async def _add(self, plan: Plan) -> None:
        """Load one more model, and retry for as long as its plan is wanted."""
        name, wait_s = plan.name, RETRY_S
        while self._adding.get(name) is plan:
            try:
                model = await self._load(plan)
            except Exception as error:
                if self._adding.get(name) is plan:
                    self._failed[name] = f"{plan.source.named} is not served: {reason_of(error)}"
                    logger.error("%s: %s", name, self._failed[name])
                    self._when_changed()
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                continue
            if self._adding.get(name) is not plan:
                model.close()
                return
            del self._adding[name]
            self._failed.pop(name, None)
            self.models[name] = model
            self._when_changed()


class AbsentModel(ServedModel):
    """A model that failed to load, or is still being loaded."""

    def __init__(self, name: str, problem: str | None) -> None:
        self._message = problem or f"{name} is being loaded: try again"
        self.has_failed = problem is not None

    async def tasks(self) -> Sequence[str]:
        raise NotReadyError(self._message)

    async def card(self) -> Card:
        raise NotReadyError(self._message)

    async def check_ready(self) -> None:
        raise NotReadyError(self._message)

    async def request(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> Response:
        raise NotReadyError(self._message)
