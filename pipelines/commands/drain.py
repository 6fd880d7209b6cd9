"""`raybert drain`: have Ray move its work off a node before the machine is reclaimed."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bert_core.checks import NonNegativeFloat, PositiveFloat, check_fields
from bert_core.errors import ConfigError, ResourceError
from bert_core.wording import one_of
from pipelines.runtime import cluster, notices
from pipelines.runtime.capacity import drain
from pipelines.runtime.notices import Notice
from pipelines.runtime.progress import say

GONE_POLL_S = 0.5
RETRY_EVERY_S = 2.0
SILENT_AFTER = 12  # polls


@dataclass(frozen=True, kw_only=True)
class DrainConfig:
    """Drain a node: training writes a checkpoint and continues without it, replicas move away."""

    on_notice: str | None = None
    """Wait for a notice of preemption first: that of aws, gcp or azure (their metadata services),
    or the path of a file that is created when the machine is reclaimed."""
    poll_every_s: PositiveFloat = 5.0
    """How often to look for a notice."""
    grace_s: NonNegativeFloat = 120.0
    """Grace period in seconds, if the notice gives none."""
    wait: bool = False
    """Return when the node is idle and has left the cluster, or its grace period is over."""
    address: str = "auto"
    """Ray cluster; by default the one that this machine is part of."""
    node_id: str | None = None
    """Node to drain, as `ray list nodes` names it; by default this machine."""
    allow_open_cluster: bool = False
    """Use a Ray cluster even if it requires no token, so that anyone who reaches its ports can run
    code there."""

    def __post_init__(self) -> None:
        check_fields(self)
        known = self.on_notice in (None, *notices.CLOUDS) or "/" in str(self.on_notice)
        if not known:
            raise ConfigError(
                f"on_notice: wanted {one_of(notices.CLOUDS)}, or a path with a slash, such as "
                f"/run/preempted, got {self.on_notice}"
            )


def run(config: DrainConfig) -> None:
    """Drain the node, after the notice if one is waited for.

    Raises: ResourceError if no cluster answers, it has no such node, the node is its head, or Ray
        refuses.
    """
    if config.on_notice is None:
        _drain(config, Notice(reason="raybert drain"))
        return
    notice = _notice(config.on_notice, config.poll_every_s)
    ends = time.monotonic() + (config.grace_s if notice.seconds is None else notice.seconds)
    say(f"notice of preemption ({notice.reason}): draining this node")
    while True:
        try:
            _drain(config, notice)
            return
        except ResourceError as error:
            if time.monotonic() > ends:
                raise
            say(f"{error}; trying again")
        time.sleep(RETRY_EVERY_S)


def _notice(name: str, poll_every_s: float) -> Notice:
    """Wait for a preemption notice, and return it."""
    look: Callable[[], Notice | None] = notices.source(name)
    say(f"waiting for a notice of preemption ({name})")
    failures = 0
    while True:
        try:
            notice, failures = look(), 0
        except (OSError, ValueError, KeyError) as error:
            notice, failures = None, failures + 1
            if failures == SILENT_AFTER:
                say(f"warning: {name} does not answer, so no notice can arrive: {error}")
        if notice is not None:
            return notice
        time.sleep(poll_every_s)


def _drain(config: DrainConfig, notice: Notice) -> None:
    seconds = config.grace_s if notice.seconds is None else notice.seconds
    cluster.connect(address=config.address, allow_open_cluster=config.allow_open_cluster)
    try:
        node = _node(config.node_id)
        left = drain(node["NodeID"], notice.reason, seconds)
    finally:
        cluster.disconnect()  # a process that is connected through a node ends with it
    name = f"{node['NodeID']} ({node['NodeManagerHostname']}, {node['NodeManagerAddress']})"
    say(f"node {name} gets no new work and is expected to be gone in {seconds:.0f} s")
    if config.wait:
        ends = time.monotonic() + seconds
        while not left() and time.monotonic() < ends:
            time.sleep(GONE_POLL_S)
        say("it has left the cluster" if left() else "its grace period is over, it still runs")


def _node(node_id: str | None) -> dict[str, Any]:
    """Return Ray's description of the node. Raises: ResourceError if it is not in the cluster, or
    is the head."""
    import ray

    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    node = alive.get(node_id or ray.get_runtime_context().get_node_id())
    if node is None:
        raise ResourceError(
            f"node_id: wanted a node of the cluster, got {node_id}, it has {one_of(alive)}"
        )
    if "node:__internal_head__" in node["Resources"]:
        raise ResourceError(
            f"wanted a node besides the head, got the head, {node['NodeManagerAddress']}: the "
            "cluster ends with it; jobs go on with another by `raybert submit --retries`"
        )
    return node
