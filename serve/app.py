"""`raybert serve`: what is deployed on a Ray cluster, and what the commands do.

Each model is an application of Ray Serve, and so is the front: deploying, scaling or failure of one
model does not affect the others. `run` serves until it is interrupted; `apply`, `status` and `stop`
are for a cluster that serves on its own; `build` is for `serve run serve.app:build name=docs
model=runs/docs/finetune/bundle`, one model that answers at the same paths.
"""

import io
import json
import logging
import shlex
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

import pydantic
import ray
import yaml
from ray import serve as ray_serve
from ray.serve import Application
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from bert_core.errors import ResourceError
from serve import haproxy, steady, tracing
from serve.applications import (
    Deployed,
    access,
    applications,
    certificate,
    is_ours,
    log_settings,
    model_application,
)
from serve.config import ServeConfig, models_of
from serve.deployments import MODEL, application_name
from serve.model import Card
from serve.plan import Found, find
from serve.room import check_room
from tracking.ports import require_free

APPLY_TIMEOUT_S = 600.0
"""How long models that are applied may take to load."""
CARD_TIMEOUT_S = 10.0
POLL_S = 0.5


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
    keys: str | None = None


def build(arguments: BuildArguments) -> Application:
    """One model in one application. Raises: see `find`."""
    settings = arguments.model_dump(exclude={"name", "model"})
    config = ServeConfig(models=[f"{arguments.name}={arguments.model}"], **settings)
    ((name, found),) = find(config).items()
    return model_application(config, name, found, alone=True).target().target


def run(config: ServeConfig) -> None:
    """Serve until SIGTERM or SIGINT, on the Ray cluster that this process is connected to.

    Raises: ResourceError if the port is in use, the cluster lacks CPUs or GPUs, or Serve is already
        running on it; also see `access`, `certificate` and `find`. Nothing is deployed then.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # the rest is in Serve's log
    with suppress(KeyboardInterrupt), _interrupted_by_sigterm():
        check(config)
        models = find(config)
        try:
            start(config)
            ray_serve.run_many([each.target() for each in applications(config, models)])
            _wait_until_steady(config)
            _announce(config, models)
            # NOTE: Ray's own switch, for breakpoints; there is no public one. What raylets say of
            # processes that end is in their logs, and Serve replaces replicas.
            ray._private.worker._worker_logs_enabled = False
            threading.Event().wait()
        finally:
            shut_down()


def apply(config: ServeConfig) -> None:
    """Make the cluster serve these models, whatever it serves now, and return once they answer.

    Models that stay as they are go on; those that change do so without a failed request; others are
    removed. Applying the same config again changes nothing.
    Raises: as `run`, and ResourceError if Serve runs applications that are not ours, or a model
        does not come to answer.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if config.dry_run:
        print(_as_file(config, applications(config, find(config))), end="")
        return
    names = set(ray_serve.status().applications)
    foreign = sorted(name for name in names if not is_ours(name))
    if foreign:
        raise ResourceError(
            f"wanted a cluster whose Ray Serve runs nothing else, it runs {', '.join(foreign)}, "
            "which would be removed: use another cluster, or deploy with `serve deploy`"
        )
    access(config)
    certificate(config)
    tracing.check(config.otlp_endpoint)
    check_room(models_of(config), together=config.together)
    models = find(config)
    wanted = applications(config, models)
    if not ray_serve.status().proxies:
        start(config)
    client = _get_global_client()
    assert client is not None
    entries = {"applications": [each.entry() for each in wanted]}
    client.deploy_apps(ServeDeploySchema.model_validate(entries))
    _wait_until_applied({each.name for each in wanted}, models)
    print(f"serving {', '.join(models)}; see raybert serve --status", flush=True)


def _as_file(config: ServeConfig, wanted: Sequence[Deployed]) -> str:
    """The config file for `serve deploy`."""
    content = {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.host, "port": config.port},
        "applications": [each.entry() for each in wanted],
    }
    return yaml.safe_dump(content, sort_keys=False)


def status() -> None:
    """Print what the cluster serves.

    Raises: ResourceError if it serves nothing.
    """
    shown = ray_serve.status().applications
    if not shown:
        raise ResourceError("this Ray cluster serves nothing: raybert serve --apply FILE does that")
    for name, application in sorted(shown.items()):
        replicas = ", ".join(
            f"{count} {state.lower()}"
            for each in application.deployments.values()
            for state, count in each.replica_states.items()
        )
        line = f"{name}: {application.status.value.lower()}; replicas: {replicas or 'none'}"
        if name.startswith(application_name("")) and (
            card := _card(name.removeprefix(application_name("")))
        ):
            version = "" if card.version is None else f" version {card.version}"
            line += f"; {card.task}{version} {card.digest[:12]}"
            line += "" if card.problem is None else f"; {card.problem}"
        print(line)
        if application.message:
            print(f"  {application.message.strip().splitlines()[-1]}")


