"""Alert rules, by Prometheus' own tool; what dashboards and alerts ask is asked in
`tests/serve/test_metrics_live.py` and `tests/pipelines/training/test_gauges.py`."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import prometheus

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
FILES = ["alerts", "cluster_alerts"]
RULES = [
    rule
    for file in FILES
    for group in yaml.safe_load((PROMETHEUS / f"{file}.yml").read_text())["groups"]
    for rule in group["rules"]
]
OF_THE_WHOLE_CLUSTER = (
    "ray_raybert_nodes_missing",
    "ray_serve_",
    "ray_train_controller_state",
    "ray_cluster_active_nodes",
    "ray_running_jobs",
)
DASHBOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))


@pytest.fixture
def promtool() -> str:
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    return path


@pytest.mark.parametrize(
    "command",
    [
        ["check", "config", "prometheus.yml"],
        *(["test", "rules", f"{file}_test.yml"] for file in FILES),
    ],
    ids=" ".join,
)
def test_rules_are_valid_and_fire_when_they_should(promtool: str, command: list[str]) -> None:
    done = subprocess.run([promtool, *command], cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_firing_and_silent() -> None:
    cases = [
        case
        for file in FILES
        for test in yaml.safe_load((PROMETHEUS / f"{file}_test.yml").read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
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


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_says_what_it_shows_of_what_was_chosen(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    _, chosen = [variable["name"] for variable in dashboard["templating"]["list"]]
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert dashboard["uid"] == path.stem
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels:
        assert panel["description"], panel["title"]
        for target in panel["targets"]:
            of_all = any(name in target["expr"] for name in OF_THE_WHOLE_CLUSTER)
            assert f"${chosen}" in target["expr"] or of_all, panel["title"]


@pytest.mark.parametrize(
    ("values", "since_an_hour"), [("_x69 1x20", 1), ("1x89", 0), ("1x69 2x20", 1), ("3x69 1x20", 0)]
)
def test_a_roll_over_counts_though_its_version_has_a_series_of_its_own(
    promtool: str, tmp_path: Path, values: str, since_an_hour: int
) -> None:
    asked = prometheus.plain(prometheus.panels("raybert-serve")["Roll-overs 0"])
    series = 'ray_raybert_rollovers_total{model="docs", version="2", replica="x"}'
    told = [{"labels": '{model="docs"}', "value": since_an_hour}]
    case = {"expr": asked, "eval_time": "90m", "exp_samples": told}
    test = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values}],
        "promql_expr_test": [case],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": [test]}))
    done = subprocess.run(
        [promtool, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
