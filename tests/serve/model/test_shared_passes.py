"""One request to several models: the answers of each alone, from one pass of a common encoder."""

import asyncio
import gc
import random
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from bert_core.bundle.format import About, load_bundle
from bert_core.bundle.writing import save_bundle
from bert_core.tasks.base import Task
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.fill_mask import FillMask
from bert_core.tasks.text_classification import TextClassification
from bert_core.tasks.token_classification import TokenClassification, TokenClassificationOptions
from serve.cluster.model_table import AbsentModel
from serve.http.app import LocalModel, create_front_app
from serve.model.card import Card, Response, ServedModel
from serve.observe.records import Recorder
from serve.request import auth
from serve.request.auth import Keys
from serve.request.limits import Limits
from serve.versions.slot import Candidate, Slot
from tests import tiny
from tests.exactness import same
from tests.serve import live
from tests.serve.conftest import TEXTS
from tests.serve.live import Server

TAGS = ["B-place", "I-place", "O"]
HEADS: Mapping[str, Task] = {
    "topic": TextClassification(["json", "numpy", "socket"]),
    "tone": TextClassification(["bad", "good"]),
    "names": TokenClassification(TAGS),
    "layers": TokenClassification(TAGS, TokenClassificationOptions(feature_based=True)),
    "words": FillMask(),
    "vectors": FeatureExtraction(),
}
"""Models that share an encoder: with a pooler each, with tags, of all layers, tied to the words."""
MASKED = "Parse a [MASK] as JSON."
WORDS = " ".join(TEXTS).split()


