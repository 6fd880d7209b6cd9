"""Registers bundles in MLflow's model registry, and decides which version is the champion.

Servers load `models:/<name>@champion`, which `tracking.models.references` finds. MLflow and torch
are imported inside the functions that need them.
"""

import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from importlib.metadata import version as installed_version
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_origin

import pyarrow as pa

from bert_core.checks import base_type
from bert_core.errors import ConfigError, ResourceError
from bert_core.metrics.bootstrap import Verdict
from bert_core.wording import error_in_one_line, first_line
from tracking.store.server import as_default, experiment_id, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models import ModelSignature
    from mlflow.types import Schema

    from bert_core.inference.predictor import Predictor
    from bert_core.tasks.base import Task

CHAMPION = "champion"
DIGEST_TAG = "raybert.bundle"
PATH_TAG = "raybert.path"
"""Path of the bundle inside MLflow's model: MLflow names it after the bundle's folder."""
TASK_TAG = "raybert.task"
METRIC_TAG = "metric."
HUB_TAG = "raybert.hub"
BEFORE_TAG = "raybert.before"
"""With `.` and an alias, of a registered model: the versions that the alias had, the last one
last."""
MOST_BEFORE = 100
"""`owner/name@commit` of the same bundle on the Hugging Face hub."""
CARD = "README.md"
DESCRIPTION_CHARACTERS = 5000
MODEL_CODE = Path(__file__).with_name("pyfunc.py")
# Requirements for answering, besides those of the backend, and raybert itself, which is not on a
# package index.
REQUIREMENTS = (
    "jaxtyping",
    "mlflow",
    "numpy",
    "pandas",
    "pyarrow",
    "safetensors",
    "scikit-learn",
    "tokenizers",
)
_OUTPUT_TYPES = {
    pa.string(): "string",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
}
_SAFE_IN_URIS = re.compile(r"\w[\w.-]*", re.ASCII)
_FORBIDDEN_IN_NAMES = re.compile(r"[/:@.%'\"`]")


@dataclass(frozen=True)
class Version:
    """A registered version of a model."""

    name: str
    version: str
    digest: str
    """Digest of its bundle; empty if it was not registered by raybert."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """A bundle to register, with what MLflow shows beside it."""

    bundle: Path
    """A local folder with a fine-tuned bundle."""
    name: str
    """Of the registered model."""
    metrics: Mapping[str, float | int]
    """Shown with the version, and with the model of the run."""
    input_example: Sequence[Any]
    """A few inputs as callers send them, which the bundle must answer before it is registered; all
    texts, or all objects. Inputs that are too long are cut."""
    experiment: str = "raybert"
    run_id: str | None = None
    """The MLflow run that publishes."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How a bundle compares with the champion."""

    champion: Version | None = None
    """The champion of the comparison; if another version has become the champion since, that one
    stays."""
    verdict: Verdict | None = None
    """Of the bundle and the champion, on rows that selected neither."""
    not_compared: str = ""
    """A clause that says why there is no verdict."""


NOT_COMPARED = Comparison()


@dataclass(frozen=True)
class Publication:
    """The outcome of `publish`."""

    version: Version
    is_new: bool
    """False if this bundle was already registered."""
    is_champion: bool
    """Whether the alias now points to this version."""
    why: str
    """A sentence for the user."""


def check_name(name: str) -> None:
    """Check that a model can be registered under this name. Raises: ConfigError."""
    if _FORBIDDEN_IN_NAMES.search(name) or not name.strip():
        raise ConfigError(
            f"name: wanted one without / : @ . % and quotes, such as docstrings-library, "
            f"got {name!r}"
        )


def champion(name: str, *, uri: str) -> Version | None:
    """Return the version that the champion alias points to; None if the model or alias does not
    exist yet."""
    with as_default(uri) as client:
        return _champion(client, name)


