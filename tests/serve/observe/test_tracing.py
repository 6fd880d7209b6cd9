"""Settings of traces: what is refused, and what Ray Serve is told. `test_metrics_live` has a
collector that gets them."""

import pytest

from bert_core.errors import ConfigError, ResourceError
from serve.observe import tracing


def test_an_endpoint_in_another_form_is_refused() -> None:
    tracing.check(None)
    with pytest.raises(ConfigError, match="otlp_endpoint: wanted an address of OTLP over HTTP"):
        tracing.check("localhost:4317")


def test_without_the_package_the_way_out_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "PACKAGE", "opentelemetry.exporter.nobody.has.this")
    with pytest.raises(ResourceError, match=r"pip install --constraint constraints.txt '\.\[otlp"):
        tracing.check("http://localhost:4318")


@pytest.mark.parametrize("endpoint", ["http://a:4318", "http://a:4318/", "http://a:4318/v1/traces"])
def test_the_path_of_otlp_is_added_where_it_is_missing(endpoint: str) -> None:
    environment = tracing.environment(endpoint)
    assert environment["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == "http://a:4318/v1/traces"
    assert tracing.environment(None) == {}
    assert tracing.settings(None, 1.0) is None
