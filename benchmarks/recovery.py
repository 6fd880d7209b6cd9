"""How long it takes until a run goes on after something under it has failed.

    python -m benchmarks.recovery [--only NAME …] [--json FILE]

Runs the drills, which kill the real parts on this machine, one after the other, and collects what
they measure (`recovered` in tests/conftest.py) beside what docs/jobs.md promises. A drill that
fails ends it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from benchmarks.harness import provenance
from benchmarks.processes import Others

HERE = Path(__file__).parents[1]
RECOVERED = "recovered"
DRILLS = {
    "jobs": "tests/pipelines/jobs/test_survival.py",
    "stop": "tests/pipelines/jobs/test_stopping_at_a_checkpoint.py",
    "nodes": "tests/pipelines/training/test_elastic.py",
    "host": "tests/pipelines/test_lost_host.py",
    "tracking": "tests/pipelines/test_mlflow_server.py::"
    "test_processes_killed_under_a_training_run_lose_and_repeat_no_point",
    "bucket": "tests/bert_core/test_storage.py::"
    "test_a_store_that_is_silent_for_half_a_minute_costs_only_time",
    "growth": "tests/pipelines/runtime/test_growing.py",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery")
    parser.add_argument("--only", nargs="+", choices=DRILLS, default=list(DRILLS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list of results there")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    for name in arguments.only:
        for line in drill(DRILLS[name]):
            print(
                f"{line['what']:<70}{line['seconds']:>7.1f} s of {line['within_s']:g}", flush=True
            )
            results.append({"name": name, **line, "made": provenance()})
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def drill(test: str) -> list[dict[str, Any]]:
    """What a drill has measured, with the share of the CPUs that other processes took meanwhile."""
    other_processes = Others()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-n0", "-q", test, f"--junit-xml={report}"]
        command += ["-o", "junit_family=xunit1"]  # which has properties of tests
        subprocess.run(command, cwd=HERE, stdout=sys.stderr, check=True)
        found = ET.parse(report).iterfind(f".//property[@name='{RECOVERED}']")
        lines = [json.loads(each.attrib["value"]) for each in found]
    share = round(other_processes.share(), 3)
    return [{**line, "drill": test, "cpu_share_of_others": share} for line in lines]


if __name__ == "__main__":
    main()