def publish(
    release: Release,
    comparison: Comparison = NOT_COMPARED,
    *,
    uri: str,
    force: bool = False,
) -> Publication:
    """Register a bundle, and make it the champion if it is not worse than the current one.

    A bundle that is already registered gets no second version; the alias may still move to it.

    Args:
        force: move the alias regardless of the scores.
    Raises: ConfigError for an invalid name; FormatError if the bundle is damaged or has no
        task; ResourceError if MLflow does not answer, or its artifact store takes nothing.
    """
    # Imported late because it imports torch.
    from bert_core.inference.predictor import Predictor

    check_name(release.name)
    release = replace(release, bundle=Path(release.bundle).absolute())
    with as_default(uri) as client:
        predictor = Predictor(release.bundle, device="cpu")
        version = _find_version(client, release.name, predictor.bundle.digest)
        is_new = version is None
        if version is None:
            version = _register(client, uri, release, predictor)
        # Only now: storing a bundle takes a while, and another process may publish in the meantime.
        before = _champion(client, release.name)
        is_champion, why = _decide(version, before, comparison, force=force)
        if is_champion and before != version:
            _move(client, release.name, CHAMPION, version.version, before)
    return Publication(version, is_new, is_champion, why)


def promote(
    name: str, version: str, *, alias: str = CHAMPION, uri: str, force: bool = False
) -> str:
    """Make an alias point to a registered version, and return a sentence for the user.

    `champion` moves from another version only with `force`, since nothing is compared here. The
    model then gets that version's card as its description.
    Raises: ConfigError if there is no such version, if `champion` stays where it is, or if MLflow
        does not accept the alias; ResourceError if MLflow does not answer.
    """
    from mlflow.exceptions import MlflowException

    check_name(name)
    with as_default(uri) as client:
        known = {str(one.version): one for one in client.search_model_versions(f"name = '{name}'")}
        if version not in known:
            there_are = ", ".join(sorted(known, key=int)) or "none"
            raise ConfigError(
                f"version: wanted a version of {name!r} in {without_password(uri)}, got "
                f"{version!r}; there are: {there_are}"
            )
        new, before = _version(known[version]), _aliased(client, name, alias)
        moves, why = True, f"{alias} is version {version}"
        if alias == CHAMPION:
            comparison = Comparison(not_compared="nothing is compared here")
            moves, why = _decide(new, before, comparison, force=force)
        if not moves:
            raise ConfigError(why)
        if before != new:
            try:
                _move(client, name, alias, version, before)
            except MlflowException as error:
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                raise ConfigError(
                    f"alias: wanted one that MLflow takes, got {alias!r} "
                    f"({first_line(str(error))}): give another"
                ) from error
            why += f"; it was version {before.version}" if before else ""
        if alias == CHAMPION:
            client.update_registered_model(name, description=known[version].description or "")
    return f"models:/{name}@{alias}: {why}"


def rollback(name: str, *, alias: str = CHAMPION, uri: str) -> str:
    """Make an alias point to the version that it had before, and return a sentence for the user.

    Done again, it goes one version further back. The model gets the card of the version that its
    champion is.
    Raises: ConfigError if there is no model of this name, if raybert has not moved the alias, or if
        the version is gone; ResourceError if MLflow does not answer.
    """
    check_name(name)
    with as_default(uri) as client:
        known = {str(one.version): one for one in client.search_model_versions(f"name = '{name}'")}
        if not known:
            raise ConfigError(
                f"no model {name!r} is registered in {without_password(uri)}: publish it there, or "
                "give the tracking_uri of another store"
            )
        now, history = _aliased(client, name, alias), _history(client, name, alias)
        way_out = f"`raybert promote {name} VERSION --alias {alias} --force` moves it to any other"
        if not history:
            raise ConfigError(
                f"rollback: wanted a version that {alias} of {name!r} had before, there is none"
                f"{f'; it is version {now.version}' if now else ''}: {way_out}"
            )
        version = history[-1]
        if version not in known:
            raise ConfigError(
                f"rollback: wanted version {version}, which {alias} of {name!r} had before, it is "
                f"no longer registered; there are: {', '.join(sorted(known, key=int))}: {way_out}"
            )
        client.set_registered_model_alias(name, alias, version)
        client.set_registered_model_tag(name, f"{BEFORE_TAG}.{alias}", ",".join(history[:-1]))
        if alias == CHAMPION:
            client.update_registered_model(name, description=known[version].description or "")
    was = f"; it was version {now.version}" if now else ""
    return f"models:/{name}@{alias}: {alias} is version {version}{was}"


