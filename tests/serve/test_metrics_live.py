"""Metrics, traces and log of a server as a user runs it, while an alias moves.

Prometheus itself (Debian's package `prometheus`) asks what dashboard and alerts ask; without it,
those names and labels are looked for on the page.
"""

import http.server
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from bert_core.errors import ResourceError
from serve.observe import tracing
from tests import prometheus
from tests.prometheus import Page, eventually
from tests.serve import live
from tests.serve.live import Server

if TYPE_CHECKING:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

pytestmark = [pytest.mark.ray, pytest.mark.drill]

PANELS = prometheus.panels("raybert-serve")
ASKED = PANELS | prometheus.alerts("alerts.yml")
REPLICA_DOWN = "RaybertReplicaDown"
"""It asks for what is counted once a replica fails."""
NAME = "watched"
TEXTS = ["Parse a string.", "Open a socket on a port.", "A fox."]
NUMBERS = itertools.count()
MARKER = "zyxmarker"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = {"tokenize", "queue", "compute"}


@pytest.fixture(scope="module")
def registry(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A registry with two versions of a model, and one that does another task."""
    from bert_core.bundle.format import load_bundle
    from bert_core.tasks.base import Task
    from bert_core.tasks.text_classification import TextClassification
    from bert_core.tasks.token_classification import TokenClassification
    from tests import tiny
    from tracking.models.registry import Release, publish

    uri = f"sqlite:///{tmp_path_factory.mktemp('registry')}/mlflow.db"
    loaded = load_bundle(bundle)
    labels = ["json", "numpy", "socket"]
    tasks: list[Task] = [TextClassification(labels), TextClassification(labels)]
    for seed, task in enumerate([*tasks, TokenClassification(["B-place", "I-place", "O"])]):
        folder = tmp_path_factory.mktemp("version") / "bundle"
        tiny.bundle(folder, loaded.tokenizer, loaded.encoder_config, task=task, seed=seed)
        publish(Release(bundle=folder, name=NAME, metrics={}, input_example=TEXTS), uri=uri)
    return uri


def point(registry: str, version: str) -> None:
    from tracking.store.server import connect

    connect(registry).set_registered_model_alias(NAME, "champion", version)


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes OTLP over HTTP, as a collector does."""

    spans: "list[Span]" = []  # noqa: RUF012 - a new handler per connection, one list

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == tracing.PATH
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert names["service.name"] == "raybert"
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def collector() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(
    bundle: Path, registry: str, collector: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A followed model and another, both asked things that are right and wrong."""
    point(registry, "1")
    options = ["--models", f"docs=models:/{NAME}@champion,other={bundle}"]
    options += ["--tracking_uri", registry, "--follow_s", "0.5", "--num_cpus", "0.5"]
    options += ["--cache_mib", "1"]
    with suppress(ResourceError):  # without the exporter
        tracing.check(collector)
        options += ["--otlp_endpoint", collector]
    environment = {
        "RAY_metrics_report_interval_ms": "1000",
        "OTEL_BSP_SCHEDULE_DELAY": "200",  # exporters send every 5 s by default
    }
    folder = tmp_path_factory.mktemp("server")
    with live.running_alone(folder, *options, environment=environment) as server:
        yield server


def ask(server: Server) -> None:
    """Requests of every outcome, through model and front."""
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for path in ("/v1/models/docs", "/v1/models/other", "/"):
            inputs = [*TEXTS, f"A port, {next(NUMBERS)}."]  # what is kept, and what is not
            assert client.post(path, json={"inputs": inputs}).status_code == 200
            assert client.post(path, json={"inputs": 7}).status_code == 422
        assert client.post("/embed", json={"inputs": "a"}).status_code == 422
        assert client.post("/predict", json={"inputs": "a", "model": "x"}).status_code == 404
        assert client.get("/nowhere").status_code == 404


def page_of(server: Server) -> Page:
    response = httpx.get(f"{server.url}/metrics", timeout=30)
    assert response.status_code == 200, response.text
    return prometheus.page_of(response.text)


@pytest.fixture(scope="module")
def page(server: Server, registry: str) -> Page:
    """The metrics after a roll-over and one that failed."""
    ask(server)
    point(registry, "2")
    eventually("version 2 answers", lambda: _version(server) == "2")
    ask(server)
    point(registry, "3")
    eventually("version 3 has failed", lambda: "3" in (_card(server)["problem"] or ""))
    ask(server)

    def complete() -> Page | None:
        page = page_of(server)
        failed = page.get("ray_raybert_rollovers_total")
        requests = page.get("ray_raybert_requests_total", ())
        # Every process exports by itself.
        told = {(each["model"], each["status"], each["version"]) for each in requests}
        answered = {("docs", "200", "1"), ("docs", "200", "2")} <= told
        by_all = {("other", "200"), ("-", "404"), ("-", "422")} <= {each[:2] for each in told}
        is_whole = failed and answered and by_all
        return page if is_whole and "ray_serve_deployment_replica_healthy" in page else None

    return eventually("the page is complete", complete)


def _card(server: Server) -> Any:
    return httpx.get(f"{server.url}/v1/models/docs", timeout=30).json()


def _version(server: Server) -> str | None:
    response = httpx.post(f"{server.url}/v1/models/docs", json={"inputs": TEXTS}, timeout=30)
    return response.headers.get("X-Model-Version")


@pytest.mark.parametrize(
    "where", [name for name in ASKED if name not in ("RaybertDown", REPLICA_DOWN)]
)
def test_every_metric_and_label_that_is_asked_for_is_exported(where: str, page: Page) -> None:
    names, labels = prometheus.names_and_labels(ASKED[where])
    assert names
    for name in names:
        assert name in page, f"{name} is not among {sorted(page)}"
        assert labels <= set().union(*page[name])


@pytest.mark.guard  # what operators look at when a roll-over fails
def test_versions_errors_and_a_failed_roll_over_are_distinguished(
    page: Page, server: Server
) -> None:
    requests = page["ray_raybert_requests_total"]
    outcomes = {(each["model"], each["status"], each["error_type"]) for each in requests}
    assert {
        ("docs", "200", "-"),
        ("docs", "422", "invalid_request"),
        ("other", "200", "-"),
        ("-", "422", "wrong_task"),
        ("-", "404", "not_found"),
    } <= outcomes
    assert {each["version"] for each in requests if each["model"] == "docs"} == {"1", "2"}
    (other,) = {each["version"] for each in requests if each["model"] == "other"}
    assert len(other) == 12  # of the digest
    assert [each["version"] for each in page["ray_raybert_rollovers_total"]] == ["2"]

    from prometheus_client.parser import text_string_to_metric_families

    def values(name: str) -> dict[tuple[str, str], float]:
        text = httpx.get(f"{server.url}/metrics", timeout=30).text
        return {
            (sample.labels["model"], sample.labels["version"]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }

    # What no longer answers is no longer told.
    eventually(
        "only what answers is told",
        lambda: values("ray_raybert_rollover_failed") == {("docs", "2"): 1, ("other", other): 0},
    )


def test_only_ours_and_ray_serves_are_shown_and_nothing_that_was_sent(page: Page) -> None:
    assert all(name.startswith(("ray_raybert_", "ray_serve_")) for name in page)
    methods = {each["method"] for each in page["ray_serve_num_http_requests_total"]}
    assert {"GET", "POST"} <= methods
    values = {value for labels in page.values() for each in labels for value in each.values()}
    assert not any(word in value for value in values for word in ("nowhere", "fox"))


def test_no_file_of_the_session_has_what_was_sent_to_front_or_model(server: Server) -> None:
    paths = ("/", "/v1/models/docs", "/embed", f"/v1/models/docs/{MARKER}", f"/{MARKER}?{MARKER}=1")
    bodies: tuple[Any, ...] = ([MARKER], {"inputs": 7, MARKER: MARKER}, {"inputs": [MARKER] * 9999})
    for path in paths:
        for body in ({"inputs": MARKER}, *bodies):
            httpx.post(f"{server.url}{path}", json=body, timeout=30)
    (logs,) = re.findall(r"^logs: (.+)$", server.output.read_text(), flags=re.MULTILINE)
    lines = [file.read_text() for file in Path(logs).glob("replica_model-docs_*.log")]
    assert any("POST / 200 model=docs version=" in line for line in lines)
    files = [file for file in Path(logs).parent.rglob("*") if file.is_file()]
    assert [file for file in files if MARKER.encode() in file.read_bytes()] == []
    assert MARKER not in server.output.read_text()


def test_every_query_of_the_dashboard_has_an_answer(
    page: Page, server: Server, tmp_path: Path
) -> None:
    with prometheus.running("raybert", server.url[7:], "alerts.yml", tmp_path) as asked:
        missing = dict(PANELS)

        def none_is_missing() -> bool:
            ask(server)
            for where in [where for where, query in missing.items() if asked.ask(query)]:
                del missing[where]
            return not missing

        try:
            eventually("every query has an answer", none_is_missing)
        except AssertionError:
            pytest.fail(f"no answer to {missing}")
        assert {rule["health"] for rule in asked.rules()} == {"ok"}
        by_name = {rule["name"]: rule["state"] for rule in asked.rules()}
        assert by_name["RaybertRolloverFailed"] in ("pending", "firing")
        assert by_name["RaybertDown"] == by_name["RaybertModelGone"] == "inactive"


def attributes(span: "Span") -> dict[str, str]:
    return {each.key: str(each.value) for each in span.attributes}


def ancestors(span: "Span", spans: "dict[bytes, Span]") -> list[bytes]:
    """The ids of those above a span, the nearest first, as far as they are known."""
    above = [span.parent_span_id]
    while above[-1] in spans:
        above.append(spans[above[-1]].parent_span_id)
    return above


def of_caller(span: "Span") -> bool:
    return span.trace_id.hex() == TRACE


def test_a_collector_gets_the_stages_of_a_request_below_the_callers_span(server: Server) -> None:
    pytest.importorskip(tracing.PACKAGE, reason="no exporter: pip install 'raybert[otlp]'")
    parent = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    Collector.spans.clear()
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for path in ("/v1/models/docs", "/predict"):  # by itself, and through the front
            body = {
                "inputs": [f"{MARKER} {path}", f"{MARKER} a fox {path}"]
            }  # none is in the cache
            assert client.post(path, json=body, headers=parent).status_code == 200
        client.post(f"/v1/models/docs/{MARKER}?{MARKER}", json={MARKER: 1}, headers=parent)
        client.post("/", json={"inputs": 7, MARKER: MARKER}, headers=parent)

    def traced() -> "dict[bytes, Span] | None":
        spans = {span.span_id: span for span in Collector.spans if of_caller(span)}
        tops = [ancestors(span, spans)[-1] for span in spans.values() if span.name in STAGES]
        return spans if len(tops) >= 6 and {top.hex() for top in tops} == {CALLER} else None

    spans: dict[bytes, Span] = eventually("all spans have come", traced)
    stages = [span for span in spans.values() if span.name in STAGES]
    assert {span.name for span in stages} == STAGES
    for span in stages:
        request = spans[span.parent_span_id]
        assert attributes(request)["raybert.model"].endswith('"docs"\n')
        assert request.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= request.end_time_unix_nano
    assert len({ancestors(span, spans)[0] for span in stages}) == 2
    through_front = [span for span in stages if len(ancestors(span, spans)) > 2]
    assert {span.name for span in through_front} == STAGES
    holding = [span for span in Collector.spans if MARKER in str(span)]
    assert not holding, str(holding[0])


def test_a_replica_that_dies_is_counted_and_replaced_without_noise_on_the_console(
    server: Server,
) -> None:
    # The last test of the module: the others need what has been counted.
    before = server.output.read_text()
    replicas = server.replicas("docs")
    assert len(replicas) == 1
    os.kill(replicas[0], signal.SIGKILL)

    url = f"{server.url}/v1/models/docs/readyz"

    def is_replaced() -> bool:
        now = server.replicas("docs")
        return bool(now) and now != replicas

    eventually("the replica is replaced", is_replaced)

    def is_ready() -> bool:
        try:  # HAProxy cuts connections when it learns of the new replica
            return httpx.get(url, timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    eventually("the new replica is ready", is_ready)
    time.sleep(2)  # the raylet's message takes a moment
    assert server.output.read_text() == before
    names, labels = prometheus.names_and_labels(ASKED[REPLICA_DOWN])

    def is_counted() -> bool:
        page = page_of(server)
        return all(labels <= set().union(*page.get(name, [])) for name in names)

    eventually("its failure is counted", is_counted)
