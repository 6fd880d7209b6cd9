"""Texts that are longer than a model reads: every path names a way out that it takes, and a server
that is told to cut them does so on every path."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bert_core.tasks.catalog import TASKS
from serve.http.app import LocalModel, create_front_app
from serve.surfaces.catalog import SURFACES
from serve.versions.slot import Slot
from tests.serve import live

CLASSES, VECTORS, RANKING = "text-classification", "feature-extraction", "text-ranking"
LONG = "open a port " * 100
TENSOR = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [LONG]}
INFER = {"inputs": [TENSOR]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "": (CLASSES, {"inputs": LONG}),
    "/v1/embeddings": (VECTORS, {"input": LONG}),
    "/embeddings": (VECTORS, {"input": [LONG]}),
    "/embed": (VECTORS, {"inputs": LONG}),
    "/embed_all": (VECTORS, {"inputs": LONG}),
    "/embed_sparse": ("sparse-embedding", {"inputs": LONG}),
    "/rerank": (RANKING, {"query": "a fox", "texts": [LONG]}),
    "/predict": (CLASSES, {"inputs": LONG}),
    "/similarity": (VECTORS, {"inputs": {"source_sentence": "a", "sentences": [LONG]}}),
    "/v1/rerank": (RANKING, {"query": "a", "documents": [LONG], "truncation": False}),
    "/v2/rerank": (RANKING, {"query": "a", "documents": [LONG], "truncation": False}),
    "/v1/embed": (VECTORS, {"texts": [LONG], "truncate": "NONE"}),
    "/v2/embed": (VECTORS, {"texts": [LONG], "truncate": "NONE"}),
    "/v2/models/{model}/infer": (VECTORS, INFER),
    "/v2/models/{model}/versions/{version}/infer": (CLASSES, INFER),
    "/invocations": (VECTORS, {"inputs": [LONG]}),
}
"""A path → a model, and a request to it that is refused."""
SHORT = {"/tokenize", "/decode", "/attention"}
"""Paths where the model reads nothing, or as many tokens as the page draws."""
OF_TASKS: dict[str, Any] = {
    "fill-mask": f"[MASK] {LONG}",
    "nli": LONG,
    "multiple-choice": {"text": LONG, "choices": ["a", "b"]},
    "next-sentence-prediction": {"text": LONG, "text_pair": LONG},
    "relation-classification": f"<e1>a</e1> <e2>b</e2> {LONG}",
    "minimal-pairs": {"sentence_good": LONG, "sentence_bad": "a"},
    "text-regression": {"text": LONG, "text_pair": "a"},
    "sparse-embedding": LONG,
    VECTORS: LONG,
    RANKING: {"text": "a", "text_pair": LONG},
    CLASSES: LONG,
}
WINDOWED = {"question-answering", "span-classification", "token-classification"}
"""Tasks that read a long text whole."""
REMEDY = re.compile(r"wanted at most 128 tokens .* got \d+: send (\{.*\}) too to have it cut, or")


def merged(body: Any, other: Any) -> Any:
    """Objects with the keys of both, where the other's count."""
    if not (isinstance(body, dict) and isinstance(other, dict)):
        return other
    return body | {key: merged(body.get(key), value) for key, value in other.items()}


def post(url: str, model: str, path: str, body: Any) -> httpx.Response:
    place = path.format(model=model, version="1")
    return httpx.post(f"{url}/v1/models/{model}{place}", json=body, timeout=30)


def test_every_path_that_reads_texts_is_here() -> None:
    posts = {e.path for surface in SURFACES for e in surface.endpoints if e.method == "POST"}
    assert posts == BODIES.keys() | SHORT
    able = {name for name, task in TASKS.items() if task.trainable and task.parameters.cut_by}
    assert able <= OF_TASKS.keys()
    assert not able & WINDOWED


def check_remedy(url: str, model: str, path: str, body: Any) -> None:
    refused = post(url, model, path, body)
    assert refused.status_code in (400, 422), refused.text
    found = REMEDY.search(refused.text.replace('\\"', '"'))
    assert found, refused.text
    answered = post(url, model, path, merged(body, json.loads(found[1])))
    assert answered.status_code == 200, answered.text
    assert answered.headers["X-Cut-Inputs"]


@pytest.mark.parametrize("path", BODIES)
def test_the_remedy_that_a_message_names_is_one(front: str, path: str) -> None:
    check_remedy(front, *BODIES[path][:1], path, BODIES[path][1])


def test_the_remedy_where_documents_take_the_place_of_texts_is_to_leave_truncation_out(
    front: str,
) -> None:
    body = {"query": "a", "documents": [LONG], "truncation": False}
    refused = post(front, RANKING, "/rerank", body)
    assert refused.status_code == 422
    told = refused.json()["error"]
    assert told.endswith("leave out truncation to have it cut, or split the text")
    del body["truncation"]
    answered = post(front, RANKING, "/rerank", body)
    assert (answered.status_code, bool(answered.headers["X-Cut-Inputs"])) == (200, True)


@pytest.mark.parametrize("name", OF_TASKS)
def test_the_remedy_for_a_task_is_one(front: str, name: str) -> None:
    labels = {"parameters": {"candidate_labels": ["a", "b"]}} if name == "nli" else {}
    check_remedy(front, name, "", {"inputs": OF_TASKS[name], **labels})


@pytest.fixture(scope="module")
def cutting(bundles: dict[str, Path]) -> Iterator[str]:
    """URL of a server whose models cut texts."""
    names = {name for name, _ in BODIES.values()}
    slots = {name: Slot(live.loaded(name, bundles[name], truncate=True)) for name in names}
    app = create_front_app({name: LocalModel(slot) for name, slot in slots.items()})
    with live.running(app) as url:
        yield url


@pytest.mark.parametrize("path", BODIES)
def test_a_model_that_is_told_to_cut_texts_does_so_unless_a_request_says_otherwise(
    cutting: str, path: str
) -> None:
    model, body = BODIES[path]
    asked = {key: value for key, value in body.items() if key not in ("truncation", "truncate")}
    answered = post(cutting, model, path, asked)
    assert answered.status_code == 200, answered.text
    assert answered.headers["X-Cut-Inputs"]
    assert httpx.get(f"{cutting}/v1/models/{model}/info", timeout=30).json()["auto_truncate"]
    if asked != body:  # its own word for "not"
        assert post(cutting, model, path, body).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": LONG, "truncate": False}),
        ("/embed", {"inputs": LONG, "truncate": False}),
        ("", {"inputs": LONG, "parameters": {"truncate": False}}),
        ("", {"inputs": LONG, "truncate": False}),
        ("/invocations", {"inputs": [LONG], "params": {"truncate": False}}),
        ("/v2/models/{model}/infer", INFER | {"parameters": {"truncate": False}}),
    ],
)
def test_a_request_may_forbid_cutting(cutting: str, path: str, body: dict[str, Any]) -> None:
    refused = post(cutting, VECTORS, path, body)
    assert refused.status_code in (400, 422)
    assert REMEDY.search(refused.text.replace('\\"', '"'))


def test_openais_client_has_long_texts_cut_by_ours_or_vllms_word(front: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{front}/v1", api_key="none", max_retries=0)
    vectors = [
        client.embeddings.create(model=VECTORS, input=LONG, extra_body=body).data[0].embedding
        for body in ({"truncate": True}, {"truncate_prompt_tokens": -1})
    ]
    assert vectors[0] == vectors[1]
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens: wanted -1, got a nu"):
        client.embeddings.create(
            model=VECTORS, input=LONG, extra_body={"truncate_prompt_tokens": 50}
        )
