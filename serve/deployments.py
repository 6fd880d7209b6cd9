"""The deployments of Ray Serve: a model's replicas, the front, both in one process, and what
compares candidates.

What they serve is in their `user_config`, so that Serve can change it while they run
(`reconfigure`) and a config file for `serve deploy` can hold it. `serve.api` defines the paths.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray import serve as ray_serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from serve import api, metrics
from serve.auth import Keys
from serve.comparison import Pairing, Tally
from serve.errors import NotReadyError, OverloadedError
from serve.following import LONGEST_WAIT_S, RETRY_S, reason_of
from serve.hosted import HostedModel
from serve.limits import Limits
from serve.model import Card, Response, ServedModel
from serve.plan import ACCESS, LIMITS, PLAN, Plan
from serve.recording import CandidateRuns
from serve.routes.front import Listing, listing_of
from serve.scaling import METRIC

logger = logging.getLogger("ray.serve")

FRONT, COMPARISONS = "front", "comparisons"
"""Applications besides the models'."""
MODEL, RECORD = "model", "record"
"""The deployments of a model's application, and of the comparisons'."""
TASKS_TTL_S = 10.0
"""How long the front relies on what a model has said it can do."""
REPORT_EVERY_S = 5.0
"""How often a replica passes on how its candidate compares."""


def application_name(model: str) -> str:
    """Serve's name for a model's application; never equal to another one's."""
    return f"model-{model}"


class Switch:
    """An ASGI app in whose place another may be put between two requests."""

    app: Starlette | None = None

    @property
    def routes(self) -> list[BaseRoute]:
        """By these, Serve names a request in its own metrics and log."""
        return [] if self.app is None else self.app.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            assert self.app is not None
            await self.app(scope, receive, send)
            return
        while True:  # our apps have nothing to start or to end
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return


class Hosting:
    """Models in this process, by name, which change with their plans."""

    def __init__(self) -> None:
        self.models: dict[str, HostedModel] = {}
        self.recorder = metrics.RayRecorder()
        self._plans: dict[str, Plan] = {}
        self._failed: dict[str, str] = {}
        self._reporter = Reporter()
        self._adding: set[asyncio.Task[None]] = set()

    async def change(self, plans: Mapping[str, Any], when_changed: Callable[[], None]) -> None:
        """Serve these models.

        Serve sends no request to a replica while it is reconfigured: what is served already goes on
        meanwhile, and what is to be loaded comes later. Only a process that serves nothing waits.

        Args:
            when_changed: called when models have been added or removed.
        Raises: whatever is wrong with a model, if nothing is served yet.
        """
        self._reporter.start()
        self._plans = {
            name: PLAN.validate_python({"name": name, **content}) for name, content in plans.items()
        }
        is_new = not self.models
        for name, plan in self._plans.items():
            if name in self.models:
                self.models[name].change(plan)
            elif is_new:
                self.models[name] = await self._load(plan)
            else:
                adding = asyncio.get_running_loop().create_task(self._add(plan, when_changed))
                self._adding.add(adding)
                adding.add_done_callback(self._adding.discard)
        gone = [self.models.pop(name) for name in [*self.models] if name not in self._plans]
        self._failed = {name: why for name, why in self._failed.items() if name in self._plans}
        when_changed()
        for model in gone:
            model.close()

    def served(self, keys: Keys | None) -> dict[str, ServedModel]:
        """The models in the order of their plans, those included that are not loaded."""
        return {
            name: api.LocalModel(self.models[name].slot, keys)
            if name in self.models
            else AbsentModel(name, self._failed.get(name))
            for name in self._plans
        }

    async def check_health(self) -> None:
        """Raises: what `Model.check_health` does, upon which Serve replaces this process."""
        for model in tuple(self.models.values()):
            await model.check_health()

    async def _load(self, plan: Plan) -> HostedModel:
        return await asyncio.to_thread(HostedModel, plan, self._reporter.report, self.recorder)

    async def _add(self, plan: Plan, when_changed: Callable[[], None]) -> None:
        """Load one more model, and try again for as long as it is wanted."""
        wait_s = RETRY_S
        while self._plans.get(plan.name) == plan and plan.name not in self.models:
            try:
                model = await self._load(plan)
            except Exception as error:
                self._failed[plan.name] = f"{plan.source.named} is not served: {reason_of(error)}"
                logger.error("%s: %s", plan.name, self._failed[plan.name])
                when_changed()
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                continue
            if self._plans.get(plan.name) == plan:
                self._failed.pop(plan.name, None)
                self.models[plan.name] = model
                when_changed()
            else:
                model.close()


