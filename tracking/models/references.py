"""Any reference to a bundle → a local folder with verified files.

A reference is, in this order:

- `models:/<name>@<alias>` or `models:/<name>/<version>`: of the registry;
- `hf://<owner>/<name>` or `hf://<owner>/<name>@<revision>`: a model of the Hugging Face hub;
- any other URI (`s3://…`): a bundle, or a stage's output that contains one;
- a folder that exists: the same;
- `<owner>/<name>` or `<owner>/<name>@<revision>`: a model of the hub, and so is a bare `<name>` if
  the hub has it. Nothing that begins with `.`, `/` or `~` or has more slashes is one.
"""

import hashlib
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bert_core import files
from bert_core.cache import BUNDLES, Cache, CacheEntry
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import ConfigError, FormatError, ResourceError
from bert_core.manifest import BUNDLE, folder_with
from tracking.cache import cache_folder, local_cache
from tracking.models import hub
from tracking.models.folders import FetchedFolder
from tracking.models.registry import DIGEST_TAG, PATH_TAG
from tracking.store.server import connect, refusals_told, tracking_uri, without_password

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.store.artifact.artifact_repo import ArtifactRepository

CONFIG, RECORD = "config.json", "raybert.json"
_REGISTERED = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")
_HELD: defaultdict[Path, list[CacheEntry]] = defaultdict(list)
"""What of the cache this process uses."""


def resolve(reference: str | Path, *, uri: str | None = None, cache: Cache | None = None) -> Path:
    """The local folder of a bundle, downloaded if necessary, and verified.

    What was downloaded stays until this process ends, or says `release`.

    Args:
        reference: in the grammar of this module.
        uri: URI of the registry, for `models:/`; None as in `tracking.runs.recorder.tracking_uri`.
        cache: where downloads are kept; None means `local_cache()`.
    Raises: ConfigError if the reference does not exist, with what does; FormatError if the
        bundle is damaged, or a model of the hub is not an encoder; ResourceError if the registry or
        the hub does not answer, or the disk is too full.
    """
    text = str(reference)
    if not text:
        raise ConfigError("wanted the folder of a bundle, got an empty string")
    cache = cache or local_cache()
    if text.startswith("models:"):
        return _resolve_registered(text, tracking_uri(uri), cache)
    if (model := hub_model(text)) is not None:
        fetched = hub.fetch(_pinned(model, text))
        _verify(fetched)
        return fetched
    try:
        folder = files.local_path(text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{text}: wanted a folder, or a URI that can be reached: {error}"
        ) from error
    if folder is None:
        return FetchedFolder.of(fetch_remote(text, cache), partial(resolve, text, uri=uri))
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing there"
        raise ConfigError(
            f"{text}: wanted the folder of a bundle, got {found}{files.similar(text)}: give a "
            "folder, a URI such as s3://bucket/bundle, models:/<name>@champion, or <owner>/<name> "
            "on the Hugging Face hub"
        )
    folder = Path(_bundle_in(text, str(folder)))
    _verify(folder)
    return folder


def release(folder: Path) -> None:
    """This process no longer needs a folder that `resolve` gave it."""
    if entries := _HELD.get(folder):
        entries.pop().close()


def _held(entry: CacheEntry) -> Path:
    _HELD[entry.path].append(entry)
    return entry.path


def hub_model(reference: str) -> hub.HubModel | None:
    """The model of the hub that a reference means; None if it means something else."""
    model = hub.parse(reference)
    if model is None or reference.startswith(hub.PREFIX):
        return model
    return None if Path(reference).exists() else model


def pinned(reference: str) -> str:
    """The reference, with its commit if it means a model of the hub: `<owner>/<name>@<commit>`.

    Raises: ConfigError or ResourceError as `resolve` does.
    """
    model = hub_model(reference)
    return reference if model is None else str(_pinned(model, reference))


def registered_version(reference: str, *, uri: str | None = None) -> str | None:
    """The version of the registry that a reference means now; None if it is none of the registry.

    Raises: ConfigError if there is none; ResourceError if the registry does not answer.
    """
    parts = _REGISTERED.fullmatch(reference)
    if parts is None:
        return None
    place = tracking_uri(uri)
    with refusals_told(place):
        found = _find_version(place, reference, **parts.groupdict())
    return str(found.version)


