"""Talks to a cluster's job server, and waits if it is away: its head restarts, or a connection
breaks."""

import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from bert_core.checks import check_fields
from bert_core.errors import ConfigError, ResourceError
from bert_core.wording import last_line, nearest
from pipelines.jobs.submission import attempts_of, split_attempt
from pipelines.runtime import cluster
from pipelines.runtime.progress import say

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

RETRY_S = 1.0
LOG_PATIENCE_S = 30.0
_UNITS_S = {"s": 1, "m": 60, "h": 3600}
T = TypeVar("T")


def seconds_of(field: str, text: str) -> float:
    """Convert a duration to seconds: `10m` → 600. Raises: ConfigError naming `field`."""
    match = re.fullmatch(r"(\d+)([smh])", text)
    if match is None:
        raise ConfigError(f"{field}: wanted a duration such as 90s, 10m or 2h, got {text}")
    return int(match[1]) * _UNITS_S[match[2]]


@dataclass(frozen=True, kw_only=True)
class JobServerConfig:
    """Which job server to ask."""

    address: str | None = None
    """Job server of the cluster, e.g. http://localhost:8265; by default RAY_API_SERVER_ADDRESS or
    RAY_ADDRESS, else this machine's."""
    allow_open_cluster: bool = False
    """Use a Ray cluster even if it requires no token, so that anyone who reaches its ports can run
    code there."""
    patience: str = "5m"
    """How long to wait for a job server that has answered and then does not: 90s, 10m, 2h."""

    def __post_init__(self) -> None:
        check_fields(self)
        seconds_of("patience", self.patience)


class AlreadySubmittedError(Exception):
    """The id is taken, by another submission or by this one, whose answer did not arrive."""


