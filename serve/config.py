"""The config of `raybert serve`, and of each model that it serves."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import orjson
import pydantic

from bert_core.checks import (
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    check_fields,
)
from bert_core.errors import ConfigError
from bert_core.wording import nearest, shown
from serve.request.complaint import complaint
from serve.request.limits import Limits
from serve.request.local_hosts import is_loopback

ComparisonMode = Literal["shadow", "split"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Name of a model."""
_BETWEEN = re.compile(r",\s*|\s+(?=[^\s=/]+=)")
"""Commas, and white space before another name: a path may have spaces."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Settings of a served model."""

    num_replicas: PositiveInt = 1
    """Processes per model."""
    max_replicas: PositiveInt | None = None
    """Add processes up to this many while more tokens wait than `target_queue_tokens` per process;
    by default their number is fixed."""
    target_queue_tokens: PositiveInt = 8192
    """Tokens waiting per process that are worth another process."""
    threads: PositiveInt = 1
    """Compute threads per replica."""
    num_cpus: PositiveFloat | None = None
    """CPUs that a replica reserves; by default as many as `threads`. A fraction lets several small
    models share a core."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs that a replica reserves; 0 computes on the CPU, a fraction shares one GPU."""
    backend: Literal["auto", "torch", "onnxruntime", "openvino"] = "auto"
    """Engine: `torch` for bundles with weights, `onnxruntime` or `openvino` for exported
    ones. `auto` measures on the task's examples those that may run the bundle, and takes the
    fastest."""
    precision: Literal["fp32", "bf16", "int8", "int8_bf16"] | None = None
    """Precision of matrix products: `bf16` is faster on a GPU, or on a CPU with AMX, and scores
    differ from the third digit on. By default fp32 for weights; a graph is run at those whose
    metrics passed when it was exported."""
    max_batch_tokens: PositiveInt = 2048
    """Maximum tokens per forward pass, padding included; a longer text gets its own pass."""
    max_wait_ms: NonNegativeFloat = 2.0
    """Maximum wait of a pass for more requests; a request to an idle model never waits."""
    max_ongoing_requests: PositiveInt = 256
    """Maximum concurrent requests per replica, so that batches can fill; as many again may wait."""
    limits: Limits = field(default_factory=Limits)
    """Limits beyond which a request is refused at once, before it costs anything."""
    truncate: bool = False
    """Cut texts that are longer than the model reads, unless a request says otherwise; by default
    they are refused."""
    cache_mib: NonNegativeInt = 0
    """MiB of answers that a replica keeps, so that an input that was asked before is not computed
    again; 0 keeps none."""
    follow_s: NonNegativeFloat = 5.0
    """Seconds between questions to the registry whether an alias has moved; its new version is then
    served without a failed request. 0 never asks."""
    allow_other_labels: bool = False
    """Serve a version with other labels than the model was deployed with when its alias moves. By
    default it is refused, since clients may not know them, until the config is applied again."""

    @property
    def reserved_cpus(self) -> float:
        """Number of CPUs that a replica reserves."""
        return float(self.threads) if self.num_cpus is None else self.num_cpus

    def _check(self) -> None:
        check_fields(self)
        for name in ("follow_s", "max_wait_ms"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name}: wanted a finite number, got {getattr(self, name)}")
        if self.num_gpus > 1 and not float(self.num_gpus).is_integer():
            raise ConfigError(
                f"num_gpus: wanted a fraction below 1 or a whole number, got {self.num_gpus}"
            )
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ConfigError(
                f"max_replicas: wanted at least num_replicas, {self.num_replicas}, got "
                f"{self.max_replicas}"
            )


@dataclass(frozen=True, kw_only=True)
class CandidateConfig:
    """A second model that answers some of a model's requests, for comparison."""

    model: str
    """The candidate's reference, as a model's."""
    share: PositiveShare = 0.1
    """The share of requests."""
    mode: ComparisonMode = "shadow"
    """`shadow`: the model's answer is returned, and how far the candidate agrees is recorded in
    MLflow. `split`: the candidate's answer is returned, to the same callers every time."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="candidate.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelSettings):
    """One model: a table `[models.<name>]` of the config file."""

    model: str
    """The model's reference."""
    candidate: CandidateConfig | None = None
    """The model that it is compared with."""

    def __post_init__(self) -> None:
        self._check()
        if not self.model:
            raise ConfigError("model: wanted a reference, got an empty text")


