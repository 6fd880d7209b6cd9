"""`raybert doctor`: what is wrong with this machine, a cluster, a storage or MLflow, and what mends
it."""

import json
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from bert_core import files
from bert_core.errors import RaybertError, ResourceError
from pipelines.runtime import cluster, nodes, ray_token, storage_checks
from pipelines.runtime.doctor_checks import (
    BY_SSH,
    NODE_CHECKS,
    REACH_BY_SSH,
    NodeCheck,
    check_answered,
    check_shared,
)
from pipelines.runtime.hosts import Hosts
from pipelines.runtime.nodes import Node, token_path
from pipelines.runtime.progress import counted, say
from tracking.store import server
from tracking.store.ports import require_free

PORTS = {5000: "raybert ui", 8000: "raybert serve"}
JOB_TIMEOUT_S, JOB_POLL_S = 180.0, 0.5


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Checks to run besides those of this machine."""

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
    """The findings; or the fault and its remedy."""


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
    """Run every check, and continue after one fails."""
    here, of_cluster, by_ssh = nodes.facts(), list[Node](), list[Node]()
    if config.hosts is not None:
        yield from _findings_of("hosts", "", partial(_ask_by_ssh, config.hosts, by_ssh))
    for node in by_ssh:
        yield from _node(node, here, BY_SSH, partial(check_answered, node, REACH_BY_SSH))
    with ExitStack() as stack:
        marker = None
        if config.storage is not None:
            with suppress(RaybertError):  # the storage check reports it
                marker = stack.enter_context(storage_checks.marker(config.storage))
        if (address := cluster.address_to_join(config.address)) is not None:
            yield from _findings_of(
                "cluster", "", partial(_join, config, address, marker, of_cluster)
            )
    for node in of_cluster or [here]:
        yield from _node(node, here, NODE_CHECKS, partial(check_answered, node))
        if not node.problem and of_cluster and config.storage is not None and marker is not None:
            yield from _findings_of(
                "shared", node.name, partial(check_shared, node, config.storage)
            )
    told = [path for node in of_cluster or [here] for path in node.exposed]
    yield from _findings_of("token", "", partial(_token, told))
    yield from _findings_of("ports", "", _ports)
    yield from _findings_of("storage", "", partial(_storage, config.storage))
    yield from _findings_of("mlflow", "", partial(_mlflow, config.tracking_uri))


def _node(
    node: Node, here: Node, checks: Mapping[str, NodeCheck], answered: Callable[[], None]
) -> Iterator[Finding]:
    """Yield the findings about one machine; if it has not answered, that is the only one."""
    yield from _findings_of("node", node.name, answered)
    if not node.problem:
        for name, check in checks.items():
            yield from _findings_of(name, node.name, partial(check, node, here))


def _ask_by_ssh(path: str, hosts: list[Node]) -> str:
    """Ask the hosts in a launcher's file, and add them to `hosts` in place."""
    hosts += Hosts.read(path).ask()
    answered = sum(not node.problem for node in hosts)
    return f"{answered} of {counted(len(hosts), 'host')} in {path} answer"


def _findings_of(
    check: str, where: str, work: Callable[[], str | Iterator[str] | None]
) -> Iterator[Finding]:
    """Yield the findings of one check: one or more, up to the first problem."""
    try:
        texts = work()
        for text in [texts] if isinstance(texts, str) else texts or ():
            yield Finding(check=check, where=where, ok=True, text=text)
    except RaybertError as error:
        yield Finding(check=check, where=where, ok=False, text=str(error))


def _join(config: DoctorConfig, address: str, marker: str | None, of_cluster: list[Node]) -> str:
    """Reach the cluster, ask its nodes, and add them to `of_cluster` in place."""
    marker = None if marker is None else files.absolute(marker)
    uri = urlsplit(server.tracking_uri(config.tracking_uri))
    servers = [(uri.hostname, uri.port)] if uri.hostname and uri.port else []
    if address.startswith(("http://", "https://")):
        of_cluster += _ask_by_job(
            address, marker, servers, allow_open_cluster=config.allow_open_cluster
        )
    else:
        cluster.connect(address=address, allow_open_cluster=config.allow_open_cluster)
        of_cluster += nodes.nodes_of_cluster(marker, servers)
    cpus = sum(node.cpus for node in of_cluster)
    gpus = sum(node.ray_gpus or 0 for node in of_cluster)
    return f"{counted(len(of_cluster), 'node')} at {address}: {cpus:g} CPUs, {gpus:g} GPUs"


def _ask_by_job(
    address: str,
    marker: str | None,
    servers: list[tuple[str, int]],
    *,
    allow_open_cluster: bool,
) -> list[Node]:
    """Return the nodes of a cluster of which only the job server can be reached."""
    client = cluster.job_client(address, allow_open_cluster=allow_open_cluster)
    with tempfile.TemporaryDirectory(prefix="raybert-doctor-") as folder:
        shutil.copy(nodes.__file__, Path(folder, "nodes.py"))
        arguments = [marker or "", *(f"{host}:{port}" for host, port in servers)]
        try:
            job = client.submit_job(
                entrypoint=shlex.join(["python", "nodes.py", *arguments]),
                runtime_env={"working_dir": folder},
            )
        except RuntimeError as error:
            raise ResourceError(f"the cluster did not accept a job: {error}") from error
    deadline = time.monotonic() + JOB_TIMEOUT_S
    while not client.get_job_status(job).is_terminal() and time.monotonic() < deadline:
        time.sleep(JOB_POLL_S)
    output = client.get_job_logs(job)
    if of_cluster := nodes.read_nodes(output):
        return of_cluster
    ended = " ".join((output or client.get_job_info(job).message or "").split()[-40:])
    raise ResourceError(
        f"wanted job {job} to report its nodes within {JOB_TIMEOUT_S:g} s, it is "
        f"{client.get_job_status(job).lower()} ({ended}): see `ray job logs {job}`"
    )


def _token(told: Collection[str]) -> Iterator[str]:
    """Check that Ray finds a token, and that only its owner can read the token's file.

    Args:
        told: paths of key files already reported as readable by others.
    """
    path = token_path()
    if ray_token.token() is None:
        yield "none: a cluster started here gets its own"
    elif path is None:
        yield "in RAY_AUTH_TOKEN"
    elif str(path) not in told and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ResourceError(
            f"{path}: wanted a file that only its owner reads, others may too: "
            f"run `chmod 600 {path}`"
        )
    else:
        yield f"in {path}"


def _ports() -> Iterator[str]:
    """Say which process uses each of raybert's default ports; a port in use is not an error."""
    for port, command in PORTS.items():
        try:
            require_free("127.0.0.1", port)
        except ResourceError as error:
            yield f"`{command}`: {error}"
        else:
            yield f"`{command}`: port {port} is free"


def _storage(place: str | None) -> Iterator[str]:
    if place is not None:
        yield from storage_checks.check_storage(place)


def _mlflow(tracking_uri: str | None) -> Iterator[str]:
    uri = server.tracking_uri(tracking_uri)
    if uri.startswith(server.SQLITE) and not Path(uri.removeprefix(server.SQLITE)).exists():
        yield f"{uri} does not exist yet: the first run creates it"
    else:
        from tracking.store.probe import write_and_delete_run

        yield write_and_delete_run(uri)
