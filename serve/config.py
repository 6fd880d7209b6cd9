"""What `raybert serve` can be told."""

import re
from dataclasses import dataclass

from bert_core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Answer requests to one or several models over HTTP."""

    models: list[str] | str
    """What to serve, as name=reference, several as a list or with commas between; a reference is a
    bundle's folder or URI, or models:/name@alias of the registry"""
    host: str = "127.0.0.1"
    """Where to listen: 127.0.0.1 for this machine only, 0.0.0.0 for every interface"""
    port: int = 8000
    """Port to listen on"""
    num_replicas: int = 1
    """Processes that answer for each model"""
    threads: int = 1
    """Threads that a replica computes with, and CPUs that it reserves"""
    num_gpus: float = 0.0
    """GPUs that a replica reserves; 0 computes on the CPU, a fraction shares one GPU"""
    max_batch_tokens: int = 2048
    """Most tokens in one forward pass, padding included; a longer text goes alone"""
    max_wait_ms: float = 2.0
    """Longest that a pass waits to become fuller; one that comes to an idle model never waits"""
    max_ongoing_requests: int = 256
    """Most requests that a replica takes at a time, so that batches can fill"""
    haproxy: bool = True
    """Put HAProxy in front (far more requests a second); false uses Ray's own proxy"""
    allow_open_cluster: bool = False
    """Serve on the cluster of RAY_ADDRESS though it asks for no token, and anyone who reaches its
    ports can run code there"""
    tracking_uri: str | None = None
    """MLflow's tracking server, for references to the registry; default as in the other stages"""

    def __post_init__(self) -> None:
        parse_models(self.models)
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}: wanted 1 to 65535")
        if self.haproxy and self.host not in ("127.0.0.1", "0.0.0.0"):
            # HAProxy looks for the replicas of its node on 127.0.0.1; they listen on `host`.
            raise ConfigError(
                f'host is "{self.host}": behind HAProxy it must be 127.0.0.1 or 0.0.0.0; '
                "choose one of them, or set haproxy = false"
            )
        for field in ("num_replicas", "threads", "max_batch_tokens", "max_ongoing_requests"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} is {getattr(self, field)}: wanted at least 1")
        if self.num_gpus > 1 and not float(self.num_gpus).is_integer():
            raise ConfigError(
                f"num_gpus is {self.num_gpus}: wanted a fraction below 1 or a whole number"
            )
        for field in ("num_gpus", "max_wait_ms"):
            if getattr(self, field) < 0:
                raise ConfigError(f"{field} is {getattr(self, field)}: wanted 0 or more")


def parse_models(models: list[str] | str) -> dict[str, str]:
    """`name=reference`, … → reference by name, in the order given.

    Raises: ConfigError if there is none, one is not of that form, or a name comes twice.
    """
    entries = models.split(",") if isinstance(models, str) else models
    references: dict[str, str] = {}
    for entry in entries:
        name, equals, reference = (part.strip() for part in entry.partition("="))
        if not (equals and reference and _NAME.fullmatch(name)):
            raise ConfigError(
                f'models holds "{entry}": wanted name=reference, as in docs=models:/docs@champion, '
                "the name of letters, digits, dots, dashes and underscores"
            )
        if name in references:
            raise ConfigError(
                f'models names "{name}" twice, for {references[name]} and {reference}: '
                "give one of them another name"
            )
        references[name] = reference
    if not references:
        raise ConfigError("models is empty: wanted at least one name=reference")
    return references
