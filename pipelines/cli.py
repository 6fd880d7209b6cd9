"""The command `raybert`: reads a config, then runs the stage or command that was named.

Only what was chosen is imported, so help and errors are instant. A value on the command line wins
over one from `--config`, in whatever order they come.
"""

import difflib
import importlib
import os
import re
import sys
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bert_core.errors import ConfigError, RaybertError

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
    "evaluate": Command("pipelines.evaluate", "EvaluateConfig", "bundle + labelled rows → metrics"),
    "publish": Command("pipelines.publish", "PublishConfig", "bundle → MLflow registry"),
}
COMMANDS = {
    "serve": Command("serve.config", "ServeConfig", "answer requests over HTTP"),
    "quickstart": Command("pipelines.quickstart", "QuickstartConfig", "the whole path, in minutes"),
    "submit": Command("pipelines.submit", "SubmitConfig", "run a stage as a job on a Ray cluster"),
    "ui": Command("pipelines.ui", "UiConfig", "open the MLflow page"),
    "list": Command("pipelines.listing", "ListConfig", "what there is: variants, tasks, configs"),
}
ALL = {**STAGES, **COMMANDS}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with 0, with 1 if the work failed, with 2 if it was misused."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return
    word, rest = arguments[0], arguments[1:]
    if word not in ALL:
        _fail(f"raybert: wanted one of {', '.join(ALL)}, got {word!r}{_nearest(word, ALL)}", 2)
    try:
        code = _run(word, rest)
    except ConfigError as error:
        _fail(f"raybert {word}: {error}", 2)
    except RaybertError as error:
        _fail(f"raybert {word}: {error}", 1)
    except KeyboardInterrupt:
        _fail(f"raybert {word}: interrupted; the same command goes on where it was", 130)
    sys.exit(code)


def _run(word: str, arguments: list[str]) -> int:
    if word == "submit":
        from pipelines import submit

        own, command = submit.split_arguments(arguments)
        return submit.run(parse(word, own), command)
    if word == "list" and arguments and not arguments[0].startswith("-"):
        arguments = ["--what", *arguments]
    config = parse(word, arguments)
    if word == "serve":
        _serve(config)
    else:
        importlib.import_module(ALL[word].module).run(config)
    return 0


def parse(word: str, arguments: list[str]) -> Any:
    """The config that `raybert word arguments…` means.

    Raises: ConfigError, naming the nearest key where one is unknown. `--help` and
        `--print_config` print and exit.
    """
    command = ALL[word]
    kind = getattr(importlib.import_module(command.module), command.config)
    parser = parser_for(word)
    switches = {f"--{field.name}" for field in fields(kind) if field.type is bool}
    arguments = [
        f"{word}=true" if word in switches and value.startswith("--") else word
        for word, value in pairwise([*_config_first(arguments), "--"])
    ]
    built = parser.instantiate_classes(parser.parse_args(arguments))
    return kind(**{field.name: built[field.name] for field in fields(kind)})


def parser_for(word: str) -> "ArgumentParser":
    """The parser of one command: an option for every field of its config."""
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            raise ConfigError(_explained(str(ex or message), self))

    command = ALL[word]
    kind = getattr(importlib.import_module(command.module), command.config)
    parser = Parser(
        prog=f"raybert {word}",
        description=command.summary,
        parser_mode="toml",
        default_env=False,
    )
    parser.add_argument("--config", action="config", help="TOML file with the fields below")
    parser.add_class_arguments(kind, nested_key=None)
    return parser


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
                f"--config: wanted a TOML file, there is none at {path!r}{_nearest(path, known)}; "
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
        f"{_nearest(unknown[1], keys)}; `{parser.prog} --help` lists them"
    )


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def _serve(config: Any) -> None:
    """Ray is started with Serve's settings, which the server itself may not know."""
    from pipelines import cluster

    cluster.connect(haproxy=config.haproxy)
    from serve import app

    try:
        app.run(config)
    finally:
        cluster.disconnect()


def _help() -> str:
    def lines(commands: dict[str, Command]) -> str:
        return "\n".join(f"  {word:<12}{command.summary}" for word, command in commands.items())

    return (
        "usage: raybert <stage or command> [--config FILE.toml] [--field value …]\n\n"
        f"stages, in the order of the flow:\n{lines(STAGES)}\n\n"
        f"commands:\n{lines(COMMANDS)}\n\n"
        "raybert <word> --help lists its fields; --print_config prints a run as TOML."
    )


def _fail(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # -m run from a checkout that is not installed
    main()
