"""Ray Serve: one application per model, and a front application.

Deploying, scaling or failure of one model does not affect the others. `run` is `raybert serve`;
`build` is for `serve run serve.app:build name=docs model=runs/docs/finetune/bundle`: one model in
one application that answers at the same paths. `serve.api` defines the paths.
"""

import io
import json
import logging
import math
import shlex
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic
import ray
from fastapi import FastAPI
from ray import serve as ray_serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from bert_core import files
from bert_core.bundle.layout import WEIGHTS
from bert_core.errors import ConfigError, ResourceError
from bert_core.predictor import Predictor
from serve import api, auth, haproxy, metrics, steady, tracing
from serve.config import ServeConfig, parse_models
from serve.following import Follower, Slot
from serve.limits import Limits
from serve.model import Card, Model, Response, ServedModel
from serve.observing import Recorder
from tracking.ports import require_free
from tracking.resolve import at_version, is_alias, pinned, registered_version, resolve
from tracking.server import tracking_uri

GRACEFUL_SHUTDOWN_S = 5.0
"""How long a stopping replica may continue with requests in progress."""


Known = tuple[list[auth.Key], str]
"""Keys, and the file that they are in."""


@dataclass(frozen=True)
class Source:
    """A reference, and the URI of its registry."""

    reference: str
    tracking_uri: str
    version: str | None
    """The version of the registry that was found when it was deployed; None elsewhere."""

    @property
    def found(self) -> str:
        """The reference to what was found, wherever an alias has moved since."""
        return self.reference if self.version is None else at_version(self.reference, self.version)


@dataclass(frozen=True)
class Found:
    """A model that has been loaded once on the machine that deploys it."""

    source: Source
    folder: Path
    digest: str
    tasks: tuple[str, ...]
    """The tasks that it does, its own first."""
    example: Any
    """An input, as in a request."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model as a process is to serve it."""

    found: Found
    follow_s: float
    settings: Mapping[str, Any]
    """Arguments of `Model` besides the bundle."""

    def load(self, keys: auth.Keys | None, recorder: Recorder) -> api.LocalModel:
        """The model in this process, which follows its alias if it has one."""
        source, folder = self.found.source, self.found.folder
        settings = {**self.settings, "recorder": recorder}
        if not folder.is_dir():  # another machine than the one that deployed it
            folder = resolve(source.found, uri=source.tracking_uri)
        slot = Slot(
            Model(folder=folder, digest=self.found.digest, version=source.version, **settings),
            recorder,
        )
        if self.follow_s and is_alias(source.reference):

            def load_next(folder: Path, version: str) -> Model:
                return Model(folder=folder, version=version, **settings)

            Follower(
                slot, source.reference, source.tracking_uri, load_next, every_s=self.follow_s
            ).start()
        return api.LocalModel(slot, keys)


