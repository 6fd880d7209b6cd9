"""Where the time of a run went, and what it cost, over kills and new starts."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from bert_core.errors import ConfigError
from bert_core.manifest import read_manifest
from pipelines import pretrain
from pipelines.pretrain import PretrainConfig
from pipelines.runtime.stage_config import determining_fields
from pipelines.training.records import Notice, Report, read_records
from pipelines.training.selection import SelectionConfig
from pipelines.tune import TuneConfig
from tests.processes import start_with_input
from tracking.runs import goodput
from tracking.runs import metric_names as names
from tracking.runs.goodput import Goodput

STEPS = 12
RUN = """
import pickle, sys
from pipelines import pretrain

pretrain.run(pickle.load(sys.stdin.buffer))
"""


def spent_by(folder: Path) -> Goodput:
    spent = goodput.read(str(folder))
    assert spent is not None
    return spent


def assert_same_weights(folder: Path, other: Path) -> None:
    ours, theirs = (load_file(each / "bundle" / "model.safetensors") for each in (folder, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs[name], err_msg=name)


def assert_adds_up(spent: Goodput, began_s: float, ended_s: float) -> None:
    """Every second between the first start and the end is counted once, whatever happened.

    Not counted is what the stage does before it begins to train, such as opening its MLflow run, so
    that the sum is below the wall time that a test sees. It is never above it.
    """
    assert sum(spent.seconds.values()) == pytest.approx(spent.until_s - spent.began_s, abs=1e-3)
    assert began_s <= spent.began_s <= spent.until_s <= ended_s
    assert all(seconds >= 0 for seconds in spent.seconds.values())


@pytest.mark.trained
def test_a_run_says_where_its_time_went_and_what_it_cost(prepared: Any, tmp_path: Path) -> None:
    import mlflow

    from bert_core.bundle.format import load_bundle

    config = replace(
        prepared.pretrain(tmp_path / "out", steps=STEPS),
        evaluate_every_steps=6,
        usd_per_hour=3600.0,
    )
    began_s = time.time()
    done = pretrain.run(config)
    spent = spent_by(config.local_folder)
    assert_adds_up(spent, began_s, time.time())
    assert (spent.steps, spent.recomputed_steps, spent.progress) == (STEPS, 0, 1.0)
    for activity in ("computing", "measuring", "checkpointing", "starting", "finishing"):
        assert spent.seconds[activity] > 0, activity
    assert "restarting" not in spent.seconds
    # A second of the cluster costs a dollar.
    assert spent.cost_usd == pytest.approx(spent.wall_s, rel=1e-9)

    numbers = spent.numbers()
    assert {name: done.counts[name] for name in numbers} == numbers
    client = mlflow.MlflowClient(config.tracking_uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    [run] = client.search_runs(experiments, f"tags.output = '{config.output}'")
    assert {name: run.data.metrics[name] for name in numbers} == pytest.approx(numbers)
    history = client.get_metric_history(run.info.run_id, names.time_of("computing"))
    values = [point.value for point in history]
    assert len(values) > 2
    assert values == sorted(values), "the sum so far, as the run went on"
    artifacts = {Path(each.path).name for each in client.list_artifacts(run.info.run_id)}
    assert "time.png" in artifacts
    # The bundle has what was known when it was written; nothing else about it has changed.
    bundle = load_bundle(tmp_path / "out" / "bundle")
    assert bundle.spent["time/computing_s"] == numbers["time/computing_s"]
    assert bundle.spent["wall_s"] <= numbers["wall_s"]
    for points in read_records(config.local_folder).values():
        assert not [name for name in points if name.startswith("clock/")]


@pytest.mark.drill
def test_a_driver_that_is_killed_and_started_again_counts_every_step_once(
    prepared: Any, tmp_path: Path
) -> None:
    from bert_core.train.checkpoint import latest_checkpoint

    alone = prepared.pretrain(tmp_path / "alone", steps=32)
    pretrain.run(alone)
    hurt = replace(alone, output=str(tmp_path / "hurt"), report_every_s=0.0, usd_per_hour=7.0)
    folder, began_s, again = Path(hurt.output), time.time(), 0
    for furthest in (6, 16):
        process = started(hurt)
        kill_between_checkpoints(process, folder, furthest)
        killed_s = time.time()
        before = spent_by(folder)
        checkpoint = latest_checkpoint(str(folder / "checkpoints"))
        assert checkpoint is not None
        again += before.last_step - checkpoint.step
        time.sleep(0.5)
    resumed_s = time.time()
    process = started(hurt)
    assert process.wait(timeout=240) == 0
    spent = spent_by(folder)
    assert_adds_up(spent, began_s, time.time())
    assert (spent.steps, spent.recomputed_steps) == (32, again)
    assert again > 0
    assert (spent.seconds["recomputing"] > 0, spent.seconds["restarting"] > 0) == (True, True)
    # No driver ran: twice for half a second at least, and not longer than since it last reported.
    stopped_s = spent.seconds["stopped"]
    assert stopped_s > 2 * 0.5
    assert stopped_s - before.seconds.get("stopped", 0.0) > resumed_s - killed_s
    assert spent.cost_usd == pytest.approx((spent.wall_s - stopped_s) / 3600 * 7.0, rel=1e-9)
    assert_same_weights(folder, tmp_path / "alone")


@pytest.mark.guard
@pytest.mark.usefixtures("local_ray")
def test_a_worker_that_is_killed_on_ray_counts_every_step_once(
    pretrained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = pretrained.pretrain(pretrained.folder / "pretrain")
    monkeypatch.setattr(pretrain, "worker", dying_after(7))
    hurt = replace(alone, output=str(tmp_path / "hurt"), num_workers=1, report_every_s=0.0)
    hurt = replace(hurt, usd_per_node_hour={"default": 2.0, "H100": 99.0})
    began_s = time.time()
    pretrain.run(hurt)
    spent = spent_by(Path(hurt.output))
    assert_adds_up(spent, began_s, time.time())
    assert (spent.steps, spent.recomputed_steps) == (STEPS, 7 - 4), "the checkpoint is of step 4"
    assert (spent.seconds["recomputing"] > 0, spent.seconds["restarting"] > 0) == (True, True)
    assert spent.seconds["stopped"] == 0
    assert spent.cost_usd == pytest.approx(spent.wall_s / 3600 * 2.0, rel=1e-9), "a node"
    assert_same_weights(Path(hurt.output), Path(alone.output))


def dying_after(step: int) -> Callable[..., None]:
    """A worker that kills its process once the record has a step, on the first try."""

    def worker(folder: Any, config: PretrainConfig, digest: str, report: Report) -> None:
        from pipelines import pretrain
        from tracking.runs import goodput

        died = Path(config.output) / "died"

        def report_and_die(records: Any, last: bool) -> Notice:
            notice = report(records, last)
            if records and records[-1][0] == step and not died.exists():
                deadline = time.monotonic() + 60
                while time.monotonic() < deadline:
                    spent = goodput.read(config.output)
                    if spent is not None and spent.last_step == step:
                        died.touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(0.05)
            return notice

        pretrain.worker(folder, config, digest, report_and_die)

    return worker


def started(config: PretrainConfig) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", RUN]
    return start_with_input(command, pickle.dumps(config), stdout=subprocess.DEVNULL)


def kill_between_checkpoints(
    process: "subprocess.Popen[bytes]", folder: Path, furthest: int
) -> None:
    """Kill a run that has done that many steps, some of them since its last checkpoint."""
    from bert_core.train.checkpoint import latest_checkpoint

    deadline = time.monotonic() + 150
    while True:
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline
        process.send_signal(signal.SIGSTOP)
        spent = goodput.read(str(folder))
        checkpoint = latest_checkpoint(str(folder / "checkpoints"))
        if spent and checkpoint and max(furthest, checkpoint.step + 1) <= spent.last_step:
            break
        process.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    process.kill()
    process.wait()


def test_every_seed_of_a_fine_tuning_is_counted(finetuned: Any) -> None:
    config = finetuned.finetune(finetuned.folder / "finetune")
    spent = spent_by(config.local_folder)
    assert_adds_up(spent, 0.0, time.time())
    assert spent.steps == len(config.seeds) * read_manifest(config.output).counts["steps"]
    assert spent.recomputed_steps == 0
    assert spent.seconds["measuring"] > 0
    assert "restarting" not in spent.seconds, "a second seed is no restart"


def test_prices_change_no_digest_and_are_checked(small: Any) -> None:
    config = small.pretrain(Path("x"))
    priced = replace(config, usd_per_node_hour={"default": 0.4, "H100": 3.5})
    assert determining_fields(priced) == determining_fields(config)
    assert priced.prices_usd == {"default": 0.4, "H100": 3.5}
    assert replace(config, usd_per_hour=2.0).prices_usd == {"cluster": 2.0}
    assert config.prices_usd == {}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"usd_per_hour": -1.0}, "usd_per_hour: wanted at least 0, got -1.0"),
        ({"usd_per_node_hour": {"H100": 3.5}}, "wanted a price of `default` too, .* only H100"),
        ({"usd_per_node_hour": {"default": -1.0}}, "usd_per_node_hour.default: wanted at least 0"),
        ({"usd_per_node_hour": {"default": float("nan")}}, "wanted at least 0, got nan"),
    ]
    for change, message in changes:
        with pytest.raises(ConfigError, match=message):
            replace(config, **change)
    with pytest.raises(ConfigError, match="wanted none with usd_per_hour"):
        replace(priced, usd_per_hour=1.0)
    with pytest.raises(
        ConfigError, match="usd_per_node_hour: wanted none for a sweep, whose trials"
    ):
        TuneConfig(output="x", model="m", selection=SelectionConfig(share=0.1), usd_per_hour=1.0)
