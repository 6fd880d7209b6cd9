"""The table of `raybert jobs`: a row per submission."""

import re
import time
from datetime import datetime
from typing import TYPE_CHECKING

from bert_core import files
from bert_core.errors import RaybertError, ResourceError
from pipelines.jobs.server import JobServer
from pipelines.jobs.submission import PREFIX, attempts_of, ending_of, split_attempt
from tracking.runs.goodput import duration, read
from tracking.runs.mirror import RECORD

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

COLUMNS = [
    "id", "stage", "state", "started", "duration", "attempts", "exit", "progress", "left", "cost",
    "output",
]  # fmt: skip
# A line of `runtime.progress.Meter`: `  pretraining: 40 of 240 steps, 8.1 steps/s, 25 s left, …`
_PROGRESS = re.compile(
    r"^  [^:\n]+: ([\d,]+ of [\d,]+ \w+)(?:, [\d,.]+ \w+/s)?(?:, ([\d,.]+ (?:s|min|h)) left)?", re.M
)


def rows(server: JobServer) -> list[list[str]]:
    """Return a row for each submission of `raybert submit`, in the order of their first
    attempts."""
    jobs = [job for job in server.jobs() if (job.submission_id or "").startswith(f"{PREFIX}-")]
    submissions = {}
    for job in sorted(jobs, key=lambda job: job.start_time or 0):
        name, _ = split_attempt(job.submission_id or "")
        submissions[name] = attempts_of(name, jobs)
    return [_row(server, name, attempts) for name, attempts in submissions.items()]


def _row(server: JobServer, name: str, attempts: dict[int, "JobDetails"]) -> list[str]:
    number, job = list(attempts.items())[-1]
    metadata = job.metadata or {}
    running = not job.status.is_terminal()
    done, left = _progress(server, job) if running else ("", "")
    cost, share, left_by_record = figures_of_record(metadata.get("output", ""))
    if running:
        done, left = done or share, left or left_by_record
    return [
        name,
        metadata.get("stage", ""),
        job.status.lower() if running else ending_of(job),
        _moment(job.start_time),
        _duration(job),
        str(number),
        "" if job.driver_exit_code is None else str(job.driver_exit_code),
        done,
        left,
        cost,
        metadata.get("output", ""),
    ]


def figures_of_record(output: str) -> tuple[str, str, str]:
    """Return cost so far, share done and time left, from the record in an output; empty strings for
    what the record lacks, or if it cannot be read from here."""
    place = files.join(output, RECORD) if files.is_uri(output) else output
    try:
        spent = read(place) if output else None
    except (OSError, RaybertError):  # it is on a disk or in a bucket that only the cluster reaches
        spent = None
    if spent is None:
        return "", "", ""
    cost_usd, progress, left_s = spent.cost_usd, spent.progress, spent.left_s
    return (
        "" if cost_usd is None else f"${cost_usd:,.2f}",
        "" if progress is None else f"{progress:.0%}",
        "" if left_s is None else duration(left_s),
    )


def _progress(server: JobServer, job: "JobDetails") -> tuple[str, str]:
    """Return the latest share done and time left in the job's log."""
    try:
        return progress_in(server.log(job.submission_id or "", patience_s=0))
    except ResourceError:
        return "", ""


def progress_in(log: str) -> tuple[str, str]:
    """Return the share done and the time left, from the last line of a `Meter` in a log."""
    last = next(reversed(list(_PROGRESS.finditer(log))), None)
    return ("", "") if last is None else (last[1], last[2] or "")


def _moment(milliseconds: int | None) -> str:
    if milliseconds is None:
        return ""
    return datetime.fromtimestamp(milliseconds / 1000).strftime("%Y-%m-%d %H:%M")


def _duration(job: "JobDetails") -> str:
    if job.start_time is None:
        return ""
    end_s = time.time() if job.end_time is None else job.end_time / 1000
    return duration(max(0.0, end_s - job.start_time / 1000))
