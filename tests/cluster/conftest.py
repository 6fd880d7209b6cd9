"""The hosts, which all tests here share."""

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import missing
from tests.cluster.on_hosts import Cluster, running_hosts, running_ray


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Hosts with a bucket, MLflow and a client; no Ray yet."""
    if lack := missing():
        pytest.skip(lack)
    with running_hosts(tmp_path_factory.mktemp("hosts")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def up(cluster: Cluster) -> Iterator[Cluster]:
    """With Ray on the head and on both workers."""
    with running_ray(cluster):
        yield cluster
