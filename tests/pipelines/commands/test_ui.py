"""MLflow's page is opened on the store that the stages record to, and not over another server."""

import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from bert_core.errors import ConfigError, ResourceError
from pipelines.commands.ui import UiConfig, run
from tests.commands import raybert
from tests.waiting import wait_until
from tracking.runs.recorder import RunRecorder
from tracking.store.ports import free_ports


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        config = UiConfig(port=port, tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
        with pytest.raises(ResourceError) as caught:
            run(config)
    assert f"port {port} on 127.0.0.1 is in use by " in str(caught.value)
    assert "choose another port with --port" in str(caught.value)


def test_a_port_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="port: wanted 1 to 65535, got 0"):
        UiConfig(port=0)


@pytest.mark.drill
def test_the_store_of_a_run_is_opened_at_that_run(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/elsewhere.db"
    with RunRecorder.open(tmp_path / "out", uri=uri) as recorder:
        recorder.flush()
    [port] = free_ports(1)
    command = raybert("ui", f"{tmp_path}/out", f"--port={port}")
    other = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/another.db"}
    page = subprocess.Popen(
        command, env=os.environ | other, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert page.stdout is not None
        place = f"http://127.0.0.1:{port}"
        assert page.stdout.readline() == f"starting MLflow on {uri} (Ctrl-C stops it)\n"
        told = (
            f"MLflow answers at {place}/#/experiments/1/runs/{recorder.run_id}"
            "?workflowType=machine_learning\n"
        )
        assert told in page.stdout  # among what MLflow says
        assert httpx.get(place, timeout=30).is_success  # the first click
        run = f"{place}/api/2.0/mlflow/runs/get?run_id={recorder.run_id}"

        def has_run() -> bool:
            with suppress(httpx.TransportError):
                return httpx.get(run, timeout=30).is_success
            return False

        wait_until("MLflow has the run", has_run, timeout_s=120, every_s=0.2, process=page)
    finally:
        os.killpg(page.pid, signal.SIGKILL)
        page.communicate()


def test_folders_that_are_not_runs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"run: wanted the output of a stage, {tmp_path} has no"):
        run(UiConfig(run=str(tmp_path)))
