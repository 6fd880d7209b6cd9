"""transformers' Trainer as a peer: at its best settings, timed, recording what its batches held."""

import time
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from bert_core.scores import Precision

WARM_UP = 2
"""Steps that are not timed: they compile and allocate memory."""
SETTINGS = "Trainer, SDPA, fused AdamW, group_by_length, padded to the longest"


def training_arguments(
    folder: str,
    *,
    rows: int,
    steps: int,
    precision: Precision,
    grouped: bool = True,
    **more: Any,
) -> TrainingArguments:
    """Fused AdamW, rows `grouped` by their `length`, and nothing written or logged in training."""
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=rows,
        max_steps=steps,
        optim="adamw_torch_fused",
        bf16=precision == "bf16",
        use_cpu=not torch.cuda.is_available(),
        train_sampling_strategy="group_by_length" if grouped else "random",
        length_column_name="length",
        remove_unused_columns=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **more,
    )


class TimedTrainer(Trainer):
    """Records what its batches held, without waiting for a GPU, and how long they took."""

    def __init__(self, **settings: Any) -> None:
        self._clock = _Clock()
        super().__init__(**settings, callbacks=[self._clock])
        self._lengths: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []

    def training_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> torch.Tensor:
        self._lengths.append(inputs["attention_mask"].sum(1))
        self._labels.append((inputs["labels"] >= 0).sum())
        return super().training_step(model, inputs, *more, **named)

    @property
    def seconds(self) -> float:
        """From the end of the warm-up to the end of training."""
        return self._clock.ended - self._clock.began

    @property
    def timed_lengths(self) -> np.ndarray:
        """Real tokens of every row in that time."""
        return torch.cat(self._lengths[WARM_UP:]).cpu().numpy()

    @property
    def timed_labels(self) -> int:
        """Number of labels in that time."""
        return int(sum(self._labels[WARM_UP:]))


class _Clock(TrainerCallback):
    """When the Trainer has warmed up and when it ends."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WARM_UP:
            self.began = now()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended = now()


def now() -> float:
    """Seconds, once a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
