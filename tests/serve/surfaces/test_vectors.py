"""Vectors as JSON, base64, raw numbers and Arrow: the same numbers in every form."""

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
import torch

from bert_core.bundle.format import About, load_bundle
from bert_core.bundle.writing import save_bundle
from bert_core.inference.predictor import Predictor
from bert_core.tasks.feature_extraction import FeatureExtraction
from serve.surfaces.catalog import SURFACES
from serve.surfaces.vectors import ARROW, RAW
from tests.serve import live

TEXTS = ["Parse a string.", "Open a socket on a port and listen.", "A fox.", ""]
VECTORS, SPARSE, CLASSES = "feature-extraction", "sparse-embedding", "text-classification"
FLOAT32, FLOAT16 = RAW
JSON = "application/json"


@dataclass(frozen=True)
class Way:
    """A path, the key of its texts, and where its JSON has vectors."""

    path: str
    key: str
    vectors: Callable[[Any], Any]
    message: Callable[[Any], str] = lambda error: error["error"]
    body: tuple[tuple[str, Any], ...] = ()

    def request(self, inputs: Any, **more: Any) -> dict[str, Any]:
        return {self.key: inputs, **dict(self.body), **more}


WAYS = {
    "huggingface": Way("", "inputs", lambda answer: answer),
    "openai": Way(
        "/v1/embeddings",
        "input",
        lambda answer: [each["embedding"] for each in answer["data"]],
        lambda error: error["error"]["message"],
    ),
    "tei": Way("/embed", "inputs", lambda answer: answer, body=(("normalize", False),)),
    "cohere": Way(
        "/v2/embed",
        "texts",
        lambda answer: answer["embeddings"]["float"],
        lambda error: error["message"],
    ),
}


@pytest.fixture(scope="module")
def alone(bundles: dict[str, Path]) -> Iterator[str]:
    with live.served(bundles[VECTORS]) as url:
        yield url


@pytest.fixture(params=["the model's URL", "the root", "no front"])
def base(front: str, alone: str, request: pytest.FixtureRequest) -> str:
    bases = {"the model's URL": f"{front}/v1/models/{VECTORS}", "the root": front}
    return bases.get(request.param, alone)


def post(url: str, body: Any, accept: str | None = None) -> httpx.Response:
    headers = {} if accept is None else {"Accept": accept}
    return httpx.post(url, json=body, headers=headers, timeout=30)


def raw(response: httpx.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    dtype = np.dtype(response.headers["X-Dtype"]).newbyteorder("<")
    assert response.headers["Content-Type"] == (
        f"application/octet-stream; dtype={response.headers['X-Dtype']}"
    )
    shape = [int(size) for size in response.headers["X-Shape"].split(",")]
    return np.frombuffer(response.content, dtype).reshape(shape)


def table(response: httpx.Response) -> pa.Table:
    assert response.status_code == 200, response.text
    assert response.headers["Content-Type"] == ARROW
    return pa.ipc.open_stream(response.content).read_all()


def matrix(column: pa.ChunkedArray) -> np.ndarray:
    """A column of vectors, without a copy."""
    [chunk] = column.chunks
    size = chunk.type.list_size
    return chunk.flatten().to_numpy(zero_copy_only=True).reshape(-1, size)


@pytest.mark.parametrize("inputs", [TEXTS, TEXTS[:1], [""]])
@pytest.mark.parametrize("way", WAYS)
def test_every_form_has_the_numbers_of_json(base: str, way: str, inputs: list[str]) -> None:
    surface = WAYS[way]
    body = surface.request(inputs)
    if way == "huggingface":
        body["model"] = VECTORS  # at the root
    url = f"{base}{surface.path}"
    answer = post(url, body)
    assert answer.headers["Content-Type"] == JSON
    assert "X-Shape" not in answer.headers
    wanted = np.array(surface.vectors(answer.json()), dtype=np.float32)
    assert len(wanted) == len(inputs)
    single = raw(post(url, body, FLOAT32))
    assert single.dtype == np.float32
    np.testing.assert_array_equal(single, wanted)
    half = raw(post(url, body, FLOAT16))
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half, wanted.astype(np.float16))
    response = post(url, body, f"{ARROW}, application/json;q=0.5")
    came = table(response)
    assert came.column_names == ["embedding"]
    assert came.schema.field("embedding").type == pa.list_(pa.float32(), wanted.shape[1])
    np.testing.assert_array_equal(matrix(came["embedding"]), wanted)
    about = {key.decode(): value.decode() for key, value in came.schema.metadata.items()}
    assert about == {
        "model": response.headers["X-Model"],
        "digest": response.headers["X-Model-Digest"],
        "space": response.headers["X-Vector-Space"],
    }
    assert int(response.headers["X-Tokens"]) > 0


def test_one_text_is_one_row(alone: str) -> None:
    [wanted] = post(alone, {"inputs": TEXTS[0]}).json()
    single = raw(post(alone, {"inputs": TEXTS[0]}, FLOAT32))
    np.testing.assert_array_equal(single, np.array([wanted], dtype=np.float32))
    assert len(table(post(alone, {"inputs": TEXTS[0]}, ARROW))) == 1


