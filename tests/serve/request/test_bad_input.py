"""What is no sensible input has its status and message on every surface, and costs nobody else."""

import json
import re
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.request import auth
from serve.request.auth import Keys
from tests.serve import live
from tests.serve.ways import CLASSES, RANKING, VECTORS, WAYS

JSON = {"Content-Type": "application/json"}
REFUSED: dict[str, tuple[bytes, int, str]] = {
    "token ids": (b"101, 7592", 422, "wanted texts?"),
    "lists of token ids": (b"[101, 7592]", 422, "wanted texts?"),
    "nothing": (b"null", 422, "wanted texts?"),
    "an object": (b'{"a": 1}', 422, "wanted|missing"),
    "deep nesting": (b"[" * 500 + b"]" * 500, 422, "wanted texts?"),
    "deeper nesting": (b"[" * 5_000 + b"]" * 5_000, 400, "it is not JSON"),
    "deep objects": (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, 400, "it is not JSON"),
    "invalid UTF-8": (b'"\xff"', 400, "it is not JSON"),
    "a line feed in a text": (b'"a\nb"', 400, "it is not JSON"),
    "too long a body": (b'"%s"' % (b"x" * (5 << 20)), 413, "the body: wanted at most 4194304"),
}
ANSWERED: dict[str, bytes] = {
    "NUL": b'"a\\u0000b"',
    "NUL alone": b'"\\u0000"',
    "an empty string": b'""',
    "white space": b'" \\n\\t"',
    "a surrogate pair": b'"\\ud83d\\ude00"',
    "no character": b'"\\uffff"',
}


@pytest.fixture(scope="module")
def server(bundles: dict[str, Path]) -> Iterator[str]:
    with live.fronted({name: bundles[name] for name in (CLASSES, VECTORS, RANKING)}) as url:
        yield url


def post(url: str, content: Any, **headers: str) -> httpx.Response:
    return httpx.post(url, content=content, headers=JSON | headers, timeout=60)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", REFUSED)
def test_values_that_are_not_texts_are_refused_with_status_and_message(
    server: str, way: str, what: str
) -> None:
    texts, status, message = REFUSED[what]
    surface = WAYS[way]
    response = post(f"{server}{surface.path}", surface.with_texts(texts))
    assert response.status_code == surface.status(status), response.text
    told = surface.message(response.json())
    assert re.search(message, told)
    assert len(told) < 600


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("half", [b"\\ud800", b"\\udfff", b"\xed\xa0\x80"])
def test_half_a_surrogate_pair_is_refused_by_name(server: str, way: str, half: bytes) -> None:
    surface = WAYS[way]
    response = post(f"{server}{surface.path}", surface.with_texts(b'"a%sb"' % half))
    assert response.status_code in (400, 422)
    assert "surrogate" in surface.message(response.json())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ANSWERED)
def test_an_odd_text_is_a_text(server: str, way: str, what: str) -> None:
    surface = WAYS[way]
    response = post(f"{server}{surface.path}", surface.with_texts(ANSWERED[what]))
    assert response.status_code == 200, response.text
    assert not re.search("nan|inf|null", response.text.replace("INF", ""), re.IGNORECASE)


@pytest.mark.parametrize("way", WAYS)
def test_a_hundred_thousand_inputs_are_refused(server: str, way: str) -> None:
    surface = WAYS[way]
    texts = b", ".join([b'"a"'] * 100_000)
    response = post(f"{server}{surface.path}", surface.with_texts(texts, 100_000))
    assert response.status_code == surface.status(413)
    told = surface.message(response.json())
    assert "inputs: wanted at most 2048 per request, got 100000" in told


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "the body: wanted a JSON object, it is empty"),
        (b"a text", 400, "it is not JSON"),
        (b"\xff\xfe\xfa", 400, "it is not JSON"),
        (b'{"inputs": NaN}', 400, "it is not JSON"),
        (b'{"parameters": {}}', 422, 'wanted the key "inputs", it is missing'),
        (b'{"inputs": 7}', 422, "inputs: wanted text, got a number (7)"),
        (b'{"inputs": []}', 422, "wanted at least one input, got an empty list"),
        (b'{"inputs": ["a", null]}', 422, "inputs[1]: wanted text, got nothing"),
        (b'{"inputs": [1, 2, 3]}', 422, "inputs[0]: wanted text, got a number (1)"),
        (b'{"inputs": "a", "parameters": {"topk": 1}}', 422, "did you mean top_k?"),
    ],
)
def test_a_bad_body_is_explained(server: str, body: bytes, status: int, message: str) -> None:
    response = post(f"{server}/v1/models/{CLASSES}", body)
    assert response.status_code == status
    assert message in response.json()["error"]


