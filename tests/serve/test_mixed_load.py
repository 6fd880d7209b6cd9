"""Every task under load at once while aliases move, on the server as a user runs it."""

import itertools
import threading
import time
from typing import Any

import httpx
import pytest

from tests.serve import live
from tests.serve.conftest import FOLLOWING, Separate
from tests.serve.faults import same

pytestmark = pytest.mark.drill

LOAD_S, WHOLE_LOAD_S = 20.0, 60.0
MOVES, WHOLE_MOVES = 5, 10
FOLLOWED_WITHIN_S = 15.0


AT_THE_ROOT: dict[str, dict[str, Any]] = {
    "feature-extraction": {
        "/v1/embeddings": {"input": "a fox", "model": "feature-extraction"},
        "/similarity": {"inputs": {"source_sentence": "a fox", "sentences": ["a dog", "a"]}},
    },
    "text-ranking": {"/rerank": {"query": "a fox", "texts": ["a dog", "a"]}},
    "nli": {"/": {"inputs": "a", "model": "nli", "parameters": {"candidate_labels": ["b", "c"]}}},
}
"""Requests of other surfaces and tasks, by the model that answers them: path and body."""


def test_mixed_load_while_aliases_move_ends_without_a_failed_request(
    separate: Separate, whole: bool
) -> None:
    from bert_core.inference.predictor import Predictor

    server, folders = separate.server, separate.versions
    predictors = {
        name: {version: Predictor(folder, device="cpu") for version, folder in versions.items()}
        for name, versions in folders.items()
    }
    wanted = {
        name: {
            version: predictor.predict(list(predictor.task.examples))
            for version, predictor in versions.items()
        }
        for name, versions in predictors.items()
    }
    done, problems, counts = threading.Event(), [], dict.fromkeys(folders, 0)

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

    threads = [threading.Thread(target=ask, args=[name]) for name in folders]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    try:
        versions = dict.fromkeys(FOLLOWING, "1")
        for name in itertools.islice(itertools.cycle(versions), WHOLE_MOVES if whole else MOVES):
            versions[name] = "2" if versions[name] == "1" else "1"
            separate.point(name, versions[name])
            live.eventually(
                lambda: version_of(name) == versions[name],  # noqa: B023
                timeout_s=FOLLOWED_WITHIN_S,
            )
        while time.monotonic() < began_s + (WHOLE_LOAD_S if whole else LOAD_S):
            time.sleep(0.2)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert problems == []
    assert min(counts.values()) > 20
