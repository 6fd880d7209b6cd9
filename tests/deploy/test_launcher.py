"""The clusters for `ray up`, by Ray's own schema and by what they promise. No machine is
started."""

import json
import re
import shlex
import subprocess
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml

ROOT = Path(__file__).parents[2]
FILES = ("cluster.yaml", "deploy/gcp.yaml", "deploy/onprem.yaml")
IN_THE_CLOUD = FILES[:2]
SCHEMA = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return config


@pytest.mark.parametrize("name", FILES)
def test_ray_takes_the_file_and_adds_nothing_that_is_missing(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    jsonschema.validate(config_of(name), SCHEMA)
    prepared = prepare_config(config_of(name))
    validate_config(prepared)
    for each in config_of(name).get("available_node_types", {}):
        assert each in prepared["available_node_types"]
    broken = config_of(name) | {"idle_timeout": 3}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


@pytest.mark.parametrize("name", IN_THE_CLOUD)
def test_machines_come_when_needed_and_end_when_idle(name: str) -> None:
    config = config_of(name)
    types = config["available_node_types"]
    assert types.keys() == {"head", "cpu", "gpu"}
    assert types["head"]["resources"] == {"CPU": 0}
    assert config["head_node_type"] == "head"
    assert 0 < config["idle_timeout_minutes"] <= 10
    assert config["provider"]["cache_stopped_nodes"] is False
    for workers in (types["cpu"], types["gpu"]):
        assert workers["min_workers"] == 0 < workers["max_workers"] <= config["max_workers"]
    node = types["gpu"]["node_config"]
    assert "spot" in str(node.get("InstanceMarketOptions", node.get("scheduling"))).lower()


@pytest.mark.parametrize("name", IN_THE_CLOUD)
def test_the_image_has_the_ray_that_is_pinned(name: str) -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = next(line for line in constraints if line.startswith("ray=="))
    assert config_of(name)["docker"]["image"].split(":")[1].startswith(f"{pinned[5:]}-")


@pytest.mark.parametrize("name", FILES)
def test_every_node_installs_what_is_pinned(name: str) -> None:
    commands = [line for key, lines in config_of(name).items() if key.endswith("_commands")
                for line in lines if "pip install" in line]  # fmt: skip
    assert any("raybert" in command for command in commands)
    for command in commands:
        assert re.search(r" --constraint \S+/raybert/constraints\.txt ", command), command


@pytest.mark.parametrize("name", FILES)
def test_ray_asks_for_the_token_and_its_dashboard_is_closed(name: str) -> None:
    config = config_of(name)
    starts = [
        command
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
        for command in config[key]
        if "ray start" in command
    ]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]
    assert "--block" in shlex.split(starts[1])
    mounted = {key.replace("/home/ray", "~") for key in config["file_mounts"]}
    assert "~/.ray/auth_token" in mounted


@pytest.mark.parametrize("name", FILES)
def test_every_command_is_one_that_a_shell_can_read(name: str) -> None:
    for key, commands in config_of(name).items():
        if key.endswith("_commands"):
            for command in commands:
                done = subprocess.run(["bash", "-n"], input=command, text=True, capture_output=True)
                assert done.returncode == 0, done.stderr


@pytest.mark.guard
@pytest.mark.parametrize("name", IN_THE_CLOUD)
def test_a_machine_that_is_shut_down_lets_ray_drain_its_node(name: str, tmp_path: Path) -> None:
    """The unit that is written, and that what it runs waits for the process it ends."""
    config = config_of(name)
    written, *_ = config["initialization_commands"]
    unit = tmp_path / "raybert-drain.service"
    command = written.replace(
        "| sudo tee /etc/systemd/system/raybert-drain.service", f"> {unit}; :"
    )
    subprocess.run(["bash", "-c", command], check=True, stdout=subprocess.DEVNULL)
    lines = dict(
        line.split("=", 1) for line in unit.read_text().splitlines() if not line.startswith("[")
    )
    drain = re.search(r"DRAIN_TIMEOUT_S=(\d+)", " ".join(config["worker_start_ray_commands"]))
    assert drain is not None
    assert int(drain[1]) < int(lines["TimeoutStopSec"]) < 120  # AWS gives two minutes
    docker, _, ran = lines["ExecStop"].partition(" bash -c ")
    assert docker == f"-/usr/bin/docker exec {config['docker']['container_name']}"
    pid = tmp_path / "pid"
    inside = shlex.split(ran)[0].replace("$$", "$").replace("/tmp/ray-start.pid", str(pid))
    # As `ray start`, which ends a while after SIGTERM.
    slow = (
        "trap 'sleep 1; echo drained > done; exit' TERM; echo $$ > pid; while :; do sleep 0.1; done"
    )
    process = subprocess.Popen(["bash", "-c", slow], cwd=tmp_path)
    try:
        while not pid.exists() or not pid.read_text():
            assert process.poll() is None
        threading.Thread(target=process.wait).start()  # as the container's first process would
        subprocess.run(["bash", "-c", inside], check=True, timeout=30)
        assert (tmp_path / "done").read_text() == "drained\n"
    finally:
        process.kill()
        process.wait()
