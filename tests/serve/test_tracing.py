"""Traces: what is refused, and what a collector on loopback gets from a live server."""

import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from bert_core.errors import ConfigError, ResourceError
from serve import tracing
from tests.serve.test_app import Server, end_and_kill
from tracking.ports import free_ports

MARKER = "zyxmarker"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = {"tokenize", "queue", "compute"}


def test_an_endpoint_of_another_form_is_refused() -> None:
    tracing.check(None)
    with pytest.raises(ConfigError, match="otlp_endpoint: wanted an address of OTLP over HTTP"):
        tracing.check("localhost:4317")


def test_without_the_package_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "PACKAGE", "opentelemetry.exporter.nobody.has.this")
    with pytest.raises(ResourceError, match=r"pip install --constraint constraints.txt '\.\[otlp"):
        tracing.check("http://localhost:4318")


@pytest.mark.parametrize("endpoint", ["http://a:4318", "http://a:4318/", "http://a:4318/v1/traces"])
def test_the_path_of_otlp_is_added_where_it_is_missing(endpoint: str) -> None:
    environment = tracing.environment(endpoint)
    assert environment["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == "http://a:4318/v1/traces"
    assert tracing.environment(None) == {}
    assert tracing.settings(None, 1.0) is None


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes OTLP over HTTP, as a collector does."""

    spans: list[Span] = []  # noqa: RUF012 - a new handler per connection, one list

    def do_POST(self) -> None:
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


@pytest.fixture
def collector() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def attributes(span: Span) -> dict[str, str]:
    return {each.key: str(each.value) for each in span.attributes}


def ancestors(span: Span, spans: dict[bytes, Span]) -> list[bytes]:
    """The ids of those above a span, the nearest first, as far as they are known."""
    above = [span.parent_span_id]
    while above[-1] in spans:
        above.append(spans[above[-1]].parent_span_id)
    return above


@pytest.mark.ray
@pytest.mark.drill
def test_a_collector_gets_the_stages_of_a_request_below_the_callers_span(
    collector: str, bundle: Path, tmp_path: Path
) -> None:
    pytest.importorskip(tracing.PACKAGE, reason="no exporter: pip install 'raybert[otlp]'")
    (port,) = free_ports(1)
    command = ["pipelines.cli", "serve", "--models", f"docs={bundle}", "--port", str(port)]
    command += ["--otlp_endpoint", collector]
    # Exporters send every 5 s by default.
    server = Server.start(command, port, tmp_path, OTEL_BSP_SCHEDULE_DELAY="200")
    parent = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    try:
        server.wait_until_ready(say="curl")
        Collector.spans.clear()
        with httpx.Client(base_url=server.url, timeout=30) as client:
            for path in ("/v1/models/docs", "/predict"):  # by itself, and through the front
                body = {"inputs": [MARKER, f"{MARKER} a fox"]}
                assert client.post(path, json=body, headers=parent).status_code == 200
            client.post(f"/v1/models/docs/{MARKER}?{MARKER}", json={MARKER: 1}, headers=parent)
            client.post("/", json={"inputs": 7, MARKER: MARKER}, headers=parent)
        deadline_s = time.monotonic() + 30
        while sum(span.name in STAGES for span in Collector.spans if of_caller(span)) < 6:
            assert time.monotonic() < deadline_s, [span.name for span in Collector.spans]
            time.sleep(0.2)
        spans = {span.span_id: span for span in Collector.spans if of_caller(span)}
        stages = [span for span in spans.values() if span.name in STAGES]
        assert {span.name for span in stages} == STAGES
        for span in stages:
            above = ancestors(span, spans)
            assert above[-1].hex() == CALLER
            request = spans[above[0]]
            assert attributes(request)["raybert.model"].endswith('"docs"\n')
            assert request.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= request.end_time_unix_nano
        assert len({ancestors(span, spans)[0] for span in stages}) == 2
        through_front = [span for span in stages if len(ancestors(span, spans)) > 2]
        assert {span.name for span in through_front} == STAGES
        holding = [span for span in Collector.spans if MARKER in str(span)]
        assert not holding, str(holding[0])
    finally:
        end_and_kill(server)


def of_caller(span: Span) -> bool:
    return span.trace_id.hex() == TRACE
