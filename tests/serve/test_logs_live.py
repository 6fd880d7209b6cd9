"""No text of any request reaches a file of the server's Ray session, whatever the surface."""

import http.client
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bert_core.tasks.catalog import TASKS
from serve.surfaces.catalog import SURFACES
from tests.serve.live import Server, running_together
from tests.serve.observe.test_records import MARKER
from tests.waiting import wait_until

BROKEN = [
    b"",
    f'{{"{MARKER}'.encode(),
    f'"{MARKER}"'.encode(),
    f'{{"{MARKER}": "{MARKER}"}}'.encode(),
    f'{{"inputs": "{MARKER}", "parameters": {{"{MARKER}": 1}}}}'.encode(),
    f'{{"inputs": [["{MARKER}"]], "parameters": "{MARKER}"}}'.encode(),
    f'{{"inputs": "{MARKER}", "model": "{MARKER}"}}'.encode(),
    f'{{"inputs": "{MARKER} \\ud800"}}'.encode(),
    f'{{"inputs": "{MARKER}'.encode() + b'\xff"}',
    f'{{"inputs": {"[" * 5000}"{MARKER}"'.encode(),
    json.dumps({"inputs": [MARKER] * 3000}).encode(),
    json.dumps({"inputs": MARKER * 600_000}).encode(),
    json.dumps({"inputs": MARKER, "parameters": {"top_k": MARKER}}).encode(),
]
"""Bodies that no surface takes."""
VALID: list[tuple[str, Any]] = [
    ("/embed", {"inputs": [f"{MARKER} a", MARKER]}),
    ("/embed_sparse", {"inputs": MARKER}),
    ("/predict", {"inputs": MARKER}),
    ("/rerank", {"query": MARKER, "texts": [MARKER, "a"]}),
    ("/tokenize", {"inputs": MARKER}),
    ("/similarity", {"inputs": {"source_sentence": MARKER, "sentences": [MARKER]}}),
    ("/v1/embeddings", {"input": [MARKER], "model": "feature-extraction", "user": MARKER}),
    ("/v1/rerank", {"model": "text-ranking", "query": MARKER, "documents": [MARKER]}),
    ("/v2/embed", {"model": "feature-extraction", "texts": [MARKER], "input_type": MARKER}),
    ("/invocations", {"inputs": [MARKER]}),
    ("/invocations", {"dataframe_split": {"columns": [MARKER], "data": [[MARKER]]}}),
]


def marked(value: Any) -> Any:
    """An input with the marker in every text."""
    if isinstance(value, str):
        return f"{value} {MARKER}"
    if isinstance(value, dict):
        return {name: marked(each) for name, each in value.items()}
    if isinstance(value, list):
        return [marked(each) for each in value]
    return value


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("HAProxy", marks=pytest.mark.guard),
        pytest.param("Ray's proxy", marks=pytest.mark.drill),
    ],
)
def server(
    request: pytest.FixtureRequest,
    together: Server,
    bundles: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """A model per task, all in one process."""
    if request.param == "HAProxy":
        yield together
        return
    folder = tmp_path_factory.mktemp("server")
    with running_together(bundles, folder, "--haproxy", "false") as server:
        yield server


def logs_of(server: Server) -> Path:
    """The folder of logs that the server names."""
    (folder,) = re.findall(r"^logs: (.+)$", server.output.read_text(), flags=re.MULTILINE)
    return Path(folder)


def lines_of(server: Server) -> list[dict[str, Any]]:
    """What the replica logs, as JSON."""
    files = logs_of(server).glob("replica_front_*.log")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def line_of(server: Server, request_id: str) -> dict[str, Any]:
    """The line of one request, which follows its response."""

    def lines() -> list[dict[str, Any]]:
        return [
            line
            for line in lines_of(server)
            if line.get("request_id") == request_id and "status" in line
        ]

    (line,) = wait_until(f"{request_id} is logged", lines, timeout_s=20, every_s=0.2)
    return line


def test_a_line_says_all_about_a_request_but_its_text(server: Server) -> None:
    path, body = "/v1/models/text-classification", {"inputs": [MARKER, "a fox"]}
    headers = {"X-Request-ID": "the-callers-own"}
    response = httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=30)
    assert response.headers.get_list("x-request-id") == ["the-callers-own"]
    line = line_of(server, "the-callers-own")
    wanted = {
        "method": "POST",
        "status": 200,
        "model": "text-classification",
        "surface": "huggingface",
        "tokens": int(response.headers["X-Tokens"]),
        "levelname": "INFO",
    }
    assert {name: line[name] for name in wanted} == wanted
    assert line["version"] == response.headers["X-Model-Digest"][:12]
    assert line["route"] == path
    for stage in ("tokenize", "queue", "compute"):
        assert f"{stage};dur={line[f'{stage}_ms']:.2f}" in response.headers["Server-Timing"]
    assert "error_type" not in line


