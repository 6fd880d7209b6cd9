"""LlamaIndex, Haystack and plain requests of TEI's routes against a live server."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.requests import Request

from bert_core.bundle.format import load_bundle
from bert_core.inference.predictor import Predictor
from bert_core.tasks.feature_extraction import FeatureExtraction, FeatureExtractionOptions
from serve.http.app import create_model_app
from serve.model.sizes import SMALL
from serve.request import auth
from serve.request.auth import Keys
from serve.surfaces import base as surface
from serve.surfaces.base import Call, parsed
from serve.versions.slot import Slot
from tests import tiny
from tests.serve import live

TEXTS = ["Parse a string.", "Open a socket on a port and listen.", "A fox."]
QUERY = "Open a port."
VECTORS, RANKING = "feature-extraction", "text-ranking"


@pytest.fixture(params=["", "/v1/models/{name}"])
def base(front: str, request: pytest.FixtureRequest) -> str:
    """The root, and the URL of a model."""
    return f"{front}{request.param}"


def post(url: str, body: Any) -> httpx.Response:
    return httpx.post(url, json=body, timeout=30)


def labels_of(answer: Any) -> list[Any]:
    """Labels in order, list for list."""
    return [each["label"] if isinstance(each, dict) else labels_of(each) for each in answer]


@pytest.fixture(scope="module")
def vectors(bundles: dict[str, Path]) -> np.ndarray:
    predictor = Predictor(bundles[VECTORS], device="cpu")
    parameters = predictor.task.parameters(normalize=True)  # type: ignore[call-arg]
    return np.array(predictor.predict(TEXTS, parameters))


@pytest.fixture(scope="module")
def scores(bundles: dict[str, Path]) -> np.ndarray:
    rows = [{"text": QUERY, "text_pair": text} for text in TEXTS]
    answers = Predictor(bundles[RANKING], device="cpu").predict(rows)
    return np.array([answer["score"] for answer in answers])


def test_embed_gives_a_vector_per_text(base: str, vectors: np.ndarray) -> None:
    url = base.format(name=VECTORS) + "/embed"
    np.testing.assert_allclose(post(url, {"inputs": TEXTS}).json(), vectors, atol=1e-6)
    [single] = post(url, {"inputs": TEXTS[0], "truncate": True}).json()
    np.testing.assert_allclose(single, vectors[0], atol=1e-6)
    [plain] = post(url, {"inputs": TEXTS[0], "normalize": False}).json()
    assert np.linalg.norm(plain) != pytest.approx(1, abs=1e-3)
    long = "open a port " * 100
    assert "wanted at most 128 tokens" in post(url, {"inputs": long}).json()["error"]
    body = {"inputs": long, "truncate": True, "truncation_direction": "Left"}
    assert post(url, body).status_code == 200


def test_embed_all_gives_a_vector_per_token(front: str) -> None:
    tokens = post(f"{front}/tokenize", {"inputs": TEXTS[0], "model": VECTORS}).json()
    [answer] = post(f"{front}/embed_all", {"inputs": TEXTS[0]}).json()
    assert len(answer) == len(tokens[0])


def test_embed_sparse_gives_weights_of_words(front: str, bundles: dict[str, Path]) -> None:
    wanted = Predictor(bundles["sparse-embedding"], device="cpu").predict(TEXTS)
    came = post(f"{front}/embed_sparse", {"inputs": TEXTS}).json()
    for answer, other in zip(came, wanted, strict=True):
        assert [each["index"] for each in answer] == [each["index"] for each in other]
        np.testing.assert_allclose(
            [each["value"] for each in answer], [each["value"] for each in other], atol=1e-5
        )
    long = "open a port " * 100
    assert "wanted at most 128 tokens" in post(f"{front}/embed_sparse", {"inputs": long}).text
    for side in ("left", "Right"):
        body = {"inputs": long, "truncate": True, "truncation_direction": side}
        assert post(f"{front}/embed_sparse", body).status_code == 200


def test_rerank_gives_the_texts_by_score(base: str, scores: np.ndarray) -> None:
    url = base.format(name=RANKING) + "/rerank"
    body = {"query": QUERY, "texts": TEXTS, "return_text": True}
    answer = post(url, body).json()
    order = np.argsort(-scores)
    assert [each["index"] for each in answer] == order.tolist()
    assert [each["text"] for each in answer] == [TEXTS[index] for index in order]
    np.testing.assert_allclose([each["score"] for each in answer], scores[order], atol=1e-6)
    raw = post(url, {"query": QUERY, "texts": TEXTS, "raw_scores": True}).json()
    logits = np.array([each["score"] for each in raw])
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), scores[order], atol=1e-5)


def test_a_long_body_is_looked_through_off_the_event_loop(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def watched(body: bytes) -> Any:
        threads.append(threading.current_thread().name.partition("_")[0])
        return parsed(body)

    monkeypatch.setattr(surface, "parsed", watched)
    model = live.loaded("docs", bundle)

    async def names_documents(size: int) -> bool:
        body = b'{"query": "documents", "texts": ["%b"]}' % (b"a" * size)
        request = Request({"type": "http"})
        call = Call(model=model, request=request, body=body, deadline_s=None, card=model.card)
        return await call.names("documents")

    assert not any(asyncio.run(names_documents(size)) for size in (1, SMALL))
    assert threads == ["MainThread", "texts"]
    asyncio.run(model.close())


def test_predict_takes_a_text_a_pair_and_batches(front: str, bundles: dict[str, Path]) -> None:
    predictor, url = Predictor(bundles["text-classification"], device="cpu"), f"{front}/predict"
    pair = {"text": TEXTS[0], "text_pair": TEXTS[1]}
    single, both = predictor.predict([TEXTS[0], pair])
    for inputs, wanted in (
        (TEXTS[0], single),
        (TEXTS[:2], both),
        ([[TEXTS[0]], TEXTS[:2]], [single, both]),
    ):
        came = post(url, {"inputs": inputs}).json()
        assert labels_of(came) == labels_of(wanted)
    raw = post(url, {"inputs": TEXTS[0], "raw_scores": True}).json()
    assert sum(each["score"] for each in raw) != pytest.approx(1, abs=1e-3)
    assert "wanted a text, or a list of one or two" in post(url, {"inputs": [["a"] * 3]}).text


def test_similarity_gives_a_cosine_per_sentence(front: str, vectors: np.ndarray) -> None:
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}}
    came = post(f"{front}/similarity", body).json()
    np.testing.assert_allclose(came, vectors[1:] @ vectors[0], atol=1e-6)


def test_decode_gives_the_text_of_ids(front: str) -> None:
    [tokens] = post(f"{front}/tokenize", {"inputs": TEXTS[0]}).json()
    ids = [token["id"] for token in tokens]
    bare = [token["text"].lower() for token in tokens[1:-1]]
    [text] = post(f"{front}/decode", {"ids": ids}).json()
    assert text.replace(" ", "") == "".join(bare)
    several = post(f"{front}/decode", {"ids": [ids[1:2], ids[:1]]}).json()
    assert several == [bare[0], ""]
    kept = post(f"{front}/decode", {"ids": ids[:1], "skip_special_tokens": False}).json()
    assert kept == ["[CLS]"]


@pytest.mark.parametrize("text", ["Öffne 𝄞 port­als", "a 🏳️‍🌈 socket", "日本 open"])
def test_a_token_is_the_part_of_the_text_at_its_bytes(front: str, text: str) -> None:
    """As the makers' `into_tokens` has it (core/src/tokenization.rs of 1.9.3)."""
    [tokens] = post(f"{front}/tokenize", {"inputs": text}).json()
    inner = [token for token in tokens if not token["special"]]
    for token in inner:
        assert text.encode()[token["start"] : token["stop"]].decode() == token["text"]
    covered = "".join(token["text"] for token in inner)
    assert covered.replace("­", "") in (text.replace(" ", "").replace("­", ""), covered)
    assert inner[-1]["stop"] <= len(text.encode())
    assert [tokens[0]["text"], tokens[-1]["text"]] == ["[CLS]", "[SEP]"]


