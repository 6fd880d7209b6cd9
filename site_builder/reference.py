"""Pages that are written from the code: commands with their options, HTTP, and metrics."""

import inspect
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from importlib import import_module
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import bert_core.errors
from bert_core import wording
from bert_core.checks import default_of
from bert_core.tasks.guide import docstrings
from pipelines.cli import EXIT_CODES
from pipelines.configure import ALL, CONFIGS, STAGES, config_class, parser_for, purpose_of
from pipelines.runtime.config_errors import alternatives
from pipelines.runtime.other_names import PEERS, TRAINER
from serve.config import ModelConfig
from serve.request.errors import RequestError

COMMANDS = "reference/commands"
ERRORS = "reference/errors.md"
OPTIONS = ["option", "values", "default", "meaning"]
LISTS = {"`raybert list tasks`": "tasks", "`raybert list variants`": "variants"}
"""What a meaning refers to → the page that has it."""


def pages() -> dict[str, str]:
    """Page → its text."""
    made = {f"{COMMANDS}/{file_of(word)}": "\n".join(_command(word)) for word in ALL}
    made[f"{COMMANDS}/index.md"] = "\n".join(_commands())
    made["reference/http.md"] = "\n".join(_http())
    made["reference/metrics.md"] = "\n".join(_metrics())
    made["reference/transformers.md"] = "\n".join(_transformers())
    return made


def command_nav() -> list[Any]:
    return [f"{COMMANDS}/index.md", *({word: f"{COMMANDS}/{file_of(word)}"} for word in ALL)]


@cache
def sources() -> frozenset[str]:
    """The modules that define the fields of configs."""
    kinds = {kind for word in ALL for kind in _nested(config_class(word))} | _nested(ModelConfig)
    return frozenset(
        _definition(kind, field.name).__module__ for kind in kinds for field in fields(kind)
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table without the columns that are empty."""
    kept = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    head, *lines = ([line[place] for place in kept] for line in (columns, *rows))
    return f"{wording.table(head, lines)}\n"


def file_of(word: str) -> str:
    """The file of a command's page; `index.md` is the folder's own, which lists the commands."""
    return "raybert_index.md" if word == "index" else f"{word.replace(' ', '_')}.md"


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    yield "`raybert <word> --help` shows the same. A value on the command line wins over one from"
    yield "`--config`; several `--config` are read from left to right. `--print_config` prints what"
    yield "a run would use, as TOML that can be run again. In the tables of options, a name links"
    yield "to the code that defines it.\n"
    for title, words in (("Stages", STAGES), ("Other commands", ALL.keys() - STAGES.keys())):
        rows = [
            [f"[`{word}`]({file_of(word)})", ALL[word].summary] for word in ALL if word in words
        ]
        yield f"## {title}\n"
        yield table(["word", "what it does"], rows)


def _command(word: str) -> Iterator[str]:
    parser = parser_for(word)
    yield f"# `raybert {word}`\n"
    yield f"{_capital(ALL[word].summary)}.\n"
    configs = sorted(CONFIGS.glob(f"{word}/*.toml"))
    if configs:
        rows = [[f"`{path.relative_to(CONFIGS.parent)}`", purpose_of(path)] for path in configs]
        yield "## Shipped configs\n"
        yield table(["`--config`", "what it is"], rows)
    for group in parser._action_groups:
        actions = filter(_is_field, group._group_actions)
        rows = [row for action in actions for row in _options(word, action)]
        if rows:
            title, about = re.split(r"[.;] *|$", group.title or "options", maxsplit=1)
            yield f"## {_capital(title)}\n"
            yield f"{_capital(about).removesuffix('.')}.\n" if about else ""
            yield table(OPTIONS, rows)
    if word == "serve":
        yield from _served_models()


def _served_models() -> Iterator[str]:
    yield "## A model with settings of its own\n"
    yield "In a config file, each table `[models.<name>]` is a model. It takes the options above"
    yield "from `num_replicas` to `follow_s`, and `limits`, for itself alone, and:\n"
    shared = {field.name for field in fields(config_class("serve"))}
    yield table(OPTIONS, [*_fields("models.<name>", ModelConfig, without=shared)])


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _is_field(action: Any) -> bool:
    return getattr(action, "_typehint", None) is not None and not action.dest.endswith(".help")


def _options(word: str, action: Any) -> Iterator[list[str]]:
    """The option, and those of a config that may be left out as a whole."""
    hint = action._typehint
    default = "**required**" if action.required else _default(action.default)
    *outer, name = action.dest.split(".")
    kind = config_class(word)
    for part in outer:
        kind = next(filter(is_dataclass, alternatives(get_type_hints(kind)[part])))
    source = _linked(f"--{action.dest}", kind, name)
    yield [source, _values(hint), default, _meaning(action.help or "")]
    for inside in filter(is_dataclass, alternatives(hint)):
        yield from _fields(f"--{action.dest}", inside)


def _fields(prefix: str, kind: Any, without: Collection[str] = ()) -> Iterator[list[str]]:
    """A row for each field of a config and of those in it."""
    hints, documented = get_type_hints(kind, include_extras=True), docstrings(kind)
    for field in fields(kind):
        if field.name in without:
            continue
        value = default_of(field)
        default = "**required**" if value is MISSING else _default(value)
        name, hint = f"{prefix}.{field.name}", hints[field.name]
        meaning = _meaning(documented[field.name])
        yield [_linked(name, kind, field.name), _values(hint), default, meaning]
        for inside in filter(is_dataclass, alternatives(hint)):
            yield from _fields(name, inside)


def _nested(kind: Any) -> set[Any]:
    """The config, and those in it."""
    hints = get_type_hints(kind).values()
    inside = filter(is_dataclass, (each for hint in hints for each in alternatives(hint)))
    return {kind}.union(*map(_nested, inside))


def _definition(kind: Any, field: str) -> Any:
    """The class whose body has the field: the config, or one that it extends."""
    return next(cls for cls in kind.__mro__ if field in vars(cls).get("__annotations__", {}))


def _linked(option: str, kind: Any, field: str) -> str:
    """The option as a link to its definition."""
    cls = _definition(kind, field)
    page = f"../code/{cls.__module__}.md"
    return f"[`{option}`]({page}#{cls.__module__}.{cls.__qualname__}.{field})"


def _meaning(text: str) -> str:
    for shown, page in LISTS.items():
        text = text.replace(shown, f"[{shown}](../../{page}.md)")
    return text


def _default(value: Any) -> str:
    if value is None:
        return "none"
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _values(hint: Any) -> str:
    """A type as words: `int, at least 1`; `fp32 or bf16`."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        kinds = [*map(_values, inside)]
        return (", or " if any(", " in kind for kind in kinds) else " or ").join(kinds)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inside)
    if origin is Annotated:
        return ", ".join([_values(inside[0]), *map(str, inside[1:])])
    if origin in (list, tuple):
        return f"list[{', '.join(_values(kind) for kind in inside if kind is not Ellipsis)}]"
    if origin is dict:
        return "table" if inside[1] is Any else f"table of {_values(inside[1])}"
    if hint is NoneType:
        return "none"
    return "table" if is_dataclass(hint) else str(hint.__name__)


