"""Evaluated bundle → MLflow registry, where the alias `champion` says which version is served."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bert_core import files
from bert_core.errors import ConfigError
from bert_core.manifest import Manifest, Output, read_manifest
from bert_core.metrics.bootstrap import not_worse
from pipelines.evaluate import ANSWER, PREDICTIONS, predict_rows, predictor_of
from pipelines.report import say
from pipelines.stage import INPUT, Result, StageConfig, input_digest, run_stage
from tracking.runs import DatasetInput, tracking_uri

PUBLICATION = "publication.json"
EXAMPLES = 2


@dataclass(frozen=True, kw_only=True)
class PublishConfig(StageConfig):
    """Which bundle to register. With `force` the alias moves whatever the scores say."""

    model: str = field(metadata=INPUT)
    """Fine-tuned bundle: a folder or a URI."""
    evaluation: str = field(metadata=INPUT)
    """Folder of `raybert evaluate` for this bundle; its rows decide about the alias."""
    name: str
    """Name of the model in the registry."""


def run(config: PublishConfig) -> Manifest:
    """Register the bundle; `champion` moves to it unless it is worse than the present one."""
    from bert_core.bundle import bundle_digest
    from tracking.resolve import resolve

    folder = resolve(config.model, uri=config.tracking_uri)
    digest = bundle_digest(folder)
    evaluated = read_manifest(config.evaluation).inputs.get("model")
    if evaluated != digest:
        raise ConfigError(
            f"{config.evaluation}: wanted an evaluation of bundle {digest[:6]} ({config.model}), "
            f"it is of {str(evaluated)[:6]}: run `raybert evaluate` for this bundle"
        )
    inputs = [
        DatasetInput("model", digest, config.model),
        DatasetInput("evaluation", input_digest(config.evaluation, "evaluate"), config.evaluation),
    ]
    return run_stage("publish", config, inputs, lambda _: _publish(config, folder))


def _publish(config: PublishConfig, folder: Path) -> Result:
    from tracking import registry
    from tracking.resolve import resolve
    from tracking.spool import read_run

    uri = tracking_uri(config.tracking_uri)
    evaluation = read_manifest(config.evaluation)
    data = files.read_bytes(files.join(config.evaluation, PREDICTIONS))
    rows = pq.read_table(pa.BufferReader(data)).to_pylist()
    task = predictor_of(folder, config.threads_per_worker).task
    names = [one.name for one in fields(task.inputs)]
    present = registry.champion(config.name, uri=uri)
    verdict = None
    if present is not None:
        champion_folder = resolve(f"models:/{config.name}/{present.version}", uri=uri)
        other = predictor_of(champion_folder, config.threads_per_worker).task
        if (other.name, other.chosen) == (task.name, task.chosen):
            theirs, _ = predict_rows(champion_folder, rows, config)
            verdict = not_worse(
                str(evaluation.counts["primary_metric"]),
                task.metrics,
                task.compare(rows, [json.loads(row[ANSWER]) for row in rows]),
                task.compare(rows, theirs),
            )
        else:
            say(
                f"publish: version {present.version} is for {other.name} {other.chosen}, this "
                f"bundle for {task.name} {task.chosen}: they are not compared"
            )
    recorded = read_run(config.local_folder)
    publication = registry.publish(
        folder,
        name=config.name,
        uri=uri,
        metrics={k: v for k, v in evaluation.counts.items() if isinstance(v, int | float)},
        input_example=[
            {name: row[name] for name in names if row.get(name) is not None}
            # Those with most fields: a signature has the fields of its examples.
            for row in sorted(rows, key=lambda row: [row.get(name) is None for name in names])[
                :EXAMPLES
            ]
        ],
        experiment=config.experiment,
        run_id=recorded.run_id if recorded else None,
        verdict=verdict,
        force=config.force,
    )
    path = files.join(config.output, PUBLICATION)
    files.write_json(path, asdict(publication))
    version = publication.version
    say(f"publish: models:/{version.name}/{version.version}. {publication.why}")
    counts = {
        "version": version.version,
        "is_champion": publication.is_champion,
        "why": publication.why,
    }
    return Result(outputs={PUBLICATION: Output.of(path)}, counts=counts)
