"""What a caller may ask for, against a live server: limits, deadlines, odd bodies."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bert_core.errors import ConfigError, FormatError
from bert_core.inference.predictor import Predictor
from bert_core.tasks.zero_shot_classification import ZeroShotParameters
from serve.request.body import DEADLINE
from serve.request.errors import DeadlineError
from serve.request.limits import Limits
from tests.serve import live

LIMITS = Limits(
    max_body_bytes=20_000,
    max_inputs=50,
    max_request_tokens=2_048,
    max_queue_tokens=2_048,
    max_top_k=10,
    body_timeout_s=1.5,
    max_receiving=3,
)
LONG = "open a socket and listen on a port " * 8  # some 100 tokens, padding included


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[str]:
    with live.served(bundle, limits=LIMITS) as url:
        yield url


def post(url: str, content: Any, **headers: str) -> httpx.Response:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    usual = {"Content-Type": "application/json"}
    return httpx.post(url, content=body, headers=usual | headers, timeout=60)


def assert_still_answers(url: str) -> None:
    assert post(url, {"inputs": "a fox"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"inputs": "x" * 30_000}, "the body: wanted at most 20000 bytes, got 30"),
        ({"inputs": ["a"] * 51}, "inputs: wanted at most 50 per request, got 51"),
        ({"inputs": [LONG] * 30}, "inputs: wanted at most 2048 tokens per request, got"),
        ({"inputs": "a", "parameters": {"top_k": 11}}, "top_k: wanted at most 10, got 11"),
    ],
)
def test_a_request_beyond_a_limit_is_refused(server: str, body: Any, message: str) -> None:
    response = post(server, body)
    assert response.status_code == 413
    assert message in response.json()["error"]
    assert response.json()["error_type"] == "too_large"
    assert_still_answers(server)


def test_a_body_without_a_declared_length_is_limited_too(server: str) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 1_000

    response = httpx.post(
        server, content=parts(), headers={"Content-Type": "application/json"}, timeout=30
    )
    assert response.status_code == 413
    assert_still_answers(server)


def test_long_lists_in_inputs_and_parameters_are_refused(bundles: dict[str, Path]) -> None:
    labels = [f"label {number}" for number in range(3_000)]
    requests = {
        "nli": {"inputs": "a", "parameters": {"candidate_labels": labels}},
        "feature-extraction": {"inputs": {"source_sentence": "a", "sentences": labels}},
    }
    for name, body in requests.items():
        with live.served(bundles[name]) as url:
            response = post(url, body)
            assert response.status_code == 413
            assert "in all lists of a request, got 3000" in response.json()["error"]
    with live.served(bundles["token-classification"]) as url:
        assert post(url, {"inputs": {"tokens": ["word"] * 3_000}}).status_code == 200


def test_labels_of_many_texts_are_counted_before_they_are_tokenized(
    bundles: dict[str, Path],
) -> None:
    labels = [f"label {number}" for number in range(900)]
    with live.served(bundles["nli"]) as url:
        response = post(url, {"inputs": ["a"] * 900, "parameters": {"candidate_labels": labels}})
        assert response.status_code == 413
        assert "tokens per request, got at least 6480000" in response.json()["error"]
        body = {"inputs": ["a"] * 2, "parameters": {"candidate_labels": labels[:2]}}
        assert post(url, body).status_code == 200


@pytest.mark.parametrize(
    ("texts", "labels", "thread"), [(1, 2, "MainThread"), (1, 600, "texts_0"), (60, 9, "texts_0")]
)
def test_many_labels_are_not_tokenized_on_the_event_loop(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch, texts: int, labels: int, thread: str
) -> None:
    model = live.loaded("nli", bundles["nli"])
    predictor = model.predictor_for("zero-shot-classification")
    encode, threads = predictor.encode, set()

    def observed(rows: Any, parameters: Any) -> Any:
        threads.add(threading.current_thread().name)
        return encode(rows, parameters)

    monkeypatch.setattr(predictor, "encode", observed)
    named = [f"label {number}" for number in range(labels)]
    parameters = ZeroShotParameters(candidate_labels=named)
    answers = asyncio.run(model.predict(["a"] * texts, parameters, predictor.task.name))
    assert [len(answer) for answer in answers] == [labels] * texts
    assert threads == {thread}


def test_the_candidates_of_all_masks_are_limited(bundles: dict[str, Path]) -> None:
    with live.served(bundles["fill-mask"]) as url:
        body = {"inputs": ["[MASK] " * 60], "parameters": {"top_k": 100}}
        response = post(url, body)
        assert response.status_code == 413
        assert "at most 5000 candidates for the masks of a request, got 6000" in response.text
        assert post(url, body | {"parameters": {"top_k": 2}}).status_code == 200


def test_the_numbers_of_an_answer_are_limited(bundles: dict[str, Path]) -> None:
    """Vectors per token, and sparse vectors, which may have an entry for all of the vocabulary."""
    limits = Limits(max_numbers=3_000)
    told = "wanted an answer of at most 3000 numbers, their vectors have"
    with live.served(bundles["feature-extraction"], limits=limits) as url:
        response = post(f"{url}/embed_all", {"inputs": [LONG] * 5})
        assert (response.status_code, told in response.text) == (413, True)
        assert post(f"{url}/embed_all", {"inputs": "a fox"}).status_code == 200
        assert post(f"{url}/embed", {"inputs": [LONG] * 5}).status_code == 200
        assert post(f"{url}/invocations", {"inputs": [LONG] * 5}).status_code == 200
    with live.served(bundles["sparse-embedding"], limits=limits) as url:
        for path, status in (("", 413), ("/embed_sparse", 413), ("/invocations", 400)):
            response = post(f"{url}{path}", {"inputs": [LONG] * 50})
            assert (response.status_code, told in response.text) == (status, True)
        few = {"inputs": [LONG] * 50, "parameters": {"top_k": 10}}
        assert post(url, few).status_code == 200
        assert post(f"{url}/embed_sparse", {"inputs": LONG}).status_code == 200


def test_an_answer_that_repeats_its_passage_is_limited(bundles: dict[str, Path]) -> None:
    """Long words are few tokens, and each answer has its part of them again."""
    asked = {"question": "a", "context": " ".join(["x" * 1_000] * 20)}
    wide = {"top_k": 100, "max_answer_len": 20}
    tensors = [
        {"name": name, "shape": [20], "datatype": "BYTES", "data": [text] * 20}
        for name, text in asked.items()
    ]
    limits = Limits(max_answer_bytes=100_000)
    with live.served(bundles["question-answering"], limits=limits) as url:
        answers = post(url, {"inputs": asked, "parameters": wide | {"top_k": 1}})
        assert answers.status_code == 200
        for path, body in (
            ("", {"inputs": asked, "parameters": wide}),
            ("/invocations", {"inputs": [asked], "params": wide}),
            ("/v2/models/own/infer", {"inputs": tensors}),
        ):
            response = post(f"{url}{path}", body)
            assert response.status_code in (400, 413)
            assert "wanted an answer of at most 100000 bytes, it has " in response.text


def test_a_body_that_does_not_arrive_times_out(server: str) -> None:
    host, port = server.removeprefix("http://").split(":")
    head = "POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99"
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(f"{head}\r\n\r\nhello".encode())
        reply = connection.recv(4096)
    assert reply.startswith(b"HTTP/1.1 408")
    assert b"wanted all of it within 1.5 s, got 5 bytes" in reply


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_content_types_that_any_web_page_may_post_are_refused(server: str, kind: str) -> None:
    response = post(server, {"inputs": "a"}, **{"Content-Type": kind})
    assert response.status_code == 415
    assert "wanted application/json" in response.json()["error"]
    assert "access-control-allow-origin" not in response.headers


def test_a_full_queue_refuses_at_once_and_the_rest_is_answered(server: str, bundle: Path) -> None:
    async def ask(client: httpx.AsyncClient, number: int) -> httpx.Response:
        return await client.post(server, json={"inputs": [f"{LONG} {number}"] * 8})

    async def scenario() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(80)))

    responses = asyncio.run(scenario())
    by_status: dict[int, list[int]] = {}
    for number, response in enumerate(responses):
        by_status.setdefault(response.status_code, []).append(number)
    assert set(by_status) == {200, 429}
    for number in by_status[429]:
        assert int(responses[number].headers["Retry-After"]) >= 1
        assert responses[number].json()["error_type"] == "overloaded"
    wanted = Predictor(bundle, device="cpu").predict([f"{LONG} {by_status[200][0]}"])
    answer = responses[by_status[200][0]].json()[0]
    assert [each["label"] for each in answer] == [each["label"] for each in wanted[0]]
    assert_still_answers(server)


def test_late_work_is_dropped(bundle: Path) -> None:
    model = live.loaded("own", bundle)

    async def scenario() -> int:
        with pytest.raises(DeadlineError, match=r"wanted an answer within 0\.2 s"):
            await model.answer([LONG] * 400, None, deadline_s=0.2)
        waiting = model.waiting_tokens
        await model.close()
        return waiting

    assert asyncio.run(scenario()) == 0


def test_a_requests_own_deadline_counts(bundle: Path) -> None:
    with live.served(bundle) as url:
        body = {"inputs": [LONG] * 1500}
        response = post(url, body, **{DEADLINE: "50"})
        assert response.status_code == 504
        assert response.json()["error_type"] == "deadline_exceeded"
        assert_still_answers(url)
        for odd in ("0", "soon", "-5", "1.5"):
            response = post(url, {"inputs": "a"}, **{DEADLINE: odd})
            assert response.status_code == 422
            assert "wanted a whole number of milliseconds" in response.json()["error"]


def test_a_replica_serves_the_bundle_that_was_deployed_or_none(bundle: Path) -> None:
    digest = Predictor(bundle, device="cpu").bundle.digest
    model = live.loaded("own", bundle, digest=digest)
    asyncio.run(model.close())
    with pytest.raises(FormatError, match="wanted the bundle 000000000000, with which own was"):
        live.loaded("own", bundle, digest="0" * 64)


def test_limits_are_checked_when_they_are_set() -> None:
    with pytest.raises(ConfigError, match="max_inputs: wanted at least 1, got 0"):
        Limits(max_inputs=0)


def test_slow_senders_make_room_for_others(bundle: Path) -> None:
    limits = Limits(max_receiving=3)  # and time enough
    with live.served(bundle, limits=limits) as url:
        host, port = url.removeprefix("http://").split(":")
        head = f"POST / HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        opened = []
        for number in range(4):
            connection = socket.create_connection((host, int(port)), timeout=20)
            connection.sendall(f'{head}Content-Length: 40\r\n\r\n{{"inputs": '.encode())
            opened.append(connection)
            assert_still_answers(url)  # by then the beginning of this body has been read
            if number == 3:
                assert opened[0].recv(4096).startswith(b"HTTP/1.1 408")
        for connection in opened[1:]:
            connection.sendall(b'"a fox"' + b" " * 21 + b"}")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        for connection in opened:
            connection.close()