@dataclass(frozen=True, kw_only=True)
class Command:
    """The models to serve, or another action; a base class so that `--help` shows it first."""

    models: dict[str, Any] | list[str] | str = ""
    """Models to serve, as name=reference, several as a list, with spaces or commas between them; a
    reference is a bundle's folder or URI, models:/name@alias of the registry, or
    owner/name@revision of the Hugging Face hub. In a file also as tables, each with settings of its
    own: [models.docs] with model = "models:/docs@champion", and fields below that differ for it."""
    indexes: dict[str, Any] | list[str] | str = ""
    """Indexes of `raybert index` to search in, as name=folder, whose vectors a served model has
    made. The same name several times is one index in several versions, each by another version of
    its model, which moves only to those. In a file: [indexes] with docs = ["runs/index"]."""
    apply: str | None = None
    """Apply this TOML file to the cluster at RAY_ADDRESS, and return once its models answer: adds,
    changes and removes models without touching the others. They stay when this command ends."""
    dry_run: bool = False
    """With `apply`: change nothing, and print the config file with which `serve deploy` would do
    the same."""
    status: bool = False
    """Show the models that the cluster at RAY_ADDRESS serves."""
    stop: bool = False
    """Stop serving on the cluster at RAY_ADDRESS."""
    default: str | None = None
    """The model that answers at the root where a request names none and it can do the task; by
    default the first of `models`."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig(ModelSettings, Command):
    """Serve one or several models over HTTP."""

    host: str = "127.0.0.1"
    """Address to listen on: 127.0.0.1 for this machine only, 0.0.0.0 for all interfaces."""
    port: Port = 8000
    """Port to listen on."""
    together: bool = False
    """Run all models and the front in one process, which saves some 500 MB per model; one that
    fails then takes the others with it."""
    haproxy: bool = True
    """Put HAProxy in front (far more requests per second); false uses Ray's own proxy."""
    keys: str | None = None
    """File of API keys, made by `raybert serve keys create NAME --keys FILE`: requests then need
    one of them. Keys added or revoked later count within seconds where replicas can read it."""
    no_auth: bool = False
    """Listen beyond this machine without keys: anyone who reaches the port can use the models."""
    tls_certificate: str | None = None
    """PEM file with certificate, chain and private key: HAProxy then speaks HTTPS only. It is read
    on every node with a proxy."""
    log_format: Literal["text", "json"] = "text"
    """Format of the server's log, which has a line per request and never a text of one."""
    otlp_endpoint: str | None = None
    """Collector of traces that speaks OTLP over HTTP, as http://localhost:4318; by default there
    are none. Needs the extra `otlp`."""
    trace_share: PositiveShare = 1.0
    """Share of requests that are traced; those with a `traceparent` do as their caller does."""
    allow_open_cluster: bool = False
    """Serve on the cluster at RAY_ADDRESS even if it requires no token, so that anyone who reaches
    its ports can run code there."""
    tracking_uri: str | None = None
    """MLflow's tracking URI, for references to the registry; default as in the other stages."""
    drain_s: PositiveFloat = 30.0
    """Seconds to wait for requests in progress when the server, a model or a replica stops (at
    least 7 for a replica). A second SIGTERM or Ctrl-C does not wait."""

    def __post_init__(self) -> None:
        self._check()
        actions = {"apply": self.apply is not None, "status": self.status, "stop": self.stop}
        chosen = [name for name, is_chosen in actions.items() if is_chosen]
        if len(chosen) > 1:
            raise ConfigError(
                f"{chosen[1]}: wanted one of apply, status and stop, got {chosen[0]} too"
            )
        if self.dry_run and self.apply is None:
            raise ConfigError("dry_run: wanted apply with it, got none: give --apply FILE")
        if not self.models and self.models != {}:
            if chosen:
                return
            raise ConfigError(
                "models: wanted a value, got none: give --models name=reference, or a file with "
                "tables [models.<name>]"
            )
        models = self.served
        _ = self.served_indexes
        if self.default is not None and self.default not in models:
            raise ConfigError(
                f"default: wanted one of the models, {', '.join(models)}, got {self.default!r}"
                f"{nearest(self.default, models)}"
            )
        if self.haproxy and self.host not in ("127.0.0.1", "0.0.0.0"):
            # HAProxy looks for its node's replicas on 127.0.0.1; they listen on `host`.
            raise ConfigError(
                "host: wanted 127.0.0.1 or 0.0.0.0 behind HAProxy, got "
                f"{self.host!r}: give one of them, or set haproxy = false"
            )
        if not is_loopback(self.host) and not (self.keys or self.no_auth):
            raise ConfigError(
                f"keys: wanted a file of API keys to listen on {self.host}, which others may "
                "reach, got none: make one with `raybert serve keys create NAME --keys FILE`, or "
                "set no_auth"
            )
        if self.tls_certificate is not None and not self.haproxy:
            raise ConfigError(
                f"tls_certificate: wanted none without HAProxy, which speaks TLS, got "
                f"{self.tls_certificate}: leave haproxy on"
            )
        if self.otlp_endpoint is not None and not self.haproxy:
            raise ConfigError(
                "otlp_endpoint: wanted none without HAProxy, since Ray's own proxy puts paths of "
                f"requests into traces, got {self.otlp_endpoint}: leave haproxy on"
            )
        if self.together:
            self._check_together()

    @cached_property
    def served(self) -> dict[str, ModelConfig]:
        """Each model by name, in the order given; its own settings take precedence over the common
        ones.

        Raises: ConfigError if there is no model, a model has another form, a name occurs twice, or
            a setting is unknown or out of range; never once the config is made.
        """
        if isinstance(self.models, dict):
            if not self.models:
                raise ConfigError("models: wanted at least one table [models.<name>], got none")
            return {name: _of_table(self, name, table) for name, table in self.models.items()}
        common = {name: getattr(self, name) for name in _SETTINGS}
        return {
            name: ModelConfig(model=reference, **common)
            for name, reference in parse_models(self.models).items()
        }

    @cached_property
    def served_indexes(self) -> dict[str, list[str]]:
        """Each index by name, as the folders of its versions.

        Raises: ConfigError if one has another form; never once the config is made.
        """
        if not isinstance(self.indexes, dict):
            return parse_indexes(self.indexes)
        folders = {}
        for name, value in self.indexes.items():
            listed = [value] if isinstance(value, str) else value
            is_list = isinstance(listed, list) and all(isinstance(each, str) for each in listed)
            if not (NAME.fullmatch(name) and is_list and listed):
                raise ConfigError(
                    f"indexes.{name}: wanted a folder, or a list of folders, under a name of "
                    f"letters, digits, dots, dashes and underscores, got {shown(value)}"
                )
            folders[name] = listed
        return folders

    def _check_together(self) -> None:
        for name, model in self.served.items():
            if model.num_replicas > 1 or model.max_replicas not in (None, 1):
                field = "num_replicas" if model.max_replicas is None else "max_replicas"
                raise ConfigError(
                    f"{field}: wanted 1 with together, which is one process, got "
                    f"{getattr(model, field)} for {name}: leave {field} or together out"
                )


