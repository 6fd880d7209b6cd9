"""Resolves and fetches models of the Hugging Face hub, in the hub's own cache.

Cache, token, mirror (`HF_ENDPOINT`) and working offline (`HF_HUB_OFFLINE`) are as `huggingface_hub`
reads them from the environment. Downloads resume, and show progress on a terminal.
"""

import glob
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_core.errors import ConfigError, FormatError, ResourceError
from bert_core.typed import as_type, parse_json
from bert_core.wording import error_in_one_line
from tracking.models.folders import FetchedFolder

if TYPE_CHECKING:
    from bert_core.bundle.format import Bundle

PREFIX = "hf://"
CONFIG = "config.json"
TIMEOUT_S = 10.0
_ID = re.compile(r"(?P<id>(?:\w[\w.-]{0,95}/)?\w[\w.-]{0,95})(?:@(?P<revision>[^@\s]+))?", re.ASCII)
# What the hub does not allow in a name.
_NEVER = re.compile(r"--|\.\.|[.-](/|$)|\.git$")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# How the hub's cache names the folder of a commit.
_SNAPSHOT = re.compile(rf"models--(?P<id>.+)/snapshots/(?P<commit>{_COMMIT.pattern})")


@dataclass(frozen=True)
class HubModel:
    """A model of the hub, as a user names it: `owner/name`, or `owner/name@revision`."""

    id: str
    revision: str | None = None
    """A branch, tag or commit; None is the main branch."""

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether the reference will always mean the same files."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


def parse(reference: str) -> HubModel | None:
    """Return the model that a reference may name, with or without `hf://`; None if it cannot name a
    model of the hub: it is another URI, has more than one slash, or begins like a path (`.`, `/`,
    `~`)."""
    match = _ID.fullmatch(reference.removeprefix(PREFIX))
    if match is None or _NEVER.search(match["id"]):
        return None
    return HubModel(match["id"], match["revision"])


def pin(model: HubModel) -> HubModel:
    """Return the model at the commit that its revision means now. Offline, or if the hub does not
    answer, return the commit that the cache has for that revision.

    Raises: ConfigError if the hub has no such model or revision, or the token cannot read it;
        ResourceError if the hub does not answer and the cache has none.
    """
    from huggingface_hub import HfApi

    if model.is_pinned:
        return model
    with _hub_errors(model):
        found = HfApi().resolve_revision(model.id, revision=model.revision)
    return HubModel(model.id, found.resolved)


def fetch(model: HubModel, *, tokenizer_only: bool = False) -> Path:
    """Return the folder of the model's files in the hub's cache; missing files are downloaded.

    The config is read first; if the model is not an encoder that we read, nothing else is fetched.

    Args:
        model: pinned to a commit.
        tokenizer_only: fetch the tokenizer's files, for any kind of model.
    Raises: FormatError for a model of another kind, or in a form that is not read; ConfigError and
        ResourceError as `pin` does.
    """
    from huggingface_hub import snapshot_download

    # Imported late because they import torch.
    from bert_core.bundle.listing import check_family, needed_files, needed_of_tokenizer

    assert model.is_pinned
    names, whole = _names(model)
    try:
        if tokenizer_only:
            needed = needed_of_tokenizer(names)
        else:
            read = _reader(model)
            check_family(names, read(CONFIG) if CONFIG in names else None)
            needed = needed_files(names, read)
    except FormatError as error:
        if not whole:
            raise _not_reached(model, error) from error
        library = _library(model)
        raise FormatError(
            f"{model}: {error}{f'; the hub says it is for {library}' if library else ''}"
        ) from error
    # NOTE: patterns; a name with brackets would match other files.
    patterns = [glob.escape(name) for name in needed]
    with _hub_errors(model), progress_on_terminals():
        return Path(
            snapshot_download(
                model.id,
                revision=model.revision,
                allow_patterns=patterns,
                etag_timeout=TIMEOUT_S,
            )
        )


def on_this_machine(folder: Path) -> Path:
    """Return the folder of a model, after fetching it if this machine's caches lack it.

    A driver hands folders to its workers; those in the hub's cache say which commit they hold, so a
    worker on another machine fetches the same files for itself.
    """
    if isinstance(folder, FetchedFolder):
        return folder.here()
    if folder.is_dir() or (match := _SNAPSHOT.search(folder.as_posix())) is None:
        return folder
    return fetch(_of_snapshot(match))


def origin(folder: Path) -> dict[str, str]:
    """Return a bundle's location on the hub for its lineage, `{"hub": "owner/name@commit"}`; empty
    for a folder outside the hub's cache."""
    match = _SNAPSHOT.search(folder.as_posix())
    return {} if match is None else {"hub": str(_of_snapshot(match))}


