"""The paths of one model and of the front, in this process, by a real bundle."""

import asyncio
import json
import posixpath
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from bert_core.bundle.format import load_bundle
from bert_core.inference.predictor import Predictor
from bert_core.model.sharing import encoder_digest
from bert_core.tasks.base import Kind, Task
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.text_classification import TextClassification, TextClassificationOptions
from serve.http.app import LocalModel, create_front_app, create_model_app
from serve.http.asgi_call import call
from serve.http.routes.page import SHARED
from serve.model.card import Card, Response, ServedModel
from serve.model.model import Model
from serve.request.limits import Limits
from serve.versions.slot import Slot
from tests import tiny
from tests.labelled_rows import EVERY_KIND, rows_of
from tests.serve import live

Answer = tuple[int, Any]


class Caller:
    """Asks an app that runs in an event loop of its own, one for all requests as in a server."""

    def __init__(self, runner: asyncio.Runner, app: FastAPI) -> None:
        self.runner = runner
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://server",
            follow_redirects=True,
        )

    def __call__(self, method: str, path: str, **request: Any) -> Answer:
        return self.runner.run(self.ask(method, path, **request))

    def predict(self, body: Any) -> Answer:
        return self("POST", "/v1/models/docs", json=body)

    async def ask(self, method: str, path: str, **request: Any) -> Answer:
        response = await self.client.request(method, path, **request)
        is_json = response.headers["content-type"] == "application/json"
        return response.status_code, response.json() if is_json else response.text


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def model(bundle: Path, runner: asyncio.Runner) -> Iterator[Model]:
    model = Model("docs", bundle, device="cpu", threads=1, max_batch_tokens=256, max_wait_ms=1.0)
    yield model
    runner.run(model.close())


@pytest.fixture(scope="module")
def ask(model: Model, runner: asyncio.Runner) -> Caller:
    """One model alone, as `serve run` deploys it."""
    return Caller(runner, create_model_app(Slot(model), alone=True))


@pytest.fixture(scope="module")
def front(model: Model, runner: asyncio.Runner) -> Caller:
    """The same model behind a front."""
    return Caller(runner, create_front_app({"docs": LocalModel(Slot(model))}))


def test_a_text_and_a_list_are_answered_as_the_predictor_answers(ask: Caller, bundle: Path) -> None:
    texts = ["Parse a string.", "Open a socket on a port and listen.", ""]
    expected = Predictor(bundle, device="cpu").predict(texts)
    status, answers = ask.predict({"inputs": texts})
    assert status == 200
    for answer, wanted in zip(answers, expected, strict=True):
        assert [each["label"] for each in answer] == [each["label"] for each in wanted]
        scores = [each["score"] for each in answer]
        np.testing.assert_allclose(scores, [each["score"] for each in wanted], atol=1e-6)
    status, single = ask.predict({"inputs": texts[0]})
    assert status == 200
    assert len(single) == 1
    assert [each["label"] for each in single[0]] == [each["label"] for each in expected[0]]


def test_a_pair_is_one_input(ask: Caller, bundle: Path) -> None:
    pair = {"text": "Parse a string.", "text_pair": "Open a socket."}
    [wanted] = Predictor(bundle, device="cpu").predict([pair])
    for inputs in (pair, [pair, "Parse a string."]):
        status, answers = ask.predict({"inputs": inputs})
        assert status == 200
        assert [each["label"] for each in answers[0]] == [each["label"] for each in wanted]
    assert answers[0] != answers[1]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [(True, "wanted text (text) and text_pair (text)"), (False, "inputs: wanted no text_pair")],
)
def test_a_model_that_learned_one_kind_of_texts_refuses_the_other(
    bundle: Path, tmp_path: Path, runner: asyncio.Runner, *, pairs: bool, message: str
) -> None:
    loaded = load_bundle(bundle)
    assert loaded.task is not None
    task = TextClassification(loaded.task.labels, TextClassificationOptions(pairs=pairs))
    folder = tmp_path / "bundle"
    tiny.bundle(folder, loaded.tokenizer, loaded.encoder_config, task=task)
    model = Model("docs", folder, device="cpu", threads=1, max_batch_tokens=256, max_wait_ms=1.0)
    try:
        runner.run(model.check_ready())  # by examples of its kind
        ask = Caller(runner, create_model_app(Slot(model), alone=True))
        single: Any = {"text": "Parse a string."}
        pair = single | {"text_pair": "Open a socket."}
        taken, refused = (pair, single) if pairs else (single, pair)
        assert ask.predict({"inputs": taken})[0] == 200
        status, told = ask.predict({"inputs": refused})
        assert status == 422
        assert message in told["error"]
    finally:
        runner.run(model.close())


