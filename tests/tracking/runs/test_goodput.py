"""Where a run's time went: sums over kills, lost steps and machines, exactly."""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bert_core import files
from bert_core.errors import FormatError
from tracking.runs import metric_names as names
from tracking.runs.goodput import (
    CLUSTER,
    DEFAULT,
    FILE,
    Goodput,
    begin,
    clock_metrics,
    duration,
    in_words,
    read,
)

Points = list[tuple[int, dict[str, float]]]


class Worker:
    """A worker that reports a point a step, on a clock that the test moves."""

    def __init__(self, began_s: float) -> None:
        self.began_s, self.number = began_s, 0

    def point(self, step: int, steps: int = 1, **seconds: float) -> tuple[int, dict[str, float]]:
        self.number += 1
        clock = clock_metrics(self.began_s, self.number, steps, seconds)
        return step, ({"loss": 1.0} if steps else {}) | clock


def test_the_times_of_an_undisturbed_run_add_up(tmp_path: Path) -> None:
    spent = begin(tmp_path, 1000.0, prices_usd={}, most_steps=4)
    worker = Worker(1010.0)
    first = spent.take([worker.point(1, starting=5.0, computing=3.0, waiting_for_data=1.0)])
    assert first == [(1, {"loss": 1.0, **spent.numbers()})]
    assert spent.left_s == pytest.approx(3 * 4.0)
    points = [
        worker.point(2, computing=2.0),
        worker.point(4, 2, computing=4.0, checkpointing=0.5, measuring=6.0),
        worker.point(4, 0, checkpointing=1.5),
    ]
    plain = spent.take(points)
    assert [step for step, _ in plain] == [2, 4], "what tells only about time is no point"
    assert plain[0][1] == {"loss": 1.0}
    spent.finish(1040.0)
    assert {k: s for k, s in spent.seconds.items() if s} == {
        "starting": 15.0,
        "computing": 9.0,
        "waiting_for_data": 1.0,
        "checkpointing": 2.0,
        "measuring": 6.0,
        "finishing": 7.0,
    }
    assert spent.wall_s == spent.until_s - spent.began_s == 40.0
    assert (spent.steps, spent.recomputed_steps, spent.progress) == (4, 0, 1.0)
    assert spent.goodput == 9 / 40
    assert spent.cost_usd is None
    assert names.COST_USD not in spent.numbers()
    assert in_words(spent) == "goodput 22%: 9 s of 40 s went into steps that were kept"
    assert not spent.is_worth_telling
    assert replace(spent, recomputed_steps=1).is_worth_telling
    assert replace(spent, seconds={"computing": 1800.0}).is_worth_telling
    assert replace(spent, prices_usd={"default": 1.0}).is_worth_telling


def test_steps_that_were_lost_are_counted_when_they_are_done_again(tmp_path: Path) -> None:
    """The first worker is lost after step 7, whose checkpoint is that of step 4."""
    spent = begin(tmp_path, 0.0, prices_usd={CLUSTER: 36.0})
    spent.nodes = {CLUSTER: 1}
    first = Worker(0.0)
    before: Points = [first.point(step, computing=1.0) for step in range(1, 8)]
    spent.take(before)
    # Another takes its place after 3 s, and reports what the checkpoint had of the first.
    second = Worker(10.0)
    again: Points = [second.point(step, computing=1.5) for step in range(5, 7)]
    spent.take([*before[:4], *again])
    assert (spent.steps, spent.recomputed_steps) == (7, 2)
    # A point of several steps of which one was done before.
    spent.take([second.point(9, 3, computing=6.0, starting=0.5)])
    assert (spent.steps, spent.recomputed_steps, spent.last_step) == (9, 3, 9)
    assert spent.seconds["restarting"] == 3.5
    assert spent.seconds["recomputing"] == 2 * 1.5 + 2.0
    assert spent.seconds["computing"] == 7 + 4.0
    assert spent.wall_s == spent.until_s == 19.5
    assert spent.cost_usd == pytest.approx(19.5 / 3600 * 36.0, rel=1e-12)


def test_the_time_between_two_drivers_counts_for_no_machine(tmp_path: Path) -> None:
    prices = {CLUSTER: 7.2}
    spent = begin(tmp_path, 0.0, prices_usd=prices)
    spent.nodes = {CLUSTER: 1}
    spent.take([Worker(4.0).point(1, computing=6.0)])
    spent.save(tmp_path)
    # The driver is killed, and started again after an hour.
    spent = begin(tmp_path, 3610.0, prices_usd=prices)
    spent.nodes = {CLUSTER: 1}
    spent.take([Worker(3615.0).point(2, computing=10.0)])
    spent.finish(3630.0)
    assert spent.seconds["stopped"] == 3600.0
    assert spent.seconds["restarting"] == 5.0
    assert spent.wall_s == 3630.0
    assert spent.cost_usd == pytest.approx(30 / 3600 * 7.2, rel=1e-12)
    assert (
        in_words(spent)
    ) == "goodput 0%: 16 s of 60 min went into steps that were kept; it cost 0.06 USD"


