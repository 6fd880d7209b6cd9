"""Command lines to configs: the words of `raybert`, and the config dataclass of each.

A value on the command line wins over one from `--config`, regardless of order.
"""

import importlib
import json
import re
import tomllib
import warnings
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_origin, get_type_hints

from bert_core.checks import base_type
from bert_core.errors import ConfigError, RaybertError
from bert_core.wording import nearest
from pipelines.runtime.config_errors import alternatives, explained

if TYPE_CHECKING:
    from argparse import Action

    from jsonargparse import ArgumentParser

CONFIGS = Path(__file__).parent.parent / "configs"


@dataclass(frozen=True)
class Command:
    """What a word of `raybert` does, and the module of its config and `run` function."""

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
    "mine": Command("pipelines.mine", "MineConfig", "pairs + passages → pairs with negatives"),
    "index": Command("pipelines.index", "IndexConfig", "vectors of rows → searchable index"),
    "search": Command("pipelines.search", "SearchConfig", "queries + vectors → nearest rows"),
    "extract": Command("pipelines.extract", "ExtractConfig", "bundles + documents → records"),
    "glue": Command("pipelines.glue", "GlueConfig", "bundles + GLUE's test files → submission"),
}
KEYS = "serve keys"
"""The one command of two words."""
COMMANDS = {
    "serve": Command("serve.config", "ServeConfig", "answer requests over HTTP"),
    KEYS: Command("serve.keys", "KeysConfig", "create, list or revoke API keys"),
    "promote": Command(
        "pipelines.commands.promote", "PromoteConfig", "move an alias of the registry to a version"
    ),
    "continue": Command(
        "pipelines.commands.continuing", "ContinueConfig", "bundle + text → bundle that knows it"
    ),
    "rollback": Command(
        "pipelines.commands.rollback", "RollbackConfig", "move an alias back to where it was"
    ),
    "compare": Command(
        "pipelines.commands.compare", "CompareConfig", "measure two models on the same rows"
    ),
    "quickstart": Command(
        "pipelines.commands.quickstart", "QuickstartConfig", "the whole pipeline, in minutes"
    ),
    "bench": Command(
        "pipelines.commands.bench", "BenchConfig", "measure how fast a server answers"
    ),
    "inspect": Command(
        "pipelines.commands.inspect", "InspectConfig", "look inside a model, on an HTML page"
    ),
    "report": Command(
        "pipelines.commands.report", "ReportConfig", "write a page about runs, to send to others"
    ),
    "submit": Command(
        "pipelines.commands.submit", "SubmitConfig", "run a stage as a job on a Ray cluster"
    ),
    "jobs": Command("pipelines.commands.jobs", "JobsConfig", "list, follow or stop submitted jobs"),
    "doctor": Command(
        "pipelines.commands.doctor", "DoctorConfig", "check machine, cluster, storage and MLflow"
    ),
    "drain": Command(
        "pipelines.commands.drain", "DrainConfig", "move work off a node before it is reclaimed"
    ),
    "ui": Command("pipelines.commands.ui", "UiConfig", "open the MLflow page"),
    "list": Command(
        "pipelines.commands.listing", "ListConfig", "list tasks, variants, configs or runs"
    ),
}
ALL = {**STAGES, **COMMANDS}


def parse(word: str, arguments: list[str]) -> Any:
    """Parse the arguments of `raybert word` into its config.

    Raises: ConfigError; for an unknown key it names the nearest one. `--help` and
        `--print_config` print and exit.
    """
    kind = config_class(word)
    parser = parser_for(word)
    switches = {f"--{field.name}" for field in fields(kind) if field.type is bool}
    arguments = [
        f"{word}=true" if word in switches and value.startswith("--") else word
        for word, value in pairwise([*_config_first(arguments), "--"])
    ]
    parsed = parser.parse_args(_with_brackets(arguments, parser))
    _check_tables(parsed, kind, f"raybert {word}")
    try:
        built = parser.instantiate(parsed)
    except RaybertError:
        raise
    except ValueError as error:  # an optional nested config rejected one of its fields
        raise ConfigError(explained(str(error), kind, f"raybert {word}", ())) from error
    return kind(**{field.name: _plain(built[field.name]) for field in fields(kind)})