def test_a_request_without_an_id_gets_one_and_errors_have_their_class(server: Server) -> None:
    url = f"{server.url}/predict?q={MARKER}"
    response = httpx.post(url, json={"inputs": 7, "model": "text-classification"}, timeout=30)
    assert response.status_code == 422
    (request_id,) = response.headers.get_list("x-request-id")
    line = line_of(server, request_id)
    assert (line["status"], line["error_type"]) == (422, "invalid_request")
    assert line["route"].endswith("/predict")


def test_no_file_of_the_session_has_a_text_parameter_or_path_of_a_request(
    server: Server, bundles: dict[str, Path]
) -> None:
    statuses = set()
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def ask(method: str, path: str, **request: Any) -> None:
            statuses.add(client.request(method, path, **request).status_code)

        for path, body in VALID:
            ask("POST", path, json=body)
        for name in bundles:
            root = f"/v1/models/{name}"
            task = TASKS.get(client.get(root).json()["task"])
            assert task is not None
            [example] = client.get(root).json()["examples"]
            ask("POST", root, json={"inputs": marked(example)})
            ask("POST", root, json={"inputs": [marked(example)] * 2, "parameters": {MARKER: 1}})
            ask("POST", f"{root}/{MARKER}", json={"inputs": MARKER})
            ask("POST", f"{root}/v2/models/{MARKER}/infer", json={"inputs": MARKER})
        for surface in SURFACES:
            for endpoint in surface.endpoints:
                path = (endpoint.path or "/").replace("{model}", MARKER)
                for prefix in ("", "/v1/models/text-classification"):
                    ask(endpoint.method, f"{prefix}{path}?{MARKER}={MARKER}")
                    if endpoint.method == "POST":
                        for content in BROKEN[:: 1 if prefix else 3]:
                            ask("POST", f"{prefix}{path}", content=content)
                    ask("POST", f"{prefix}{path}", content=MARKER.encode(),
                        headers={"Content-Type": "text/plain"})  # fmt: skip
        ask("GET", f"/{MARKER}")
        ask("PUT", f"/v1/models/{MARKER}/predict")
        headers = {"X-Request-Timeout-Ms": MARKER, "Authorization": f"Bearer {MARKER}"}
        ask("POST", "/predict", json={"inputs": MARKER}, headers=headers)
        headers["X-Request-Timeout-Ms"] = "1"
        ask("POST", "/", json={"inputs": [MARKER * 20] * 500}, headers=headers)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(MARKER, "/predict")  # a method of that name
    statuses.add(connection.getresponse().status)
    connection.close()
    assert {200, 400, 404, 405, 413, 415, 422} <= statuses
    time.sleep(3)  # what is logged and exported from time to time
    session = logs_of(server).parent
    assert session.name == "logs"
    files = [file for file in session.rglob("*") if file.is_file()]
    assert any(file.name.startswith("replica_front_") for file in files)
    holding = [str(file) for file in files if MARKER.encode() in file.read_bytes()]
    assert holding == []
    assert MARKER not in server.output.read_text()
    assert MARKER not in httpx.get(f"{server.url}/metrics", timeout=30).text
    routes = {line["route"] for line in lines_of(server) if "status" in line}
    assert len(routes) > 20
