"""What Prometheus sees of stages and nodes: all that dashboards and alerts ask, on a cluster where
`prepare` and `pretrain` run."""

import os
import pickle
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from bert_core.train.config import LoopConfig
from pipelines.training.records import read_records
from tests import prometheus
from tests.processes import start_with_input
from tests.prometheus import Page, Prometheus
from tests.ray_clusters import Head, running_head

pytestmark = [pytest.mark.ray, pytest.mark.drill]

DASHBOARDS = ("raybert-train", "raybert-prepare", "raybert-cluster")
ALERTS = prometheus.alerts("cluster_alerts.yml")
ASKED = {
    f"{dashboard}: {where}": expression
    for dashboard in DASHBOARDS
    for where, expression in prometheus.panels(dashboard).items()
} | ALERTS
ONLY_WITH_GPUS = ("ray_node_gpus_utilization", "ray_node_gram_used", "ray_raybert_train_mfu")
HERE = {
    where: expression
    for where, expression in ASKED.items()
    if not any(name in expression for name in ONLY_WITH_GPUS) and "GPU" not in expression
}
PREPARED_TIMES, TRAINS_S = 60, 15  # each lasts for several scrapes, however fast the machine is
TRIES = 3
"""Ray exports a state once, when it changes, and on a busy machine not even that: one of so many
runs shows what is missing."""
STAGES = """
import pickle, sys
from pipelines import prepare, pretrain

shards, training = pickle.load(sys.stdin.buffer)
prepare.run(shards)
pretrain.run(training)
"""

HANGS = """
import sys, time
import ray
from pipelines.training.gauges import Gauges
from tracking.runs.goodput import Goodput

ray.init(sys.argv[1])
spent = Goodput(began_s=0.0, until_s=1.0, seconds={"computing": 1.0})
Gauges("hangs").show([(7, {"loss": 2.5})], spent, 600.0)
time.sleep(600)
"""


@dataclass
class Watched:
    """What was seen while the stages ran."""

    page: Page
    """All that was exported at any time."""
    prometheus: Prometheus
    began_s: float
    output: str
    """Of the last training."""
    records: dict[int, dict[str, float]]
    """Of that, by step."""


@pytest.fixture(scope="module")
def watched(prepared: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    variables = {"HOME": "/nonexistent", "RAY_metrics_report_interval_ms": "1000"}
    with running_head(variables, mode="disabled") as head:
        target = f"127.0.0.1:{head.ports['metrics-export-port']}"
        with prometheus.running("ray", target, "cluster_alerts.yml", folder) as asked:
            began_s, page = time.time(), Page()
            joins = {"address": f"127.0.0.1:{head.ports['port']}", "allow_open_cluster": True}
            for number in range(TRIES):
                output = folder / f"pretrain-{number}"
                shards = prepared.prepare(folder / f"shards-{number}")
                pairs = replace(shards.pairs, dupe_factor=PREPARED_TIMES)
                shards = replace(shards, pairs=pairs, num_workers=1, **joins)
                training = replace(
                    prepared.pretrain(output),
                    loop=LoopConfig(max_steps=100_000, max_hours=TRAINS_S / 3600, precision="fp32"),
                    num_workers=1,
                    checkpoint_every_steps=100_000,
                    report_every_s=0.5,
                    usd_per_hour=2.0,
                    **joins,
                )
                with stages(head, pickle.dumps([shards, training])) as process:
                    while process.poll() is None:
                        page |= exported(target)
                        time.sleep(3)  # a page of hundreds of kilobytes
                    assert process.returncode == 0
                page |= exported(target)
                watched = Watched(page, asked, began_s, str(output), read_records(output))
                if not (silent(watched) or any(lacking(query, page) for query in HERE.values())):
                    break
            yield watched


def stages(head: Head, pickled: bytes) -> "subprocess.Popen[bytes]":
    environment = os.environ | head.environment
    return start_with_input([sys.executable, "-c", STAGES], pickled, env=environment)


def exported(target: str) -> Page:
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=30) as answer:
        return prometheus.page_of(answer.read().decode())


def lacking(query: str, page: Page) -> set[str]:
    """Metrics and labels that a query asks for and the page has not."""
    names, labels = prometheus.names_and_labels(query)
    return (names - page.keys()) | {
        f"{name}: {label}"
        for name in names & page.keys()
        for label in labels - set().union(*page[name])
    }


def silent(watched: Watched) -> list[str]:
    """Panels whose queries had no answer."""
    return [
        where
        for where, query in HERE.items()
        if where not in ALERTS and not watched.prometheus.ask_of(query, watched.began_s)
    ]


@pytest.mark.parametrize("where", HERE)
def test_every_metric_and_label_that_is_asked_for_is_exported(where: str, watched: Watched) -> None:
    names, _ = prometheus.names_and_labels(HERE[where])
    assert names or "up{" in HERE[where]
    assert lacking(HERE[where], watched.page) == set(), sorted(watched.page)


def test_every_query_had_an_answer_and_every_rule_is_healthy(watched: Watched) -> None:
    assert silent(watched) == []
    assert {rule["health"] for rule in watched.prometheus.rules()} == {"ok"}
    assert {rule["state"] for rule in watched.prometheus.rules()} == {"inactive"}


def test_a_run_is_shown_as_its_record_has_it(watched: Watched) -> None:
    def values(name: str) -> list[float]:
        query = f'ray_raybert_train_{name}{{output="{watched.output}"}}'
        (series,) = watched.prometheus.ask_of(query, watched.began_s)
        return [float(value) for _, value in series["values"]]

    steps, losses = values("step"), values("loss")
    assert set(steps) <= watched.records.keys()
    assert set(losses) <= {each["loss"] for each in watched.records.values() if "loss" in each}
    assert losses[-1] < losses[0]
    assert steps == sorted(steps)
    assert 0 < values("progress")[-1] <= 1
    assert values("workers")[-1] == 1
    assert values("cost_usd")[-1] > 0


def test_a_run_that_hangs_shows_its_last_report_until_its_process_ends() -> None:
    variables = {"HOME": "/nonexistent", "RAY_metrics_report_interval_ms": "1000"}
    shown = [f"ray_raybert_train_{name}" for name in ("reported_timestamp_seconds", "seconds")]
    with running_head(variables, mode="disabled") as head:
        target = f"127.0.0.1:{head.ports['metrics-export-port']}"

        def is_shown() -> bool:
            page = exported(target)
            return all(
                {"hangs"} <= {each.get("output") for each in page.get(name, [])} for name in shown
            )

        environment = os.environ | head.environment | {"RAY_AUTH_MODE": "disabled"}
        address = f"127.0.0.1:{head.ports['port']}"
        process = subprocess.Popen([sys.executable, "-c", HANGS, address], env=environment)
        try:
            prometheus.eventually("the report is shown", is_shown)
            for _ in range(10):  # an agent forgets what is not set again within two seconds
                time.sleep(1)
                assert is_shown()
        finally:
            process.kill()
            process.wait()
        prometheus.eventually("it is forgotten", lambda: not is_shown())
