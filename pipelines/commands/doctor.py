"""`raybert doctor`: what is wrong with this machine, a cluster, a storage or MLflow, and what mends
it."""

import json
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from bert_core import files
from bert_core.errors import RaybertError, ResourceError
from pipelines.runtime import cluster, nodes, ray_token, storage_checks
from pipelines.runtime.hosts import Hosts
from pipelines.runtime.node_checks import (
    BY_SSH,
    NODE_CHECKS,
    REACH_BY_SSH,
    NodeCheck,
    check_answered,
    check_shared,
)
from pipelines.runtime.nodes import Node, token_path
from pipelines.runtime.progress import counted, say
from tracking import server
from tracking.ports import require_free

PORTS = {5000: "raybert ui", 8000: "raybert serve"}
JOB_TIMEOUT_S, JOB_POLL_S = 180.0, 0.5


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """What to check, besides this machine."""

    address: str | None = None
    """Ray cluster to check: host:6379, ray://host:10001, auto, or its job server,
    http://host:8265; by default the one in RAY_ADDRESS, or none."""
    allow_open_cluster: bool = False
    """Use a Ray cluster even if it requires no token, so that anyone who reaches its ports can run
    code there."""
    hosts: str | None = None
    """File for `ray up` on machines of your own, such as deploy/onprem.yaml: check each of them by
    ssh, whether Ray runs there or not."""
    storage: str | None = None
    """Folder or URI, such as a stage's output, to write to, read, list and delete."""
    tracking_uri: str | None = None
    """MLflow store; by default the one in MLFLOW_TRACKING_URI, or else runs/mlflow.db."""
    json: bool = False
    """Print the findings as JSON."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line: a check, and what it found."""

    check: str
    where: str
    """The node of a cluster; empty for this machine."""
    ok: bool
    text: str
    """What there is; or what is wrong, and what mends it."""


def run(config: DoctorConfig) -> None:
    """Print a line per check as it ends.

    Raises: ResourceError if anything is wrong.
    """
    findings = []
    for finding in examine(config):
        findings.append(finding)
        if not config.json:
            where = f"{finding.where}: " if finding.where else ""
            say(f"{'ok' if finding.ok else 'WRONG':<7}{finding.check:<15}{where}{finding.text}")
    if config.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    if wrong := sum(not finding.ok for finding in findings):
        raise ResourceError(f"{wrong} of {len(findings)} checks found something wrong")


def examine(config: DoctorConfig) -> Iterator[Finding]:
    """Do every check, and go on where one fails."""
    here, found, by_ssh = nodes.facts(), list[Node](), list[Node]()
    if config.hosts is not None:
        yield from _told("hosts", "", partial(_asked_by_ssh, config.hosts, by_ssh))
    for node in by_ssh:
        yield from _node(node, here, BY_SSH, partial(check_answered, node, REACH_BY_SSH))
    with ExitStack() as stack:
        marker = None
        if config.storage is not None:
            with suppress(RaybertError):  # the check of the storage will tell
                marker = stack.enter_context(storage_checks.marker(config.storage))
        if (address := cluster.address_to_join(config.address)) is not None:
            yield from _told("cluster", "", partial(_joined, config, address, marker, found))
    for node in found or [here]:
        yield from _node(node, here, NODE_CHECKS, partial(check_answered, node))
        if not node.problem and found and config.storage is not None and marker is not None:
            yield from _told("shared", node.name, partial(check_shared, node, config.storage))
    for name, several in CHECKS.items():
        yield from _told(name, "", partial(several, config))


def _node(
    node: Node, here: Node, checks: Mapping[str, NodeCheck], answered: Callable[[], None]
) -> Iterator[Finding]:
    """The findings about one machine; that it has not answered is the only one then."""
    yield from _told("node", node.name, answered)
    if not node.problem:
        for name, check in checks.items():
            yield from _told(name, node.name, partial(check, node, here))


def _asked_by_ssh(path: str, found: list[Node]) -> str:
    """Ask the hosts of a launcher's file, which go to `found`."""
    found += Hosts.read(path).ask()
    answered = sum(not node.problem for node in found)
    return f"{answered} of {counted(len(found), 'host')} in {path} answer"


