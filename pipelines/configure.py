"""Command lines to configs: which words there are, and the dataclass that each one means.

A value on the command line wins over one from `--config`, in whatever order they come.
"""

import difflib
import importlib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bert_core.errors import ConfigError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

CONFIGS = Path(__file__).parent.parent / "configs"


@dataclass(frozen=True)
class Command:
    """Where a word's config and function are, and what it does."""

    module: str
    config: str
    summary: str


STAGES = {
    "vocab": Command("pipelines.vocab", "VocabConfig", "corpus → WordPiece vocabulary"),
    "prepare": Command("pipelines.prepare", "PrepareConfig", "corpus → masked shards"),
    "pretrain": Command("pipelines.pretrain", "PretrainConfig", "shards → pretrained bundle"),
    "finetune": Command("pipelines.finetune", "FinetuneConfig", "bundle + labelled rows → bundle"),
    "tune": Command("pipelines.tune", "TuneConfig", "bundle + labelled rows → best of many"),
    "distill": Command("pipelines.distill", "DistillConfig", "teacher + rows → smaller bundle"),
    "evaluate": Command("pipelines.evaluate", "EvaluateConfig", "bundle + labelled rows → metrics"),
    "publish": Command("pipelines.publish", "PublishConfig", "bundle → MLflow registry"),
    "export": Command("pipelines.export", "ExportConfig", "bundle → bundle with an ONNX graph"),
    "predict": Command("pipelines.predict", "PredictConfig", "bundle + rows → rows with answers"),
    "search": Command("pipelines.search", "SearchConfig", "queries + vectors → nearest rows"),
    "extract": Command("pipelines.extract", "ExtractConfig", "bundles + documents → a record each"),
    "glue": Command("pipelines.glue", "GlueConfig", "bundles + GLUE's test files → its submission"),
}
COMMANDS = {
    "serve": Command("serve.config", "ServeConfig", "answer requests over HTTP"),
    "quickstart": Command("pipelines.quickstart", "QuickstartConfig", "the whole path, in minutes"),
    "inspect": Command("pipelines.inspect", "InspectConfig", "look inside a model, on a page"),
    "submit": Command("pipelines.submit", "SubmitConfig", "run a stage as a job on a Ray cluster"),
    "ui": Command("pipelines.ui", "UiConfig", "open the MLflow page"),
    "list": Command("pipelines.listing", "ListConfig", "what there is: tasks, variants, configs"),
}
ALL = {**STAGES, **COMMANDS}


def parse(word: str, arguments: list[str]) -> Any:
    """The config that `raybert word arguments…` means.

    Raises: ConfigError, naming the nearest key where one is unknown. `--help` and
        `--print_config` print and exit.
    """
    kind = config_class(word)
    parser = parser_for(word)
    switches = {f"--{field.name}" for field in fields(kind) if field.type is bool}
    arguments = [
        f"{word}=true" if word in switches and value.startswith("--") else word
        for word, value in pairwise([*_config_first(arguments), "--"])
    ]
    built = parser.instantiate(parser.parse_args(arguments))
    return kind(**{field.name: built[field.name] for field in fields(kind)})


def config_class(word: str) -> Any:
    """The dataclass of a command's config."""
    command = ALL[word]
    return getattr(importlib.import_module(command.module), command.config)


def parser_for(word: str) -> "ArgumentParser":
    """The parser of one command: an option for every field of its config."""
    from jsonargparse import ArgumentParser, set_loader, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    set_loader("toml", _toml, exceptions=(tomllib.TOMLDecodeError,), json_superset=False)

    class Parser(ArgumentParser):
        def format_help(self, *arguments: Any) -> str:
            return super().format_help(*arguments) + (_tasks() if takes_options else "")

        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            raise ConfigError(_explained(str(ex or message), self))

    kind = config_class(word)
    takes_options = "options" in {field.name for field in fields(kind)}
    parser = Parser(
        prog=f"raybert {word}",
        description=ALL[word].summary,
        parser_mode="toml",
        default_env=False,
    )
    parser.add_argument("--config", action="config", help="TOML file with the fields below")
    parser.add_class_arguments(kind, nested_key=None)
    return parser


def _tasks() -> str:
    """What tasks there are, with their rows and options, for the end of a stage's help."""
    from pipelines.task_guide import guide

    return f"\ntasks, each with a row of every kind and its options and parameters:\n\n{guide()}\n"


def _toml(text: str) -> Any:
    """A file of fields, or the value of one as such a file has it: `{text = "body"}`."""
    if text.lstrip().startswith("{"):  # which no file does
        return tomllib.loads(f"value = {text.strip()}")["value"]
    return tomllib.loads(text)


def _config_first(arguments: list[str]) -> list[str]:
    """Put `--config` before everything else, and check that its file is there."""
    configs: list[str] = []
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--config":
            configs.append(next(rest, ""))
        elif argument.startswith("--config="):
            configs.append(argument.removeprefix("--config="))
        else:
            others.append(argument)
    for path in configs:
        if not Path(path).is_file():
            known = sorted(
                str(found.relative_to(CONFIGS.parent)) for found in CONFIGS.rglob("*.toml")
            )
            raise ConfigError(
                f"--config: wanted a TOML file, there is none at {path!r}{nearest(path, known)}; "
                "`raybert list configs` shows those that come with raybert"
            )
    return [word for path in configs for word in ("--config", path)] + others


def _explained(message: str, parser: "ArgumentParser") -> str:
    """jsonargparse's message, with the nearest key where one is not known."""
    unknown = re.search(r"(?:unrecognized arguments: -*|Option ')([\w.]+)", message)
    if unknown is None:
        return message.strip()
    keys = [action.dest for action in parser._actions]
    return (
        f"{unknown[1]}: wanted a field of this command, there is none of that name"
        f"{nearest(unknown[1], keys)}; `{parser.prog} --help` lists them"
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean …?)`, or nothing where no known word is like `word`."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