def _check_tables(parsed: Any, kind: Any, prog: str) -> None:
    """Raise ConfigError for a value in place of a nested config's fields: jsonargparse takes any
    from a file."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        value = parsed.get(field.name)
        is_table = any(map(is_dataclass, alternatives(hints[field.name])))
        if is_table and isinstance(value, bool | int | float | str | list):
            message = f'Parser key "{field.name}": Got value: {value}'
            raise ConfigError(explained(message, kind, prog, ()))


def purpose_of(path: Path) -> str:
    """Return the first sentences of the comment at the top of a config, up to a line that ends
    one."""
    said: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or (said and said[-1].endswith((".", "?", "!"))):
            break
        said.append(line.lstrip("# ").rstrip())
    return " ".join(said)


def config_class(word: str) -> Any:
    """Return the config dataclass of a command."""
    command = ALL[word]
    return getattr(importlib.import_module(command.module), command.config)


@cache
def parser_for(word: str) -> "ArgumentParser":
    """Build the parser of one command, with an option for every field of its config."""
    from jsonargparse import (
        ArgumentParser,
        DefaultHelpFormatter,
        set_dumper,
        set_loader,
        set_parsing_settings,
    )
    from jsonargparse.typing import register_type

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    set_dumper("toml", _toml_of)
    register_type(_Text)
    set_loader("toml", _toml, exceptions=(tomllib.TOMLDecodeError,), json_superset=True)

    class Formatter(DefaultHelpFormatter):
        def _get_type_str(self, action: "Action") -> str | None:
            # `Annotated[int, at least 1]` → `int, at least 1`
            return (
                re.sub(
                    r"Annotated\[(\w+), ([^\]]+)\]", r"\1, \2", super()._get_type_str(action) or ""
                )
                or None
            )

    class Parser(ArgumentParser):
        def format_help(self, *arguments: Any) -> str:
            return super().format_help(*arguments) + (_tasks() if takes_options else "")

        def dump(self, *arguments: Any, **options: Any) -> str:
            # jsonargparse warns that a _Text is read back as text, which is intended.
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                return super().dump(*arguments, **options)

        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            known = [action.dest for action in self._actions]
            raise ConfigError(explained(str(ex or message), kind, f"raybert {word}", known))

    kind = config_class(word)
    takes_options = "options" in {field.name for field in fields(kind)}
    parser = Parser(
        prog=f"raybert {word}",
        description=ALL[word].summary,
        parser_mode="toml",
        formatter_class=Formatter,
        default_env=False,
        allow_abbrev=False,  # `--forc` would be `--force`
    )
    parser.add_argument("--config", action="config", help="TOML file with the fields below")
    parser.add_class_arguments(kind, nested_key=None)
    if word in STAGES:
        _in_order(parser, kind)
    return parser


def _in_order(parser: "ArgumentParser", kind: Any) -> None:
    """Sort a stage's help: required fields first, operational fields last."""
    from pipelines.runtime.stage_config import operational_fields  # keeps `raybert --help` instant

    operational = operational_fields(kind) - {"output"}
    last = parser.add_argument_group("how it runs; none of this changes the output")
    for group in parser._action_groups[:-1]:
        actions = group._group_actions
        last._group_actions += [action for action in actions if action.dest in operational]
        actions[:] = [action for action in actions if action.dest not in operational]
        actions.sort(key=lambda action: not action.required)
    groups = [action for group in parser._action_groups for action in group._group_actions]
    parser._actions.sort(key=groups.index)
    last._group_actions.sort(key=lambda action: not action.required)


