"""Cohere's client and Jina's and Open WebUI's requests against a live server."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bert_core.inference.predictor import Predictor
from serve.http.app import create_model_app
from serve.request.limits import Limits
from serve.versions.slot import Slot
from tests.serve import live

TEXTS = ["Parse a string.", "Open a socket on a port and listen.", "A fox."]
QUERY = "Open a port."


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30) as http:
        yield http


@pytest.fixture(scope="module")
def scores(bundles: dict[str, Path]) -> np.ndarray:
    rows = [{"text": QUERY, "text_pair": text} for text in TEXTS]
    answers = Predictor(bundles["text-ranking"], device="cpu").predict(rows)
    return np.array([answer["score"] for answer in answers])


@pytest.mark.parametrize("version", [1, 2])
def test_coheres_client_reranks(
    front: str, http: httpx.Client, scores: np.ndarray, version: int
) -> None:
    import cohere

    kind = {1: cohere.Client, 2: cohere.ClientV2}[version]
    answer = kind("none", base_url=front, httpx_client=http).rerank(
        model="text-ranking", query=QUERY, documents=TEXTS, top_n=2
    )
    order = np.argsort(-scores)[:2]
    assert [each.index for each in answer.results] == order.tolist()
    np.testing.assert_allclose(
        [each.relevance_score for each in answer.results], scores[order], atol=1e-6
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the client's own
@pytest.mark.parametrize("version", [1, 2])
def test_coheres_client_embeds_in_every_type(
    front: str, http: httpx.Client, bundles: dict[str, Path], version: int
) -> None:
    import cohere

    wanted = np.array(Predictor(bundles["feature-extraction"], device="cpu").predict(TEXTS))
    kind = {1: cohere.Client, 2: cohere.ClientV2}[version]
    answer: Any = (
        kind("none", base_url=front, httpx_client=http)
        .embed(
            model="feature-extraction",
            texts=TEXTS,
            input_type="search_document",
            embedding_types=["float", "base64", "int8", "uint8", "binary", "ubinary"],
        )
        .embeddings
    )
    np.testing.assert_allclose(answer.float_, wanted, atol=1e-6)
    bits = np.packbits(wanted > 0, axis=1)
    np.testing.assert_array_equal(answer.ubinary, bits)
    np.testing.assert_array_equal(answer.binary, bits.astype(int) - 128)
    assert len(answer.base64) == len(TEXTS)
    integers = np.array(answer.int8)
    assert np.abs(integers).max(axis=1).tolist() == [127] * len(TEXTS)
    np.testing.assert_array_equal(answer.uint8, integers + 128)
    # A number is off by half a step of 1/127 of the largest at most, so a cosine by little.
    np.testing.assert_allclose(cosines(integers), cosines(wanted), atol=0.01)


def cosines(vectors: np.ndarray) -> np.ndarray:
    scaled = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return scaled @ scaled.T


def test_coheres_first_client_gets_a_list_of_vectors(
    front: str, http: httpx.Client, bundles: dict[str, Path]
) -> None:
    import cohere

    texts = TEXTS * 40  # of which the client sends 96 at once
    wanted = Predictor(bundles["feature-extraction"], device="cpu").predict(texts)
    answer = cohere.Client("none", base_url=front, httpx_client=http).embed(
        model="feature-extraction", texts=texts
    )
    assert answer.response_type == "embeddings_floats"
    np.testing.assert_allclose(answer.embeddings, wanted, atol=1e-6)


def test_coheres_client_lists_models_with_what_they_do(front: str, http: httpx.Client) -> None:
    """cohere 7.3, ListModelsResponse: a name and endpoints each."""
    import cohere

    listed = cohere.ClientV2("none", base_url=front, httpx_client=http).models.list().models
    endpoints = {each.name: each.endpoints for each in listed or []}
    assert endpoints["feature-extraction"] == ["embed"]
    assert endpoints["text-ranking"] == ["rerank"]
    assert endpoints["text-classification"] == []


def test_documents_with_fields_are_returned_whole(front: str, http: httpx.Client) -> None:
    import cohere

    documents: Any = [{"text": text, "id": str(place)} for place, text in enumerate(TEXTS)]
    answer: Any = cohere.Client("none", base_url=front, httpx_client=http).rerank(
        model="text-ranking", query=QUERY, documents=documents, return_documents=True
    )
    assert [each.document.id for each in answer.results] == [
        str(each.index) for each in answer.results
    ]


@pytest.mark.parametrize("path", ["/v1/embed", "/v2/embed"])
def test_a_type_that_is_asked_for_twice_or_too_many_numbers_cost_no_pass(
    bundles: dict[str, Path], path: str
) -> None:
    model = live.loaded("own", bundles["feature-extraction"], limits=Limits(max_numbers=500))
    with live.running(create_model_app(Slot(model), alone=True)) as url:
        for body, message in (
            ({"texts": ["a"], "embedding_types": ["float"] * 100_000}, "'float' 100000 times"),
            ({"texts": ["a"] * 8, "embedding_types": ["float", "int8"]}, "vectors have 512"),
        ):
            response = httpx.post(f"{url}{path}", json=body, timeout=30)
            assert response.status_code == 400
            assert message in response.json()["message"]
        assert model.verdict == "untried"
        assert httpx.post(f"{url}{path}", json={"texts": ["a"] * 8}, timeout=30).status_code == 200


def test_cuts_are_warnings(front: str, http: httpx.Client) -> None:
    import cohere

    client = cohere.ClientV2("none", base_url=front, httpx_client=http)
    ranked = client.rerank(model="text-ranking", query=QUERY, documents=["a", "a fox " * 200])
    assert ranked.meta is not None
    assert ranked.meta.warnings is not None
    [warning] = ranked.meta.warnings
    assert re.fullmatch(r"documents\[1\]: read up to character \d+, the rest was cut", warning)
    embedded = client.embed(
        model="feature-extraction",
        texts=["a fox " * 200, "a"],
        input_type="search_query",
        truncate="START",
    )
    assert embedded.meta is not None
    assert embedded.meta.warnings is not None
    [warning] = embedded.meta.warnings
    assert re.fullmatch(r"texts\[0\]: read from character \d+, the rest was cut", warning)
    short = client.rerank(model="text-ranking", query=QUERY, documents=TEXTS)
    assert short.meta is not None
    assert short.meta.warnings is None


def test_jinas_and_open_webuis_bodies_are_answered(front: str, scores: np.ndarray) -> None:
    body = {"model": "text-ranking", "query": QUERY, "documents": TEXTS, "top_n": 3}
    jina = body | {"documents": [{"text": text} for text in TEXTS], "return_documents": True}
    for request in (body, jina):
        for path in ("/v1/rerank", "/v1/models/text-ranking/v1/rerank"):
            answer = httpx.post(f"{front}{path}", json=request, timeout=30).json()
            order = np.argsort(-scores)
            assert [each["index"] for each in answer["results"]] == order.tolist()
            assert answer["usage"]["total_tokens"] > 0
    documents = [each["document"]["text"] for each in answer["results"]]
    assert documents == [TEXTS[at] for at in np.argsort(-scores)]


def test_errors_are_of_the_clients_classes(front: str, http: httpx.Client) -> None:
    import cohere

    client: Any = cohere.ClientV2("none", base_url=front, httpx_client=http)
    with pytest.raises(cohere.NotFoundError):
        client.rerank(model="nothing", query="a", documents=["b"])
    with pytest.raises(cohere.BadRequestError, match="wanted a model for text-ranking"):
        client.rerank(model="fill-mask", query="a", documents=["b"])
