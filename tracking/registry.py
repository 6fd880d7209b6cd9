"""Bundles in MLflow's model registry: versions, and which of them is the champion.

`models:/<name>@champion` is what a server loads; `tracking.resolve` finds it. MLflow and torch are
imported inside the functions that need them.
"""

import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version as installed_version
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from bert_core.errors import ConfigError
from tracking.server import as_default, connect, experiment_id

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models import ModelSignature

    from bert_core.predictor import Predictor

CHAMPION = "champion"
DIGEST_TAG = "raybert.bundle"
PATH_TAG = "raybert.path"
"""Where the bundle lies in the model that MLflow keeps: MLflow names it after its folder."""
TASK_TAG = "raybert.task"
METRIC_TAG = "metric."
MODEL_CODE = Path(__file__).with_name("model.py")
# What answering needs besides raybert, which is on no index.
REQUIREMENTS = (
    "jaxtyping",
    "mlflow",
    "numpy",
    "pandas",
    "pyarrow",
    "safetensors",
    "scikit-learn",
    "tokenizers",
    "torch",
)
_FORBIDDEN_IN_NAMES = re.compile(r"[/:@.%'\"`]")


@dataclass(frozen=True)
class Verdict:
    """How the scores of a new model compare with an old one's on the same rows."""

    not_worse: bool
    difference: float
    """Mean of new − old."""
    low: float
    """Lower end of the confidence interval of the difference."""
    high: float
    rows: int

    def __str__(self) -> str:
        return (
            f"{self.difference:+.4f} ({self.low:+.4f} to {self.high:+.4f} by paired bootstrap on "
            f"{self.rows} rows)"
        )