def _move(
    client: "MlflowClient", name: str, alias: str, version: str, before: Version | None
) -> None:
    """Move an alias, and note the version that it had, for `rollback`."""
    client.set_registered_model_alias(name, alias, version)
    if before is not None:
        history = [*_history(client, name, alias), before.version][-MOST_BEFORE:]
        client.set_registered_model_tag(name, f"{BEFORE_TAG}.{alias}", ",".join(history))


def _history(client: "MlflowClient", name: str, alias: str) -> list[str]:
    """Return the versions that an alias had before, the last one last."""
    tags = client.get_registered_model(name).tags
    return list(filter(None, tags.get(f"{BEFORE_TAG}.{alias}", "").split(",")))


def describe(version: Version, card: str, text: str, *, uri: str) -> None:
    """Give a version its model card: as README.md next to the bundle, and its text as description.

    While the version is the champion, the text is also the model's description. Registries limit
    descriptions to 5,000 characters: longer ones are cut at the end of a line.
    Raises: ResourceError if MLflow does not answer.
    """
    with as_default(uri) as client:
        registered = client.get_model_version(version.name, version.version)
        with tempfile.TemporaryDirectory() as scratch:
            readme = Path(scratch) / CARD
            readme.write_text(card, encoding="utf-8")
            model_id = str(registered.source).removeprefix("models:/")
            client.log_model_artifact(model_id, str(readme), registered.tags[PATH_TAG])
        if len(text) > DESCRIPTION_CHARACTERS:
            rest = f"\n\n… the rest is in {registered.tags[PATH_TAG]}/{CARD} of its files."
            text = text[: DESCRIPTION_CHARACTERS - len(rest)].rpartition("\n")[0] + rest
        client.update_model_version(version.name, version.version, description=text)
        if _champion(client, version.name) == version:
            client.update_registered_model(version.name, description=text)


def note_upload(version: Version, reference: str, run_id: str | None, *, uri: str) -> None:
    """Tag a version, and the run that published it, with the location of its bundle on the hub."""
    with as_default(uri) as client:
        client.set_model_version_tag(version.name, version.version, HUB_TAG, reference)
        if run_id is not None:
            client.set_tag(run_id, HUB_TAG, reference)


def _decide(
    new: Version, before: Version | None, comparison: Comparison, *, force: bool
) -> tuple[bool, str]:
    """Return whether the alias should point to `new`, and why, as a sentence."""
    if before is None:
        return True, f"version {new.version} is the champion: there was none before"
    if before == new:
        return True, f"version {new.version} is already the champion"
    verdict, compared_with = comparison.verdict, comparison.champion
    compared = "" if verdict is None else f", the difference is {verdict}"
    if force:
        return True, f"version {new.version} is the champion by force{compared}"
    if compared_with is not None and compared_with != before:
        return False, (
            f"version {before.version} stays the champion: it became the champion while version "
            f"{new.version} was compared with version {compared_with.version}; publish again, with "
            "another output, to compare them"
        )
    if comparison.not_compared:
        return False, (
            f"version {before.version} stays the champion: {comparison.not_compared}; --force "
            f"makes version {new.version} the champion anyway"
        )
    if verdict is None:
        return False, (
            f"version {before.version} stays the champion: nothing compares version {new.version} "
            "with it; give rows that selected neither, or --force"
        )
    if verdict.not_worse:
        return True, (
            f"version {new.version} is the champion, not worse than version {before.version}"
            f"{compared}"
        )
    return False, (
        f"version {before.version} stays the champion, version {new.version} is worse{compared}; "
        "--force makes it the champion anyway"
    )