def test_a_prompt_comes_before_the_text_and_counts(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    loaded = load_bundle(bundles[VECTORS])
    task = FeatureExtraction(
        options=FeatureExtractionOptions(prompts={"query": "open: "}, default_prompt="query")
    )
    folder = tiny.bundle(tmp_path / "prompts", loaded.tokenizer, loaded.encoder_config, task=task)
    with live.served(folder) as url:
        for body in ({}, {"prompt_name": "query"}):
            response = post(f"{url}/tokenize", {"inputs": "a fox", **body})
            [tokens] = response.json()
            assert [each["text"] for each in tokens[1:4]] == ["open", ":", "a"]
            assert tokens[3]["start"] == int(response.headers["X-Prompt-Bytes"]) == 6
        refused = post(f"{url}/tokenize", {"inputs": "a", "prompt_name": "passage"})
    assert "prompt_name: wanted one of the model's prompts (query)" in refused.json()["error"]


def test_tokenize_names_tokens_and_their_characters(front: str) -> None:
    [tokens] = post(f"{front}/tokenize", {"inputs": TEXTS[0]}).json()
    assert tokens[0]["special"]
    assert tokens[0]["start"] is None
    inner = [token for token in tokens if not token["special"]]
    assert all(0 <= token["start"] < token["stop"] <= len(TEXTS[0]) for token in inner)
    [bare] = post(f"{front}/tokenize", {"inputs": TEXTS[0], "add_special_tokens": False}).json()
    assert bare == inner


@pytest.mark.parametrize("side", ["Left", "left", "Right", "right"])
def test_every_path_that_cuts_takes_a_side(front: str, side: str) -> None:
    long = "open a port " * 100
    bodies: dict[str, dict[str, Any]] = {
        "/embed": {"inputs": long},
        "/embed_all": {"inputs": long},
        "/embed_sparse": {"inputs": long},
        "/predict": {"inputs": long},
        "/rerank": {"query": "a fox", "texts": [long]},
    }
    how = {"truncate": True, "truncation_direction": side}
    for path, body in bodies.items():
        response = post(f"{front}{path}", body | how)
        assert response.status_code == 200, response.text
        [cut] = response.headers["X-Cut-Inputs"].split(",")
        assert cut.endswith("-") == (side.lower() == "left"), (path, cut)
    body = {"inputs": {"source_sentence": long, "sentences": ["a"]}, "parameters": how}
    response = post(f"{front}/similarity", body)
    assert response.headers["X-Cut-Inputs"].endswith("-") == (side.lower() == "left")


def test_info_reports_the_kind_of_model(front: str) -> None:
    kinds = {
        VECTORS: "embedding",
        RANKING: "reranker",
        "text-classification": "classifier",
    }
    for name, kind in kinds.items():
        info = httpx.get(f"{front}/v1/models/{name}/info", timeout=30).json()
        assert list(info["model_type"]) == [kind]
        assert info["model_id"] == name


def test_llama_index_embeds_and_reranks(front: str, vectors: np.ndarray, scores: Any) -> None:
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
    from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

    embedding = TextEmbeddingsInference(model_name=VECTORS, base_url=front)
    came = embedding.get_text_embedding_batch(TEXTS)
    np.testing.assert_allclose(came, vectors, atol=1e-6)
    ranker = TextEmbeddingInference(model_name=RANKING, base_url=front, top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in TEXTS]
    best = ranker.postprocess_nodes(nodes, query_str=QUERY)
    assert [each.text for each in best] == [TEXTS[at] for at in np.argsort(-scores)[:2]]


def test_haystack_reranks_and_embeds(front: str, vectors: np.ndarray, scores: Any) -> None:
    from haystack import Document
    from haystack.utils import Secret
    from haystack_integrations.components.embedders.huggingface_api import (
        HuggingFaceAPITextEmbedder,
    )
    from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

    ranker = HuggingFaceTEIRanker(url=front, top_k=2, token=Secret.from_token("none"))
    result = ranker.run(query=QUERY, documents=[Document(content=text) for text in TEXTS])
    best = [TEXTS[at] for at in np.argsort(-scores)[:2]]
    assert [document.content for document in result["documents"]] == best
    embedder = HuggingFaceAPITextEmbedder(
        api_type="text_embeddings_inference",
        api_params={"url": f"{front}/v1/models/{VECTORS}"},
        token=Secret.from_token("none"),
        normalize=True,
    )
    np.testing.assert_allclose(embedder.run(text=TEXTS[0])["embedding"], vectors[0], atol=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/models/fill-mask/embed", {"inputs": "a"}, 422, "wanted a model for feature-extrac"),
        ("/embed", {"inputs": []}, 422, "at least one text"),
        ("/embed", {"inputs": [1]}, 422, "inputs.0: wanted text, got a number (1)"),
        ("/embed", {"input": "a"}, 422, "did you mean inputs"),
        ("/embed", {"inputs": "a", "dimensions": 3}, 422, "dimensions: wanted"),
        ("/rerank", {"query": "a", "texts": []}, 422, "texts: wanted at least one"),
        (
            "/rerank",
            {"query": "a", "texts": ["b"], "truncation_direction": "up"},
            422,
            "truncation_direction: wanted one of 'left', 'right', 'Left' or 'Right', got text",
        ),
        ("/embed_sparse", {"inputs": "a", "prompt_name": "query"}, 422, "prompt_name: wanted"),
        (
            "/similarity",
            {
                "inputs": {"source_sentence": "a", "sentences": ["b"]},
                "parameters": {"prompt_name": "query"},
            },
            422,
            "prompt_name: wanted",
        ),
        ("/tokenize", {"inputs": "a", "prompt_name": "query"}, 422, "prompts (none), got 'query'"),
        ("/decode", {"ids": [5, 100_000]}, 422, "wanted ids of the vocabulary"),
        ("/decode", {"ids": [-1]}, 422, "ids"),
        ("/decode", {"ids": [[1]] * 3000}, 413, "wanted at most 2048 per request, got 3000"),
        ("/tokenize", {"inputs": ["a"] * 3000}, 413, "wanted at most 2048 per request, got 3000"),
        ("/embed", {"inputs": ["a"] * 3000}, 413, "wanted at most 2048 per request, got 3000"),
    ],
)
def test_errors_have_teis_shape(
    front: str, path: str, body: Any, status: int, message: str
) -> None:
    response = post(f"{front}{path}", body)
    assert response.status_code == status
    assert response.json()["error_type"] == "Validation"
    assert message in response.json()["error"]


