"""The server as a user runs it: Ray Serve behind HAProxy, real models, real HTTP."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from bert_core.errors import ResourceError
from bert_core.predictor import Predictor
from serve.config import ServeConfig
from serve.ports import free_ports

pytestmark = pytest.mark.ray

TEXTS = [" ".join(["array socket port string JSON object fox dog"] * (1 + n % 5)) for n in range(9)]


@pytest.fixture(scope="module")
def server(local_ray: None, bundle: Path) -> Iterator[ServeConfig]:
    """Two models behind a front, for all tests of this module."""
    from serve import app

    (port,) = free_ports(1)
    config = ServeConfig(models=[f"docs={bundle}", f"other={bundle}"], port=port)
    app.check(config)
    try:
        app.deploy(config)
        yield config
    finally:
        app.shut_down()


@pytest.fixture
def client(server: ServeConfig) -> Iterator[httpx.Client]:
    url = f"http://127.0.0.1:{server.port}"
    with httpx.Client(base_url=url, timeout=30, follow_redirects=True) as client:
        yield client


def assert_same_answers(came: list[Any], wanted: list[Any]) -> None:
    for answer, expected in zip(came, wanted, strict=True):
        assert [each["label"] for each in answer] == [each["label"] for each in expected]
        scores = [each["score"] for each in answer]
        np.testing.assert_allclose(scores, [each["score"] for each in expected], atol=1e-6)


def test_every_model_answers_at_its_own_path(client: httpx.Client, bundle: Path) -> None:
    wanted = Predictor(bundle, device="cpu").predict(TEXTS)
    for name in ("docs", "other"):
        response = client.post(f"/v1/models/{name}/predict", json={"inputs": TEXTS})
        assert response.status_code == 200
        assert_same_answers(response.json(), wanted)


def test_the_inference_client_of_hugging_face_works(server: ServeConfig, bundle: Path) -> None:
    url = f"http://127.0.0.1:{server.port}/v1/models/docs/predict"
    client = InferenceClient(model=url)
    answer = client.text_classification(TEXTS[0], top_k=2)
    wanted = Predictor(bundle, device="cpu").predict(TEXTS[:1])[0][:2]
    assert_same_answers([[vars(each) for each in answer]], [wanted])
    with pytest.raises(HfHubHTTPError, match="top_k = 0: wanted at least 1"):
        client.text_classification(TEXTS[0], top_k=0)


def test_concurrent_requests_get_their_own_answers(server: ServeConfig, bundle: Path) -> None:
    texts = [f"{TEXTS[n % 9]} {n}" for n in range(200)]
    url = f"http://127.0.0.1:{server.port}/v1/models/docs/predict"

    async def ask() -> list[Any]:
        async with httpx.AsyncClient(timeout=60) as client:

            async def one(text: str) -> Any:
                return (await client.post(url, json={"inputs": text})).json()[0]

            return await asyncio.gather(*map(one, texts))

    assert_same_answers(asyncio.run(ask()), Predictor(bundle, device="cpu").predict(texts))


def test_the_front_lists_the_models_and_serves_the_page(client: httpx.Client) -> None:
    listing = client.get("/v1/models").json()
    assert [each["id"] for each in listing["data"]] == ["docs", "other"]
    for each in listing["data"]:
        assert each["card"] == client.get(f"/v1/models/{each['id']}").json()
        assert each["card"]["task"] == "text-classification"
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "<title>raybert</title>" in page.text


@pytest.mark.parametrize("prefix", ["", "/v1/models/docs", "/v1/models/other"])
def test_health_and_readiness_answer_everywhere(client: httpx.Client, prefix: str) -> None:
    for path, status in (("healthz", "ok"), ("readyz", "ready")):
        response = client.get(f"{prefix}/{path}")
        assert (response.status_code, response.json()) == (200, {"status": status})


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "the body: wanted a JSON object, it is empty"),
        (b"a text", 400, "it is not JSON"),
        (b'{"parameters": {}}', 422, 'wanted the key "inputs", it is missing'),
        (b'{"inputs": 7}', 422, "wanted a text or a list of texts, got a number (7)"),
        (b'{"inputs": []}', 422, "wanted at least one text, got an empty list"),
        (b'{"inputs": ["a", null]}', 422, "inputs[1]: wanted a text, got null"),
        (b'{"inputs": "a", "parameters": {"topk": 1}}', 422, "did you mean top_k?"),
    ],
)
def test_a_bad_request_is_told_why(
    client: httpx.Client, body: bytes, status: int, message: str
) -> None:
    response = client.post("/v1/models/docs/predict", content=body)
    assert response.status_code == status
    assert message in response.json()["error"]


def test_an_unknown_model_is_a_404_that_names_those_there_are(client: httpx.Client) -> None:
    for response in (
        client.post("/v1/models/dogs/predict", json={"inputs": "a"}),
        client.get("/v1/models/dogs"),
    ):
        assert response.status_code == 404
        message = 'there is no model "dogs": those served here are docs, other'
        assert response.json() == {"error": message, "error_type": "not_found"}


def test_openapi_is_served_by_each_model_and_the_front(client: httpx.Client) -> None:
    spec = client.get("/v1/models/docs/openapi.json").json()
    body = spec["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]
    assert set(body["schema"]["properties"]) == {"inputs", "parameters"}
    assert spec["servers"] == [{"url": "/v1/models/docs"}]
    assert "/v1/models/docs/openapi.json" in client.get("/v1/models/docs/docs").text
    assert "/v1/models" in client.get("/openapi.json").json()["paths"]


def test_requests_are_taken_on_the_given_host_only(server: ServeConfig) -> None:
    # Every address of 127/8 is this machine: what listens on all interfaces would answer.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), timeout=5)


def test_a_second_server_is_refused_before_anything_is_deployed(server: ServeConfig) -> None:
    from serve import app

    with pytest.raises(ResourceError, match=f"port {server.port} on 127.0.0.1: .*haproxy.*listens"):
        app.check(server)
    (port,) = free_ports(1)
    with pytest.raises(ResourceError, match="runs Ray Serve already"):
        app.check(ServeConfig(models=server.models, port=port))
