"""Checks that a Ray cluster has room for models: Ray Serve would wait forever for resources."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import ray

from bert_core.bundle.memory import available_bytes
from bert_core.errors import ResourceError
from serve.config import ModelConfig
from serve.versions.plan import Deployable

Kind = Literal["CPU", "GPU"]


def check_room(models: Mapping[str, ModelConfig], *, together: bool) -> None:
    """Check that the cluster has the CPUs and GPUs for all replicas.

    Args:
        together: whether all models run in a single process.
    Raises: ResourceError, with advice.
    """
    resources = ray.cluster_resources()
    kinds: tuple[Kind, ...] = ("CPU", "GPU")
    for kind in kinds:
        needed = _wanted(kind, models, together=together)
        if needed > (available := resources.get(kind, 0)):
            raise ResourceError(
                f"wanted {needed} {kind}s ({_breakdown(kind, models, together=together)}), the Ray "
                f"cluster has {available:g}: {', or '.join(_ways(kind, models, together=together))}"
            )


def check_memory(
    settings: Mapping[str, ModelConfig],
    models: Mapping[str, Deployable],
    *,
    available: int | None = None,
) -> None:
    """Check that the weights of all replicas fit into this machine's memory, if the cluster has
    only this machine.

    Each replica checks its own memory again, wherever it starts. Models in one process share equal
    parts, which this check does not know of: do not call it for them.

    Args:
        available: available bytes; None measures them.
    Raises: ResourceError, with advice.
    """
    if sum(node["Alive"] for node in ray.nodes()) != 1:
        return
    available = available_bytes() if available is None else available
    counts = {
        name: (settings[name].num_replicas, model.memory_bytes)
        for name, model in models.items()
        if not settings[name].num_gpus
    }
    needed = sum(count * size for count, size in counts.values())
    if available is not None and needed > available:
        parts = [f"{name}: {count} × {size:,}" for name, (count, size) in counts.items()]
        several = any(count > 1 for count, _ in counts.values())
        ways = ["lower num_replicas"] if several else []
        ways += ["serve fewer models, or set together, for one process"] if len(counts) > 1 else []
        raise ResourceError(
            f"wanted {needed:,} bytes of memory for the weights of all replicas "
            f"({'; '.join(parts)}), this machine or container has {available:,} left: "
            f"{', or '.join([*ways, 'give it more'])}"
        )


def _per_replica(kind: Kind, model: ModelConfig) -> float:
    return model.reserved_cpus if kind == "CPU" else model.num_gpus


def _wanted(kind: Kind, models: Mapping[str, ModelConfig], *, together: bool) -> int:
    if together:
        return math.ceil(max(_per_replica(kind, model) for model in models.values()))
    replicas: Counter[float] = Counter()
    for model in models.values():
        replicas[_per_replica(kind, model)] += model.num_replicas
    if kind == "CPU":
        return math.ceil(sum(share * count for share, count in replicas.items()))
    # A replica's fraction of a GPU must be on a single GPU.
    return sum(
        math.ceil(count / math.floor(1 / share + 1e-9)) if share < 1 else math.ceil(count * share)
        for share, count in replicas.items()
        if share
    )


def _breakdown(kind: Kind, models: Mapping[str, ModelConfig], *, together: bool) -> str:
    """Return how the total is made up, in words."""
    parts = {
        name: f"num_replicas {model.num_replicas} × {_field(kind, model)} "
        f"{_per_replica(kind, model):g}"
        for name, model in models.items()
    }
    if len(set(parts.values())) == 1:
        return f"models {1 if together else len(models)} × {next(iter(parts.values()))}"
    return "; ".join(f"{name}: {part}" for name, part in parts.items())


def _field(kind: Kind, model: ModelConfig) -> str:
    if kind == "GPU":
        return "num_gpus"
    return "threads" if model.num_cpus is None else "num_cpus"


def _ways(kind: Kind, models: Mapping[str, ModelConfig], *, together: bool) -> list[str]:
    settings = models.values()
    several = len(models) > 1 and not together
    one_each = all(model.num_replicas == 1 for model in settings)
    ways = ["serve fewer models"] if several else []
    ways += [] if one_each else ["lower num_replicas"]
    if kind == "GPU":
        ways.append("lower num_gpus (a fraction shares a GPU, 0 computes on CPUs)")
    else:
        many_threads = any(model.num_cpus is None and model.threads > 1 for model in settings)
        ways += ["lower threads"] if many_threads else []
        ways.append("set num_cpus to a fraction")
        ways += ["set together, for one process"] if several and one_each else []
    return [*ways, f"use a machine or cluster with more {kind}s"]
