"""The page of metrics, from what agents export; with Ray in `test_metrics_live`."""

from prometheus_client.parser import text_string_to_metric_families

from serve.metrics import merged

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
    (family,) = text_string_to_metric_families(merged([], missing=2))
    assert family.samples[0].value == 2
