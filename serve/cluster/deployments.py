"""Defines the Ray Serve deployments: replicas of a model, the front, both in one process, and the
recorder of comparisons.

Their `user_config` says what they serve, so that Serve can change it while they run (`reconfigure`)
and a config file for `serve deploy` can hold it. `serve.http.app` defines the
paths. The front computes nothing, so only the processes of models import
`serve.cluster.model_table`, which imports torch.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve as ray_serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from bert_core.indexes.table import Index
from bert_core.manifest import read_manifest
from serve.cluster.haproxy_launcher import WITHOUT_REPLICA_S
from serve.cluster.scaling import METRIC
from serve.http.app import LocalModel, create_front_app, create_model_app
from serve.http.routes.index_shapes import Indexes
from serve.http.routes.listing import Listing, list_models
from serve.model.card import Card, Response, ServedModel
from serve.observe import metrics
from serve.observe.records import Recorder
from serve.request.auth import Keys
from serve.request.errors import NotReadyError, OverloadedError
from serve.request.limits import Limits
from serve.versions.comparison import Pairing, Tally
from serve.versions.comparison_runs import CandidateRuns
from serve.versions.plan import ACCESS, LIMITS
from tracking.store.server import give_up_soon

FRONT, COMPARISONS = "front", "comparisons"
"""Applications besides the models'."""
MODEL, RECORD = "model", "record"
"""The deployments of a model's application, and of the comparisons'."""
TASKS_TTL_S = 10.0
"""Time for which the front relies on the tasks that a model has named, if the model answers."""
CARD_TIMEOUT_S = 2.0
"""Time that the front waits for a model's tasks if it knows earlier ones."""
REPORT_EVERY_S = 5.0
"""Interval at which a replica reports how its candidate compares."""


def application_name(model: str) -> str:
    """Return Serve's name for a model's application; it never equals the name of another
    application."""
    return f"model-{model}"


class Switch:
    """An ASGI app that can be replaced by another app between two requests."""

    app: Starlette | None = None

    @property
    def routes(self) -> list[BaseRoute]:
        """The app's routes, by which Serve names a request in its own metrics and log."""
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


@ray_serve.ingress()
class ModelReplica:
    """A process that serves one model.

    `user_config`: `plan`, a `serve.versions.plan.Plan`; `access`, the keys that it requires, if
    any; `alone`, whether there is no front, so that the model must list itself; `local_only`,
    whether it listens on this machine only.
    """

    def __init__(self) -> None:
        from serve.cluster.model_table import ModelTable

        give_up_soon()
        self._switch, self._reporter = Switch(), Reporter()
        self._table = ModelTable(metrics.RayRecorder(), self._reporter.report)
        self._keys: Keys | None = None

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        plan = config["plan"]
        self._keys = await asyncio.to_thread(_keys, config, self._keys)

        def renew() -> None:
            self._local = LocalModel(self._table.models[plan["name"]].slot, self._keys)
            self._switch.app = create_model_app(
                self._local.slot,
                alone=config.get("alone", False),
                keys=self._keys,
                metrics=metrics.exported,
                local_only=config.get("local_only", False),
            )

        self._reporter.start()
        await self._table.change({plan["name"]: plan}, renew)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._switch

    async def check_health(self) -> None:
        await self._table.check_health()

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

    `user_config`: `models`, their names, the default model first; `limits`, `access`, `indexes`,
    the folders of each by name, and `local_only`.
    """

    def __init__(self) -> None:
        self._switch, self._recorder = Switch(), metrics.RayRecorder()
        self._keys: Keys | None = None
        self._indexes: Indexes = {}

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        self._keys = await asyncio.to_thread(_keys, config, self._keys)
        self._indexes = await asyncio.to_thread(_indexes, config, self._indexes)
        self._models = {name: RemoteModel(name) for name in config["models"]}
        self._switch.app = _front_app(
            self._models, config, self._keys, self._recorder, self._indexes
        )

    async def listing(self) -> Listing:
        return await list_models(self._models)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._switch


@ray_serve.ingress()
class Together:
    """The front with all models in its own process.

    `user_config`: `plans`, by name, the default model first; `limits`, `access`, `indexes` and
    `local_only`.
    """

    def __init__(self) -> None:
        from serve.cluster.model_table import ModelTable

        give_up_soon()
        self._switch, self._reporter = Switch(), Reporter()
        self._table = ModelTable(metrics.RayRecorder(), self._reporter.report)
        self._keys: Keys | None = None
        self._indexes: Indexes = {}

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        self._keys = await asyncio.to_thread(_keys, config, self._keys)
        self._indexes = await asyncio.to_thread(_indexes, config, self._indexes)

        def renew() -> None:
            self._models = self._table.served(self._keys)
            recorder = self._table.recorder
            self._switch.app = _front_app(self._models, config, self._keys, recorder, self._indexes)

        self._reporter.start()
        await self._table.change(config["plans"], renew)

    async def listing(self) -> Listing:
        return await list_models(self._models)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._switch

    async def check_health(self) -> None:
        await self._table.check_health()


class Comparisons:
    """Records in MLflow how candidates compare: a single process does this for all replicas.

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
        if self._recorder is not None:  # Serve calls this, then ends the process
            self._recorder.close()


