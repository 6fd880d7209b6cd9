"""What the tests cost: a limit for a case, and a record of every file to compare the next run with.

A run writes `.durations.json`, and says at its end which files have become more expensive since
`tests/durations.json` was kept. To keep the last run: `python -m tests.durations`.
"""

import json
import os
import statistics
import time
from collections.abc import Container, Generator
from pathlib import Path
from typing import TypedDict

import pytest

LAST = Path(__file__).parents[1] / ".durations.json"
KEPT = Path(__file__).with_name("durations.json")

LIMIT_S = 3.0
"""Most CPU seconds of a case, on a machine that counts as fast as that of the record."""
RAY_LIMIT_S = 10.0
"""The same with Ray: the commands that a case starts count, the cluster's processes do not."""
ON_THE_CLOCK = 10
"""Times as many seconds on the clock: it may wait for others that compute, but not just wait."""
NOISE = 2.0
"""Times as much fails: the same case takes up to 1.6 times as long beside other processes."""
COUNTING_S = 0.03
"""What `slowness` takes there."""
WITHOUT_LIMIT = ("guard", "drill", "matrix", "cluster", "gpu", "fake_cuda")

# A file is named if it takes this many times as long as before, and this many seconds more.
MORE, MORE_S = 1.5, 2.0


class Cost(TypedDict):
    """What the cases of a place took together, their fixtures included."""

    cases: int
    seconds: float
    cpu_s: float
    """Of the process of the tests and of those that it has waited for; Ray's are neither."""


class Durations:
    """A plugin: in the processes that run tests it measures them, in the first one it sums up."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = {}
        self._cpu_s = _cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = _cpu_s()
        spent_s, self._cpu_s = now_s - self._cpu_s, now_s
        report.cpu_s = spent_s  # type: ignore[attr-defined]  # goes to the first process with it
        if report.when == "call" and report.passed:
            markers = {marker.name for marker in item.iter_markers()}
            complaint = too_expensive(spent_s, report.duration, markers)
            if complaint:
                report.outcome, report.longrepr = "failed", complaint
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        place = place_of(report.nodeid, report.keywords)
        cost = self.costs.setdefault(place, {"cases": 0, "seconds": 0.0, "cpu_s": 0.0})
        cost["cases"] += report.when == "setup"  # also of what is skipped
        cost["seconds"] += report.duration
        cost["cpu_s"] += getattr(report, "cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Only the first process has a terminal."""
        LAST.write_text(as_json(self.costs))
        if lines := more_expensive(self.costs, kept()):
            terminalreporter.section("files that cost more than before")
            terminalreporter.write_line("\n".join(lines))


def place_of(nodeid: str, markers: Container[str]) -> str:
    """Where a case is counted: its file, whose long tests are apart, since they run apart."""
    path = nodeid.partition("::")[0]
    kind = next((f" ({name})" for name in ("guard", "drill") if name in markers), "")
    return f"{path}{kind}"


def _cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def slowness() -> float:
    """How many times as long as that of the record this machine takes now, at least once."""
    began_s = time.process_time()
    sum(number * number for number in range(1_000_000))
    return max(1.0, (time.process_time() - began_s) / COUNTING_S)


def too_expensive(cpu_s: float, seconds: float, markers: set[str]) -> str:
    """Why a case may not cost so much, and the way out; empty if it may."""
    if markers.intersection(WITHOUT_LIMIT):
        return ""
    limit_s = RAY_LIMIT_S if "ray" in markers else LIMIT_S
    if cpu_s <= limit_s and seconds <= ON_THE_CLOCK * limit_s:
        return ""
    most_s = NOISE * slowness() * limit_s
    if cpu_s <= most_s and seconds <= ON_THE_CLOCK * most_s:
        return ""
    return (
        f"this case takes {cpu_s:.1f} s of CPU and {seconds:.1f} s on the clock; wanted at most "
        f"{limit_s:.0f} and {ON_THE_CLOCK * limit_s:.0f}, since everyone waits for it at every "
        "change. Test the same with a smaller model, fewer rows or without a process of its own, "
        "share what it starts in a fixture, or mark it: guard, if it guards data or safety at "
        "every landing, else drill"
    )


def more_expensive(costs: dict[str, Cost], before: dict[str, Cost]) -> list[str]:
    """A line for every file that takes more CPU than the same cases did, the worst first.

    Machines differ: all files are compared at the speed at which the middle one would be equal.
    """
    same = [
        (path, cost["cpu_s"], before[path]["cpu_s"])
        for path, cost in costs.items()
        if path in before and before[path]["cases"] == cost["cases"]
    ]
    ratios = [now / then for _, now, then in same if then > 1.0]
    speed = statistics.median(ratios) if len(ratios) > 2 else 1.0
    grown = [
        (now - then * speed, f"{path}: {now:.1f} s of CPU, {then * speed:.1f} before")
        for path, now, then in same
        if now > MORE * then * speed and now > then * speed + MORE_S
    ]
    return [line for _, line in sorted(grown, reverse=True)]


def kept() -> dict[str, Cost]:
    """The record in the repository, by place."""
    record: dict[str, Cost] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return record


def as_json(costs: dict[str, Cost]) -> str:
    """A line per place, so that changes can be read."""
    lines = [
        f"{json.dumps(path)}: {json.dumps({name: round(value, 1) for name, value in cost.items()})}"  # type: ignore[call-overload]
        for path, cost in sorted(costs.items())
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    KEPT.write_text(as_json(kept() | json.loads(LAST.read_text())))
    print(f"{KEPT} has the last run")
