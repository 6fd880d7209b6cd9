"""`raybert jobs`: the jobs of `raybert submit` on a cluster, and what can be done with one."""

import time
from dataclasses import dataclass
from typing import Literal

from bert_core.errors import ConfigError
from pipelines.commands.listing import show_table
from pipelines.jobs import listing
from pipelines.jobs.following import follow, report_end, show_until_end
from pipelines.jobs.packaging import STOP_WAIT_S
from pipelines.jobs.server import JobServer, JobServerConfig
from pipelines.jobs.submission import ending_of
from pipelines.runtime.progress import say

Action = Literal["list", "logs", "attach", "stop"]


@dataclass(frozen=True, kw_only=True)
class JobsConfig(JobServerConfig):
    """List the jobs of a cluster, or look at one or stop it: `raybert jobs attach ID`."""

    action: Action = "list"
    """`list` them; print the `logs` of one; `attach` to one, which prints its log until it ends;
    `stop` one, which writes a checkpoint first."""
    job: str | None = None
    """Id of the job, as `raybert jobs` lists it; followed by -1, -2, … it is that attempt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.job is None) != (self.action == "list"):
            raise ConfigError(
                "job: wanted the id of a job after logs, attach or stop, and only there, got "
                f"{self.job or 'none'} with {self.action}: `raybert jobs` lists them"
            )


def run(config: JobsConfig) -> int:
    """Do what is asked; return an exit code, which is the job's own after `attach`."""
    server = JobServer.of(config)
    if config.job is None:
        rows = listing.rows(server)
        if rows:
            show_table(listing.COLUMNS, rows)
        else:
            say(f"no jobs of `raybert submit` at {server.address}")
        return 0
    job_id = server.find(config.job).submission_id
    assert job_id is not None  # looked up by id
    if config.action == "logs":
        print(server.log(job_id), end="", flush=True)
        return 0
    if config.action == "attach":
        return report_end(server, job_id, show_until_end(server, job_id))
    return _stop(server, job_id)


def _stop(server: JobServer, job_id: str) -> int:
    """Stop a job, and print its output meanwhile; return 1 if it did not stop."""
    job = server.job(job_id)
    if job is None or job.status.is_terminal():
        say(f"job {job_id} has already ended: {ending_of(job)}")
        return 0
    shown = len(server.log(job_id))
    began_s = time.monotonic()
    server.stop(job_id)
    say(f"stopping job {job_id}: it is killed if it still runs after {STOP_WAIT_S} s")
    ending = ending_of(follow(server, job_id, shown=shown))
    say(f"job {job_id} {ending} after {time.monotonic() - began_s:,.0f} s")
    return 0 if ending in ("stopped", "succeeded") else 1
