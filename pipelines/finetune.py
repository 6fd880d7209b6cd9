"""Bundle + labelled rows → fine-tuned bundle, on Ray Train, with one or more seeds."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bert_core import files
from bert_core.manifest import Manifest
from bert_core.tasks.digests import NO_ROWS
from pipelines.answering.teacher import Teacher
from pipelines.runtime.inputs import bundle_input
from pipelines.runtime.result import Result
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import INPUT
from pipelines.training.config import Dropout, LabelledTrainingConfig
from pipelines.training.labelled_sets import inputs_of, lineage_of, read_sets, trainable_task
from pipelines.training.records import CHECKPOINTS
from pipelines.training.seeds import SeedsCounts, TrainableTask, learn
from pipelines.training.selection import Measurement
from tracking.runs.recorder import DatasetInput

if TYPE_CHECKING:
    from bert_core.objectives.base import ObjectiveModel
    from bert_core.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(LabelledTrainingConfig):
    """Fine-tune a model on labelled rows. Defaults: Devlin et al. 2019, appendix A.3."""

    teacher: str | None = field(default=None, metadata=INPUT)
    """Bundle for text ranking, for tasks whose vectors are compared: its scores of each row's
    `text_pair` and `negatives` train them, as a column `scores` would."""


def run(config: FinetuneConfig, watch: Callable[[Measurement], None] | None = None) -> Manifest:
    """Fine-tune a bundle for a task, and write the bundle of the first seed.

    Args:
        watch: called with every measurement on the selection rows; needs `num_workers` 0.
    """
    folder, inputs = inputs_of(config)
    teacher = None
    if config.teacher is not None:
        place, of_teacher = bundle_input(config, config.teacher, name="teacher")
        keep = files.join(config.output, CHECKPOINTS)
        teacher = Teacher(config.teacher, place, of_teacher.digest, keep)
        inputs.append(of_teacher)
    return run_stage(
        "finetune",
        config,
        inputs,
        lambda digest: _finetune(config, folder, teacher, inputs, digest, watch),
    )


def _finetune(
    config: FinetuneConfig,
    folder: Path,
    teacher: Teacher | None,
    inputs: list[DatasetInput],
    digest: str,
    watch: Callable[[Measurement], None] | None,
) -> Result[SeedsCounts]:
    from tracking.models.hub import load_bundle

    bundle = load_bundle(folder)
    taught = None
    if teacher is not None:
        teacher.check(trainable_task(config.task), config.threads_per_worker)
        taught = partial(teacher.taught, config=config)
    task, sets = read_sets(config, bundle, taught)
    build = partial(build_seed_model, folder, task, config.dropout, config.from_scratch)
    lineage = {
        "stage": "finetune",
        "data": lineage_of(config, bundle.tokenizer, inputs, sets),
        "parent": bundle.digest,
        "parent_lineage": bundle.lineage,
        "from_scratch": config.from_scratch,
    }
    trained_rows = NO_ROWS if config.from_scratch else bundle.trained_rows
    encoder = bundle.encoder_config.adapted(**config.dropout)
    trainable = TrainableTask(task, bundle.tokenizer, encoder, build, trained_rows)
    return learn(config, trainable, sets, lineage, digest, watch)


def build_seed_model(
    folder: Path, task: "Task", dropout: Dropout, from_scratch: bool, seed: int
) -> "ObjectiveModel":
    """Build the encoder of the bundle in `folder`, with this dropout, and the task's head. The
    bundle's head is kept if it has the same labels; fresh weights are drawn with the seed."""
    import torch

    from bert_core.bundle.weights import build_model
    from bert_core.objectives.base import ObjectiveModel
    from tracking.models.hub import load_bundle

    bundle = load_bundle(folder)
    torch.manual_seed(seed)
    encoder = task.encoder_config(bundle.encoder_config.adapted(**dropout))
    bundle = replace(bundle, encoder_config=encoder)
    objective = task.build_objective(bundle.encoder_config)
    if from_scratch:
        return ObjectiveModel(bundle.encoder_config, [objective])
    return build_model(bundle, [objective], task=task)
