"""Training on nodes that come and go: real processes of Ray, a node each."""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bert_core.train.config import LoopConfig, ScheduleConfig
from pipelines import pretrain
from pipelines.pretrain import PretrainConfig
from pipelines.training.records import read_records
from tests.commands import raybert
from tests.processes import start_with_input
from tests.waiting import wait_until

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = pytest.mark.ray

CHECKPOINTS_WRITTEN = "checkpoints/*/checkpoint.json"
RUN = """
import pickle, sys
from pipelines import pretrain

pretrain.run(pickle.load(sys.stdin.buffer))
"""
# A node is lost after 3 checks that fail, not 5, of one a second, not one in 3 s.
CHECKS_OF_NODES = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 3,
}
NOTICED_SOON = {"RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5"}

wait = partial(wait_until, timeout_s=150, every_s=0.05)


@pytest.fixture(scope="module")
def cluster() -> "Iterator[Cluster]":
    """A head that has room for one worker."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "_system_config": CHECKS_OF_NODES}
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


def config_of(prepared: Any, folder: Path, cluster: "Cluster") -> PretrainConfig:
    """Steps without an end, so that nodes may come and go; no dropout, which is drawn by rank."""
    return replace(
        prepared.pretrain(folder),
        address=cluster.address,
        allow_open_cluster=True,
        loop=LoopConfig(max_steps=1_000_000, precision="fp32"),
        schedule=ScheduleConfig(warmup_steps=2, decay="constant"),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        checkpoint_every_steps=50,
        report_every_s=0.5,
        resize_every_s=1.0,
    )


@contextmanager
def running(config: PretrainConfig) -> Iterator[subprocess.Popen]:
    """The run, in a process of its own; killed when enough was seen of it."""
    process = start_with_input(
        [sys.executable, "-c", RUN], pickle.dumps(config), env=os.environ | NOTICED_SOON
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def workers(folder: Path) -> list[int]:
    """How many had a part in each step."""
    return [int(each["workers"]) for each in read_records(folder).values() if "workers" in each]


def losses(folder: Path) -> np.ndarray:
    return np.array([each["loss"] for each in read_records(folder).values() if "loss" in each])


@pytest.mark.drill
def test_workers_follow_the_nodes_and_losses_stay(
    prepared: Any,
    tmp_path: Path,
    cluster: "Cluster",
    recovered: Callable[[str, float, float], None],
) -> None:
    """Two nodes: one is taken with notice, which leads to a checkpoint; another comes, and is
    lost."""
    folder = tmp_path / "out"
    second = cluster.add_node(num_cpus=1)
    config = replace(config_of(prepared, folder, cluster), num_workers=(1, 2))
    config = replace(config, checkpoint_every_steps=CHECKPOINT_EVERY_STEPS, keep_checkpoints=99)
    with running(config) as process:
        wait("two train", lambda: workers(folder)[20:], process=process)
        assert set(workers(folder)) == {2}
        subprocess.run(
            raybert("drain", "--address", cluster.address,
                    "--node_id", second.node_id, "--allow_open_cluster"),
            check=True,
            env=os.environ,
        )  # fmt: skip
        step = wait("a checkpoint is out of turn", lambda: out_of_turn(folder), process=process)
        cluster.remove_node(second, allow_graceful=False)  # sooner than the notice said
        wait("one trains", lambda: 1 in workers(folder), process=process)
        assert workers(folder).index(1) >= step
        third = cluster.add_node(num_cpus=1)
        wait("two train again", lambda: workers(folder)[-1] == 2, process=process)
        lost = time.monotonic()
        cluster.remove_node(third, allow_graceful=False)
        wait("one trains again", lambda: workers(folder)[-1] == 1, process=process)
        recovered("an elastic run (`--num_workers [min,max]`) loses a node", lost, 120)
    found = losses(folder)
    loop = replace(config.loop, max_steps=len(found))
    pretrain.run(replace(config, output=str(tmp_path / "alone"), num_workers=0, loop=loop))
    np.testing.assert_allclose(found, losses(tmp_path / "alone"), rtol=0, atol=1e-3)


CHECKPOINT_EVERY_STEPS = 100


def out_of_turn(folder: Path) -> int | None:
    """The step of a checkpoint that was written on a notice."""
    steps = [json.loads(path.read_text())["step"] for path in folder.glob(CHECKPOINTS_WRITTEN)]
    return next((step for step in steps if step % CHECKPOINT_EVERY_STEPS), None)


@pytest.mark.guard
def test_a_lost_node_is_replaced_by_another(
    prepared: Any,
    tmp_path: Path,
    cluster: "Cluster",
    recovered: Callable[[str, float, float], None],
) -> None:
    """Of a fixed number of workers."""
    second = cluster.add_node(num_cpus=1)
    config = replace(config_of(prepared, tmp_path / "out", cluster), num_workers=2)
    with running(config) as process:
        wait("two train", lambda: workers(tmp_path / "out")[20:], process=process)
        cluster.add_node(num_cpus=1)
        lost = time.monotonic()
        cluster.remove_node(second, allow_graceful=False)
        at_loss = len(workers(tmp_path / "out"))
        wait("they go on", lambda: len(workers(tmp_path / "out")) > at_loss + 20, process=process)
        recovered("a node is lost while another is there", lost, 120)
        assert set(workers(tmp_path / "out")) == {2}


DRIVER = """
import sys

import ray

from pipelines.runtime import cluster


class Actor:
    def answer(self):
        return "answered"


cluster.connect(address=sys.argv[1], allow_open_cluster=True)
print(ray.get(ray.remote(Actor).remote().answer.remote()))
"""
# A cluster that requires no token, and a driver of it whose home folder has one.
JOIN = """
import os, subprocess, sys
from ray.cluster_utils import Cluster

made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
home = {**os.environ, "HOME": sys.argv[1]}
subprocess.run([sys.executable, "-c", sys.argv[2], made.address], env=home, check=True, timeout=100)
made.shutdown()
"""


@pytest.mark.drill
def test_actors_live_where_the_driver_has_a_token_that_the_cluster_does_not_ask_for(
    tmp_path: Path,
) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    environment = {name: value for name, value in os.environ.items() if name[:3] != "RAY"}
    environment |= {"HOME": str(tmp_path / "none")}
    done = subprocess.run(
        [sys.executable, "-c", JOIN, str(tmp_path), DRIVER],
        env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert "answered" in done.stdout, done.stderr
