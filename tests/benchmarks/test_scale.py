"""The model of time and cost: what must hold for any input, and how far it is from what was
measured."""

import json
import math
import subprocess
import sys
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.scaling.checks import MLPERF_FITTED, MLPERF_POINTS, checks
from benchmarks.scaling.dials import batches, intervals
from benchmarks.scaling.failures import Failures, best_interval_s, simulated_goodput
from benchmarks.scaling.inputs import Values, drawn, inputs
from benchmarks.scaling.training import (
    GPU_COUNTS,
    MEASURED,
    RECIPES,
    checkpoint_bytes,
    estimate,
    failures_of,
    flops_of,
    ideal_s,
    step_of,
    training_s,
    weights,
)
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import ObjectiveModel
from bert_core.objectives.catalog import PRETRAINING
from bert_core.train.checkpoint import CheckpointWriter
from bert_core.train.config import OptimizerConfig
from bert_core.train.optim import build_optimizer

ROOT = Path(__file__).parents[2]
DRAWS = [Values(), *(drawn(np.random.default_rng(seed)) for seed in range(5))]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("values", DRAWS, ids=range(len(DRAWS)))
def test_more_gpus_are_never_cheaper_per_token_and_never_below_the_ideal(
    name: str, values: Values
) -> None:
    recipe = RECIPES[name]
    gpu_s = [gpus * training_s(recipe, gpus, values) for gpus in GPU_COUNTS]
    ideal = ideal_s(recipe, 1, values)
    assert all(spent >= ideal for spent in gpu_s)
    assert all(more >= fewer * (1 - 1e-12) for fewer, more in pairwise(gpu_s))


@pytest.mark.parametrize("values", DRAWS, ids=range(len(DRAWS)))
def test_the_step_that_was_measured_has_the_measured_mfu(values: Values) -> None:
    whole = replace(values, fill=1.0)
    took_s = training_s(MEASURED, 1, whole)
    assert flops_of(MEASURED, 1.0) / took_s / whole.peak_flops == pytest.approx(whole.mfu)


def test_a_batch_with_fewer_rows_than_gpus_is_refused() -> None:
    phase = RECIPES["bert-base"].phases[0]
    assert step_of("bert-base", phase, phase.rows, Values()) is not None
    assert step_of("bert-base", phase, phase.rows + 1, Values()) is None
    assert math.isinf(training_s(RECIPES["bert-base"], 512, Values()))
    assert estimate("bert-base", 512) is None


@pytest.mark.parametrize("name", ["bert-base", "bert-large"])
def test_recipes_are_those_that_are_shipped(name: str) -> None:
    file = {"bert-base": "bert_base", "bert-large": "bert_large_lamb"}[name]
    config = tomllib.loads((ROOT / f"configs/pretrain/{file}.toml").read_text())
    then = config["then"]
    first, second = RECIPES[name].phases
    assert config["variant"] == RECIPES[name].variant
    assert first.steps + second.steps == config["loop"]["max_steps"]
    assert second.steps == then["steps"]
    assert first.rows == config["global_batch_size"]
    assert second.rows == then.get("global_batch_size", first.rows)
    lengths = {"128": first.length, "512": second.length}
    for length, expected in lengths.items():
        prepared = tomllib.loads((ROOT / f"configs/prepare/wikipedia_{length}.toml").read_text())
        assert prepared["pairs"]["max_length"] == expected


@pytest.mark.parametrize(
    "failures",
    [
        Failures(mean_s=3_600, interval_s=300, pause_s=1, upload_s=10, restart_s=60),
        Failures(mean_s=600, interval_s=120, pause_s=5, upload_s=30, restart_s=185),
        Failures(mean_s=28_400, interval_s=300, pause_s=2, upload_s=5, restart_s=185),
        failures_of("bert-large", 1_024, Values(), spot=True),
    ],
    ids=["often", "very often", "1,024 GPUs", "1,024 on spot"],
)
def test_the_simulated_goodput_is_that_of_the_formula(failures: Failures) -> None:
    simulated, standard_error = simulated_goodput(failures, np.random.default_rng(7))
    assert standard_error < 0.01 * failures.goodput
    assert abs(simulated - failures.goodput) < 3 * standard_error


