"""The server as a user runs it: Ray Serve behind HAProxy, real models, real HTTP."""

import asyncio
import http.client
import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from bert_core.bundle.format import bundle_digest, load_bundle
from bert_core.bundle.layout import GRAPHS
from bert_core.errors import ConfigError, ResourceError
from bert_core.inference.predictor import Predictor
from serve.config import ServeConfig
from serve.request import auth
from serve.request.limits import Limits
from tests import tiny
from tests.hub import Hub, Repository, contents
from tests.serve import live
from tests.serve.faults import in_progress
from tests.serve.live import START_S, Server, kill
from tracking.store.ports import free_ports

TEXTS = [" ".join(["array socket port string JSON object fox dog"] * (1 + n % 5)) for n in range(9)]


@pytest.fixture
def client(apart: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=apart.url, timeout=30, follow_redirects=True) as client:
        yield client


def assert_same_answers(came: list[Any], wanted: list[Any]) -> None:
    for answer, expected in zip(came, wanted, strict=True):
        assert [each["label"] for each in answer] == [each["label"] for each in expected]
        scores = [each["score"] for each in answer]
        np.testing.assert_allclose(scores, [each["score"] for each in expected], atol=1e-5)


def test_every_model_answers_at_its_own_path(client: httpx.Client, bundle: Path) -> None:
    wanted = Predictor(bundle, device="cpu").predict(TEXTS)
    for name in ("docs", "other"):
        response = client.post(f"/v1/models/{name}", json={"inputs": TEXTS})
        assert response.status_code == 200
        assert_same_answers(response.json(), wanted)


def test_the_inference_client_of_hugging_face_works(apart: Server, bundle: Path) -> None:
    url = f"{apart.url}/v1/models/docs"
    client = InferenceClient(model=url)
    answer = client.text_classification(TEXTS[0], top_k=2)
    wanted = Predictor(bundle, device="cpu").predict(TEXTS[:1])[0][:2]
    assert_same_answers([[vars(each) for each in answer]], [wanted])
    with pytest.raises(HfHubHTTPError, match="top_k: wanted at least 1, got 0"):
        client.text_classification(TEXTS[0], top_k=0)


def test_concurrent_requests_get_their_own_answers(apart: Server, bundle: Path) -> None:
    texts = [f"{TEXTS[n % 9]} {n}" for n in range(200)]
    url = f"{apart.url}/v1/models/docs"

    async def ask() -> list[Any]:
        async with httpx.AsyncClient(timeout=60) as client:

            async def one(text: str) -> Any:
                return (await client.post(url, json={"inputs": text})).json()[0]

            return await asyncio.gather(*map(one, texts))

    assert_same_answers(asyncio.run(ask()), Predictor(bundle, device="cpu").predict(texts))


def test_the_root_passes_requests_on_to_the_model_that_they_name(
    client: httpx.Client, bundle: Path
) -> None:
    wanted = Predictor(bundle, device="cpu").predict(TEXTS)
    for name in ("docs", "other"):
        response = client.post("/", json={"inputs": TEXTS, "model": name})
        assert response.headers["X-Model"] == name
        assert_same_answers(response.json(), wanted)
    assert client.post("/", json={"inputs": TEXTS}).headers["X-Model"] == "docs"
    response = client.post("/", json={"inputs": TEXTS, "model": "dogs"})
    assert response.status_code == 404
    assert client.post("/embed", json={"inputs": "a"}).status_code == 422


