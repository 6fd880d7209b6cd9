"""A text gets the same answer alone and in any company: over HTTP."""

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.exactness import same
from tests.serve.conftest import TEXTS

WORDS = " ".join(TEXTS).split()


def texts_of_all_lengths(count: int) -> list[str]:
    rng = random.Random(3)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 20))) for _ in range(count)]


async def answers(url: str, batches: list[list[str]], at_once: int) -> list[list[Any]]:
    limits, turns = httpx.Limits(max_connections=at_once), asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:

        async def ask(batch: list[str]) -> list[Any]:
            async with turns:
                response = await client.post(url, json={"inputs": batch})
                assert response.status_code == 200, response.text
                return response.json()

        return await asyncio.gather(*map(ask, batches))


@pytest.mark.parametrize("model", ["text-classification", "feature-extraction"])
def test_a_text_gets_the_same_answer_alone_and_in_any_company(front: str, model: str) -> None:
    texts, url = texts_of_all_lengths(100), f"{front}/v1/models/{model}"
    alone = [answer for (answer,) in asyncio.run(answers(url, [[text] for text in texts], 1))]
    assert len({str(answer) for answer in alone}) > 75  # or equal answers would show nothing
    rng = random.Random(4)
    for _ in range(2):
        order = rng.sample(range(len(texts)), len(texts))
        batches = []
        while order:
            size = rng.choice([1, 1, 2, 5, 16, 40])
            batches.append(order[:size])
            order = order[size:]
        asked = [[texts[index] for index in batch] for batch in batches]
        for batch, its in zip(batches, asyncio.run(answers(url, asked, 12)), strict=True):
            assert its == same([alone[index] for index in batch])
