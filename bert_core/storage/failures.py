"""Failed requests: whether to repeat them, how to describe them, and what the user can do.

obstore's errors are plain text; the statuses, S3's error codes and times are parsed from it.
"""

import re
from dataclasses import dataclass

from bert_core.errors import ResourceError
from bert_core.storage.config import PREFIX, StorageConfig
from bert_core.storage.location import Location

_STATUS = re.compile(r"status code: (\d{3})([\w ]*)")
_REGION = re.compile(r"<Region>([\w-]+)</Region>")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_ELAPSED = re.compile(r" in ([\d.]+)(ns|µs|ms|s)\b")
_RETRIES = re.compile(r"after (\d+) retries")
_DETAIL = re.compile(r'(?:message|error): "([^"]+)"')
_UNITS_S = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_DEBUG = "\n\nDebug source:"
# Addresses from which obstore gets credentials.
_OF_CREDENTIALS = (
    "/latest/api/token",
    "/latest/meta-data/iam",
    "//169.254.170.2/",
    "//sts.",
    "/computeMetadata/",
    "/metadata/identity",
)

# A request that timed out, or that was damaged on its way: to be sent again unchanged.
_SEND_AGAIN = ("RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch")
# The upload was completed or aborted while the answer was on its way: to be started again.
_UPLOAD_GONE = "NoSuchUpload"
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_OTHER_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint")
_CREDENTIALS = (
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken",
    "AuthenticationFailed",  # on Azure
)  # fmt: skip
# An invalid address, a certificate that is not trusted, a server without range requests.
_FINAL = ("kind: Builder", "certificate", "non-partial response")
# obstore's errors about a request itself, not about an answer.
_MISUSES = ("InvalidPathError", "NotSupportedError", "UnknownConfigurationKeyError")


@dataclass(frozen=True)
class Failure:
    """One failed request."""

    status: int | None
    """HTTP status of the answer; None if there was none."""
    code: str
    """S3's word for it, such as `SlowDown`; empty if the answer has none."""
    reason: str
    region: str
    """The bucket's region, if S3 says that another was used."""
    elapsed_s: float
    retries: int
    """Retries by obstore, before it gave up."""
    is_connecting: bool
    """Whether no connection was made."""
    lacks_credentials: bool
    """Whether the request for credentials failed."""
    is_permanent: bool
    lacks_object: bool
    """Whether the object is missing, and not the bucket or the upload of a part."""

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Parse obstore's error."""
        text, _, debug = str(error).partition(_DEBUG)
        number = _STATUS.search(text)
        status = int(number[1]) if number else None
        code = _first(_CODE, text)
        is_redirect = "Received redirect" in text or (status is not None and 300 <= status < 400)
        if is_redirect:
            status, code = status or 301, code or "PermanentRedirect"
        phrase = number[2].strip() if number else ""
        message = " ".join(_first(_MESSAGE, text).split())
        words = [str(status or ""), code or phrase, f"({message})" if message else ""]
        reason = " ".join(word for word in words if word) or _transport(text, debug)
        lacks_credentials = any(word in text for word in _OF_CREDENTIALS)
        elapsed = _ELAPSED.search(text)
        is_permanent = (
            isinstance(error, ValueError | NotImplementedError)
            or type(error).__name__ in _MISUSES
            or _is_permanent(status, code, text, debug)
        )
        return cls(
            status=status,
            code=code,
            reason=f"no credentials ({reason})" if lacks_credentials else reason,
            region=_first(_REGION, text),
            elapsed_s=float(elapsed[1]) * _UNITS_S[elapsed[2]] if elapsed else 0.0,
            retries=int(_first(_RETRIES, text) or 0),
            is_connecting=status is None and ("kind: Connect," in debug or lacks_credentials),
            lacks_credentials=lacks_credentials,
            is_permanent=is_permanent,
            lacks_object=isinstance(error, FileNotFoundError)
            and is_permanent
            and code not in _NO_BUCKET,
        )

    @property
    def is_conflict(self) -> bool:
        """Whether another write of the same object was under way."""
        return self.code in ("ConditionalRequestConflict", "OperationAborted")

    @property
    def lacks_bucket(self) -> bool:
        """Whether the bucket is missing, and not just the object."""
        return self.code in _NO_BUCKET


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