def load_bundle(folder: Path) -> "Bundle":
    """Return the bundle in a folder, as `on_this_machine` finds it, with its `origin` in its
    lineage."""
    from bert_core.bundle import format as bundle_format

    folder = on_this_machine(folder)
    bundle = bundle_format.load_bundle(folder)
    return replace(bundle, lineage=bundle.lineage | origin(folder))


def _of_snapshot(match: re.Match[str]) -> HubModel:
    return HubModel(match["id"].replace("--", "/"), match["commit"])


def _names(model: HubModel) -> tuple[list[str], bool]:
    """Return the files of a commit, and whether the list is complete. It comes from the hub or, if
    the hub is unavailable, from the cache."""
    from huggingface_hub import HfApi, get_cached_repo_tree, try_to_load_from_cache
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(model.id, revision=model.revision)
        return [file.path for file in tree], True
    except CachedRepoTreeNotFoundError:
        pass
    try:
        with _hub_errors(model):
            return HfApi().list_repo_files(model.id, revision=model.revision), True
    except ResourceError:
        # Another program may have put it into the cache; then the cache has no list of the files.
        path = try_to_load_from_cache(model.id, CONFIG, revision=model.revision)
        if not isinstance(path, str):
            raise
    folder = Path(path).parent
    found = (path for path in folder.rglob("*") if path.is_file())
    return [path.relative_to(folder).as_posix() for path in found], False


@contextmanager
def progress_on_terminals() -> Iterator[None]:
    """Show the hub client's progress bars only on a terminal, unless the environment says
    otherwise: by default it would draw some of them in a log too."""
    from huggingface_hub import constants
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    chosen = constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled()
    if chosen or sys.stderr.isatty():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _reader(model: HubModel) -> Callable[[str], dict[str, Any]]:
    from huggingface_hub import hf_hub_download

    def read(name: str) -> dict[str, Any]:
        with _hub_errors(model), progress_on_terminals():
            path = hf_hub_download(model.id, name, revision=model.revision, etag_timeout=TIMEOUT_S)
        entries: dict[str, Any] = as_type(
            dict[str, Any], parse_json(Path(path).read_bytes(), name), name
        )
        return entries

    return read


def _library(model: HubModel) -> str | None:
    """Return the library that the hub names for a model; None if the hub does not say."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(model.id, revision=model.revision, timeout=TIMEOUT_S)
    except Exception:  # the library only adds to a message
        return None
    return info.library_name


class MissingModelError(ConfigError):
    """The hub has no model of that id, or hides it from this token."""


@contextmanager
def _hub_errors(model: HubModel) -> Iterator[None]:
    """Turn the hub client's errors into ours, which say what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
        RevisionResolutionError,
    )

    page = f"{_endpoint()}/{model.id}"
    try:
        yield
    except GatedRepoError as error:
        raise ConfigError(
            f"{model}: wanted a model that is open to this user, got a gated one: accept its terms "
            f"at {page}, and {login()}"
        ) from error
    except RepositoryNotFoundError as error:
        shown = " that this token may read" if _has_token() else ""
        raise MissingModelError(
            f"{model}: the hub has no model {model.id}{shown}: check its name at {_endpoint()}; if "
            f"it is private, {login()}"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(
            f"{model}: wanted a branch, tag or commit of {model.id}, the hub has no "
            f"{model.revision}: choose one at {page}/tree/main"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ConfigError(
                f"{model}: the hub refused the token ({status}): {login()}"
            ) from error
        raise ResourceError(
            f"{model}: {_endpoint()} answered with status {status}, and there is no complete copy "
            f"of {model.id} in its cache: try again later, or give a folder"
        ) from error
    # `HTTPError` is the base of the HTTP library's errors, of the connection too.
    except (ConnectionError, HTTPError, LocalEntryNotFoundError, RevisionResolutionError) as error:
        raise _not_reached(model, error) from error


def _not_reached(model: HubModel, error: Exception) -> ResourceError:
    from huggingface_hub import is_offline_mode

    if is_offline_mode():
        return ResourceError(
            f"{model}: HF_HUB_OFFLINE is set, with no complete copy of {model.id} in the hub's "
            f"cache: unset it, or copy the cache of a machine that has one"
        )
    cause = error.__cause__ or error
    return ResourceError(
        f"{model}: {_endpoint()} does not answer, with no complete copy of {model.id} in its cache "
        f"({error_in_one_line(cause)}): check the network, set HF_ENDPOINT to a mirror, or "
        "give a folder"
    )


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def login() -> str:
    """Return the advice for a token that is missing or lacks permission."""
    return (
        "set HF_TOKEN to a token that may"
        if _has_token()
        else "set HF_TOKEN, or run `hf auth login`"
    )


def _endpoint() -> str:
    from huggingface_hub import HfApi

    return HfApi().endpoint
