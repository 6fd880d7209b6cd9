"""Runs a stage as a Ray job, however the job was submitted.

The stage's log is copied to the output, since a cluster's own logs are lost with it. When the job
is stopped, the stage ends cleanly. Versions that differ from the submitter's are reported.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bert_core import files
from bert_core.errors import RaybertError
from pipelines.jobs.logs import OF_A_DRIVER, copied
from pipelines.jobs.packaging import versions
from pipelines.runtime import cluster
from pipelines.runtime.processes import exit_on_sigterm
from pipelines.runtime.progress import say
from pipelines.training.records import CHECKPOINTS


@contextmanager
def as_job(output: str) -> Iterator[None]:
    """Run the block, the work of a stage that writes `output`, as a job; does nothing outside of a
    job."""
    log = log_file()
    if log is None:
        yield
        return
    exit_on_sigterm()
    _say_versions()
    with copied(log, output):
        try:
            yield
        except SystemExit:
            _say_checkpoint(output)
            raise


def log_file() -> Path | None:
    """Return the file that Ray sends the output of this process to; None outside of a job."""
    try:
        path = Path(os.readlink("/proc/self/fd/1"))
    except OSError:  # not on this system
        return None
    return path if path.name.startswith(OF_A_DRIVER) else None


def _say_versions() -> None:
    submitted = cluster.job_metadata()
    for name, here in versions().items():
        there = submitted.get(f"submitted_with_{name}", here)
        if here != there:
            say(f"note: {name} is {here} here, it was {there} where the job was submitted")


def _say_checkpoint(output: str) -> None:
    from bert_core.train.checkpoint import latest_checkpoint

    try:
        checkpoint = latest_checkpoint(files.join(output, CHECKPOINTS))
    except (OSError, RaybertError):
        where = "continues from its last checkpoint, which cannot be read now"
    else:
        where = f"continues after step {checkpoint.step:,}" if checkpoint else "starts again"
    say(f"stopped: the same command {where}")
