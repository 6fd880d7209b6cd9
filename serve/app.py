"""`raybert serve`: models on a Ray cluster, for as long as the command runs.

Each model is an application of Ray Serve, and so is the front: deploying, scaling or failure of one
model does not affect the others. `run` serves until it is interrupted (`serve.cluster.commands` has
the commands for a cluster that serves on its own); `build` is for `serve run serve.app:build
name=docs model=runs/docs/finetune/bundle`, one model that answers at the same paths.
"""

import json
import logging
import shlex
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve import Application

from bert_core.errors import ResourceError
from serve.cluster import commands, steady, worker_start
from serve.cluster.applications import (
    access,
    applications,
    certificate,
    drain,
    model_application,
    shut_down,
    start,
    stop_taking,
)
from serve.cluster.capacity import check_memory, check_room
from serve.cluster.haproxy_launcher import CONNECTIONS, DESCRIPTORS, possible_connections
from serve.config import ServeConfig, config_of_one
from serve.observe import tracing
from serve.versions.finding import find_in_child
from serve.versions.plan import Deployable, find
from tracking.store.ports import require_free

WORKER_SETUP = worker_start.SETUP
"""Full name of the function that each worker of a cluster for `run` alone should call first."""


def build(arguments: dict[str, Any]) -> Application:
    """One model in one application. Raises: see `config_of_one`, which reads the arguments, and
    `find`."""
    config = config_of_one(arguments)
    ((name, model),) = find(config).items()
    return model_application(config, name, model, alone=True).target().target


def perform(config: ServeConfig) -> None:
    """Do what the command asks, on the Ray cluster that this process is connected to.

    Raises: see `run` and `serve.cluster.commands`.
    """
    if config.apply is not None:
        commands.apply(config)
    elif config.status:
        commands.status()
    elif config.stop:
        commands.stop(config.drain_s)
    else:
        run(config)


def show_file(config: ServeConfig) -> None:
    """Print the config file for `serve deploy`; needs no cluster. Raises: see `find`."""
    commands.show_file(config)


def run(config: ServeConfig) -> None:
    """Serve until SIGTERM or SIGINT, on the Ray cluster that this process is connected to.

    Then requests in progress are answered, for up to `drain_s`; a second signal cuts them off.
    Raises: ResourceError if the port is in use, the cluster lacks CPUs or GPUs, or Serve is already
        running on it; also see `access`, `certificate` and `find`. Nothing is deployed then.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # the rest is in Serve's log
    with suppress(KeyboardInterrupt), _interrupted_by_sigterm():
        check(config)
        models = find_in_child(config, lambda name: print(f"loading {name}", flush=True))
        if not config.together:
            check_memory(config.served, models)
        try:
            print("starting Ray Serve", flush=True)
            start(config)
            ray_serve.run_many([each.target() for each in applications(config, models)])
            _wait_until_steady(config)
            _announce(config, models)
            # NOTE: Ray's internal switch, for breakpoints; there is no public API. What raylets
            # report of ended processes is also in their logs, and Serve replaces replicas.
            ray._private.worker._worker_logs_enabled = False
            threading.Event().wait()
        finally:
            with suppress(KeyboardInterrupt), _interrupted_by_sigterm():
                stop_taking()
                drain(config.drain_s)
            shut_down()


def check(config: ServeConfig) -> None:
    """Check port, keys, certificate and resources before anything starts. Raises: see `run`."""
    require_free(config.host, config.port)
    access(config.keys)
    certificate(config.tls_certificate)
    tracing.check(config.otlp_endpoint)
    if ray_serve.status().proxies:
        raise ResourceError(
            "this Ray cluster already runs Ray Serve: stop that with `serve shutdown`, "
            "or use another cluster"
        )
    check_room(config.served, together=config.together)


def _wait_until_steady(config: ServeConfig) -> None:
    paths = ["/readyz", *(f"/v1/models/{name}/readyz" for name in config.served)]
    tls = config.tls_certificate is not None
    steady.wait_until_steady(config.host, config.port, paths, _logs_folder(), tls=tls)


def _announce(config: ServeConfig, models: Mapping[str, Deployable]) -> None:
    scheme = "http" if config.tls_certificate is None else "https"
    url = f"{scheme}://{steady.reachable(config.host)}:{config.port}"
    name, model = next(iter(models.items()))
    print(f"serving {', '.join(models)} at {url} (a page for trying them; stop with Ctrl-C)")
    has_keys, pem = config.keys is not None, config.tls_certificate
    print(curl(f"{url}/v1/models/{name}", model.example, has_keys=has_keys, cacert=pem))
    if config.haproxy and (most := possible_connections()) < CONNECTIONS:
        print(
            f"at most {most:,} connections at once: {CONNECTIONS:,} need a hard limit of "
            f"{DESCRIPTORS:,} open files (ulimit -Hn), this machine's is lower"
        )
    print(f"logs: {_logs_folder()}", flush=True)


def _logs_folder() -> str:
    """Return the folder of Ray Serve's logs on this machine."""
    # NOTE: Ray has no public API for it; `session_latest` may be somebody else's session.
    node = ray._private.worker._global_node
    return "logs/serve of the Ray session" if node is None else f"{node.get_logs_dir_path()}/serve"


def curl(url: str, example: Any, *, has_keys: bool = False, cacert: str | None = None) -> str:
    """Return the shell command that sends a model its example.

    Args:
        has_keys: whether the server needs an API key, which the shell then takes from KEY.
        cacert: file with the server's certificate, if it has one.
    """
    words = ["curl", url, "-H 'Content-Type: application/json'"]
    words += ['-H "Authorization: Bearer $KEY"'] if has_keys else []
    words += [f"--cacert {shlex.quote(cacert)}"] if cacert is not None else []
    body = shlex.quote(json.dumps({"inputs": example}))
    return " ".join([*words, f"-d {body}"])


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM or SIGINT inside this context, but only once, so that
    shutdown can finish.

    Inside another such context, a second signal raises it too.
    """

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
