"""Writes the text of a run's record: its name, the command that repeats it, and its inputs."""

import getpass
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from bert_core import files, storage
from bert_core.bundle.layout import RECORD as BUNDLE_RECORD
from bert_core.bundle.layout import digest_of
from bert_core.checks import default_of
from bert_core.errors import RaybertError
from bert_core.manifest import BUNDLE, Manifest, read_manifest
from bert_core.wording import first_line, shortened, without_secrets
from tracking.models.references import Registered
from tracking.runs.mirror import RECORD, read_copy
from tracking.runs.recorder import TAG_CHARACTERS, DatasetInput
from tracking.runs.spool import Run, read_run
from tracking.store.page import NOTE, RESULT, model_page, run_page

if TYPE_CHECKING:
    from mlflow import MlflowClient

TRIAL_FOLDERS = "trials"
"""Folder in the output of a sweep with those of its trials, by number."""
COMMAND = "command"
"""Tag of a run: the command line that makes the same."""
DATA_CARD, VOCABULARY_CARD = "data_card.md", "vocabulary_card.md"
"""Artifacts of a run."""
CARD_OF_DATA = {"the data card": DATA_CARD}
CARD_OF_VOCABULARY = {"the vocabulary card": VOCABULARY_CARD}
_EARLIER_CARDS = {"prepare": CARD_OF_DATA, "vocab": CARD_OF_VOCABULARY}
"""Cards of stages whose manifest is from a version that did not name them."""
MODEL_PAGE = "the model card"
"""Title of the page of a registered model, which shows its card."""
STARTED = "started.json"
"""File that a stage writes into its output before its work: its command and its inputs."""
_SEE = "See "
_LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")
_COMMON = ("/", "runs")
"""Folders that say nothing of a run."""


def run_name(stage: str, output: str) -> str:
    """Name a run after the last two folders of its output, without parts that all paths share:
    `runs/quickstart/pretrain` → `pretrain quickstart`. A trial is named after its sweep: `trial 003
    of quickstart`."""
    place = PurePosixPath(output.partition("://")[2] or output)
    if place.parent.name == TRIAL_FOLDERS and place.name.isdigit():
        sweep = run_name("tune", str(place.parent.parent))
        return f"trial {place.name} of {sweep.removeprefix('tune ')}"
    parts = [part for part in place.parts if part not in _COMMON][-2:]
    if parts[-1:] == [stage]:
        parts = parts[:-1]
    return " ".join([stage, "/".join(parts)]).strip()


def command(stage: str, config: Any, left_out: set[str]) -> str:
    """Return the command line that makes the same output, with every field that is not at its
    default.

    Args:
        left_out: top-level fields that do not determine the output.
    """
    return shlex.join(["raybert", stage, *_arguments(config, left_out, "")])


def folded(command: str) -> str:
    """Return a command line over several lines, with an option on each; one that was cut, as MLflow
    keeps a long one, unchanged."""
    try:
        words = shlex.split(command)
    except ValueError:  # it was cut within quotes
        return command
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(f"  {word}" if lines else word)
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n".join(lines)


def _arguments(config: Any, left_out: set[str], prefix: str) -> list[str]:
    arguments: list[str] = []
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in left_out or value == default_of(field):
            continue
        name = f"{prefix}{field.name}"
        if is_dataclass(value):
            nested = _arguments(value, set(), f"{name}.")
            first = fields(value)[0].name  # keeps the section, whose fields all have their defaults
            arguments += nested or [f"--{name}.{first}", _written(getattr(value, first))]
        elif value is not None:
            arguments += [f"--{name}", _written(value)]
    return arguments


def _written(value: Any) -> str:
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping | list | tuple):
        return without_secrets(json.dumps(value, ensure_ascii=False))
    return str(value).lower() if isinstance(value, bool) else str(value)


