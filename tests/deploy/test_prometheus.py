"""Alert rules, by Prometheus' own tool; the dashboard's queries are asked in
`tests/serve/test_metrics_live.py`."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
RULES = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]


@pytest.fixture
def promtool() -> str:
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    return path


@pytest.mark.parametrize("command", [["check", "alerts.yml"], ["test", "alerts_test.yml"]])
def test_rules_are_valid_and_fire_when_they_should(promtool: str, command: list[str]) -> None:
    verb, file = command
    done = subprocess.run(
        [promtool, verb, "rules", file], cwd=PROMETHEUS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_both_ways() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    for rule in RULES:
        of_it = [
            bool(case.get("exp_alerts")) for case in cases if case["alertname"] == rule["alert"]
        ]
        assert set(of_it) == {True, False}, rule["alert"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_has_a_summary_and_a_section_of_the_runbook(rule: dict[str, Any]) -> None:
    file, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^## (\w+)$", (ROOT / file).read_text(), flags=re.MULTILINE)
    assert anchor == rule["alert"].lower()
    assert rule["alert"] in headings
    assert rule["annotations"]["summary"].endswith(".")
    assert rule["labels"]["severity"] in ("page", "warn")


def test_every_panel_says_what_it_shows_for_the_chosen_model() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/raybert-serve.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels:
        assert panel["description"], panel["title"]
        for target in panel["targets"]:
            if "ray_raybert_nodes_missing" not in target["expr"]:
                assert "$model" in target["expr"] or "ray_serve_" in target["expr"]
