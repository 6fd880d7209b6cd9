"""Answers that are kept: the same as computed ones, within the memory that they may take."""

import asyncio
import dataclasses
import json
import random
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bert_core.data.cuts import CutPlace
from bert_core.determinism import fix_products
from bert_core.errors import InputError
from bert_core.inference.predictor import Predictor
from bert_core.tasks.base import Parameters
from bert_core.tasks.catalog import TASKS
from serve.http.app import LocalModel, create_front_app
from serve.model.answer_cache import ENTRY_BYTES, AnswerCache, CachedAnswer, keys_of, unpacked
from serve.model.answers import MOST_CUT, Answered
from serve.model.model import Model
from serve.observe.records import Recorder
from serve.request.errors import TooLargeError
from serve.request.limits import Limits
from serve.surfaces.catalog import SURFACES
from serve.versions.slot import Slot
from tests.serve import live
from tests.serve.conftest import TEXTS

WORDS = " ".join(TEXTS).split()
LONG = " ".join(WORDS * 10)  # more than the model reads


class Counts(Recorder):
    """Keeps what it is told of passes and of the cache."""

    def __init__(self) -> None:
        self.passes, self.hits, self.misses = 0, 0, 0

    def passed(self, model: str, version: str, **sizes: Any) -> None:
        self.passes += 1

    def recalled(self, model: str, version: str, *, hits: int, misses: int) -> None:
        self.hits += hits
        self.misses += misses


def entry(answer: Any, cut: tuple[CutPlace, ...] = ()) -> CachedAnswer:
    return CachedAnswer.of(
        answer, cut, tokens=1, padded_tokens=8, masks=0, numbers=0, has_all_cuts=True
    )


def key(number: int) -> bytes:
    return number.to_bytes(32)


def with_model(folder: Path, ask: Callable[[Model], Awaitable[Any]], **settings: Any) -> Any:
    """What `ask` returns for a model with a cache."""

    async def asked() -> Any:
        model = live.loaded("docs", folder, **{"cache_mib": 1} | settings)
        try:
            return await ask(model)
        finally:
            await model.close()

    return asyncio.run(asked())


def test_the_least_recently_used_answers_go_first() -> None:
    cache = AnswerCache(3 * entry("a").size_bytes)
    cache.keep({key(number): entry("a") for number in range(3)})
    assert list(cache.find([key(0), key(9)])) == [key(0)]
    cache.keep({key(3): entry("b")})
    assert set(cache.find(map(key, range(5)))) == {key(0), key(2), key(3)}
    cache.keep({key(4): entry("x" * 10_000)})  # is larger than the cache
    assert set(cache.find(map(key, range(5)))) == {key(0), key(2), key(3)}
    cache.resize(entry("a").size_bytes)
    assert set(cache.find(map(key, range(5)))) == {key(3)}
    cache.keep({key(3): entry("c")})
    assert unpacked([cache.find([key(3)])[key(3)]]) == (["c"], [])
    assert cache.size_bytes == entry("c").size_bytes
    cache.resize(0)
    assert cache.size_bytes == 0


