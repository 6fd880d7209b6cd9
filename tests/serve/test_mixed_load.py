"""Every task under load at once while aliases move, on the server as a user runs it."""

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from bert_core.bundle.format import load_bundle
from bert_core.predictor import Predictor
from tests import tiny
from tests.serve import live
from tests.serve.server import Server, end_and_kill
from tracking.ports import free_ports
from tracking.registry import publish
from tracking.server import connect

pytestmark = [pytest.mark.ray, pytest.mark.drill]

LOAD_S, MOVES, FOLLOWED_WITHIN_S = 60.0, 10, 15.0
FOLLOWING = (
    "text-classification",
    "token-classification",
    "question-answering",
    "feature-extraction",
    "fill-mask",
)
"""The tasks whose models are named by an alias."""


AT_THE_ROOT: dict[str, dict[str, Any]] = {
    "feature-extraction": {
        "/v1/embeddings": {"input": "a fox", "model": "feature-extraction"},
        "/similarity": {"inputs": {"source_sentence": "a fox", "sentences": ["a dog", "a"]}},
    },
    "text-ranking": {"/rerank": {"query": "a fox", "texts": ["a dog", "a"]}},
    "nli": {"/": {"inputs": "a", "model": "nli", "parameters": {"candidate_labels": ["b", "c"]}}},
}
"""Requests of other surfaces and tasks, by the model that answers them: path and body."""


@pytest.fixture(scope="module")
def second(bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles that give other answers than `bundles`."""
    folder = tmp_path_factory.mktemp("second")
    return {
        name: tiny.bundle(
            folder / name,
            (loaded := load_bundle(bundles[name])).tokenizer,
            loaded.encoder_config,
            task=loaded.task,
            seed=8,
        )
        for name in FOLLOWING
    }


def test_sixty_seconds_of_mixed_load_while_aliases_move_end_without_a_failed_request(
    bundles: dict[str, Path], second: dict[str, Path], tmp_path: Path
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    predictors = {
        name: {"1": Predictor(folder, device="cpu")}
        | ({"2": Predictor(second[name], device="cpu")} if name in FOLLOWING else {})
        for name, folder in bundles.items()
    }
    for name in FOLLOWING:
        examples = list(predictors[name]["1"].task.examples)
        for folder in (bundles[name], second[name]):
            publish(folder, name=name, uri=uri, metrics={}, input_example=examples)
        connect(uri).set_registered_model_alias(name, "champion", "1")
    wanted = {
        name: {
            version: predictor.predict(list(predictor.task.examples))
            for version, predictor in versions.items()
        }
        for name, versions in predictors.items()
    }
    (port,) = free_ports(1)
    models = [
        f"{name}={f'models:/{name}@champion' if name in FOLLOWING else folder}"
        for name, folder in bundles.items()
    ]
    command = ["pipelines.cli", "serve", "--models", *models, "--port", str(port)]
    command += ["--num_cpus", "0.1", "--follow_s", "1", "--tracking_uri", uri]
    server = Server.start(command, port, tmp_path)
    done, problems, counts = threading.Event(), [], dict.fromkeys(bundles, 0)

    def ask(name: str) -> None:
        examples = list(predictors[name]["1"].task.examples)
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not done.is_set():
                response = client.post(f"/v1/models/{name}", json={"inputs": examples})
                counts[name] += 1
                version = response.headers.get("X-Model-Version", "1")
                if response.status_code != 200:
                    problems.append(f"{name}: {response.status_code} {response.text}")
                elif not same(response.json(), wanted[name][version]):
                    problems.append(f"{name}: another answer than that of version {version}")
                for path, body in AT_THE_ROOT.get(name, {}).items():
                    response = client.post(path, json=body)
                    if response.status_code != 200:
                        problems.append(f"{path}: {response.status_code} {response.text}")

    def version_of(name: str) -> str:
        return str(httpx.get(f"{server.url}/v1/models/{name}", timeout=30).json()["version"])

    try:
        server.wait_until_ready(say="curl")
        threads = [threading.Thread(target=ask, args=[name]) for name in bundles]
        began_s = time.monotonic()
        for thread in threads:
            thread.start()
        try:
            versions = dict.fromkeys(FOLLOWING, "1")
            for name in itertools.islice(itertools.cycle(FOLLOWING), MOVES):
                versions[name] = "2" if versions[name] == "1" else "1"
                connect(uri).set_registered_model_alias(name, "champion", versions[name])
                live.eventually(
                    lambda: version_of(name) == versions[name],  # noqa: B023
                    timeout_s=FOLLOWED_WITHIN_S,
                )
            while time.monotonic() < began_s + LOAD_S:
                time.sleep(0.2)
        finally:
            done.set()
            for thread in threads:
                thread.join()
    finally:
        end_and_kill(server)
    assert problems == []
    assert min(counts.values()) > 20


def same(came: Any, expected: Any) -> bool:
    """Whether answers are the same but for rounding: batches differ."""
    if isinstance(expected, float):
        return came == pytest.approx(expected, abs=1e-4)
    if isinstance(expected, dict):
        return came.keys() == expected.keys() and all(
            same(came[key], value) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return len(came) == len(expected) and all(map(same, came, expected))
    return bool(came == expected)
