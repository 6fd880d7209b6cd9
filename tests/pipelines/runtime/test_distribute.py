"""Pieces of work on nodes that come and go."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipelines.runtime import cluster, distribute
from pipelines.runtime.distribute import run_tasks
from pipelines.runtime.stage_config import StageConfig

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

ITEMS = 6
DONE, NODE = ".done", ".node"


@pytest.fixture
def nodes() -> "Iterator[Cluster]":
    """A head without room for work, and two nodes with room for one worker each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        made.add_node(num_cpus=1)
    yield made
    cluster.disconnect()
    made.shutdown()


class Write:
    """Writes an item's file. The first time that it is done item 1 takes for ever, and the last
    item waits for all others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, number: int) -> int:
        import ray

        node = self.folder / f"{number}{NODE}"
        if number == 1 and not node.exists():
            node.write_text(ray.get_runtime_context().get_node_id())
            time.sleep(600)
        while number == ITEMS - 1 and len(list(self.folder.glob(f"*{DONE}"))) < ITEMS - 1:
            time.sleep(0.05)
        (self.folder / f"{number}{DONE}").touch()
        return 10 * number


@pytest.mark.ray
@pytest.mark.cluster  # in a process with other clusters, Ray once ended an actor before it ran
def test_items_of_a_lost_node_go_to_the_others_if_none_has_room_for_its_worker(
    nodes: "Cluster", tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(distribute, "GONE_AFTER_S", 2.0)
    config = StageConfig(
        output=str(tmp_path), num_workers=2, address=nodes.address, allow_open_cluster=True
    )

    def lose() -> None:
        while not (name := tmp_path / f"1{NODE}").exists() or not name.read_text():
            time.sleep(0.05)
        [lost] = [each for each in nodes.worker_nodes if each.node_id == name.read_text()]
        nodes.remove_node(lost, allow_graceful=False)

    thread = threading.Thread(target=lose)
    thread.start()
    answers = list(run_tasks(Write(tmp_path), range(ITEMS), config))
    thread.join()
    assert sorted(answers) == [(number, 10 * number) for number in range(ITEMS)]
    out = capfd.readouterr().out
    assert "has lost nodes, and has room for 1 of 2 workers" in out, out