def _http() -> Iterator[str]:
    from serve.http.app import create_front_app
    from serve.surfaces.catalog import SURFACES

    described = create_front_app({}).openapi()
    yield "# HTTP\n"
    yield "What a server answers at its root. Each model answers the paths of all surfaces below"
    yield "`/v1/models/<name>` as well, and has a description of its own at"
    yield "`/v1/models/<name>/openapi.json`, with the shapes of its task;"
    yield "[Serving](../serving/clients.md#every-task) has an example of every task.\n"
    of_surface = {
        endpoint.path or "/": surface.name for surface in SURFACES for endpoint in surface.endpoints
    }
    groups: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    refusals: dict[str, str] = {}
    for path, methods in described["paths"].items():
        for method, entry in methods.items():
            name = "front" if (method, path) == ("get", "/") else of_surface.get(path, "front")
            groups.setdefault(name, []).append((method.upper(), path, entry))
            refusals |= {
                status: answer["description"]
                for status, answer in entry["responses"].items()
                if status >= "400"
            }
    for name in [*(surface.name for surface in SURFACES), "front"]:
        module = import_module(
            "serve.http.routes.front" if name == "front" else f"serve.surfaces.{name}"
        )
        title, _, about = (inspect.getdoc(module) or "").partition("\n\n")
        yield f"## `{name}`\n"
        yield f"{title}\n\n{about}\n"
        for method, path, entry in groups[name]:
            yield f"### `{method} {path}`\n"
            yield f"{entry.get('description') or entry.get('summary', '')}\n"
            yield from _body(entry, described)
            yield from _answers(entry)
    yield "## Errors\n"
    yield "Each surface has them in the shape that its clients read;"
    yield "[Errors](errors.md#statuses-of-the-server) says what to do.\n"
    yield table(["status", "when"], [[f"`{each}`", refusals[each]] for each in sorted(refusals)])


def errors() -> str:
    """What the code says of its errors: the end of docs/reference/errors.md."""
    return "\n".join(_errors())


def _errors() -> Iterator[str]:
    kinds = [kind for kind in vars(bert_core.errors).values() if isinstance(kind, type)]
    yield "\n## Kinds\n"
    yield "In Python, every error that a user can fix is a `RaybertError`:\n"
    path = "../../bert_core/errors.py"
    rows = [[f"[`{kind.__name__}`]({path})", inspect.getdoc(kind) or ""] for kind in kinds]
    yield table(["exception", "meaning"], rows)
    yield "## Exit codes\n"
    yield table(["code", "meaning"], [[f"`{code}`", text] for code, text in EXIT_CODES.items()])
    yield "`submit` and `jobs attach` exit as their job does.\n"
    yield "## Statuses of the server\n"
    yield "The message in the body says what was wrong. Some surfaces have other statuses, which"
    yield "their clients read ([Serving](../serving/clients.md#errors)).\n"
    yield table(["status", "type", "when", "what to do", "`Retry-After`, at least"], [*_statuses()])


