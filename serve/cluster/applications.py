"""Makes the Ray Serve applications of a config, and starts and stops Ray Serve itself."""

import io
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import serve as ray_serve
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray.exceptions import ActorDiedError, RayError
from ray.serve._private.client import ServeControllerClient
from ray.serve.config import BackpressureConfig
from ray.serve.context import _get_global_client

from bert_core import files
from bert_core.errors import ConfigError
from serve.cluster import deployments, haproxy
from serve.cluster.deployments import COMPARISONS, FRONT, MODEL, RECORD, application_name
from serve.config import ModelConfig, ModelSettings, ServeConfig
from serve.observe import tracing
from serve.request import auth
from serve.request.limits import Limits
from serve.request.local_hosts import LOOPBACK, is_loopback
from serve.versions.plan import ACCESS, LIMITS, PLAN, Access, Deployable, Plan
from tracking.store.server import tracking_uri

HEALTH_CHECK_PERIOD_S = 2.0
"""Interval of Serve's health checks, by which it notices that a replica has died. A check costs
nothing while passes succeed; by Serve's default, a model may lack a replica for 10 s."""
HEALTH_CHECK_TIMEOUT_S = 12.0
"""How long Serve waits for the answer. After three in a row that do not come, as from a process
that is stopped, it ends the replica, and HAProxy asks another one; with Serve's 30 s, clients would
have given up."""
POLL_S = 0.2
CONTROLLER_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Deployed:
    """An application of one deployment, as Ray Serve takes it."""

    name: str
    prefix: str | None
    deployment: str
    application: str
    """Name of the application in `serve.cluster.deployments`."""
    options: Mapping[str, Any]
    """Options of the deployment, as in a Serve config file."""

    def target(self) -> ray_serve.RunTarget:
        """Return the application for this process to run."""
        options = dict(self.options)
        if "backpressure_config" in options:
            options["backpressure_config"] = BackpressureConfig(**options["backpressure_config"])
        kind = deployments.KINDS[self.application].options(**options)
        return ray_serve.RunTarget(kind.bind(), self.name, self.prefix)

    def entry(self) -> dict[str, Any]:
        """Return the application's entry in a Serve config file."""
        return {
            "name": self.name,
            "route_prefix": self.prefix,
            "import_path": f"serve.cluster.deployments:{self.application}",
            "deployments": [{"name": self.deployment, **self.options}],
        }


def applications(config: ServeConfig, models: Mapping[str, Deployable]) -> list[Deployed]:
    """Return the applications to deploy for these models: the models, the front and the
    comparisons."""
    settings = config.served
    first = sorted(models, key=lambda name: name != config.default)
    at_front = {
        "limits": LIMITS.dump_python(_limits_of_front(config.limits, settings.values())),
        "access": _access(config.keys),
        "local_only": is_loopback(config.host),
        "indexes": {
            # Absolute, since the front runs elsewhere.
            name: [files.absolute(folder) for folder in folders]
            for name, folders in config.served_indexes.items()
        },
        "server": server_settings(config),
    }
    if config.together:
        plans = {name: _as_json(models[name].plan) for name in first}
        content = {"plans": plans, **at_front}
        options = _options(config, _together(list(settings.values())), content)
        result = [Deployed(FRONT, "/", FRONT, "TOGETHER_APPLICATION", options)]
    else:
        options = _options(config, config, {"models": first, **at_front}, num_cpus=0)
        result = [Deployed(FRONT, "/", FRONT, "FRONT_APPLICATION", options)]
        result += [
            model_application(config, name, model, alone=False) for name, model in models.items()
        ]
    if any(model.plan.candidate for model in models.values()):
        content = {"tracking_uri": tracking_uri(config.tracking_uri)}
        options = {"user_config": content, "ray_actor_options": {"num_cpus": 0}}
        result.append(Deployed(COMPARISONS, None, RECORD, "COMPARISONS_APPLICATION", options))
    return result