def test_the_format_of_the_body_is_one_of_json(alone: str) -> None:
    wanted = np.array(post(alone, {"inputs": TEXTS}).json(), dtype=np.float32)
    for path, body in (
        ("", {"inputs": TEXTS, "encoding_format": "base64"}),
        ("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}),
    ):
        np.testing.assert_array_equal(raw(post(f"{alone}{path}", body, FLOAT32)), wanted)
        answer = post(f"{alone}{path}", body).json()
        texts = answer if path == "" else [each["embedding"] for each in answer["data"]]
        packed = b"".join(map(base64.b64decode, texts))
        np.testing.assert_array_equal(np.frombuffer(packed, "<f4").reshape(wanted.shape), wanted)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("", {"inputs": TEXTS, "parameters": {"per_token": True}}),
        ("/embed_all", {"inputs": TEXTS}),
        ("", {"inputs": [{"text": TEXTS[0], "text_pair": TEXTS[1]}, TEXTS[2]]}),
    ],
)
def test_several_vectors_per_input_are_lists_in_arrow(alone: str, path: str, body: Any) -> None:
    url = f"{alone}{path}"
    wanted = post(url, body).json()
    lists = [each if isinstance(each[0], list) else [each] for each in wanted]
    came = table(post(url, body, ARROW))["embedding"].to_pylist()
    assert [len(each) for each in came] == [len(each) for each in lists]
    for row, other in zip(came, lists, strict=True):
        np.testing.assert_array_equal(np.array(row, np.float32), np.array(other, np.float32))
    refused = post(url, body, FLOAT32)
    assert refused.status_code == 406
    assert f"Accept: wanted one of {JSON}, {ARROW}, got" in refused.json()["error"]


def test_sparse_vectors_are_columns_in_arrow(front: str) -> None:
    for url in (f"{front}/v1/models/{SPARSE}", f"{front}/embed_sparse"):
        for inputs in (TEXTS, TEXTS[:1]):
            wanted = post(url, {"inputs": inputs}).json()
            came = table(post(url, {"inputs": inputs}, ARROW))
            assert came.schema.metadata[b"model"].decode() == SPARSE
            assert came["indices"].to_pylist() == [
                [entry["index"] for entry in answer] for answer in wanted
            ]
            assert came["values"].to_pylist() == [
                [entry["value"] for entry in answer] for answer in wanted
            ]
        assert post(url, {"inputs": TEXTS}, FLOAT32).status_code == 406


def test_numbers_that_float16_lacks_are_refused(bundles: dict[str, Path], tmp_path: Path) -> None:
    loaded, predictor = load_bundle(bundles[VECTORS]), Predictor(bundles[VECTORS], device="cpu")
    model = predictor.model  # its last layer's scales and offsets make numbers large
    with torch.no_grad():
        for parameter in list(model.parameters())[-4:]:
            parameter.mul_(1e6)
    large = tmp_path / "large"
    save_bundle(large, model, loaded.tokenizer, About(task=FeatureExtraction()))
    with live.served(large) as url:
        vectors = raw(post(url, {"inputs": TEXTS}, FLOAT32))
        assert np.abs(vectors).max() > np.finfo(np.float16).max
        refused = post(url, {"inputs": TEXTS}, FLOAT16)
        assert refused.status_code == 406
        assert "wanted numbers up to 65504 for float16" in refused.json()["error"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accept", [FLOAT32, ARROW])
def test_errors_stay_json(alone: str, way: str, accept: str) -> None:
    surface = WAYS[way]
    for inputs in ([], [1]):
        response = post(f"{alone}{surface.path}", surface.request(inputs), accept)
        assert response.status_code in (400, 422)
        assert response.headers["Content-Type"] == JSON
        assert "wanted" in surface.message(response.json())


@pytest.mark.parametrize("way", WAYS)
def test_an_unavailable_form_is_refused_in_the_clients_format(alone: str, way: str) -> None:
    surface = WAYS[way]
    response = post(f"{alone}{surface.path}", surface.request(TEXTS), "text/csv")
    assert response.status_code == 406
    assert response.headers["Content-Type"] == JSON
    told = surface.message(response.json())
    for form in (JSON, ARROW, FLOAT32, FLOAT16):
        assert form in told


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (f"/v1/models/{CLASSES}", {"inputs": "a"}, lambda error: error["error"]),
        ("/predict", {"inputs": "a"}, lambda error: error["error"]),
        ("/tokenize", {"inputs": "a"}, lambda error: error["error"]),
        ("/rerank", {"query": "a", "texts": ["b"]}, lambda error: error["error"]),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}, lambda error: error["message"]),
        ("/invocations", {"inputs": ["a"]}, lambda error: error["message"]),
    ],
)
def test_answers_other_than_vectors_are_json_only(
    front: str, path: str, body: Any, message: Any
) -> None:
    url = f"{front}{path}"
    for accept in (None, "*/*", JSON, f"{ARROW}, */*;q=0.1"):
        assert post(url, body, accept).headers["Content-Type"] == JSON
    for accept in (ARROW, "text/csv"):
        response = post(url, body, accept)
        assert response.status_code == 406
        assert message(response.json()).startswith(f"Accept: wanted one of {JSON}, got '{accept}'")


def test_probes_and_lists_do_not_look_at_accept(front: str) -> None:
    for path in ("/health", "/ping", "/readyz", "/v1/models", "/info"):
        response = httpx.get(f"{front}{path}", headers={"Accept": "text/csv"}, timeout=30)
        assert response.status_code == 200


def test_the_documentation_names_every_form(front: str, alone: str) -> None:
    described = httpx.get(f"{alone}/openapi.json", timeout=30).json()["paths"]
    at_root = httpx.get(f"{front}/openapi.json", timeout=30).json()["paths"]
    endpoints = [each for surface in SURFACES for each in surface.endpoints if each.task == VECTORS]
    assert len(endpoints) > 3
    for endpoint in endpoints:
        for paths in (described, at_root):
            answer = paths[endpoint.path]["post"]["responses"]["200"]
            assert set(answer["content"]) == set(endpoint.forms) > {JSON}
    assert set(described["/"]["post"]["responses"]["200"]["content"]) == {JSON, ARROW, *RAW}