def test_nothing_of_haproxy_listens_beyond_this_machine(apart: Server) -> None:
    listening = {
        connection.laddr.ip
        for pid in apart.pids()
        if psutil.Process(pid).name() == "haproxy"
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_no_process_of_serve_has_imported_pandas(apart: Server) -> None:
    """Which a Ray that moves its hook for workers would do: 24 MiB in each."""
    maps = {
        psutil.Process(pid).cmdline()[0]: Path(f"/proc/{pid}/maps").read_text()
        for pid in apart.pids()
        if psutil.Process(pid).cmdline()[0].startswith(("ray::Serve", "ray::Proxy", "ray::HAProxy"))
    }
    assert len(maps) >= 5, list(maps)
    assert all("ray/_raylet" in each for each in maps.values())
    assert [name for name, each in maps.items() if "/pandas/" in each] == []


def test_the_line_that_is_printed_asks_the_model(apart: Server) -> None:
    told = apart.output.read_text().splitlines()
    assert told[:4] == ["starting Ray", "loading docs", "loading other", "starting Ray Serve"]
    (line,) = [line for line in told if line.startswith("curl ")]
    program, url, *options = shlex.split(line)
    assert (program, options[::2]) == ("curl", ["-H", "-d"])
    header, body = options[1::2]
    response = httpx.post(url, headers=dict([header.split(": ")]), content=body, timeout=30)
    assert (response.status_code, len(response.json())) == (200, 1)


def test_the_front_lists_the_models_and_serves_the_page(client: httpx.Client) -> None:
    listing = client.get("/v1/models").json()
    assert [each["id"] for each in listing["data"]] == ["docs", "other"]
    for each in listing["data"]:
        assert each["card"] == client.get(f"/v1/models/{each['id']}").json()
        assert each["card"]["task"] == "text-classification"
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "<title>raybert</title>" in page.text
    script = client.get("/page/app.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert "default-src 'none'" in script.headers["content-security-policy"]


@pytest.mark.parametrize("prefix", ["", "/v1/models/docs", "/v1/models/other"])
def test_health_and_readiness_answer_everywhere(client: httpx.Client, prefix: str) -> None:
    for path, status in (("healthz", "ok"), ("readyz", "ready")):
        response = client.get(f"{prefix}/{path}")
        assert (response.status_code, response.json()) == (200, {"status": status})


def test_a_bad_request_is_explained(client: httpx.Client) -> None:
    """All that may be bad is in `test_bad_input`."""
    response = client.post("/v1/models/docs", json={"inputs": 7})
    assert response.status_code == 422
    assert "inputs: wanted text, got a number (7)" in response.json()["error"]


def test_an_unknown_model_is_a_404_that_names_the_served_ones(client: httpx.Client) -> None:
    response = client.post("/v1/models/dogs", json={"inputs": "a"})
    assert response.status_code == 404
    message = 'there is no model "dogs": those that you may use are docs, other'
    assert response.json() == {"error": message, "error_type": "not_found"}


def test_openapi_is_served_by_each_model_and_the_front(client: httpx.Client) -> None:
    spec = client.get("/v1/models/docs/openapi.json").json()
    body = spec["paths"]["/"]["post"]["requestBody"]["content"]["application/json"]
    assert set(body["schema"]["properties"]) == {"inputs", "parameters", "model", "options"}
    assert spec["servers"] == [{"url": "/v1/models/docs"}]
    assert "/v1/models/docs/openapi.json" in client.get("/v1/models/docs/docs").text
    assert "/v1/models" in client.get("/openapi.json").json()["paths"]


def test_requests_are_taken_on_the_given_host_only(apart: Server) -> None:
    # Every address of 127/8 is this machine: what listens on all interfaces would answer.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", apart.port), timeout=5)


@pytest.mark.parametrize("path", ["/", "/v1/models", "/v1/models/docs", "/readyz"])
def test_a_web_pages_own_name_is_refused(client: httpx.Client, path: str) -> None:
    for host, status in (("evil.example", 421), ("evil.example:8000", 421), ("localhost:1", 200)):
        response = client.get(path, headers={"Host": host}, follow_redirects=False)
        assert response.status_code == status
        assert status == 200 or response.json()["error_type"] == "misdirected"


@pytest.mark.parametrize("path", ["/v1/models/docs", "/"])
def test_work_of_a_client_that_is_gone_is_dropped(client: httpx.Client, path: str) -> None:
    body = {"inputs": ["open a socket and listen on a port " * 8] * 2000}

    def seconds(content: Any, timeout_s: float = 120.0) -> float:
        began_s = time.monotonic()
        with suppress(httpx.ReadTimeout):
            client.post(path, json=content, timeout=timeout_s).raise_for_status()
        return time.monotonic() - began_s

    whole_s = seconds(body)
    for _ in range(3):
        seconds(body, timeout_s=whole_s / 4)  # the client closes the connection
    # All of that would be in front of it.
    assert seconds({"inputs": "a"}) < whole_s


@pytest.mark.parametrize("path", ["/v1/models/docs", "/"])
def test_a_hundred_megabytes_are_refused(client: httpx.Client, path: str) -> None:
    response = client.post(path, content=b" " * (100 << 20))
    assert response.status_code == 413
    assert response.json()["error"].startswith("the body: wanted at most 4194304 bytes, got 104857")
    assert client.post(path, json={"inputs": "a"}).status_code == 200


def test_an_answer_and_a_body_at_the_limits_pass_between_front_and_model(
    client: httpx.Client,
) -> None:
    """They are sent as one message of gRPC, whose own limit is 4 MiB
    (grpc.max_receive_message_length)."""
    texts = ["array " * 124] * 3_000
    answers = [
        client.post(f"{prefix}/tokenize", json={"inputs": texts, "model": "other"})
        for prefix in ("", "/v1/models/other")
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].content == answers[1].content
    assert len(answers[0].content) > 20_000_000
    body = b'{"inputs": "a", "model": "docs"'
    body += b" " * (Limits().max_body_bytes - len(body) - 1) + b"}"
    for path in ("/", "/v1/models/docs"):
        assert client.post(path, content=body).status_code == 200


ODD = {
    "a header that is not UTF-8": (b"POST / HTTP/1.1", b"X-Request-ID: \xe9\r\n", 200),
    "the same at a model": (b"POST /v1/models/docs HTTP/1.1", b"X-Request-ID: \xe9\r\n", 200),
    "a trace that is not UTF-8": (b"POST / HTTP/1.1", b"traceparent: \xe9\r\n", 200),
    "a session that is not UTF-8": (b"POST / HTTP/1.1", b"X-Session-ID: \xe9\r\n", 200),
    "a path with a backslash": (b"POST \\v1 HTTP/1.1", b"", 400),
    "a body in HTTP/1.0": (b"GET /v1/models/docs HTTP/1.0", b"", 200),
}


@pytest.mark.parametrize("name", ODD)
def test_malformed_requests_are_answered_in_json(apart: Server, name: str) -> None:
    line, header, wanted = ODD[name]
    body = b'{"inputs": "a"}'
    head = b"%s\r\nHost: localhost\r\nContent-Type: application/json\r\n%s" % (line, header)
    with socket.create_connection(("127.0.0.1", apart.port), timeout=30) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == wanted
        assert response.headers["Content-Type"] == "application/json"
        json.loads(response.read())


def test_a_taken_port_is_an_error_that_names_who_holds_it(
    apart: Server, bundle: Path, tmp_path: Path
) -> None:
    command = ["pipelines.cli", "serve", "--models", f"a={bundle}", "--port", str(apart.port)]
    second = Server.start(command, apart.port, tmp_path)
    assert second.process.wait(START_S) == 1
    message = second.output.read_text()
    assert f"port {apart.port} on 127.0.0.1 is in use by haproxy (process " in message
    assert "): stop that process, or choose another port with --port" in message
    assert "Traceback" not in message
    assert second.processes() == []


def test_new_requests_are_told_that_it_stops_and_a_second_signal_does_not_wait(
    apart: Server, bundle: Path
) -> None:
    """The last test of this server. What one signal does in the end is shown where it is killed."""
    output = apart.output.read_text()
    assert f"serving docs, other at {apart.url}" in output
    assert any("haproxy" in name for name in apart.processes())
    with in_progress(apart, bundle, "other", texts=960) as answers:
        apart.process.send_signal(signal.SIGINT)
        time.sleep(0.5)  # until Python has noticed
        paths = ("/v1/models/docs", "/v1/models/other", "/embed", "/", "/v1/models/none")
        until_s = time.monotonic() + 3
        # While the front and its routes go; a fast machine must not have answered all by then.
        while time.monotonic() < until_s and len(answers) < 4:
            with httpx.Client(base_url=apart.url, timeout=30) as client:
                for path in paths:
                    told = client.post(path, json={"inputs": "a"})
                    assert (told.status_code, told.json()["error_type"]) == (503, "not_ready")
                    assert int(told.headers["Retry-After"]) > 0
            time.sleep(0.5)
        assert apart.end(signal.SIGINT) == 0
    assert "cut" in answers
    live.eventually(lambda: apart.processes() == [], timeout_s=10)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", apart.port), timeout=5)


@pytest.mark.guard
def test_a_cluster_without_a_token_is_used_only_if_allowed(open_head: Any, bundle: Path) -> None:
    """That one is served on where it is allowed is shown where a node is lost."""
    (port,) = free_ports(1)
    address = open_head.addresses["host:port"]
    command = ["serve", "--models", f"docs={bundle}", "--port", str(port)]
    refused = open_head.raybert(*command, RAY_ADDRESS=address)
    assert refused.returncode == 1, refused.stderr
    assert refused.stderr.startswith(
        f"raybert serve: wanted a Ray cluster that requires a token, the one at {address} requires "
    )
    assert refused.stdout == ""
    joined = open_head.raybert("serve", "--status", "--allow_open_cluster", RAY_ADDRESS=address)
    warning = f"warning: the Ray cluster at {address} requires no token: anyone who reaches"
    assert warning in joined.stdout + joined.stderr
    assert "this Ray cluster serves nothing" in joined.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # What is 1 cannot be lowered.
        (
            {"models": "a=x,b=x,c=x,d=x,e=x"},
            "wanted 5 CPUs (models 5 × num_replicas 1 × threads 1), the Ray cluster has 4: "
            "serve fewer models, or set num_cpus to a fraction, or set together, for one process, "
            "or use a machine or cluster with more CPUs",
        ),
        (
            {"models": "a=x", "num_replicas": 2, "threads": 3},
            "wanted 6 CPUs (models 1 × num_replicas 2 × threads 3), the Ray cluster has 4: "
            "lower num_replicas, or lower threads, or set num_cpus to a fraction, or use a machine "
            "or cluster with more CPUs",
        ),
        (
            {"models": "a=x", "num_gpus": 2.0},
            "wanted 2 GPUs (models 1 × num_replicas 1 × num_gpus 2), the Ray cluster has 0: lower "
            "num_gpus (a fraction shares a GPU, 0 computes on CPUs), or use a machine or cluster "
            "with more GPUs",
        ),
        (
            {"models": "a=x,b=x,c=x", "num_cpus": 1.5},
            "wanted 5 CPUs (models 3 × num_replicas 1 × num_cpus 1.5), the Ray cluster has 4",
        ),
        # Two replicas do not fit one GPU.
        (
            {"models": "a=x,b=x,c=x", "num_gpus": 0.4},
            "wanted 2 GPUs (models 3 × num_replicas 1 × num_gpus 0.4), the Ray cluster has 0",
        ),
    ],
    ids=["models", "replicas and threads", "GPUs", "shares of CPUs", "shares of GPUs"],
)
@pytest.mark.usefixtures("local_ray")
def test_work_too_large_for_the_cluster_is_refused_with_the_way_out(
    settings: dict[str, Any], message: str
) -> None:
    from serve import app  # after the environment is set

    config = ServeConfig(port=free_ports(1)[0], **settings)
    with pytest.raises(ResourceError) as caught:
        app.run(config)
    assert message in str(caught.value)