def source_tags(stage: str, code_version: str) -> dict[str, str]:
    """Return the tags from which MLflow's page shows who ran which code."""
    commit = code_version.partition("+")[2]
    return {
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": f"raybert {stage}",
        "mlflow.user": _user(),
        **({"mlflow.source.git.commit": commit} if commit else {}),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "unknown"


def digests_of(manifest: Manifest) -> frozenset[str]:
    """Return all digests by which another run may have recorded this run's output as an input."""
    known = {manifest.digest, *(each.sha256 for each in manifest.outputs.values())}
    if manifest.stage == "vocab":
        known.add(str(manifest.counts.get("tokenizer_digest")))
    if manifest.bundle:
        known.add(manifest.bundle)
    elif bundle := manifest.files_in(BUNDLE):  # before version 2
        known.add(digest_of({name: sha for name, sha in bundle.items() if name != BUNDLE_RECORD}))
    return frozenset(known)


def recorded_run(folder: str) -> Run | None:
    """Return the run that wrote an output, in a folder or a bucket; None if none is known."""
    if not storage.opens(folder) and files.is_uri(folder):
        return None  # a web address or a model
    try:
        if storage.opens(folder):
            return read_copy(files.join(folder, RECORD))
        return read_run(Path(folder))
    except (OSError, RaybertError):
        return None


def _origin(source: str) -> tuple[str, Run] | None:
    """Return the output that an input is, or is the bundle of, and the run that wrote it; None if
    unknown."""
    return _looked_up(files.absolute(source))


@cache  # also caches None: unreachable storage takes minutes to fail
def _looked_up(source: str) -> tuple[str, Run] | None:
    for folder in dict.fromkeys((source, source.rstrip("/").removesuffix(f"/{BUNDLE}"))):
        if (run := recorded_run(folder)) is not None:
            return folder, run
    return None


def forget_origins() -> None:
    """Clear the cache of which run wrote which input, since an output is about to be rewritten."""
    _looked_up.cache_clear()


def described(
    command: str,
    output: str,
    inputs: Sequence[DatasetInput],
    uri: str,
    *,
    result: str = "",
    links: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the tags with which MLflow's page describes a run.

    Args:
        uri: of the store, without a password; links lead to runs in the same store.
        result: the run's result, once it has one.
        links: further pages, by their titles.
    """
    parts = [f"**{result}**"] if result else []
    if inputs:
        parts.append("Made from " + ", ".join(_input(item, uri) for item in inputs) + ".")
    if links:
        parts.append(_see(links))
    parts.append(f"```bash\n{folded(command)}\n```")
    parts.append(f"`raybert report {shlex.quote(output)}` writes a report of it.")
    tags = {NOTE: "\n\n".join(parts), COMMAND: command}
    return tags | {RESULT: result}  # an earlier attempt may have left its failure there


def failure(error: BaseException) -> str:
    """Word the result of a run that was ended by an error or a signal."""
    if not isinstance(error, Exception):
        return "interrupted"
    what = "" if isinstance(error, RaybertError) else f"{type(error).__name__}: "
    return shortened(without_secrets(first_line(f"failed: {what}{error}")), 500)


def _see(links: Mapping[str, str]) -> str:
    return _SEE + ", ".join(f"[{title}]({url})" for title, url in links.items()) + "."


def add_link(client: "MlflowClient", run_id: str, title: str, url: str) -> None:
    """Add a page to the description of a run that has ended, replacing one with the same title."""
    parts = client.get_run(run_id).data.tags.get(NOTE, "").split("\n\n")
    command = next((n for n, part in enumerate(parts) if part.startswith("```")), len(parts))
    place = next((n for n, part in enumerate(parts[:command]) if part.startswith(_SEE)), None)
    if place is None:
        parts.insert(command, _see({title: url}))
    else:
        parts[place] = _see(dict(_LINK.findall(parts[place])) | {title: url})
    client.set_tag(run_id, NOTE, shortened("\n\n".join(parts), TAG_CHARACTERS))


def link_model_card(client: "MlflowClient", uri: str, sources: Iterable[str], page: str) -> None:
    """Add links to a published version to the runs that made and measured it, if they are known.

    Args:
        uri: of the store, without a password.
        sources: inputs of the stage that published it.
    """
    from mlflow.exceptions import MlflowException

    for source in sources:
        origin = _origin(source)
        if origin is not None and origin[1].tracking_uri == uri and origin[1].run_id is not None:
            with suppress(MlflowException):  # the run was deleted
                add_link(client, origin[1].run_id, MODEL_PAGE, page)


def card_pages(run: Run | None, cards: Mapping[str, str]) -> dict[str, str]:
    """Return MLflow's pages for the cards of a run, by title; empty until MLflow has answered."""
    pages = {} if run is None else {title: run_link(run, name) for title, name in cards.items()}
    return {title: page for title, page in pages.items() if page is not None}


def cards_behind(sources: Iterable[str], uri: str) -> dict[str, str]:
    """Return the pages of the cards of everything that a run was made from; the nearest of each
    kind.

    An output that was made again after it was read is not followed: the run was not made from what
    is there now.

    Args:
        sources: the inputs of the run.
        uri: of the store, without a password.
    """
    links: dict[str, str] = {}
    # Sources with the digests that were read; None accepts whatever is there now.
    left: list[tuple[str, str | None]] = [(source, None) for source in sources]
    seen: set[str] = set()
    for source, digest in left:  # `left` grows meanwhile
        if (registered := Registered.match(source)) is not None:
            links.setdefault(MODEL_PAGE, _registered_page(registered))
        elif (origin := _origin(source)) is not None and origin[0] not in seen:
            folder, run = origin
            with suppress(OSError, ValueError, RaybertError):
                manifest = read_manifest(folder)
                if digest is not None and digest not in digests_of(manifest):
                    continue
                seen.add(folder)
                if run.tracking_uri == uri:
                    cards = manifest.cards or _EARLIER_CARDS.get(manifest.stage, {})
                    links = card_pages(run, cards) | links
                places = files.read_json(files.join(folder, STARTED)).get("sources", {})
                left += [(place, manifest.inputs.get(name, "")) for name, place in places.items()]
    return links


def published_page(model: str, version: str) -> str:
    """Return the link to a version of a registered model."""
    return _on_this_server(model_page(model, version))


def _registered_page(model: Registered) -> str:
    return _on_this_server(model_page(model.name, model.version))


def run_link(run: Run, artifact: str | None = None) -> str | None:
    """Return a link to a run's page, or to an artifact of it; None until MLflow has answered."""
    if run.experiment_id is None or run.run_id is None:
        return None
    return _on_this_server(run_page(run.experiment_id, run.run_id, artifact))


def _on_this_server(path: str) -> str:
    """Return a relative link, which works at any address of the MLflow server."""
    return path.removeprefix("/")


def _input(item: DatasetInput, uri: str) -> str:
    name = item.name.replace("_", " ")
    if (registered := Registered.match(item.source)) is not None:
        return f"{name} [{registered}]({_registered_page(registered)})"
    origin = _origin(item.source)
    if origin is not None and origin[1].tracking_uri == uri and (page := run_link(origin[1])):
        return f"{name} [{origin[1].run_name}]({page})"
    return f"{name} `{without_secrets(item.source)}` ({item.digest[:12]})"