_SETTINGS = tuple(each.name for each in fields(ModelSettings))
_OF_SERVER = ("keys", "tracking_uri", "drain_s")
"""What `config_of_one` takes besides a model's settings."""
_READER = pydantic.TypeAdapter(ModelConfig)


def config_of_one(arguments: Mapping[str, Any]) -> ServeConfig:
    """Return the config of a single model, from the arguments of `serve run serve.app:build`.

    Args:
        arguments: `name` (by default `model`), `model`, the settings of a model, and `keys`,
            `tracking_uri` and `drain_s` of `ServeConfig`; values from a command line are texts.
            `candidate` is not possible, since a separate application records comparisons.
    Raises: ConfigError for an argument that is unknown, missing or out of range.
    """
    known = ["name", "model", *_SETTINGS, *_OF_SERVER]
    for key in arguments:
        if key not in known:
            raise ConfigError(
                f"{key}: there is no such argument, there are {', '.join(known)}"
                f"{nearest(key, known)}"
            )
    given = dict(arguments)
    name = given.pop("name", None)
    name = "model" if name is None else str(name)  # YAML reads some names as numbers
    table = {key: given.pop(key) for key in ("model", "limits") if key in given}
    content = _as_json("the arguments", {**given, "models": {name: table}})
    try:
        return pydantic.TypeAdapter(ServeConfig).validate_json(content)
    except pydantic.ValidationError as error:
        raise ConfigError(complaint(error)) from error