def _tasks() -> str:
    """Return the end of a stage's help, which says where the tasks are described."""
    from bert_core.tasks.catalog import TASKS

    return (
        f"\ntasks: {', '.join(TASKS)}\n"
        "`raybert list tasks TASK` shows the example rows, options and parameters of one of them.\n"
    )


def _with_brackets(arguments: list[str], parser: "ArgumentParser") -> list[str]:
    """Put lists of numbers in brackets, as jsonargparse needs: `0,1,2` → `[0,1,2]`. A single number
    gets brackets too if the option accepts only a list."""
    patterns = {}
    for action in parser._actions:
        kinds = [*alternatives(getattr(action, "_typehint", None))]
        if any(
            get_origin(kind) is tuple and base_type(get_args(kind)[0]) in (int, float)
            for kind in kinds
        ):
            alone = all(get_origin(kind) is tuple for kind in kinds)
            patterns[f"--{action.dest}"] = r"[^\[\]]+,[^\[\]]+" + r"|[-+.\deE]+" * alone
    bracketed, previous = [], ""
    for argument in arguments:
        name, equals, value = argument.rpartition("=")
        pattern = patterns.get(name if equals else previous)
        if pattern is not None and re.fullmatch(pattern, value):
            argument = f"{name}{equals}[{value}]"
        bracketed.append(argument)
        previous = argument
    return bracketed


def _plain(value: Any) -> Any:
    """Return the value with every `_Text` in it converted to a plain `str`."""
    if is_dataclass(value) and not isinstance(value, type):
        changes = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return replace(value, **changes)
    return _with_text(value, str)


class _Text(str):
    """Quoted text, which jsonargparse must not read as a number."""


def _toml(text: str) -> Any:
    """Parse a config file, or one field's value in TOML or JSON: `{text = "body"}`, `"0"`."""
    text = text.strip()
    if text[:1] in ("{", "[", '"', "'"):
        with suppress(ValueError):
            return _with_text(json.loads(text))
        if text[0] != "[" or "\n" not in text:  # else a file that begins with a section
            return _with_text(tomllib.loads(f"value = {text}")["value"])
    return _with_text(tomllib.loads(text))


def _toml_of(values: dict[str, Any]) -> str:
    """Return the fields that are set as TOML, which has no null."""
    import tomlkit

    def without_none(values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: without_none(value) if isinstance(value, dict) else value
            for name, value in values.items()
            if value is not None
        }

    return tomlkit.dumps(without_none(_with_text(values, str)))


def _with_text(value: Any, kind: type[str] = _Text) -> Any:
    """Return the value with every string in it converted to `kind`."""
    if isinstance(value, dict):
        return {str(name): _with_text(item, kind) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_text(item, kind) for item in value)
    return kind(value) if isinstance(value, str) else value


def _check_toml(path: str) -> None:
    """Raise ConfigError naming the place where a config is not valid TOML."""
    try:
        _toml(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--config: wanted TOML in {path}, it cannot be read ({error}): text is in quotes, as "
            'in output = "runs/mine", and fields of fields are under [their.name]'
        ) from error


def _config_first(arguments: list[str]) -> list[str]:
    """Move `--config` to the front, and check that its file exists.

    A shipped config, `configs/<stage>/<name>.toml`, is found from any folder.
    """
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
    for place, path in enumerate(configs):
        shipped = CONFIGS.parent / path
        if not Path(path).is_file() and path.startswith(f"{CONFIGS.name}/") and shipped.is_file():
            configs[place] = str(shipped)
        elif not Path(path).is_file():
            known = sorted(
                str(config.relative_to(CONFIGS.parent)) for config in CONFIGS.rglob("*.toml")
            )
            raise ConfigError(
                f"--config: wanted a TOML file, got {path!r}, which does not exist"
                f"{nearest(path, known)}; `raybert list configs` shows the shipped ones"
            )
        _check_toml(configs[place])
    return [word for path in configs for word in ("--config", path)] + others
