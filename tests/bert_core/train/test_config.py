"""Settings of a training run: what they mean step by step, and which are refused."""

import re
from dataclasses import replace
from typing import get_args

import pytest

from bert_core.errors import ConfigError
from bert_core.train.config import LoopConfig, OptimizerConfig, ScheduleConfig
from bert_core.train.schedule import DECAYS, Decay


def factors(schedule: ScheduleConfig, max_steps: int) -> list[float]:
    return [schedule.factor(step, max_steps) for step in range(max_steps)]


def test_the_learning_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    schedule = ScheduleConfig(warmup_steps=4)
    assert factors(schedule, 8) == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert schedule.factor(8, 8) == 0.0
    assert schedule.factor(100, 8) == 0.0


def test_the_learning_rate_falls_in_a_share_of_the_steps_alone() -> None:
    schedule = ScheduleConfig(warmup_steps=2, decay_share=0.5)
    assert factors(schedule, 10) == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    cosine = replace(schedule, decay="cosine")
    assert factors(cosine, 10)[:7] == [0.5, 1, 1, 1, 1, 1, 1]
    assert 0 < cosine.factor(9, 10) < cosine.factor(8, 10) < 1


def test_a_constant_learning_rate_stays_at_its_peak() -> None:
    assert factors(ScheduleConfig(warmup_steps=2, decay="constant"), 5) == [0.5, 1, 1, 1, 1]


def test_there_may_be_no_warmup_and_nothing_but_warmup() -> None:
    assert factors(ScheduleConfig(warmup_steps=0), 4) == [1.0, 0.75, 0.5, 0.25]
    assert factors(ScheduleConfig(warmup_steps=10), 3) == [0.1, 0.2, 0.3]
    assert factors(ScheduleConfig(warmup_steps=3), 3) == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_a_cosine_schedule_falls_slowly_then_fast_then_slowly_to_zero() -> None:
    schedule = ScheduleConfig(warmup_steps=2, decay="cosine")
    found = factors(schedule, 6)
    assert found == pytest.approx([0.5, 1, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])
    assert schedule.factor(6, 6) == 0.0


def test_a_rate_that_falls_by_1_minus_sqrt_stays_then_falls_steeply_first() -> None:
    schedule = ScheduleConfig(warmup_steps=2, decay="1-sqrt", decay_share=0.5)
    wanted = [1 - (part / 4) ** 0.5 for part in range(4)]
    assert factors(schedule, 10) == pytest.approx([0.5, 1, 1, 1, 1, 1, *wanted])


@pytest.mark.parametrize("decay", get_args(Decay))
@pytest.mark.parametrize("warmup_steps", [0, 1, 7, 50])
def test_no_step_trains_at_zero_or_above_the_peak(decay: Decay, warmup_steps: int) -> None:
    assert DECAYS[decay](1.0) == 1.0
    schedule = ScheduleConfig(warmup_steps=warmup_steps, decay=decay)
    assert all(0 < factor <= 1 for factor in factors(schedule, 50))
    # A run of hours has places between its steps.
    assert all(0 < schedule.factor(tenth / 10, 50) <= 1 for tenth in range(500))


def test_defaults_are_those_of_the_paper() -> None:
    optimizer = OptimizerConfig()  # Devlin et al. 2019, appendix A.2
    assert (optimizer.lr, optimizer.weight_decay) == (1e-4, 0.01)
    assert (optimizer.beta1, optimizer.beta2) == (0.9, 0.999)
    assert ScheduleConfig().warmup(LoopConfig().max_steps) == 10_000  # of 1,000,000 steps
    assert ScheduleConfig().decay == "linear"


@pytest.mark.parametrize(("steps", "warmup"), [(10, 0), (200, 2), (10_000, 100)])
def test_by_default_a_hundredth_of_the_steps_warms_up(steps: int, warmup: int) -> None:
    whole = factors(ScheduleConfig(), steps)
    assert whole == factors(ScheduleConfig(warmup_steps=warmup), steps)
    assert whole.index(max(whole)) == max(0, warmup - 1)
    assert whole[-1] < 0.15, "it has fallen again by the end"


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (OptimizerConfig, {"lr": 0.0}, "optimizer.lr: wanted above 0, got 0.0"),
        (OptimizerConfig, {"lr": float("nan")}, "optimizer.lr: wanted above 0, got nan"),
        (OptimizerConfig, {"eps": -1e-6}, "optimizer.eps: wanted above 0, got -1e-06"),
        (OptimizerConfig, {"weight_decay": -1.0}, "optimizer.weight_decay: wanted at least 0"),
        (OptimizerConfig, {"max_grad_norm": -1.0}, "optimizer.max_grad_norm: wanted at least 0"),
        (OptimizerConfig, {"beta1": 1.0}, "optimizer.beta1: wanted at least 0 and below 1"),
        (OptimizerConfig, {"beta2": -0.1}, "optimizer.beta2: wanted at least 0 and below 1, got"),
        (ScheduleConfig, {"decay_share": 0.0}, "schedule.decay_share: wanted above 0"),
        (ScheduleConfig, {"warmup_steps": -1}, "schedule.warmup_steps: wanted at least 0, got -1"),
        (LoopConfig, {"max_steps": 0}, "max_steps: wanted at least 1, got 0"),
        (
            LoopConfig,
            {"max_steps": 1, "max_hours": float("inf")},
            "max_hours: wanted above 0 and finite, got inf",
        ),
    ],
)
def test_settings_out_of_range_are_refused(config: type, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config(**settings)


@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        (
            ScheduleConfig(),
            "decay",
            "schedule.decay: wanted one of linear, cosine, 1-sqrt, constant, got 'x'",
        ),
        (
            OptimizerConfig(),
            "name",
            "optimizer.name: wanted one of adamw, stable_adamw, lamb, muon, got 'x'",
        ),
        (LoopConfig(max_steps=1), "precision", "precision: wanted one of fp32, bf16, got 'x'"),
    ],
)
def test_an_unknown_command_is_refused_with_the_known_ones(
    config: ScheduleConfig | OptimizerConfig | LoopConfig, name: str, message: str
) -> None:
    object.__setattr__(config, name, "x")  # past the types, which are checked here
    with pytest.raises(ConfigError, match=message):
        config.__post_init__()
