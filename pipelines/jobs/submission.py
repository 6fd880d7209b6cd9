"""Gives a command line its job id, the same whenever the same work is requested, and its attempts.

The id is derived from the stage, its output, and the fields that determine its output, which
include the names of its inputs. How the stage runs (workers, tracking server) is left out, so that
submitting it again with more workers finds the job that is running. The content of the inputs is
left to the stage, which reads them where the job runs.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import chdir
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bert_core import files
from bert_core.errors import ConfigError
from pipelines.configure import STAGES, parse
from pipelines.runtime.stage_config import REMARK, operational_fields

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

PREFIX = "raybert"
DIGEST_CHARACTERS = 12
Ending = Literal["succeeded", "stopped", "lost", "preempted", "failed"]

# Exit codes of a driver that got SIGTERM or SIGKILL: a shell's, and Python's subprocess's.
_TERMINATED, _KILLED = (143, -15), (137, -9)
# Ray's types of error for a job whose driver has disappeared.
_GONE = ("JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE")
# The same if the node was replaced and its job is still listed.
_NO_SUPERVISOR = "failed to get job supervisor"


@dataclass(frozen=True)
class Submission:
    """A command line, and the job that it stands for."""

    command: tuple[str, ...]
    config: Any
    """The stage's config; None for another command, or if its file is only on the cluster."""
    digest: str
    """Digest of the stage, of all that determines its output, and of the output's path."""

    @property
    def id(self) -> str:
        word = re.sub(r"\W+", "-", self.command[0]) or "job"
        return f"{PREFIX}-{word}-{self.digest}"

    @property
    def output(self) -> str:
        """Return the stage's output; empty if it is not known here."""
        return "" if self.config is None else self.config.output


def submission_of(command: Sequence[str], folder: str) -> Submission:
    """Parse a command line as if it were run in `folder`.

    Raises: ConfigError if the stage would refuse it, or its output is inside the job's own folder.
    """
    config = _parsed(command, folder)
    if config is not None and not (
        files.is_uri(config.output) or Path(config.output).is_absolute()
    ):
        raise ConfigError(
            "output: wanted a URI or an absolute path on the cluster, got "
            f"{config.output}: what a job writes into its own folder is lost with it"
        )
    meaning = list(command) if config is None else [command[0], _deciding(config)]
    canonical = json.dumps(meaning, sort_keys=True, default=str)
    digest = hashlib.sha256(canonical.encode()).hexdigest()[:DIGEST_CHARACTERS]
    return Submission(tuple(command), config, digest)


def config_files(command: Sequence[str]) -> list[str]:
    """Return the files that `--config` names."""
    after_space = [value for word, value in pairwise([*command, ""]) if word == "--config"]
    after_equals = [word.partition("=")[2] for word in command if word.startswith("--config=")]
    return after_space + after_equals


def _parsed(command: Sequence[str], folder: str) -> Any:
    if command[0] not in STAGES or not Path(folder).is_dir():
        return None
    with chdir(folder):
        if not all(Path(name).is_file() for name in config_files(command)):
            return None
        return parse(command[0], list(command[1:]))


def _deciding(config: Any) -> dict[str, Any]:
    operational = operational_fields(type(config)) - {"output"}
    values = {k: v for k, v in _described(config).items() if k not in operational}
    return values | {"output": config.output.rstrip("/")}


def _described(config: Any) -> dict[str, Any]:
    return {
        field.name: _described(value) if is_dataclass(value) else value
        for field in fields(config)
        for value in [getattr(config, field.name)]
        if field.metadata != REMARK
    }


def attempt_id(submission_id: str, number: int) -> str:
    """Return Ray's id of an attempt. Each attempt has its own, since Ray accepts an id only
    once."""
    return submission_id if number == 1 else f"{submission_id}-{number}"


def split_attempt(job_id: str) -> tuple[str, int]:
    """Split an attempt's id into the submission's id and the attempt's number: the inverse of
    `attempt_id`."""
    match = re.fullmatch(rf"({PREFIX}-.+-[0-9a-f]{{{DIGEST_CHARACTERS}}})-(\d+)", job_id)
    return (match[1], int(match[2])) if match else (job_id, 1)


def attempts_of(submission_id: str, jobs: Iterable["JobDetails"]) -> dict[int, "JobDetails"]:
    """Return the attempts at a submission by their number, in order."""
    numbered = {
        number: job
        for job in jobs
        for name, number in [split_attempt(job.submission_id or "")]
        if name == submission_id
    }
    return dict(sorted(numbered.items()))


def ending_of(job: "JobDetails | None") -> Ending:
    """Return how a job ended; None stands for a job that its cluster no longer knows.

    A driver is *lost* if it was killed or its node was lost, *preempted* if its node was reclaimed
    or it got SIGTERM by other means than `raybert jobs stop`, and has *failed* if it ended by
    itself.
    """
    if job is None:
        return "lost"
    if job.status in ("SUCCEEDED", "STOPPED"):
        return "succeeded" if job.status == "SUCCEEDED" else "stopped"
    message = (job.message or "").lower()
    if job.error_type in _GONE or _NO_SUPERVISOR in message:
        return "preempted" if "preempt" in message or "drain" in message else "lost"
    if job.driver_exit_code in _TERMINATED:
        return "preempted"
    return "lost" if job.driver_exit_code in _KILLED else "failed"