def _told(
    check: str, where: str, work: Callable[[], str | Iterator[str] | None]
) -> Iterator[Finding]:
    """The findings of one check: a line or several, until one is wrong."""
    try:
        told = work()
        for text in [told] if isinstance(told, str) else told or ():
            yield Finding(check=check, where=where, ok=True, text=text)
    except RaybertError as error:
        yield Finding(check=check, where=where, ok=False, text=str(error))


def _joined(config: DoctorConfig, address: str, marker: str | None, found: list[Node]) -> str:
    """Reach the cluster and ask its nodes, which go to `found`."""
    marker = None if marker is None else files.absolute(marker)
    uri = urlsplit(server.tracking_uri(config.tracking_uri))
    servers = [(uri.hostname, uri.port)] if uri.hostname and uri.port else []
    if address.startswith(("http://", "https://")):
        found += _asked_by_job(config, address, marker, servers)
    else:
        cluster.connect(address=address, allow_open_cluster=config.allow_open_cluster)
        found += nodes.nodes_of_cluster(marker, servers)
    cpus, gpus = sum(node.cpus for node in found), sum(node.ray_gpus or 0 for node in found)
    return f"{counted(len(found), 'node')} at {address}: {cpus:g} CPUs, {gpus:g} GPUs"


def _asked_by_job(
    config: DoctorConfig, address: str, marker: str | None, servers: list[tuple[str, int]]
) -> list[Node]:
    """The nodes of a cluster of which only the job server is reached."""
    client = cluster.job_client(address, allow_open_cluster=config.allow_open_cluster)
    with tempfile.TemporaryDirectory(prefix="raybert-doctor-") as folder:
        shutil.copy(nodes.__file__, Path(folder, "nodes.py"))
        asked = [marker or "", *(f"{host}:{port}" for host, port in servers)]
        try:
            job = client.submit_job(
                entrypoint=shlex.join(["python", "nodes.py", *asked]),
                runtime_env={"working_dir": folder},
            )
        except RuntimeError as error:
            raise ResourceError(f"the cluster did not accept a job: {error}") from error
    deadline = time.monotonic() + JOB_TIMEOUT_S
    while not client.get_job_status(job).is_terminal() and time.monotonic() < deadline:
        time.sleep(JOB_POLL_S)
    output = client.get_job_logs(job)
    if found := nodes.read_nodes(output):
        return found
    ended = " ".join((output or client.get_job_info(job).message or "").split()[-40:])
    raise ResourceError(
        f"wanted job {job} to report its nodes within {JOB_TIMEOUT_S:g} s, it is "
        f"{client.get_job_status(job).lower()} ({ended}): see `ray job logs {job}`"
    )


def _token(config: DoctorConfig) -> Iterator[str]:
    """Whether Ray finds a token, and others do not."""
    path = token_path()
    if ray_token.token() is None:
        yield "none: a cluster started here makes its own"
    elif path is None:
        yield "in RAY_AUTH_TOKEN"
    elif path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ResourceError(
            f"{path}: wanted a file that only its owner reads, others may too: "
            f"run `chmod 600 {path}`"
        )
    else:
        yield f"in {path}"


def _ports(config: DoctorConfig) -> Iterator[str]:
    """Who has the ports that raybert listens on by default; one in use is no fault."""
    for port, command in PORTS.items():
        try:
            require_free("127.0.0.1", port)
        except ResourceError as error:
            yield f"`{command}`: {error}"
        else:
            yield f"`{command}`: port {port} is free"


def _storage(config: DoctorConfig) -> Iterator[str]:
    if config.storage is not None:
        yield from storage_checks.check_storage(config.storage)


def _mlflow(config: DoctorConfig) -> Iterator[str]:
    uri = server.tracking_uri(config.tracking_uri)
    if uri.startswith(server.SQLITE) and not Path(uri.removeprefix(server.SQLITE)).exists():
        yield f"{uri} does not exist yet: the first run makes it"
    else:
        from tracking.probe import write_and_delete_run

        yield write_and_delete_run(uri)


CHECKS: dict[str, Callable[[DoctorConfig], Iterator[str]]] = {
    "token": _token,
    "ports": _ports,
    "storage": _storage,
    "mlflow": _mlflow,
}
