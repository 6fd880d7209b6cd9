"""What the record says of a stage's run besides its figures: its name, the command that repeats it,
and what it was made from.
"""

import getpass
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import PurePosixPath
from typing import Any

from bert_core import files
from bert_core.checks import default_of
from bert_core.errors import RaybertError
from bert_core.manifest import BUNDLE
from bert_core.wording import first_line, shortened
from tracking.page import NOTE, RESULT, run_page, version_page
from tracking.runs import DatasetInput
from tracking.spool import Run, read_run

COMMAND = "command"
"""Tag of a run: the command line that makes the same."""
DATA_CARD, VOCABULARY_CARD = "data_card.md", "vocabulary_card.md"
"""Artifacts of a run."""
_CARDS = {"prepare": ("data card", DATA_CARD), "vocab": ("vocabulary card", VOCABULARY_CARD)}
_COMMON = ("/", "runs", "trials")
"""Folders that say nothing of a run."""
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s\"]+@")
_QUERY = re.compile(r"(https?://[^?\s\"]*)\?[^\s\"]*")


def run_name(stage: str, output: str) -> str:
    """`runs/quickstart/pretrain` → `pretrain quickstart`: the last two folders of the output,
    without what every path has."""
    place = output.partition("://")[2] or output
    parts = [part for part in PurePosixPath(place).parts if part not in _COMMON][-2:]
    if parts[-1:] == [stage]:
        parts = parts[:-1]
    return " ".join([stage, "/".join(parts)]).strip()


def command(stage: str, config: Any, left_out: set[str]) -> str:
    """The command line that makes the same output: every field that is not at its default.

    Args:
        left_out: top-level fields that do not determine the output.
    """
    return shlex.join(["raybert", stage, *_arguments(config, left_out, "")])


def folded(command: str) -> str:
    """A command line over several lines, with an option on each."""
    lines: list[str] = []
    for word in shlex.split(command):
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
            first = fields(value)[0].name  # says that it is there, with all fields at their default
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


def without_secrets(text: str) -> str:
    """The text with no credentials in its URLs, and without the queries of http ones, which may
    hold some."""
    return _QUERY.sub(r"\1", _CREDENTIALS.sub("", text))


def source_tags(stage: str, code_version: str) -> dict[str, str]:
    """What MLflow's page shows as who ran which code."""
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


def recorded_run(source: str) -> Run | None:
    """The run that wrote an input: a stage's folder, or the bundle in it; None if none is known."""
    folder = files.local_path(source) if "://" not in source else None
    if folder is None:
        return None
    for place in (folder, folder.parent) if folder.name == BUNDLE else (folder,):
        try:
            if (run := read_run(place)) is not None:
                return run
        except (OSError, RaybertError):
            return None
    return None


def described(
    command: str,
    output: str,
    inputs: Sequence[DatasetInput],
    uri: str,
    *,
    result: str = "",
    links: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The tags with which MLflow's page describes a run.

    Args:
        uri: of the store, without a password: links lead to runs that are in the same one.
        result: what it came to, once it has.
        links: further pages, by their titles.
    """
    parts = [f"**{result}**"] if result else []
    if inputs:
        parts.append("Made from " + ", ".join(_input(item, uri) for item in inputs) + ".")
    if links:
        parts.append("See " + ", ".join(f"[{title}]({url})" for title, url in links.items()) + ".")
    parts.append(f"```bash\n{folded(command)}\n```")
    parts.append(f"`raybert report {shlex.quote(output)}` writes a report of it.")
    tags = {NOTE: "\n\n".join(parts), COMMAND: command}
    return tags | {RESULT: result}  # an earlier attempt may have left its failure there


def failure(error: BaseException) -> str:
    """The result of a run that an error or a signal ended."""
    if not isinstance(error, Exception):
        return "interrupted"
    what = "" if isinstance(error, RaybertError) else f"{type(error).__name__}: "
    return shortened(without_secrets(first_line(f"failed: {what}{error}")), 500)


def card_links(
    stage: str, run: Run | None, config: Any, counts: Mapping[str, Any]
) -> dict[str, str]:
    """The pages of MLflow with the cards that a stage wrote.

    Args:
        run: that of the stage, if it is known.
    """
    if stage == "publish":
        return {"the model card": _on_this_server(version_page(config.name, counts["version"]))}
    if stage in _CARDS and run is not None:
        title, artifact = _CARDS[stage]
        if page := _page(run, artifact):
            return {f"the {title}": page}
    return {}


def _page(run: Run, artifact: str | None = None) -> str | None:
    """A link to a run's page, or to an artifact; None until MLflow has answered."""
    if run.experiment_id is None or run.run_id is None:
        return None
    return _on_this_server(run_page(run.experiment_id, run.run_id, artifact))


def _on_this_server(path: str) -> str:
    """The link to a path of the server that shows the description, wherever its page is."""
    return path.removeprefix("/")


def _input(item: DatasetInput, uri: str) -> str:
    name = item.name.replace("_", " ")
    run = recorded_run(item.source)
    if run is not None and run.tracking_uri == uri and (page := _page(run)):
        return f"{name} [{run.run_name}]({page})"
    return f"{name} `{without_secrets(item.source)}` ({item.digest[:12]})"