def _transport(text: str, debug: str) -> str:
    """Say why there was no answer."""
    details = _DETAIL.findall(debug)
    if "kind: Connect," in debug:
        return f"no connection ({details[-1]})" if details else "no connection"
    if "TimedOut" in debug or "kind: Timeout" in debug:
        return "no answer in time"
    if "HttpError" in debug:
        return f"the connection broke ({details[-1] if details else text.rpartition(' - ')[2]})"
    return " ".join(text.split())


def _is_permanent(status: int | None, code: str, text: str, debug: str) -> bool:
    if code in _OTHER_REGION:
        return True
    if status is None:
        return any(word in text + debug for word in _FINAL)
    if status == 501:  # not implemented
        return True
    if status >= 500 or status in (200, 206, 408, 409, 429):
        return False
    return code not in (*_SEND_AGAIN, _UPLOAD_GONE)


def error_of(
    location: Location,
    config: StorageConfig,
    failure: Failure,
    *,
    verb: str,
    attempts: int,
    seconds: float,
) -> ResourceError:
    """Return the error to show to the user.

    Args:
        verb: what could not be done: `read`, `written`, `listed`, `removed`.
        attempts: how often the request was made.
        seconds: how long it took in all.
    """
    times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    resumes = "; finished work is kept: the same command continues from there"
    return ResourceError(
        f"{location.uri}: could not be {verb}: {failure.reason}, {times} in {seconds:.1f} s, "
        f"bucket {location.bucket!r}, key {location.key!r}: "
        f"{_way_out(location, config, failure, verb)}{resumes if verb == 'written' else ''}"
    )


def given_up(location: Location, verb: str) -> ResourceError:
    """Return the error for a request that is not made, because others have failed for too long."""
    return ResourceError(
        f"{location.uri}: could not be {verb}: the store does not answer, and this process is "
        "stopping: run the same command again when it answers"
    )


def _way_out(location: Location, config: StorageConfig, failure: Failure, verb: str) -> str:
    where = config.endpoint or location.scheme.server
    address = f"{'AWS_ENDPOINT_URL or ' if location.scheme.is_s3 else ''}{PREFIX}ENDPOINT"
    credentials = location.scheme.credentials
    if failure.lacks_credentials:
        return (
            f"set {credentials}, run on a machine with a role, or set {PREFIX}ANONYMOUS=true for a "
            "public bucket (docs/storage.md)"
        )
    if failure.lacks_bucket:
        return (
            f"there is no bucket {location.bucket!r} at {where}: check the address, create it, or "
            f"set {address} to another server"
        )
    if failure.code in _OTHER_REGION:
        return (
            f"the bucket is in another region than {config.region or 'us-east-1'}: set AWS_REGION "
            f"or {PREFIX}REGION to {failure.region or 'its own'}"
        )
    if failure.code == "RequestTimeTooSkewed":
        return "this machine's clock differs from the server's by minutes: set it"
    if failure.code in _CREDENTIALS or failure.status == 401:
        return f"the credentials are wrong or have expired: correct {credentials}"
    if failure.status == 403:
        doing = {"written": "write to", "listed": "list", "removed": "delete from"}.get(
            verb, "read"
        )
        return (
            f"these credentials may not {doing} it: grant them that, or give others, or another "
            "bucket"
        )
    if failure.status == 501:
        return f"the server at {where} lacks this operation: give a bucket on another one"
    if failure.status == 412:
        return "it was replaced while it was read: run the same command again"
    if failure.is_connecting:
        return f"nothing was reached at {where}: check the network, and {address}"
    if failure.is_permanent:
        return "check the address and your permissions"
    return (
        "the server is overloaded or away: run the same command again later, or set "
        f"{PREFIX}RETRY_S ({config.retry_s:g}) to wait for it longer"
    )