def not_worse(
    new: Sequence[float],
    old: Sequence[float],
    *,
    confidence: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> Verdict:
    """Paired bootstrap over rows: worse is where the whole interval lies below zero.

    So a difference that these rows cannot tell from zero counts as not worse: few rows let more
    pass than many.

    Args:
        new: a score a row, higher is better: 1 for a right answer and 0 for a wrong one, say.
        old: the scores of the other model on the same rows, in the same order.
        samples: how often rows are drawn anew; the interval holds the middle `confidence`.
    Raises: ConfigError if there are no rows, or not as many of one as of the other.
    Source: Efron and Tibshirani 1993, chapter 13 (percentile interval).
    """
    if len(new) != len(old) or not len(new):
        raise ConfigError(
            f"wanted scores of both models on the same rows, got {len(new)} and {len(old)}: "
            "score both on one set of rows"
        )
    differences = np.asarray(new, dtype=float) - np.asarray(old, dtype=float)
    rng = np.random.default_rng(seed)
    rows = len(differences)
    # A row at a time would be slow, all at once takes samples × rows × 8 bytes.
    means = [
        differences[rng.integers(rows, size=(some, rows))].mean(axis=1)
        for some in _chunks(samples, max(1_000_000 // rows, 1))
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return Verdict(bool(high >= 0), float(differences.mean()), float(low), float(high), rows)


def _chunks(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]


@dataclass(frozen=True)
class Version:
    """A registered version of a model."""

    name: str
    version: str
    digest: str
    """Digest of its bundle; empty if someone else registered it."""


@dataclass(frozen=True)
class Publication:
    """What `publish` did."""

    version: Version
    is_new: bool
    """False if this bundle was registered before."""
    is_champion: bool
    """Whether the alias points to this version now."""
    why: str
    """A sentence for the user."""


def champion(name: str, *, uri: str) -> Version | None:
    """The version that the alias points to; None if there is no such model or alias yet."""
    return _champion(connect(uri), name)


def publish(
    bundle: str | Path,
    *,
    name: str,
    uri: str,
    metrics: Mapping[str, float | int],
    input_example: Sequence[str],
    experiment: str = "raybert",
    run_id: str | None = None,
    scores_new: Sequence[float] | None = None,
    scores_champion: Sequence[float] | None = None,
    force: bool = False,
) -> Publication:
    """Register a bundle and let it be the champion if it is not worse than the present one.

    A bundle that is registered already gets no second version; the alias may move to it.

    Args:
        bundle: a local folder with a fine-tuned bundle.
        metrics: shown with the version, and with the model of the run.
        input_example: a few texts; the bundle must answer them before it is registered.
        run_id: the MLflow run that publishes.
        scores_new: a score a row of this bundle, on rows that selected neither model.
        scores_champion: the same of the present champion, of `champion(name, uri=uri)`.
        force: move the alias whatever the scores say.
    Raises: ConfigError for an impossible name; FormatError if the bundle is damaged or has no
        task; ResourceError if MLflow does not answer.
    """
    if _FORBIDDEN_IN_NAMES.search(name) or not name.strip():
        raise ConfigError(
            f"name is {name!r}: wanted one without / : @ . % and quotes, such as docstrings-library"
        )
    bundle = Path(bundle).absolute()
    verdict = None
    if scores_new is not None and scores_champion is not None:
        verdict = not_worse(scores_new, scores_champion)
    with as_default(uri) as client:
        before = _champion(client, name)
        # Imported late: torch comes with it.
        from bert_core.predictor import Predictor

        predictor = Predictor(bundle, device="cpu")
        version = _find_version(client, name, predictor.bundle.digest)
        is_new = version is None
        if version is None:
            experiment = experiment_id(client, uri, experiment)
            model_id = _log_model(
                client, experiment, run_id, bundle, predictor, name, metrics, input_example
            )
            tags = {
                DIGEST_TAG: predictor.bundle.digest,
                PATH_TAG: f"artifacts/{bundle.name}",
                TASK_TAG: predictor.task.name,
                **{f"{METRIC_TAG}{key}": f"{value:.6g}" for key, value in metrics.items()},
            }
            version = _register(client, name, model_id, run_id, tags)
        is_champion, why = _decide(version, before, verdict, force=force)
        if is_champion and before != version:
            client.set_registered_model_alias(name, CHAMPION, version.version)
    return Publication(version, is_new, is_champion, why)


def _decide(
    new: Version, before: Version | None, verdict: Verdict | None, *, force: bool
) -> tuple[bool, str]:
    """Whether the alias is to point to `new`, and why."""
    if before is None:
        return True, f"version {new.version} is the champion: there was none before"
    if before == new:
        return True, f"version {new.version} is the champion already"
    compared = "" if verdict is None else f", the difference is {verdict}"
    if force:
        return True, f"version {new.version} is the champion by force{compared}"
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
        "--force makes it the champion all the same"
    )


def _version(found: "ModelVersion") -> Version:
    return Version(found.name, str(found.version), found.tags.get(DIGEST_TAG, ""))


def _champion(client: "MlflowClient", name: str) -> Version | None:
    from mlflow.exceptions import MlflowException

    try:
        aliases = client.get_registered_model(name).aliases
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return (
        _version(client.get_model_version(name, aliases[CHAMPION])) if CHAMPION in aliases else None
    )


def _find_version(client: "MlflowClient", name: str, digest: str) -> Version | None:
    """The version that holds the bundle with this digest."""
    query = f"name = '{name}' and tags.`{DIGEST_TAG}` = '{digest}'"
    found = client.search_model_versions(query, max_results=1)
    return _version(found[0]) if found else None


def _log_model(
    client: "MlflowClient",
    experiment: str,
    run_id: str | None,
    bundle: Path,
    predictor: "Predictor",
    name: str,
    metrics: Mapping[str, float | int],
    input_example: Sequence[str],
) -> str:
    """Store the bundle as an MLflow model with signature, example and metrics; the model's id."""
    import mlflow
    from mlflow.entities import LoggedModelOutput, Metric
    from mlflow.models import Model

    signature = _signature(predictor, input_example)
    logged = client.create_logged_model(
        experiment, name, source_run_id=run_id, model_type=predictor.task.name
    )
    try:
        with tempfile.TemporaryDirectory() as scratch:
            model = Path(scratch) / "model"
            mlflow.pyfunc.save_model(
                model,
                mlflow_model=Model(run_id=run_id, model_id=logged.model_id),
                python_model=str(MODEL_CODE),
                artifacts={"bundle": str(bundle)},
                signature=signature,
                input_example=list(input_example),
                pip_requirements=_requirements(),
            )
            client.log_model_artifacts(logged.model_id, str(model))
        if run_id is not None:
            now_ms = time.time_ns() // 1_000_000
            values = [
                Metric(key, value, now_ms, 0, model_id=logged.model_id)
                for key, value in metrics.items()
            ]
            client.log_batch(run_id, metrics=values)
            client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
    except BaseException:
        client.finalize_logged_model(logged.model_id, "FAILED")
        raise
    client.finalize_logged_model(logged.model_id, "READY")
    return logged.model_id


def _register(
    client: "MlflowClient", name: str, model_id: str, run_id: str | None, tags: dict[str, str]
) -> Version:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = f"models:/{model_id}"
    return _version(client.create_model_version(name, source, run_id, tags, model_id=model_id))


def _signature(predictor: "Predictor", input_example: Sequence[str]) -> "ModelSignature":
    """Texts and the task's parameters in; out what the bundle answers to the example."""
    import pandas as pd
    from mlflow.models import ModelSignature, infer_signature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    from tracking.model import BundleModel

    model = BundleModel()
    model.predictor = predictor
    answer = model.predict(None, pd.DataFrame({"inputs": list(input_example)}))
    parameters = [
        # Fields of a parameter class all have defaults: a caller may leave them out.
        ParamSpec(field.name, _parameter_type(field.type), field.default)
        for field in fields(predictor.task.parameters)
    ]
    return ModelSignature(
        # Without a name, so that a bare list of texts is taken as well as a frame.
        inputs=Schema([ColSpec("string")]),
        outputs=infer_signature(model_output=answer).outputs,
        params=ParamSchema(parameters),
    )


def _parameter_type(annotation: Any) -> str:
    """MLflow's name for the type of a parameter: `int | None` → `long`."""
    kinds = [kind for kind in get_args(annotation) or [annotation] if kind is not NoneType]
    return {bool: "boolean", int: "long", float: "double"}.get(kinds[0], "string")


def _requirements() -> list[str]:
    # Without the local part, `+cpu`, that no index has.
    return [f"{name}=={installed_version(name).partition('+')[0]}" for name in REQUIREMENTS]
