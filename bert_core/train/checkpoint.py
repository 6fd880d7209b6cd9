"""Checkpoints of a run: whole or not at all, on any path or URI, without pickle.

A checkpoint is a folder `step-00001000` with `model.safetensors`, `optimizer.safetensors` and,
written last, `checkpoint.json`. Where weights are sharded each rank writes files of its own,
`model-00001-of-00004.safetensors`: its rows of every tensor; one rank or many read them all.
Position and randomness need no state: both follow from the step.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

from bert_core import files
from bert_core.errors import FormatError
from bert_core.train.parallel import like_part, own_part, rank_of_world
from bert_core.train.words import table_of

FORMAT_VERSION = 1
LAST_FILE = "checkpoint.json"
MODEL, OPTIMIZER, SUFFIX = "model", "optimizer", ".safetensors"
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: where it lies and after how many steps it was written."""

    folder: str
    step: int


@dataclass(frozen=True)
class Progress:
    """What a resumed run needs to know of the run before, beside weights and step."""

    losses: Sequence[float] = ()
    """The last points of its curve, which the next ones are held against."""
    costs: Sequence[float] = ()
    """What it came to whenever it was measured, as `CheckpointWriter.save` takes it."""
    elapsed_s: float = 0.0
    """Seconds that it has trained."""
    records: Sequence[tuple[int, Mapping[str, float]]] = ()
    """Points of its curves that may have been lost on their way to the run's record."""


class CheckpointWriter:
    """Writes checkpoints while training goes on: one at a time, of weights as they were.

    All but the newest `keep` whole checkpoints and the best are removed.
    """

    def __init__(self, folder: str, *, run_digest: str, keep: int = 2) -> None:
        """`run_digest` is that of the stage that trains; another run refuses to resume from it."""
        self._folder, self._run_digest, self._keep = folder, run_digest, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        # Of its own: threads that write meet on it while training uses the other.
        self._group = dist.new_group(backend="gloo") if rank_of_world()[1] > 1 else None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        cost: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Copy what there is to write, and write `step-…` in the background.

        Waits for the checkpoint before, and raises what went wrong with it. Every rank calls it:
        of a model that is sharded each writes its part, else rank 0 all.

        Args:
            cost: of these weights on rows that they were not trained on, where it was measured; the
                least of all is the best.
            progress: of the run so far.
        """
        self.wait()
        rank, world_size = rank_of_world()
        sharded = isinstance(model, FSDPModule)
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
        self._writing = self._thread.submit(_write, self._folder, copies, about, self._keep, group)

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
    folder: str,
    tensors: dict[str, dict[str, Tensor]],
    about: dict[str, Any],
    keep: int,
    group: dist.ProcessGroup | None,
) -> None:
    """`group` has the ranks that write parts of the same checkpoint."""
    own = checkpoint_at(folder, about["step"]).folder
    digests = {}
    for name, values in tensors.items():
        data = save({key: value.contiguous() for key, value in values.items()})
        files.write_bytes(files.join(own, name), data)
        digests[name] = hashlib.sha256(data).hexdigest()
    if group is not None:
        of_all: list[Any] = [None] * group.size()
        dist.all_gather_object(of_all, digests, group=group)
        if group.rank():
            return
        digests = {name: digest for part in of_all for name, digest in part.items()}
    description = {"format_version": FORMAT_VERSION, **about, "sha256": digests}
    files.write_json(files.join(own, LAST_FILE), description)
    whole = _whole_checkpoints(folder)
    best = best_checkpoint(folder) if len(whole) > keep else None
    kept = [*whole[-keep:], best]
    for other in _checkpoints(folder):
        newer = group is not None and other.step > about["step"]  # another rank has begun it
        if other not in kept and not newer:
            files.remove(files.join(other.folder, LAST_FILE))  # first: what is left is none
            files.remove(other.folder)


def latest_checkpoint(folder: str) -> Checkpoint | None:
    """The newest whole checkpoint in `folder`, or None."""
    whole = _whole_checkpoints(folder)
    return whole[-1] if whole else None


def best_checkpoint(folder: str) -> Checkpoint | None:
    """The whole checkpoint with the least cost, the earliest of equals; None if it was measured for
    none."""
    best, least = None, float("inf")
    for checkpoint in _whole_checkpoints(folder):
        cost = files.read_json(files.join(checkpoint.folder, LAST_FILE)).get("cost")
        if cost is not None and cost < least:
            best, least = checkpoint, cost
    return best


def checkpoint_at(folder: str, step: int) -> Checkpoint:
    """The checkpoint after `step`, whether or not it is there."""
    return Checkpoint(files.join(folder, f"step-{step:08d}"), step)


def read_progress(checkpoint: Checkpoint) -> Progress:
    """What was kept of the run before a checkpoint."""
    about = files.read_json(files.join(checkpoint.folder, LAST_FILE))
    return Progress(**{key: about[key] for key in Progress.__dataclass_fields__ if key in about})


def load_weights(checkpoint: Checkpoint, model: nn.Module, *, run_digest: str) -> None:
    """Put a checkpoint's weights in place, before they are sharded.

    Raises: FormatError if it belongs to another run or a file was changed.
    """
    model.load_state_dict(_tensors(checkpoint, MODEL, run_digest))


def load_optimizer(
    checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, *, run_digest: str
) -> None:
    """Put a checkpoint's optimizer state in place, cut as the weights are.

    Raises: FormatError, as `load_weights` does.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in _tensors(checkpoint, OPTIMIZER, run_digest).items():
        index, key = name.split(".", 1)
        weight = weights[int(index)]
        table = table_of(weight)
        if table is not None and value.ndim:
            value = table.moments_of_read(value)
        cut = like_part(value, weight) if value.ndim else value
        state.setdefault(int(index), {})[key] = cut
    # The groups' settings come from the config of today, whose digest is the checkpoint's.
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


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
    parts: dict[str, list[Tensor]] = {}
    for file, sha256 in sorted(description["sha256"].items()):
        if file.startswith(name):
            for key, value in load(_read(files.join(checkpoint.folder, file), sha256)).items():
                parts.setdefault(key, []).append(value)
    return {
        key: torch.cat(some) if len(some) > 1 and some[0].ndim else some[0]
        for key, some in parts.items()
    }


def _read(path: str, sha256: str) -> bytes:
    way_out = "remove this checkpoint's folder to go on from the one before"
    try:
        data = files.read_bytes(path)
    except FileNotFoundError as error:
        raise FormatError(
            f"{path}: wanted the file that {LAST_FILE} names, it is not there; {way_out}"
        ) from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise FormatError(
            f"{path}: wanted sha256 {sha256[:12]}…, got {found[:12]}…: the file was changed; "
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
    """Moments of whole tables, however many of their words are trained."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    found: dict[str, Tensor] = {}
    for index, values in optimizer.state_dict()["state"].items():
        table = table_of(weights[index])
        for key, value in values.items():
            whole = table is not None and value.ndim
            found[f"{index}.{key}"] = table.moments_of_all(value) if table and whole else value
    return found
