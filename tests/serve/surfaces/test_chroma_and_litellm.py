"""Chroma's and LiteLLM's own calls of servers for Hugging Face's and TEI's routes, against a live
server. They run in processes of their own: LiteLLM leaves an event loop open, Chroma a session."""

import base64
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_core.inference.predictor import Predictor

pytestmark = pytest.mark.drill

TEXTS = ["Parse a string.", "Open a socket on a port and listen.", "A fox."]
QUERY = "Open a port."
CHROMA = """
from chromadb.utils.embedding_functions import HuggingFaceEmbeddingServer

def ask(url, texts):
    return [vector.tolist() for vector in HuggingFaceEmbeddingServer(url)(texts)]
"""
LITELLM = """
import litellm

def ask(call, url, **request):
    name = request.pop("model", "huggingface/served")
    of = {"api_base": url, "api_key": "none"}
    if call == "rerank":
        answer = litellm.rerank(model=name, **of, **request).results
        return [[each["index"], each["relevance_score"], each.get("document")] for each in answer]
    return [each["embedding"] for each in litellm.embedding(model=name, **of, **request).data]
"""
ARGUMENTS = """
import inspect

untried = ask

def names(function):
    return sorted(inspect.signature(inspect.unwrap(getattr(litellm, function))).parameters)

def ask(call, url, **request):
    if call == "names":
        return names(**request)
    try:
        return untried(call, url, **request)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""
MAIN = """
import json, sys
print(json.dumps([ask(*each.pop("args", ()), **each) for each in json.load(sys.stdin)]))
"""


def answers(program: str, requests: list[dict[str, Any]]) -> list[Any]:
    """What the client returns for each request, arguments of the program's `ask`."""
    done = subprocess.run(
        [sys.executable, "-c", program + MAIN],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    came: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return came


@pytest.fixture(scope="module")
def vectors(bundles: dict[str, Path]) -> np.ndarray:
    return np.array(Predictor(bundles["feature-extraction"], device="cpu").predict(TEXTS))


@pytest.mark.skipif(find_spec("chromadb") is None, reason="chromadb-client is not installed")
def test_chromas_embedding_server_is_answered(front: str, vectors: np.ndarray) -> None:
    model = f"{front}/v1/models/feature-extraction"
    urls = [model, f"{model}/embed", f"{front}/embed"]
    for came in answers(CHROMA, [{"url": url, "texts": TEXTS} for url in urls]):
        cosines = (vectors * came).sum(1) / np.linalg.norm(vectors, axis=1)
        np.testing.assert_allclose(cosines, np.linalg.norm(came, axis=1), rtol=1e-5)


def test_litellms_hugging_face_route_embeds(front: str, vectors: np.ndarray) -> None:
    model = f"{front}/v1/models/feature-extraction"
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    request = {"args": ["embedding"], "input": TEXTS}
    plain, embedded, similar, compared = answers(
        LITELLM,
        [
            request | {"url": model, "input_type": "feature-extraction"},
            request | {"url": f"{front}/embed", "input_type": "embed"},
            request | {"url": model, "input_type": "sentence-similarity"},
            request | {"url": f"{model}/similarity", "input_type": "similarity"},
        ],
    )
    np.testing.assert_allclose(plain, vectors, atol=1e-6)
    np.testing.assert_allclose(embedded, unit, atol=1e-6)
    for came in (similar, compared):
        np.testing.assert_allclose(came, unit[1:] @ unit[0], atol=1e-6)


def test_litellms_hugging_face_route_reranks(front: str, bundles: dict[str, Path]) -> None:
    rows = [{"text": QUERY, "text_pair": text} for text in TEXTS]
    predicted = Predictor(bundles["text-ranking"], device="cpu").predict(rows)
    scores = np.array([answer["score"] for answer in predicted])
    request = {"args": ["rerank"], "query": QUERY, "documents": TEXTS}
    whole, best, *others = answers(
        LITELLM,
        [
            request | {"url": front},
            request | {"url": f"{front}/v1/models/text-ranking", "top_n": 2},
            # litellm 1.110: these send documents to /rerank, where vLLM and Infinity take them.
            request | {"url": front, "model": "hosted_vllm/text-ranking"},
            request | {"url": front, "model": "infinity/text-ranking", "return_documents": False},
        ],
    )
    for other in others:
        assert [each[:2] for each in other] == [each[:2] for each in whole]
    order = np.argsort(-scores).tolist()
    assert [index for index, _, _ in whole] == order
    assert [index for index, _, _ in best] == order[:2]
    for index, score, document in (*whole, *best):
        assert score == pytest.approx(scores[index], abs=1e-6)
        assert document == {"text": TEXTS[index]}


LITELLM_EMBEDDING: dict[str, list[tuple[Any, str]]] = {
    # A value, and what comes: `the same` answer as without it, that in base64, or part of what
    # refuses it.
    "dimensions": [(2, "dimensions")],
    "encoding_format": [("float", "the same"), ("base64", "base64")],
    "timeout": [(20, "the same")],
    "user": [("someone", "the same")],
    "caching": [(True, "the same")],
    "api_version": [("2024-10-21", "the same")],
    "api_type": [("openai", "the same")],
    "custom_llm_provider": [("openai", "the same")],
    "litellm_call_id": [("a", "the same")],
    "logger_fn": [(None, "the same")],
}
LITELLM_RERANK: dict[str, list[tuple[Any, str]]] = {
    "top_n": [(10, "the same")],
    "return_documents": [(False, "the same")],
    "rank_fields": [(["text"], "the same")],
    "max_chunks_per_doc": [(1, "the same")],
    "max_tokens_per_doc": [(100, "the same")],
    "custom_llm_provider": [("huggingface", "the same")],
}


def test_every_argument_of_litellm_works_or_is_refused(front: str) -> None:
    """Those of its own signatures, version 1.110.2."""
    usual = {
        "embedding": {"model": "openai/feature-extraction", "url": f"{front}/v1", "input": TEXTS},
        "rerank": {"model": "huggingface/served", "url": front, "query": QUERY, "documents": TEXTS},
    }
    walks = {"embedding": LITELLM_EMBEDDING, "rerank": LITELLM_RERANK}
    cases = [
        (call, name, value, gives)
        for call, walk in walks.items()
        for name, values in walk.items()
        for value, gives in values
    ]
    requests = [{"args": ["names", ""], "function": call} for call in walks]
    requests += [{"args": [call]} | usual[call] for call in walks]
    requests += [{"args": [call]} | usual[call] | {name: value} for call, name, value, _ in cases]
    of_embedding, of_rerank, embedded, reranked, *came = answers(LITELLM + ARGUMENTS, requests)
    given = {"model", "api_base", "api_key", "kwargs", "input", "query", "documents"}
    assert set(of_embedding) - given == set(LITELLM_EMBEDDING)
    assert set(of_rerank) - given == set(LITELLM_RERANK)
    first = {"embedding": embedded, "rerank": [each[:2] for each in reranked]}
    for (call, name, value, gives), answer in zip(cases, came, strict=True):
        if gives == "base64":
            answer = [np.frombuffer(base64.b64decode(each), "f4").tolist() for each in answer]
            np.testing.assert_allclose(answer, first[call], rtol=1e-6)
            continue
        if gives != "the same":
            assert gives in answer, (call, name, value)
            continue
        shown = [each[:2] for each in answer] if call == "rerank" else answer
        assert shown == first[call], (call, name, value, answer)
