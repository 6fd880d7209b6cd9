"""From `ray up deploy/onprem.yaml` to answers over the network, on hosts of their own."""

import re

import pytest

from tests.cluster.on_hosts import BUCKET, WORKERS, Cluster, query, serving, serving_key

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3000)]


def test_the_whole_path(up: Cluster) -> None:
    """And one run is the same bytes on two hosts as on one."""
    with up.timed("raybert doctor"):
        told = up.at_client(
            f"raybert doctor --address http://localhost:8265 --storage {BUCKET}/doctor"
        )
    assert "3 nodes" in told
    for stage in ("vocab", "prepare"):
        with up.timed(stage):
            up.submit(stage)
    alone = "--num_workers 0 --output ~/alone --tracking_uri sqlite:///$HOME/alone.db"
    up.at_client(f"raybert prepare --config ~/configs/prepare.toml {alone}")
    shards = up.digests(f"{BUCKET}/prepare")
    assert len(shards) > 1
    assert shards == up.digests("~/alone")
    key = serving_key(up)
    assert logged(up, "pretrain") >= {up[name].address for name in WORKERS}
    with serving(up):
        for host in WORKERS:
            assert up[host].run("ps -eo args").count("ServeReplica:model-docstrings"), host
            assert query(up, host, key) == 200
            assert query(up, host, "not-a-key") == 401


def logged(cluster: Cluster, output: str) -> set[str]:
    """Addresses of hosts whose processes' logs are with the output."""
    listed = cluster.content(f"?list-type=2&prefix={output}/logs/") or ""
    return set(re.findall(r"/logs/[^/]+/([\d.]+)/worker-[^<]*</Key>", listed))