@pytest.mark.parametrize(
    "body", [b'{"inputs": "\\ud800"}', b'{"inputs": "\xff"}', b"", b"[]", b"NaN"]
)
@pytest.mark.parametrize("path", ["/tokenize", "/embed", "/v1/embeddings", "/invocations"])
def test_lines_that_are_not_json_objects_of_unicode_are_refused(
    server: str, path: str, body: bytes
) -> None:
    response = post(f"{server}{path}", body)
    assert response.status_code in (400, 422)


@pytest.mark.parametrize("depth", [10, 900, 950, 964, 965, 966, 967, 980, 2_000, 5_000])
@pytest.mark.parametrize(
    "form", ['{"inputs": %s}', '{"inputs": ["a", %s]}', '{"inputs": "a", "parameters": %s}', "%s"]
)
def test_nesting_is_refused_at_any_depth(server: str, depth: int, form: str) -> None:
    body = form % ("[" * depth + "]" * depth)
    response = post(f"{server}/v1/models/{CLASSES}", body.encode())
    assert response.status_code in (400, 422)
    assert len(response.json()["error"]) < 600


def test_inputs_are_counted_before_they_are_looked_at(server: str) -> None:
    surface = WAYS["huggingface"]
    response = post(f"{server}{surface.path}", surface.with_texts(b", ".join([b"7"] * 100_000)))
    assert response.status_code == 413


@pytest.mark.parametrize("way", WAYS)
def test_a_hundred_megabytes_are_refused_before_they_are_read(server: str, way: str) -> None:
    surface = WAYS[way]
    host, port = server.removeprefix("http://").split(":")
    head = f"POST {surface.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {100 << 20}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(f"{head}{{".encode())  # and no more
        reply = connection.recv(4096)
    assert reply.startswith(b"HTTP/1.1 %d" % surface.status(413))
    assert b"the body: wanted at most 4194304 bytes, got 104857600" in reply


@pytest.mark.guard
def test_a_hundred_megabytes_that_are_sent_leave_the_server_as_it_was(server: str) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * (1 << 20)

    url = f"{server}/v1/models/{CLASSES}"
    for content in (b" " * (100 << 20), parts()):  # with its length declared, and without
        response = post(url, content)
        assert response.status_code == 413
        assert "the body: wanted at most 4194304 bytes" in response.json()["error"]
    assert post(url, b'{"inputs": "a"}').status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (f"/v1/models/{CLASSES}/embed", {"inputs": "a"}, 422, "wanted a model for feature-extrac"),
        (f"/v1/models/{VECTORS}/predict", {"inputs": "a"}, 422, "wanted a model for text-classif"),
        (f"/v1/models/{CLASSES}/v1/embeddings", {"input": "a"}, 400, "wanted a model for feature"),
        (f"/v1/models/{VECTORS}/v1/rerank", {"query": "a", "documents": ["b"]}, 400, "text-rank"),
        ("/embed_sparse", {"inputs": "a"}, 422, "no model that you may use is for sparse"),
        (f"/v1/models/{CLASSES}", {"inputs": {"question": "a", "context": "b"}}, 422, "wanted"),
        ("/v1/models/nothing/embed", {"inputs": "a"}, 404, 'there is no model "nothing"'),
        ("/v1/embeddings", {"input": "a", "model": "nothing"}, 404, 'there is no model "nothing"'),
        ("/v2/models/nothing/infer", {"inputs": []}, 404, 'there is no model "nothing"'),
    ],
)
def test_a_model_without_the_task_is_refused(
    server: str, path: str, body: Any, status: int, message: str
) -> None:
    response = post(f"{server}{path}", json.dumps(body))
    assert response.status_code == status
    assert message in response.text.replace('\\"', '"')


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("", {"inputs": "a", "parameters": {"max_answer_len": 3}}, 422, 'got "max_answer_len"'),
        ("", {"inputs": "a", "parameters": {"targets": ["b"]}}, 422, 'got "targets"'),
        ("/predict", {"inputs": "a", "normalize": True}, 422, 'got "normalize"'),
        (
            "/predict",
            {"inputs": "a", "truncation_direction": "up"},
            422,
            "truncation_direction: wanted one of",
        ),
        (
            "/invocations",
            {"inputs": ["a"], "params": {"max_answer_len": 3}},
            400,
            'top_k, function_to_apply, got "max_answer_len": leave it out',
        ),
        (
            "/invocations",
            {"inputs": ["a"], "params": {"top_k": {"a": 1}}},
            400,
            "top_k: wanted a whole number, got an object",
        ),
        (
            "/v2/models/text-classification/infer",
            {
                "inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}],
                "parameters": {"dimensions": 3},
            },
            400,
            'top_k, function_to_apply, got "dimensions": leave it out',
        ),
    ],
)
def test_a_parameter_of_another_task_is_refused_by_name(
    server: str, path: str, body: Any, status: int, message: str
) -> None:
    response = post(f"{server}/v1/models/{CLASSES}{path}", json.dumps(body))
    assert response.status_code == status
    assert message in response.text.replace('\\"', '"')


