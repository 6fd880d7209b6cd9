"""Implements `--apply`, `--status` and `--stop`, for a cluster that serves on its own."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import yaml
from ray import serve as ray_serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from bert_core.errors import ResourceError
from serve.cluster.applications import (
    access,
    applications,
    certificate,
    drain,
    is_ours,
    server_settings,
    shut_down,
    start,
    stop_taking,
)
from serve.cluster.capacity import check_memory, check_room
from serve.cluster.deployments import FRONT
from serve.config import ServeConfig
from serve.http.routes.listing import ModelEntry
from serve.observe import tracing
from serve.versions.plan import find

APPLY_TIMEOUT_S = 600.0
"""Time that models may take to load after a config is applied."""
LISTING_TIMEOUT_S = 30.0
POLL_S = 0.5
ASKED_PER_REPLICA = 4
"""Times that each replica is asked, on average, whether it serves the config that was applied."""


def apply(config: ServeConfig) -> None:
    """Make the cluster serve these models, whatever it serves now, and return once they answer.

    Models that stay as they are go on; those that change do so without a failed request; others are
    removed. Applying the same config again changes nothing.
    Raises: as `serve.app.run`; ResourceError if Serve runs applications that are not ours, or
        listens otherwise than the config says, or a model does not come to answer.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    foreign = _foreign()
    if foreign:
        raise ResourceError(
            f"wanted a cluster whose Ray Serve runs nothing else, it runs {', '.join(foreign)}, "
            "which would be removed: use another cluster, or deploy with `serve deploy`"
        )
    access(config.keys)
    certificate(config.tls_certificate)
    tracing.check(config.otlp_endpoint)
    is_running = bool(ray_serve.status().proxies)
    if is_running:
        _check_server(config)
    check_room(config.served, together=config.together)
    models = find(config)
    if not is_running and not config.together:
        check_memory(config.served, models)
    deployed = applications(config, models)
    if not is_running:
        start(config)
    client = _get_global_client()
    assert client is not None
    entries = {"applications": [each.entry() for each in deployed]}
    client.deploy_apps(ServeDeploySchema.model_validate(entries))
    _wait_until_applied([each.name for each in deployed], list(models))
    print(f"serving {', '.join(models)}; see raybert serve --status", flush=True)


def show_file(config: ServeConfig) -> None:
    """Print the config file with which `serve deploy` does what `apply` would; needs no cluster.

    Raises: see `find`.
    """
    content = {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.host, "port": config.port},
        "applications": [each.entry() for each in applications(config, find(config))],
    }
    print(yaml.safe_dump(content, sort_keys=False), end="")


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
        print(f"{name}: {application.status.value.lower()}; replicas: {replicas or 'none'}")
        if application.message:
            print(f"  {application.message.strip().splitlines()[-1]}")
    for entry in _listing() or ():
        print(f"{entry.id}: {_described(entry)}")


def stop(drain_s: float) -> None:
    """Stop serving our models, and Ray Serve if it serves nothing else.

    Args:
        drain_s: how long to wait for requests in progress.
    Raises: ResourceError if the cluster serves nothing.
    """
    if not ray_serve.status().proxies:
        raise ResourceError("this Ray cluster serves nothing")
    foreign = _foreign()
    if not foreign:
        stop_taking()
    drain(drain_s)
    if foreign:
        print(f"stopped; Ray Serve goes on for {', '.join(foreign)}")
        return
    shut_down()
    print("stopped")


def _described(entry: ModelEntry) -> str:
    if entry.card is None:
        return f"{entry.state}; {entry.problem}"
    version = "" if entry.card.version is None else f" version {entry.card.version}"
    problem = "" if entry.problem is None else f"; {entry.problem}"
    return f"{entry.state}; {entry.task}{version} {entry.card.digest[:12]}{problem}"


def _foreign() -> list[str]:
    """Return the applications that are not ours."""
    return sorted(name for name in ray_serve.status().applications if not is_ours(name))


def _check_server(config: ServeConfig) -> None:
    """Check that Serve runs as the config says, as far as only a new start can change it.

    Raises: ResourceError.
    """
    client = _get_global_client()
    assert client is not None
    details = client.get_serve_details()
    running: dict[str, Any] = {name: details["http_options"][name] for name in ("host", "port")}
    front = details["applications"].get(FRONT, {}).get("deployments", {}).get(FRONT, {})
    config_of_front = front.get("deployment_config", {}).get("user_config") or {}
    running |= config_of_front.get("server", {})
    for name, value in server_settings(config).items():
        if name in running and running[name] != value:
            raise ResourceError(
                f"{name}: wanted {running[name]}, with which this cluster serves, got {value}: "
                "give the same, or stop it first (raybert serve --stop)"
            )


def _listing() -> Sequence[ModelEntry] | None:
    """Return all models, as the front sees them; None if it does not answer."""
    try:
        handle = ray_serve.get_deployment_handle(FRONT, app_name=FRONT)
        entries: Sequence[ModelEntry] = (
            handle.listing.remote().result(timeout_s=LISTING_TIMEOUT_S).data
        )
    except Exception:  # whatever the cause is: its application's status shows it
        return None
    return entries


def _wait_until_applied(names: Sequence[str], models: Sequence[str]) -> None:
    """Wait until Serve runs all of the applications, and every replica serves what was applied."""
    deadline_s = time.monotonic() + APPLY_TIMEOUT_S
    answered = 0
    while True:
        missing = _not_running(names)
        entries = [] if missing else _listing() or []
        if (
            not missing
            and [entry.id for entry in entries]
            and set(models) == {entry.id for entry in entries}
        ):
            missing = coming(entries)
            answered = 0 if missing else answered + 1
            if answered >= ASKED_PER_REPLICA * _most_replicas():
                return
        if time.monotonic() > deadline_s:
            listed = ", ".join(f"{name} {state}" for name, state in missing.items())
            raise ResourceError(
                f"wanted all models to answer within {APPLY_TIMEOUT_S:.0f} s: {listed or 'front'}: "
                "see Ray's logs"
            )
        time.sleep(POLL_S if missing else 0.05)


def coming(entries: Sequence[ModelEntry]) -> dict[str, str]:
    """Return the models that do not answer yet, with their states.

    Raises: ResourceError if one will not, or not as applied, and none is still being loaded.
    """
    missing = {entry.id: entry.state for entry in entries if entry.state in ("loading", "down")}
    problems = [f"{entry.id}: {entry.problem}" for entry in entries if entry.problem]
    if problems and not missing:
        raise ResourceError(f"not everything was applied: {'; '.join(problems)}")
    return dict(missing)


def _not_running(names: Sequence[str]) -> dict[str, str]:
    """Return the applications that do not run as they should, with their states.

    Raises: ResourceError if one could not be deployed.
    """
    status = ray_serve.status()
    shown = status.applications
    states = {name: shown[name].status.value if name in shown else "MISSING" for name in names}
    for node, proxy in status.proxies.items():
        if proxy.value != "HEALTHY":
            states[f"the proxy of node {node[:8]}"] = proxy.value
    states |= {name: "to be removed" for name in shown if name not in names}
    for name, state in states.items():
        if state == "DEPLOY_FAILED":
            raise ResourceError(f"{name} was not deployed: {shown[name].message.strip()}")
    return {name: state.lower() for name, state in states.items() if state != "RUNNING"}


def _most_replicas() -> int:
    """Return the largest number of replicas of any model."""
    return max(
        sum(each.replica_states.values())
        for application in ray_serve.status().applications.values()
        for each in application.deployments.values()
    )
