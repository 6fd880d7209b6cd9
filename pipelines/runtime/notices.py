"""Notices that this machine is about to be reclaimed: by a cloud's metadata service, or by a file.

What each service answers is specified by its cloud:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
https://cloud.google.com/compute/docs/instances/create-use-preemptible
https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

METADATA = "http://169.254.169.254"
"""Where all three clouds answer a machine about itself; nothing is routed there."""
ANSWER_TIMEOUT_S = 2.0
AWS_TOKEN_TTL_S = 21_600
GOOGLE_GRACE_S = 30.0
AZURE_EVENTS = ("Preempt", "Terminate", "Reboot", "Redeploy")


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A machine is about to be reclaimed."""

    reason: str
    seconds: float | None = None
    """Until it is gone; None if the notice does not say."""


def aws() -> Notice | None:
    """Return a spot instance's notice, two minutes ahead; None if there is none.

    Raises: OSError if the service does not answer.
    """
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_TTL_S)}
    token = _ask("/latest/api/token", ttl, method="PUT")
    try:
        answer = _ask("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    except FileNotFoundError:
        return None
    action = json.loads(answer)
    ends = datetime.fromisoformat(action["time"].replace("Z", "+00:00"))
    return Notice(reason=f"AWS: {action['action']} at {action['time']}", seconds=_until(ends))


def gcp() -> Notice | None:
    """Return a spot VM's notice, 30 s ahead; None if there is none. Raises: OSError if the service
    does not answer."""
    path = "/computeMetadata/v1/instance/preempted"
    if _ask(path, {"Metadata-Flavor": "Google"}).strip() != "TRUE":
        return None
    return Notice(reason="Google Cloud: preempted", seconds=GOOGLE_GRACE_S)


def azure() -> Notice | None:
    """Return a spot or scale set VM's notice, 30 s or minutes ahead; None if there is none.

    Raises: OSError if the service does not answer.
    """
    metadata = {"Metadata": "true"}
    version = "api-version=2020-07-01"
    events = json.loads(_ask(f"/metadata/scheduledevents?{version}", metadata))["Events"]
    events = [event for event in events if event["EventType"] in AZURE_EVENTS]
    if not events:
        return None
    name = _ask(f"/metadata/instance/compute/name?{version}&format=text", metadata).strip()
    for event in events:
        if name in event["Resources"]:  # the service also lists notices of the set's other machines
            seconds = None
            with suppress(ValueError):  # empty once it has begun
                seconds = _until(parsedate_to_datetime(event["NotBefore"]))
            return Notice(reason=f"Azure: {event['EventType']}", seconds=seconds)
    return None


CLOUDS: dict[str, Callable[[], Notice | None]] = {"aws": aws, "gcp": gcp, "azure": azure}


def source(name: str) -> Callable[[], Notice | None]:
    """Return a function that looks for a notice: from a cloud, given its name, or from a file that
    appears, given its path."""
    if name in CLOUDS:
        return CLOUDS[name]
    return lambda: Notice(reason=f"{name} was created") if Path(name).exists() else None


def _until(moment: datetime) -> float:
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, moment.timestamp() - time.time())


def _ask(path: str, headers: dict[str, str], *, method: str = "GET") -> str:
    """Return the service's answer.

    Raises: FileNotFoundError for 404; another OSError for any other error, or no answer.
    """
    request = urllib.request.Request(METADATA + path, headers=headers, method=method)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=ANSWER_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            raise (FileNotFoundError if error.code == 404 else OSError)(str(error)) from error
