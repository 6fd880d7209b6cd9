"""What a stage does in addition where it runs as a job, whoever submitted it.

Its log is copied to the output, since those of a cluster go with it; it ends in good order when the
job is stopped; and it says where it runs on other versions than it was submitted with.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bert_core import files
from bert_core.manifest import is_complete
from pipelines.jobs.packaging import versions
from pipelines.runtime import cluster
from pipelines.runtime.progress import say
from pipelines.runtime.stage import STARTED, StageConfig
from pipelines.training.records import CHECKPOINTS

LOGS = "logs"
COPY_EVERY_S = 60.0
MOST_BYTES = 64 << 20
"""Of a longer log the end is copied."""
_OF_A_DRIVER = "job-driver-"


@contextmanager
def as_job(config: StageConfig) -> Iterator[None]:
    """Wraps the work of a stage; does nothing where it is not a job."""
    log = log_file()
    if log is None:
        yield
        return
    cluster.exit_on_sigterm()
    _tell_versions()
    with _copied(log, config.output):
        try:
            yield
        except SystemExit:
            _tell_checkpoint(config.output)
            raise


def log_file() -> Path | None:
    """The file that Ray sends the output of this process to; None outside of a job."""
    try:
        path = Path(os.readlink("/proc/self/fd/1"))
    except OSError:  # there is no such thing on this system
        return None
    return path if path.name.startswith(_OF_A_DRIVER) else None


def _tell_versions() -> None:
    submitted = cluster.job_metadata()
    for name, here in versions().items():
        there = submitted.get(f"submitted_with_{name}", here)
        if here != there:
            say(f"note: {name} is {here} here, it was {there} where the job was submitted")


def _tell_checkpoint(output: str) -> None:
    from bert_core.train.checkpoint import latest_checkpoint

    checkpoint = latest_checkpoint(files.join(output, CHECKPOINTS))
    where = f"goes on after step {checkpoint.step:,}" if checkpoint else "begins anew"
    say(f"stopped: the same command {where}")


@contextmanager
def _copied(log: Path, output: str) -> Iterator[None]:
    """Inside, the logs of this job on this machine are copied to `output` every minute, and in the
    end."""
    copies, ended = _Copies(log, output), threading.Event()

    def repeat() -> None:
        while not ended.wait(COPY_EVERY_S):
            copies.bring_up_to_date()

    thread = threading.Thread(target=repeat, name="copy-logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sys.stdout.flush()
        copies.bring_up_to_date()


class _Copies:
    """The log of a driver, and those of its workers on the same machine, in the output."""

    def __init__(self, log: Path, output: str) -> None:
        self._log, self._output = log, output
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        attempt = log.stem.removeprefix(_OF_A_DRIVER)
        self._folder = files.join(output, LOGS, f"{began}-{attempt}")
        self._sizes: dict[Path, int] = {}
        self._workers: set[str] = set()
        self._failed = False

    def bring_up_to_date(self) -> None:
        """Copy what has changed. Never raises: a log that cannot be copied ends no run."""
        try:
            started = files.join(self._output, STARTED)
            if not is_complete(self._output) and not files.exists(started):
                return  # the folder is not yet this run's
            for path in self._files():
                if (size := path.stat().st_size) != self._sizes.get(path, 0):
                    with path.open("rb") as file:
                        file.seek(max(0, size - MOST_BYTES))
                        data = file.read(MOST_BYTES)
                    name = "driver.log" if path == self._log else path.name
                    files.write_bytes(files.join(self._folder, name), data)
                    self._sizes[path] = size
        except Exception as error:
            if not self._failed:
                say(f"the logs are not copied to {self._folder}: {error}")
            self._failed = True

    def _files(self) -> list[Path]:
        if cluster.is_connected():
            import ray

            self._workers.add(ray.get_runtime_context().get_job_id())
        found = [self._log]
        for job in self._workers:
            found += sorted(self._log.parent.glob(f"worker-*-{job}-*"))
        return found
