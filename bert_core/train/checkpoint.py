"""Checkpoints of a run: written atomically, to any path or URI, without pickle.

A checkpoint is a folder `step-00001000` with `model.safetensors`, `optimizer.safetensors` and,
written last, `checkpoint.json`. If weights are sharded, each rank writes its own files,
`model-00001-of-00004.safetensors`, with its rows of every tensor; any number of ranks can read
them. Data position and randomness need no state: both follow from the step. `points.jsonl` has the
curves so far, in case the run's record is lost with the machine that kept it.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch import distributed as dist

from bert_core import files
from bert_core.errors import FormatError
from bert_core.train.parallel import is_sharded, like_part, own_part, rank_of_world
from bert_core.train.words import table_of

FORMAT_VERSION = 1
LAST_FILE = "checkpoint.json"
MODEL, OPTIMIZER, SUFFIX = "model", "optimizer", ".safetensors"
POINTS = "points.jsonl"
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its folder, and the number of steps after which it was written."""

    folder: str
    step: int


@dataclass(frozen=True)
class Progress:
    """State that a resumed run needs besides weights and step."""

    losses: Sequence[float] = ()
    """The last points of the loss curve, to compare the next ones with."""
    costs: Sequence[float] = ()
    """The cost at each measurement so far (`CheckpointWriter.save`)."""
    elapsed_s: float = 0.0
    """Seconds of training so far."""


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time, from copies of the weights.

    Removes all but the newest `keep` complete checkpoints and the best one.
    """

    def __init__(self, folder: str, *, run_digest: str, keep: int = 2) -> None:
        """Write to `folder`, in a background thread.

        Args:
            run_digest: digest of the training stage; a run with another digest refuses to resume.
            keep: how many of the newest checkpoints to keep.
        """
        self._folder, self._run_digest, self._keep = folder, run_digest, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        # A separate group, because the writer threads use it while training uses the default one.
        self._group = dist.new_group(backend="gloo") if rank_of_world()[1] > 1 else None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        cost: float | None = None,
        progress: Progress | None = None,
        points: bytes = b"",
    ) -> None:
        """Copy the state, then write `step-…` in the background.

        Waits for the previous checkpoint and raises its error, if any. Every rank calls it: each
        writes its part of a sharded model; otherwise rank 0 writes everything.

        Args:
            cost: of these weights on rows that they were not trained on, if measured; the lowest
                cost marks the best checkpoint.
            progress: the run's state so far.
            points: the curves so far, as lines of JSON: `[step, {name: number}]`.
        """
        self.wait()
        rank, world_size = rank_of_world()
        sharded = is_sharded(model)
        if rank and not sharded:
            return
        part = f"-{rank + 1:05d}-of-{world_size:05d}" if sharded else ""
        tensors = {MODEL: dict(model.state_dict()), OPTIMIZER: _optimizer_tensors(optimizer)}
        copies = {
            f"{name}{part}{SUFFIX}": {
                key: own_part(value).to("cpu", copy=True) for key, value in values.items()
            }
            for name, values in tensors.items()
        }
        about = {
            "step": step,
            "run_digest": self._run_digest,
            "cost": cost,
            **asdict(progress or Progress()),
        }
        group = self._group if sharded else None
        self._writing = self._thread.submit(
            _write, self._folder, copies, points, about, self._keep, group
        )

    def wait(self) -> None:
        """Wait until everything is written. Raises: ResourceError if writing failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *_: object) -> None:
        """Finish the pending write, then stop the thread."""
        self._thread.shutdown()


