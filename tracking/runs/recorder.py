"""Records one MLflow run per stage, so that an unreachable MLflow never stops or slows the work.

Records go to the stage's folder first (`tracking.runs.spool`); a thread copies them to MLflow, and
what cannot be sent now is sent later, by this process or by the next start of the stage. The run's
id is stored in the folder, so that a restart continues the same run; so does one on another host,
if the folder has a copy at a URI (`tracking.runs.mirror`).
"""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from bert_core import files
from bert_core.errors import RaybertError
from bert_core.wording import without_secrets
from tracking.runs.mirror import Mirror, fetch_newer, read_copy
from tracking.runs.sender import FILES, Sender
from tracking.runs.spool import METRICS, RUN, SENT, Note, Run, Spool, await_release, read_run
from tracking.store.server import connect, settle_environment, without_password
from tracking.store.server import tracking_uri as tracking_uri

logger = logging.getLogger(__name__)

# RUNNING leaves the run open: the next process that opens the folder continues it.
Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

# MLflow's limits: mlflow/utils/validation.py.
KEY_CHARACTERS = 250
PARAM_CHARACTERS = 6000
TAG_CHARACTERS = 8000
DIGEST_CHARACTERS = 36
# The tag by which MLflow files a run under another: mlflow/utils/mlflow_tags.py.
PARENT_TAG = "mlflow.parentRunId"
_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)


@dataclass(frozen=True)
class DatasetInput:
    """A data set that a stage read, shown by MLflow as an input of the run."""

    name: str
    digest: str
    """Hexadecimal; MLflow keeps the first 36 characters."""
    source: str
    """Path or URI; of a model of the Hugging Face hub `owner/name@commit`."""
    context: str = "training"
    asked: str = ""
    """The reference that was given, if it means a model of the hub."""


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested config as flat params within MLflow's limits: `{"optimizer": {"lr": 2e-4}}` →
    `{"optimizer.lr": "0.0002"}`."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[_name(name)] = _shortened(str(value), PARAM_CHARACTERS)
    return flat


def _name(text: str) -> str:
    """Return the nearest name that MLflow accepts; as a path, it must not mean another path."""
    parts = _FORBIDDEN.sub("_", text)[:KEY_CHARACTERS].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"


