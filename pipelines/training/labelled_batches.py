"""Builds the batches of labelled sets on one rank, and measures a model on them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from bert_core.batches import RankBatches, WindowSource
from bert_core.data.grouped_order import GroupedOrder
from bert_core.data.order import GlobalOrder, Order
from bert_core.data.splits import SELECTION, TRAIN
from bert_core.data.windows import Window
from bert_core.model.attention import packing
from bert_core.model.config import EncoderConfig
from bert_core.objectives.base import ObjectiveModel
from bert_core.tasks.base import Parameters, Task
from bert_core.tasks.shapes import Row
from bert_core.tasks.text_classification import TextClassification
from bert_core.train.config import LoopConfig
from bert_core.train.loop import evaluate, evaluation_scores
from pipelines.training.classes import class_order
from pipelines.training.config import LabelledTrainingConfig
from pipelines.training.decisions import Decisions, decide
from pipelines.training.labelled_sets import LabelledSet
from pipelines.training.worker import RankPlace
from tracking.runs.metric_names import TASK, on_all

MEASURED_ROWS = 256
"""Minimum rows per batch of a measurement; it does not affect the results."""


@dataclass(frozen=True)
class LabelledRank:
    """A rank's data and settings for training on labelled sets."""

    config: LabelledTrainingConfig
    place: RankPlace
    encoder_config: EncoderConfig
    pad_id: int
    task: Task
    sets: dict[str, LabelledSet]

    @cached_property
    def packed_from(self) -> float:
        """Return the share of padding above which rows are packed end to end."""
        return packing(self.encoder_config, self.place.device, self.config.precision)

    @property
    def shown(self) -> Iterator[Window]:
        """Yield all windows that a model sees during training: training and selection rows."""
        return chain.from_iterable(
            self.sets[split].windows for split in (TRAIN, SELECTION) if split in self.sets
        )

    @property
    def _measured_rows(self) -> int:
        return max(MEASURED_ROWS, self.place.world_size)

    def batches(self, split: str, seed: int) -> RankBatches:
        """Return the batches of a set, with its rows in the seed's order."""
        windows, joint = self.sets[split].windows, self.task.joint
        # Rows with one loss are measured in batches as large as those that they are trained in.
        trained = split == TRAIN or joint
        return RankBatches(
            source=WindowSource(windows, self.pad_id, self.packed_from),
            order=self._order(split, seed),
            global_batch_size=self.config.batch_size if trained else self._measured_rows,
            micro_batch_tokens=self.config.micro_batch_tokens,
            rank=self.place.rank,
            world_size=self.place.world_size,
            joint=joint,
        )

    def _order(self, split: str, seed: int) -> Order:
        windows = self.sets[split].windows
        if (key := self.task.kept_together) is not None:
            groups = np.concatenate([window.labels[key] for window in windows])
            return GroupedOrder(groups, seed=seed)
        if split == TRAIN:
            return class_order(self.config.classes, self.task, windows, seed)
        return GlobalOrder([len(windows)], seed=seed)

    def measure(self, split: str, loop: LoopConfig, model: ObjectiveModel) -> dict[str, float]:
        """Return the loss of each part, and the task's metrics under `TASK`. Collective."""
        task, rows, measured = self.task, self.sets[split].rows, self.sets[split]
        columns = task.compare(rows, self._answers(rows, measured.windows, model))
        if measured.plain:
            plain = task.plain(rows) or ()
            columns |= task.compare_plain(rows, self._answers(plain, measured.plain, model))
        metrics = task.metrics(columns)
        return evaluate(model, self.batches(split, 0).once(), loop) | on_all(TASK, metrics)

    def decide(self, model: ObjectiveModel) -> Decisions:
        """Return what the selection rows decide for a model. Collective."""
        task, rows, windows = self.task, self.sets[SELECTION].rows, self.sets[SELECTION].windows
        assert isinstance(task, TextClassification)
        raw = task.parameters(function_to_apply="none")
        answers = self._answers(rows, windows, model, raw)
        return decide(task, rows, answers, self.config.selection)

    def _answers(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        model: ObjectiveModel,
        parameters: Parameters | None = None,
    ) -> list[Any]:
        scores = evaluation_scores(
            model,
            windows,
            self.pad_id,
            most_tokens=self.config.micro_batch_tokens,
            packed_from=self.packed_from,
        )
        return self.task.decode(rows, windows, scores, parameters)
