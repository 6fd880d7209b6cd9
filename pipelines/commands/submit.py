"""`raybert submit prepare --config …`: run a stage as a job on a Ray cluster.

What `ray job submit` does, with two differences: what a job does not need stays here, and the exit
code is the job's own (Ray's is 1 whatever the code was).
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

# NOTE: gitignore's rules: without the slash, `data` would leave bert_core/data behind too.
NOT_SENT = ["/.git", "/.venv", "/data", "/mlruns", "/runs", "/shared", "__pycache__", ".*_cache"]
OPEN = "--allow_open_cluster"
POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class SubmitConfig:
    """Run a stage as a job on a Ray cluster; the stage and its own options come last."""

    address: str | None = None
    """Job server of the cluster, as http://head:8265; that of RAY_API_SERVER_ADDRESS or
    RAY_ADDRESS, or else this machine's, where this is not given."""
    allow_open_cluster: bool = False
    """Send the job to a cluster that asks for no token, where anyone who reaches its ports can run
    code; the job may then join it too."""
    working_dir: str = "."
    """Folder that the job runs in a copy of, with the code and configs in it; what the job writes
    there goes with it, so give the stage's output as a URI or an absolute path of the cluster."""


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Submit's own options, and from the first argument that is none the stage's command line."""
    end = 0
    while end < len(arguments) and arguments[end].startswith("-") and arguments[end] != "--":
        word, following = arguments[end], [*arguments[end + 1 :], ""][0]
        is_switch = word == OPEN and following not in ("true", "false")
        end += 1 if is_switch or "=" in word or word in ("-h", "--help") else 2
    own, command = list(arguments[:end]), list(arguments[end:])
    return own, command[1:] if command[:1] == ["--"] else command


def run(config: SubmitConfig, command: Sequence[str]) -> int:
    """Submit, show the job's output until it ends, and return its exit code.

    Interrupted, it leaves the job at work and says how to stop it.

    Raises: ConfigError if there is no command, or the folder cannot be sent; ResourceError if no
        cluster answers.
    """
    if not command:
        raise ConfigError(
            "wanted a stage to run on the cluster, got none: raybert submit prepare --config …"
        )
    if "://" not in config.working_dir and not Path(config.working_dir).is_dir():
        raise ConfigError(f"working_dir: wanted a folder, {config.working_dir} is none")
    client = cluster.job_client(config.address, allow_open_cluster=config.allow_open_cluster)
    if config.allow_open_cluster and _takes_open(command[0]):
        command = [*command, f"{OPEN}=true"]  # the job joins the same cluster
    job = _submit(client, config, command)
    say(f"job {job} at {client.get_address()}: {shlex.join(command)}")
    try:
        details = _follow(client, job)
    except KeyboardInterrupt:
        say(f"\njob {job} goes on: end it with `ray job stop {job}`")
        raise
    code = _exit_code(details)
    say(f"job {job} {details.status.lower()}, exit code {code}")
    if code and details.driver_exit_code is None:
        say(details.message or "")  # it never started, so there is no output that says why
    return code


def _takes_open(word: str) -> bool:
    if word not in ALL:  # the job will say so
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
        raise ResourceError(f"the cluster did not take the job: {error}") from error


def _follow(client: "JobSubmissionClient", job: str) -> "JobDetails":
    """Print the output as it comes, and wait for the end, also if the connection is cut."""

    async def show() -> None:
        async for lines in client.tail_job_logs(job):
            print(lines, end="", flush=True)

    try:
        asyncio.run(show())
    except RuntimeError as error:
        say(f"lost the output of job {job} ({error}): waiting for its end")
    while not (details := client.get_job_info(job)).status.is_terminal():
        time.sleep(POLL_S)
    return details


def _exit_code(details: "JobDetails") -> int:
    code = details.driver_exit_code
    if code is None:
        return 0 if details.status == "SUCCEEDED" else 1
    return code if code >= 0 else 128 - code
