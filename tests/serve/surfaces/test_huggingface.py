"""`huggingface_hub.InferenceClient`, every method, and Chroma's and LiteLLM's bodies, against a
live server: the answers are those of the predictor, in the shapes that the client reads."""

import asyncio
import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from bert_core.inference.predictor import Predictor
from bert_core.tasks.base import Task
from bert_core.tasks.catalog import TASKS
from serve.model.answers import MOST_CUT
from serve.request.limits import Limits
from serve.surfaces.huggingface import Shapes

TEXT = "Open a socket in Paris."
MASKED = "Open a [MASK] and listen."
QUESTION: dict[str, Any] = {
    "question": "Where is the tower?",
    "context": "The Eiffel Tower stands in Paris.",
}
SENTENCES = ["Parse a string.", "The fox jumps."]


@pytest.fixture(scope="module")
def client() -> InferenceClient:
    return InferenceClient(provider="hf-inference")


def predicted(bundles: dict[str, Path], name: str, inputs: Any, **parameters: Any) -> Any:
    predictor = Predictor(bundles[name], device="cpu")
    [answer] = predictor.predict([inputs], predictor.task.parameters(**parameters))
    return answer


def assert_scored(came: Any, wanted: Any) -> None:
    assert [each.label for each in came] == [each["label"] for each in wanted]
    np.testing.assert_allclose(
        [each.score for each in came], [each["score"] for each in wanted], atol=1e-6
    )


def model(front: str, name: str) -> str:
    return f"{front}/v1/models/{name}"


def test_text_classification(client: InferenceClient, front: str, bundles: dict[str, Path]) -> None:
    name = "text-classification"
    wanted = predicted(bundles, name, TEXT)
    answer = client.text_classification(TEXT, model=model(front, name))
    assert_scored(answer, wanted)
    [best] = client.text_classification(
        TEXT, model=model(front, name), top_k=1, function_to_apply="sigmoid"
    )
    sigmoid = predicted(bundles, name, TEXT, top_k=1, function_to_apply="sigmoid")
    assert best.score == pytest.approx(sigmoid[0]["score"], abs=1e-6)


def test_the_root_is_the_model_of_the_server(client: InferenceClient, front: str) -> None:
    assert client.text_classification(TEXT, model=front) == client.text_classification(
        TEXT, model=model(front, "text-classification")
    )


@pytest.mark.parametrize("strategy", [None, "none", "simple", "first", "average", "max"])
def test_token_classification(
    client: InferenceClient, front: str, bundles: dict[str, Path], strategy: Any
) -> None:
    name = "token-classification"
    asked = {} if strategy is None else {"aggregation_strategy": strategy}
    wanted = predicted(bundles, name, TEXT, ignore_labels=[], stride=4, **asked)
    answer = client.token_classification(
        TEXT,
        model=model(front, name),
        aggregation_strategy=strategy,
        ignore_labels=[],
        stride=4,
    )
    key = "entity" if strategy == "none" else "entity_group"
    assert [(each[key], each.start, each.end, each.word) for each in answer] == [
        (each[key], each["start"], each["end"], each["word"]) for each in wanted
    ]


def test_question_answering(client: InferenceClient, front: str, bundles: dict[str, Path]) -> None:
    name = "question-answering"
    answer = client.question_answering(**QUESTION, model=model(front, name))
    assert not isinstance(answer, list)
    wanted = predicted(bundles, name, QUESTION)
    assert (answer.answer, answer.start) == (wanted["answer"], wanted["start"])
    parameters: dict[str, Any] = {
        "top_k": 3,
        "align_to_words": True,
        "doc_stride": 4,
        "handle_impossible_answer": True,
        "max_answer_len": 5,
        "max_question_len": 6,
        "max_seq_len": 24,
    }
    several = client.question_answering(**QUESTION, model=model(front, name), **parameters)
    assert isinstance(several, list)
    assert [each.answer for each in several] == [
        each["answer"] for each in predicted(bundles, name, QUESTION, **parameters)
    ]