def stop() -> None:
    """Stop serving. Raises: ResourceError if the cluster serves nothing."""
    if not ray_serve.status().proxies:
        raise ResourceError("this Ray cluster serves nothing")
    shut_down()
    print("stopped")


def check_port(config: ServeConfig) -> None:
    """Raises: ResourceError if the port is in use."""
    require_free(config.host, config.port)


def check(config: ServeConfig) -> None:
    """Check port, keys, certificate and resources before anything is started. Raises: see `run`."""
    check_port(config)
    access(config)
    certificate(config)
    tracing.check(config.otlp_endpoint)
    if ray_serve.status().proxies:
        raise ResourceError(
            "this Ray cluster already runs Ray Serve: stop that with `serve shutdown`, "
            "or use another cluster"
        )
    check_room(models_of(config), together=config.together)


def start(config: ServeConfig) -> None:
    """Start Ray Serve's controller and proxies on the cluster."""
    environment = haproxy.settings(enabled=config.haproxy, certificate=certificate(config))
    environment |= tracing.environment(config.otlp_endpoint)
    # NOTE: Serve allows its proxies 60 s, which a busy machine may exceed; they continue to start,
    # and are waited for later.
    with suppress(TimeoutError):
        ray_serve.start(
            http_options={"host": config.host, "port": config.port},
            logging_config=log_settings(config),
            tracing_config=tracing.settings(config.otlp_endpoint, config.trace_share),
            controller_options={"runtime_env": {"env_vars": environment}},
        )


def shut_down() -> None:
    """Stop Serve on this cluster, including HAProxy."""
    # NOTE: Serve's controller exits during a call, and Ray prints that the call failed.
    with redirect_stdout(io.StringIO()):
        ray_serve.shutdown()
    haproxy.remove_files(ray.get_runtime_context().get_node_id())


def _wait_until_applied(names: Collection[str], models: Mapping[str, Found]) -> None:
    """Wait until Serve runs all of the applications, and every model answers as it should."""
    deadline_s = time.monotonic() + APPLY_TIMEOUT_S
    while True:
        shown = ray_serve.status().applications
        states = {name: shown[name].status.value if name in shown else "MISSING" for name in names}
        for name, state in states.items():
            if state == "DEPLOY_FAILED":
                raise ResourceError(f"{name} was not deployed: {shown[name].message.strip()}")
        if set(states.values()) == {"RUNNING"} and set(shown) == set(names):
            break
        if time.monotonic() > deadline_s:
            listed = ", ".join(f"{name} {state.lower()}" for name, state in states.items())
            raise ResourceError(
                f"wanted all models to run within {APPLY_TIMEOUT_S:.0f} s: {listed}: see Ray's logs"
            )
        time.sleep(POLL_S)
    problems = [
        f"{name}: {card.problem}" for name in models if (card := _card(name)) and card.problem
    ]
    if problems:
        raise ResourceError(f"not everything was applied: {'; '.join(problems)}")


def _card(name: str) -> Card | None:
    """The card of a model in an application of its own; None if it does not answer."""
    try:
        handle = ray_serve.get_deployment_handle(MODEL, app_name=application_name(name))
        card: Card = handle.card.remote().result(timeout_s=CARD_TIMEOUT_S)
    except Exception:  # whatever is wrong with it: its application's status says so
        return None
    return card


def _wait_until_steady(config: ServeConfig) -> None:
    paths = ["/readyz", *(f"/v1/models/{name}/readyz" for name in models_of(config))]
    tls = config.tls_certificate is not None
    steady.wait_until_steady(config.host, config.port, paths, _logs_folder(), tls=tls)


def _announce(config: ServeConfig, models: Mapping[str, Found]) -> None:
    scheme = "http" if config.tls_certificate is None else "https"
    url = f"{scheme}://{steady.reachable(config.host)}:{config.port}"
    name, model = next(iter(models.items()))
    print(f"serving {', '.join(models)} at {url} (a page for trying them; stop with Ctrl-C)")
    print(curl(f"{url}/v1/models/{name}", model.example))
    print(f"logs: {_logs_folder()}", flush=True)


def _logs_folder() -> str:
    """Where Ray Serve logs, on the machine that this process is on."""
    # NOTE: Ray has no public way to it; `session_latest` may be somebody else's session.
    node = ray._private.worker._global_node
    return "logs/serve of the Ray session" if node is None else f"{node.get_logs_dir_path()}/serve"


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