@pytest.mark.parametrize(
    ("path", "header"),
    [
        (f"/v1/models/{CLASSES}", "X-Request-Timeout-Ms"),
        (f"/v2/models/{CLASSES}/infer", "Inference-Header-Content-Length"),
    ],
)
@pytest.mark.parametrize("value", ["9" * 5_000, "0", "\u00b2", "1e3", "-1"])
def test_a_number_in_a_header_that_python_does_not_read_is_refused_or_beyond_any_limit(
    server: str, path: str, header: str, value: str
) -> None:
    headers = [(b"Content-Type", b"application/json"), (header.encode(), value.encode("latin-1"))]
    content = b'{"inputs": "a"}'
    response = httpx.post(f"{server}{path}", content=content, timeout=30, headers=headers)
    is_long_time = header.startswith("X") and value.startswith("9")
    assert response.status_code in ((200,) if is_long_time else (400, 422)), response.text


@pytest.mark.parametrize("shape", [[1] * 65, [1 << 62, 0], [], [0], [-1]])
def test_a_tensor_of_an_odd_shape_is_refused(server: str, shape: list[int]) -> None:
    data = [] if 0 in shape else ["a"]
    tensor = {"name": "text", "shape": shape, "datatype": "BYTES", "data": data}
    response = post(f"{server}/v2/models/{CLASSES}/infer", json.dumps({"inputs": [tensor]}))
    assert response.status_code == 400, response.text
    assert response.json()["error"].startswith("text: wanted ")


def test_named_values_are_shortened_in_messages(server: str) -> None:
    name = "x" * 100_000
    tensor = {"name": name, "shape": [1], "datatype": "BYTES", "data": ["a"]}
    for path, body in (
        ("/embed", {"inputs": "a", "model": name}),
        ("/embed", {"inputs": "a", name: 1}),
        (f"/v2/models/{CLASSES}/infer", {"inputs": [tensor]}),
        (f"/v2/models/{CLASSES}/infer", {"inputs": [tensor | {"datatype": name}]}),
        (f"/{name[:5_000]}", {}),
        (f"/v1/models/{name[:5_000]}/embed", {}),
    ):
        response = post(f"{server}{path}", json.dumps(body))
        assert 400 <= response.status_code < 500
        assert len(response.text) < 1_100