@pytest.mark.parametrize("mean_s", [1e4, 1e5, 1e6])
def test_to_first_order_goodput_is_the_closed_formula(mean_s: float) -> None:
    failures = Failures(mean_s=mean_s, interval_s=300, pause_s=2, upload_s=5, restart_s=185)
    delay_s = failures.interval_s + failures.restart_s + failures.upload_s
    paused = failures.pause_s / failures.interval_s
    second_order = (delay_s / mean_s) ** 2 + paused**2 + failures.pause_s / mean_s
    assert abs(failures.goodput - failures.first_order) < second_order


def test_no_interval_between_checkpoints_loses_less_than_the_best() -> None:
    def goodput(interval_s: float) -> float:
        return Failures(
            mean_s=50_000, interval_s=interval_s, pause_s=2, upload_s=0, restart_s=100
        ).goodput

    best = best_interval_s(50_000, 2)
    assert all(goodput(best) > goodput(best * factor) for factor in (0.5, 0.8, 1.25, 2))


def test_a_larger_batch_keeps_at_least_as_many_gpus_busy() -> None:
    found = batches()
    for variant in {each.variant for each in found}:
        most = [each.gpus_at_80 for each in found if each.variant == variant]
        assert most == sorted(most)
        assert most[-1] > most[0]
    assert all(each.gpus_at_80 <= each.gpus_at_50 for each in found)
    assert all(each.gpus_at_80_slow_network <= each.gpus_at_80 for each in found)


def test_no_fixed_interval_of_checkpoints_beats_the_best_by_much() -> None:
    for each in intervals():
        assert max(each.fixed.values()) < each.best + 0.01


def test_points_of_mlperf_are_reproduced_within_what_the_document_says() -> None:
    errors = {check.name: abs(check.error) for check in checks() if "MLPerf" in check.name}
    assert len(errors) == len(MLPERF_POINTS)
    for gpus in MLPERF_POINTS:
        most = 0.01 if gpus in MLPERF_FITTED else 0.20
        assert errors[f"MLPerf BERT-large, {gpus:,} H100"] < most


def test_published_measurements_are_reproduced_within_the_documented_error() -> None:
    others = [check for check in checks() if "MLPerf" not in check.name]
    assert len(others) >= 5
    assert {check.name: check.error for check in others if abs(check.error) > 0.20} == {}


@pytest.mark.drill
@pytest.mark.parametrize("variant", ["bert-tiny", "bert-mini"])
def test_a_checkpoint_has_the_modelled_size(variant: str, tmp_path: Path) -> None:
    config = VARIANTS[variant].config
    model = ObjectiveModel(config, [PRETRAINING[name](config) for name in ("mlm", "nsp")])
    assert sum(each.numel() for each in model.parameters()) == weights(variant)
    optimizer = build_optimizer(model, OptimizerConfig())
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    with CheckpointWriter(str(tmp_path), run_digest="") as writer:
        writer.save(1, model, optimizer)
        writer.wait()
    written = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert written == pytest.approx(checkpoint_bytes(variant), rel=0.01)


def test_every_input_has_an_interval_around_the_likely_value_and_a_source() -> None:
    for name, one in inputs().items():
        assert one.low <= one.likely <= one.high, name
        assert one.unit, name
        assert len(one.source) > 5, name
    values = drawn(np.random.default_rng(0))
    for name, one in inputs().items():
        assert one.low <= getattr(values, name) <= one.high, name


@pytest.mark.drill
def test_the_command_writes_all_of_it(tmp_path: Path) -> None:
    written = tmp_path / "scale.json"
    command = [sys.executable, "-m", "benchmarks.scale"]
    done = subprocess.run(
        [*command, "--json", str(written)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(written.read_text())
    assert {each["recipe"] for each in document["training"]} == RECIPES.keys()
    assert document["inputs"].keys() == inputs().keys()
    assert all(each["hours"]["low"] <= each["hours"]["high"] for each in document["training"])