ASIDE: dict[str, dict[str, Any]] = {
    "/tokenize": {"inputs": "a socket in Paris"},
    "/decode": {"ids": [5, 6, 7, 8, 9, 10]},
}


@pytest.mark.parametrize("path", ASIDE)
def test_tokens_that_no_pass_reads_count_for_the_key(bundles: dict[str, Path], path: str) -> None:
    key, stored = auth.create("alice", tokens_per_minute=5)
    headers = {"Authorization": f"Bearer {key}"}
    with live.fronted({VECTORS: bundles[VECTORS]}, keys=Keys([stored])) as url:
        statuses = [
            httpx.post(f"{url}{path}", json=ASIDE[path], headers=headers, timeout=30).status_code
            for _ in range(2)
        ]
    assert statuses == [200, 429]


@pytest.mark.parametrize("path", ASIDE)
def test_work_outside_the_queue_keeps_to_the_deadline(bundles: dict[str, Path], path: str) -> None:
    model = live.loaded(VECTORS, bundles[VECTORS])
    is_free = threading.Event()
    with live.running(create_model_app(Slot(model), alone=True)) as url:
        model._texts.submit(is_free.wait)  # as a long text does
        try:
            headers = {"X-Request-Timeout-Ms": "200"}
            response = httpx.post(f"{url}{path}", json=ASIDE[path], headers=headers, timeout=30)
        finally:
            is_free.set()
    assert response.status_code == 504
    assert "wanted an answer within 0.2 s" in response.json()["error"]
