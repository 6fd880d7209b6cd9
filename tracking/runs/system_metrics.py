"""Reads how busy a machine is, under the names by which MLflow's page shows it for each node.

MLflow's own monitor writes from every process. These readings go into the record of the run
instead, so that a run has a single writer and an outage of MLflow loses no readings.
"""

import os
import socket
import time
from contextlib import suppress

import psutil

from tracking.runs.metric_names import SYSTEM

EVERY_S = 10.0
"""Seconds between readings, as MLflow has it."""
MB = 1e6


class SystemMetrics:
    """Readings of this machine since the previous reading:
    `system/<node>/cpu_utilization_percentage`.

    The node is named by MLFLOW_SYSTEM_METRICS_NODE_ID, or else by its host name.
    """

    def __init__(self) -> None:
        node = os.environ.get("MLFLOW_SYSTEM_METRICS_NODE_ID") or socket.gethostname()
        self._prefix = f"{SYSTEM}{node}/"
        self._due_s = 0.0
        self._gpus = Gpus()
        psutil.cpu_percent()  # the next call returns the use since this one
        self._first = psutil.net_io_counters()

    def read(self) -> dict[str, float]:
        """Return the readings to record now; empty if the last reading is less than `EVERY_S`
        old."""
        if time.monotonic() < self._due_s:
            return {}
        self._due_s = time.monotonic() + EVERY_S
        memory, disk = psutil.virtual_memory(), psutil.disk_usage(os.sep)
        network = psutil.net_io_counters()
        readings = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / MB,
            "system_memory_usage_percentage": 100 * memory.used / memory.total,
            "disk_usage_megabytes": disk.used / MB,
            "disk_usage_percentage": disk.percent,
            "disk_available_megabytes": disk.free / MB,
            "network_receive_megabytes": (network.bytes_recv - self._first.bytes_recv) / MB,
            "network_transmit_megabytes": (network.bytes_sent - self._first.bytes_sent) / MB,
            **self._gpus.read(),
        }
        return {self._prefix + name: round(value, 1) for name, value in readings.items()}


class Gpus:
    """The NVIDIA GPUs of this machine; empty if there is no driver."""

    def __init__(self) -> None:
        import pynvml

        self._nvml, self._handles = pynvml, []
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def read(self) -> dict[str, float]:
        """Return use, memory and power of each GPU; what a GPU does not report is left out."""
        nvml, readings = self._nvml, dict[str, float]()
        for index, handle in enumerate(self._handles):
            gpu = f"gpu_{index}_"
            with suppress(nvml.NVMLError):
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                readings[f"{gpu}memory_usage_megabytes"] = memory.used / MB
                readings[f"{gpu}memory_usage_percentage"] = 100 * memory.used / memory.total
            with suppress(nvml.NVMLError):
                use = nvml.nvmlDeviceGetUtilizationRates(handle)
                readings[f"{gpu}utilization_percentage"] = use.gpu
            with suppress(nvml.NVMLError):
                milliwatts = nvml.nvmlDeviceGetPowerUsage(handle)
                readings[f"{gpu}power_usage_watts"] = milliwatts / 1000
        return readings
