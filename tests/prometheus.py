"""What dashboards and alerts of `deploy/` ask, and Prometheus itself to ask (Debian's package)."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import wait_until
from tracking.store.ports import free_ports

DEPLOY = Path(__file__).parents[1] / "deploy"
WITHIN_S = 90.0

Page = dict[str, list[dict[str, str]]]
"""Labels of the samples of each metric."""


def eventually(what: str, value: Callable[[], Any]) -> Any:
    """The first true value, for metrics that are exported and scraped every few seconds."""
    __tracebackhide__ = True
    return wait_until(what, value, timeout_s=WITHIN_S, every_s=0.5)


def page_of(text: str) -> Page:
    """A page of metrics in Prometheus' text format."""
    page: Page = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            page.setdefault(sample.name, []).append(sample.labels)
    return page


def panels(dashboard: str) -> dict[str, str]:
    """The queries of a dashboard, by the title of the panel and their place in it."""
    drawn = json.loads((DEPLOY / "grafana" / f"{dashboard}.json").read_text())["panels"]
    return {
        f"{panel['title']} {place}": target["expr"]
        for panel in drawn
        for place, target in enumerate(panel.get("targets", ()))
    }


def alerts(file: str) -> dict[str, str]:
    """The expressions of a file of rules, by alert."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / file).read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def names_and_labels(expression: str) -> tuple[set[str], set[str]]:
    """The metrics in a query, and the labels that it selects and groups by."""
    text = re.sub(r'"[^"]*"', '""', expression)
    labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"\"", text))
    for listed in re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", text):
        labels |= {label.strip() for label in listed.split(",")}
    return set(re.findall(r"\bray_\w+", text)), labels


@dataclass
class Prometheus:
    """One that scrapes a page every two seconds."""

    url: str

    def ask(self, expression: str) -> list[Any]:
        """The series that are the answer now; all values of a dashboard's variables are chosen."""
        return self._asked("query", query=plain(expression))

    def ask_of(self, expression: str, since_s: float) -> list[Any]:
        """The series that have been the answer at any second since then (seconds since 1970)."""
        now = time.time()
        return self._asked(
            "query_range", query=plain(expression), start=since_s, end=now, step="1s"
        )

    def rules(self) -> list[Any]:
        """The alerts, each with its health and state."""
        response = httpx.get(f"{self.url}/api/v1/rules", timeout=10)
        return [rule for group in response.json()["data"]["groups"] for rule in group["rules"]]

    def _asked(self, how: str, **parameters: Any) -> list[Any]:
        response = httpx.get(f"{self.url}/api/v1/{how}", params=parameters, timeout=10)
        assert response.status_code == 200, response.text
        return list(response.json()["data"]["result"])


def plain(expression: str) -> str:
    """A query of a dashboard as Prometheus takes it, for all values of the variables."""
    return re.sub(r"\$(model|output|dataset|node)", ".*", expression).replace(
        "$__rate_interval", "10s"
    )


@contextmanager
def running(job: str, target: str, rules: str, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes one target as a job; skips where it is not installed.

    Args:
        target: host and port.
        rules: file of alerts in `deploy/prometheus`.
    """
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("Prometheus is missing: apt-get install prometheus")
    (port,) = free_ports(1)
    config = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(DEPLOY / "prometheus" / rules)],
        "scrape_configs": [{"job_name": job, "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    process = subprocess.Popen(
        [binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
         f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"],
    )  # fmt: skip
    prometheus = Prometheus(f"http://127.0.0.1:{port}")

    def is_up() -> bool:
        try:
            ready = httpx.get(f"{prometheus.url}/-/ready", timeout=10)
            return ready.is_success and prometheus.ask(f'up{{job="{job}"}} == 1') != []
        except httpx.TransportError:
            return False

    try:
        eventually("Prometheus is up, with a sample of the target", is_up)
        yield prometheus
    finally:
        process.terminate()
        process.wait(20)