def test_parameters_reach_the_task(ask: Caller) -> None:
    body = {"inputs": ["Parse."], "parameters": {"top_k": 2, "function_to_apply": "sigmoid"}}
    status, answers = ask.predict(body)
    assert status == 200
    assert len(answers[0]) == 2
    status, answers = ask.predict({"inputs": "Parse.", "parameters": None})
    assert status == 200
    assert len(answers[0]) == 3


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "the body: wanted a JSON object, it is empty: send"),
        (b"inputs=text", 400, "the body: wanted a JSON object, it is not JSON (unexpected char"),
        (b"\xff\xfe\xfa", 400, "it is not JSON"),
        (b"[" * 100_000, 400, "it is not JSON"),
        (b'"a text"', 422, 'the body: wanted a JSON object, got text ("a text"): send'),
        (b"{}", 422, 'the body: wanted the key "inputs", it is missing: send {"inputs"'),
        (
            b'{"inputs": "a", "paramaters": {}}',
            422,
            'got "paramaters" too (did you mean parameters?): leave it out',
        ),
        (b'{"inputs": 7}', 422, "inputs: wanted text, got a number (7)"),
        (b'{"inputs": null}', 422, "inputs: wanted text, got nothing"),
        (b'{"inputs": {"txt": "a"}}', 422, "inputs: wanted text (text) and text_pair (text), got"),
        (b'{"inputs": []}', 422, "inputs: wanted at least one input, got an empty list"),
        (b'{"inputs": ["a", 3.5]}', 422, "inputs[1]: wanted text, got a number (3.5)"),
        (b'{"inputs": [["a"]]}', 422, 'inputs[0]: wanted text, got a list (["a"])'),
        (b'{"inputs": "\\ud800"}', 400, "no low surrogate in string"),
        (b'{"inputs": "a", "\\ud800": 1}', 400, "no low surrogate in string"),
        (
            b'{"inputs": "a", "parameters": [1]}',
            422,
            "parameters: wanted a JSON object, got a list ([1])",
        ),
        (
            b'{"inputs": "a", "parameters": {"topk": 1}}',
            422,
            "parameters: wanted some of truncation, truncation_direction, top_k, "
            'function_to_apply, got "topk" (did you mean top_k?)',
        ),
        (
            b'{"inputs": "a", "parameters": {"top_k": "2"}}',
            422,
            'parameters.top_k: wanted a whole number, got text ("2")',
        ),
        (b'{"inputs": "a", "parameters": {"top_k": true}}', 422, "got a boolean (true)"),
        (b'{"inputs": "a", "parameters": {"top_k": 0}}', 422, "top_k: wanted at least 1, got 0"),
        (
            b'{"inputs": "a", "parameters": {"function_to_apply": "max"}}',
            422,
            "parameters.function_to_apply: wanted one of 'softmax', 'sigmoid' or 'none', got",
        ),
    ],
)
def test_a_body_that_cannot_be_answered_is_explained(
    ask: Caller, body: bytes, status: int, message: str
) -> None:
    came_status, came = ask("POST", "/", content=body)
    assert (came_status, came["error_type"]) == (
        status,
        {400: "not_json", 422: "invalid_request"}[status],
    )
    assert message in came["error"]
    assert len(came["error"]) < 400