def test_tokens_that_are_only_counted_are_limited_too(server: str) -> None:
    body = json.dumps({"inputs": ["- " * 1_000] * 500})
    response = post(f"{server}/v1/models/{CLASSES}/tokenize", body)
    assert response.status_code == 413
    assert "wanted at most 262144 tokens per request, got 501000" in response.json()["error"]


@pytest.fixture(scope="module")
def keys() -> dict[str, tuple[str, auth.Key]]:
    yesterday = (datetime.now(UTC) - timedelta(days=1)).date().isoformat()
    return {
        "good": auth.create("good"),
        "expired": auth.create("expired", expires=yesterday),
        "other": auth.create("other", models=["another-model"]),
        "used": auth.create("used", requests_per_minute=1),
    }


@pytest.fixture(scope="module")
def guarded(bundles: dict[str, Path], keys: dict[str, tuple[str, auth.Key]]) -> Iterator[str]:
    known = Keys([stored for _, stored in keys.values()])
    models = {name: bundles[name] for name in (CLASSES, VECTORS, RANKING)}
    with live.fronted(models, keys=known) as url:
        yield url


@pytest.mark.parametrize("way", WAYS)
def test_an_invalid_key_is_explained(
    guarded: str, keys: dict[str, tuple[str, auth.Key]], way: str
) -> None:
    surface = WAYS[way]
    url, body = f"{guarded}{surface.path}", surface.with_texts(b'"a"')
    forged = keys["good"][0][:-4] + "AAAA"
    for given, status, message in (
        (None, 401, "wanted an API key, got none: send the header Authorization: Bearer <key>"),
        ("sk-something", 401, "the API key is not known here"),
        (forged, 401, "the API key is not known here"),
        (keys["expired"][0], 401, "the API key of expired expired on "),
        (keys["other"][0], 403, "wanted a model that it may use (another-model)"),
    ):
        response = post(
            url, body, **({} if given is None else {"Authorization": f"Bearer {given}"})
        )
        assert response.status_code == status
        assert message in surface.message(response.json())
        assert given is None or given not in response.text
        assert ("WWW-Authenticate" in response.headers) == (status == 401)
    assert post(url, body, Authorization=f"Bearer {keys['good'][0]}").status_code == 200


def test_a_key_beyond_its_limit_is_told_when_to_try_again(
    guarded: str, keys: dict[str, tuple[str, auth.Key]]
) -> None:
    url, headers = f"{guarded}/embed", {"Authorization": f"Bearer {keys['used'][0]}"}
    assert post(url, b'{"inputs": "a"}', **headers).status_code == 200
    response = post(url, b'{"inputs": "a"}', **headers)
    assert response.status_code == 429
    assert 1 <= int(response.headers["Retry-After"]) <= 60
    assert "wanted at most 1 requests per minute" in response.json()["error"]


def test_after_every_abuse_a_good_request_is_answered_as_before(
    server: str, bundles: dict[str, Path]
) -> None:
    with live.fronted({CLASSES: bundles[CLASSES]}) as fresh:
        body = b'{"inputs": ["Open a socket.", "A fox."]}'
        answers = [post(f"{url}/v1/models/{CLASSES}", body).json() for url in (server, fresh)]
    assert answers[0] == answers[1]
    began_s = time.monotonic()
    assert post(f"{server}/v1/models/{CLASSES}", b'{"inputs": "a"}').status_code == 200
    assert time.monotonic() - began_s < 20


def test_half_a_surrogate_pair_in_a_label_is_refused(bundles: dict[str, Path]) -> None:
    """An answer in UTF-8 cannot repeat it."""
    with live.served(bundles["nli"]) as url:
        body = b'{"inputs": "a", "parameters": {"candidate_labels": ["food", "\\ud800"]}}'
        response = post(url, body)
        assert response.status_code == 400
        assert "no low surrogate in string" in response.json()["error"]
        whole = {"inputs": "a", "parameters": {"candidate_labels": ["\U0001f600", "b"]}}
        assert post(url, json.dumps(whole)).status_code == 200
