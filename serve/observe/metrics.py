"""Reports metrics through Ray's agents, and serves the page that shows those of all nodes.

Every process hands its counts to its node's agent, within `metrics_report_interval_ms` (10 s), and
the agents export them. Names get the prefix `ray_`, and counters the suffix `_total`. An agent only
knows the bucket of a value, so a histogram's `_sum` is approximate. Gauges that are not set again
vanish after two intervals, and so do those of a lost process.
"""

import asyncio
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import httpx
import ray
from ray.serve.metrics import Counter, Gauge, Histogram

from serve.observe.records import NONE, Recorder, RequestRecord, Snapshot

logger = logging.getLogger("ray.serve")

PREFIX = "raybert"
SHOWN = (f"ray_{PREFIX}_", "ray_serve_")
"""Beginnings of the names that the page has, of the hundreds that agents export."""
HIDDEN = re.compile(r"otel_scope_\w+|Component|SessionName|Version")
"""Labels that the page leaves out: the same for all, and `Version` is Ray's."""
SAMPLE_S = 1.0
"""Interval at which models are sampled and records of requests go to Ray, which takes 0.1 ms each:
too long for the event loop."""
NODE_TIMEOUT_S = 5.0
"""Time that the page waits for a node."""

# From the fastest tiny model to the longest deadline.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
FILLS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
MODEL = ("model", "version")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric as Prometheus sees it; `name` is without the prefix."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    meaning: str
    labels: Any = MODEL
    """Names; Ray's annotation is that of a tuple of one."""
    boundaries: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""

    def create(self) -> Any:
        """Create Ray's metric in this process."""
        name = f"{PREFIX}_{self.name}"
        if self.kind == "histogram":
            return Histogram(name, self.meaning, list(self.boundaries), self.labels)
        metric = Counter if self.kind == "counter" else Gauge
        return metric(name, self.meaning, self.labels)


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(kind="counter", name=name, meaning=meaning, labels=(*MODEL, *labels))


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(kind="gauge", name=name, meaning=meaning, labels=(*MODEL, *labels))


def _histogram(name: str, meaning: str, boundaries: tuple[float, ...] = SECONDS) -> Metric:
    return Metric(kind="histogram", name=name, meaning=meaning, boundaries=boundaries)


METRICS = (
    _counter(
        "requests",
        "Requests, by surface, status and error.",
        *("surface", "status", "error_type"),
    ),
    _counter("request_tokens", "Tokens of answered requests, without padding."),
    _histogram("request_seconds", "Time of a request in the replica."),
    _histogram("tokenize_seconds", "Tokenizing of a request."),
    _histogram("queue_seconds", "Waiting of a request for its pass."),
    _histogram("compute_seconds", "Pass that answers a request."),
    _counter("pass_tokens", "Tokens in passes, without padding."),
    _counter("pass_computed_tokens", "Tokens in passes, with padding."),
    _histogram(
        "batch_fill", "Share of max_batch_tokens that a batch takes, padding included.", FILLS
    ),
    _counter("cache_hits", "Inputs answered without being computed."),
    _counter("cache_misses", "Inputs that the cache did not have."),
    _counter("rollovers", "Versions that have taken the place of another."),
    _counter("changes", "Of these, those with other labels or incomparable vectors.", "change"),
    _gauge("queue_tokens", "Tokens that wait in the queue."),
    _gauge("queue_limit_tokens", "Tokens that may wait in the queue."),
    _gauge("rollover_failed", "1 while the version that the alias points to is not served."),
    _gauge("model_info", "1 for each version served.", "digest"),
)
"""All that `RayRecorder` counts."""