def test_an_unknown_model_is_a_404_that_names_the_served_ones(ask: Caller) -> None:
    message = 'there is no model "dogs": those that you may use are docs'
    openai = {"message": message, "type": "invalid_request_error", "param": None}
    for method, path, error in (
        ("POST", "/v1/models/dogs", {"error": message, "error_type": "not_found"}),
        ("POST", "/v1/models/dogs/embed", {"error": message, "error_type": "Validation"}),
        ("GET", "/v1/models/dogs/info", {"error": message, "error_type": "Validation"}),
        ("GET", "/v1/models/dogs", {"error": openai | {"code": "not_found"}}),
        ("GET", "/v1/models/dogs/puppies", {"error": openai | {"code": "not_found"}}),
    ):
        assert ask(method, path) == (404, error)


def test_an_unknown_path_and_a_wrong_method_are_errors_of_the_nearest_surface(ask: Caller) -> None:
    for path in ("/predicts", "/v1/models/docs/predicts"):
        status, came = ask("GET", path)
        assert (status, came["error_type"]) == (404, "not_found")
        assert came["error"] == f"GET {path}: there is no such path, see /openapi.json"
    status, came = ask("GET", "/embed")
    assert (status, came["error_type"]) == (405, "Validation")
    assert came["error"] == "GET /embed: wanted the method POST"


def test_the_card_has_task_labels_digest_and_metrics(ask: Caller, bundle: Path) -> None:
    status, card = ask("GET", "/v1/models/docs/")
    assert status == 200
    created = card.pop("created")
    assert abs(time.time() - created) < 3600
    predictor = Predictor(bundle, device="cpu")
    digest = predictor.bundle.digest
    [itself] = card.pop("lineage")
    assert itself["digest"] == digest
    assert itself["stage"] is None  # no stage made it
    assert card == {
        "id": "docs",
        "object": "model",
        "owned_by": "raybert",
        "version": None,
        "task": "text-classification",
        "also": [],
        "labels": ["json", "numpy", "socket"],
        "examples": ["A text to be labelled."],
        "metrics": {"accuracy": 0.75},
        "digest": digest,
        "encoder_digest": encoder_digest(predictor.model.encoder),
        "backend": "torch",
        "precision": "fp32",
        "spaces": {},
        "note": None,
        "max_tokens": 128,
        "limits": asdict(Limits()),
        "state": "ready",
        "problem": None,
        "changed": None,
        "candidate": None,
    }
    _, listing = ask("GET", "/v1/models")
    [entry] = listing["data"]
    assert entry.pop("card") == card | {"created": created, "lineage": [itself]}
    assert entry == {
        "id": "docs",
        "object": "model",
        "created": created,
        "owned_by": "raybert",
        "url": "/v1/models/docs",
        "task": "text-classification",
        "state": "ready",
        "problem": None,
    }


@pytest.mark.parametrize("prefix", ["", "/v1/models/docs"])
def test_health_and_readiness_answer(ask: Caller, prefix: str) -> None:
    assert ask("GET", f"{prefix}/healthz") == (200, {"status": "ok"})
    assert ask("GET", f"{prefix}/readyz") == (200, {"status": "ready"})


