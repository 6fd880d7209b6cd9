"""Uploads bundles to the Hugging Face hub: one commit with the bundle's files and its model
card."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_core import files
from bert_core.bundle.layout import recorded_files
from bert_core.errors import ConfigError, FormatError, ResourceError
from bert_core.typed import as_type, parse_json
from bert_core.wording import error_in_one_line
from tracking.models.hub import HubModel, login, parse, progress_on_terminals

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

CARD, RECORD = "README.md", "raybert.json"


@dataclass(frozen=True)
class Upload:
    """Where a bundle is on the hub."""

    reference: str
    """`owner/name@commit`."""
    url: str
    """Its page."""


def check_id(name: str) -> None:
    """Check that `name` is a model on the hub that can be uploaded to. Raises: ConfigError."""
    model = parse(name)
    if model is None or model.id != name or "/" not in name:
        raise ConfigError(
            f"hub: wanted owner/name, a model on the Hugging Face hub, got {name!r}: name the user "
            "or organization and the model, without a revision"
        )


def check_token(name: str) -> None:
    """Check that there is a token to upload with, and that the hub may be used.

    Raises: ConfigError if there is no token; ResourceError if `HF_HUB_OFFLINE` is set.
    """
    from huggingface_hub import get_token, is_offline_mode

    if is_offline_mode():
        raise ResourceError(
            f"hub: wanted a network to upload to {name}, HF_HUB_OFFLINE is set: unset it, or leave "
            "hub out"
        )
    if get_token() is None:
        raise ConfigError(f"hub: wanted a token that may write to {name}, got none: {login()}")


def upload(folder: Path, card: str, name: str, *, private: bool, message: str) -> Upload:
    """Make a bundle the content of a model on the hub, in one commit.

    The model is created if it does not exist. Files that the hub already has are not sent again, so
    repeating a failed upload resumes it, and an upload without changes makes no commit. Files of
    the bundle that was there before are removed; all other files stay.

    Args:
        folder: the bundle's folder; other files in it are ignored.
        card: the text of README.md.
        private: create it as a private model.
    Raises: ConfigError if the token may not write there, or `private` is set and the model is
        public; ResourceError if the hub does not answer; FormatError if the bundle is damaged.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    # Imported late because it imports torch.
    from bert_core.bundle.format import bundle_files

    names = bundle_files(folder)
    api = HfApi()
    with _upload_errors(name), progress_on_terminals():
        api.create_repo(name, private=private or None, exist_ok=True)
        present = api.model_info(name)
        if private and not present.private:
            raise ConfigError(
                f"hub_private: wanted a private model, {name} is public already: make it private "
                f"at {api.endpoint}/{name}/settings, or leave hub_private out"
            )
        stale = _files_before(present) - {*names, CARD}
        done = api.create_commit(
            name,
            [
                *(CommitOperationAdd(path, folder / path) for path in names),
                CommitOperationAdd(CARD, card.encode()),
                *(CommitOperationDelete(path) for path in sorted(stale)),
            ],
            commit_message=message,
            parent_commit=present.sha,
        )
    return Upload(f"{name}@{done.oid}", f"{api.endpoint}/{name}/tree/{done.oid}")


def _files_before(present: "ModelInfo") -> set[str]:
    """Return the files of the bundle that a model has now; empty if it has no bundle of ours."""
    from huggingface_hub import hf_hub_download

    names = {sibling.rfilename for sibling in present.siblings or ()}
    if RECORD not in names:
        return set()
    data = files.read_bytes(hf_hub_download(present.id, RECORD, revision=present.sha))
    try:
        return (
            names & recorded_files(as_type(dict[str, Any], parse_json(data, RECORD), RECORD)).keys()
        )
    except FormatError:  # a damaged manifest: the files that it named stay
        return set()


@contextmanager
def _upload_errors(name: str) -> Iterator[None]:
    """Turn the hub client's errors into ours, which say what to do."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403, 404):
            raise ConfigError(
                f"hub: wanted a token that may write to {name}, the hub refused this one "
                f"({status}): {login()}"
            ) from error
        raise ResourceError(
            f"hub: {HubModel(name)} could not be uploaded, the hub answered with status {status} "
            f"({error.server_message}): run the same command again, which goes on"
        ) from error
    # `HTTPError` is the base of the HTTP library's errors, of the connection too.
    except (ConnectionError, HTTPError, RuntimeError) as error:
        # The client raises RuntimeError for a file that could not be sent.
        cause = error.__cause__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, (ConnectionError, HTTPError)):
            raise
        raise ResourceError(
            f"hub: {name} could not be uploaded ({error_in_one_line(cause)}): check the "
            "network, and run the same command again, which goes on"
        ) from error
