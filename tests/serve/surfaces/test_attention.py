"""Attention over HTTP is what `bert_core.inference.inspection` computes."""

from pathlib import Path

import httpx
import numpy as np
import pytest

from bert_core.inference.inspection import attention
from bert_core.inference.predictor import Predictor
from serve.request import auth
from serve.request.auth import Keys
from tests.serve import live

MODEL = "question-answering"
TEXT, PAIR = "Open a socket.", "Parse a string as JSON and return the object."


@pytest.mark.parametrize("pair", [None, PAIR])
@pytest.mark.parametrize("layer", [None, 1])
def test_every_head_of_a_layer_is_told(
    layer: int | None, pair: str | None, front: str, bundles: dict[str, Path]
) -> None:
    body = {"text": TEXT, "text_pair": pair, "layer": layer}
    response = httpx.post(f"{front}/v1/models/{MODEL}/attention", json=body)
    answer = response.json()
    predictor = Predictor(bundles[MODEL], device="cpu")
    wanted = attention(predictor.model, predictor.bundle.tokenizer, TEXT, pair)
    assert answer["tokens"] == wanted.tokens
    assert answer["special"] == wanted.special.tolist()
    assert answer["layers"] == len(wanted.weights)
    assert answer["layer"] == layer or len(wanted.weights)
    np.testing.assert_allclose(answer["weights"], wanted.weights[answer["layer"] - 1], atol=1e-4)
    assert response.headers["X-Tokens"] == str(len(wanted.tokens))


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"text": "Open. " * 200}, 413, "wanted at most 128 tokens, special ones included, got"),
        ({"text": TEXT, "layer": 99}, 422, "layer: wanted at most"),
        ({"text": TEXT, "layer": 0}, 422, "layer"),
        ({"texts": TEXT}, 422, "text"),
    ],
)
def test_invalid_attention_requests_are_refused(
    body: dict[str, object], status: int, message: str, front: str
) -> None:
    response = httpx.post(f"{front}/v1/models/{MODEL}/attention", json=body)
    assert response.status_code == status
    assert message in response.json()["error"]


@pytest.mark.drill  # exporting takes seconds
def test_a_graph_does_not_return_its_attention(exported: Path) -> None:
    with live.served(exported, backend="onnxruntime") as url:
        response = httpx.post(f"{url}/attention", json={"text": TEXT})
    assert response.status_code == 422
    assert "this one runs on onnxruntime" in response.json()["error"]


def test_its_tokens_count_for_the_key(bundle: Path) -> None:
    key, stored = auth.create("alice", tokens_per_minute=5)
    headers = {"Authorization": f"Bearer {key}"}
    with live.fronted({"docs": bundle}, keys=Keys([stored])) as url:
        ask = [httpx.post(f"{url}/v1/models/docs/attention", json={"text": PAIR}, headers=each)
               for each in ({}, headers, headers)]  # fmt: skip
    assert [response.status_code for response in ask] == [401, 200, 429]
