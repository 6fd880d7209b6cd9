"""Texts in, answers out: what evaluation, batch prediction, registry and server all call."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from bert_core.batches import PAD_MULTIPLE, pad
from bert_core.bundle import build_model, load_bundle
from bert_core.errors import FormatError, InputError
from bert_core.tasks.base import Parameters

BUDGET_TOKENS = 8192
"""Most tokens, padding included, of one forward pass: what a CPU's cache and a GPU both like."""


class Predictor:
    """A bundle that answers. Calls from several threads at once are allowed."""

    def __init__(
        self, folder: str | Path, device: str | None = None, threads: int | None = None
    ) -> None:
        """Load the bundle.

        Args:
            device: torch's name of it; None takes the GPU where there is one.
            threads: CPU threads of the whole process, since torch has one pool; None leaves them.
        Raises: FormatError if the bundle is damaged or was trained for no task.
        """
        bundle = load_bundle(folder)
        if bundle.task is None:
            raise FormatError(
                f"{folder}: wanted a bundle with a task, this one is only pretrained (or for a "
                "task that is not known here): fine-tune it first with `raybert finetune`"
            )
        if threads is not None:
            torch.set_num_threads(threads)
        self.task = bundle.task
        self.labels = bundle.task.labels
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        objective = bundle.task.build_objective(bundle.encoder_config)
        self.model = build_model(bundle, [objective], require_heads=True).to(self.device).eval()
        # The model holds its own copy of the weights: theirs would double the memory.
        self.bundle = replace(bundle, state={})
        # A whole number of `pad`'s steps, so that padding never passes the last position.
        self.max_length = bundle.encoder_config.max_length // PAD_MULTIPLE * PAD_MULTIPLE

    def predict(self, inputs: Any, parameters: Parameters | None = None) -> list[Any]:
        """Answer each text, in order.

        Args:
            inputs: a list of texts.
            parameters: of `task.parameters`' class; None takes the defaults.
        Raises: InputError if `inputs` is not a list of at least one text, or one is longer than
            `max_length` tokens and is not to be cut.
        """
        truncation = parameters is not None and parameters.truncation
        return self.decode(self.forward(self.encode(inputs, truncation)), parameters)

    def encode(self, inputs: Any, truncation: bool = False) -> list[np.ndarray]:
        """Ids of each text, as `forward` takes them. Raises: InputError, as `predict` does."""
        texts = _texts(inputs)
        longest = self.max_length if truncation else None
        encoded = self.bundle.tokenizer.encode(texts, longest)
        for index, ids in enumerate(encoded):
            if len(ids) > self.max_length:
                raise InputError(
                    f"inputs[{index}]: wanted at most {self.max_length} tokens with the special "
                    f"ones, as long as the model's positions go, got {len(ids)}: set the parameter "
                    "truncation to have it cut there, or split the text"
                )
        return encoded

    def forward(self, ids: Sequence[np.ndarray]) -> Float[np.ndarray, "rows classes"]:
        """Scores before softmax, fp32, a row for each array of ids.

        Rows of like length run together, at most `BUDGET_TOKENS` at once, so a batch of mixed
        lengths spends little on padding.
        """
        logits = np.empty((len(ids), len(self.labels)), dtype=np.float32)
        with torch.inference_mode():
            for rows in _by_budget([len(row) for row in ids]):
                batch = pad([ids[row] for row in rows], self.bundle.tokenizer.pad_id)
                batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
                logits[rows] = self.model.logits(batch)[self.task.objective].float().cpu().numpy()
        return logits

    def decode(
        self, logits: Float[np.ndarray, "rows classes"], parameters: Parameters | None = None
    ) -> list[Any]:
        """Answers from scores, in the task's own schema."""
        return self.task.decode(logits, parameters)


def _texts(inputs: Any) -> list[str]:
    if not isinstance(inputs, list | tuple) or not inputs:
        came = "an empty list" if isinstance(inputs, list | tuple) else f"{type(inputs).__name__}"
        raise InputError(f"inputs: wanted a list of at least one text, got {came}")
    for index, text in enumerate(inputs):
        if not isinstance(text, str):
            raise InputError(
                f"inputs[{index}]: wanted a text, got {type(text).__name__} ({text!r})"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"inputs[{index}]: wanted Unicode text, got half a surrogate pair at character "
                f"{error.start}: send whole characters"
            ) from error
    return list(inputs)


def _by_budget(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Rows in groups of like length, the shortest first; a group's padded size keeps the budget."""
    group: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        width = -(-lengths[row] // PAD_MULTIPLE) * PAD_MULTIPLE
        if group and (len(group) + 1) * width > BUDGET_TOKENS:
            yield group
            group = []
        group.append(row)
    if group:
        yield group
