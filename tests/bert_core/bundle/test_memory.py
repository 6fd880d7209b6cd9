"""Weights that do not fit into memory are refused before they are read."""

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from bert_core.bundle import format as bundles
from bert_core.bundle.format import About, load_bundle
from bert_core.bundle.layout import GRAPHS
from bert_core.bundle.memory import available_bytes, check_memory, needed_bytes
from bert_core.bundle.writing import Graph, save_bundle
from bert_core.errors import ResourceError
from tests import tiny

GIB = 1 << 30
MEMINFO = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {8 * GIB >> 10} kB\nSwapFree: 1024 kB\n"}
SWAP = 1 << 20
V1, V2 = "9:name=systemd:/\n4:cpu,memory:/job/one\n0::/\n", "0::/job/one\n"
STAT_1 = "inactive_file 7\nactive_file 7\ntotal_inactive_file 1000\ntotal_active_file 200\n"
STAT_2 = "inactive_file 1000\nactive_file 200\n"


def group(path: str, limit: str, used: int, *, version: int = 2) -> dict[str, str]:
    """The files of a control group; see the kernel's cgroup-v1/memory.rst and cgroup-v2.rst."""
    names = ("memory.max", "memory.current")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folder = "sys/fs/cgroup/" + ("memory/" if version == 1 else "") + path
    stat = STAT_1 if version == 1 else STAT_2
    values = dict(zip(names, (limit, str(used)), strict=True))
    return {f"{folder}/{name}": text for name, text in (values | {"memory.stat": stat}).items()}


MACHINES: Mapping[str, tuple[dict[str, str], int | None]] = {
    "no group": (MEMINFO, 8 * GIB + SWAP),
    "a group without limit": (
        MEMINFO | {"proc/self/cgroup": V2} | group("job/one", "max", 5),
        8 * GIB + SWAP,
    ),
    "a group": (
        MEMINFO | {"proc/self/cgroup": V2} | group("job/one", str(3 * GIB), GIB),
        2 * GIB + 1200 + SWAP,
    ),
    "a group in a smaller one": (
        MEMINFO
        | {"proc/self/cgroup": V2}
        | group("job/one", str(3 * GIB), GIB)
        | group("job", str(2 * GIB), GIB),
        GIB + 1200 + SWAP,
    ),
    "the group of a container, which is the root there": (
        MEMINFO | {"proc/self/cgroup": V2} | group("", str(GIB), 200),
        GIB + 1000 + SWAP,
    ),
    "version 1": (
        MEMINFO | {"proc/self/cgroup": V1} | group("job/one", str(GIB), 0, version=1),
        GIB + 1200 + SWAP,
    ),
    "more than its limit": (
        MEMINFO | {"proc/self/cgroup": V2} | group("job/one", "5", GIB),
        0,
    ),
    "no Linux": ({}, None),
}


@pytest.mark.parametrize("name", MACHINES)
def test_free_memory_is_the_least_of_the_machine_and_its_groups(name: str, tmp_path: Path) -> None:
    files, wanted = MACHINES[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert available_bytes(tmp_path) == wanted


def test_this_machines_free_memory_is_positive_and_at_most_its_total() -> None:
    left = available_bytes()
    assert left is not None
    assert 0 < left <= psutil.virtual_memory().total + psutil.swap_memory().total


def test_weights_need_their_size_in_fp32(tmp_path: Path) -> None:
    tensors = {
        "half": torch.zeros(10, 3, dtype=torch.bfloat16),
        "single": torch.zeros(7),
        "positions": torch.zeros(5, dtype=torch.int64),  # which are not kept
    }
    save_file(tensors, tmp_path / "a.safetensors")
    (tmp_path / "graph.onnx").write_bytes(b"12345")
    assert needed_bytes([tmp_path / "a.safetensors", tmp_path / "graph.onnx"]) == 4 * 37 + 5


def test_a_graph_needs_the_weights_that_lie_beside_it_too(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_bytes(b"graph")
        path.with_name(f"{path.name}_data").write_bytes(bytes(1000))

    tokenizer = tiny.tokenizer()
    model = tiny.model(tiny.encoder_config(tokenizer.vocab_size))
    graph = Graph(name=GRAPHS["fp32"], write=write)
    save_bundle(tmp_path / "bundle", model, tokenizer, About(), graph)
    assert load_bundle(tmp_path / "bundle").memory_bytes == 1005


def test_a_bundle_that_does_not_fit_is_refused_with_needed_and_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.bundle(tmp_path / "bundle", tiny.tokenizer())
    bundle = load_bundle(folder)
    weights = sum(tensor.nbytes for tensor in bundle.state.values())
    assert bundle.memory_bytes == weights
    check_memory(weights, weights, "a")
    check_memory(weights, None, "a")
    monkeypatch.setattr(bundles, "available_bytes", lambda: weights - 1)
    with pytest.raises(ResourceError) as caught:
        load_bundle(folder)
    assert str(caught.value) == (
        f"{folder}: wanted {weights:,} bytes of memory for its weights, this machine or container "
        f"has {weights - 1:,} left: end other processes, give it more memory, or take a smaller "
        "model"
    )