def test_fill_mask(client: InferenceClient, front: str, bundles: dict[str, Path]) -> None:
    name = "fill-mask"
    answer = client.fill_mask(MASKED, model=model(front, name), top_k=3)
    assert [each.token for each in answer] == [
        each["token"] for each in predicted(bundles, name, MASKED, top_k=3)
    ]
    targets = ["socket", "string"]
    chosen = client.fill_mask(MASKED, model=model(front, name), targets=targets)
    assert {each.token_str for each in chosen} == set(targets)
    with pytest.raises(HfHubHTTPError, match="targets: wanted words that are one token"):
        client.fill_mask(MASKED, model=model(front, name), targets=["sockets-and-strings"])


def test_feature_extraction(client: InferenceClient, front: str, bundles: dict[str, Path]) -> None:
    name = "feature-extraction"
    url = model(front, name)
    one = client.feature_extraction(TEXT, model=url)
    assert one.shape == (1, len(predicted(bundles, name, TEXT)))
    long = "Open a socket. " * 90
    cut = {"normalize": True, "truncate": True, "truncation_direction": "left"}
    several = client.feature_extraction([TEXT, long], model=url, **cut)  # type: ignore[arg-type]
    wanted = [predicted(bundles, name, text, **cut) for text in (TEXT, long)]
    np.testing.assert_allclose(several, wanted, atol=1e-6)
    size = one.shape[1]
    np.testing.assert_array_equal(client.feature_extraction(TEXT, model=url, dimensions=size), one)
    odd: tuple[tuple[str, dict[str, Any], str], ...] = (
        (TEXT, {"dimensions": 3}, "dimensions: wanted one that the model was trained for"),
        (TEXT, {"prompt_name": "query"}, "prompt_name: wanted one of the model's prompts"),
        (long, {}, "wanted at most 128 tokens"),
    )
    for text, parameters, message in odd:
        with pytest.raises(HfHubHTTPError, match=message):
            client.feature_extraction(text, model=url, **parameters)


def test_sentence_similarity(client: InferenceClient, front: str, bundles: dict[str, Path]) -> None:
    name = "feature-extraction"
    came = client.sentence_similarity(TEXT, SENTENCES, model=model(front, name))
    vectors = np.array(Predictor(bundles[name], device="cpu").predict([TEXT, *SENTENCES]))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(came, vectors[1:] @ vectors[0], atol=1e-6)


def test_zero_shot_classification(
    client: InferenceClient, front: str, bundles: dict[str, Path]
) -> None:
    labels = ["json", "sockets", "foxes"]
    peer = Predictor(bundles["nli"], device="cpu", task="zero-shot-classification")
    for several in (False, True):
        came = client.zero_shot_classification(
            TEXT,
            labels,
            multi_label=several,
            hypothesis_template="It is about {}.",
            model=model(front, "nli"),
        )
        parameters = peer.task.parameters(
            candidate_labels=labels,  # type: ignore[call-arg]
            multi_label=several,
            hypothesis_template="It is about {}.",
        )
        [wanted] = peer.predict([TEXT], parameters)
        assert_scored(came, wanted)
    with pytest.raises(HfHubHTTPError, match="candidate_labels"):
        client.zero_shot_classification(TEXT, labels, model=model(front, "text-classification"))


def test_health_and_info(client: InferenceClient, front: str) -> None:
    for url in (front, model(front, "feature-extraction")):
        assert client.health_check(url)
        assert client.get_endpoint_info(model=url)["max_input_length"] == 128


def test_the_client_that_does_not_wait_is_answered_alike(front: str) -> None:
    async def ask() -> Any:
        async with AsyncInferenceClient(provider="hf-inference") as client:
            return await asyncio.gather(
                client.text_classification(TEXT, model=model(front, "text-classification")),
                client.feature_extraction(TEXT, model=model(front, "feature-extraction")),
                client.fill_mask(MASKED, model=model(front, "fill-mask")),
            )

    labels, vector, words = asyncio.run(ask())
    client = InferenceClient(provider="hf-inference")
    assert labels == client.text_classification(TEXT, model=model(front, "text-classification"))
    assert vector.shape[0] == 1
    assert len(words) == 5


