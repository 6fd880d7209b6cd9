"""Prints a job's output until it ends, through lost connections."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

from bert_core.errors import ResourceError
from pipelines.jobs.server import JobServer
from pipelines.jobs.submission import ending_of
from pipelines.runtime.progress import say

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

POLL_S = 0.5
SILENCE_S = 60.0
"""A stream that is silent for so long is reopened: its connection may be gone unnoticed."""


def follow(server: JobServer, job_id: str, *, shown: int = 0) -> "JobDetails | None":
    """Print a job's output as it arrives, without gaps or repeats, until the job has ended.

    Args:
        shown: number of characters at the beginning that are not printed.
    Returns: the job; None if its cluster no longer knows it.
    """
    printed = _Printed(shown)
    while True:
        with suppress(RuntimeError, OSError, *_connection_errors()):
            asyncio.run(_stream(server.tail(job_id), printed))
        job = server.job(job_id)  # waits while the server is away
        if job is None:
            return None
        if job.status.is_terminal():
            try:  # a stream may end before the log does
                printed.take(server.log(job_id), begins_at=0)
            except ResourceError as error:
                say(f"the end of the log of job {job_id} cannot be read: {error}")
            return job
        time.sleep(POLL_S)


def show_until_end(server: JobServer, job_id: str) -> "JobDetails | None":
    """Print a job's output until it ends; if interrupted, leave it running and say how to go on."""
    try:
        return follow(server, job_id)
    except KeyboardInterrupt:
        say(
            f"\njob {job_id} keeps running: `raybert jobs attach {job_id}` shows it again, "
            f"`raybert jobs stop {job_id}` stops it"
        )
        raise


def report_end(server: JobServer, job_id: str, job: "JobDetails | None") -> int:
    """Say how a job ended, and return its exit code."""
    if job is None:
        say(
            f"job {job_id} lost: the cluster at {server.address} no longer knows it, so its head "
            "was replaced; submit it again to go on, with --retries to have that done for you"
        )
        return 1
    code = _exit_code(job)
    say(f"job {job_id} {ending_of(job)}, exit code {code}")
    if code and job.driver_exit_code is None:
        say(job.message or "")  # it never started, so there is no output that says why
    return code


def _exit_code(job: "JobDetails") -> int:
    code = job.driver_exit_code
    if code is None:
        return 0 if job.status == "SUCCEEDED" else 1
    return code if code >= 0 else 128 - code


class _Printed:
    """Keeps track of how much of a log has been printed."""

    def __init__(self, characters: int) -> None:
        self._characters = characters

    def take(self, text: str, *, begins_at: int) -> None:
        """Print the part of `text` that has not been printed yet."""
        new = text[max(0, self._characters - begins_at) :]
        if new:
            print(new, end="", flush=True)
            self._characters += len(new)


async def _stream(parts: AsyncIterator[str], printed: _Printed) -> None:
    """Print a stream that begins at the start of the log."""
    begins_at = 0
    while (text := await asyncio.wait_for(anext(parts, None), SILENCE_S)) is not None:
        printed.take(text, begins_at=begins_at)
        begins_at += len(text)


def _connection_errors() -> tuple[type[Exception], ...]:
    from aiohttp import ClientError

    return (ClientError,)
