"""A cluster that starts nodes when something waits for them, by Ray's own autoscaler."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pipelines.runtime.test_cluster import vocab_command
from tests.ray_clusters import Head, running_head

NODES = """
import sys, time
from pipelines.runtime import cluster
from pipelines.runtime.capacity import require_room
cluster.connect(address=sys.argv[1])
import ray

def nodes():
    return sum(node["Alive"] for node in ray.nodes())

print(require_room(1, 1, gpus="one each", wait=True), nodes())
deadline = time.monotonic() + 90
while nodes() > 1 and time.monotonic() < deadline:
    time.sleep(0.2)
print(nodes())
"""


@pytest.fixture(scope="module")
def growing_head() -> Iterator[Head]:
    """One without a CPU, which may start a node with two, and a node with a GPU."""
    kinds = {"cpus": {"CPU": 2}, "gpu": {"CPU": 1, "GPU": 1}}
    token = {"RAY_AUTH_TOKEN": "00ff" * 16}
    with running_head(token, mode="token", grows_by=kinds) as head:
        yield head


@pytest.mark.ray
@pytest.mark.cluster
def test_a_waiting_stage_has_the_missing_nodes_started(
    growing_head: Head, tmp_path: Path, recovered: Callable[[str, float, float], None]
) -> None:
    address = growing_head.addresses["host:port"]
    # Two, where the command has one; the last one counts.
    command = [*vocab_command(tmp_path), "--address", address, "--num_workers", "2"]
    lacks = "wanted 2 CPUs (2 workers with 1 thread), the cluster has 0: lower num_workers or"
    refused = growing_head.raybert(*command)
    assert refused.returncode == 1, refused.stdout
    assert lacks in refused.stderr
    began_s = time.monotonic()
    done = growing_head.raybert(*command, "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    assert lacks in done.stdout
    assert (tmp_path / "vocab" / "manifest.json").is_file()
    recovered("a stage waits for nodes that are started for it, and ends", began_s, 240)


@pytest.mark.ray
@pytest.mark.cluster
def test_gpus_are_started_where_they_are_required_and_end_when_nobody_asks_for_them(
    growing_head: Head,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NODES, growing_head.addresses["host:port"]],
        env=growing_head.environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    told, room, left = done.stdout.splitlines()
    assert told.endswith("add nodes; waiting for some")
    assert room.startswith("True "), done.stderr
    assert left == "1", "the demand ended with the wait, and then the nodes"