def _shortened(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


class RunRecorder:
    """Records one run into `folder`, and from there into MLflow.

    Only `flush` and `close` wait for MLflow, at most for their timeout. Only one process at a time
    has a folder open, and the next process waits for it; a process that hands over (driver →
    training's controller → driver) closes with RUNNING.
    """

    def __init__(self, spool: Spool, uri: str, copy: str | None = None) -> None:
        """Use `open` instead."""
        self._spool = spool
        self._sender = Sender(spool, uri)
        self._mirror: Mirror | None = None
        self._complaints: set[str] = set()
        if copy is not None:
            self._mirror = Mirror(spool.folder, copy, spool.run, self._superseded)
            self._mirror.take()
            self._mirror.start()
        self._sender.start()

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        uri: str,
        copy: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        params: Mapping[str, Any] | None = None,
        inputs: Iterable[DatasetInput] = (),
        tags: Mapping[str, str] | None = None,
    ) -> "RunRecorder":
        """Begin a run in a new folder, or continue the run that a folder belongs to.

        A folder that was recorded to another URI or experiment gets a new run at the given one,
        with all its records.

        Args:
            folder: a local folder, created if missing.
            uri: from `tracking_uri`.
            copy: URI of a folder that gets a copy of the record; a newer record there replaces the
                folder's first.
            experiment: None means the stored one, or `raybert`.
            run_name: None means the stored one, or the folder's name.
            params: the config, possibly nested. MLflow keeps the first value of a param: one that
                differs after a restart becomes the tag `restart.<param>`.
        Raises: FormatError if `mlflow_run.json` is damaged; ResourceError if another process uses
            the folder, or it or its copy is not writable; OSError.
        """
        settle_environment()
        folder = Path(folder)
        place = without_password(uri)
        new = Run(
            tracking_uri=place,
            experiment=experiment or "raybert",
            run_name=run_name or folder.absolute().name,
        )
        spool = Spool(folder, new, None if copy is None else partial(fetch_newer, place=copy))
        try:
            cls._describe(spool, new, experiment, run_name, params, inputs, tags)
            return cls(spool, uri, copy)
        except BaseException:
            spool.close()
            raise

    @staticmethod
    def _describe(
        spool: Spool,
        new: Run,
        experiment: str | None,
        run_name: str | None,
        params: Mapping[str, Any] | None,
        inputs: Iterable[DatasetInput],
        tags: Mapping[str, str] | None,
    ) -> None:
        """Queue what MLflow should know about the run from the start."""
        run, place = spool.run, new.tracking_uri
        if run.tracking_uri != place or experiment not in (None, run.experiment):
            spool.move(
                replace(
                    new,
                    experiment=experiment or run.experiment,
                    run_name=run_name or run.run_name,
                )
            )
        notes = []
        if params:
            notes.append(Note("params", flatten(params)))
        if tags:
            named = {_name(key): _shortened(value, TAG_CHARACTERS) for key, value in tags.items()}
            notes.append(Note("tags", named))
        if datasets := [asdict(dataset) for dataset in inputs]:
            for dataset in datasets:
                dataset["digest"] = dataset["digest"][:DIGEST_CHARACTERS]
            notes.append(Note("inputs", datasets))
        spool.enqueue(*notes, Note("status", "RUNNING"))

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id; None until MLflow has answered for the first time."""
        return self._spool.run.run_id

    @property
    def last_step(self) -> int:
        """Step of the last record in the folder, sent or not; -1 if there is none."""
        return self._spool.last_step

    def record(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record metrics of a global step. Never raises: failures to record are logged once.

        A step that is not after `last_step` is dropped (it was repeated after a restart), so pass
        all metrics of a step in a single call.
        """
        try:
            self._spool.append(int(step), self._numbers(metrics))
        except Exception as error:
            self._complain("step", f"step {step} is not recorded in {self._spool.folder}: {error}")

    def artifact(self, local_path: str | Path, artifact_path: str | None = None) -> None:
        """Attach a file or folder, which must stay in place until it has been sent.

        Like `record`, it never raises.
        """
        path, folder = Path(local_path).absolute(), self._spool.folder.absolute()
        if path.is_relative_to(folder):
            path = path.relative_to(folder)  # the folder has another path on another host
        try:
            self._spool.enqueue(Note("artifact", [str(path), artifact_path]))
        except Exception as error:
            self._complain("artifact", f"{local_path} will not be in MLflow: {error}")

    def json_artifact(self, name: str, content: Mapping[str, Any]) -> None:
        """Attach a JSON file that need not be on disk. Like `record`, it never raises."""
        try:
            self._spool.enqueue(Note("json", [name, dict(content)]))
        except Exception as error:
            self._complain(name, f"{name} will not be in MLflow: {error}")

    def flush(self, timeout_s: float = 20.0) -> bool:
        """Wait until MLflow has everything, so that `run_id` is known; False on timeout."""
        return self._sender.wait_until_sent(timeout_s)

    def close(self, status: Status = "FINISHED", timeout_s: float = 20.0) -> str | None:
        """End the run, or with RUNNING hand it over. What cannot be sent in time stays on disk.

        If MLflow is unreachable this takes two more tries, a second apart, not the whole timeout.

        Returns: None if MLflow has everything, otherwise a sentence that says so. It is logged as
            a warning when the run ends; a process that hands over leaves that to the next one.
        """
        if status != "RUNNING":
            try:
                self._spool.enqueue(Note("status", status))
            except (OSError, RaybertError) as error:
                self._complain("status", f"the status {status} of the run is not recorded: {error}")
        line = self._end(timeout_s)
        if line is not None and status != "RUNNING":
            logger.warning(line)
        return line

    def _end(self, timeout_s: float) -> str | None:
        reason = self._sender.finish(timeout_s)
        if self._mirror is not None:
            self._mirror.finish(timeout_s)
        self._spool.close()
        if reason is None:
            return None
        left, run = self._spool.lines - self._spool.sent, self._spool.run
        unsent = f"{left:,} record{'' if left == 1 else 's'}" if left else "how the run ended"
        if not left and run.untold and all(note.kind in FILES for note in run.untold):
            unsent = "files of the run"
        return without_secrets(
            f"MLflow at {run.tracking_uri} has yet to be sent {unsent}: {reason}. The next start "
            f"of the same stage sends what is in {self._spool.folder}"
        )

    def __enter__(self) -> "RunRecorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close("FINISHED")
        else:
            self.close("FAILED" if issubclass(kind, Exception) else "KILLED")

    def _numbers(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        numbers = {}
        for name, value in metrics.items():
            try:
                numbers[_name(name)] = float(value)
            except (TypeError, ValueError, RuntimeError):
                self._complain(name, f"metric {name} is left out: wanted a number, got {value!r}")
        return numbers

    def _superseded(self) -> None:
        """Stop sending: another process has the record now, and repeats what this process has yet
        to write."""
        self._sender.abandon()
        self._complain(
            "copy", f"another process records the run of {self._spool.folder}: this one ends"
        )

    def _complain(self, about: str, line: str) -> None:
        """Log a line once per subject: an error in one record occurs in thousands."""
        if about not in self._complaints:
            self._complaints.add(about)
            logger.warning(line)


def finish_run(
    folder: str | Path, *, uri: str, copy: str | None = None, timeout_s: float = 20.0
) -> str | None:
    """End the run of a stage whose output is complete; for a stage that is skipped.

    The run is still open if the stage was killed between its manifest and the run's end, and
    incomplete if MLflow was unreachable.

    Args:
        copy: as of `RunRecorder.open`.
    Returns: None if MLflow has everything, otherwise the sentence that was logged.
    """
    run = read_run(Path(folder)) if copy is None else read_copy(copy)
    if run is None or run.tracking_uri != without_password(uri):
        return None
    if copy is not None and run.status == "FINISHED" and not run.untold:
        return None  # how a run ended is sent last, after its records
    spool = Spool(Path(folder), run, None if copy is None else partial(fetch_newer, place=copy))
    if spool.run.status != "FINISHED":
        spool.enqueue(Note("status", "FINISHED"))
    if not spool.has_unsent():
        spool.close()
        return None
    settle_environment()
    return RunRecorder(spool, uri, copy).close("FINISHED", timeout_s)


def discard_run(folder: str | Path, *, uri: str, copy: str | None = None) -> bool:
    """Remove the run of a start that recorded no step, from MLflow and from the folder.

    Args:
        copy: as of `RunRecorder.open`.
    Returns: whether no run is left. A run that has steps stays, and so does a run that MLflow
        fails to delete.
    """
    folder = Path(folder)
    run = read_run(folder) if copy is None else read_copy(copy)
    if run is None:
        return True
    await_release(folder)
    if run.tracking_uri != without_password(uri) or _has_steps(folder, copy):
        return False
    if run.run_id is not None:
        try:
            connect(uri).delete_run(run.run_id)
        except Exception as error:  # MLflow raises many kinds of errors, and none may end the stage
            logger.debug("the run of %s is not removed: %s", folder, error)
            return False
    for name in (METRICS, SENT, RUN):
        (folder / name).unlink(missing_ok=True)
    if copy is not None:
        files.remove(copy)
    return True


def _has_steps(folder: Path, copy: str | None) -> bool:
    if copy is not None:
        return files.size_bytes(files.join(copy, METRICS)) > 0
    return (folder / METRICS).stat().st_size > 0
