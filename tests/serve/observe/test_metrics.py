"""The page of metrics, from what agents export; with Ray in `test_metrics_live`."""

import asyncio
import time

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from prometheus_client.parser import text_string_to_metric_families

from tests.serve import live
from tracking.store.ports import free_ports

AGENT = """# HELP ray_tasks Of Ray's hundreds.
# TYPE ray_tasks gauge
ray_tasks{{Name="f"}} 3.0
# HELP ray_raybert_requests_total Requests.
# TYPE ray_raybert_requests_total counter
ray_raybert_requests_total{{Component="core_worker",NodeAddress="{node}",Version="2.60.0",\
model="a \\"b\\" {{x}}, Version=\\"1\\"",otel_scope_name="ray",version="1"}} 2.0
# HELP ray_serve_num_http_requests_total Requests to Serve.
# TYPE ray_serve_num_http_requests_total counter
ray_serve_num_http_requests_total{{NodeAddress="{node}",SessionName="s"}} 5.0
"""


def test_pages_of_several_nodes_are_one_with_what_is_ours_and_serves() -> None:
    from serve.observe.metrics import merged

    page = merged([AGENT.format(node="10.0.0.1"), AGENT.format(node="10.0.0.2")], missing=1)
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert set(families) == {
        "ray_raybert_requests",
        "ray_serve_num_http_requests",
        "ray_raybert_nodes_missing",
    }
    assert page.count("# TYPE ray_raybert_requests_total") == 1
    samples = families["ray_raybert_requests"].samples
    assert [sample.labels["NodeAddress"] for sample in samples] == ["10.0.0.1", "10.0.0.2"]
    for sample in samples:
        assert set(sample.labels) == {"NodeAddress", "model", "version"}
        assert sample.labels["model"] == 'a "b" {x}, Version="1"'
        assert sample.value == 2.0
    assert families["ray_raybert_nodes_missing"].samples[0].value == 1
    assert "SessionName" not in page


def test_a_page_without_any_node_is_still_one() -> None:
    from serve.observe.metrics import merged

    (family,) = text_string_to_metric_families(merged([], missing=2))
    assert family.samples[0].value == 2


def test_nodes_that_are_gone_fail_or_hang_do_not_fail_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from serve.observe import metrics

    monkeypatch.setattr(metrics, "NODE_TIMEOUT_S", 0.3)
    app = FastAPI()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show() -> str:
        return AGENT.format(node="10.0.0.1")

    @app.get("/hangs/metrics")
    async def hang(request: Request) -> None:
        for _ in range(200):
            if not await request.is_disconnected():
                await asyncio.sleep(0.05)

    with live.running(app) as url:
        (nobody,) = free_ports(1)
        gone = [f"http://127.0.0.1:{nobody}/metrics", None]
        began_s = time.monotonic()
        page = asyncio.run(
            metrics.gathered(
                [*gone, f"{url}/metrics", f"{url}/none/metrics", f"{url}/hangs/metrics"]
            )
        )
        assert time.monotonic() - began_s < 5
    assert "ray_raybert_requests_total" in page
    assert "ray_raybert_nodes_missing 4" in page
