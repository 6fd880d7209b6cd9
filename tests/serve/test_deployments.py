"""What Ray Serve does with our deployments: it replaces what fails and adds what is needed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml

from bert_core.predictor import Predictor
from serve.config import ServeConfig
from tests.serve import live
from tracking.ports import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.drill]

TEXTS = ["Parse a string.", "Open a socket on a port.", "A fox."]


@pytest.fixture
def serving(local_ray: None) -> Iterator[Any]:
    """Ray Serve on the shared cluster, without HAProxy."""
    from serve import applications  # after the environment is set

    (port,) = free_ports(1)
    applications.start(ServeConfig(models="a=x", port=port, haproxy=False))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        applications.shut_down()


def test_a_replica_whose_passes_fail_is_replaced(serving: str, bundle: Path) -> None:
    from ray import cloudpickle
    from ray import serve as ray_serve

    from serve.applications import model_application
    from serve.deployments import ModelReplica
    from serve.plan import find

    class Breakable(ModelReplica):
        async def damage(self) -> int:
            """Make every pass fail, as damaged memory does. Returns: the process's id."""
            model = self._local.slot.model.predictor.model
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))
            return os.getpid()

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    config = ServeConfig(models=f"docs={bundle}")
    ((name, found),) = find(config).items()
    options = dict(model_application(config, name, found, alone=True).options)
    del options["backpressure_config"]
    kind = ray_serve.deployment(name="model", health_check_period_s=1)(Breakable)
    handle = ray_serve.run(kind.options(**options).bind(), name="breakable", route_prefix="/b")
    url = f"{serving}/b/"
    wanted = Predictor(bundle, device="cpu").predict(TEXTS)
    assert labels(httpx.post(url, json={"inputs": TEXTS}, timeout=30).json()) == labels(wanted)
    handle.damage.remote().result(timeout_s=30)
    failed = httpx.post(url, json={"inputs": TEXTS}, timeout=30)
    assert (failed.status_code, failed.json()["error_type"]) == (503, "model_failed")
    assert failed.headers["Retry-After"]

    def answers() -> bool:
        response = httpx.post(url, json={"inputs": TEXTS}, timeout=30)
        return response.status_code == 200 and labels(response.json()) == labels(wanted)

    live.eventually(answers)
    ray_serve.delete("breakable")


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
