"""How busy nodes are is read now and then, under MLflow's names, and joins the points of a run."""

import re

import pytest

from pipelines.runtime.nodes import NVIDIA
from pipelines.training.records import with_readings
from tracking.runs import system_metrics
from tracking.runs.system_metrics import SystemMetrics


def test_a_reading_has_the_names_of_mlflows_own_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_NODE_ID", "node-7")
    wanted = set()
    for monitor in (CPUMonitor(), DiskMonitor(), NetworkMonitor()):
        monitor.collect_metrics()
        wanted |= {f"system/node-7/{name}" for name in monitor.aggregate_metrics()}
    read = SystemMetrics().read()
    assert {name for name in read if "/gpu_" not in name} == wanted
    assert all(value >= 0 for value in read.values())


def test_a_node_is_read_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = SystemMetrics()
    assert metrics.read()
    assert metrics.read() == {}
    monkeypatch.setattr(system_metrics, "EVERY_S", 0.0)
    frequent = SystemMetrics()
    assert frequent.read()
    assert frequent.read()


def test_the_last_point_gets_the_readings_of_all_nodes() -> None:
    points = [(1, {"loss": 2.0}), (2, {"loss": 1.0})]
    readings = [{"system/a/x": 1.0}, {}, {"system/b/x": 2.0}]
    together = {"loss": 1.0, "system/a/x": 1.0, "system/b/x": 2.0}
    assert with_readings(points, readings) == [(1, {"loss": 2.0}), (2, together)]
    assert points[1] == (2, {"loss": 1.0}), "what a checkpoint stores is left as it was"
    assert with_readings([], readings) == []


@pytest.mark.gpu
def test_gpus_are_read() -> None:
    if not NVIDIA.exists():
        pytest.skip("there is no NVIDIA GPU")
    read = SystemMetrics().read()
    for name in ("utilization_percentage", "memory_usage_megabytes", "power_usage_watts"):
        assert any(re.search(rf"/gpu_\d+_{name}$", each) for each in read), read