@pytest.fixture(scope="module")
def heads(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bundle per head on one encoder, poolers and heads their own; `other` has another encoder.

    The encoder is like no other of this process, which would be damaged with it.
    """
    loaded, folder = load_bundle(bundle), tmp_path_factory.mktemp("heads")
    one = tiny.model(loaded.encoder_config, HEADS["topic"].build_objective, seed=73)
    encoder = {
        name: weight
        for name, weight in one.state_dict().items()
        if name.startswith("encoder.") and not name.startswith("encoder.pooler.")
    }
    for seed, (name, task) in enumerate(HEADS.items()):
        model = tiny.model(loaded.encoder_config, task.build_objective, seed=seed)
        assert not model.load_state_dict(encoder, strict=False).unexpected_keys
        save_bundle(folder / name, model, loaded.tokenizer, About(task=task))
    tiny.bundle(
        folder / "other", loaded.tokenizer, loaded.encoder_config, task=HEADS["topic"], seed=9
    )
    return {name: folder / name for name in [*HEADS, "other"]}


class Counts(Recorder):
    """Keeps which models computed how many tokens."""

    def __init__(self) -> None:
        self.passes: list[tuple[str, int]] = []

    def passed(self, model: str, version: str, *, tokens: int, computed: int, fill: float) -> None:
        self.passes.append((model, tokens))


@contextmanager
def served(
    folders: Mapping[str, Path], keys: Keys | None = None, **settings: Any
) -> Iterator[tuple[httpx.Client, dict[str, Slot]]]:
    """A live front with models in its process."""
    slots = {name: Slot(live.loaded(name, each, **settings)) for name, each in folders.items()}
    models = {name: LocalModel(slot, keys) for name, slot in slots.items()}
    with (
        live.running(create_front_app(models, None, keys)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client, slots


@pytest.fixture(scope="module")
def server(heads: dict[str, Path]) -> Iterator[tuple[httpx.Client, dict[str, Slot]]]:
    with served(heads) as both:
        yield both


@contextmanager
def encoder_calls(slots: Mapping[str, Slot]) -> Iterator[list[int]]:
    """Tokens of each forward pass of an encoder, padding included."""
    calls: list[int] = []

    def called(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        calls.append(arguments[0].numel())

    encoders = {id(each.model.predictor.model.encoder): each for each in slots.values()}
    hooks = [
        each.model.predictor.model.encoder.register_forward_pre_hook(called)
        for each in encoders.values()
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def ask(client: httpx.Client, body: Any, **headers: str) -> httpx.Response:
    return client.post("/v1/predict", json=body, headers=headers)


def alone(client: httpx.Client, names: Sequence[str], inputs: Any) -> dict[str, Any]:
    """What each model answers at its own URL."""
    answers = {name: client.post(f"/v1/models/{name}", json={"inputs": inputs}) for name in names}
    return {name: answer.raise_for_status().json() for name, answer in answers.items()}


def texts_of_all_lengths(count: int, begins: str = "") -> list[str]:
    rng = random.Random(5)
    return [begins + " ".join(rng.choices(WORDS, k=rng.randint(1, 20))) for _ in range(count)]


LISTS = [[MASKED], TEXTS[:2], texts_of_all_lengths(60), texts_of_all_lengths(40, "[MASK] ")]


@pytest.mark.parametrize("inputs", [MASKED, *LISTS])
def test_the_answers_are_those_of_each_model_alone(
    server: tuple[httpx.Client, dict[str, Slot]], inputs: Any
) -> None:
    client, _ = server
    names = [*HEADS, "other"]
    if "[MASK]" not in str(inputs):
        names.remove("words")
    response = ask(client, {"models": names, "inputs": inputs})
    assert response.status_code == 200, response.text
    assert list(response.json()) == names
    assert response.json() == same(alone(client, names, inputs))


@pytest.mark.drill
def test_requests_for_several_models_and_for_one_do_not_change_each_other(
    server: tuple[httpx.Client, dict[str, Slot]],
) -> None:
    client, _ = server
    texts, rng = texts_of_all_lengths(80), random.Random(6)
    names = [name for name in HEADS if name != "words"]
    wanted = alone(client, names, texts)
    assert len({str(answer) for answer in wanted["tone"]}) > 60  # or they would show nothing

    async def scenario() -> None:
        turns = asyncio.Semaphore(12)
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as many:

            async def check(places: list[int], models: list[str]) -> None:
                inputs = [texts[place] for place in places]
                async with turns:
                    if len(models) == 1:
                        response = await many.post(
                            f"/v1/models/{models[0]}", json={"inputs": inputs}
                        )
                        answers = {models[0]: response.raise_for_status().json()}
                    else:
                        body = {"models": models, "inputs": inputs}
                        response = await many.post("/v1/predict", json=body)
                        answers = response.raise_for_status().json()
                for name, its in answers.items():
                    assert its == same([wanted[name][place] for place in places])

            async with asyncio.TaskGroup() as group:
                for _ in range(60):
                    places = rng.sample(range(len(texts)), rng.choice([1, 2, 7]))
                    group.create_task(check(places, rng.sample(names, rng.randint(1, 4))))

    asyncio.run(scenario())


def test_a_common_encoder_runs_once_and_another_by_itself(
    server: tuple[httpx.Client, dict[str, Slot]],
) -> None:
    client, slots = server
    with encoder_calls(slots) as calls:
        ask(client, {"models": list(HEADS), "inputs": MASKED}).raise_for_status()
        assert len(calls) == 1
        ask(client, {"models": ["tone", "other", "topic"], "inputs": TEXTS[0]}).raise_for_status()
        assert len(calls) == 3
        calls.clear()
        alone(client, list(HEADS), MASKED)
        assert len(calls) == len(HEADS)


def test_a_common_pass_counts_once(heads: dict[str, Path]) -> None:
    counts = Counts()
    with served({name: heads[name] for name in ("tone", "topic")}, recorder=counts) as (client, _):
        counts.passes.clear()
        response = ask(client, {"models": ["topic", "tone"], "inputs": TEXTS})
        tokens = sum(tokens for _, tokens in counts.passes)
        assert {model for model, _ in counts.passes} == {"tone"}  # the first by name
        assert response.headers["x-tokens"] == f"topic={tokens}, tone={tokens}"


def test_requests_for_several_models_are_batched_with_one_another(heads: dict[str, Path]) -> None:
    names = ["topic", "tone", "vectors"]

    async def scenario(client: httpx.Client) -> None:
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as many:
            bodies = [{"models": names, "inputs": text} for text in texts_of_all_lengths(40)]
            asked = (many.post("/v1/predict", json=body) for body in bodies)
            for response in await asyncio.gather(*asked):
                response.raise_for_status()

    with served({name: heads[name] for name in names}, max_batch_tokens=4096) as (client, slots):
        with encoder_calls(slots) as calls:
            asyncio.run(scenario(client))
        assert len(calls) < 30


def test_a_text_that_models_read_differently_is_read_by_each_in_its_way(
    server: tuple[httpx.Client, dict[str, Slot]],
) -> None:
    client, slots = server
    long = " ".join(WORDS * 5)  # tags are read in windows, a label from the beginning
    models = {"topic": {"truncation": True}, "names": {}, "tone": {"truncation": True}}
    with encoder_calls(slots) as calls:
        response = ask(client, {"models": models, "inputs": [TEXTS[0], long]})
        shared = sum(calls)
    assert response.status_code == 200, response.text
    with encoder_calls(slots) as calls:
        for name, parameters in models.items():
            body = {"inputs": [TEXTS[0], long], "parameters": parameters}
            own = client.post(f"/v1/models/{name}", json=body)
            assert own.json() == same(response.json()[name])
            cut = own.headers.get("x-cut-inputs")
            assert cut is None or f"{name}={cut}" in response.headers["x-cut-inputs"]
        assert shared < sum(calls)
    assert "names=" not in response.headers["x-cut-inputs"]


def test_headers_and_parameters_are_each_models_own(
    server: tuple[httpx.Client, dict[str, Slot]],
) -> None:
    client, slots = server
    body = {
        "models": {"topic": {"top_k": 1}, "tone": {}},
        "inputs": TEXTS[0],
        "parameters": {"top_k": 2},
    }
    response = ask(client, body)
    assert [len(response.json()[name][0]) for name in ("topic", "tone")] == [1, 2]
    digests = [slots[name].model.digest for name in ("topic", "tone")]
    assert response.headers["x-model"] == "topic, tone"
    assert response.headers["x-model-digest"] == f"topic={digests[0]}, tone={digests[1]}"
    timed = [entry.split(";")[0] for entry in response.headers["server-timing"].split(", ")]
    assert timed == [
        f"{name}.{stage}"
        for name in ("topic", "tone")
        for stage in ("tokenize", "queue", "compute")
    ]


def deep(levels: int) -> list[Any]:
    """A list in a list in a list."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


REFUSED = [
    ({"models": ["topic", "none"], "inputs": "a"}, 404, "not_found", 'there is no model "none"'),
    ({"models": [], "inputs": "a"}, 422, "invalid_request", "models: "),
    ({"models": "topic", "inputs": "a"}, 422, "invalid_request", "models: "),
    ({"models": ["topic"]}, 422, "invalid_request", 'wanted the key "inputs"'),
    ({"models": ["topic"], "input": "a"}, 422, "invalid_request", 'got "input"'),
    ({"models": ["topic", "names"], "inputs": {"text": "a", "text_pair": "b"}}, 422,
     "invalid_request", "names: inputs"),
    ({"models": ["topic", "names"], "inputs": "a", "parameters": {"top_k": 1}}, 422,
     "invalid_request", "names: parameters: wanted some of"),
    ({"models": ["topic", "words"], "inputs": "a"}, 422, "invalid_request", "words: "),
    ({"models": ["topic", "tone"], "inputs": ["a"] * 9}, 413, "too_large", ": inputs: wanted"),
    ({"models": ["topic"], "inputs": deep(300)}, 400, "not_json", "less depth"),
]  # fmt: skip


def test_a_refusal_by_one_of_the_models_has_its_name(heads: dict[str, Path]) -> None:
    with served(heads, limits=Limits(max_inputs=8)) as (client, _):
        for body, status, error_type, message in REFUSED:
            response = ask(client, body)
            assert response.status_code == status, (body, response.text)
            assert response.json()["error_type"] == error_type
            assert message in response.json()["error"]
        body = {"models": ["topic", "tone"], "inputs": "a"}
        assert ask(client, body, accept="text/html").status_code == 406
        assert ask(client, body, accept="application/*").status_code == 200
        # Whoever is refused leaves nothing behind that keeps others waiting.
        assert ask(client, body).status_code == 200


@pytest.mark.guard
def test_a_key_must_be_allowed_to_use_all_of_the_models(heads: dict[str, Path]) -> None:
    key, stored = auth.create("alice", models=["topic", "tone"], requests_per_minute=5)
    with served(heads, Keys([stored])) as (client, _):
        body = {"models": ["topic", "tone"], "inputs": "a"}
        assert ask(client, body).status_code == 401
        bearer = {"authorization": f"Bearer {key}"}
        refused = ask(client, {**body, "models": ["topic", "names"]}, **bearer)
        assert refused.status_code == 403
        assert refused.json()["error"].startswith("names: the key of alice")
        # Each model counts its part, and has counted that of the refused request.
        assert [ask(client, body, **bearer).status_code for _ in range(3)] == [200, 200, 429]
        assert int(ask(client, body, **bearer).headers["retry-after"]) > 0


def test_the_route_is_documented(server: tuple[httpx.Client, dict[str, Slot]]) -> None:
    client, _ = server
    route = client.get("/openapi.json").json()["paths"]["/v1/predict"]["post"]
    schema = route["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["models", "inputs"]
    assert route["responses"]["200"]["content"]["application/json"]["schema"]["type"] == "object"


class Elsewhere(ServedModel):
    """A model as the front sees it if it is in another process."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def tasks(self) -> Sequence[str]:
        return await self._model.tasks()

    async def card(self) -> Card:
        return await self._model.card()

    async def check_ready(self) -> None:
        await self._model.check_ready()

    async def request(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> Response:
        # As over Ray, nothing but the arguments comes along.
        asked = self._model.request(method, path, headers, body)
        return await asyncio.get_running_loop().create_task(asked, context=Context())


def test_models_in_other_processes_answer_too(heads: dict[str, Path]) -> None:
    slots = {name: Slot(live.loaded(name, heads[name])) for name in ("topic", "names", "tone")}
    models: dict[str, ServedModel] = {
        name: Elsewhere(LocalModel(slot)) for name, slot in slots.items()
    }
    models["gone"] = AbsentModel("gone", None)
    with (
        live.running(create_front_app(models)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        with encoder_calls(slots) as calls:
            response = ask(client, {"models": list(slots), "inputs": TEXTS[0]})
        assert len(calls) == 3
        assert response.json() == alone(client, list(slots), TEXTS[0])
        down = ask(client, {"models": ["topic", "gone"], "inputs": "a"})
        assert down.status_code == 503
        assert "gone is being loaded" in down.json()["error"]
        assert int(down.headers["retry-after"]) > 0


@pytest.mark.drill
def test_a_whole_graph_answers_beside_an_encoder(
    server: tuple[httpx.Client, dict[str, Slot]], exported: Path, heads: dict[str, Path]
) -> None:
    folders = {"graph": exported, **{name: heads[name] for name in ("topic", "tone")}}
    with served(folders) as (client, slots):
        assert slots["graph"].model.card().encoder_digest is None
        response = ask(client, {"models": list(folders), "inputs": TEXTS[0]})
        assert response.json() == alone(client, list(folders), TEXTS[0])


def test_cached_answers_are_not_computed_again(heads: dict[str, Path]) -> None:
    folders = {name: heads[name] for name in ("topic", "tone")}
    with served(folders, cache_mib=1) as (client, slots):
        wanted = alone(client, ["topic"], TEXTS[:2])
        inputs = [TEXTS[0], TEXTS[2], TEXTS[1]]
        with encoder_calls(slots) as calls:
            response = ask(client, {"models": ["topic", "tone"], "inputs": inputs})
            assert response.headers["x-cache"] == "topic=partial, tone=miss"
            assert [response.json()["topic"][place] for place in (0, 2)] == wanted["topic"]
            calls.clear()
            again = ask(client, {"models": ["topic", "tone"], "inputs": inputs})
            assert again.headers["x-cache"] == "topic=hit, tone=hit"
            assert not calls
        assert again.json() == response.json()
        # What one has and the other lacks is waited for by none.
        alone(client, ["tone"], "A fox.")
        mixed = ask(client, {"models": ["topic", "tone"], "inputs": "A fox."})
        assert mixed.headers["x-cache"] == "topic=miss, tone=hit"


@pytest.mark.parametrize("mode", ["split", "shadow"])
def test_candidates_take_part_in_shared_requests(heads: dict[str, Path], mode: Any) -> None:
    reported: list[Any] = []
    with served({name: heads[name] for name in ("topic", "tone")}) as (client, slots):
        candidate = Slot(live.loaded("topic", heads["other"]))
        own = ask(client, {"models": ["topic", "tone"], "inputs": TEXTS}).json()
        slots["topic"].candidate = Candidate(
            slot=candidate, share=1.0, mode=mode, report=lambda *report: reported.append(report)
        )
        body = {"models": ["topic", "tone"], "inputs": TEXTS}
        with encoder_calls({**slots, "candidate": candidate}) as calls:
            response = ask(client, body, **{"x-caller": "somebody"})
            live.eventually(lambda: len(calls) > 1)
        assert response.json()["tone"] == own["tone"]
        digest = {"split": candidate, "shadow": slots["topic"]}[mode].model.digest
        assert f"topic={digest}" in response.headers["x-model-digest"]
        assert (response.json()["topic"] == own["topic"]) == (mode == "shadow")
        if mode == "shadow":
            live.eventually(lambda: bool(reported))
            assert [tally.failed for _, tally in reported] == [0]


def test_a_head_that_fails_fails_no_request_to_the_others(heads: dict[str, Path]) -> None:
    async def scenario(url: Any) -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            bodies: list[tuple[str, Any]] = [
                ("/v1/predict", {"models": ["names", "tone"], "inputs": text}) for text in TEXTS
            ]
            bodies += [("/v1/models/names", {"inputs": text}) for text in TEXTS]
            asked = await asyncio.gather(*(client.post(path, json=body) for path, body in bodies))
            return [response.status_code for response in asked]

    with served({name: heads[name] for name in ("names", "tone")}) as (client, slots):
        tone = slots["tone"].model
        with torch.no_grad():
            for weight in tone.predictor.model.objectives.parameters():
                weight.fill_(float("nan"))
        count = len(TEXTS)
        assert asyncio.run(scenario(client.base_url)) == [503] * count + [200] * count
        ready = [client.get(f"/v1/models/{name}/readyz").status_code for name in ("names", "tone")]
        assert ready == [200, 503]


def test_equal_encoders_are_in_memory_once_and_a_new_version_has_its_own(
    heads: dict[str, Path],
) -> None:
    names = ["names", "tone", "topic"]
    with served({name: heads[name] for name in names}) as (client, slots):
        first, second = (slots[name].model for name in ("tone", "topic"))
        assert first.card().encoder_digest == second.card().encoder_digest
        weights = {
            name: {weight.data_ptr() for weight in model.predictor.model.encoder.parameters()}
            for name, model in (("tone", first), ("topic", second))
        }
        pooler = second.predictor.model.encoder.pooler
        assert pooler is not None
        assert weights["topic"] - weights["tone"] == {
            each.data_ptr() for each in pooler.parameters()
        }
        assert ask(client, {"models": names, "inputs": TEXTS}).status_code == 200
        old = weakref.ref(second.predictor.model)
        common = weakref.ref(second.predictor.model.encoder.layers)
        del first, second, pooler
        gc.disable()
        try:
            slots["topic"].switch(live.loaded("topic", heads["other"])).retire()
            assert ask(client, {"models": ["topic"], "inputs": "a"}).status_code == 200
            live.eventually(lambda: old() is None, timeout_s=10)
        finally:
            gc.enable()
        assert common() is not None
        with encoder_calls(slots) as calls:
            response = ask(client, {"models": names, "inputs": TEXTS})
        assert len(calls) == 2
        assert response.json() == alone(client, names, TEXTS)
        assert response.headers["x-model-digest"].endswith(slots["topic"].model.digest)


def test_damaged_weights_are_not_shared(heads: dict[str, Path]) -> None:
    damaged = live.loaded("tone", heads["tone"])
    with torch.no_grad():
        next(damaged.predictor.model.encoder.layers.parameters()).fill_(0.5)
    fresh, equal = (live.loaded(name, heads[name]) for name in ("topic", "names"))
    encoders = [each.predictor.model.encoder for each in (damaged, fresh, equal)]
    assert damaged.encoder_digest == fresh.encoder_digest  # as they were loaded
    assert encoders[0].layers is not encoders[1].layers
    assert encoders[0].embeddings is not encoders[1].embeddings
    assert encoders[1].layers is encoders[2].layers


@pytest.mark.drill
def test_a_server_of_models_in_one_process_computes_a_common_encoder_once(
    together: Server,
) -> None:
    names = ["nli", "text-classification"]  # with equal encoders, drawn with the same seed
    with httpx.Client(base_url=together.url, timeout=60) as client:

        def counted(metric: str) -> dict[str, float]:
            values = dict.fromkeys(names, 0.0)
            for family in text_string_to_metric_families(client.get("/metrics").text):
                for sample in family.samples:
                    model, status = (sample.labels.get(name) for name in ("model", "status"))
                    if (
                        sample.name == f"ray_raybert_{metric}"
                        and model in values
                        and status in ("200", None)
                    ):
                        values[model] += sample.value
            return values

        def settled(metric: str) -> dict[str, float]:
            """Its values once they have not changed for longer than Ray takes to tell."""
            values, since_s = counted(metric), time.monotonic()
            while time.monotonic() - since_s < 5:
                time.sleep(0.5)
                if (now := counted(metric)) != values:
                    values, since_s = now, time.monotonic()
            return values

        tokens_before, requests_before = settled("pass_tokens_total"), counted("requests_total")
        requests = 20
        for _ in range(requests):
            response = ask(client, {"models": names, "inputs": TEXTS})
            assert response.status_code == 200, response.text
        assert response.json() == alone(client, names, TEXTS)
        tokens = int(response.headers["x-tokens"].split(",")[0].removeprefix(f"{names[0]}="))
        after = settled("pass_tokens_total")
        # Together, the first of them counts; alone, each has counted once.
        assert {name: after[name] - tokens_before[name] for name in names} == {
            name: tokens * (requests * (name == names[0]) + 1) for name in names
        }
        after = counted("requests_total")
        assert {name: after[name] - requests_before[name] for name in names} == dict.fromkeys(
            names, requests + 1
        )
