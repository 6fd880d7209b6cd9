"""What is recorded and logged of requests: to a recorder that keeps it, over real HTTP."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from serve.http.app import LocalModel, create_front_app, create_model_app
from serve.http.asgi_call import call
from serve.http.routes.base import headers_to_model
from serve.http.routes.front import PROMETHEUS
from serve.model.card import Card, Response, ServedModel
from serve.model.model import Model
from serve.observe.records import NONE, Recorder, RequestRecord, Snapshot
from serve.request import auth
from serve.request.limits import Limits
from serve.surfaces.catalog import SURFACES
from serve.versions.slot import Slot
from tests.serve import live

MARKER = "zyxmarker"
LARGE = b'{"inputs": "' + b"a " * 999 + b'"}'
"""A word that is in every text, parameter and path of a request."""


class Kept(Recorder):
    """Keeps all that it is told."""

    def __init__(self) -> None:
        self.requests: list[RequestRecord] = []
        self.passes: list[dict[str, Any]] = []
        self.switches: list[tuple[str, str]] = []
        self.looks: list[Callable[[], Snapshot]] = []

    def finished(self, request: RequestRecord) -> None:
        self.requests.append(request)

    def passed(self, model: str, version: str, **sizes: Any) -> None:
        self.passes.append({"model": model, "version": version, **sizes})

    def rolled_over(self, model: str, version: str, change: str | None = None) -> None:
        self.switches.append((model, version))

    def watch(self, look: Callable[[], Snapshot]) -> None:
        self.looks.append(look)

    def last(self, count: int) -> RequestRecord:
        """The newest of so many requests: a response comes before it is recorded."""
        live.eventually(lambda: len(self.requests) >= count, 10, every_s=0.005)
        return self.requests[-1]


@contextmanager
def served(
    folder: Path, keys: auth.Keys | None = None, **settings: Any
) -> Iterator[tuple[httpx.Client, Kept]]:
    """A front with one model, and what is recorded."""
    kept = Kept()
    slot = Slot(live.loaded("docs", folder, recorder=kept, **settings), kept)

    async def metrics() -> str:
        return "metrics 1\n"

    models = {"docs": LocalModel(slot, keys)}
    app = create_front_app(models, None, keys, kept, metrics)
    with live.running(app) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client, kept


def test_a_request_is_recorded_once_with_what_it_took(bundle: Path) -> None:
    with served(bundle, version="3") as (client, kept):
        for number, path in enumerate(("/predict", "/v1/models/docs/predict"), 1):
            response = client.post(path, json={"inputs": ["Parse a string.", "Open a port."]})
            assert response.status_code == 200, response.text
            record = kept.last(number)
            assert (record.model, record.version, record.surface) == ("docs", "3", "tei")
            assert (record.method, record.status, record.error_type) == ("POST", 200, None)
            assert record.route.endswith("/predict")
            assert record.spent is not None
            assert record.spent.tokens == int(response.headers["X-Tokens"])
            spent_s = record.spent.tokenize_s + record.spent.queue_s + record.spent.compute_s
            assert 0 < spent_s <= record.total_s
        assert len(kept.requests) == 2


def test_a_pass_is_recorded_with_its_padding(bundle: Path) -> None:
    with served(bundle, max_batch_tokens=64) as (client, kept):
        (look,) = kept.looks
        version = look().version
        assert look().digest.startswith(version)
        assert len(version) == 12
        client.post("/predict", json={"inputs": "Parse a string."})
        (only,) = kept.passes
        assert (only["model"], only["version"]) == ("docs", version)
        assert only["tokens"] == kept.last(1).spent.tokens  # type: ignore[union-attr]
        assert only["computed"] % 8 == 0 or only["computed"] == only["tokens"]
        assert only["tokens"] <= only["computed"] < only["tokens"] + 8
        assert only["fill"] == -(-only["tokens"] // 8) * 8 / 64


@pytest.mark.parametrize(
    ("method", "path", "body", "wanted"),
    [
        ("POST", "/predict", b"{", (400, "not_json", "tei", NONE)),
        ("POST", "/", b'{"inputs": 7}', (422, "invalid_request", "huggingface", "docs")),
        ("POST", "/embed", b'{"inputs": "a"}', (422, "wrong_task", "tei", NONE)),
        ("POST", "/predict", b'{"inputs": "a", "model": "x"}', (404, "not_found", "tei", NONE)),
        ("GET", f"/{MARKER}", b"", (404, "not_found", NONE, NONE)),
        ("POST", f"/v1/models/{MARKER}/x", b"", (404, "not_found", NONE, NONE)),
        ("DELETE", "/predict", b"", (405, "method_not_allowed", NONE, NONE)),
        ("POST", "/predict", LARGE, (413, "too_large", "tei", "docs")),
    ],
)  # fmt: skip
def test_a_refusal_is_recorded_with_its_class_and_without_what_was_sent(
    bundle: Path, method: str, path: str, body: bytes, wanted: tuple[Any, ...]
) -> None:
    with served(bundle, limits=Limits(max_body_bytes=1000)) as (client, kept):
        headers = {"Content-Type": "application/json"}
        response = client.request(method, path, content=body, headers=headers)
        record = kept.last(1)
        assert response.status_code == wanted[0]
        assert (record.status, record.error_type, record.surface, record.model) == wanted
        assert MARKER not in str(record)


def test_probes_and_metrics_are_not_counted(bundle: Path) -> None:
    paths = ["/healthz", "/readyz", "/metrics"]
    asked = ["/health", "/ping", "/v2/health/live", "/v2/health/ready"]
    with served(bundle) as (client, kept):
        for path in [*paths, *asked, *(f"/v1/models/docs{each}" for each in ["/readyz", *asked])]:
            assert client.get(path).status_code == 200, path
        client.post("/predict", json={"inputs": "a"})
        kept.last(1)
        assert [record.route for record in kept.requests] == ["/predict"]
        client.get("/v2")
        record = kept.last(2)
        assert (record.route, record.surface) == ("/v2", "open_inference")


def test_head_is_recorded_as_get(bundle: Path) -> None:
    with served(bundle) as (client, kept):
        assert client.head("/v1/models").status_code == 200
        assert kept.last(1).method == "GET"


def test_metrics_need_a_key_where_the_server_asks_for_one(bundle: Path) -> None:
    key, stored = auth.create("prometheus")
    with served(bundle, auth.Keys([stored])) as (client, _):
        assert client.get("/metrics").status_code == 401
        response = client.get("/metrics", headers={"Authorization": f"Bearer {key}"})
        assert response.text == "metrics 1\n"
        assert response.headers["content-type"] == PROMETHEUS


class _Slow(Model):
    def _forward(self, windows: Any) -> Any:
        time.sleep(1)
        return super()._forward(windows)


def test_a_request_whose_client_disconnects_is_recorded_once_as_cancelled(bundle: Path) -> None:
    kept = Kept()
    model = _Slow("docs", bundle, device="cpu", threads=1, max_batch_tokens=256, max_wait_ms=1.0)
    models = {"docs": LocalModel(Slot(model, kept))}
    app = create_front_app(models, None, None, kept)

    async def go_away() -> None:
        asked = call(app, "POST", "/predict", [], b'{"inputs": "a"}')
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asked, 0.3)
        await model.close()

    asyncio.run(go_away())
    (record,) = kept.requests
    assert (record.model, record.status, record.error_type) == ("docs", 499, "cancelled")


@pytest.mark.parametrize("is_refused", [True, False])
def test_parts_that_are_dropped_are_not_recorded_as_if_their_clients_had_gone(
    bundle: Path, is_refused: bool
) -> None:
    kept = Kept()
    slow = _Slow("docs", bundle, device="cpu", threads=1, max_batch_tokens=256, max_wait_ms=1.0)
    few = live.loaded("few", bundle, limits=Limits(max_inputs=8))
    models = {model.name: LocalModel(Slot(model, kept)) for model in (slow, few)}
    app = create_front_app(models, None, None, kept)
    body = {"models": [*models], "inputs": ["a"] * (9 if is_refused else 1)}

    async def ask() -> None:
        asked = call(app, "POST", "/v1/predict", [], json.dumps(body).encode())
        if is_refused:
            assert (await asked).status == 413
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asked, 0.3)
        await asyncio.gather(slow.close(), few.close())

    asyncio.run(ask())
    recorded = sorted((each.model, each.status, each.error_type) for each in kept.requests)
    assert recorded == (
        [("docs", 424, "dropped"), ("few", 413, "too_large")]
        if is_refused
        else [(NONE, 499, "cancelled"), ("docs", 424, "dropped"), ("few", 424, "dropped")]
    )


class _Gone(ServedModel):
    """A model whose process has ended."""

    async def tasks(self) -> Sequence[str]:
        return ("text-classification",)

    async def card(self) -> Card:
        raise ConnectionError(MARKER)

    async def check_ready(self) -> None:
        raise ConnectionError(MARKER)

    async def request(self, *request: Any) -> Response:
        raise ConnectionError(MARKER)


def test_a_client_cannot_pass_its_request_off_as_a_part_of_another() -> None:
    headers = [(b"x-part", b"1"), (b"x-request-id", b"a"), (b"content-encoding", b"gzip")]
    request = Request({"type": "http", "headers": headers})
    assert headers_to_model(request) == [("x-request-id", "a")]


def test_a_request_that_cannot_be_passed_on_is_recorded_by_the_front(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = Kept()
    app = create_front_app({"docs": _Gone()}, None, None, kept)
    with live.running(app) as url:
        assert httpx.post(f"{url}/predict", json={"inputs": "a"}).status_code == 500
        record = kept.last(1)
        assert httpx.get(f"{url}/readyz").status_code == 503
        assert httpx.get(f"{url}/v1/models/docs").status_code == 500  # no surface's
        assert kept.last(2).surface == NONE
    assert (record.model, record.version, record.error_type) == ("docs", NONE, "internal")
    assert "builtins.ConnectionError" in caplog.text
    assert MARKER not in caplog.text


def test_a_switch_of_versions_is_recorded_and_the_new_one_is_watched(bundle: Path) -> None:
    kept = Kept()
    slot = Slot(live.loaded("docs", bundle, version="1"), kept)
    slot.switch(live.loaded("docs", bundle, version="2"))
    slot.set_problem("model", "version 3 is not served")
    assert kept.switches == [("docs", "2")]
    (look,) = kept.looks
    state = look()
    assert (state.version, state.has_problem, state.queue_tokens) == ("2", True, 0)


def test_a_request_is_one_line_of_the_log_with_its_id(
    bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served(bundle) as (client, kept), caplog.at_level(logging.INFO, "ray.serve"):
        headers = {"X-Request-ID": "mine-7 POST /x 500"}
        client.post("/predict", json={"inputs": "Parse a string."}, headers=headers)
        kept.last(1)
        lines = [record for record in caplog.records if record.name == "ray.serve"]
        (line,) = lines
        values = vars(line)
        assert values["request_id"] == "mine-7_POST_/x_500"  # no blank, so no part of another line
        assert (values["method"], values["status"], values["model"]) == ("POST", 200, "docs")
        assert {"version", "surface", "tokens", "tokenize_ms", "queue_ms", "compute_ms"} <= set(
            values
        )
        assert line.getMessage().startswith("POST /predict 200 model=docs version=")


class _Fails(Model):
    """A model whose passes fail with a message that has the text."""

    def _forward(self, windows: Any) -> Any:
        raise RuntimeError(f"{MARKER} is what was sent") from ValueError(MARKER)


@pytest.mark.parametrize("surface", [surface.name for surface in SURFACES])
def test_a_failing_model_is_logged_without_the_message(
    surface: str, bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = _Fails("docs", bundle, device="cpu", threads=1, max_batch_tokens=256, max_wait_ms=1.0)
    path, body = {
        "huggingface": ("/", {"inputs": MARKER}),
        "invocations": ("/invocations", {"inputs": [MARKER]}),
        "open_inference": (
            "/v2/models/docs/infer",
            {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [MARKER]}]},
        ),
    }.get(surface, ("/predict", {"inputs": MARKER}))
    app = create_model_app(Slot(model), alone=True)
    with live.running(app) as url:
        response = httpx.post(url + path, content=json.dumps(body), timeout=30)
    assert response.status_code == 503, response.text
    assert "RuntimeError" in caplog.text
    assert "ValueError" in caplog.text
    assert "_forward" in caplog.text  # where it happened
    assert MARKER not in caplog.text.replace('raise RuntimeError(f"{MARKER} is', "")
