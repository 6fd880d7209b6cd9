"""`raybert serve keys`: create, list and revoke API keys."""

from dataclasses import dataclass
from typing import Literal

from bert_core import files
from bert_core.checks import PositiveInt, check_fields
from bert_core.errors import ConfigError
from serve.config import NAME
from serve.request import auth


@dataclass(frozen=True, kw_only=True)
class KeysConfig:
    """Create, list or revoke API keys: `raybert serve keys create NAME --keys FILE`."""

    what: Literal["create", "list", "revoke"]
    """The action; may be given without its name, first."""
    name: str | None = None
    """Name of the key's owner; may be given without its name, second."""
    keys: str
    """The file of keys, a path or a URI, that `raybert serve --keys` is given. It holds hashes."""
    models: str | None = None
    """The models that the key may use, comma-separated; by default all."""
    expires: str | None = None
    """The last day on which the key is valid, in UTC, as 2027-01-31; by default it has no end."""
    requests_per_minute: PositiveInt | None = None
    """Maximum requests per minute and replica; by default unlimited."""
    tokens_per_minute: PositiveInt | None = None
    """Maximum tokens per minute and replica; by default unlimited."""

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.name is None) != (self.what == "list"):
            wanted = "no name to list keys" if self.what == "list" else f"a name to {self.what}"
            raise ConfigError(f"name: wanted {wanted}, got {self.name or 'none'}")


def run(config: KeysConfig) -> None:
    """Raises: ConfigError if the key to create exists or the one to revoke does not, if `models`
    has something that cannot be a model's name, or if the key would have expired already."""
    if config.what == "list":
        keys = auth.read_keys(config.keys) if files.exists(config.keys) else []
        for key in keys:
            print(_line(key))
        return
    name = config.name
    assert name is not None
    if config.what == "revoke":
        auth.change_keys(config.keys, lambda keys: auth.without(keys, name))
        print(f"revoked the key of {name}: servers refuse it within {auth.REREAD_S:.0f} s")
        return
    shown, key = auth.create(
        name,
        models=None if config.models is None else _names(config.models),
        expires=config.expires,
        requests_per_minute=config.requests_per_minute,
        tokens_per_minute=config.tokens_per_minute,
    )
    if key.is_expired:
        raise ConfigError(f"expires: wanted today or a later day, in UTC, got {key.expires}")
    auth.change_keys(config.keys, lambda keys: auth.added(keys, key))
    print(f"the key of {key.name}, which is shown only now:\n{shown}")


def _names(models: str) -> list[str]:
    names = [name.strip() for name in models.split(",")]
    for name in names:
        if not NAME.fullmatch(name):
            raise ConfigError(
                "models: wanted names of models, comma-separated, of letters, digits, dots, dashes "
                f"and underscores, got {name!r}: leave it out to allow all"
            )
    return names


def _line(key: auth.Key) -> str:
    models = "all models" if key.models is None else ", ".join(key.models)
    per_minute = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
    limits = [f"{limit} {what} per minute" for what, limit in per_minute.items() if limit]
    ends = "no end" if key.expires is None else f"until {key.expires}"
    return f"{key.name}: {'; '.join([models, *limits, ends])}"
