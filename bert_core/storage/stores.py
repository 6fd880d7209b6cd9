"""Creates obstore's client of a bucket: address, credentials and time-outs."""

import configparser
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from bert_core.errors import ConfigError
from bert_core.storage.config import StorageConfig
from bert_core.storage.location import Location

PIECE_BYTES = 8 << 20
# A piece that is transferred more slowly than this counts as failed.
_LEAST_BYTES_PER_S = 256 << 10
_BACKOFF = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2}
# Lifetime of credentials from a provider: obstore calls it again after that.
_CREDENTIALS_LAST = timedelta(minutes=5)
# Sources of credentials that obstore knows and that come before a profile.
_BEFORE_A_PROFILE = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_KEYS = ("aws_access_key_id", "aws_secret_access_key")


def store_of(
    location: Location,
    config: StorageConfig,
    environment: Mapping[str, str],
    *,
    sends: bool = False,
    retries: bool = False,
    address: str | None = None,
) -> Any:
    """Return a client of the bucket.

    Args:
        sends: whether requests have long bodies, so that an answer takes time.
        retries: whether obstore repeats requests by itself, as the parts of an upload need.
        address: sent to by all requests, instead of the bucket's (S3 only).
    Raises: ConfigError if the AWS profile does not exist, or its source of credentials cannot be
        read.
    """
    import obstore.store

    piece_s = config.timeout_s + PIECE_BYTES / _LEAST_BYTES_PER_S
    connection: dict[str, Any] = {
        "allow_http": (config.endpoint or "").startswith("http://"),
        "connect_timeout": timedelta(seconds=config.connect_timeout_s),
        "timeout": timedelta(seconds=piece_s),
    }
    if not sends:  # NOTE: the time-out includes the time to send a body
        connection["read_timeout"] = timedelta(seconds=config.timeout_s)
    options: dict[str, Any] = {
        "client_options": connection,
        "retry_config": {
            "max_retries": 1000 if retries else 0,
            "retry_timeout": timedelta(seconds=config.retry_s if retries else 0),
            "backoff": _BACKOFF,
        },
    }
    if config.anonymous:
        options["skip_signature"] = True
    client_of = getattr(obstore.store, location.scheme.client)
    if not location.scheme.is_s3:
        if config.endpoint:
            options[location.scheme.endpoint_option] = config.endpoint
        if location.account:
            options["account_name"] = location.account
        return client_of(location.bucket, **options)
    profile = None if config.anonymous else _Profile.of(environment)
    region = config.region or (profile and profile.region) or _region_of(location, config)
    if profile is not None:
        options["credential_provider"] = profile.provider(environment)
    return client_of(
        location.bucket,
        region=region,
        virtual_hosted_style_request=True,  # the address names the bucket
        endpoint=address or bucket_address(location, config, region),
        disable_bulk_delete=address is not None,
        **options,
    )


def bucket_address(location: Location, config: StorageConfig, region: str) -> str:
    """Return the address of an S3 bucket."""
    path_style = config.endpoint is not None if config.path_style is None else config.path_style
    endpoint = (config.endpoint or f"https://s3.{region}.amazonaws.com").rstrip("/")
    if path_style:
        return f"{endpoint}/{quote(location.bucket)}"
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{location.bucket}.{parts.netloc}{parts.path}"


def _region_of(location: Location, config: StorageConfig) -> str:
    """Return a bucket's region: Amazon says which it is; other servers accept any."""
    if config.endpoint is None:
        from pyarrow.fs import resolve_s3_region

        with suppress(OSError):  # missing or unreachable: the first request will fail
            return str(resolve_s3_region(location.bucket))
    return "us-east-1"


@dataclass(frozen=True)
class _Profile:
    """A profile of the AWS command line, which obstore does not read."""

    name: str
    settings: dict[str, str]
    region: str | None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "_Profile | None":
        """Return the profile that applies; None if there is none, or if other credentials take
        precedence."""
        if any(environment.get(name) for name in _BEFORE_A_PROFILE):
            return None
        name = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or "default"
        folder = Path.home() / ".aws"
        settings: dict[str, str] = {}
        for variable, file, section in (
            ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
            ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
        ):
            parser = configparser.RawConfigParser()
            parser.read(Path(environment.get(variable) or folder / file).expanduser())
            if parser.has_section(section):
                settings |= dict(parser.items(section))
        if settings:
            return cls(name, settings, settings.get("region"))
        if environment.get("AWS_PROFILE"):
            raise ConfigError(
                f"AWS_PROFILE is {name}: wanted a profile of ~/.aws/config or ~/.aws/credentials, "
                "there is none of this name: correct it, or unset it"
            )
        return None

    @property
    def has_keys(self) -> bool:
        return all(self.settings.get(key) for key in _KEYS)

    def provider(self, environment: Mapping[str, str]) -> Any:
        """Return the function that obstore calls for credentials, and calls again when they are
        about to expire; None if the profile has none."""
        if self.has_keys:
            return _Keys(self, environment)
        try:
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError as error:
            raise ConfigError(
                f"profile {self.name}: wanted {' and '.join(_KEYS)}, it names another source of "
                "credentials: install boto3, which knows them, or set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY"
            ) from error
        import boto3

        session = boto3.Session(profile_name=None if self.name == "default" else self.name)
        try:
            return Boto3CredentialProvider(session, ttl=_CREDENTIALS_LAST)
        except ValueError:  # the profile has no credentials, but perhaps a region
            return None


class _Keys:
    """Reads keys from a profile, again at each call, since another program may renew them."""

    def __init__(self, profile: _Profile, environment: Mapping[str, str]) -> None:
        self._profile, self._environment = profile, environment

    def __call__(self) -> dict[str, Any]:
        new = _Profile.of(self._environment)
        self._profile = new if new is not None and new.has_keys else self._profile
        return {
            "access_key_id": self._profile.settings["aws_access_key_id"],
            "secret_access_key": self._profile.settings["aws_secret_access_key"],
            "token": self._profile.settings.get("aws_session_token"),
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LAST,
        }