class AbsentModel(ServedModel):
    """A model that is not loaded, or not yet."""

    def __init__(self, name: str, problem: str | None) -> None:
        self._message = problem or f"{name} is being loaded: try again"

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


@ray_serve.ingress()
class ModelReplica:
    """A process that serves one model.

    `user_config`: `plan`, a `serve.plan.Plan`; `access`, the keys that it asks for, if any;
    `alone`, whether there is no front, so that it must list itself; `local_only`, whether it
    listens on this machine only.
    """

    def __init__(self) -> None:
        self._hosting, self._switch = Hosting(), Switch()
        self._keys: Keys | None = None

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        plan = config["plan"]
        self._keys = await asyncio.to_thread(_keys, config, self._keys)

        def renew() -> None:
            self._local = api.LocalModel(self._hosting.models[plan["name"]].slot, self._keys)
            self._switch.app = api.create_model_app(
                self._local.slot,
                alone=config.get("alone", False),
                keys=self._keys,
                metrics=metrics.exported,
                local_only=config.get("local_only", False),
            )

        await self._hosting.change({plan["name"]: plan}, renew)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._switch

    async def check_health(self) -> None:
        await self._hosting.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {METRIC: float(self._local.slot.model.waiting_tokens)}

    async def card(self) -> Card:
        return await self._local.card()

    async def request(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> Response:
        return await self._local.request(method, path, headers, body)

    async def check_ready(self) -> None:
        await self._local.check_ready()


@ray_serve.ingress()
class Front:
    """The page, the list of models, the readiness check for all of them, and the root routes.

    `user_config`: `models`, their names, the default one first; `limits`, `access` and
    `local_only`.
    """

    def __init__(self) -> None:
        self._switch, self._recorder = Switch(), metrics.RayRecorder()
        self._keys: Keys | None = None

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        self._keys = await asyncio.to_thread(_keys, config, self._keys)
        self._models = {name: RemoteModel(name) for name in config["models"]}
        self._switch.app = _front_app(self._models, config, self._keys, self._recorder)

    async def listing(self) -> Listing:
        return await listing_of(self._models)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._switch


@ray_serve.ingress()
class Together:
    """The front with all models in its own process.

    `user_config`: `plans`, by name, the default one first; `limits`, `access` and `local_only`.
    """

    def __init__(self) -> None:
        self._hosting, self._switch = Hosting(), Switch()
        self._keys: Keys | None = None

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        self._keys = await asyncio.to_thread(_keys, config, self._keys)

        def renew() -> None:
            self._models = self._hosting.served(self._keys)
            recorder = self._hosting.recorder
            self._switch.app = _front_app(self._models, config, self._keys, recorder)

        await self._hosting.change(config["plans"], renew)

    async def listing(self) -> Listing:
        return await listing_of(self._models)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._switch

    async def check_health(self) -> None:
        await self._hosting.check_health()


class Comparisons:
    """Records in MLflow how candidates compare: the one process that does, for all replicas.

    `user_config`: `tracking_uri`.
    """

    def __init__(self) -> None:
        self._recorder: CandidateRuns | None = None
        self._lock = asyncio.Lock()

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        async with self._lock:
            before, self._recorder = self._recorder, CandidateRuns(config["tracking_uri"])
            if before is not None:
                await asyncio.to_thread(before.close)

    async def record(self, pairing: Pairing, tally: Tally) -> None:
        async with self._lock:  # a run has one writer
            assert self._recorder is not None
            await asyncio.to_thread(self._recorder.record, pairing, tally)

    def __del__(self) -> None:
        if self._recorder is not None:  # Serve ends this process, after calling this
            self._recorder.close()


class RemoteModel(ServedModel):
    """A model in a separate application, as the front sees it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: tuple[str, ...] = ()
        self._due_s = 0.0
        # NOTE: applications are built in no order: this one may not exist yet.
        self._handle: DeploymentHandle = ray_serve.get_deployment_handle(
            MODEL, app_name=application_name(name), _check_exists=False
        )

    async def tasks(self) -> Sequence[str]:
        if time.monotonic() >= self._due_s:
            card = await self.card()
            self._tasks = (card.task, *card.also)
            self._due_s = time.monotonic() + TASKS_TTL_S
        return self._tasks

    async def card(self) -> Card:
        return await self._call("card")

    async def check_ready(self) -> None:
        await self._call("check_ready")

    async def request(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> Response:
        return await self._call("request", method, path, headers, body)

    async def _call(self, method: str, *arguments: Any) -> Any:
        response = getattr(self._handle, method).remote(*arguments)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except BackPressureError as error:
            raise OverloadedError(
                f"{self._name}: wanted fewer requests at once: try again in 1 s, or serve more "
                "replicas",
                1,
            ) from error
        except (RayActorError, DeploymentUnavailableError) as error:
            raise NotReadyError(
                f"{self._name}: no process of this model answers: try again, or see /readyz"
            ) from error


class Reporter:
    """Adds up how candidates compare in this process, and passes it on now and then."""

    def __init__(self) -> None:
        self._tallies: dict[Pairing, Tally] = {}
        self._task: asyncio.Task[None] | None = None

    def report(self, pairing: Pairing, tally: Tally) -> None:
        """Called on the event loop."""
        self._tallies.setdefault(pairing, Tally()).add(tally)

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            tallies, self._tallies = self._tallies, {}
            for pairing, tally in tallies.items():
                await self._pass_on(pairing, tally)

    async def _pass_on(self, pairing: Pairing, tally: Tally) -> None:
        try:
            handle = ray_serve.get_deployment_handle(RECORD, app_name=COMPARISONS)
            await handle.record.remote(pairing, tally)
        except Exception:  # comparing must not get in the way of answering: it is tried again
            self.report(pairing, tally)


def _keys(config: Mapping[str, Any], before: Keys | None) -> Keys | None:
    """The keys that are asked for, as their file has them now; those in use keep what they have
    used."""
    content = config.get("access")
    if content is None:
        return None
    access = ACCESS.validate_python(content)
    if before is None or before.path != access.path:
        before = Keys(access.keys, access.path)
    before.reread()
    return before


def _front_app(
    models: Mapping[str, ServedModel],
    config: Mapping[str, Any],
    keys: Keys | None,
    recorder: metrics.RayRecorder,
) -> Starlette:
    limits: Limits = LIMITS.validate_python(config.get("limits", {}))
    local_only = config.get("local_only", False)
    return api.create_front_app(
        models, limits, keys, recorder, metrics.exported, local_only=local_only
    )


KINDS: Mapping[str, ray_serve.Deployment] = {
    "MODEL_APPLICATION": ray_serve.deployment(name=MODEL)(ModelReplica),
    "FRONT_APPLICATION": ray_serve.deployment(name=FRONT)(Front),
    "TOGETHER_APPLICATION": ray_serve.deployment(name=FRONT)(Together),
    "COMPARISONS_APPLICATION": ray_serve.deployment(name=RECORD)(Comparisons),
}
"""The deployments by the names of their applications, which a Serve config file imports."""

MODEL_APPLICATION = KINDS["MODEL_APPLICATION"].bind()
FRONT_APPLICATION = KINDS["FRONT_APPLICATION"].bind()
TOGETHER_APPLICATION = KINDS["TOGETHER_APPLICATION"].bind()
COMPARISONS_APPLICATION = KINDS["COMPARISONS_APPLICATION"].bind()
