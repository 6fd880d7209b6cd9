"""`tritonclient` and plain requests of the Open Inference Protocol against a live server."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bert_core.inference.predictor import Predictor
from serve.http.app import create_model_app
from serve.versions.slot import Slot
from tests.serve import live

TEXTS = ["Parse a string.", "Öffne einen Socket.", ""]


@pytest.fixture(scope="module")
def client(front: str) -> Any:
    import tritonclient.http

    with tritonclient.http.InferenceServerClient(front.removeprefix("http://")) as client:
        yield client


def tensor(name: str, texts: list[str], *, binary: bool) -> Any:
    import tritonclient.http

    made = tritonclient.http.InferInput(name, [len(texts)], "BYTES")
    made.set_data_from_numpy(np.array(texts, dtype=object), binary_data=binary)
    return made


def test_server_and_models_are_alive_and_ready(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("text-classification")
    assert not client.is_model_ready("nothing")
    assert client.get_server_metadata()["name"] == "raybert"


@pytest.mark.parametrize("binary", [True, False])
def test_vectors_come_as_a_tensor(client: Any, bundles: dict[str, Path], *, binary: bool) -> None:
    import tritonclient.http

    wanted = Predictor(bundles["feature-extraction"], device="cpu").predict(TEXTS)
    output = tritonclient.http.InferRequestedOutput("vector", binary_data=binary)
    answer = client.infer(
        "feature-extraction", [tensor("text", TEXTS, binary=binary)], outputs=[output]
    )
    vectors = answer.as_numpy("vector")
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, wanted, atol=1e-6)


@pytest.mark.parametrize("binary", [True, False])
def test_labels_come_as_texts_with_their_scores(
    client: Any, bundles: dict[str, Path], *, binary: bool
) -> None:
    wanted = Predictor(bundles["text-classification"], device="cpu").predict(TEXTS)
    answer = client.infer(
        "text-classification", [tensor("text", TEXTS, binary=binary)], request_id="7"
    )
    labels = [label.decode() if isinstance(label, bytes) else label
              for label in answer.as_numpy("label")]  # fmt: skip
    assert labels == [each[0]["label"] for each in wanted]
    scores = answer.as_numpy("score")
    np.testing.assert_allclose(scores, [each[0]["score"] for each in wanted], atol=1e-6)
    assert answer.get_response()["id"] == "7"


def test_metadata_names_what_infer_takes_and_gives(client: Any, bundles: dict[str, Path]) -> None:
    for name in bundles:
        metadata = client.get_model_metadata(name)
        assert {each["datatype"] for each in metadata["inputs"]} == {"BYTES"}
        assert all(each["datatype"] in ("BYTES", "FP64", "FP32", "INT64")
                   for each in metadata["outputs"])  # fmt: skip
    question = client.get_model_metadata("question-answering")
    assert [each["name"] for each in question["inputs"]] == ["question", "context"]


def test_questions_have_two_inputs_and_an_answer_with_its_place(
    client: Any, bundles: dict[str, Path]
) -> None:
    asked = {"question": ["Where is the tower?"], "context": ["The tower stands in Paris."]}
    [wanted] = Predictor(bundles["question-answering"], device="cpu").predict(
        [{name: values[0] for name, values in asked.items()}]
    )
    inputs = [tensor(name, values, binary=True) for name, values in asked.items()]
    answer = client.infer("question-answering", inputs)
    assert answer.as_numpy("answer")[0].decode() == wanted["answer"]
    assert answer.as_numpy("start")[0] == wanted["start"]


def test_entities_come_as_json(client: Any, bundles: dict[str, Path]) -> None:
    texts = ["The U.S.-based team opens a socket."]  # with a word of several parts
    [wanted] = Predictor(bundles["token-classification"], device="cpu").predict(texts)
    answer = client.infer("token-classification", [tensor("text", texts, binary=False)])
    [entities] = answer.as_numpy("entities")
    assert [each["word"] for each in json.loads(entities)] == [each["word"] for each in wanted]


def of_mlserver(made_of: str, **columns: list[str]) -> dict[str, Any]:
    """A request as codecs of MLServer 1.7.1 encode it: for strings (`str`), for frames (`pd`)."""
    tensors = [
        {"name": name.replace("_1", "-1"), "shape": [len(texts), 1], "datatype": "BYTES",
         "parameters": {"content_type": "str"}, "data": texts}
        for name, texts in columns.items()
    ]  # fmt: skip
    return {"parameters": {"content_type": made_of}, "inputs": tensors}


@pytest.mark.parametrize(
    "body",
    [
        of_mlserver("str", input_1=TEXTS),
        of_mlserver("pd", text=TEXTS),
        {"inputs": [{"name": "args", "shape": [3], "datatype": "BYTES", "data": TEXTS}]},
        {"inputs": [{"name": "input-0", "shape": [3], "datatype": "BYTES", "data": TEXTS}]},
    ],
)
def test_mlservers_and_kserves_requests_are_answered(
    front: str, bundles: dict[str, Path], body: dict[str, Any]
) -> None:
    wanted = Predictor(bundles["text-classification"], device="cpu").predict(TEXTS)
    response = httpx.post(f"{front}/v2/models/text-classification/infer", json=body, timeout=30)
    assert response.status_code == 200, response.text
    outputs = {each["name"]: each["data"] for each in response.json()["outputs"]}
    assert outputs["label"] == [each[0]["label"] for each in wanted]


def test_a_frame_of_two_columns_is_a_pair_per_row(front: str, bundles: dict[str, Path]) -> None:
    body = of_mlserver("pd", text=TEXTS[:2], text_pair=TEXTS[1:])
    rows = [{"text": a, "text_pair": b} for a, b in pairwise(TEXTS)]
    wanted = Predictor(bundles["text-ranking"], device="cpu").predict(rows)
    response = httpx.post(f"{front}/v2/models/text-ranking/infer", json=body, timeout=30)
    [scores] = response.json()["outputs"]
    np.testing.assert_allclose(scores["data"], [each["score"] for each in wanted], atol=1e-6)


def test_the_version_that_is_listed_answers_and_others_are_not_found(client: Any) -> None:
    from tritonclient.utils import InferenceServerException

    name, inputs = "text-classification", [tensor("text", ["a"], binary=True)]
    [version] = client.get_model_metadata(name)["versions"]
    assert client.is_model_ready(name, version)
    assert client.get_model_metadata(name, version) == client.get_model_metadata(name)
    answer = client.infer(name, inputs, model_version=version)
    assert answer.get_response()["model_version"] == version
    assert not client.is_model_ready(name, "2")
    for ask in (
        lambda: client.get_model_metadata(name, "2"),
        lambda: client.infer(name, inputs, model_version="2"),
    ):
        with pytest.raises(InferenceServerException, match="no version '2' of text-class") as told:
            ask()
        assert told.value.status() == "404"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"datatype": "FP32", "data": [1.0]}, "wanted the datatype BYTES, got FP32"),
        ({"name": "texts"}, "wanted one of text, text_pair, got 'texts' (did you mean text?)"),
        ({"shape": [2]}, "wanted at least one text, and as many as the shape [2] says, got 1"),
        ({"shape": [-1]}, "wanted at least one text, and as many as the shape [-1] says"),
        ({"data": [7]}, "wanted texts as data"),
        ({"data": [["a"]]}, "wanted texts as data"),
        (
            {"parameters": {"content_type": "base64"}},
            """inputs.0.parameters.content_type: wanted 'str', got text ("base64")""",
        ),
        (
            {"parameters": {"shared_memory_region": "a"}},
            "inputs.0.parameters: wanted some of binary_data_size, content_type, got",
        ),
        (
            {"shape": [2**62, 4], "data": []},
            "and as many as the shape [4611686018427387904, 4] says",
        ),
    ],
)
def test_a_wrong_tensor_is_an_error_in_the_protocols_shape(
    front: str, change: dict[str, Any], message: str
) -> None:
    good = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}
    url = f"{front}/v2/models/text-classification/infer"
    response = httpx.post(url, json={"inputs": [good | change]}, timeout=30)
    assert response.status_code == 400
    assert message in response.json()["error"]


@pytest.mark.parametrize("depth", [5, 300, 480, 700, 964, 967, 2_000])
def test_nested_data_is_refused_at_any_depth(front: str, depth: int) -> None:
    tensor = '{"name": "text", "shape": [1], "datatype": "BYTES", "data": %s}'
    body = f'{{"inputs": [{tensor % ("[" * depth + "]" * depth)}]}}'
    url = f"{front}/v2/models/text-classification/infer"
    assert httpx.post(url, content=body, timeout=30).status_code == 400


def test_vectors_are_numbers_whatever_is_asked_for(front: str) -> None:
    text = {"name": "text", "shape": [2, 1], "datatype": "BYTES", "data": [["a"], ["b"]]}
    body: dict[str, Any] = {"inputs": [text], "id": "\ud800"}
    url = f"{front}/v2/models/feature-extraction/infer"
    assert httpx.post(url, content=json.dumps(body), timeout=30).status_code == 400
    body = {"inputs": [text], "parameters": {"encoding_format": "base64"}}
    response = httpx.post(url, json=body, timeout=30)
    assert response.status_code == 400
    assert "encoding_format: wanted none" in response.json()["error"]
    [vectors] = httpx.post(url, json={"inputs": [text]}, timeout=30).json()["outputs"]
    assert vectors["shape"] == [2, 32]


@pytest.mark.parametrize("length", ["x", "-1", "9999"])
def test_a_false_length_of_the_json_is_refused(front: str, length: str) -> None:
    response = httpx.post(
        f"{front}/v2/models/text-classification/infer",
        content=b"{}",
        headers={"Inference-Header-Content-Length": length},
        timeout=30,
    )
    assert response.status_code == 400
    assert "wanted the length of the JSON in bytes" in response.json()["error"]


def test_the_client_raises_what_the_server_says(client: Any) -> None:
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException, match="did you mean text"):
        client.infer("text-classification", [tensor("texts", ["a"], binary=True)])


def test_cuts_are_a_parameter_of_the_answer(client: Any) -> None:
    texts = ["a", "a fox " * 200]
    name, inputs = "text-classification", [tensor("text", texts, binary=True)]
    answer = client.infer(name, inputs, parameters={"truncation": True}).get_response()
    place, character = answer["parameters"]["cut_inputs"].split("@")
    assert place == "1"
    assert texts[1][int(character)] == " "
    assert (
        "parameters" not in client.infer(name, [tensor("text", ["a"], binary=True)]).get_response()
    )


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (["vector", "vector"], "outputs: wanted different names, got 'vector' 2 times"),
        (["vector"] * 50_000, "outputs: wanted different names, got 'vector' 50000 times"),
        (["vectors"], "outputs: wanted one of vector, got 'vectors' (did you mean vector?)"),
    ],
)
def test_an_output_that_is_asked_for_twice_or_unknown_costs_no_pass(
    bundles: dict[str, Path], outputs: list[str], message: str
) -> None:
    """An answer would grow by as much again for each of the times."""
    text = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}
    body = {"inputs": [text], "outputs": [{"name": name} for name in outputs]}
    model = live.loaded("own", bundles["feature-extraction"])
    with live.running(create_model_app(Slot(model), alone=True)) as url:
        response = httpx.post(f"{url}/v2/models/own/infer", json=body, timeout=30)
    assert response.status_code == 400
    assert message in response.json()["error"]
    assert model.verdict == "untried"


@pytest.mark.parametrize(
    ("names", "parameters", "message"),
    [
        (["text", "text"], {}, "inputs: wanted different names, got 'text' 2 times"),
        (["text", "text_pair"], {}, "inputs[0]: wanted one text, since a row of this answer has"),
        (["text"], {"per_token": True}, "per_token: wanted none, since a row of this answer has"),
    ],
)
def test_answers_that_do_not_fit_a_tensor_of_vectors_are_refused(
    front: str, names: list[str], parameters: dict[str, Any], message: str
) -> None:
    tensors = [{"name": name, "shape": [1], "datatype": "BYTES", "data": ["a"]} for name in names]
    response = httpx.post(
        f"{front}/v2/models/feature-extraction/infer",
        json={"inputs": tensors, "parameters": parameters},
        timeout=30,
    )
    assert response.status_code == 400
    assert message in response.json()["error"]