def server_settings(config: ServeConfig) -> dict[str, Any]:
    """Return the settings that only a new start of Ray Serve can change."""
    names = ("host", "port", "haproxy", "otlp_endpoint", "trace_share")
    settings = {name: getattr(config, name) for name in names}
    return {**settings, "tls_certificate": certificate(config.tls_certificate)}


def _limits_of_front(common: Limits, models: Iterable[ModelConfig]) -> Limits:
    """Return the front's limits: it reads whatever any of the models may read, and each model
    checks its own limits."""
    limits = [common, *(model.limits for model in models)]
    return replace(
        common,
        max_body_bytes=max(each.max_body_bytes for each in limits),
        body_timeout_s=max(each.body_timeout_s for each in limits),
    )


def _together(models: Sequence[ModelConfig]) -> ModelSettings:
    """Return the settings of a process that holds all of the models."""
    return replace(
        models[0],
        num_cpus=max(model.reserved_cpus for model in models),
        num_gpus=max(model.num_gpus for model in models),
        max_ongoing_requests=max(model.max_ongoing_requests for model in models),
        num_replicas=1,
        max_replicas=None,
    )


def model_application(
    config: ServeConfig, name: str, model: Deployable, *, alone: bool
) -> Deployed:
    """Return the application of one model; `alone` if there is no front."""
    content = {
        "plan": _as_json(model.plan),
        "access": _access(config.keys),
        "alone": alone,
        # Without a front, Serve's own config says where the model listens.
        "local_only": not alone and is_loopback(config.host),
    }
    options = _options(config, config.served[name], content)
    prefix = "/" if alone else f"/v1/models/{name}"
    return Deployed(application_name(name), prefix, MODEL, "MODEL_APPLICATION", options)


def _options(
    config: ServeConfig,
    model: ModelSettings,
    content: Mapping[str, Any],
    num_cpus: float | None = None,
) -> dict[str, Any]:
    """Return options of a deployment; a deployment that reserves no CPU computes nothing, and is
    not scaled."""
    options: dict[str, Any] = {
        "user_config": content,
        "logging_config": log_settings(config.log_format),
        "max_ongoing_requests": model.max_ongoing_requests,
        # A second line behind our own limits: these requests have not been read yet.
        "max_queued_requests": model.max_ongoing_requests,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1},
        "graceful_shutdown_timeout_s": config.drain_s,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
    }
    if num_cpus is not None:
        return options | {"ray_actor_options": {"num_cpus": num_cpus}}
    options["ray_actor_options"] = {"num_cpus": model.reserved_cpus, "num_gpus": model.num_gpus}
    if model.max_replicas is None:
        return options | {"num_replicas": model.num_replicas}
    policy = {
        "policy_function": "serve.cluster.scaling:ByQueuedTokens",
        "policy_kwargs": {"target_queue_tokens": model.target_queue_tokens},
    }
    scaling = {
        "min_replicas": model.num_replicas,
        "max_replicas": model.max_replicas,
        "upscale_delay_s": 3.0,
        "downscale_delay_s": 60.0,
        "metrics_interval_s": 1.0,
        "look_back_period_s": 3.0,
        "policy": policy,
    }
    return options | {"autoscaling_config": scaling}


def _as_json(plan: Plan) -> dict[str, Any]:
    content: dict[str, Any] = PLAN.dump_python(plan, mode="json")
    return content


def _access(path: str | None) -> dict[str, Any] | None:
    keys = access(path)
    return None if keys is None else ACCESS.dump_python(keys, mode="json")


def is_ours(application: str) -> bool:
    return application in (FRONT, COMPARISONS) or application.startswith(application_name(""))


def log_settings(log_format: str) -> dict[str, Any]:
    """Return the settings of Serve's log, without its lines per request: ours have more details,
    and no path."""
    return {"encoding": log_format.upper(), "enable_access_log": False}