@ray_serve.ingress()
class ModelReplica:
    """A process that serves one model."""

    def __init__(self, plan: Plan, known: Known | None, alone: bool) -> None:
        """Load the model.

        Args:
            known: the keys that it asks for; None asks for none.
            alone: whether there is no front, so that it must list itself.
        """
        self._alone, self._keys = alone, _keys(known)
        self._local = plan.load(self._keys, metrics.RayRecorder())

    def __serve_build_asgi_app__(self) -> FastAPI:
        slot = self._local.slot
        return api.create_model_app(
            slot, alone=self._alone, keys=self._keys, metrics=metrics.exported
        )

    async def card(self) -> Card:
        return await self._local.card()

    async def request(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> Response:
        return await self._local.request(method, path, headers, body)

    async def check_ready(self) -> None:
        await self._local.check_ready()


def _keys(known: Known | None) -> auth.Keys | None:
    return None if known is None else auth.Keys(*known)


class RemoteModel(ServedModel):
    """A model in a separate application, as the front sees it."""

    def __init__(self, name: str, tasks: Sequence[str]) -> None:
        self.tasks = tasks
        self._handle: DeploymentHandle = ray_serve.get_deployment_handle(
            "model", app_name=application_name(name)
        )

    async def card(self) -> Card:
        return await self._handle.card.remote()

    async def check_ready(self) -> None:
        await self._handle.check_ready.remote()

    async def request(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> Response:
        return await self._handle.request.remote(method, path, headers, body)


@ray_serve.ingress()
class Front:
    """The page, the list of models, the readiness check for all of them, and the root routes."""

    def __init__(
        self, tasks: Mapping[str, Sequence[str]], limits: Limits, known: Known | None
    ) -> None:
        """`tasks`: those of each model, by its name."""
        self._tasks, self._limits, self._keys = tasks, limits, _keys(known)

    def __serve_build_asgi_app__(self) -> FastAPI:
        models = {name: RemoteModel(name, tasks) for name, tasks in self._tasks.items()}
        recorder = metrics.RayRecorder()
        return api.create_front_app(
            models, self._limits, self._keys, recorder, metrics=metrics.exported
        )


@ray_serve.ingress()
class Together:
    """The front with all models in its own process."""

    def __init__(self, plans: Mapping[str, Plan], limits: Limits, known: Known | None) -> None:
        self._limits, self._keys = limits, _keys(known)
        self._recorder = metrics.RayRecorder()
        self._models = {name: plan.load(self._keys, self._recorder) for name, plan in plans.items()}

    def __serve_build_asgi_app__(self) -> FastAPI:
        return api.create_front_app(
            self._models, self._limits, self._keys, self._recorder, metrics=metrics.exported
        )


def application_name(model: str) -> str:
    """Serve's name for a model's application; never equal to that of the front."""
    return f"model-{model}"


class BuildArguments(pydantic.BaseModel):
    """Arguments of `serve run serve.app:build`, key=value: a model, and fields of `ServeConfig`."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = "model"
    model: str
    num_replicas: int = ServeConfig.num_replicas
    threads: int = ServeConfig.threads
    num_gpus: float = ServeConfig.num_gpus
    tracking_uri: str | None = None
    max_batch_tokens: int = ServeConfig.max_batch_tokens
    max_wait_ms: float = ServeConfig.max_wait_ms
    max_ongoing_requests: int = ServeConfig.max_ongoing_requests


def build(arguments: BuildArguments) -> Application:
    """One model in one application. Raises: see `find`."""
    settings = arguments.model_dump(exclude={"name", "model"})
    config = ServeConfig(models=[f"{arguments.name}={arguments.model}"], **settings)
    ((name, model),) = find(config).items()
    return _model_application(config, name, model, alone=True)


def run(config: ServeConfig) -> None:
    """Serve until SIGTERM or SIGINT, on the Ray cluster that this process is connected to.

    Raises: ResourceError if the port is in use, the cluster lacks CPUs or GPUs, or Serve is already
        running on it; also see `known_keys`, `certificate` and `find`. Nothing is deployed then.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # the rest is in Serve's log
    with suppress(KeyboardInterrupt), _interrupted_by_sigterm():
        check(config)
        models = find(config)
        try:
            deploy(config, models)
            _announce(config, models)
            # NOTE: Ray's own switch, for breakpoints; there is no public one. What raylets say of
            # processes that end is in their logs, and Serve replaces replicas.
            ray._private.worker._worker_logs_enabled = False
            threading.Event().wait()
        finally:
            shut_down()


def check_port(config: ServeConfig) -> None:
    """Raises: ResourceError if the port is in use."""
    require_free(config.host, config.port)


def check(config: ServeConfig) -> None:
    """Check port, keys, certificate and resources before anything is started. Raises: see `run`."""
    check_port(config)
    known_keys(config)
    certificate(config)
    tracing.check(config.otlp_endpoint)
    if ray_serve.status().proxies:
        raise ResourceError(
            "this Ray cluster already runs Ray Serve: stop that with `serve shutdown`, "
            "or use another cluster"
        )
    # Serve would wait forever for missing resources.
    resources = ray.cluster_resources()
    _require_room(config, "CPU", _cpus(config), resources.get("CPU", 0))
    if config.num_gpus:
        _require_room(config, "GPU", config.num_gpus, resources.get("GPU", 0))


def known_keys(config: ServeConfig) -> Known | None:
    """The keys that the server asks for. Raises: ConfigError, FormatError for their file."""
    if config.keys is None:
        return None
    return auth.read_keys(config.keys), files.absolute(config.keys)  # replicas run elsewhere


def certificate(config: ServeConfig) -> str | None:
    """The path of the TLS certificate, wherever HAProxy runs. Raises: ConfigError without one."""
    path = config.tls_certificate
    if path is None:
        return None
    if not Path(path).is_file():
        raise ConfigError(
            f"tls_certificate: wanted a PEM file with certificate, chain and private key, got "
            f"nothing at {path}: check the path"
        )
    return str(Path(path).absolute())


def _require_room(
    config: ServeConfig, kind: Literal["CPU", "GPU"], per_replica: float, available: float
) -> None:
    models = 1 if config.together else len(parse_models(config.models))
    replicas = models * config.num_replicas
    if per_replica < 1 and kind == "GPU":  # a replica's fraction must be on a single GPU
        wanted = math.ceil(replicas / math.floor(1 / per_replica + 1e-9))
    else:
        wanted = math.ceil(replicas * per_replica)
    if wanted <= available:
        return
    ways = ["serve fewer models"] if models > 1 else []
    ways += ["lower num_replicas"] if config.num_replicas > 1 else []
    if kind == "GPU":
        field = "num_gpus"
        ways.append("lower num_gpus (a fraction shares a GPU, 0 computes on CPUs)")
    else:
        field = "threads" if config.num_cpus is None else "num_cpus"
        ways += ["lower threads"] if config.num_cpus is None and config.threads > 1 else []
        ways.append("set num_cpus to a fraction")
        if models > 1 and config.num_replicas == 1:
            ways.append("set together, for one process")
    ways.append(f"use a machine or cluster with more {kind}s")
    raise ResourceError(
        f"wanted {wanted} {kind}s (models {models} × num_replicas {config.num_replicas} × "
        f"{field} {per_replica:g}), the Ray cluster has {available:g}: {', or '.join(ways)}"
    )


def find(config: ServeConfig) -> dict[str, Found]:
    """All models by name, each loaded once: Serve would retry a failing replica for minutes.

    Raises: ConfigError for a reference that does not exist, or a graph that should run on a GPU;
        FormatError for a bundle that is damaged or answers no task; also see `resolve`.
    """
    models = {}
    for name, reference in parse_models(config.models).items():
        # Every replica gets the commit of a hub's model that is found here.
        uri = tracking_uri(config.tracking_uri)
        source = Source(pinned(reference), uri, registered_version(reference, uri=uri))
        folder = resolve(source.found, uri=uri)
        predictor = Predictor(folder, device="cpu")
        graph = predictor.bundle.graph
        if config.num_gpus and graph is not None:
            raise ConfigError(
                f"num_gpus: wanted 0 for {name}, since onnxruntime runs {folder / graph} on "
                f"CPUs, got {config.num_gpus:g}: leave it out, or serve the bundle with "
                f"{WEIGHTS} that it was exported from"
            )
        models[name] = Found(
            source=source,
            folder=folder,
            digest=predictor.bundle.digest,
            tasks=(predictor.task.name, *predictor.also),
            example=predictor.task.examples[0],
        )
    return models


def deploy(config: ServeConfig, models: Mapping[str, Found]) -> None:
    """Deploy all models and the front on the cluster, and wait until they answer."""
    if config.together:
        plans = {name: _plan(config, name, model) for name, model in models.items()}
        front = _deployment(Together, "front", config, **_resources(config)).bind(
            plans, config.limits, known_keys(config)
        )
        targets = [ray_serve.RunTarget(front, name="front", route_prefix="/")]
    else:
        tasks = {name: model.tasks for name, model in models.items()}
        front = _deployment(Front, "front", config, num_cpus=0).bind(
            tasks, config.limits, known_keys(config)
        )
        targets = [ray_serve.RunTarget(front, name="front", route_prefix="/")]
        for name, model in models.items():
            application = _model_application(config, name, model, alone=False)
            prefix = f"/v1/models/{name}"
            targets.append(ray_serve.RunTarget(application, application_name(name), prefix))
    environment = haproxy.settings(enabled=config.haproxy, certificate=certificate(config))
    environment |= tracing.environment(config.otlp_endpoint)
    # NOTE: Serve allows its proxies 60 s, which a busy machine may exceed; they continue to start,
    # and are waited for below.
    with suppress(TimeoutError):
        ray_serve.start(
            http_options={"host": config.host, "port": config.port},
            logging_config=_logging(config),
            tracing_config=tracing.settings(config.otlp_endpoint, config.trace_share),
            controller_options={"runtime_env": {"env_vars": environment}},
        )
    ray_serve.run_many(targets)
    paths = ["/readyz", *(f"/v1/models/{name}/readyz" for name in models)]
    tls = config.tls_certificate is not None
    steady.wait_until_steady(config.host, config.port, paths, _logs_folder(), tls=tls)


def shut_down() -> None:
    """Stop Serve on this cluster, including HAProxy."""
    # NOTE: Serve's controller exits during a call, and Ray prints that the call failed.
    with redirect_stdout(io.StringIO()):
        ray_serve.shutdown()
    haproxy.remove_files(ray.get_runtime_context().get_node_id())


def _model_application(config: ServeConfig, name: str, model: Found, *, alone: bool) -> Application:
    replica = _deployment(ModelReplica, "model", config, **_resources(config))
    replicas = replica.options(num_replicas=config.num_replicas)
    return replicas.bind(_plan(config, name, model), known_keys(config), alone)


def _deployment(
    kind: type, name: str, config: ServeConfig, **resources: float
) -> ray_serve.Deployment:
    return ray_serve.deployment(
        name=name,
        max_ongoing_requests=config.max_ongoing_requests,
        graceful_shutdown_timeout_s=GRACEFUL_SHUTDOWN_S,
        ray_actor_options=resources,
        logging_config=_logging(config),
    )(kind)


def _logging(config: ServeConfig) -> LoggingConfig:
    """Serve's log, without its lines per request: ours say more, and no path."""
    return LoggingConfig(encoding=config.log_format.upper(), enable_access_log=False)


def _logs_folder() -> str:
    """Where Ray Serve logs, on the machine that this process is on."""
    # NOTE: Ray has no public way to it; `session_latest` may be somebody else's session.
    node = ray._private.worker._global_node
    return "logs/serve of the Ray session" if node is None else f"{node.get_logs_dir_path()}/serve"


def _resources(config: ServeConfig) -> dict[str, float]:
    """What a process with models reserves."""
    return {"num_cpus": _cpus(config), "num_gpus": config.num_gpus}


def _cpus(config: ServeConfig) -> float:
    return float(config.threads) if config.num_cpus is None else config.num_cpus


def _plan(config: ServeConfig, name: str, model: Found) -> Plan:
    settings = {
        "name": name,
        "device": "cuda" if config.num_gpus else "cpu",
        "threads": config.threads,
        "max_batch_tokens": config.max_batch_tokens,
        "max_wait_ms": config.max_wait_ms,
        "limits": config.limits,
    }
    return Plan(found=model, follow_s=config.follow_s, settings=settings)


def _announce(config: ServeConfig, models: Mapping[str, Found]) -> None:
    scheme = "http" if config.tls_certificate is None else "https"
    url = f"{scheme}://{steady.reachable(config.host)}:{config.port}"
    name, model = next(iter(models.items()))
    print(f"serving {', '.join(models)} at {url} (a page for trying them; stop with Ctrl-C)")
    print(curl(f"{url}/v1/models/{name}", model.example))
    print(f"logs: {_logs_folder()}", flush=True)


def curl(url: str, example: Any) -> str:
    """The shell command that sends a model its example."""
    body = shlex.quote(json.dumps({"inputs": example}))
    return f"curl {url} -H 'Content-Type: application/json' -d {body}"


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM and SIGINT raise KeyboardInterrupt, but once, so that shutdown can finish."""

    def interrupt(signum: int, frame: object) -> None:
        for number in previous:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in previous:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