def test_readiness_runs_a_forward_pass(
    ask: Caller, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(rows: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model.predictor, "forward", fail)
    status, came = ask("GET", "/readyz")
    assert (status, came["error_type"]) == (503, "not_ready")
    assert "got none from docs (RuntimeError)" in came["error"]
    assert ask("GET", "/healthz")[0] == 200
    status, came = ask("POST", "/", json={"inputs": "a"})
    assert (status, came["error_type"]) == (503, "model_failed")
    assert came["error"] == "docs failed at this request: try again, its log says why"
    monkeypatch.undo()
    assert ask("POST", "/", json={"inputs": "a"})[0] == 200


class Down(ServedModel):
    """A model whose process is gone."""

    async def tasks(self) -> Sequence[str]:
        raise ConnectionError

    async def card(self) -> Card:
        raise ConnectionError

    async def check_ready(self) -> None:
        raise ConnectionError

    async def request(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> Response:
        raise ConnectionError


def test_a_path_behind_the_front_reaches_the_model_as_it_was_asked(
    runner: asyncio.Runner,
) -> None:
    """With its query and its escapes, as at the model's own application."""
    asked = []

    class Passed(Down):
        async def tasks(self) -> Sequence[str]:
            return ("text-classification",)

        async def request(
            self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
        ) -> Response:
            async def app(scope: Scope, receive: Receive, send: Send) -> None:
                asked.append((scope["path"], scope["query_string"]))
                await JSONResponse({})(scope, receive, send)

            return await call(app, method, path, headers, body)

    ask = Caller(runner, create_front_app({"docs": Passed()}))
    ask("POST", "/predict?a=b%20c&d", json={"inputs": "a"})
    ask("GET", "/v1/models/docs/some%3Fthing%20%C3%A9?x=1")
    assert asked == [("/predict", b"a=b%20c&d"), ("/some?thing é", b"x=1")]


def test_the_front_lists_and_queries_every_model_and_survives_one_that_is_down(
    model: Model, runner: asyncio.Runner
) -> None:
    ask = Caller(runner, create_front_app({"docs": LocalModel(Slot(model)), "gone": Down()}))
    status, listing = ask("GET", "/v1/models")
    assert status == 200
    assert [
        (each["id"], each["task"], each["state"], each["card"] is None) for each in listing["data"]
    ] == [("docs", "text-classification", "ready", False), ("gone", None, "down", True)]
    status, came = ask("GET", "/readyz")
    assert status == 503
    assert "got none from gone (ConnectionError)" in came["error"]
    assert ask("GET", "/healthz")[0] == 200
    status, came = ask("POST", "/v1/models/dogs/embed")
    assert status == 404
    assert came["error"].endswith("are docs, gone")
    # What the first model does not do, the one that is down may.
    status, came = ask("POST", "/embed", json={"inputs": "a"})
    assert status == 503
    assert "feature-extraction, and gone did not say what it is for" in came["error"]


@pytest.mark.parametrize("caller", ["ask", "front"])
def test_a_models_url_may_end_with_a_slash(
    caller: str, runner: asyncio.Runner, request: pytest.FixtureRequest
) -> None:
    client = request.getfixturevalue(caller).client
    for ending in ("", "/"):
        url = f"/v1/models/docs{ending}"
        assert runner.run(client.post(url, json={"inputs": "a"})).status_code == 200
        assert runner.run(client.get(url)).json()["id"] == "docs"
    assert "/v1/models/docs/" not in {
        path
        for path, methods in runner.run(client.get("/openapi.json")).json()["paths"].items()
        if "post" in methods
    }


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json"}, 200),
        ({"Content-Type": "application/json", "Origin": "http://server"}, 200),
        ({}, 200),
        ({"Content-Type": "application/octet-stream"}, 200),
        ({"Origin": "http://elsewhere"}, 415),
        ({"Origin": "http://elsewhere", "Content-Type": ""}, 415),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "Text/Plain; charset=utf-8"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=a"}, 415),
    ],
)
def test_requests_that_a_foreign_page_may_post_unasked_are_refused(
    ask: Caller, headers: dict[str, str], status: int
) -> None:
    for path in ("/v1/models/docs", "/v1/models/docs/predict"):
        came = ask("POST", path, content=b'{"inputs": "a"}', headers=headers)
        assert came[0] == status
        assert status == 200 or "content-type: wanted application/json" in came[1]["error"]