@pytest.mark.usefixtures("local_ray")
def test_models_that_do_not_fit_into_memory_together_are_refused_with_their_needs(
    bundle: Path, tmp_path: Path
) -> None:
    from serve.cluster.capacity import check_memory  # after the environment is set
    from serve.versions.plan import find

    settings = {"model": str(bundle), "num_replicas": 2}
    candidate = {"model": str(bundle), "share": 0.5}
    config = ServeConfig(
        models={"docs": settings, "other": {"model": str(bundle), "candidate": candidate}},
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
    )
    size = load_bundle(bundle).memory_bytes
    check_memory(config.served, found := find(config), available=4 * size)
    with pytest.raises(ResourceError) as caught:
        check_memory(config.served, found, available=4 * size - 1)
    assert str(caught.value) == (
        f"wanted {4 * size:,} bytes of memory for the weights of all replicas (docs: 2 × {size:,}; "
        f"other: 1 × {2 * size:,}), this machine or container has {4 * size - 1:,} left: lower "
        "num_replicas, or serve fewer models, or set together, for one process, or give it more"
    )


def test_replicas_get_the_commit_of_a_model_of_the_hub_that_was_found(
    hub: Hub, bundle: Path, tmp_path: Path
) -> None:
    from serve.versions.plan import find  # after the environment is set

    repository = hub.models["somebody/served"] = Repository()
    commit = repository.commit(contents(bundle))
    config = ServeConfig(
        models="docs=somebody/served", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db"
    )
    source = find(config)["docs"].plan.source
    assert str(source.reference) == f"somebody/served@{commit}"
    folder, version = source.fetch()
    assert (bundle_digest(folder), version) == (bundle_digest(bundle), None)
    assert source.digest == bundle_digest(bundle)