def _of_table(config: ServeConfig, name: str, table: Any) -> ModelConfig:
    where = f"models.{name}"
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: wanted a name of letters, digits, dots, dashes and underscores, got {name!r}"
        )
    if isinstance(table, str):  # name = "reference"
        table = {"model": table}
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: wanted a table, got {shown(table)}")
    _check_keys(where, table, ModelConfig)
    nested: dict[str, type] = {"limits": Limits, "candidate": CandidateConfig}
    for key, kind in nested.items():
        if isinstance(table.get(key), dict):
            _check_keys(f"{where}.{key}", table[key], kind)
    values = {key: getattr(config, key) for key in _SETTINGS if key not in table} | table
    if isinstance(values["limits"], dict):
        values["limits"] = asdict(config.limits) | values["limits"]
    try:
        # JSON's rules: no text for numbers, no number for a boolean.
        return _READER.validate_json(_as_json(where, values), strict=True)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from error
    except pydantic.ValidationError as error:
        raise ConfigError(f"{where}.{complaint(error)}") from error


def _as_json(where: str, values: Mapping[str, Any]) -> bytes:
    """Return values as JSON. Raises: ConfigError for what JSON has not, as a number of TOML or a
    key of YAML may be."""
    try:
        return orjson.dumps(values)
    except orjson.JSONEncodeError as error:
        raise ConfigError(
            f"{where}: wanted texts, numbers, booleans, lists and tables with texts as keys, got "
            f"something else ({error}): correct it"
        ) from error


def _check_keys(where: str, table: Mapping[str, Any], kind: type) -> None:
    known = [each.name for each in fields(kind)]
    for key in table:
        if key not in known:
            raise ConfigError(
                f"{where}.{key}: there is no such setting, there are {', '.join(known)}"
                f"{nearest(key, known)}"
            )


def parse_indexes(indexes: list[str] | str) -> dict[str, list[str]]:
    """Return the folders of `name=folder`, … by name, in the order given.

    Raises: ConfigError if one has another form.
    """
    entries = _BETWEEN.split(indexes.strip(", ")) if isinstance(indexes, str) else indexes
    folders: dict[str, list[str]] = {}
    for entry in entries if indexes else ():
        name, equals, folder = (part.strip() for part in entry.partition("="))
        if not (equals and folder and NAME.fullmatch(name)):
            raise ConfigError(
                "indexes: wanted name=folder, as in docs=runs/index, with a name of letters, "
                f"digits, dots, dashes and underscores, got {entry!r}"
            )
        folders.setdefault(name, []).append(folder)
    return folders


def parse_models(models: list[str] | str) -> dict[str, str]:
    """Return the references of `name=reference`, … by name, in the order given.

    Raises: ConfigError if there is none, one has another form, or a name occurs twice.
    """
    entries = _BETWEEN.split(models.strip(", ")) if isinstance(models, str) else models
    references: dict[str, str] = {}
    for entry in entries:
        name, equals, reference = (part.strip() for part in entry.partition("="))
        if not (equals and reference and NAME.fullmatch(name)):
            raise ConfigError(
                "models: wanted name=reference, as in docs=models:/docs@champion, with a name of "
                f"letters, digits, dots, dashes and underscores, got {entry!r}"
            )
        if name in references:
            raise ConfigError(
                f"models: wanted different names, got {name!r} for {references[name]} and "
                f"{reference}: rename one of them"
            )
        references[name] = reference
    if not references:
        raise ConfigError("models: wanted at least one name=reference, got none")
    return references