class RemoteModel(ServedModel):
    """A model in a separate application, as the front sees it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: tuple[str, ...] = ()
        self._due_s = 0.0
        # NOTE: applications are built in no fixed order: this one may not exist yet.
        self._handle: DeploymentHandle = ray_serve.get_deployment_handle(
            MODEL, app_name=application_name(name), _check_exists=False
        )

    async def tasks(self) -> Sequence[str]:
        if time.monotonic() >= self._due_s:
            try:
                card = await asyncio.wait_for(self.card(), CARD_TIMEOUT_S if self._tasks else None)
            except Exception:
                if self._tasks:  # otherwise another model would answer in its place
                    return self._tasks
                raise
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
        try:
            try:
                return await self._ask(method, *arguments)
            except RayActorError:  # the process has died: another may answer
                return await self._ask(method, *arguments)
        except BackPressureError as error:
            raise OverloadedError(
                f"{self._name}: wanted fewer requests at once: try again in 1 s, or serve more "
                "replicas",
                1,
            ) from error
        except (RayActorError, DeploymentUnavailableError) as error:
            raise self._not_ready() from error

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the model. Raises: NotReadyError if it has no process, for which Serve
        waits forever."""
        response = getattr(self._handle, method).remote(*arguments)
        try:
            sent = response._replica_result_future
            sent = sent if asyncio.isfuture(sent) else asyncio.wrap_future(sent)
            while not (await asyncio.wait([sent], timeout=WITHOUT_REPLICA_S))[0]:
                # Otherwise the request is in a process that is being stopped.
                if self._is_down() and self._waits(response):
                    response.cancel()
                    raise self._not_ready()
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise

    def _is_down(self) -> bool:
        """Whether Serve has reported that the model has no running replica."""
        router = self._request_router()
        return router is not None and not router.curr_replicas

    def _waits(self, response: DeploymentResponse[Any]) -> bool:
        """Whether no replica has been chosen for a request yet."""
        waiting = self._request_router()._pending_requests_by_id
        return response._request_metadata.internal_request_id in waiting

    def _request_router(self) -> Any:
        # NOTE: Serve has no public API for it, and waits for a replica for as long as it takes.
        router: Any = self._handle._router
        return None if router is None else router._asyncio_router.request_router

    def _not_ready(self) -> NotReadyError:
        return NotReadyError(
            f"{self._name}: no process of this model answers: try again, or see /readyz"
        )


class Reporter:
    """Adds up how candidates compare in this process, and regularly passes the sums on."""

    def __init__(self) -> None:
        self._tallies: dict[Pairing, Tally] = {}
        self._task: asyncio.Task[None] | None = None

    def report(self, pairing: Pairing, tally: Tally) -> None:
        """Add a tally; call this on the event loop."""
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
        except Exception:  # comparing must not disturb answering: retry later
            self.report(pairing, tally)


def _keys(config: Mapping[str, Any], before: Keys | None) -> Keys | None:
    """Return the keys that are required, as their file has them now; keys in use keep their use of
    the limits."""
    content = config.get("access")
    if content is None:
        return None
    access = ACCESS.validate_python(content)
    if before is None or before.path != access.path:
        return Keys(path=access.path)
    before.reread()
    return before


def _indexes(config: Mapping[str, Any], before: Indexes) -> Indexes:
    """Return the indexes, opened; those that are open already stay so."""
    opened = {index.folder: index for versions in before.values() for index in versions}

    def index_of(folder: str) -> Index:
        known = opened.get(folder)
        is_same = known is not None and known.digest == read_manifest(folder).digest
        return known if known is not None and is_same else Index(folder)

    folders: Mapping[str, Sequence[str]] = config.get("indexes", {})
    return {name: [index_of(each) for each in versions] for name, versions in folders.items()}


def _front_app(
    models: Mapping[str, ServedModel],
    config: Mapping[str, Any],
    keys: Keys | None,
    recorder: Recorder,
    indexes: Indexes,
) -> Starlette:
    limits: Limits = LIMITS.validate_python(config.get("limits", {}))
    local_only = config.get("local_only", False)
    return create_front_app(
        models, limits, keys, recorder, metrics.exported, local_only=local_only, indexes=indexes
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
