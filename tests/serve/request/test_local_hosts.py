"""A server that listens on this machine only is not called by a web page's own name."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serve.config import ServeConfig
from serve.http.app import LocalModel, create_front_app, create_model_app
from serve.request.local_hosts import is_loopback
from serve.versions.slot import Slot
from tests.serve import live

HERE = ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:8000", "[::1]:9", "[::1]"]
ELSEWHERE = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example:80",
    "localhost:80.evil.example",
    "localhost@evil.example",
    "[::2]",
    "192.0.2.1:8000",
    "0.0.0.0:8000",
]


@pytest.fixture(scope="module")
def local(bundle: Path) -> Iterator[str]:
    models = {"own": LocalModel(Slot(live.loaded("own", bundle)))}
    with live.running(create_front_app(models, local_only=True)) as url:
        yield url


@pytest.fixture(scope="module")
def alone(bundle: Path) -> Iterator[str]:
    slot = Slot(live.loaded("own", bundle))
    with live.running(create_model_app(slot, alone=False, local_only=True)) as url:
        yield url


@pytest.mark.parametrize("app", ["local", "alone"])
@pytest.mark.parametrize("host", HERE)
def test_names_of_this_machine_are_answered(
    app: str, host: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(app)
    response = httpx.post(url, json={"inputs": "a"}, headers={"Host": host}, timeout=30)
    assert response.status_code == 200


@pytest.mark.parametrize("app", ["local", "alone"])
@pytest.mark.parametrize("host", ELSEWHERE)
def test_other_names_are_refused_whatever_is_asked(
    app: str, host: str, request: pytest.FixtureRequest
) -> None:
    url, headers = request.getfixturevalue(app), {"Host": host}
    responses = [
        httpx.post(url, json={"inputs": "a"}, headers=headers, timeout=30),
        *(
            httpx.get(f"{url}{path}", headers=headers, timeout=30)
            for path in ("/", "/healthz", "/v1/models", "/openapi.json", "/docs", "/nothing")
        ),
    ]
    for response in responses:
        assert response.status_code == 421
        error = response.json()
        assert error["error_type"] == "misdirected"
        assert error["error"].startswith("Host: wanted localhost or 127.0.0.1, since this server")
        assert host in error["error"]


def test_any_name_is_answered_where_the_server_is_reached_from_elsewhere(bundle: Path) -> None:
    with live.served(bundle) as url:
        headers = {"Host": "models.example"}
        assert httpx.post(url, json={"inputs": "a"}, headers=headers, timeout=30).is_success


def test_only_the_addresses_of_this_machine_are_local() -> None:
    assert is_loopback(ServeConfig.host)
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("192.0.2.1")