def test_nodes_are_paid_for_while_they_are_there(tmp_path: Path) -> None:
    spent = begin(tmp_path, 0.0, prices_usd={DEFAULT: 1.0, "H100": 4.0})
    worker = Worker(0.0)
    spent.nodes = {DEFAULT: 1, "H100": 2}
    spent.take([worker.point(1, computing=1800.0)])
    spent.nodes = {DEFAULT: 1, "H100": 1}
    spent.take([worker.point(2, computing=900.0)])
    assert spent.node_seconds == {DEFAULT: 2700.0, "H100": 4500.0}
    assert spent.cost_usd == pytest.approx(0.75 * 1.0 + 1.25 * 4.0, rel=1e-12)


def test_a_run_whose_record_was_lost_counts_what_its_checkpoint_has(tmp_path: Path) -> None:
    earlier, later = Worker(100.0), Worker(300.0)
    points: Points = [earlier.point(step, computing=10.0) for step in range(1, 4)]
    spent = begin(tmp_path / "another host", 290.0, prices_usd={})
    spent.take([*points, later.point(4, computing=10.0)])
    assert (spent.began_s, spent.until_s, spent.steps) == (100.0, 310.0, 4)
    assert spent.seconds["restarting"] == 170.0
    assert spent.wall_s == 210.0


def test_clocks_that_differ_make_no_time_negative(tmp_path: Path) -> None:
    spent = begin(tmp_path, 1000.0, prices_usd={})
    spent.take([Worker(1001.0).point(1, computing=5.0)])
    spent.take([Worker(1003.0).point(2, computing=5.0)])  # on a host that is 4 s behind
    spent.finish(1010.0)
    assert all(seconds >= 0 for seconds in spent.seconds.values())
    assert spent.wall_s == spent.until_s - spent.began_s == 11.0


def test_progress_by_the_clock(tmp_path: Path) -> None:
    spent = begin(tmp_path, 0.0, prices_usd={}, most_s=100.0)
    assert (spent.progress, spent.left_s) == (0.0, 100.0)
    spent.take([Worker(50.0).point(9, computing=30.0, waiting_for_data=10.0)])
    assert spent.progress == pytest.approx(0.4)
    assert spent.left_s == pytest.approx(60.0)
    unknown = begin(tmp_path, 0.0, prices_usd={})
    assert (unknown.progress, unknown.left_s) == (None, None)


def test_a_saved_record_is_read_back_and_damage_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(str(tmp_path)) is None
    spent = begin(tmp_path, 5.0, prices_usd={DEFAULT: 0.5}, most_steps=9)
    spent.nodes = {DEFAULT: 3}
    spent.take([Worker(5.25).point(2, 2, computing=0.1)])
    spent.save(tmp_path)
    assert read(tmp_path.as_uri()) == spent
    newer = asdict(spent) | {"format_version": 2}
    for content, message in (
        (b"{", "wanted the JSON that raybert writes there"),
        (b'{"format_version": 1, "else": 2}', "wanted the JSON that raybert writes there"),
        (str(newer).replace("'", '"').replace("None", "null").encode(), "or older, got 2: update"),
    ):
        files.write_bytes(str(tmp_path / FILE), content)
        with pytest.raises(FormatError, match=message):
            read(str(tmp_path))
    assert begin(tmp_path, 7.0, prices_usd={}).began_s == 7.0, "it stops no training"
    assert "the time of earlier starts does not count" in caplog.text


def test_the_metrics_are_the_activities(tmp_path: Path) -> None:
    spent = Goodput(began_s=0.0, until_s=0.0, prices_usd={CLUSTER: 1.0})
    numbers: Mapping[str, float] = spent.numbers()
    assert set(numbers) == {
        *map(names.time_of, names.ACTIVITIES),
        *(names.GOODPUT, names.WALL_S, names.RECOMPUTED_STEPS, names.COST_USD),
    }
    assert all(math.isfinite(number) for number in numbers.values()), "also before the first second"
    assert not [name for name in numbers if any(part in name for _, part in names.CURVES.values())]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.4, "0 s"), (99, "99 s"), (1020, "17 min"), (12240, "3.4 h"), (7.2e6, "2,000.0 h")],
)
def test_durations(seconds: float, told: str) -> None:
    assert duration(seconds) == told