@pytest.mark.parametrize("numbers", [1, 384])
def test_it_holds_no_more_memory_than_it_may(numbers: int) -> None:
    rng = random.Random(5)
    most = 1 << 19
    tracemalloc.start()
    try:
        cache = AnswerCache(most)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(3 * most // (ENTRY_BYTES + 9 * numbers)):
            vector = [rng.random() for _ in range(numbers)]
            cache.keep({rng.randbytes(32): entry(vector)})
            assert cache.size_bytes <= most
        del vector
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cache.size_bytes > 0.9 * most
    assert after - before <= most


def test_only_equal_questions_to_equal_weights_have_equal_keys() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Asked(Parameters):
        value: Any = None

    values = [None, "1", 1, 1.0, True, ["1"], "['1']", 0.0, -0.0, float("nan"), "\ud800", "\\ud800"]
    rows = [{"text": "a"}, {"text": "a", "text_pair": ""}, {"text": "a', 'text_pair': '"}]
    keys = [
        each
        for digest in ("d", "e")
        for task in ("t", "u")
        for value in values
        for each in keys_of(digest, task, Asked(value=value), rows)
    ]
    assert len(set(keys)) == len(keys) == 2 * 2 * len(values) * len(rows)
    assert keys_of("d", "t", Asked(), rows) == keys[: len(rows)]


def text(rng: random.Random) -> str:
    """One of a few, so that they come again; some are too long."""
    which = rng.randrange(8)
    return " ".join(random.Random(which).choices(WORDS, k=[2, 7, 20, 120][which % 4]))


def pair(rng: random.Random) -> dict[str, str]:
    return {"text": TEXTS[rng.randrange(4)], "text_pair": text(rng)}


INPUTS: dict[str, Callable[[random.Random], Any]] = {
    "question-answering": lambda rng: {"question": TEXTS[rng.randrange(2)], "context": text(rng)},
    "sentence-similarity": lambda rng: {
        "source_sentence": TEXTS[0],
        "sentences": [text(rng), TEXTS[1]][: rng.randint(1, 2)],
    },
    "multiple-choice": lambda rng: {
        "text": TEXTS[rng.randrange(2)],
        "choices": [TEXTS[rng.randrange(4)], text(rng)],
    },
    "minimal-pairs": lambda rng: {
        "sentence_good": TEXTS[rng.randrange(4)],
        "sentence_bad": text(rng),
    },
    "fill-mask": lambda rng: "[MASK] " * rng.randint(1, 2) + text(rng),
    "token-classification": text,
    "span-classification": text,
    "relation-classification": lambda rng: f"<e1>{TEXTS[0]}</e1> <e2>a</e2> {text(rng)}",
    "feature-extraction": text,
    "sparse-embedding": text,
    "text-classification": text,
    "zero-shot-classification": text,
}
"""An input of each task; pairs for the others."""

PARAMETERS: dict[str, list[dict[str, Any]]] = {
    "question-answering": [{}, {"top_k": 3}, {"max_answer_len": 2}, {"doc_stride": 4}],
    "zero-shot-classification": [
        {"candidate_labels": ["json", "a port"]},
        {"candidate_labels": ["a port", "json"]},
        {"candidate_labels": ["json"], "multi_label": True},
    ],
    "fill-mask": [{}, {"top_k": 2}, {"targets": ["the", "a"]}],
    "text-ranking": [{}, {"raw_scores": True}],
    "feature-extraction": [
        {},
        {"per_token": True},
        {"encoding_format": "base64"},
        {"truncation_direction": "left"},
    ],
    "text-classification": [{}, {"top_k": 1}, {"function_to_apply": "none"}],
    "token-classification": [{}, {"aggregation_strategy": "none"}],
}


def holder_of(task: str, bundles: dict[str, Path]) -> Path:
    """A bundle that does the task."""
    if task in bundles:
        return bundles[task]
    return next(path for path in bundles.values() if task in Predictor(path, device="cpu").also)


@pytest.mark.drill
@pytest.mark.skipif(not fix_products(), reason="this CPU's products depend on their shape")
@pytest.mark.parametrize("name", sorted(TASKS))
def test_kept_answers_are_those_that_are_computed(name: str, bundles: dict[str, Path]) -> None:
    folder, rng = holder_of(name, bundles), random.Random(6)
    make, parameters = INPUTS.get(name, pair), TASKS[name].parameters
    requests = [
        (
            [make(rng) for _ in range(rng.randint(1, 6))],
            dataclasses.replace(parameters.cutting(), **rng.choice(PARAMETERS.get(name, [{}]))),
        )
        for _ in range(25)
    ]

    async def ask(model: Model) -> list[Answered]:
        return [await model.answer(inputs, parameters, name) for inputs, parameters in requests]

    kept, computed = with_model(folder, ask), with_model(folder, ask, cache_mib=0)
    for ours, theirs in zip(kept, computed, strict=True):
        assert ours.answers == theirs.answers
        assert (ours.tokens, ours.cut) == (theirs.tokens, theirs.cut)
        assert theirs.hits is None
    assert any(each.cut for each in kept) or parameters.cut_by is None
    hits = [(each.hits, len(each.answers)) for each in kept]
    assert any(some == every for some, every in hits)
    assert any(0 < some < every for some, every in hits)


def test_each_input_is_computed_once(bundle: Path) -> None:
    counts = Counts()

    async def ask(model: Model) -> list[Answered]:
        first = await model.answer([TEXTS[0], TEXTS[0], TEXTS[1]], None)
        again = await model.answer([TEXTS[1], TEXTS[0]], None)
        return [first, again]

    first, again = with_model(bundle, ask, recorder=counts)
    assert (first.hits, again.hits) == (1, 2)
    assert (counts.hits, counts.misses) == (3, 2)
    assert again.answers == [first.answers[2], first.answers[0]]
    assert (again.queue_s, again.compute_s) == (0.0, 0.0)
    first.answers[0].clear()
    assert first.answers[1] == again.answers[1] != []


def test_readiness_is_not_answered_from_the_cache(bundle: Path) -> None:
    counts = Counts()

    async def ask(model: Model) -> None:
        await model.predict(list(model.task.examples), None)
        for number in range(2, 4):
            await model.check_ready()
            assert counts.passes == number

    with_model(bundle, ask, recorder=counts)


def test_refusals_do_not_depend_on_the_cache(bundles: dict[str, Path]) -> None:
    async def too_long(model: Model) -> None:
        await model.answer(TEXTS[:2], None)
        with pytest.raises(InputError, match=r"inputs\[3\]: wanted at most"):
            await model.answer([TEXTS[0], TEXTS[0], TEXTS[1], LONG], None)

    async def too_many(model: Model) -> None:
        await model.answer([TEXTS[0]], None)
        with pytest.raises(TooLargeError, match="at most 100 tokens per request"):
            await model.answer([TEXTS[0]] * 20, None)

    async def too_many_candidates(model: Model) -> None:
        await model.answer(["[MASK] fox"], None)
        with pytest.raises(TooLargeError, match="at most 20 candidates"):
            await model.answer(["[MASK] fox"] * 5, None)

    async def too_many_numbers(model: Model) -> None:
        for text in TEXTS:
            await model.answer([text], None)
        with pytest.raises(TooLargeError, match="at most 500 numbers, their vectors have"):
            await model.answer(TEXTS, None)

    with_model(bundles["text-classification"], too_long)
    with_model(bundles["text-classification"], too_many, limits=Limits(max_request_tokens=100))
    with_model(bundles["fill-mask"], too_many_candidates, limits=Limits(max_candidates=20))
    with_model(bundles["sparse-embedding"], too_many_numbers, limits=Limits(max_numbers=500))


def test_a_text_is_cached_only_if_its_cut_is_known(bundle: Path) -> None:
    texts = [f"{number} {LONG}" for number in range(MOST_CUT + 5)]

    async def ask(model: Model) -> tuple[Answered, Answered]:
        parameters = model.task.parameters.cutting()
        return await model.answer(texts, parameters), await model.answer(texts[::-1], parameters)

    first, reversed_ = with_model(bundle, ask)
    plain, plain_reversed = with_model(bundle, ask, cache_mib=0)
    assert (first.hits, reversed_.hits) == (0, MOST_CUT)
    assert first.cut == plain.cut
    assert reversed_.cut == plain_reversed.cut
    assert len(reversed_.cut) == MOST_CUT


@pytest.fixture(scope="module")
def server(bundles: dict[str, Path]) -> Iterator[tuple[str, dict[str, Model]]]:
    """A front with a model per task that keeps answers, and the models."""
    models = {name: live.loaded(name, path, cache_mib=1) for name, path in bundles.items()}
    local = {name: LocalModel(Slot(model)) for name, model in models.items()}
    with live.running(create_front_app(local)) as url:
        yield url, models


def test_an_answer_says_whether_it_was_kept(server: tuple[str, dict[str, Model]]) -> None:
    url, _ = server
    seen = []
    for inputs in (["a port"], ["a port"], ["a port", "a fox"], ["a string"]):
        response = httpx.post(f"{url}/v1/models/text-classification", json={"inputs": inputs})
        seen.append((response.headers["X-Cache"], len(response.json())))
        assert int(response.headers["X-Tokens"]) > 0
    assert seen == [("miss", 1), ("hit", 1), ("partial", 2), ("miss", 1)]


BODIES: dict[str, Any] = {
    "/embed": {"inputs": TEXTS},
    "/embed_all": {"inputs": TEXTS},
    "/embed_sparse": {"inputs": TEXTS},
    "/predict": {"inputs": [[text] for text in TEXTS]},
    "/similarity": {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}},
    "/rerank": {"query": TEXTS[0], "texts": TEXTS},
    "/v1/embeddings": {"input": TEXTS, "encoding_format": "base64"},
    "/v2/embed": {"texts": TEXTS, "model": "feature-extraction", "embedding_types": ["binary"],
                  "input_type": "search_query"},
    "/v2/rerank": {"query": TEXTS[0], "documents": TEXTS, "model": "text-ranking"},
    "/invocations": {"inputs": TEXTS},
    "/": {"inputs": TEXTS},
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_every_surface_says_the_same_from_memory(
    server: tuple[str, dict[str, Model]], path: str
) -> None:
    assert path in {"/", *(end.path for surface in SURFACES for end in surface.endpoints)}
    url, _ = server
    responses = [httpx.post(f"{url}{path}", json=BODIES[path], timeout=30) for _ in range(3)]
    assert {response.status_code for response in responses} == {200}, responses[0].text
    assert [response.headers["X-Cache"] for response in responses[1:]] == ["hit", "hit"]
    contents = [response.json() for response in responses]
    for content in contents:
        if isinstance(content, dict):
            content.pop("id", None)
    assert len({json.dumps(content) for content in contents}) == 1
    assert len({response.headers["X-Tokens"] for response in responses}) == 1
