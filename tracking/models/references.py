"""Parses a reference to a model, as a user writes it, and finds the local folder that it means.

A reference is, in this order:

- `models:/<name>@<alias>` or `models:/<name>/<version>`: of the registry (`Registered`);
- `hf://<owner>/<name>` or `hf://<owner>/<name>@<revision>`: of the Hugging Face hub (`OnHub`);
- any other URI (`s3://…`): a bundle, or a stage's output that contains one (`Remote`);
- a folder that exists: the same (`Folder`);
- `<owner>/<name>` or `<owner>/<name>@<revision>`: a model of the hub, and so is a bare `<name>` if
  the hub has it. A text that begins with `.`, `/` or `~`, or has more slashes, names no such model.

A reference is parsed once, where it enters; from there on, code passes the parsed value.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bert_core import files
from bert_core.cache import Cache
from bert_core.errors import ConfigError, FormatError, ResourceError
from tracking.cache import local_cache
from tracking.models import hub
from tracking.models.downloads import (
    bundle_in,
    cached,
    download,
    fetch_remote,
    stored_bytes,
    verify,
)
from tracking.models.folders import FetchedFolder
from tracking.models.registry import DIGEST_TAG, PATH_TAG
from tracking.store.server import connect, refusals_told, tracking_uri, without_password

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

    from bert_core.data.tokenizer import Tokenizer

_REGISTERED = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")


class Reference(ABC):
    """Which model is meant: a `Registered`, `OnHub`, `Remote` or `Folder`. `str` returns the text
    that was parsed."""

    @staticmethod
    def parse(text: str | Path) -> "Registered | OnHub | Remote | Folder":
        """Return the value of a reference in the grammar of this module.

        This asks neither the registry nor the hub; it only checks whether the folder exists.
        Raises: ConfigError if it is empty, or begins like a reference to the registry but is not
            valid.
        """
        text = str(text)
        if not text:
            raise ConfigError("wanted the folder of a bundle, got an empty string")
        if text.startswith("models:"):
            registered = Registered.match(text)
            if registered is None:
                raise ConfigError(
                    f"{text}: wanted models:/<name>@<alias> or models:/<name>/<version>, such as "
                    "models:/docstrings@champion"
                )
            return registered
        model = hub.parse(text)
        if model is not None and (text.startswith(hub.PREFIX) or not Path(text).exists()):
            return OnHub(model, text)
        if files.is_uri(text) and not text.lower().startswith("file:"):
            return Remote(text)
        return Folder(text)

    @abstractmethod
    def __str__(self) -> str: ...

    def pinned(self, *, uri: str | None = None) -> "Reference":
        """Return the same reference, fixed to the version that an alias means now, or to the
        current commit of a model of the hub; a reference that has neither is returned unchanged.

        Args:
            uri: URI of the registry; None as in `tracking.store.server.tracking_uri`.
        Raises: ConfigError if there is no such version or commit; ResourceError if the registry or
            the hub does not answer.
        """
        return self

    @abstractmethod
    def fetch(self, *, uri: str | None = None, cache: Cache | None = None) -> Path:
        """Return the local folder of the bundle, downloaded if necessary, and verified.

        A download is kept until this process ends, or calls `downloads.release`.

        Args:
            uri: URI of the registry; None as in `tracking.store.server.tracking_uri`.
            cache: where downloads are kept; None means `local_cache()`.
        Raises: ConfigError if there is no such bundle, listing what exists; FormatError if it is
            damaged, or a model of the hub is not an encoder; ResourceError if the registry or the
            hub does not answer, or the disk is too full.
        """

    def tokenizer(self) -> "Tokenizer":
        """Return the tokenizer of the model; from the hub, only the tokenizer's files are fetched.

        Raises: FormatError if there is none; ConfigError or ResourceError as `fetch` does, for
            models of the hub.
        """
        return _load_tokenizer(str(self))


@dataclass(frozen=True)
class Registered(Reference):
    """A version of a registered model."""

    name: str
    alias: str | None = None
    version: str | None = None
    """Its number; None if the alias says which."""

    @staticmethod
    def match(text: str) -> "Registered | None":
        """Return the version that a text refers to; None if it refers to something else."""
        parts = _REGISTERED.fullmatch(text)
        return None if parts is None else Registered(**parts.groupdict())

    def __str__(self) -> str:
        which = f"/{self.version}" if self.alias is None else f"@{self.alias}"
        return f"models:/{self.name}{which}"

    def at(self, version: str) -> "Registered":
        """Return the reference to another version of the same model."""
        return Registered(self.name, version=version)

    def pinned(self, *, uri: str | None = None) -> "Registered":
        if self.alias is None:
            return self
        place = tracking_uri(uri)
        with refusals_told(place):
            return self.at(str(self._find(place).version))

    def fetch(self, *, uri: str | None = None, cache: Cache | None = None) -> Path:
        uri = tracking_uri(uri)
        client = connect(uri)
        with refusals_told(uri):
            version = self._find(uri)
        if not (digest := version.tags.get(DIGEST_TAG)):
            raise FormatError(
                f"{self}: version {version.version} has no bundle, it was not registered by "
                "raybert: publish one with `raybert publish`"
            )
        stored = client.get_model_version_download_uri(version.name, version.version)
        source = files.join(stored, version.tags[PATH_TAG])

        def check(folder: Path) -> None:
            if (actual := verify(folder)) != digest:
                raise FormatError(
                    f"{self}: wanted the bundle with digest {digest[:12]} that was registered, "
                    f"{folder} has {actual[:12]}: publish the bundle again"
                )

        # A registry in a SQLite file keeps bundles on this disk: no copy is needed.
        local = files.local_path(source) if source.startswith(("/", "file:")) else None
        if local is not None:
            check(local)
            return local
        folder = cached(
            cache or local_cache(),
            digest,
            lambda: stored_bytes(source, uri),
            lambda arriving: download(source, uri, arriving),
            check,
        )
        return FetchedFolder.of(folder, partial(self.at(str(version.version)).fetch, uri=uri))

    def _find(self, uri: str) -> "ModelVersion":
        from mlflow.exceptions import MlflowException

        client, store = connect(uri), without_password(uri)
        try:
            model = client.get_registered_model(self.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            names = sorted(model.name for model in client.search_registered_models())
            raise ConfigError(
                f"{self}: no model {self.name!r} is registered in {store}, there are: "
                f"{_listed(names)}: give one of them, or the store that has it "
                "(MLFLOW_TRACKING_URI, or --tracking_uri)"
            ) from None
        version = self.version
        if self.alias is not None:
            if self.alias not in model.aliases:
                raise ConfigError(
                    f"{self}: model {self.name} in {store} has no alias {self.alias!r}, it has: "
                    f"{_listed(sorted(model.aliases))}"
                )
            version = str(model.aliases[self.alias])
        found = client.search_model_versions(f"name = '{self.name}'")
        versions = {str(entity.version): entity for entity in found}
        if version not in versions:
            raise ConfigError(
                f"{self}: model {self.name} in {store} has no version {version}, it has: "
                f"{_listed(sorted(versions, key=int))}"
            )
        return versions[version]


@dataclass(frozen=True)
class OnHub(Reference):
    """A model of the Hugging Face hub."""

    model: hub.HubModel
    text: str
    """As it was given: with `hf://`, no folder can be meant."""

    def __str__(self) -> str:
        return self.text

    @property
    def uri(self) -> str:
        """The same reference with `hf://`, which means this model even if a folder has the same
        name."""
        return f"{hub.PREFIX}{self.model}"

    def pinned(self, *, uri: str | None = None) -> "OnHub":
        try:
            model = hub.pin(self.model)
        except (hub.MissingModelError, ResourceError) as error:
            if self.text.startswith(hub.PREFIX):
                raise
            why = str(error).removeprefix(f"{self.model}: ")
            hint = files.similar(self.text)
            raise type(error)(f"{self}: there is no folder {self}{hint}, and {why}") from error
        return OnHub(model, str(model))

    def fetch(self, *, uri: str | None = None, cache: Cache | None = None) -> Path:
        folder = hub.fetch(self.pinned().model)
        verify(folder)
        return folder

    def tokenizer(self) -> "Tokenizer":
        return _load_tokenizer(hub.fetch(self.pinned().model, tokenizer_only=True))


@dataclass(frozen=True)
class Remote(Reference):
    """A bundle at a URI, or in the output of a stage there."""

    text: str

    def __str__(self) -> str:
        return self.text

    def fetch(self, *, uri: str | None = None, cache: Cache | None = None) -> Path:
        _local_path(self.text)
        return FetchedFolder.of(fetch_remote(self.text, cache or local_cache()), self.fetch)


@dataclass(frozen=True)
class Folder(Reference):
    """A bundle's folder on this machine, or the output of a stage that contains a bundle."""

    text: str

    def __str__(self) -> str:
        return self.text

    def absolute(self) -> "Folder":
        """Return the same reference with an absolute path, for processes that run in another
        folder; unchanged if the folder does not exist."""
        return Folder(files.absolute(self.text)) if Path(self.text).is_dir() else self

    def fetch(self, *, uri: str | None = None, cache: Cache | None = None) -> Path:
        folder = _local_path(self.text)
        if folder is None or not folder.is_dir():
            found = "a file" if folder is not None and folder.exists() else "nothing there"
            raise ConfigError(
                f"{self}: wanted the folder of a bundle, got {found}{files.similar(self.text)}: "
                "give a folder, a URI such as s3://bucket/bundle, models:/<name>@champion, or "
                "<owner>/<name> on the Hugging Face hub"
            )
        folder = Path(bundle_in(self, str(folder)))
        verify(folder)
        return folder


def _load_tokenizer(folder: str | Path) -> "Tokenizer":
    # Imported late since most code that uses references needs no tokenizer.
    from bert_core.data.tokenizer import Tokenizer

    return Tokenizer.load(folder)


def _local_path(text: str) -> Path | None:
    """Return the path on this machine; None if it is remote. Raises: ConfigError if nothing opens
    it."""
    try:
        return files.local_path(text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{text}: wanted a folder, or a URI that can be reached: {error}"
        ) from error


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none; `raybert publish` registers one"