def test_the_line_that_is_printed_sends_the_first_example_of_the_bundle(
    bundle: Path, tmp_path: Path
) -> None:
    from serve.versions.plan import find  # after the environment is set

    loaded, examples = load_bundle(bundle), ["Parse a string.", "Open a socket."]
    about: dict[str, Any] = {"task": loaded.task, "examples": examples}
    folder = tiny.bundle(tmp_path / "own", loaded.tokenizer, loaded.encoder_config, **about)
    models = [f"docs={folder}", f"other={bundle}"]
    config = ServeConfig(models=models, tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    assert [each.example for each in find(config).values()] == [
        "Parse a string.", "A text to be labelled.",
    ]  # fmt: skip


def test_a_missing_certificate_is_reported_before_anything_starts(tmp_path: Path) -> None:
    from serve.cluster.applications import certificate  # after the environment is set

    with pytest.raises(ConfigError, match="tls_certificate: wanted a PEM file"):
        certificate(str(tmp_path / "none.pem"))


@pytest.mark.drill  # exporting takes seconds
def test_a_graph_is_not_served_on_a_gpu(exported: Path) -> None:
    from serve.versions.plan import find  # after the environment is set

    with pytest.raises(ConfigError) as caught:
        find(ServeConfig(models=[f"docs={exported}"], num_gpus=1))
    assert str(caught.value) == (
        f"num_gpus: wanted 0 for docs, since {exported}/{GRAPHS['fp32']} runs on CPUs, got 1: "
        "leave it out, or serve the bundle with model.safetensors that it was exported from"
    )


@pytest.mark.ray
@pytest.mark.guard
def test_models_in_one_process_ask_for_keys_by_https_and_leave_nothing_when_it_is_killed(
    bundle: Path, tmp_path: Path
) -> None:
    key, stored = auth.create("alice")
    auth.change_keys(str(tmp_path / "keys.json"), lambda _: [stored])
    chain, pem = live.certificate(tmp_path)
    # Paths from here, wherever replicas and HAProxy run.
    options = ["--host", "0.0.0.0"]
    files = {"--keys": tmp_path / "keys.json", "--tls_certificate": pem}
    options += [word for name, path in files.items() for word in (name, os.path.relpath(path))]
    tls = ssl.create_default_context(cafile=str(chain))
    models = {f"m{number}": bundle for number in range(5)}
    with live.running_together(models, tmp_path, *options, tls=tls) as server:
        assert sum("ServeRepl" in name for name in server.processes()) == 1  # names are cut
        wanted = Predictor(bundle, device="cpu").predict(TEXTS)
        with httpx.Client(base_url=server.url, timeout=30, verify=tls) as client:
            for name in models:
                path = f"/v1/models/{name}"
                assert client.post(path, json={"inputs": TEXTS}).status_code == 401
                headers = {"Authorization": f"Bearer {key}"}
                response = client.post(path, json={"inputs": TEXTS}, headers=headers)
                assert_same_answers(response.json(), wanted)
        (line,) = [line for line in server.output.read_text().splitlines() if "curl " in line]
        told = subprocess.run(
            line, shell=True, env=os.environ | {"KEY": key}, capture_output=True, timeout=60
        )
        assert isinstance(json.loads(told.stdout), list), told
        assert plain_doors(server) == {}
        server.end(signal.SIGKILL)
        # Or it would keep the port.
        live.eventually(lambda: "haproxy" not in server.processes(), 20, every_s=0.2)
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", server.port))


def plain_doors(server: Server) -> dict[int, bytes]:
    """What answers in plain HTTP beyond this machine, by its port."""
    doors = {}
    for pid in server.pids():
        process = psutil.Process(pid)
        name = process.name()
        if "Agent" in name or not ("haproxy" in name or "ray::" in name):
            continue  # Ray's own, such as its agents' metrics, which SECURITY.md names
        for each in process.net_connections("inet"):
            if each.status != psutil.CONN_LISTEN or each.laddr.ip in ("127.0.0.1", "::1"):
                continue
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", each.laddr.port), 2) as door,
            ):
                door.settimeout(2)
                door.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
                if (came := door.recv(100)).startswith(b"HTTP/"):
                    doors[each.laddr.port] = came
    return doors


