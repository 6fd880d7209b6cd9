"""transformers' Trainer on a task's windows: its model, its batches and its scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import Trainer

from benchmarks.peer import now, training_arguments
from bert_core.batches import collate
from bert_core.collation import buckets
from bert_core.data.windows import Window
from bert_core.scores import Precision
from bert_core.tasks.base import Task
from bert_core.train.config import OptimizerConfig

SHARE_OF_WARM_UP = 0.1
MOST_TOKENS = 8192
"""Per forward pass when scoring."""


@dataclass(frozen=True)
class Hyperparameters:
    """What both sides train with."""

    steps: int
    batch_size: int
    optimizer: OptimizerConfig
    precision: Precision

    @property
    def warmup_steps(self) -> int:
        """A tenth of all."""
        return round(SHARE_OF_WARM_UP * self.steps)


def trained(
    checkpoint: str,
    task: Task,
    windows: list[Window],
    pad_id: int,
    hyperparameters: Hyperparameters,
    seed: int,
    scratch: Path,
) -> tuple[Any, float]:
    """The Trainer's model, ready to answer, and the seconds that training took."""
    transformers.set_seed(seed)
    model = model_of(checkpoint, task)
    trainer = Trainer(
        model=model,
        args=training_arguments(
            str(scratch / f"trainer-{seed}"),
            rows=hyperparameters.batch_size,
            steps=hyperparameters.steps,
            precision=hyperparameters.precision,
            grouped=False,  # which rows share a step affects what a model learns
            learning_rate=hyperparameters.optimizer.lr,
            warmup_steps=hyperparameters.warmup_steps,
            weight_decay=hyperparameters.optimizer.weight_decay,
            adam_epsilon=hyperparameters.optimizer.eps,
            seed=seed,
        ),
        train_dataset=Examples(windows),
        data_collator=Padded(pad_id),
    )
    began = now()
    trainer.train()
    return model.eval(), now() - began


def model_of(folder: str, task: Task) -> Any:
    """The checkpoint with the head of a task."""
    classes: dict[str, tuple[Any, dict[str, Any]]] = {
        "text-classification": (
            transformers.AutoModelForSequenceClassification,
            {"num_labels": len(task.labels), "problem_type": "single_label_classification"},
        ),
        "text-regression": (
            transformers.AutoModelForSequenceClassification,
            {"num_labels": 1, "problem_type": "regression"},
        ),
        "token-classification": (
            transformers.AutoModelForTokenClassification,
            {"num_labels": len(task.labels)},
        ),
        "question-answering": (transformers.AutoModelForQuestionAnswering, {}),
    }
    kind, settings = classes[task.name]
    return kind.from_pretrained(folder, **settings)


class Examples(torch.utils.data.Dataset):
    """Windows in the Trainer's format; -100 where a token is not scored."""

    def __init__(self, windows: list[Window]) -> None:
        self._windows = windows

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        window = self._windows[index]
        (ids,), (second,) = window.ids, window.segment_b_start
        example: dict[str, Any] = {
            "input_ids": torch.from_numpy(ids.astype(np.int64)),
            "token_type_ids": (torch.arange(len(ids)) >= second).long(),
            "length": len(ids),
        }
        labels = {name: torch.from_numpy(value) for name, value in window.labels.items()}
        if "token_labels" in labels:
            everywhere = torch.full((len(ids),), -100)
            everywhere[window.positions["token_positions"]] = labels["token_labels"]
            return example | {"labels": everywhere}
        return example | {name: value[0] for name, value in labels.items()}


class Padded:
    """Pads a batch to its longest example."""

    def __init__(self, pad_id: int) -> None:
        self._fills = {"input_ids": pad_id, "token_type_ids": 0, "labels": -100}

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pad = torch.nn.utils.rnn.pad_sequence
        batch = {}
        for name in examples[0].keys() - {"length"}:
            values = [example[name] for example in examples]
            batch[name] = (
                pad(values, batch_first=True, padding_value=self._fills[name])
                if values[0].ndim
                else torch.stack(values)
            )
        masks = [torch.ones(example["length"], dtype=torch.long) for example in examples]
        return batch | {"attention_mask": pad(masks, batch_first=True)}


def scores_of(model: Any, windows: Sequence[Window], pad_id: int) -> list[np.ndarray]:
    """The scores of each window in fp32, in the form that a task decodes."""
    scores: list[np.ndarray] = [np.empty(0)] * len(windows)
    lengths = np.array([window.tokens for window in windows])
    with torch.inference_mode():
        for group in buckets(lengths, MOST_TOKENS):
            chosen = [windows[place] for place in group]
            batch = collate(chosen, pad_id)
            names = ("input_ids", "token_type_ids", "attention_mask")
            output = model(
                **{name: batch[name].to(model.device) for name in names if name in batch}
            )
            if "start_logits" in output:
                logits = torch.stack([output.start_logits, output.end_logits], -1)
            else:
                logits = output.logits
            for place, window, values in zip(
                group, chosen, logits.float().cpu().numpy(), strict=True
            ):
                places = window.positions.get("token_positions")
                scores[place] = values if places is None else values[places]
    return scores
