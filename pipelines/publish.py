"""Evaluated bundle → MLflow registry, where the alias `champion` marks the version to serve."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool

from bert_core import files
from bert_core.checks import default_of
from bert_core.errors import ConfigError
from bert_core.manifest import Manifest, read_manifest
from bert_core.metrics.bootstrap import Verdict, not_worse
from bert_core.metrics.judged import NAMES, judged_metrics
from pipelines.answering.columns import ANSWER
from pipelines.answering.predictors import options_text, predict_rows, predictor_of
from pipelines.answering.searching_again import (
    retrieval_set_again,
    searched_columns,
    seen_queries,
)
from pipelines.evaluate import CLASSES, DOCUMENTS, PREDICTIONS
from pipelines.runtime.description import MODEL_PAGE, link_model_card, published_page
from pipelines.runtime.inputs import bundle_input, input_digest
from pipelines.runtime.outputs import local_outputs
from pipelines.runtime.progress import say
from pipelines.runtime.result import Counts, Result
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import INPUT, StageConfig
from tracking.models import registry
from tracking.models.references import Registered
from tracking.models.upload import check_id, check_token, upload
from tracking.runs.recorder import DatasetInput
from tracking.store.server import connect, tracking_uri, without_password

if TYPE_CHECKING:
    from bert_core.inference.predictor import Predictor
    from bert_core.tasks.base import Task

PUBLICATION, MODEL_CARD = "publication.json", "model_card.md"
EXAMPLES = 2
"""Rows of the evaluation that a version shows if its bundle has no examples."""


@dataclass(frozen=True, kw_only=True)
class PublishConfig(StageConfig):
    """Which bundle to register. With `force` the alias moves regardless of the scores."""

    model: str = field(metadata=INPUT)
    """Fine-tuned bundle: a folder, a URI, or owner/name of the Hugging Face hub."""
    evaluation: str = field(metadata=INPUT)
    """Folder of `raybert evaluate` for this bundle; its rows decide whether the alias moves."""
    name: str
    """Name of the model in the registry."""
    hub: str | None = None
    """Model on the Hugging Face hub to upload the bundle to as well, with its model card:
    owner/name."""
    hub_private: bool = False
    """Create it there as a private model."""
    license: str | None = None
    """Licence of the weights for the model card, as the hub spells it: apache-2.0, mit, …"""

    def __post_init__(self) -> None:
        super().__post_init__()
        registry.check_name(self.name)
        if self.hub is not None:
            check_id(self.hub)
        elif self.hub_private:
            raise ConfigError(
                "hub_private: wanted hub with it, got none: give both, or leave hub_private out"
            )


@dataclass(frozen=True, kw_only=True)
class PublishCounts(Counts):
    version: str
    is_champion: bool
    why: str
    """Why the alias points where it does, as a clause."""
    hub: str | None = None
    """`owner/name@commit`, if it was uploaded to the Hugging Face hub, and its page there."""
    hub_url: str | None = None

    @property
    def line(self) -> str:
        return f"version {self.version}{', the champion' if self.is_champion else ''}"

    @property
    def sentence(self) -> str:
        return f"In the registry, {self.why}."


def run(config: PublishConfig) -> Manifest:
    """Register the bundle; `champion` moves to it unless it is worse than the current one."""
    if config.hub is not None:
        check_token(config.hub)
    folder, model = bundle_input(config, config.model)
    evaluated = read_manifest(config.evaluation).inputs.get("model")
    if evaluated != model.digest:
        raise ConfigError(
            f"{config.evaluation}: wanted an evaluation of bundle {model.digest[:6]} "
            f"({config.model}), got one of {str(evaluated)[:6]}: "
            "run `raybert evaluate` for this bundle"
        )
    inputs = [
        model,
        DatasetInput("evaluation", input_digest(config.evaluation, "evaluate"), config.evaluation),
    ]
    return run_stage("publish", config, inputs, lambda _: _publish(config, folder))


def _publish(config: PublishConfig, folder: Path) -> Result:
    from tracking.models.model_card import model_card
    from tracking.runs.spool import read_run

    uri = tracking_uri(config.tracking_uri)
    evaluation = read_manifest(config.evaluation)
    predictor = predictor_of(folder, config.threads_per_worker)
    _check_task(config, evaluation, folder)
    data = files.read_bytes(files.join(config.evaluation, PREDICTIONS))
    rows = pq.read_table(pa.BufferReader(data)).to_pylist()
    comparison = _compared(config, evaluation, predictor, rows, uri)
    recorded = read_run(config.local_folder)
    release = registry.Release(
        bundle=folder,
        name=config.name,
        metrics={k: v for k, v in evaluation.counts.items() if isinstance(v, int | float)},
        input_example=_examples(predictor, rows),
        experiment=config.experiment,
        run_id=recorded.run_id if recorded else None,
    )
    publication = registry.publish(release, comparison, uri=uri, force=config.force)
    publication = _with_rows_left_out(publication, comparison.verdict, len(rows))
    version = publication.version
    card = model_card(
        publication,
        predictor,
        evaluation,
        _classes(config.evaluation, evaluation),
        release.input_example[0],
        hub=config.hub,
        licence=config.license,
    )
    page = _described_at(config, version, card, uri)
    written = [config.local_folder / PUBLICATION, config.local_folder / MODEL_CARD]
    files.write_json(str(written[0]), asdict(publication))
    files.write_bytes(str(written[1]), card.encode())
    say(f"publish: models:/{version.name}/{version.version}. {publication.why}")
    counts = PublishCounts(
        version=version.version,
        is_champion=publication.is_champion,
        why=publication.why,
        **_uploaded(config, release, version, card, uri),
    )
    return Result(
        outputs=local_outputs(config, written),
        counts=counts,
        artifacts=[config.local_folder / MODEL_CARD],
        pages={MODEL_PAGE: page},
    )


def _examples(predictor: "Predictor", rows: list[dict[str, Any]]) -> Sequence[Any]:
    """Return inputs to show with the version: the bundle's, or else some of the evaluation's."""
    from bert_core.tasks.examples import examples_of

    task = predictor.task
    return predictor.bundle.examples or examples_of(task, rows, EXAMPLES) or task.examples


def _with_rows_left_out(
    publication: registry.Publication, verdict: Verdict | None, rows: int
) -> registry.Publication:
    """Add to the publication's `why` how many of the evaluation's rows were not compared."""
    if verdict is None or not (left_out := rows - verdict.rows):
        return publication
    note = f"{left_out:,} of the evaluation's {rows:,} rows are left out"
    why = f"{publication.why}; {note}, since one of the two was trained on them"
    return replace(publication, why=why)


def _described_at(config: PublishConfig, version: registry.Version, card: str, uri: str) -> str:
    """Add the model card to the version, and link its page from the runs that made the bundle.

    Returns: the link to the page.
    """
    from tracking.models.model_card import without_front_matter

    registry.describe(version, card, without_front_matter(card), uri=uri)
    page = published_page(version.name, version.version)
    link_model_card(connect(uri), without_password(uri), (config.model, config.evaluation), page)
    return page


def _uploaded(
    config: PublishConfig, release: registry.Release, version: registry.Version, card: str, uri: str
) -> dict[str, str]:
    """Upload the bundle to the hub if configured, and return where it is; else return an empty
    dict."""

    if config.hub is None:
        return {}
    title = f"{version.name}, version {version.version}"
    where = upload(release.bundle, card, config.hub, private=config.hub_private, message=title)
    registry.note_upload(version, where.reference, release.run_id, uri=uri)
    say(f"publish: {where.url}")
    return {"hub": where.reference, "hub_url": where.url}


def _check_task(config: PublishConfig, evaluation: Manifest, folder: Path) -> None:
    """Raise ConfigError unless the evaluation is of the task that the bundle is registered for."""
    task, options = evaluation.config["task"], options_text(evaluation.config["options"])
    registered = predictor_of(folder, config.threads_per_worker).task
    evaluated = predictor_of(folder, config.threads_per_worker, task, options).task
    if not registered.is_comparable(evaluated):
        raise ConfigError(
            f"{config.evaluation}: wanted an evaluation of what {config.model} is registered for, "
            f"{_described(registered)}, got one of {_described(evaluated)}: run `raybert evaluate` "
            "without --task and --options"
        )


def _compared(
    config: PublishConfig,
    evaluation: Manifest,
    predictor: "Predictor",
    rows: list[dict[str, Any]],
    uri: str,
) -> registry.Comparison:
    """Compare the bundle with the current champion, on the evaluation's rows that neither was
    trained on. The result has a verdict on whether the bundle is worse, or the reason that there is
    none; it has neither if there is no champion."""

    current = registry.champion(config.name, uri=uri)
    compared = partial(registry.Comparison, champion=current)
    if current is None:
        return compared()
    champion_folder = Registered(config.name, version=current.version).fetch(uri=uri)
    champion = predictor_of(champion_folder, config.threads_per_worker)
    task = predictor.task
    if not task.is_comparable(champion.task):
        return compared(
            not_compared=f"it is for {_described(champion.task)}, this bundle for "
            f"{_described(task)}, so they are not compared"
        )
    metric = str(evaluation.counts["primary_metric"])
    if DOCUMENTS in evaluation.counts:
        found = retrieval_set_again(evaluation)
        if isinstance(found, str):
            return compared(not_compared=found)
        old_seen, new_seen = (seen_queries(model, task, found) for model in (champion, predictor))
        if favours := _favours(old_seen, new_seen, "queries"):
            return compared(not_compared=favours)
        kept = ~(old_seen | new_seen)
        old_columns = searched_columns(champion_folder, found, config)
        columns = [
            {name: np.asarray(column)[kept] for name, column in each.items()}
            for each in ({name: [row[name] for row in rows] for name in NAMES}, old_columns)
        ]
        return compared(verdict=not_worse(metric, judged_metrics, *columns))
    old_seen, new_seen = (model.bundle.has_seen(task, rows) for model in (champion, predictor))
    if favours := _favours(old_seen, new_seen, "rows"):
        return compared(not_compared=favours)
    unseen = [row for row, seen in zip(rows, old_seen | new_seen, strict=True) if not seen]
    new = task.compare(unseen, [json.loads(row[ANSWER]) for row in unseen])
    if metric not in task.metrics(new):
        return compared(not_compared=f"the rows that neither was trained on have no {metric}")
    old = task.compare(unseen, predict_rows(champion_folder, unseen, config).answers)
    return compared(verdict=not_worse(metric, task.metrics, new, old))


def _favours(
    old_seen: Bool[np.ndarray, "rows"], new_seen: Bool[np.ndarray, "rows"], kind: str
) -> str | None:
    """Return why the evaluation favours one of the two, if more than half of it was trained on;
    else None."""
    if 2 * (old_seen | new_seen).sum() <= len(old_seen):
        return None
    who = "it" if old_seen.sum() >= new_seen.sum() else "this bundle"
    return (
        f"{who} was trained on {max(old_seen.sum(), new_seen.sum()):,} of the evaluation's "
        f"{len(old_seen):,} {kind}, which favour it"
    )


def _described(task: "Task") -> str:
    """Return the task's name and options, without unset options that do not distinguish tasks."""
    options = {
        one.name: getattr(task.chosen, one.name)
        for one in fields(task.chosen)
        if one.compare or getattr(task.chosen, one.name) != default_of(one)
    }
    return f"{task.name} {json.dumps(options)}"


def _classes(folder: str, evaluation: Manifest) -> dict[str, dict[str, float]] | None:
    """Return the evaluation's metrics by class; None if it has none."""
    return files.read_json(files.join(folder, CLASSES)) if CLASSES in evaluation.outputs else None