NAMING = '{"model": "other", "inputs": "a", "options": OPTIONS}'


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (NAMING, 404, 'there is no model "other"'),
        (NAMING.replace("model", "\\u006dodel"), 404, 'there is no model "other"'),
        (
            NAMING.replace('"other"', "5"),
            422,
            "model: wanted the name of a model, got a number (5)",
        ),
        (
            NAMING.replace('"other"', '["docs"]'),
            422,
            "model: wanted the name of a model, got a lis",
        ),
        (NAMING.replace('"other"', "null"), 200, ""),
        (f"\ufeff{NAMING}", 400, "it is not JSON"),
        (NAMING.encode("utf-16"), 400, "it is not JSON"),
        (NAMING.replace("OPTIONS", "NaN"), 400, "it is not JSON"),
        (NAMING.replace("OPTIONS", "1e999"), 400, "it is not JSON"),
        (NAMING.replace("OPTIONS", "9" * 4_000), 400, "it is not JSON"),
        (NAMING.replace("OPTIONS", "[" * 1_100 + "]" * 1_100), 400, "it is not JSON"),
    ],
)
@pytest.mark.parametrize("path", ["/", "/predict"])
def test_no_model_answers_a_body_that_names_another_however_it_is_written(
    front: Caller, path: str, body: str | bytes, status: int, message: str
) -> None:
    content = body if isinstance(body, bytes) else body.replace("OPTIONS", "{}").encode()
    came = front("POST", path, content=content)
    assert came[0] == status
    assert status == 200 or message in came[1]["error"]


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/health", {"status": "ok"}, "error"),
        ("/ping", {}, "message"),
        ("/v2/health/ready", {"ready": True}, "error"),
    ],
)
def test_probes_at_the_root_are_about_all_models(
    model: Model, runner: asyncio.Runner, path: str, answer: Any, message: str
) -> None:
    models: dict[str, ServedModel] = {"docs": LocalModel(Slot(model))}
    assert Caller(runner, create_front_app(models))("GET", path) == (200, answer)
    ask = Caller(runner, create_front_app(models | {"gone": Down()}))
    status, came = ask("GET", path)
    assert status == 503
    assert "got none from gone (ConnectionError)" in came[message]
    for alive in ("/v2/health/live", "/v2"):
        assert ask("GET", alive)[0] == 200
    assert ask("GET", f"/v1/models/docs{path}")[0] == 200


def test_the_page_needs_nothing_from_elsewhere(runner: asyncio.Runner) -> None:
    ask = Caller(runner, create_front_app({"docs": Down()}))
    status, page = ask("GET", "/")
    assert status == 200
    assert "<title>raybert</title>" in page
    wanted = re.findall(r'(?:src|href)="(page/[^"]+)"', page)
    files = set()
    while wanted:  # what the page asks for, and what its scripts import
        path = posixpath.normpath(wanted.pop())
        if path not in files:
            files.add(path)
            status, text = ask("GET", f"/{path}")
            assert status == 200, path
            imported = re.findall(r'from "(\.[^"]+)"', text)
            wanted += [posixpath.join(posixpath.dirname(path), each) for each in imported]
            text = text.replace("http://www.w3.org/2000/svg", "")  # a name, which loads nothing
            assert "vendor" in path or not re.search(r"https?://[^$]|@import|\burl\(", text), path
    folder = Path(__file__).parents[3] / "serve"
    there = {path.relative_to(folder).as_posix() for path in folder.glob("page/**/*.*")}
    assert files == {*there, *(f"page/{name}" for name in SHARED)} - {"page/index.html"}
    assert ask("GET", "/page/none.js")[0] == ask("GET", "/page/%2e%2e/app.py")[0] == 404


