"""Collects the facts about a machine: this one, or every node of a cluster.

A cluster's nodes may lack raybert, so this file also runs by itself, as a job or by ssh. It needs
only the standard library, and Ray if a cluster is asked; anything else may be missing.
"""

import json
import os
import platform
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("ray", "torch", "mlflow", "raybert")
SHARED_MEMORY = "/dev/shm"
NVIDIA = Path("/proc/driver/nvidia/gpus")
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
NEIGHBOURS = 4
"""How many other nodes a node tries to reach."""
KNOCK_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 60.0
FACTS = "raybert-nodes: "
"""Begins the line with the nodes in the output of a job."""
ALONE = "--alone"
"""Has this file, run by itself, print the facts about its machine, not about a cluster's nodes."""
KEY_FILES = (".ssh/id_*", "ray_bootstrap_key.pem")
"""Below the home folder, besides the one with Ray's token."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """The facts about a machine; what only Ray knows is empty if it is not part of a cluster."""

    host: str = ""
    versions: dict[str, str | None]
    """Versions of Python and the packages; None for a package that is not installed."""
    gpus: int = 0
    """NVIDIA GPUs, as the driver lists them."""
    torch_gpus: int = 0
    """GPUs that torch can use."""
    memory_bytes: int = 0
    shared_memory_bytes: int = 0
    temporary: str = ""
    disk_bytes: int = 0
    """Size of the disk with temporary files."""
    disk_free_bytes: int = 0
    sees: bool | None = None
    """Whether it sees the file that it was asked about; None if it was not, or cannot know."""
    unseen: str = ""
    """Why it does not."""
    unreachable: Sequence[str] = ()
    """Ports of other nodes that it cannot connect to."""
    exposed: Sequence[str] = ()
    """Files with keys that others on the machine can read."""
    taken: Sequence[str] = ()
    """The queried ports on which a process other than Ray's listens, with that process."""
    clock_s: float = 0.0
    """Seconds since 1970, when it answered."""
    ahead_s: float | None = None
    """Seconds, at least, that its clock is ahead of the clock of the machine that asked; None if
    none did."""

    address: str = ""
    cpus: float = 0
    ray_gpus: float | None = None
    """GPUs that Ray gives out."""
    object_store_bytes: int | None = None
    problem: str = ""
    """Why the node did not answer; all else is then unknown."""

    @property
    def name(self) -> str:
        return f"{self.host} ({self.address})" if self.host and self.address else self.address


def facts(
    marker: str | None = None,
    neighbours: Sequence[tuple[str, int]] = (),
    ports: Sequence[int] = (),
) -> Node:
    """Collect the facts about this machine.

    Args:
        marker: path or URI of a file that it should see.
        neighbours: host and port of servers that it should reach.
        ports: ports that Ray will listen on.
    """
    gpus = len(list(NVIDIA.glob("*")))
    temporary = tempfile.gettempdir()
    disk = shutil.disk_usage(temporary)
    sees, unseen = (None, "") if marker is None else _look(marker)
    return Node(
        host=socket.gethostname(),
        versions={"python": platform.python_version(), **{n: _version(n) for n in PACKAGES}},
        gpus=gpus,
        torch_gpus=_torch_gpus() if gpus else 0,
        memory_bytes=_memory_bytes(),
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).total,
        temporary=temporary,
        disk_bytes=disk.total,
        disk_free_bytes=disk.free,
        sees=sees,
        unseen=unseen,
        unreachable=[f"{host}:{port}" for host, port in neighbours if not _listens(host, port)],
        exposed=_exposed(),
        taken=[f"{port} ({holder})" for port in ports if (holder := _holder(port))],
        clock_s=time.time(),
    )


def compared(node: Node, asked_s: float, answered_s: float) -> Node:
    """Return the node with its clock compared with the clock of this machine, which asked it.

    Args:
        asked_s, answered_s: the time here before the question and after the answer.
    """
    return replace(node, ahead_s=node.clock_s - min(max(node.clock_s, asked_s), answered_s))


def token_path() -> Path | None:
    """Return the file that Ray reads the token from, by its own rules; None if a variable holds it.

    NOTE: it is here, not in `ray_token`, since this file also runs by itself.
    """
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(named) if named else Path.home() / ".ray" / "auth_token"


def _exposed() -> list[str]:
    key_files = [path for pattern in KEY_FILES for path in Path.home().glob(pattern)]
    if (token := token_path()) is not None and token.exists():
        key_files.append(token)
    others = stat.S_IRWXG | stat.S_IRWXO
    return [
        str(path) for path in key_files if path.suffix != ".pub" and path.stat().st_mode & others
    ]


