"""The host of a run is lost: with the bucket alone, another one ends it as if nothing had happened.

One machine; a host is a process group with a home and a working directory of its own.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

from bert_core import files
from pipelines import pretrain
from pipelines.pretrain import PretrainConfig
from tests import processes
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.drill]

STEPS = 150  # more than are trained while two more drivers start


class Host:
    """A driver on a host of its own."""

    def __init__(self, folder: Path, config: PretrainConfig, *more: str) -> None:
        from tests.pipelines.test_pretrain import command

        folder.mkdir()
        self.cache = folder / ".cache" / "raybert"
        self._says = folder / "says.txt"
        arguments = [*command(config), "--checkpoint_every_steps", "10", *more]
        environment = {name: value for name, value in os.environ.items() if name != "RAYBERT_CACHE"}
        self.process = processes.start(
            arguments,
            self._says,
            cwd=folder,
            env=environment | {"HOME": str(folder)},
            start_new_session=True,
        )

    @property
    def says(self) -> str:
        return self._says.read_text()

    def lose(self) -> None:
        """End all of its processes."""
        processes.kill_tree(self.process)

    def wait_until(self, what: str, done: Callable[[], Any]) -> None:
        wait_until(what, done, timeout_s=240, process=self.process, log=self._says)


Start = Callable[..., Host]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a driver on a new host; what a failed test leaves of it is killed."""
    hosts: list[Host] = []

    def start(config: PretrainConfig, *more: str) -> Host:
        hosts.append(Host(tmp_path / f"host-{len(hosts)}", config, *more))
        return hosts[-1]

    yield start
    for host in hosts:
        host.lose()


def record(output: str) -> dict[int, dict[str, float]]:
    """The points in the bucket."""
    path = f"{output}/record/metrics.jsonl"
    lines = files.read_bytes(path).splitlines() if files.exists(path) else []
    return {line["step"]: line["metrics"] for line in map(json.loads, lines)}


@pytest.mark.timeout(1200)
def test_a_lost_host_is_replaced_by_a_waiting_one(
    prepared: Any,
    tmp_path: Path,
    object_store: str,
    server: Any,
    start: Start,
    recovered: Callable[[str, float, float], None],
) -> None:
    """And one that does not wait is told who writes the output. In the end there are the same bits
    as in a run left alone, and one MLflow run with every step once, although the second host trains
    on Ray, whose controller keeps the record in the bucket."""
    alone = prepared.pretrain(tmp_path / "alone", steps=STEPS)
    server.start()
    output = f"{object_store}/out"
    config = replace(alone, output=output, tracking_uri=server.uri)
    first = start(config)
    first.wait_until("it has its lease", lambda: files.exists(f"{output}/lease.json"))
    second, third = start(config), start(config, "--wait", "--num_workers=1")
    assert second.process.wait(timeout=120) == 1
    assert f"(process {first.process.pid}) has been writing it since" in second.says
    assert "add --wait to go on when that run has ended" in second.says
    third.wait_until("it waits", lambda: "waiting until that run has ended" in third.says)
    first.wait_until("its curve is in the bucket", lambda: len(record(output)) > 20)
    assert first.process.poll() is None
    first.lose()
    lost_s, had = time.monotonic(), len(record(output))
    assert not files.exists(f"{output}/manifest.json")
    pretrain.run(replace(alone, checkpoint_every_steps=STEPS))  # while the third one waits
    third.wait_until("it trains", lambda: len(record(output)) > had)
    recovered("a host is lost while another waits for its output", lost_s, 120)

    assert third.process.wait(timeout=400) == 0, third.says
    assert "resuming the earlier run of" in third.says
    assert files.read_json(f"{output}/lease.json")["number"] == 2
    check_that_nothing_happened(config, alone)
    assert list(third.cache.glob("runs/*/metrics.jsonl"))
    assert not list(third.cache.glob("runs/**/*.safetensors")), "the bundle is in the bucket"


def check_that_nothing_happened(config: PretrainConfig, alone: PretrainConfig) -> None:
    """The run has what one has that was left alone."""
    from tests.pipelines.test_pretrain import assert_equal_bits, losses, run_of, weights

    bundle = load(files.read_bytes(f"{config.output}/bundle/model.safetensors"))
    assert_equal_bits(bundle, weights(Path(alone.output)))
    curve = [each["loss"] for each in record(config.output).values() if "loss" in each]
    assert curve == losses(Path(alone.output))
    run, client = run_of(config)
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [point.step for point in history] == list(range(1, STEPS + 1)), "each once, in order"
    assert [point.value for point in history] == curve
    assert files.read_json(f"{config.output}/record/mlflow_run.json")["run_id"] == run.info.run_id
