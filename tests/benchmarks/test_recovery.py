"""What is documented about recovery is what the drills promise, and what was measured."""

import json
from pathlib import Path

import pytest

from benchmarks.recovery import DRILLS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", DRILLS)
def test_a_drill_reports_how_long_it_took(name: str) -> None:
    assert "recovered(" in (ROOT / DRILLS[name].partition("::")[0]).read_text()


def test_the_table_has_what_was_measured_last() -> None:
    newest = max((ROOT / "benchmarks" / "results").glob("*-recovery.json"))
    table = (ROOT / "docs" / "jobs.md").read_text()
    lines = json.loads(newest.read_text())
    assert {line["name"] for line in lines} == DRILLS.keys()
    for line in lines:
        assert f"| {line['what']} | {line['within_s']:g} s | {line['seconds']:.0f} s |" in table
