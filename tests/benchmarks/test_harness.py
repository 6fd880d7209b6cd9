"""Ratios are taken round by round, and what was measured where goes along."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import harness, processes
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


@pytest.mark.drill
def test_a_line_says_what_other_processes_took_and_noisy_rounds_are_repeated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Its shell has ended: nothing here is its parent.
    spin = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    shell = subprocess.run(["sh", "-c", spin], capture_output=True, text=True, check=True)
    calls: list[int] = []

    def measure() -> float:
        calls.append(1)
        time.sleep(0.5)
        return float(len(calls))

    try:
        noisy = compare("x", measure, measure, unit="rows/s", rounds=2, quiet=True).make()
    finally:
        os.kill(int(shell.stdout), signal.SIGKILL)
    assert len(calls) == 2 * (1 + 2 + 2)
    assert len(noisy.settings["ratios"]) == len(noisy.settings["cpu_share_of_others"]) == 2
    assert min(noisy.settings["cpu_share_of_others"]) > harness.QUIET
    harness.print_line(noisy)
    assert re.search(r"other processes took \d+% of the CPUs: NOT QUIET", capsys.readouterr().out)


def test_the_work_of_what_a_benchmark_starts_is_not_that_of_others() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True) as child:
        time.sleep(0.5)
        found = processes.processes()
        ours = processes.descendants(found)
        grandchild = [pid for pid, each in found.items() if each.parent == child.pid]
        os.killpg(child.pid, signal.SIGKILL)
    assert {os.getpid(), child.pid, *grandchild} <= ours
    assert len(grandchild) == 1
    assert os.getppid() not in ours


BURN = "import time; end = time.process_time() + 1.0\nwhile time.process_time() < end: pass"


@pytest.mark.drill
def test_a_commands_cpu_time_is_that_of_all_it_started_though_it_did_not_wait(
    tmp_path: Path,
) -> None:
    script = f"""
import subprocess, sys
from pathlib import Path
from benchmarks.processes import timed
burn = [sys.executable, "-c", {BURN!r}]
loud = "import subprocess; subprocess.Popen(" + repr(burn) + ", stdout=-3)"
print(timed([sys.executable, "-c", loud], Path("."), {{}}).cpu_s)
try:
    timed(["sh", "-c", "echo why; exit 3"], Path("."), {{}})
except subprocess.CalledProcessError as error:
    print(error.returncode, error.output)
"""
    command = [sys.executable, "-c", script]  # which becomes the parent of what is left behind
    environment = {**os.environ, "PYTHONPATH": str(Path(processes.__file__).parents[1])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    seconds, failed = done.stdout.splitlines()
    assert 0.7 <= float(seconds) < 5
    assert failed == r"3 b'why\n'"
