"""A node of a cluster that serves is lost: what `docs/serving/operate.md` says of it is true."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.serve import live
from tests.serve.faults import (
    SHORT,
    Fault,
    Load,
    Question,
    assert_only_fails,
    documented_s,
    newest,
)
from tracking.store.ports import free_ports

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.ray, pytest.mark.drill]

ONE_MACHINE = {"SERVE_SOCKET_REUSE_PORT_ENABLED": "1"}
"""For nodes that share a machine: each one's HAProxy has metrics at the same port."""


@pytest.fixture
def cluster() -> "Iterator[Cluster]":
    """A head that has room for one replica."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "env_vars": ONE_MACHINE})
    yield made
    made.shutdown()


def test_a_lost_node_fails_no_request(cluster: "Cluster", bundle: Path, tmp_path: Path) -> None:
    from bert_core.inference.predictor import Predictor

    port, *others = free_ports(3)

    def apply(num_replicas: int) -> None:
        file = tmp_path / "serve.toml"
        file.write_text(
            f'port = {port}\n[models.docs]\nmodel = "{bundle}"\nnum_replicas = {num_replicas}\n'
        )
        command = ["pipelines.cli", "serve", "--apply", str(file), "--allow_open_cluster"]
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env=os.environ | {"RAY_ADDRESS": cluster.address},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "requires no token: anyone who reaches" in done.stdout + done.stderr

    def add_node() -> Any:
        variables = {"RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(others.pop())}
        return cluster.add_node(num_cpus=1, env_vars=ONE_MACHINE | variables)

    body, wanted = {"inputs": SHORT}, Predictor(bundle, device="cpu").predict(SHORT)
    places = {"/v1/models/docs": {}, "/": {"model": "docs"}}
    asked = [Question(path, body | more, wanted) for path, more in places.items()]
    apply(1)  # with the front, on the head
    second = add_node()
    apply(2)
    within_s = documented_s("a node")
    with Load(f"http://127.0.0.1:{port}", asked) as load:
        load.wait_until_answered()
        (raylet,) = second.all_processes["raylet"]
        lost = [psutil.Process(raylet.process.pid)]
        lost += lost[0].children(recursive=True)
        assert any("ServeReplica:model-docs" in " ".join(each.cmdline()) for each in lost)
        killed_s, killed_at = time.monotonic(), time.time()
        for process in lost:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        cluster.remove_node(second, allow_graceful=False)
        add_node()

        url = f"http://127.0.0.1:{port}/v1/models/docs"
        live.eventually(lambda: newest(url) > killed_at, timeout_s=within_s)
        print(f"two replicas again after {time.monotonic() - killed_s:.1f} s")
        full_s = load.wait_until_full(killed_s, within_s)
    print(f"a node: full {full_s:.1f} s")
    assert_only_fails(load.since(killed_s), Fault("raylet"), load.connections)
