"""The URI schemes of object stores: one entry each, with what differs between them.

Requests are made by `bert_core.storage`, with the client that an entry names.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A kind of object store."""

    name: str
    """As locations and errors write it."""
    other_names: tuple[str, ...] = ()
    """Further spellings in a URI."""
    server: str
    """Where its buckets are unless an endpoint is set, as errors say it."""
    client: str
    """The class in `obstore.store`."""
    endpoint_option: str = "endpoint"
    """The client's argument for the address of another server."""
    variables: str
    """Prefix of the environment variables of its own programs."""
    credentials: str
    """The variables that hold credentials, as errors list them."""
    version: Literal["e_tag", "version"] = "e_tag"
    """The field of an object's metadata that a conditional write compares."""
    is_s3: bool = False
    """Whether it has Amazon's variables, profiles and regions, and lists unfinished uploads."""
    names_account: bool = False
    """Whether a URI may name the account: `container@account.server`."""


_ALL = (
    Scheme(
        name="s3",
        server="Amazon S3",
        client="S3Store",
        variables="AWS_",
        credentials=(
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (with AWS_SESSION_TOKEN), or AWS_PROFILE"
        ),
        is_s3=True,
    ),
    Scheme(
        name="gs",
        other_names=("gcs",),
        server="Google",
        client="GCSStore",
        endpoint_option="base_url",
        variables="GOOGLE_",
        credentials="GOOGLE_APPLICATION_CREDENTIALS",
        version="version",
    ),
    Scheme(
        name="az",
        other_names=("abfs", "abfss"),
        server="Azure",
        client="AzureStore",
        variables="AZURE_",
        credentials="AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
        names_account=True,
    ),
)

SCHEMES: dict[str, Scheme] = {
    spelling: scheme for scheme in _ALL for spelling in (scheme.name, *scheme.other_names)
}
