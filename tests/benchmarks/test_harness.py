"""Ratios are taken round by round, and what was measured where goes along."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import Planned, compare


def test_the_ratio_is_the_median_of_rounds_measured_in_turn() -> None:
    calls: list[str] = []
    ours, peer = iter([1.0, 10.0, 40.0, 20.0]), iter([1.0, 5.0, 10.0, 20.0])

    def measure(name: str, rates: Iterator[float]) -> float:
        calls.append(name)
        return next(rates)

    found = compare(
        "one_vs_other",
        lambda: measure("ours", ours),
        lambda: measure("peer", peer),
        unit="rows/s",
        rounds=3,
        length=128,
    ).make()
    # The first of each warms up; then whoever was second is first.
    assert calls == ["ours", "peer", "ours", "peer", "peer", "ours", "ours", "peer"]
    assert (found.ours, found.peer, found.ratio) == (20.0, 10.0, 2.0)
    assert found.settings["length"] == 128
    assert found.settings["ratios"] == [2.0, 4.0, 1.0]


def test_results_are_a_list_that_says_what_they_were_measured_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def benchmark(rounds: int, quick: bool) -> Iterator[Planned]:
        yield compare("not_asked_for", pytest.fail, pytest.fail, unit="rows/s", rounds=rounds)
        yield compare(f"quick_{quick}", lambda: 6.0, lambda: 2.0, unit="rows/s", rounds=rounds)

    path = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["x", "--quick", "--only", "quick_True", "--json", str(path)])
    harness.main(benchmark, "x")
    (found,) = json.loads(path.read_text())
    assert {"name", "ours", "peer", "unit", "ratio", "settings"} <= found.keys()
    assert (found["name"], found["ratio"]) == ("quick_True", 3.0)
    assert found["made"]["machine"] == harness.machine()
    assert "numpy" in found["made"]["versions"]
    assert "quick_True" in capsys.readouterr().out
