"""Our deployments by Ray's own command, `serve deploy`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bert_core.inference.predictor import Predictor
from tests.serve import live
from tracking.store.ports import free_ports

pytestmark = pytest.mark.drill

TEXTS = ["Parse a string.", "Open a socket on a port.", "A fox."]


def labels(answers: list[list[dict[str, Any]]]) -> list[str]:
    return [answer[0]["label"] for answer in answers]


def test_serve_deploy_does_the_same_with_the_file_that_is_printed(
    head: Any, bundle: Path, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    config, file = tmp_path / "serve.toml", tmp_path / "serve.yaml"
    config.write_text(f'port = {port}\nnum_cpus = 0.2\n[models.docs]\nmodel = "{bundle}"\n')
    printed = head.raybert("serve", "--apply", str(config), "--dry_run")  # needs no cluster
    assert printed.returncode == 0, printed.stderr
    assert yaml.safe_load(printed.stdout)["http_options"] == {"host": "127.0.0.1", "port": port}
    file.write_text(printed.stdout)
    url = head.environment["RAY_API_SERVER_ADDRESS"]
    command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(file), "--address", url]
    environment = head.environment | {"RAY_AUTH_MODE": "token"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=Path.cwd(), timeout=120
    )
    assert done.returncode == 0, done.stderr
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

            def is_ready() -> bool:
                try:
                    return client.get("/readyz").status_code == 200
                except httpx.TransportError:
                    return False

            live.eventually(is_ready, timeout_s=120)
            answers = client.post("/v1/models/docs", json={"inputs": TEXTS}).json()
        assert labels(answers) == labels(Predictor(bundle, device="cpu").predict(TEXTS))
    finally:
        head.raybert("serve", "--stop", RAY_ADDRESS=head.addresses["host:port"])