def _write(
    folder: str,
    tensors: dict[str, dict[str, Tensor]],
    points: bytes,
    about: dict[str, Any],
    keep: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Write a checkpoint's files, and remove old checkpoints.

    Args:
        group: the ranks that write parts of the same checkpoint.
    """
    target = checkpoint_at(folder, about["step"]).folder
    digests = {}
    for name, values in tensors.items():
        data = save({key: value.contiguous() for key, value in values.items()})
        files.write_bytes(files.join(target, name), data)
        digests[name] = hashlib.sha256(data).hexdigest()
    if group is not None:
        digests_of_ranks: list[Any] = [None] * group.size()
        dist.all_gather_object(digests_of_ranks, digests, group=group)
        if group.rank():
            return
        digests = {name: digest for part in digests_of_ranks for name, digest in part.items()}
    if points:
        files.write_bytes(files.join(target, POINTS), points)
        digests[POINTS] = hashlib.sha256(points).hexdigest()
    description = {"format_version": FORMAT_VERSION, **about, "sha256": digests}
    files.write_json(files.join(target, LAST_FILE), description)
    whole = _whole_checkpoints(folder)
    best = best_checkpoint(folder) if len(whole) > keep else None
    to_keep = [*whole[-keep:], best]
    for checkpoint in _checkpoints(folder):
        # Another rank may have started writing a newer one.
        newer = group is not None and checkpoint.step > about["step"]
        if checkpoint not in to_keep and not newer:
            # Removed first, so that a partly removed checkpoint does not look complete.
            files.remove(files.join(checkpoint.folder, LAST_FILE))
            files.remove(checkpoint.folder)


def latest_checkpoint(folder: str) -> Checkpoint | None:
    """Return the newest complete checkpoint in `folder`, or None."""
    whole = _whole_checkpoints(folder)
    return whole[-1] if whole else None


def best_checkpoint(folder: str) -> Checkpoint | None:
    """Return the complete checkpoint with the lowest cost, the earliest in case of a tie; None if
    no cost was measured."""
    best, least = None, float("inf")
    for checkpoint in _whole_checkpoints(folder):
        cost = files.read_json(files.join(checkpoint.folder, LAST_FILE)).get("cost")
        if cost is not None and cost < least:
            best, least = checkpoint, cost
    return best


def checkpoint_at(folder: str, step: int) -> Checkpoint:
    """Return the checkpoint after `step`, whether or not it exists."""
    return Checkpoint(files.join(folder, f"step-{step:08d}"), step)


def read_progress(checkpoint: Checkpoint) -> Progress:
    """Return the progress stored in a checkpoint."""
    about = files.read_json(files.join(checkpoint.folder, LAST_FILE))
    return Progress(**{key: about[key] for key in Progress.__dataclass_fields__ if key in about})


def read_points(checkpoint: Checkpoint) -> list[tuple[int, dict[str, float]]]:
    """Return the points of the curves up to a checkpoint. Raises: FormatError if the file has
    changed."""
    digests = files.read_json(files.join(checkpoint.folder, LAST_FILE))["sha256"]
    if POINTS not in digests:
        return []
    lines = _read(files.join(checkpoint.folder, POINTS), digests[POINTS]).splitlines()
    return [(step, numbers) for step, numbers in map(json.loads, lines)]


def load_weights(checkpoint: Checkpoint, model: nn.Module, *, run_digest: str) -> None:
    """Load a checkpoint's weights into a model that is not yet sharded.

    Raises: FormatError if the checkpoint belongs to another run or a file has changed.
    """
    model.load_state_dict(_tensors(checkpoint, MODEL, run_digest))


def load_optimizer(
    checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, *, run_digest: str | None
) -> None:
    """Load a checkpoint's optimizer state, sharded like the weights.

    Args:
        run_digest: as for `load_weights`; None takes the state of any run, whose weights must have
            the same shapes in the same order.
    Raises: FormatError, like `load_weights`.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in _tensors(checkpoint, OPTIMIZER, run_digest).items():
        index, key = name.split(".", 1)
        weight = weights[int(index)]
        table = table_of(weight)
        if table is not None and value.ndim:
            value = table.moments_of_read(value)
        part = like_part(value, weight) if value.ndim else value
        state.setdefault(int(index), {})[key] = part
    # The groups' settings come from the current config, whose digest equals the checkpoint's.
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def _tensors(checkpoint: Checkpoint, name: str, run_digest: str | None) -> dict[str, Tensor]:
    description = files.read_json(files.join(checkpoint.folder, LAST_FILE))
    if description["format_version"] > FORMAT_VERSION:
        raise FormatError(
            f"{checkpoint.folder}: wanted format_version {FORMAT_VERSION} or older, "
            f"got {description['format_version']}: update raybert"
        )
    if run_digest is not None and description["run_digest"] != run_digest:
        raise FormatError(
            f"{checkpoint.folder}: wanted a checkpoint of run {run_digest[:6]}, got one of run "
            f"{description['run_digest'][:6]} (another config or other shards): "
            "use another output, or start over with --force"
        )
    parts: dict[str, list[Tensor]] = {}
    for file, sha256 in sorted(description["sha256"].items()):
        if file.startswith(name):
            for key, value in load(_read(files.join(checkpoint.folder, file), sha256)).items():
                parts.setdefault(key, []).append(value)
    return {
        key: torch.cat(values) if len(values) > 1 and values[0].ndim else values[0]
        for key, values in parts.items()
    }


def _read(path: str, sha256: str) -> bytes:
    way_out = "remove this checkpoint's folder to resume from the previous one"
    try:
        data = files.read_bytes(path)
    except FileNotFoundError as error:
        raise FormatError(
            f"{path}: wanted the file that {LAST_FILE} lists, it is missing; {way_out}"
        ) from error
    actual = hashlib.sha256(data).hexdigest()
    if actual != sha256:
        raise FormatError(
            f"{path}: wanted sha256 {sha256[:12]}…, got {actual[:12]}…: the file has changed; "
            f"{way_out}"
        )
    return data


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
    """Return the optimizer's tensors; moments of word tables are expanded to all words."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    tensors: dict[str, Tensor] = {}
    for index, values in optimizer.state_dict()["state"].items():
        table = table_of(weights[index])
        for key, value in values.items():
            whole = table is not None and value.ndim
            tensors[f"{index}.{key}"] = table.moments_of_all(value) if table and whole else value
    return tensors