@dataclass(frozen=True)
class Served:
    """A version of the registry that has answered requests."""

    version: str
    digest: str


def remember_served(version: Served, reference: str, deployed: str | None, *, uri: str) -> None:
    """Keep on this machine which version of a reference has answered.

    Args:
        deployed: digest of what the reference meant when the server was deployed: what another
            deployment served says nothing about this one.
    Raises: OSError.
    """
    path = _served_path(reference, deployed, uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(str(path), asdict(version))


def last_served(reference: str, deployed: str | None, *, uri: str) -> Served | None:
    """What was remembered last; None for nothing."""
    with suppress(OSError, ValueError, TypeError):
        return Served(**files.read_json(str(_served_path(reference, deployed, uri))))
    return None


def _served_path(reference: str, deployed: str | None, uri: str) -> Path:
    # A digest, since the URI may hold a password.
    key = "\n".join([uri, reference, deployed or ""])
    name = f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    return cache_folder() / "served" / name


def at_version(reference: str, version: str) -> str:
    """The reference to a version of the same registered model."""
    parts = _REGISTERED.fullmatch(reference)
    assert parts is not None
    return f"models:/{parts['name']}/{version}"


def is_alias(reference: str) -> bool:
    """Whether it names a version of the registry by an alias, which may move."""
    parts = _REGISTERED.fullmatch(reference)
    return parts is not None and parts["alias"] is not None


def load_tokenizer(reference: str) -> Tokenizer:
    """The tokenizer in a folder or at a URI; of a model of the hub, only its tokenizer is fetched.

    Raises: FormatError if there is none; ConfigError or ResourceError as `resolve` does, for models
        of the hub.
    """
    model = hub_model(reference)
    if model is None:
        return Tokenizer.load(reference)
    return Tokenizer.load(hub.fetch(_pinned(model, reference), tokenizer_only=True))


def _pinned(model: hub.HubModel, reference: str) -> hub.HubModel:
    """`hub.pin`, whose errors say what else the reference could have meant."""
    try:
        return hub.pin(model)
    except (hub.MissingModelError, ResourceError) as error:
        if reference.startswith(hub.PREFIX):
            raise
        why = str(error).removeprefix(f"{model}: ")
        hint = files.similar(reference)
        raise type(error)(
            f"{reference}: there is no folder {reference}{hint}, and {why}"
        ) from error


def _bundle_in(reference: str, folder: str) -> str:
    """Where in the folder or URI the bundle is."""
    bundle = folder_with(folder, CONFIG, RECORD)
    if bundle is None:
        raise ConfigError(
            f"{reference}: wanted a bundle, there is neither {CONFIG} nor {BUNDLE}/{CONFIG} in it: "
            "give the folder of a bundle, or the output of a finished stage that makes one"
        )
    return bundle


def _verify(folder: Path) -> str:
    # Imported late because it imports torch.
    from bert_core.bundle.format import bundle_digest

    return bundle_digest(folder)


def fetch_remote(source: str, cache: Cache) -> Path:
    """The bundle at a URI, in the cache; fetched again where the copy is damaged."""
    if not files.exists(source):
        raise ConfigError(f"{source}: wanted a bundle, got nothing there: check the URI")
    source = _bundle_in(source, source)
    record = files.join(source, RECORD)
    # The record has the sha256 of every file: equal records mean equal bundles.
    key = files.sha256_of(record) if files.exists(record) else None

    def size_bytes() -> int:
        return sum(files.size_bytes(path) for path in files.find_files(source))

    return cached(cache, key, size_bytes, lambda folder: files.fetch_folder(source, folder))


def _resolve_registered(reference: str, uri: str, cache: Cache) -> Path:
    parts = _REGISTERED.fullmatch(reference)
    if parts is None:
        raise ConfigError(
            f"{reference}: wanted models:/<name>@<alias> or models:/<name>/<version>, such as "
            "models:/docstrings@champion"
        )
    client = connect(uri)
    with refusals_told(uri):
        version = _find_version(uri, reference, **parts.groupdict())
    if not (digest := version.tags.get(DIGEST_TAG)):
        raise FormatError(
            f"{reference}: version {version.version} has no bundle, it was not registered by "
            "raybert: publish one with `raybert publish`"
        )
    stored = client.get_model_version_download_uri(version.name, version.version)
    source = files.join(stored, version.tags[PATH_TAG])
    # A registry in a SQLite file keeps bundles on this disk: no copy is needed.
    local = files.local_path(source) if source.startswith(("/", "file:")) else None

    def verify(folder: Path) -> None:
        if (actual := _verify(folder)) != digest:
            raise FormatError(
                f"{reference}: wanted the bundle with digest {digest[:12]} that was registered, "
                f"{folder} has {actual[:12]}: publish the bundle again"
            )

    if local is not None:
        verify(local)
        return local
    folder = cached(
        cache,
        digest,
        lambda: stored_bytes(source, uri),
        lambda arriving: download(source, uri, arriving),
        verify,
    )
    pinned = at_version(reference, str(version.version))
    return FetchedFolder.of(folder, partial(resolve, pinned, uri=uri))


def downloaded(digest: str, *, cache: Cache | None = None) -> Path | None:
    """The folder of a registered bundle that was downloaded before; None if it was not."""
    entry = (cache or local_cache()).find(f"{BUNDLES}/{digest}")
    if entry is not None:
        with suppress(FormatError):
            if _verify(entry.path) == digest:
                return _held(entry)
    return None


def download(source: str, uri: str, folder: Path) -> None:
    """Fetch a bundle that an MLflow server stores; a download that fails leaves nothing.

    Raises: whatever MLflow raises.
    """
    from mlflow.artifacts import download_artifacts

    # MLflow downloads into a subfolder of `dst_path`.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fetched = download_artifacts(artifact_uri=source, dst_path=scratch, tracking_uri=uri)
        os.rename(fetched, folder)


def stored_bytes(source: str, uri: str) -> int:
    """The size of what an MLflow server stores, as far as it says."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    return _size_bytes(get_artifact_repository(source, tracking_uri=uri))


def _size_bytes(stored: "ArtifactRepository", path: str | None = None) -> int:
    return sum(
        _size_bytes(stored, each.path) if each.is_dir else each.file_size or 0
        for each in stored.list_artifacts(path)
    )


def _find_version(
    uri: str, reference: str, name: str, alias: str | None, version: str | None
) -> "ModelVersion":
    from mlflow.exceptions import MlflowException

    client, store = connect(uri), without_password(uri)
    try:
        model = client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        names = sorted(model.name for model in client.search_registered_models())
        raise ConfigError(
            f"{reference}: no model {name!r} is registered in {store}, there are: "
            f"{_listed(names)}: give one of them, or the store that has it (MLFLOW_TRACKING_URI, "
            "or --tracking_uri)"
        ) from None
    if alias is not None:
        if alias not in model.aliases:
            raise ConfigError(
                f"{reference}: model {name} in {store} has no alias {alias!r}, it has: "
                f"{_listed(sorted(model.aliases))}"
            )
        version = str(model.aliases[alias])
    assert version is not None
    versions = {
        str(entity.version): entity for entity in client.search_model_versions(f"name = '{name}'")
    }
    if version not in versions:
        raise ConfigError(
            f"{reference}: model {name} in {store} has no version {version}, it has: "
            f"{_listed(sorted(versions, key=int))}"
        )
    return versions[version]


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none; `raybert publish` registers one"


def cached(
    cache: Cache,
    key: str | None,
    size_bytes: Callable[[], int],
    fetch: Callable[[Path], object],
    verify: Callable[[Path], object] = _verify,
) -> Path:
    """The bundle `key` of the cache, fetched if missing or damaged; None always fetches.

    Args:
        size_bytes: the size of what is fetched.
        fetch: writes it to the folder that it is given.
        verify: raises FormatError if a folder does not hold the bundle.
    Raises: as `Cache.open` does.
    """
    if key is None:
        return _held(cache.take_in(BUNDLES, size_bytes(), fetch, _verify))
    name = f"{BUNDLES}/{key}"
    if (entry := cache.find(name)) is not None:
        try:
            verify(entry.path)
            return _held(entry)
        except FormatError:
            cache.drop(entry)  # the original may be intact
    entry = cache.open(name, size_bytes(), fetch)
    verify(entry.path)
    return _held(entry)
