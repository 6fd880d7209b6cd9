"""Behind HAProxy on a joined cluster, only what came through it is answered."""

import asyncio
import hmac
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from serve.cluster import haproxy
from serve.cluster.applications import asks_for_pass
from serve.cluster.haproxy_launcher import rewritten
from serve.cluster.pass_of_proxy import HEADER, REQUIRED, ThroughProxy, pass_of_proxy
from serve.config import ServeConfig

TOKEN = {REQUIRED: "1", "RAY_AUTH_TOKEN": "secret"}


async def names_of_headers(scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse([*Request(scope).headers])(scope, receive, send)


def asked(path: str, headers: list[tuple[str, str]]) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(ThroughProxy(names_of_headers, "abc"))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(path, headers=headers, json={"inputs": "a"})

    return asyncio.run(ask())


def test_requests_through_the_proxy_are_answered_and_the_pass_is_hidden() -> None:
    response = asked("/v1/models/docs", [(HEADER, "abc")])
    assert response.status_code == 200
    assert HEADER not in response.json()
    assert "content-type" in response.json()


@pytest.mark.parametrize(
    "headers",
    [[], [(HEADER, "")], [(HEADER, "abd")], [(HEADER, "abc"), (HEADER, "abc")]],
    ids=["none", "empty", "wrong", "doubled"],
)
def test_requests_that_bypass_the_proxy_are_refused_but_for_its_health_checks(
    headers: list[tuple[str, str]],
) -> None:
    """RFC 9110, 15.5.20: 421 where a request was sent to a server that is not for it."""
    response = asked("/v1/models/docs", headers)
    assert (response.status_code, response.json()["error_type"]) == (421, "misdirected")
    assert response.headers["Connection"] == "close"
    assert asked("/-/healthz", headers).status_code == 200


def test_a_websocket_past_it_is_closed_before_it_is_accepted() -> None:
    """ASGI, websocket 2.4: closed before it is accepted, it is answered by 403."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/models/docs", "headers": []}
    asyncio.run(ThroughProxy(names_of_headers, "abc")(scope, receive, send))
    assert sent == [{"type": "websocket.close"}]


def test_the_pass_is_derived_from_rays_token_without_revealing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shown = pass_of_proxy(TOKEN)
    assert shown is not None
    assert shown != pass_of_proxy(TOKEN | {"RAY_AUTH_TOKEN": "other"})
    assert "secret" not in shown
    assert shown != hmac.new(b"secret", b"", "sha256").hexdigest()
    (tmp_path / "token").write_text("secret\n")  # as Ray reads it, without white space
    assert pass_of_proxy({REQUIRED: "1", "RAY_AUTH_TOKEN_PATH": f"{tmp_path}/token"}) == shown
    assert pass_of_proxy({REQUIRED: "1"}) is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert pass_of_proxy({REQUIRED: "1"}) == shown
    assert pass_of_proxy({"RAY_AUTH_TOKEN": "secret"}) is None  # replicas stand on this machine


@pytest.fixture
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Ray's mode of authentication, as this process has it."""
    from ray._raylet import Config  # type: ignore[attr-defined]  # compiled, and no stub

    with monkeypatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", request.param)
        Config.initialize("")  # Ray reads the variable once
        yield request.param
    Config.initialize("")


@pytest.mark.parametrize(
    ("mode", "asks"), [("token", True), ("disabled", False)], indirect=["mode"]
)
def test_a_pass_is_asked_for_only_on_a_cluster_that_requires_its_token(
    mode: str, asks: bool
) -> None:
    """A node of any other cluster may have a token by chance, such as that of another cluster in
    ~/.ray/auth_token, which the other nodes do not have."""
    assert asks_for_pass(ServeConfig(models="docs=x")) is asks
    settings = haproxy.settings(enabled=True, asks_for_pass=asks)
    shown = pass_of_proxy(settings | {"RAY_AUTH_TOKEN": "of another cluster"})
    assert (shown is not None) is asks


def test_the_proxy_replaces_a_pass_that_clients_send() -> None:
    config = "global\ndefaults\nfrontend http_frontend\n    bind *:8000\n"
    line = f"http-request set-header {HEADER} abc"
    assert line in rewritten(config, Path("/tmp/a"), shown="abc")
    assert HEADER not in rewritten(config, Path("/tmp/a"))
