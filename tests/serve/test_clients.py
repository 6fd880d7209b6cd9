"""Other people's clients against a live server: every task answers in the shape they expect."""

import json
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from huggingface_hub import InferenceClient

from bert_core.bundle.format import load_bundle
from bert_core.predictor import Predictor
from bert_core.tasks.base import Task
from bert_core.tasks.catalog import TASKS
from serve import api
from serve.app import curl
from serve.model import Model
from serve.surfaces.huggingface import Shapes
from tests import tiny
from tracking.ports import free_ports

LABELS = {
    "token-classification": ["B-place", "I-place", "O"],
    "text-classification": ["json", "numpy", "socket"],
}
TEXT = "Open a socket in Paris."
MASKED = "Open a [MASK] and listen."
QUESTION: dict[str, Any] = {
    "question": "Where is the tower?",
    "context": "The Eiffel Tower stands in Paris.",
}


@pytest.fixture
def folder(bundle: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A bundle of the task that the test names."""
    loaded, name = load_bundle(bundle), request.param
    task = TASKS[name](LABELS.get(name, []))
    folder = tmp_path / "own"
    return tiny.bundle(folder, loaded.tokenizer, loaded.encoder_config, task=task, seed=7)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """URL that the model answers at, by uvicorn as in a replica."""
    model = Model("own", folder, device="cpu", threads=1, max_batch_tokens=256, max_wait_ms=1.0)
    (port,) = free_ports(1)
    app = api.create_model_app(model, alone=True)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def plain(answer: Any) -> Any:
    """A client's objects as the JSON that they were made of."""
    return [plain(each) for each in answer] if isinstance(answer, list) else dict(answer)


@pytest.mark.parametrize("folder", ["token-classification"], indirect=True)
def test_a_text_has_a_flat_list_of_entities(folder: Path) -> None:
    [wanted] = Predictor(folder, device="cpu").predict([TEXT])
    with served(folder) as url:
        answer = InferenceClient().token_classification(TEXT, model=url)
        assert answer[0].word == wanted[0]["word"]
        assert [(one.entity_group, one.start, one.end) for one in answer] == [
            (one["entity_group"], one["start"], one["end"]) for one in wanted
        ]
        several = httpx.post(url, json={"inputs": [TEXT, TEXT]}, timeout=30).json()
    assert [[one["word"] for one in its] for its in several] == [
        [one["word"] for one in wanted]
    ] * 2


@pytest.mark.parametrize("folder", ["fill-mask"], indirect=True)
def test_a_mask_has_a_flat_list_of_candidates(folder: Path) -> None:
    [wanted] = Predictor(folder, device="cpu").predict([MASKED])
    with served(folder) as url:
        answer = InferenceClient().fill_mask(MASKED, model=url, top_k=3)
        assert answer[0].sequence == wanted[0]["sequence"]
        assert [one.token for one in answer] == [one["token"] for one in wanted[:3]]
        several = httpx.post(url, json={"inputs": [MASKED]}, timeout=30).json()
    assert [[one["token"] for one in its] for its in several] == [[one["token"] for one in wanted]]


@pytest.mark.parametrize("folder", ["question-answering"], indirect=True)
def test_a_question_has_one_answer_or_as_many_as_are_asked_for(folder: Path) -> None:
    [wanted] = Predictor(folder, device="cpu").predict([QUESTION])
    with served(folder) as url:
        client = InferenceClient(model=url)
        answer = client.question_answering(**QUESTION)
        assert not isinstance(answer, list)
        assert (answer.answer, answer.start) == (wanted["answer"], wanted["start"])
        best = client.question_answering(**QUESTION, top_k=3)
        assert isinstance(best, list)
        assert len(best) == 3
        assert best[0].answer == wanted["answer"]
        several = httpx.post(url, json={"inputs": [QUESTION]}, timeout=30).json()
    assert [one["answer"] for one in several] == [wanted["answer"]]


@pytest.mark.parametrize("folder", ["text-classification"], indirect=True)
def test_a_text_has_a_flat_list_of_labels(folder: Path) -> None:
    [wanted] = Predictor(folder, device="cpu").predict([TEXT])
    with served(folder) as url:
        answer = InferenceClient().text_classification(TEXT, model=url)
    assert [one.label for one in answer] == [one["label"] for one in wanted]


@pytest.mark.parametrize("folder", ["feature-extraction"], indirect=True)
def test_a_text_has_one_vector(folder: Path) -> None:
    [wanted] = Predictor(folder, device="cpu").predict([TEXT])
    with served(folder) as url:
        answer = InferenceClient().feature_extraction(TEXT, model=url)
    assert answer.shape == (1, len(wanted))


@pytest.mark.parametrize("name", TASKS)
def test_the_line_that_serve_prints_is_a_request_of_every_task(name: str) -> None:
    options: list[Any] = [{}]
    if "pairs" in TASKS[name].options.__dataclass_fields__:
        options += [{"pairs": True}, {"pairs": False}]
    for each in options:
        task: Task = TASKS[name](["a", "b"], TASKS[name].options_of(each))
        *_, body = shlex.split(curl("http://127.0.0.1:8000/v1/models/own", task.examples[0]))
        parsed = Shapes(task).parse(body.encode())
        assert len(parsed.inputs) == 1
        assert json.loads(body) == {"inputs": task.examples[0]}
