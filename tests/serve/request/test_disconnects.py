"""Work for clients that close their connection is dropped before it is computed."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.http.app import LocalModel, create_front_app, create_model_app
from serve.model.model import Model
from serve.versions.slot import Slot
from tests.serve import live

LONG = "open a socket and listen on a port " * 8  # some 100 tokens
INPUTS = 1_500  # 750 passes of two texts


@pytest.fixture
def model(bundle: Path) -> Model:
    return live.loaded("own", bundle)


@pytest.fixture
def passes(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many windows each pass has had."""
    sizes: list[int] = []
    forward = model.predictor.forward

    def counted(windows: Any) -> Any:
        sizes.append(len(windows))
        return forward(windows)

    monkeypatch.setattr(model.predictor, "forward", counted)
    return sizes


@contextmanager
def asked(url: str, body: Any) -> Iterator[socket.socket]:
    """A connection by which a request has been sent; closed at the end."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST / HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head.encode() + content)
        yield connection


def eventually(holds: Callable[[], bool]) -> None:
    __tracebackhide__ = True
    live.eventually(holds, 20, every_s=0.005)


@pytest.mark.parametrize("behind_a_front", [False, True])
def test_queued_work_of_a_closed_connection_is_dropped(
    model: Model, passes: list[int], *, behind_a_front: bool
) -> None:
    app = create_model_app(Slot(model), alone=True)
    if behind_a_front:
        app = create_front_app({"own": LocalModel(Slot(model))})
    with live.running(app) as url:
        with asked(url, {"inputs": [LONG] * INPUTS}):
            eventually(lambda: model.waiting_tokens > 0 and len(passes) > 1)
        eventually(lambda: model.waiting_tokens == 0)
        computed = sum(passes)
        assert computed < INPUTS / 2
        assert httpx.post(url, json={"inputs": "a"}, timeout=30).is_success
        assert sum(passes) - computed <= 3  # one that was under way, and the one just asked for


def test_others_are_answered_when_a_client_goes(model: Model, passes: list[int]) -> None:
    body = {"inputs": [LONG] * 40}
    with live.running(create_model_app(Slot(model), alone=True)) as url:
        wanted = httpx.post(url, json=body, timeout=60).json()
        with asked(url, body) as stays:
            with asked(url, {"inputs": [LONG] * INPUTS}):
                eventually(lambda: model.waiting_tokens > 0)
            reply = b""
            while not reply.endswith(b"]]"):
                part = stays.recv(1 << 20)
                assert part
                reply += part
        head, _, content = reply.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert len(json.loads(content)) == len(wanted)
    assert sum(passes) < INPUTS


def test_a_client_that_disconnects_before_sending_its_body_is_not_a_failure(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    for app in (
        create_model_app(Slot(model), alone=True),
        create_front_app({"own": LocalModel(Slot(model))}),
    ):
        with live.running(app) as url:
            host, port = url.removeprefix("http://").split(":")
            head = f"POST / HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                connection.sendall(f'{head}Content-Length: 99\r\n\r\n{{"inp'.encode())
                time.sleep(0.2)
            time.sleep(0.2)
            assert httpx.post(url, json={"inputs": "a"}, timeout=30).is_success
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