def _holder(port: int) -> str | None:
    """Return the process that listens on a port and is not Ray's; None if there is none.

    NOTE: `tracking.store.ports` finds it too, but cannot be imported if this file runs by itself.
    """
    try:
        socket.create_server(("", port)).close()
    except OSError:
        pass
    else:
        return None
    try:
        import psutil
    except ImportError:
        return "another process"
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            with suppress(psutil.Error):
                process = psutil.Process(connection.pid)
                words = " ".join(process.cmdline())
                return None if "/ray/" in words else f"process {process.pid}, {process.name()}"
    return "another process"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch_gpus() -> int:
    with suppress(ImportError):
        import torch

        return torch.cuda.device_count()
    return 0


def _memory_bytes() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no container, or one without a limit: "max"
        return min(physical, int(MEMORY_LIMIT.read_text()))
    return physical


def _look(marker: str) -> tuple[bool | None, str]:
    try:
        if "://" in marker:
            from bert_core import files

            sees = files.exists(marker)
        else:
            sees = os.path.exists(marker)
    except ModuleNotFoundError:
        return None, ""  # missing in a job that has only this file
    except Exception as error:  # whatever a library for storage raises
        return False, str(error)
    return sees, "" if sees else "it does not see what was written there"


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=KNOCK_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def nodes_of_cluster(
    marker: str | None = None, servers: Sequence[tuple[str, int]] = ()
) -> list[Node]:
    """Ask every node of the cluster that this process is connected to, all at the same time.

    Args:
        marker: path or URI of a file that they should see.
        servers: host and port of servers that they should reach, besides each other.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = [node for node in ray.nodes() if node["Alive"]]
    ask: Any = ray.remote(num_cpus=0, max_retries=0)(facts)
    asked_s, answers = time.time(), []
    for place, node in enumerate(alive):
        others = (alive[place + 1 :] + alive[:place])[:NEIGHBOURS]
        ports = [
            *servers,
            *(
                (other["NodeManagerAddress"], other[port])
                for other in others
                for port in ("NodeManagerPort", "ObjectManagerPort")
            ),
        ]
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        answers.append(ask.options(scheduling_strategy=here).remote(marker, ports))
    answered_s: dict[Any, float] = {}
    waiting, ends = answers, time.monotonic() + ANSWER_TIMEOUT_S
    while waiting and (left_s := ends - time.monotonic()) > 0:
        ready, waiting = ray.wait(waiting, timeout=left_s)
        answered_s |= dict.fromkeys(ready, time.time())
    return [
        _node(node, answer, asked_s, answered_s.get(answer, time.time()))
        for node, answer in zip(alive, answers, strict=True)
    ]


def _node(known: dict[str, Any], answer: Any, asked_s: float, answered_s: float) -> Node:
    import ray

    resources = known["Resources"]
    try:
        node = ray.get(answer, timeout=1.0)  # it has been waited for already
        node = compared(node, asked_s, answered_s)
    except ray.exceptions.GetTimeoutError:
        node = Node(versions={}, problem=f"it did not answer within {ANSWER_TIMEOUT_S:g} s")
    except Exception as error:  # raybert may be missing there, or have another version
        cause = getattr(error, "cause", None) or error
        lines = str(cause).strip().splitlines() or [""]  # the last line of a traceback
        node = Node(versions={}, problem=f"{type(cause).__name__}: {lines[-1]}")
    return replace(
        node,
        host=node.host or known["NodeManagerHostname"],
        address=known["NodeManagerAddress"],
        cpus=resources.get("CPU", 0),
        ray_gpus=resources.get("GPU", 0),
        object_store_bytes=int(resources.get("object_store_memory", 0)),
    )


def read_nodes(output: str) -> list[Node]:
    """Return the nodes printed by a job that ran this file; empty if it did not get that far."""
    for line in output.splitlines():
        if line.startswith(FACTS):
            return [Node(**node) for node in json.loads(line.removeprefix(FACTS))]
    return []


def _main(marker: str | None, *servers: str) -> None:
    """Run as a job: `python nodes.py MARKER HOST:PORT …`; an empty MARKER means none."""
    import ray

    ray.init(log_to_driver=False)
    addresses = [(host, int(port)) for host, _, port in (each.rpartition(":") for each in servers)]
    answered = nodes_of_cluster(marker or None, addresses)
    print(FACTS + json.dumps([asdict(node) for node in answered]))


if __name__ == "__main__":
    if sys.argv[1] == ALONE:
        print(FACTS + json.dumps([asdict(facts(ports=[int(port) for port in sys.argv[2:]]))]))
    else:
        _main(*sys.argv[1:])