def access(path: str | None) -> Access | None:
    """Return where the keys are, after reading them once; None without keys. Raises: see
    `auth.read_keys`."""
    if path is None:
        return None
    auth.read_keys(path)
    # The path is absolute, since replicas run elsewhere.
    return Access(path=files.absolute(path))


def certificate(path: str | None) -> str | None:
    """Return the absolute path of a TLS certificate. Raises: ConfigError if there is no such
    file."""
    if path is None:
        return None
    if not Path(path).is_file():
        raise ConfigError(
            f"tls_certificate: wanted a PEM file with certificate, chain and private key, got "
            f"nothing at {path}: check the path"
        )
    return str(Path(path).absolute())


def stands_apart(config: ServeConfig) -> bool:
    """Whether only HAProxy is to be reached from other machines.

    That is so on a cluster that this process has started, which stays on this machine. On any other
    cluster, the nodes reach each other's replicas.
    """
    # NOTE: Ray has no public API for it.
    node = ray._private.worker._global_node
    return config.haproxy and node is not None and node.is_head()


def asks_for_pass(config: ServeConfig) -> bool:
    """Whether replicas are to answer only what came through HAProxy.

    That is so where other machines reach them, on a cluster that requires Ray's token. On any other
    cluster some nodes may have a token and others none, and they would not agree on the header that
    is derived from it.
    """
    return not stands_apart(config) and is_token_auth_enabled()


def start(config: ServeConfig) -> None:
    """Start Ray Serve's controller and proxies on the cluster.

    Raises: ResourceError if others may write to the folder for HAProxy's files.
    """
    pem = certificate(config.tls_certificate)
    apart = stands_apart(config)
    environment = haproxy.settings(
        enabled=config.haproxy,
        certificate=pem,
        host=config.host if apart else None,
        asks_for_pass=asks_for_pass(config),
    )
    haproxy.remove_files(ray.get_runtime_context().get_node_id())
    environment |= tracing.environment(config.otlp_endpoint)
    # NOTE: Serve allows its proxies 60 s, which a busy machine may exceed. They continue to start,
    # and later code waits for them, also for a proxy that Serve replaced since it did not answer.
    with suppress(TimeoutError, ActorDiedError):
        ray_serve.start(
            http_options={"host": LOOPBACK[0] if apart else config.host, "port": config.port},
            logging_config=log_settings(config.log_format),
            tracing_config=tracing.settings(config.otlp_endpoint, config.trace_share),
            controller_options={"runtime_env": {"env_vars": environment}},
        )


def stop_taking() -> None:
    """Have HAProxy on this machine answer every new request with 503 from now on."""
    haproxy.stop_taking(ray.get_runtime_context().get_node_id())


def drain(limit_s: float) -> None:
    """Delete our applications; each replica ends once it has answered its requests.

    New requests to a deleted application get 503. Serve's own shutdown would end HAProxy first, and
    with it every request in progress. The front goes before the models, since it sends requests to
    them.

    Args:
        limit_s: how long to wait for all applications together.
    """
    deadline_s = time.monotonic() + limit_s
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return
    with suppress(RayError):  # Ray itself may end, if every process got the signal
        ours = {name for name in _running(client) if is_ours(name)}
        for names in ({FRONT} & ours, ours - {FRONT}):
            client.delete_apps(list(names), blocking=False)
            while not names.isdisjoint(_running(client)) and time.monotonic() < deadline_s:
                time.sleep(POLL_S)


def _running(client: ServeControllerClient) -> Sequence[str]:
    """Return Serve's applications. Raises: RayError if its controller does not answer."""
    ray.get(client._controller.check_alive.remote(), timeout=CONTROLLER_TIMEOUT_S)
    return tuple(ray_serve.status().applications)


def shut_down() -> None:
    """Stop Serve on this cluster, including HAProxy. Requests in progress are not waited for."""
    # NOTE: Serve's controller exits during a call, and Ray prints that the call failed.
    with redirect_stdout(io.StringIO()):
        ray_serve.shutdown()
    haproxy.remove_files(ray.get_runtime_context().get_node_id())