def test_openapi_has_the_shapes_of_the_task(ask: Caller) -> None:
    status, spec = ask("GET", "/openapi.json")
    assert status == 200
    operation = spec["paths"]["/"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["inputs"]
    assert schema["additionalProperties"] is False
    parameters = schema["properties"]["parameters"]
    assert parameters["additionalProperties"] is False
    assert set(parameters["properties"]) == {
        "truncation",
        "truncation_direction",
        "top_k",
        "function_to_apply",
    }
    function = parameters["properties"]["function_to_apply"]
    assert function["anyOf"][0]["enum"] == ["softmax", "sigmoid", "none"]
    text, pair, several = schema["properties"]["inputs"]["anyOf"]
    assert text == {"type": "string"}
    assert pair["required"] == ["text"]
    assert set(pair["properties"]) == {"text", "text_pair"}
    assert several["items"]["anyOf"] == [text, pair]
    answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer["type"] == "array"
    assert answer["items"]["type"] == "array"
    json.dumps(spec)


def test_the_api_page_needs_nothing_from_elsewhere(ask: Caller) -> None:
    status, page = ask("GET", "/docs")
    assert status == 200
    files = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(files) >= 2
    for file in files:
        assert file.startswith("/")
        assert ask("GET", file)[0] == 200


def test_concurrent_requests_get_their_own_answers(ask: Caller, bundle: Path) -> None:
    words = ["array", "socket", "port", "string", "JSON", "object", "fox", "dog"]
    texts = [" ".join(words[: 1 + index % 8]) + f" {index}" for index in range(120)]
    expected = Predictor(bundle, device="cpu").predict(texts)

    async def scenario() -> list[Answer]:
        bodies = ({"inputs": text} for text in texts)
        return await asyncio.gather(*(ask.ask("POST", "/", json=body) for body in bodies))

    for (_, answers), wanted in zip(ask.runner.run(scenario()), expected, strict=True):
        assert [each["label"] for each in answers[0]] == [each["label"] for each in wanted]
        scores = [each["score"] for each in answers[0]]
        np.testing.assert_allclose(scores, [each["score"] for each in wanted], atol=1e-6)


def test_vectors_are_served_as_hugging_faces_client_asks_for_them(
    bundle: Path, tmp_path: Path, runner: asyncio.Runner
) -> None:
    from huggingface_hub.inference._providers import get_provider_helper

    tokenizer = load_bundle(bundle).tokenizer
    config = load_bundle(bundle).encoder_config
    task = FeatureExtraction()
    tiny.bundle(tmp_path / "vectors", tokenizer, config, task=task)
    model = Model(
        "docs", tmp_path / "vectors", device="cpu", threads=1, max_batch_tokens=256, max_wait_ms=1.0
    )
    ask = Caller(runner, create_model_app(Slot(model), alone=True))
    predictor = Predictor(tmp_path / "vectors", device="cpu")
    try:
        long = "Open a socket. " * 90
        parameters: dict[str, Any] = {
            "normalize": True,
            "truncate": True,
            "truncation_direction": "left",
        }
        helper = get_provider_helper("hf-inference", "feature-extraction", "http://x")
        request = helper.prepare_request(
            inputs=["Parse a string.", long], parameters=parameters, headers={}, model="http://x",
            api_key=None,
        )  # fmt: skip
        assert request.json == {"inputs": ["Parse a string.", long], **parameters}
        status, answers = ask.predict(request.json)
        assert status == 200
        wanted = predictor.predict(["Parse a string.", long], task.parameters(**parameters))
        np.testing.assert_allclose(answers, wanted, atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(answers, axis=1), 1, atol=1e-6)
        body = {"inputs": "Parse a string.", "parameters": {"per_token": True}, "normalize": True}
        status, [tokens] = ask.predict(body)
        assert (status, len(tokens)) == (200, len(tokenizer.encode(["Parse a string."], None)[0]))
        for odd, message in (
            (
                {"prompt_name": "query"},
                "prompt_name: wanted one of the model's prompts (none), got 'query'",
            ),
            ({"normalize": "yes"}, "parameters.normalize: wanted true or false"),
            (
                {"normalize": "yes", "parameters": {"normalize": True}},
                "parameters.normalize: wanted true or false",
            ),
        ):
            status, came = ask.predict({"inputs": "a", **odd})
            assert status == 422
            assert message in came["error"]
        _, spec = ask("GET", "/openapi.json")
        content = spec["paths"]["/"]["post"]["requestBody"]["content"]
        fields = set(content["application/json"]["schema"]["properties"])
        assert {"inputs", "parameters", "normalize", "truncate"} <= fields
    finally:
        runner.run(model.close())


@pytest.mark.drill
def test_an_exported_bundle_answers_as_its_original(
    bundle: Path, exported: Path, runner: asyncio.Runner
) -> None:
    predictor = Predictor(bundle, device="cpu")
    model = Model("docs", exported, device="cpu", threads=1, max_batch_tokens=256, max_wait_ms=1.0)
    texts = ["Parse a string.", "Open a socket on a port and listen.", ""]
    try:
        ask = Caller(runner, create_model_app(Slot(model), alone=True))
        status, answers = ask.predict({"inputs": texts})
        card = model.card()
    finally:
        runner.run(model.close())
    assert status == 200
    assert card.backend in ("onnxruntime", "openvino")
    assert (card.precision, card.note) == ("fp32", None)
    for answer, wanted in zip(answers, predictor.predict(texts), strict=True):
        assert [each["label"] for each in answer] == [each["label"] for each in wanted]
        scores = [each["score"] for each in answer]
        np.testing.assert_allclose(scores, [each["score"] for each in wanted], atol=1e-5)


def test_the_card_has_the_examples_of_the_bundle(bundle: Path, tmp_path: Path) -> None:
    loaded, examples = load_bundle(bundle), ["Parse a string.", {"text": "a", "text_pair": "b"}]
    about: dict[str, Any] = {"task": loaded.task, "examples": examples}
    folder = tiny.bundle(tmp_path / "own", loaded.tokenizer, loaded.encoder_config, **about)
    with live.fronted({"docs": folder}) as url:
        card = httpx.get(f"{url}/v1/models/docs").json()
        assert card["examples"] == examples
        answered = httpx.post(f"{url}/v1/models/docs", json={"inputs": card["examples"]})
        assert (answered.status_code, len(answered.json())) == (200, 2)


@pytest.mark.parametrize(("kind_of_task", "kind"), EVERY_KIND)
def test_a_model_of_every_kind_of_rows_answers_as_its_predictor(
    kind_of_task: type[Task], kind: Kind, bundle: Path, tmp_path: Path, runner: asyncio.Runner
) -> None:
    loaded = load_bundle(bundle)
    task = kind_of_task.from_rows(kind.rows, kind_of_task.options_of(kind.options))
    tiny.bundle(tmp_path / "own", loaded.tokenizer, loaded.encoder_config, task=task)
    requests = [task.request_of(row) for row in rows_of(kind, 4)]
    wanted = json.loads(json.dumps(Predictor(tmp_path / "own", device="cpu").predict(requests)))
    model = Model(
        "docs", tmp_path / "own", device="cpu", threads=1, max_batch_tokens=256, max_wait_ms=1.0
    )
    try:
        runner.run(model.check_ready())
        ask = Caller(runner, create_model_app(Slot(model), alone=True))
        status, answers = ask.predict({"inputs": requests})
        assert status == 200
        assert len(answers) == len(wanted)
        assert_alike(answers, wanted)
        status, card = ask("GET", "/v1/models/docs")
        assert status == 200
        assert card["task"] == task.name
    finally:
        runner.run(model.close())


def assert_alike(came: Any, wanted: Any) -> None:
    """Equal, but for numbers, which batches of other texts round otherwise."""
    if isinstance(wanted, float):
        assert came == pytest.approx(wanted, abs=1e-5)
    elif isinstance(wanted, list):
        assert len(came) == len(wanted)
        for one, other in zip(came, wanted, strict=True):
            assert_alike(one, other)
    elif isinstance(wanted, dict):
        assert came.keys() == wanted.keys()
        for name in wanted:
            assert_alike(came[name], wanted[name])
    else:
        assert came == wanted