def test_a_list_is_answered_by_a_list(front: str, bundles: dict[str, Path]) -> None:
    for name, inputs in (
        ("token-classification", TEXT),
        ("fill-mask", MASKED),
        ("question-answering", QUESTION),
        ("text-classification", TEXT),
    ):
        body = {"inputs": [inputs, inputs]}
        answers = httpx.post(model(front, name), json=body, timeout=30).json()
        assert len(answers) == 2
        assert answers[0] == answers[1]
        assert isinstance(answers[0], type(predicted(bundles, name, inputs)))


def test_keys_of_other_servers_change_nothing(front: str) -> None:
    """Chroma's body is `inputs` alone; LiteLLM and others add `options` and `model`."""
    url = model(front, "feature-extraction")
    plain = httpx.post(url, json={"inputs": SENTENCES}, timeout=30).json()
    body = {"inputs": SENTENCES, "options": {"wait_for_model": True}, "model": "anything"}
    assert httpx.post(url, json=body, timeout=30).json() == plain


def test_every_answer_names_its_model_and_what_it_took(
    front: str, bundles: dict[str, Path]
) -> None:
    response = httpx.post(model(front, "text-classification"), json={"inputs": TEXT}, timeout=30)
    digest = Predictor(bundles["text-classification"], device="cpu").bundle.digest
    assert response.headers["X-Model"] == "text-classification"
    assert response.headers["X-Model-Digest"] == digest
    spans = response.headers["Server-Timing"]
    assert [part.split(";")[0] for part in spans.split(", ")] == ["tokenize", "queue", "compute"]
    assert int(response.headers["X-Tokens"]) > 2
    assert "X-Cut-Inputs" not in response.headers


def test_cuts_are_reported_with_the_character(front: str, bundles: dict[str, Path]) -> None:
    long = "a fox, " * 300

    def cuts(name: str, inputs: Any, **parameters: Any) -> list[str]:
        body = {"inputs": inputs, "parameters": parameters}
        response = httpx.post(model(front, name), json=body, timeout=30)
        assert response.status_code == 200, response.text
        return response.headers["X-Cut-Inputs"].split(",")

    name = "text-classification"
    [cut] = cuts(name, ["a", long], truncation=True)
    place, character = cut.split("@")
    assert place == "1"
    tokenizer = Predictor(bundles[name], device="cpu").bundle.tokenizer.inner
    assert len(tokenizer.encode(long[: int(character)], add_special_tokens=False)) == 126
    pair = {"text": "a", "text_pair": long}
    [cut] = cuts(name, ["a", pair], truncation=True)
    assert cut.startswith("1.text_pair@")
    [cut] = cuts("feature-extraction", long, truncate=True, truncation_direction="left")
    start = cut.removeprefix("0@").removesuffix("-")
    assert len(tokenizer.encode(long[int(start) :], add_special_tokens=False)) == 126
    sentences = {"source_sentence": "a", "sentences": ["b", long]}
    [cut] = cuts("feature-extraction", sentences, truncate=True)
    assert cut.startswith("0.sentences[1]@")
    many = cuts("feature-extraction", [long] * 120, truncate=True)
    assert len(many) == MOST_CUT


@pytest.mark.parametrize("name", TASKS)
def test_the_line_that_serve_prints_is_a_request_of_every_task(name: str) -> None:
    from serve.app import curl

    options: list[Any] = [{}]
    takes_pairs = "text_pair" in {field.name for field in fields(TASKS[name].inputs)}
    if takes_pairs and "pairs" in TASKS[name].options.__dataclass_fields__:
        options += [{"pairs": True}, {"pairs": False}]
    for each in options:
        task: Task = TASKS[name](["entailment", "b"], TASKS[name].options_of(each))
        *_, body = shlex.split(curl("http://127.0.0.1:8000/v1/models/own", task.examples[0]))
        parsed = Shapes(task).check(json.loads(body), Limits())
        assert len(parsed.inputs) == 1
        assert json.loads(body) == {"inputs": task.examples[0]}