def _statuses() -> Iterator[list[str]]:
    kinds: list[type[RequestError]] = [RequestError]
    for kind in kinds:  # which grows
        kinds += kind.__subclasses__()
    for kind in sorted(kinds, key=lambda kind: kind.status):
        when, _, rest = " ".join((inspect.getdoc(kind) or "").split()).partition(". ")
        retry_after_s = kind("").retry_after_s
        seconds = "" if retry_after_s is None else f"{retry_after_s} s"
        yield [f"{kind.status}", f"`{kind.error_type}`", f"{when.rstrip('.')}.", rest, seconds]


def _body(entry: dict[str, Any], described: dict[str, Any]) -> Iterator[str]:
    schema = (
        entry.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    )
    if not schema:
        return
    schema = _resolved(schema, described)
    required = schema.get("required", [])
    rows = [
        [
            f"`{name}`",
            f"`{_type(each, described)}`",
            "**required**"
            if name in required
            else _default(each["default"])
            if "default" in each
            else "",
            each.get("description", ""),
        ]
        for name, each in schema.get("properties", {}).items()
    ]
    if rows:
        yield table(["field", "type", "default", "meaning"], rows)


def _answers(entry: dict[str, Any]) -> Iterator[str]:
    """The media types of what succeeds, and the statuses of errors."""
    answers = entry["responses"]
    good = [
        f"`{status}` as {' or '.join(f'`{form}`' for form in answer.get('content', ())) or 'text'}"
        for status, answer in answers.items()
        if status < "400"
    ]
    bad = " ".join(f"`{status}`" for status in answers if status >= "400")
    yield f"Answers {', '.join(good)}; errors {bad}.\n" if bad else f"Answers {', '.join(good)}.\n"


def _resolved(schema: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        place: Any = described
        for part in schema["$ref"].removeprefix("#/").split("/"):
            place = place[part]
        schema = place
    return schema


def _type(schema: dict[str, Any], described: dict[str, Any]) -> str:
    """A JSON Schema in a few words."""
    schema = _resolved(schema, described)
    if "anyOf" in schema or "oneOf" in schema:
        kinds = [_type(each, described) for each in schema.get("anyOf") or schema["oneOf"]]
        return " or ".join(dict.fromkeys(kinds))
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    kind = schema.get("type", "any")
    if kind == "array" and "items" in schema:
        return f"list of {_type(schema['items'], described)}"
    return kind if isinstance(kind, str) else " or ".join(kind)


def _transformers() -> Iterator[str]:
    yield "# From transformers' names to ours\n"
    yield "What the fields of `TrainingArguments` are called here; where stages differ, the first"
    yield "name is that of `finetune`, the second that of `pretrain`. Who gives a command a name of"
    yield "the left column is told the one in the middle.\n"
    for title, names in (("The Trainer", TRAINER), ("Scripts, older versions, peers", PEERS)):
        rows = [
            [f"`{name}`", ", ".join(f"`--{flag}`" for flag in ours.flags), ours.note]
            for name, ours in names.items()
            if ours.flags[:1] != (name,) or ours.note
        ]
        yield f"## {title}\n"
        yield table(["theirs", "ours", "remark"], rows)


def _metrics() -> Iterator[str]:
    from pipelines.training import gauges
    from serve.observe import metrics
    from tracking.runs import metric_names as names

    yield "# Metrics\n"
    yield "## Prometheus, of the server\n"
    yield f"At `/metrics` of the server and at Ray's agents, after `ray_{metrics.PREFIX}_`;"
    yield "counters end in `_total`. [Operate](../serving/operate.md#metrics) says how to scrape"
    yield "them, [Operations](../operations.md#alerts) has alerts.\n"
    yield table(
        ["metric", "kind", "labels", "meaning"],
        [
            [
                f"`{each.name}`",
                each.kind,
                ", ".join(f"`{label}`" for label in each.labels),
                each.meaning,
            ]
            for each in metrics.METRICS
        ],
    )
    yield "## Prometheus, of training\n"
    yield f"At Ray's agents, after `ray_{gauges.PREFIX}`; all are gauges, and the label `output`"
    yield "tells runs apart.\n"
    rows = [[f"`{name}`", f"{meaning}."] for name, meaning in (gauges.POINT | gauges.SUMS).items()]
    rows.append([f"`{gauges.SECONDS}`", "Seconds of the wall time of the run, by `activity`."])
    yield table(["metric", "meaning"], rows)
    yield "## MLflow\n"
    yield "Of training, with the step as index. A metric of one part of the loss has the prefix"
    yield "`train/`, one that is measured on other rows theirs: `held_out/mlm_loss`,"
    yield "`selection/task/accuracy`. What a task measures is in [Tasks](../tasks.md).\n"
    yield table(
        ["metric", "meaning"],
        [[f"`{name}`", f"{meaning}."] for name, meaning in names.MEANINGS.items()],
    )
    yield "What the wall time is divided into:\n"
    rows = [[f"`{names.time_of(name)}`", meaning] for name, meaning in names.ACTIVITIES.items()]
    yield table(["metric", "seconds of"], rows)
    yield f"How busy each node was is below `{names.SYSTEM}`, on the run's tab *System metrics*.\n"
