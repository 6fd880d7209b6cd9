"""OpenAI's client, LangChain, LiteLLM and Open WebUI's calls against a live server."""

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from bert_core.inference.predictor import Predictor

if TYPE_CHECKING:
    import openai

TEXTS = ["Parse a string.", "Open a socket on a port and listen.", "A fox."]
NAME = "feature-extraction"


@pytest.fixture(scope="module")
def wanted(bundles: dict[str, Path]) -> np.ndarray:
    return np.array(Predictor(bundles[NAME], device="cpu").predict(TEXTS), dtype=np.float32)


@pytest.fixture(params=["/v1", f"/v1/models/{NAME}/v1", f"/v1/models/{NAME}"])
def client(front: str, request: pytest.FixtureRequest) -> "Iterator[openai.OpenAI]":
    """At the root, and at the model's URL with and without OpenAI's own prefix."""
    with connected(f"{front}{request.param}") as client:
        yield client


@pytest.fixture
def at_root(front: str) -> "Iterator[openai.OpenAI]":
    with connected(f"{front}/v1") as client:
        yield client


def connected(url: str) -> "openai.OpenAI":
    import openai

    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def test_several_texts_are_embedded_as_the_client_asks_by_default(
    client: "openai.OpenAI", wanted: np.ndarray
) -> None:
    answer = client.embeddings.create(input=TEXTS, model=NAME, user="someone")
    assert [each.index for each in answer.data] == [0, 1, 2]
    vectors = np.array([each.embedding for each in answer.data], dtype=np.float32)
    np.testing.assert_allclose(vectors, wanted, atol=1e-6)
    assert answer.model == NAME
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS) * 2


def test_base64_and_numbers_are_the_same_vectors(front: str, wanted: np.ndarray) -> None:
    url = f"{front}/v1/embeddings"
    bodies = [
        {"input": TEXTS[0], "model": NAME, "encoding_format": form} for form in ("base64", "float")
    ]
    packed, plain = (
        httpx.post(url, json=body, timeout=30).json()["data"][0]["embedding"] for body in bodies
    )
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(packed), dtype="<f4"), np.array(plain, dtype=np.float32)
    )
    np.testing.assert_allclose(plain, wanted[0], atol=1e-6)


def test_models_are_listed_and_retrieved(
    at_root: "openai.OpenAI", bundles: dict[str, Path]
) -> None:
    import openai

    listed = list(at_root.models.list())
    assert {model.id for model in listed} == set(bundles)
    assert all(model.created > 1_700_000_000 and model.owned_by for model in listed)
    model = at_root.models.retrieve(NAME)
    assert (model.id, model.object) == (NAME, "model")
    for name in ("nothing", "org/nothing"):
        with pytest.raises(openai.NotFoundError, match="there is no model"):
            at_root.models.retrieve(name)
    with pytest.raises(openai.APIStatusError, match="wanted the method GET or POST"):
        at_root.models.delete(NAME)


def test_azures_client_learns_that_its_paths_do_not_exist_here(front: str) -> None:
    """openai 3.57: of an error in another shape, its clients show the status alone."""
    import openai

    with (
        openai.AzureOpenAI(
            azure_endpoint=front, api_key="k", api_version="2024-02-01", max_retries=0
        ) as client,
        pytest.raises(openai.NotFoundError, match="there is no such path"),
    ):
        client.embeddings.create(input="a", model=NAME)


def test_errors_have_the_shape_and_the_class_that_the_client_knows(
    at_root: "openai.OpenAI",
) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="wanted a model for feature-extraction"):
        at_root.embeddings.create(input="a", model="fill-mask")
    with pytest.raises(openai.NotFoundError, match='there is no model "other"') as caught:
        at_root.embeddings.create(input="a", model="other")
    assert caught.value.code == "not_found"
    with pytest.raises(openai.BadRequestError, match="at least one text, got an empty list"):
        at_root.embeddings.create(input=[], model=NAME)
    with pytest.raises(openai.BadRequestError, match="dimensions") as refused:
        at_root.embeddings.create(input="a", model=NAME, dimensions=8)
    assert refused.value.type == "invalid_request_error"
    long = "Open a socket. " * 200
    with pytest.raises(openai.BadRequestError, match="wanted at most 128 tokens"):
        at_root.embeddings.create(input=long, model=NAME)


def test_langchain_is_answered_and_its_token_ids_are_explained(
    front: str, wanted: np.ndarray
) -> None:
    from langchain_openai import OpenAIEmbeddings

    settings: dict[str, Any] = {
        "base_url": f"{front}/v1",
        "api_key": "none",
        "model": NAME,
        "max_retries": 0,
    }
    embeddings = OpenAIEmbeddings(check_embedding_ctx_length=False, **settings)
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), wanted, atol=1e-6)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[0]), wanted[0], atol=1e-6)
    # As it sends them with its default, for which it would fetch tiktoken's vocabulary.
    body = {"input": [[9906, 1917]], "model": NAME, "encoding_format": "base64"}
    response = httpx.post(f"{front}/v1/embeddings", json=body, timeout=30)
    assert response.status_code == 400
    assert "check_embedding_ctx_length=False" in response.json()["error"]["message"]


LITELLM = """
import json, sys, litellm
model, url, *texts = sys.argv[1:]
answer = litellm.embedding(model=model, input=texts, api_base=url, api_key="none")
print(json.dumps([each["embedding"] for each in answer.data]))
"""


@pytest.mark.drill
def test_litellm_is_answered(front: str, wanted: np.ndarray) -> None:
    # In a process of its own, since it leaves an event loop open.
    command = [sys.executable, "-c", LITELLM, f"openai/{NAME}", f"{front}/v1", *TEXTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(json.loads(done.stdout.splitlines()[-1]), wanted, atol=1e-6)


def test_open_webui_is_answered(front: str, wanted: np.ndarray) -> None:
    """Its call: `{url}/embeddings` with a key, at the URL that its settings name."""
    response = httpx.post(
        f"{front}/v1/embeddings",
        headers={"Authorization": "Bearer none"},
        json={"input": TEXTS, "model": NAME},
        timeout=30,
    )
    vectors = [each["embedding"] for each in response.json()["data"]]
    np.testing.assert_allclose(vectors, wanted, atol=1e-6)
