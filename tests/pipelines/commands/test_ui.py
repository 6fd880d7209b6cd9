"""MLflow's page is opened on the store that the stages record to, and not over another server."""

import socket
from pathlib import Path

import pytest

from bert_core.errors import ConfigError, ResourceError
from pipelines.commands.ui import UiConfig, run


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
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
