"""`raybert submit prepare --config …`: run a stage as a job on a Ray cluster.

Submitting the same work again finds the job: one that runs is shown, any other is started again. If
that one has succeeded, the stage compares the content of its inputs and does nothing if they are
the same. The parts are in `pipelines/jobs`.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from bert_core.checks import NonNegativeInt
from bert_core.errors import ConfigError
from bert_core.wording import one_of
from pipelines.configure import ALL, config_class
from pipelines.jobs.following import report_end, show_until_end
from pipelines.jobs.packaging import check_versions, runtime_env, versions
from pipelines.jobs.secret_values import refuse_secrets
from pipelines.jobs.server import AlreadySubmittedError, JobServer, JobServerConfig
from pipelines.jobs.submission import (
    Submission,
    attempt_id,
    attempts_of,
    ending_of,
    submission_of,
)
from pipelines.runtime.progress import say

OPEN = "--allow_open_cluster"
REASONS = ("lost", "preempted", "failed")
BAD_USAGE = 2
"""Exit code of a command line that is refused: it would be refused again."""


@dataclass(frozen=True, kw_only=True)
class SubmitConfig(JobServerConfig):
    """Run a stage as a job on a Ray cluster; the stage and its own options come last."""

    working_dir: str | None = None
    """Folder with code of your own, which the job runs in a copy of, at most 512 MiB. raybert and
    the files that --config names are sent without it. What a job writes into the copy is lost."""
    retries: NonNegativeInt = 0
    """How often to start the job again when it ends for one of the reasons in retry_on."""
    retry_on: str = "lost,preempted"
    """Which of lost (the driver was killed, or went with its node or head), preempted (its node was
    reclaimed) and failed, with commas between them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for reason in self.reasons:
            if reason not in REASONS:
                raise ConfigError(f"retry_on: wanted {one_of(REASONS)}, got {reason}")

    @property
    def reasons(self) -> list[str]:
        """Return the endings after which the job is started again."""
        return self.retry_on.split(",") if self.retry_on else []


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into submit's options and the stage's command line, which begins at the
    first argument that is not an option."""
    end = 0
    while end < len(arguments) and arguments[end].startswith("-") and arguments[end] != "--":
        word, following = arguments[end], [*arguments[end + 1 :], ""][0]
        is_switch = word == OPEN and following not in ("true", "false")
        end += 1 if is_switch or "=" in word or word in ("-h", "--help") else 2
    options, command = list(arguments[:end]), list(arguments[end:])
    return options, command[1:] if command[:1] == ["--"] else command


def run(config: SubmitConfig, command: Sequence[str]) -> int:
    """Submit, show the job's output until it ends, and return its exit code.

    If interrupted, it leaves the job running and says how to see it again and how to stop it.

    Raises: ConfigError if there is no command, or the stage or the cluster would refuse it;
        ResourceError if no cluster answers.
    """
    if not command:
        raise ConfigError(
            "wanted a stage to run on the cluster, got none: raybert submit prepare --config …"
        )
    folder = config.working_dir
    if folder is not None and "://" not in folder and not Path(folder).is_dir():
        raise ConfigError(f"working_dir: wanted a folder, got {folder}")
    submission = submission_of(command, folder or ".")
    refuse_secrets(command, submission.config)
    server = JobServer.of(config)
    check_versions(server)
    number = _start_or_find(server, config, submission)
    retried = 0
    while True:
        job_id = attempt_id(submission.id, number)
        job = show_until_end(server, job_id)
        ending = ending_of(job)
        refused = job is not None and job.driver_exit_code == BAD_USAGE
        if ending not in config.reasons or retried == config.retries or refused:
            return report_end(server, job_id, job)
        retried += 1
        say(f"job {job_id} {ending}: retry {retried} of {config.retries}")
        number = _start(server, config, submission, number + 1, resumes=True)


def _start_or_find(server: JobServer, config: SubmitConfig, submission: Submission) -> int:
    """Return the number of the attempt to follow: the running one, or else a new one."""
    attempts = attempts_of(submission.id, server.jobs())
    if not attempts:
        return _start(server, config, submission, 1)
    number, job = list(attempts.items())[-1]
    if not job.status.is_terminal():
        say(f"job {job.submission_id} is already {job.status.lower()}: here is what it prints")
        return number
    say(f"job {job.submission_id} {ending_of(job)} before: this is attempt {number + 1}")
    return _start(server, config, submission, number + 1)


def _start(
    server: JobServer,
    config: SubmitConfig,
    submission: Submission,
    number: int,
    *,
    resumes: bool = False,
) -> int:
    """Start an attempt, unless another process has just started it; return its number.

    Args:
        resumes: continue where the attempt before it ended, even if that one had `--force`.
    """
    command = list(submission.command)
    if resumes and getattr(submission.config, "force", False):
        command.append("--force=false")
    if resumes and _takes(command[0], "--wait"):
        command.append("--wait=true")  # the one before may hold the output for a moment longer
    if config.allow_open_cluster and _takes(command[0], OPEN):
        command.append(f"{OPEN}=true")  # the job joins the same cluster
    with runtime_env(server, command, config.working_dir) as (environment, sent):
        # `python` is the cluster's: its image, or the environment that `ray start` was run in.
        entrypoint = shlex.join(["python", "-m", "pipelines.cli", *sent])
        metadata = {
            "stage": command[0],
            "output": submission.output,
            "config": submission.digest,
            "attempt": str(number),
            "code": next(iter(environment.get("py_modules", [])), ""),
            **{f"submitted_with_{name}": version for name, version in versions().items()},
        }
        try:
            server.submit(
                submission_id=attempt_id(submission.id, number),
                entrypoint=entrypoint,
                runtime_env=environment,
                metadata=metadata,
            )
        except AlreadySubmittedError:  # by this command, whose answer was lost, or by another
            return number
    job_id = attempt_id(submission.id, number)
    say(f"job {job_id} at {server.address}: {shlex.join(submission.command)}")
    return number


def _takes(word: str, option: str) -> bool:
    if word not in ALL:  # the job will report it
        return False
    return any(f"--{field.name}" == option for field in fields(config_class(word)))
