"""Curves are read from a record as they are drawn: seeds over each other, nothing twice."""

import numpy as np
import pytest

from tracking.runs.curves import curves_of, smoothed, steps_done


def test_seeds_have_the_same_steps_and_a_mean() -> None:
    steps = 3
    records = [
        (seed * (steps + 2) + step, {"train/loss": float(seed + step)})
        for seed in (0, 2, 4)
        for step in range(1, steps + 1)
    ]
    [curve] = curves_of([*records, (99, {"train/loss": 7.0})], steps_per_seed=steps)
    assert [seed[:, 0].tolist() for seed in curve.seeds] == [[1, 2, 3]] * 3
    assert curve.mean.tolist() == [[1, 3], [2, 4], [3, 5]]
    assert curve.is_of_training


@pytest.mark.parametrize(
    ("record", "done"), [(0, 0), (75, 75), (76, 75), (77, 75), (152, 150), (230, 225)]
)
def test_steps_done_do_not_count_the_records_beside_them(record: int, done: int) -> None:
    """Three seeds of 75 steps, each with two records beside them."""
    assert steps_done(record, 75) == done


def test_the_mean_is_over_the_steps_that_all_seeds_have() -> None:
    losses = [(1, 4.0), (2, 2.0), (3, 1.0), (6, 2.0), (7, 1.0)]
    [curve] = curves_of([(step, {"loss": loss}) for step, loss in losses], steps_per_seed=3)
    assert [len(seed) for seed in curve.seeds] == [3, 2]
    assert curve.mean.tolist() == [[1, 3], [2, 1.5]]


def test_identical_curves_are_drawn_once() -> None:
    records = [
        (step, {"loss": 1.0 / (step + 1), "train/loss": 1.0 / (step + 1), "train/mlm_loss": 0.5,
                "held_out/mlm_loss": 0.4, "system/of_loss": 1.0, "other": 2.0})
        for step in range(4)
    ]  # fmt: skip
    records.append((9, {"loss_after": 0.1, "train/nsp_loss": float("nan")}))
    names = [curve.name for curve in curves_of(records)]
    assert names == ["train/loss", "held_out/mlm_loss", "train/mlm_loss"]


def test_a_loss_with_one_part_is_drawn_once() -> None:
    records = [(step, {"train/a_loss": 1.0 * step, "train/loss": 1.0 * step}) for step in range(3)]
    assert [curve.name for curve in curves_of(records)] == ["train/a_loss"]


def test_a_running_mean_starts_where_training_did() -> None:
    points = np.stack([np.arange(200.0), np.arange(200.0)], axis=1)
    mean = smoothed(points)
    assert mean[0].tolist() == [0, 0]
    assert mean[-1] == pytest.approx([199, 197])  # over 5
