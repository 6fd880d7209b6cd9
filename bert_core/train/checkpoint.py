"""Checkpoints of a run: whole or not at all, on any path or URI, without pickle.

A checkpoint is a folder `step-00001000` with `model.safetensors`, `optimizer.safetensors` and,
written last, `checkpoint.json`. Position and randomness need no state: both follow from the step.
"""

import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from bert_core import files
from bert_core.errors import FormatError

FORMAT_VERSION = 1
LAST_FILE = "checkpoint.json"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: where it lies and after how many steps it was written."""

    folder: str
    step: int


class CheckpointWriter:
    """Writes checkpoints while training goes on: one at a time, of weights as they were.

    All but the newest `keep` whole checkpoints and the best are removed.
    """

    def __init__(self, folder: str, *, run_digest: str, keep: int = 2) -> None:
        """`run_digest` is that of the stage that trains; another run refuses to resume from it."""
        self._folder, self._run_digest, self._keep = folder, run_digest, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        held_out_loss: float | None = None,
        losses: Sequence[float] = (),
    ) -> None:
        """Copy what there is to write, and write `step-…` in the background.

        Waits for the checkpoint before, and raises what went wrong with it.

        Args:
            held_out_loss: of these weights, where it was measured; the least of all is the best.
            losses: the last points of the curve, which a resumed run holds its own against.
        """
        self.wait()
        tensors = {MODEL: dict(model.state_dict()), OPTIMIZER: _optimizer_tensors(optimizer)}
        copies = {
            name: {key: value.to("cpu", copy=True) for key, value in values.items()}
            for name, values in tensors.items()
        }
        about = {
            "step": step,
            "run_digest": self._run_digest,
            "held_out_loss": held_out_loss,
            "losses": list(losses),
        }
        self._writing = self._thread.submit(_write, self._folder, copies, about, self._keep)

    def wait(self) -> None:
        """Until everything is written. Raises: ResourceError if it could not be."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *_: object) -> None:
        """What is being written is finished first."""
        self._thread.shutdown()


def _write(
    folder: str, tensors: dict[str, dict[str, Tensor]], about: dict[str, Any], keep: int
) -> None:
    own = files.join(folder, f"step-{about['step']:08d}")
    digests = {}
    for name, values in tensors.items():
        data = save({key: value.contiguous() for key, value in values.items()})
        files.write_bytes(files.join(own, name), data)
        digests[name] = hashlib.sha256(data).hexdigest()
    description = {"format_version": FORMAT_VERSION, **about, "sha256": digests}
    files.write_json(files.join(own, LAST_FILE), description)
    whole = _whole_checkpoints(folder)
    best = best_checkpoint(folder) if len(whole) > keep else None
    kept = [*whole[-keep:], best]
    for other in _checkpoints(folder):
        if other not in kept:
            files.remove(files.join(other.folder, LAST_FILE))  # first: what is left is none
            files.remove(other.folder)


def latest_checkpoint(folder: str) -> Checkpoint | None:
    """The newest whole checkpoint in `folder`, or None."""
    whole = _whole_checkpoints(folder)
    return whole[-1] if whole else None


def best_checkpoint(folder: str) -> Checkpoint | None:
    """The whole checkpoint with the least held-out loss, the earliest of equals; None if it was
    measured for none."""
    best, least = None, float("inf")
    for checkpoint in _whole_checkpoints(folder):
        loss = files.read_json(files.join(checkpoint.folder, LAST_FILE)).get("held_out_loss")
        if loss is not None and loss < least:
            best, least = checkpoint, loss
    return best


def last_losses(checkpoint: Checkpoint) -> list[float]:
    """The points of the curve before a checkpoint that were kept with it."""
    return files.read_json(files.join(checkpoint.folder, LAST_FILE)).get("losses", [])


def load_checkpoint(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    run_digest: str,
) -> None:
    """Put a checkpoint's weights and optimizer state in place.

    Raises: FormatError if it belongs to another run or a file was changed.
    """
    load_weights(checkpoint, model, run_digest=run_digest)
    _restore_optimizer(optimizer, _tensors(checkpoint, OPTIMIZER, run_digest))


def load_weights(checkpoint: Checkpoint, model: nn.Module, *, run_digest: str) -> None:
    """Put a checkpoint's weights in place. Raises: FormatError, as `load_checkpoint` does."""
    model.load_state_dict(_tensors(checkpoint, MODEL, run_digest))


def _tensors(checkpoint: Checkpoint, name: str, run_digest: str) -> dict[str, Tensor]:
    description = files.read_json(files.join(checkpoint.folder, LAST_FILE))
    if description["format_version"] > FORMAT_VERSION:
        raise FormatError(
            f"{checkpoint.folder}: wanted format_version {FORMAT_VERSION} or older, "
            f"got {description['format_version']}: update raybert"
        )
    if description["run_digest"] != run_digest:
        raise FormatError(
            f"{checkpoint.folder}: wanted a checkpoint of run {run_digest[:6]}, it belongs to run "
            f"{description['run_digest'][:6]} (another config, other shards): "
            "give another output, or start over with --force"
        )
    try:
        data = files.read_bytes(files.join(checkpoint.folder, name))
    except FileNotFoundError as error:
        raise FormatError(
            f"{checkpoint.folder}/{name}: wanted the file that {LAST_FILE} names, it is not there; "
            "remove this checkpoint's folder to go on from the one before"
        ) from error
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != description["sha256"][name]:
        raise FormatError(
            f"{checkpoint.folder}/{name}: wanted sha256 {description['sha256'][name][:12]}…, "
            f"got {sha256[:12]}…: the file was changed; remove this checkpoint's folder to go "
            "on from the one before"
        )
    return load(data)


def _checkpoints(folder: str) -> list[Checkpoint]:
    matches = (_NAME.fullmatch(name) for name in files.list_names(folder))
    return [Checkpoint(files.join(folder, m[0]), int(m[1])) for m in matches if m]


def _whole_checkpoints(folder: str) -> list[Checkpoint]:
    return [
        checkpoint
        for checkpoint in _checkpoints(folder)
        if files.exists(files.join(checkpoint.folder, LAST_FILE))
    ]


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{key}": value for index, values in state.items() for key, value in values.items()
    }


def _restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    # The groups' settings come from the config of today, whose digest is the checkpoint's.
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )
