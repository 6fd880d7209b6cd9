"""Checks a machine before work is given to it.

A check takes the facts about that machine and about this one, and returns its finding. If something
is wrong, it raises ResourceError with the command that fixes it.
"""

from collections.abc import Callable

from bert_core.errors import ResourceError
from pipelines.runtime.nodes import Node

NodeCheck = Callable[[Node, Node], str]

DISK_SHARE = 0.05
"""Ray stops writing to a disk with less than this share free."""
OBJECT_STORE_SHARE = 0.3
"""Share of the memory that Ray's object store takes by default, …"""
OBJECT_STORE_BYTES = 10_000_000_000
"""… of which shared memory must hold this much, or else the store is on disk."""
CLOCK_S = 5.0
"""How far clocks may be apart. Stores refuse requests from clocks that are minutes off; a few
seconds already make the logs of two hosts hard to compare."""


def check_versions(node: Node, here: Node) -> str:
    """Check that Python, Ray, torch, MLflow and raybert have the same versions wherever they are
    installed."""
    ours = {name: _release(text) for name, text in here.versions.items()}
    # A client has neither torch nor all of MLflow.
    theirs = {name: _release(text) for name, text in node.versions.items() if ours[name]}
    if theirs.get("raybert") is None:  # a job brings its own raybert
        theirs.pop("raybert", None)
    differ = [name for name in theirs if theirs[name] != ours[name]]
    if differ:
        got = ", ".join(f"{name} {theirs[name] or 'missing'}, not {ours[name]}" for name in differ)
        pip = " ".join(f"{name}=={ours[name]}" for name in differ if name != "python")
        mend = [f"use Python {ours['python']}"] if "python" in differ else []
        mend += [f"run `pip install {pip}`"] if pip else []
        raise ResourceError(
            f"wanted the versions of this machine, got {got}: {' and '.join(mend)} there, or use "
            "the cluster's versions here"
        )
    return ", ".join(f"{name} {text}" for name, text in node.versions.items() if text)


def _release(text: str | None) -> str | None:
    """Return a version without its build: torch 2.13.0+cpu computes the same as 2.13.0+cu130."""
    return None if text is None else text.partition("+")[0]


def check_gpus(node: Node, here: Node) -> str:
    """Compare the GPUs that the driver lists, torch can use and Ray schedules."""
    if node.torch_gpus < node.gpus:
        raise ResourceError(
            f"wanted torch to use {node.gpus} NVIDIA GPUs, it can use {node.torch_gpus}: install "
            "torch's build for CUDA there, see https://pytorch.org/get-started/locally, and check "
            "`nvidia-smi` and CUDA_VISIBLE_DEVICES"
        )
    if node.ray_gpus is not None and node.ray_gpus < node.torch_gpus:
        raise ResourceError(
            f"wanted Ray to give out {node.torch_gpus} GPUs, it gives out {node.ray_gpus:g}: "
            f"restart the node with `ray start --num-gpus {node.torch_gpus}`"
        )
    return f"{node.gpus} for torch" if node.gpus else "none, CPUs are used"


def check_shared_memory(node: Node, here: Node) -> str:
    """Check the room for Ray's object store, which otherwise goes to disk and is many times
    slower."""
    store = node.object_store_bytes
    if store is None:  # Ray is not started: what it would want
        store = min(int(node.memory_bytes * OBJECT_STORE_SHARE), OBJECT_STORE_BYTES)
    if node.shared_memory_bytes < store:
        raise ResourceError(
            f"wanted {_gb(store)} in /dev/shm for Ray's object store, got "
            f"{_gb(node.shared_memory_bytes)}: start the container with "
            f"--shm-size={store * 1.1 / 2**30:.1f}g (Kubernetes: an emptyDir with medium Memory), "
            "or `mount -o remount,size=… /dev/shm`"
        )
    return f"{_gb(node.shared_memory_bytes)} for an object store of {_gb(store)}"


def check_disk(node: Node, here: Node) -> str:
    """Check the room for temporary files, which include Ray's own."""
    if node.disk_free_bytes < DISK_SHARE * node.disk_bytes:
        raise ResourceError(
            f"wanted {DISK_SHARE:.0%} of the disk with {node.temporary} free, below which Ray "
            f"stops writing, got {_gb(node.disk_free_bytes)} of {_gb(node.disk_bytes)}: free some "
            "space, or set TMPDIR and `ray start --temp-dir` to another disk"
        )
    return f"{_gb(node.disk_free_bytes)} of {_gb(node.disk_bytes)} free in {node.temporary}"


def check_connections(node: Node, here: Node) -> str:
    """Check the connections to other nodes and to MLflow."""
    if node.unreachable:
        raise ResourceError(
            "wanted to reach the other nodes and MLflow, cannot connect to "
            f"{', '.join(node.unreachable)}: start what should listen there, or open these ports "
            "for the node (firewall, security group, network policy)"
        )
    return "all reached"


def check_key_files(node: Node, here: Node) -> str:
    """Check that only their owner can read Ray's token and ssh keys."""
    if node.exposed:
        files = " ".join(node.exposed)
        raise ResourceError(
            f"wanted key files that only their owner reads, others may read {files}: run "
            f"`chmod 600 {files}` there"
        )
    return "only their owner reads them"


def check_clock(node: Node, here: Node) -> str:
    """Compare the node's clock with this machine's."""
    ahead_s = node.ahead_s or 0.0
    if abs(ahead_s) > CLOCK_S:
        raise ResourceError(
            f"wanted a clock within {CLOCK_S:g} s of the one here, its clock is "
            f"{abs(ahead_s):,.0f} s {'ahead' if ahead_s > 0 else 'behind'}: set it by NTP with "
            "`timedatectl set-ntp true`, or correct the clock here"
        )
    return "as here" if node.ahead_s is not None else "other clocks are compared with this one"


def check_ports(node: Node, here: Node) -> str:
    """Check that the ports that Ray will listen on are free."""
    if node.taken:
        raise ResourceError(
            f"wanted ports for Ray, in use: {', '.join(node.taken)}: stop that process, or change "
            "the ports of `ray start`"
        )
    return "free, or Ray's"


NODE_CHECKS: dict[str, NodeCheck] = {
    "versions": check_versions,
    "gpus": check_gpus,
    "shared memory": check_shared_memory,
    "disk": check_disk,
    "connections": check_connections,
    "key files": check_key_files,
    "clock": check_clock,
}
BY_SSH: dict[str, NodeCheck] = {
    **{name: check for name, check in NODE_CHECKS.items() if name != "connections"},
    "ports": check_ports,
}
"""Checks of a host on which Ray may not run yet."""
REACH_BY_SSH = (
    "start the host and its sshd, let it admit ssh_user with ssh_private_key, or correct its "
    "address in the file"
)


def check_answered(
    node: Node,
    way_out: str = "see `raybert doctor --address …`, install the same raybert there as here, or "
    "restart the node",
) -> None:
    """Raise ResourceError if the node could not be asked."""
    if node.problem:
        raise ResourceError(f"wanted an answer from {node.name}, got {node.problem}: {way_out}")


def check_shared(node: Node, place: str) -> str:
    """Check that the node sees what was written to `place` from here."""
    if node.sees is False:
        raise ResourceError(
            f"{place}: wanted a place that all nodes share, {node.name}: {node.unseen}: give a "
            "folder that is mounted on all nodes, or a URI that they have credentials for"
        )
    return f"{place} is seen" if node.sees else "not tried: raybert is not installed there"


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.1f} GB"