def _version(entity: "ModelVersion") -> Version:
    return Version(entity.name, str(entity.version), entity.tags.get(DIGEST_TAG, ""))


def _champion(client: "MlflowClient", name: str) -> Version | None:
    return _aliased(client, name, CHAMPION)


def _aliased(client: "MlflowClient", name: str, alias: str) -> Version | None:
    from mlflow.exceptions import MlflowException

    try:
        aliases = client.get_registered_model(name).aliases
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return _version(client.get_model_version(name, aliases[alias])) if alias in aliases else None


def _find_version(client: "MlflowClient", name: str, digest: str) -> Version | None:
    """Return the registered version that has this bundle; None if no version has it."""
    query = f"name = '{name}' and tags.`{DIGEST_TAG}` = '{digest}'"
    versions = client.search_model_versions(query, max_results=1)
    return _version(versions[0]) if versions else None


def _register(
    client: "MlflowClient", uri: str, release: Release, predictor: "Predictor"
) -> Version:
    """Store the bundle, and register a version of it."""
    from mlflow.exceptions import MlflowException

    model_id = _log_model(client, uri, release, predictor)
    tags = {
        DIGEST_TAG: predictor.bundle.digest,
        PATH_TAG: f"artifacts/{_stored_name(release.bundle)}",
        TASK_TAG: predictor.task.name,
        **{f"{METRIC_TAG}{key}": f"{value:.6g}" for key, value in release.metrics.items()},
    }
    try:
        client.create_registered_model(release.name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    entity = client.create_model_version(
        release.name, f"models:/{model_id}", release.run_id, tags, model_id=model_id
    )
    return _version(entity)


def _log_model(client: "MlflowClient", uri: str, release: Release, predictor: "Predictor") -> str:
    """Store the bundle as an MLflow model with signature, example and metrics. Returns its id."""
    from mlflow.entities import LoggedModelOutput, Metric
    from mlflow.exceptions import MlflowException

    run_id = release.run_id
    experiment = experiment_id(client, uri, release.experiment)
    signature = _signature(predictor, release.input_example)
    logged = client.create_logged_model(
        experiment, release.name, source_run_id=run_id, model_type=predictor.task.name
    )
    try:
        _store(client, logged, release, predictor, signature)
        if run_id is not None:
            now_ms = time.time_ns() // 1_000_000
            values = [
                Metric(key, value, now_ms, 0, model_id=logged.model_id)
                for key, value in release.metrics.items()
            ]
            client.log_batch(run_id, metrics=values)
            client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
    except BaseException:
        with suppress(MlflowException):  # if the server is down, report the original error
            client.finalize_logged_model(logged.model_id, "FAILED")
        raise
    client.finalize_logged_model(logged.model_id, "READY")
    return logged.model_id


def _store(
    client: "MlflowClient",
    logged: "LoggedModel",
    release: Release,
    predictor: "Predictor",
    signature: "ModelSignature",
) -> None:
    import mlflow
    from mlflow.models import Model

    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        mlflow.pyfunc.save_model(
            model,
            mlflow_model=Model(run_id=release.run_id, model_id=logged.model_id),
            python_model=str(MODEL_CODE),
            artifacts={"bundle": str(_storable(release.bundle, Path(scratch)))},
            signature=signature,
            input_example=list(release.input_example),
            pip_requirements=_requirements(predictor),
        )
        try:
            client.log_model_artifacts(logged.model_id, str(model))
        except Exception as error:  # every artifact store has its own error classes
            raise ResourceError(
                f"wanted MLflow to store {release.bundle} in {logged.artifact_location}, it does "
                f"not ({error_in_one_line(error)}): see what `raybert doctor` says of the "
                "artifact store, then run the same command again"
            ) from error


def _stored_name(bundle: Path) -> str:
    """Return the name of a bundle's folder inside MLflow's model, where it becomes part of URIs."""
    return bundle.name if _SAFE_IN_URIS.fullmatch(bundle.name) else "bundle"


def _storable(bundle: Path, scratch: Path) -> Path:
    """Return the bundle's folder, or the folder of a copy in `scratch`: MLflow keeps the folder's
    name, and does not accept links out of a folder, such as those in the hub's cache."""
    from bert_core.bundle.format import bundle_files

    names, stored_name = bundle_files(bundle), _stored_name(bundle)
    if bundle.name == stored_name and not any((bundle / name).is_symlink() for name in names):
        return bundle
    copy = scratch / stored_name
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle / name, copy / name)
    return copy


