"""Sets up OpenTelemetry's traces: Ray Serve makes a span per request and per call, and ours are
their children.

Serve imports `exporter` in every replica, where OpenTelemetry reads the collector's address from
its own environment variable. Without a collector, a span is a no-op.
"""

from importlib import import_module
from typing import Any

from opentelemetry import trace

from bert_core.errors import ConfigError, ResourceError
from serve.observe.records import Spent

EXPORTER = "serve.observe.tracing:exporter"
PACKAGE = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
PATH = "/v1/traces"
"""Path at which OTLP's collectors take traces."""


def check(endpoint: str | None) -> None:
    """Check the address of a collector. Raises: ConfigError if it has another form; ResourceError
    if the package is missing."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_endpoint: wanted an address of OTLP over HTTP, as http://localhost:4318, got "
            f"{endpoint}"
        )
    try:
        import_module(PACKAGE)
    except ImportError as error:
        raise ResourceError(
            "otlp_endpoint: wanted the package opentelemetry-exporter-otlp-proto-http, it cannot "
            f"be imported ({error}): pip install --constraint constraints.txt '.[otlp]'"
        ) from error


def settings(endpoint: str | None, share: float) -> dict[str, Any] | None:
    """Return Serve's `TracingConfig`; None leaves it to Serve's environment variables."""
    if endpoint is None:
        return None
    return {"enabled": True, "exporter_import_path": EXPORTER, "sampling_ratio": share}


def environment(endpoint: str | None) -> dict[str, str]:
    """Return the environment variables of Serve's processes."""
    if endpoint is None:
        return {}
    url = endpoint.rstrip("/")
    return {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url if url.endswith(PATH) else f"{url}{PATH}",
        "OTEL_SERVICE_NAME": "raybert",
    }


def exporter() -> list[Any]:
    """Return the span processors, in the form that Serve wants."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return [BatchSpanProcessor(OTLPSpanExporter())]


def add_spans(model: str, version: str, spent: Spent, began_ns: int) -> None:
    """Add children to the current span for the work that has been done: tokenizing, queueing,
    computing.

    Args:
        began_ns: when tokenizing began, in ns since 1970. The other steps followed without a gap.
    """
    parent = trace.get_current_span()
    if not parent.is_recording():
        return
    parent.set_attributes(
        {"raybert.model": model, "raybert.version": version, "raybert.tokens": spent.tokens}
    )
    tracer = trace.get_tracer("raybert")
    stages = {"tokenize": spent.tokenize_s, "queue": spent.queue_s, "compute": spent.compute_s}
    for name, seconds in stages.items():
        ended_ns = began_ns + int(1e9 * seconds)
        tracer.start_span(name, start_time=began_ns).end(end_time=ended_ns)
        began_ns = ended_ns