def test_serve_run_is_given_one_model_that_answers_for_itself(bundle: Path) -> None:
    from serve import app  # after the environment is set

    arguments = {"name": "docs", "model": str(bundle), "num_replicas": "2", "threads": "3"}
    deployment = app.build(arguments | {"backend": "torch"})._bound_deployment
    assert deployment.num_replicas == 2
    assert (deployment.ray_actor_options or {})["num_cpus"] == 3
    config = deployment.user_config
    assert config is not None
    assert config["alone"]
    assert config["plan"]["name"] == "docs"
    assert config["plan"]["runtime"]["backend"] == "torch"
    assert config["plan"]["source"]["digest"] == bundle_digest(bundle)


@pytest.mark.ray
@pytest.mark.drill
def test_serve_run_deploys_one_model_at_the_same_paths(bundle: Path, tmp_path: Path) -> None:
    # `serve run` has no option for the port.
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", 8000), 5):
        pytest.skip("port 8000 is taken, which `serve run` always listens on")
    command = ["ray.serve.scripts", "run", "serve.app:build", "name=docs", f"model={bundle}"]
    server = Server.start(command, 8000, tmp_path)
    try:
        server.wait_until_ready()
        wanted = Predictor(bundle, device="cpu").predict(TEXTS)
        with httpx.Client(base_url=server.url, timeout=30, follow_redirects=True) as client:
            for path in ("/", "/v1/models/docs"):
                assert_same_answers(client.post(path, json={"inputs": TEXTS}).json(), wanted)
            for path in ("/healthz", "/v1/models/docs/healthz", "/v1/models/docs/readyz"):
                assert client.get(path).status_code == 200
            assert client.get("/v1/models/docs").json()["id"] == "docs"
            assert client.get("/v1/models").json()["data"][0]["id"] == "docs"
            assert "ray_raybert_nodes_missing 0" in client.get("/metrics").text
            unknown = client.post("/v1/models/dogs/predict", json={"inputs": "a"})
            assert unknown.status_code == 404
            assert unknown.json()["error"].endswith("those that you may use are docs")
            assert "/predict" in client.get("/openapi.json").json()["paths"]
    finally:
        kill(server)