def _signature(predictor: "Predictor", input_example: Sequence[Any]) -> "ModelSignature":
    """Return the signature: the task's inputs and parameters, and the columns of its best answer.

    Raises: InputError if the bundle does not answer the example.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import ParamSchema, ParamSpec

    task = predictor.task
    predictor.predict(input_example, task.parameters.cutting())
    defaults = task.parameters()
    parameters = [
        # All fields of a parameter class have defaults, so a caller may leave them out.
        ParamSpec(field.name, *_parameter_type(field.type, getattr(defaults, field.name)))
        for field in fields(defaults)
    ]
    return ModelSignature(
        inputs=_input_schema(task, input_example),
        outputs=_output_schema(task),
        params=ParamSchema(parameters),
    )


def _input_schema(task: "Task", input_example: Sequence[Any]) -> "Schema":
    """Return the columns of the example; for texts a single unnamed column, so that a bare list is
    accepted.

    That column has type any if the task also takes other inputs: a tagger takes words, too.
    """
    import pandas as pd
    from mlflow.models import infer_signature
    from mlflow.types import ColSpec, Schema
    from mlflow.types.schema import AnyType

    if not all(isinstance(value, str) for value in input_example):
        return infer_signature(model_input=pd.DataFrame(list(input_example))).inputs
    needs_text = any(one.default is MISSING for one in fields(task.inputs))
    return Schema([ColSpec("string" if needs_text else AnyType())])


def _output_schema(task: "Task") -> "Schema":
    from mlflow.types import ColSpec, Schema

    return Schema([ColSpec(_output_type(kind), name) for name, kind in task.cell_types.items()])


def _output_type(kind: pa.DataType) -> Any:
    """Return MLflow's type for a column of this type: `list<double>` → an array of doubles."""
    from mlflow.types.schema import Array, Object, Property

    if pa.types.is_list(kind):
        return Array(_output_type(kind.value_type))
    if pa.types.is_struct(kind):
        # Fields are optional: an entity has either a group or a tag.
        return Object([Property(one.name, _output_type(one.type), required=False) for one in kind])
    return _OUTPUT_TYPES[kind]


def _parameter_type(annotation: Any, default: Any) -> tuple[str, Any, tuple[int] | None]:
    """Return MLflow's name for a parameter's type, its default, and its shape if it is a list.

    `int | None` → `long`.
    """
    annotation = base_type(annotation)
    if get_origin(annotation) is list:
        return "string", default, (-1,)
    kinds = [
        base_type(kind) for kind in get_args(annotation) or [annotation] if kind is not NoneType
    ]
    return {bool: "boolean", int: "long", float: "double"}.get(kinds[0], "string"), default, None


def _requirements(predictor: "Predictor") -> list[str]:
    names = sorted({*REQUIREMENTS, *predictor.backend.requirements})
    # Without a local part such as `+cpu`, which no package index has.
    return [f"{name}=={installed_version(name).partition('+')[0]}" for name in names]
