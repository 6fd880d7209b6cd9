"""`raybert submit prepare --config …`: run a stage as a job on a Ray cluster.

What `ray job submit` does, with two differences: files that a job does not need are not sent, and
the exit code is the job's (Ray's is 1 whatever the job's was).
"""

import asyncio
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from bert_core.errors import ConfigError, ResourceError
from pipelines.configure import ALL, config_class
from pipelines.runtime import cluster
from pipelines.runtime.progress import say

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

# NOTE: gitignore's rules: without the slash, `data` would exclude bert_core/data too.
NOT_SENT = ["/.git", "/.venv", "/data", "/mlruns", "/runs", "/shared", "__pycache__", ".*_cache"]
OPEN = "--allow_open_cluster"
POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class SubmitConfig:
    """Run a stage as a job on a Ray cluster; the stage and its own options come last."""

    address: str | None = None
    """Job server of the cluster, e.g. http://head:8265; by default RAY_API_SERVER_ADDRESS or
    RAY_ADDRESS, else this machine's."""
    allow_open_cluster: bool = False
    """Send the job even to a cluster that requires no token, where anyone who reaches its ports can
    run code, and let it join that cluster."""
    working_dir: str = "."
    """Folder with the code and configs, which the job runs in a copy of. What it writes there is
    lost, so give the stage's output as a URI or an absolute path on the cluster."""


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Submit's options, and the stage's command line, from the first argument that is no option."""
    end = 0
    while end < len(arguments) and arguments[end].startswith("-") and arguments[end] != "--":
        word, following = arguments[end], [*arguments[end + 1 :], ""][0]
        is_switch = word == OPEN and following not in ("true", "false")
        end += 1 if is_switch or "=" in word or word in ("-h", "--help") else 2
    options, command = list(arguments[:end]), list(arguments[end:])
    return options, command[1:] if command[:1] == ["--"] else command


def run(config: SubmitConfig, command: Sequence[str]) -> int:
    """Submit, show the job's output until it ends, and return its exit code.

    If interrupted, it leaves the job running and says how to stop it.

    Raises: ConfigError if there is no command, or the folder cannot be sent; ResourceError if no
        cluster answers.
    """
    if not command:
        raise ConfigError(
            "wanted a stage to run on the cluster, got none: raybert submit prepare --config …"
        )
    if "://" not in config.working_dir and not Path(config.working_dir).is_dir():
        raise ConfigError(f"working_dir: wanted a folder, got {config.working_dir}")
    client = cluster.job_client(config.address, allow_open_cluster=config.allow_open_cluster)
    if config.allow_open_cluster and _takes_open(command[0]):
        command = [*command, f"{OPEN}=true"]  # the job joins the same cluster
    job = _submit(client, config, command)
    say(f"job {job} at {client.get_address()}: {shlex.join(command)}")
    try:
        details = _follow(client, job)
    except KeyboardInterrupt:
        say(f"\njob {job} keeps running: stop it with `ray job stop {job}`")
        raise
    code = _exit_code(details)
    say(f"job {job} {details.status.lower()}, exit code {code}")
    if code and details.driver_exit_code is None:
        say(details.message or "")  # it never started, so there is no output that says why
    return code


def _takes_open(word: str) -> bool:
    if word not in ALL:  # the job will report it
        return False
    return any(f"--{field.name}" == OPEN for field in fields(config_class(word)))


def _submit(client: "JobSubmissionClient", config: SubmitConfig, command: Sequence[str]) -> str:
    environment = {
        "working_dir": config.working_dir,
        "excludes": NOT_SENT,
        "env_vars": {"PYTHONUNBUFFERED": "1"},
    }
    # `python` is the cluster's: its image, or the environment that `ray start` was run in.
    entrypoint = shlex.join(["python", "-m", "pipelines.cli", *command])
    try:
        return client.submit_job(entrypoint=entrypoint, runtime_env=environment)
    except ValueError as error:  # too large, by Ray's own limit of 512 MiB
        raise ConfigError(f"working_dir {config.working_dir} cannot be sent: {error}") from error
    except RuntimeError as error:
        raise ResourceError(f"the cluster did not accept the job: {error}") from error


def _follow(client: "JobSubmissionClient", job: str) -> "JobDetails":
    """Print the output as it comes, and wait for the job to end, even if the connection drops."""

    async def show() -> None:
        async for lines in client.tail_job_logs(job):
            print(lines, end="", flush=True)

    try:
        asyncio.run(show())
    except RuntimeError as error:
        say(f"lost the output of job {job} ({error}): waiting for the job to end")
    while not (details := client.get_job_info(job)).status.is_terminal():
        time.sleep(POLL_S)
    return details


def _exit_code(details: "JobDetails") -> int:
    code = details.driver_exit_code
    if code is None:
        return 0 if details.status == "SUCCEEDED" else 1
    return code if code >= 0 else 128 - code
