"""The config of `raybert serve`."""

import re
from dataclasses import dataclass, field
from typing import Literal

from bert_core.checks import (
    NonNegativeFloat,
    Port,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    check_fields,
)
from bert_core.errors import ConfigError
from serve.limits import Limits

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serve one or several models over HTTP."""

    models: list[str] | str
    """Models to serve, as name=reference, several as a list or comma-separated; a reference is a
    bundle's folder or URI, models:/name@alias of the registry, or owner/name@revision of the
    Hugging Face hub."""
    host: str = "127.0.0.1"
    """Address to listen on: 127.0.0.1 for this machine only, 0.0.0.0 for all interfaces."""
    port: Port = 8000
    """Port to listen on."""
    num_replicas: PositiveInt = 1
    """Processes per model."""
    threads: PositiveInt = 1
    """Compute threads per replica."""
    num_cpus: PositiveFloat | None = None
    """CPUs that a replica reserves; by default as many as `threads`. A fraction lets several small
    models share a core."""
    together: bool = False
    """Run all models and the front in one process, which saves some 500 MB per model; one that
    fails then takes the others with it."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs that a replica reserves; 0 computes on the CPU, a fraction shares one GPU."""
    max_batch_tokens: PositiveInt = 2048
    """Maximum tokens per forward pass, padding included; a longer text gets its own pass."""
    max_wait_ms: NonNegativeFloat = 2.0
    """Maximum wait of a pass for more requests; a request to an idle model never waits."""
    max_ongoing_requests: PositiveInt = 256
    """Maximum concurrent requests per replica, so that batches can fill."""
    limits: Limits = field(default_factory=Limits)
    """What is refused at once, before it costs anything."""
    follow_s: NonNegativeFloat = 5.0
    """How often the registry is asked whether an alias has moved, in which case its new version is
    served without a failed request; 0 never."""
    haproxy: bool = True
    """Put HAProxy in front (far more requests per second); false uses Ray's own proxy."""
    keys: str | None = None
    """File of API keys, made by `raybert serve keys create NAME --keys FILE`: requests then need
    one of them. Keys added or revoked later count within seconds where replicas can read it."""
    no_auth: bool = False
    """Listen beyond this machine without keys, so that anyone who reaches the port may ask."""
    tls_certificate: str | None = None
    """PEM file with certificate, chain and private key: HAProxy then speaks HTTPS only. It is read
    on every node with a proxy."""
    log_format: Literal["text", "json"] = "text"
    """Format of the server's log, which has a line per request and never a text of one."""
    otlp_endpoint: str | None = None
    """Collector of traces that speaks OTLP over HTTP, as http://localhost:4318; by default there
    are none. Needs the extra `otlp`."""
    trace_share: PositiveShare = 1.0
    """Share of requests that are traced; those with a `traceparent` do as their caller does."""
    allow_open_cluster: bool = False
    """Serve on the cluster at RAY_ADDRESS even if it requires no token, so that anyone who reaches
    its ports can run code there."""
    tracking_uri: str | None = None
    """MLflow's tracking URI, for references to the registry; default as in the other stages."""

    def __post_init__(self) -> None:
        check_fields(self)
        parse_models(self.models)
        if self.haproxy and self.host not in ("127.0.0.1", "0.0.0.0"):
            # HAProxy looks for its node's replicas on 127.0.0.1; they listen on `host`.
            raise ConfigError(
                "host: wanted 127.0.0.1 or 0.0.0.0 behind HAProxy, got "
                f"{self.host!r}: give one of them, or set haproxy = false"
            )
        if self.host not in ("127.0.0.1", "localhost", "::1") and not (self.keys or self.no_auth):
            raise ConfigError(
                f"keys: wanted a file of API keys to listen on {self.host}, which others may "
                "reach, got none: make one with `raybert serve keys create NAME --keys FILE`, or "
                "set no_auth"
            )
        if self.tls_certificate is not None and not self.haproxy:
            raise ConfigError(
                f"tls_certificate: wanted none without HAProxy, which speaks TLS, got "
                f"{self.tls_certificate}: leave haproxy on"
            )
        if self.otlp_endpoint is not None and not self.haproxy:
            raise ConfigError(
                "otlp_endpoint: wanted none without HAProxy, since Ray's own proxy puts paths of "
                f"requests into traces, got {self.otlp_endpoint}: leave haproxy on"
            )
        if self.together and self.num_replicas > 1:
            raise ConfigError(
                f"num_replicas: wanted 1 with together, which is one process, got "
                f"{self.num_replicas}: leave one of them out"
            )
        if self.num_gpus > 1 and not float(self.num_gpus).is_integer():
            raise ConfigError(
                f"num_gpus: wanted a fraction below 1 or a whole number, got {self.num_gpus}"
            )


def parse_models(models: list[str] | str) -> dict[str, str]:
    """`name=reference`, … → reference by name, in the order given.

    Raises: ConfigError if there is none, one has another form, or a name occurs twice.
    """
    entries = models.split(",") if isinstance(models, str) else models
    references: dict[str, str] = {}
    for entry in entries:
        name, equals, reference = (part.strip() for part in entry.partition("="))
        if not (equals and reference and _NAME.fullmatch(name)):
            raise ConfigError(
                "models: wanted name=reference, as in docs=models:/docs@champion, with a name of "
                f"letters, digits, dots, dashes and underscores, got {entry!r}"
            )
        if name in references:
            raise ConfigError(
                f"models: wanted different names, got {name!r} for {references[name]} and "
                f"{reference}: rename one of them"
            )
        references[name] = reference
    if not references:
        raise ConfigError("models: wanted at least one name=reference, got none")
    return references