class RayRecorder(Recorder):
    """Counts requests and passes in Ray's metrics; there is only one per process."""

    def __init__(self) -> None:
        """Create the metrics. Call this in the replica that counts, since Serve adds its name to
        every metric."""
        metrics = {each.name: each.create() for each in METRICS}
        self._requests, self._tokens = metrics["requests"], metrics["request_tokens"]
        self._total = metrics["request_seconds"]
        self._stages = {
            "tokenize_s": metrics["tokenize_seconds"],
            "queue_s": metrics["queue_seconds"],
            "compute_s": metrics["compute_seconds"],
        }
        self._real, self._computed = metrics["pass_tokens"], metrics["pass_computed_tokens"]
        self._fill = metrics["batch_fill"]
        self._hits, self._misses = metrics["cache_hits"], metrics["cache_misses"]
        self._rollovers, self._changes = metrics["rollovers"], metrics["changes"]
        self._queue, self._queue_limit = metrics["queue_tokens"], metrics["queue_limit_tokens"]
        self._problem, self._info = metrics["rollover_failed"], metrics["model_info"]
        self._watched: list[Callable[[], Snapshot]] = []
        self._unrecorded: deque[Callable[[], None]] = deque()
        threading.Thread(target=self._sample, name="metrics", daemon=True).start()

    def finished(self, request: RequestRecord) -> None:
        self._unrecorded.append(partial(self._finished, request))

    def _finished(self, request: RequestRecord) -> None:
        of_model = {"model": request.model, "version": request.version}
        outcome = {"status": str(request.status), "error_type": request.error_type or NONE}
        self._requests.inc(tags={**of_model, "surface": request.surface, **outcome})
        self._total.observe(request.total_s, tags=of_model)
        if request.spent is None:
            return
        if request.spent.tokens:
            self._tokens.inc(request.spent.tokens, tags=of_model)
        for name, seconds in self._stages.items():
            seconds.observe(getattr(request.spent, name), tags=of_model)

    def passed(self, model: str, version: str, *, tokens: int, computed: int, fill: float) -> None:
        self._unrecorded.append(
            partial(self._passed, model, version, tokens=tokens, computed=computed, fill=fill)
        )

    def _passed(self, model: str, version: str, *, tokens: int, computed: int, fill: float) -> None:
        of_model = {"model": model, "version": version}
        self._real.inc(tokens, tags=of_model)
        self._computed.inc(computed, tags=of_model)
        self._fill.observe(fill, tags=of_model)

    def recalled(self, model: str, version: str, *, hits: int, misses: int) -> None:
        self._unrecorded.append(partial(self._recalled, model, version, hits=hits, misses=misses))

    def _recalled(self, model: str, version: str, *, hits: int, misses: int) -> None:
        of_model = {"model": model, "version": version}
        for counter, inputs in ((self._hits, hits), (self._misses, misses)):
            if inputs:
                counter.inc(inputs, tags=of_model)

    def rolled_over(self, model: str, version: str, change: str | None = None) -> None:
        of_model = {"model": model, "version": version}
        self._rollovers.inc(tags=of_model)
        if change is not None:
            self._changes.inc(tags={**of_model, "change": change})

    def watch(self, look: Callable[[], Snapshot]) -> None:
        self._watched.append(look)

    def forget(self, look: Callable[[], Snapshot]) -> None:
        self._watched.remove(look)

    def _sample(self) -> None:
        while True:
            try:
                self._pass_on()
            except Exception:  # of a single request or model: the others are still counted
                logger.exception("metrics: something was not passed on to Ray")
            time.sleep(SAMPLE_S)

    def _pass_on(self) -> None:
        while self._unrecorded:
            self._unrecorded.popleft()()
            time.sleep(0)  # lets the event loop go on
        for look in tuple(self._watched):
            state = look()
            of_model = {"model": state.model, "version": state.version}
            self._queue.set(state.queue_tokens, tags=of_model)
            self._queue_limit.set(state.max_queue_tokens, tags=of_model)
            self._problem.set(int(state.has_problem), tags=of_model)
            self._info.set(1, tags={**of_model, "digest": state.digest[:12]})


async def exported() -> str:
    """Return our metrics and Ray Serve's from the agents of all nodes of this cluster, in
    Prometheus' text format."""
    nodes = await asyncio.to_thread(ray.nodes)
    return await gathered([_url(node) for node in nodes if node["Alive"]])


def _url(node: Mapping[str, Any]) -> str | None:
    """Return the URL of a node's agent; None if it does not export metrics."""
    address, port = node["NodeManagerAddress"], node["MetricsExportPort"]
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}/metrics" if port > 0 else None


async def gathered(urls: Sequence[str | None]) -> str:
    """Return the metrics at these URLs as one page. Nodes that do not answer are left out, and
    counted."""
    async with httpx.AsyncClient(timeout=NODE_TIMEOUT_S, trust_env=False) as client:
        pages = await asyncio.gather(*(_page(client, url) for url in urls))
    answered = [page for page in pages if page is not None]
    return await asyncio.to_thread(merged, answered, len(urls) - len(answered))


async def _page(client: httpx.AsyncClient, url: str | None) -> str | None:
    if url is None:
        return None
    try:
        response = await client.get(url)
        return response.raise_for_status().text
    except httpx.HTTPError:
        return None


def merged(pages: Iterable[str], missing: int = 0) -> str:
    """Merge several pages into one, with each metric once, and only our metrics and Serve's.

    Args:
        missing: number of nodes without a page, shown as the metric `raybert_nodes_missing`.
    """
    families: dict[str, list[str]] = {}
    for page in pages:
        name, known = "", False
        for line in page.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                known = name in families
                families.setdefault(name, [])
            if name.startswith(SHOWN) and not (known and line.startswith("#")):
                families[name].append(line if line.startswith("#") else _shortened(line))
    missing_metric = f"ray_{PREFIX}_nodes_missing"
    lines = [line for family in families.values() for line in family]
    lines += [
        f"# HELP {missing_metric} Nodes whose metrics this page lacks.",
        f"# TYPE {missing_metric} gauge",
    ]
    return "\n".join([*lines, f"{missing_metric} {missing}"]) + "\n"


def _shortened(sample: str) -> str:
    """Return a sample without the labels that carry no information."""
    start, end = sample.find("{"), sample.rfind("}")
    if start < 0:
        return sample
    labels = [
        f'{name}="{value}"'
        for name, value in _LABEL.findall(sample[start + 1 : end])
        if not HIDDEN.fullmatch(name)
    ]
    return f"{sample[:start]}{{{','.join(labels)}}}{sample[end + 1 :]}"