class JobServer:
    """Sends requests to the job server; while it does not answer, waits up to `patience_s` per
    request."""

    def __init__(self, client: "JobSubmissionClient", patience_s: float) -> None:
        self._client, self._patience_s = client, patience_s

    @classmethod
    def of(cls, config: JobServerConfig) -> "JobServer":
        """Connect to the configured server, which has to answer now. Raises: as
        `cluster.job_client` does."""
        client = cluster.job_client(config.address, allow_open_cluster=config.allow_open_cluster)
        return cls(client, seconds_of("patience", config.patience))

    @property
    def address(self) -> str:
        return self._client.get_address()

    def jobs(self) -> list["JobDetails"]:
        """Return all jobs that were submitted to the cluster, by anyone."""
        return [job for job in self._ask(self._client.list_jobs) if job.submission_id]

    def job(self, job_id: str) -> "JobDetails | None":
        """Return the job; None if the cluster does not know it, because its head was replaced or
        never had it."""
        return self._ask(lambda: _unless_unknown(self._client.get_job_info, job_id))

    def find(self, job_id: str) -> "JobDetails":
        """Return a job by the id of an attempt, or of a submission, which stands for its last
        attempt.

        Raises: ConfigError, naming a similar id, if there is none.
        """
        jobs = self.jobs()
        submission_id, number = split_attempt(job_id)
        attempts = attempts_of(submission_id, jobs)
        chosen = number if job_id != submission_id else max(attempts, default=0)
        if chosen in attempts:
            return attempts[chosen]
        known = [job.submission_id or "" for job in jobs]
        raise ConfigError(
            f"job: wanted the id of a job at {self.address}, got {job_id}{nearest(job_id, known)}; "
            "`raybert jobs` lists them"
        )

    def log(self, job_id: str, *, patience_s: float = LOG_PATIENCE_S) -> str:
        """Return all that a job has printed; empty if the cluster no longer knows it.

        Raises: ResourceError if it cannot be read, because its node is gone for example.
        """

        def question() -> str | None:
            return _unless_unknown(self._client.get_job_logs, job_id)

        return self._ask(question, min(patience_s, self._patience_s)) or ""

    def tail(self, job_id: str) -> AsyncIterator[str]:
        """Stream a job's output from its beginning; the stream may end or fail at any time."""
        return self._client.tail_job_logs(job_id)

    def submit(self, **request: Any) -> None:
        """Start a job. Raises: AlreadySubmittedError; ConfigError if it cannot be sent."""
        try:
            self._ask(lambda: _unless_taken(self._client, request))
        except ValueError as error:
            raise ConfigError(
                f"working_dir: wanted a folder of at most 512 MiB ({error}): list what a job does "
                "not need in a file .rayignore there, or give a smaller folder"
            ) from error

    def stop(self, job_id: str) -> None:
        """Ask a job to stop, and return at once."""
        self._ask(lambda: self._client.stop_job(job_id))

    def has_package(self, uri: str) -> bool:
        """Whether the cluster has a package; if so, the cluster keeps it for some minutes."""
        return self._ask(lambda: self._client._package_exists(uri))

    def send_package(self, uri: str, path: str) -> None:
        """Store a file as a package of the cluster."""
        self._ask(lambda: self._client._upload_package(uri, path, False, is_file=True))

    def versions(self) -> dict[str, str]:
        """Return the versions of Python and Ray on the head."""
        answer = self._ask(lambda: self._get("/api/v0/cluster_metadata"))
        return {"python": answer["pythonVersion"], "ray": answer["rayVersion"]}

    def _get(self, path: str) -> dict[str, Any]:
        response = self._client._do_request("GET", path)
        if response.status_code != 200:
            self._client._raise_error(response)
        return response.json()["data"]

    def _ask(self, question: Callable[[], T], patience_s: float | None = None) -> T:
        """Return the answer to `question`, retrying until `patience_s` after the first failure."""
        from ray.exceptions import AuthenticationError
        from requests import RequestException

        patience_s = self._patience_s if patience_s is None else patience_s
        end_s: float | None = None
        while True:
            try:
                answer = question()
            except AuthenticationError as error:
                raise ResourceError(
                    f"the job server at {self.address} no longer accepts the token: correct "
                    "RAY_AUTH_TOKEN or ~/.ray/auth_token, and run the same command again"
                ) from error
            except (RequestException, RuntimeError) as error:
                is_away = isinstance(error, RequestException)
                if not is_away and not _is_a_servers(error):
                    raise ResourceError(f"the cluster did not accept it: {error}") from error
                reason = type(error).__name__ if is_away else last_line(str(error))[:200]
                now_s = time.monotonic()
                if now_s >= (now_s + patience_s if end_s is None else end_s):
                    raise ResourceError(
                        f"the job server at {self.address} has not answered for {patience_s:,.0f} "
                        f"s ({reason}): check the cluster, and run the same command again, or wait "
                        "longer with --patience"
                    ) from error
                if end_s is None:
                    end_s = now_s + patience_s
                    say(
                        f"the job server at {self.address} does not answer ({reason}): waiting for "
                        f"it, up to {patience_s:,.0f} s"
                    )
                time.sleep(RETRY_S)
            else:
                if end_s is not None:
                    say(f"the job server at {self.address} is back")
                return answer


def _is_a_servers(error: Exception) -> bool:
    """Whether the error is the server's, and may pass by itself, rather than the request's."""
    return bool(re.match(r"Request failed with status code 5\d\d", str(error)))


def _unless_unknown(call: Callable[[str], T], job_id: str) -> T | None:
    try:
        return call(job_id)
    except RuntimeError as error:
        if "status code 404" in str(error) and "does not exist" in str(error):
            return None
        raise


def _unless_taken(client: "JobSubmissionClient", request: dict[str, Any]) -> None:
    try:
        client.submit_job(**request)
    except RuntimeError as error:
        if "already exists" in str(error):
            raise AlreadySubmittedError(request["submission_id"]) from error
        if "exceeds the maximum size" in str(error):
            raise ValueError(last_line(str(error))[:200]) from error
        raise
