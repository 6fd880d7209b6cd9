"""Requests that are still in progress, or about to begin, when a version is replaced."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from serve.http.app import create_model_app
from serve.http.asgi_call import call
from serve.http.routes import model as routes
from serve.http.routes.base import check_ready
from serve.versions.comparison import Pairing, Tally
from serve.versions.slot import Candidate, Slot
from tests.serve import live

TEXTS = ["Parse a string.", "A fox."]


def test_readiness_is_that_of_the_version_that_answers_when_the_check_begins(
    versions: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (live.loaded("docs", versions[number], version=number) for number in ("1", "2"))
    slot = Slot(old)

    async def check_later(models: Any) -> None:
        slot.switch(new).retire()
        await asyncio.sleep(0.05)  # until it is closed
        await check_ready(models)

    async def scenario() -> int:
        await old.predict(TEXTS, None)
        app = create_model_app(slot, alone=True)
        response = await call(app, "GET", "/readyz", [], b"")
        await new.close()
        return response.status

    monkeypatch.setattr(routes, "check_ready", check_later)
    assert asyncio.run(scenario()) == 200


def test_a_candidate_that_is_removed_during_a_request_is_not_asked(
    versions: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    model, other = (live.loaded("docs", versions[number], version=number) for number in ("1", "2"))
    seen: list[Tally] = []

    def report(pairing: Pairing, tally: Tally) -> None:
        seen.append(tally)

    async def scenario() -> None:
        candidate = Candidate(slot=Slot(other), share=1.0, mode="shadow", report=report)
        answered = await model.answer(TEXTS, None)
        candidate.shadow(model, None, TEXTS, None, answered)
        while not seen:
            await asyncio.sleep(0.01)
        candidate.slot.close()
        await asyncio.sleep(0.05)
        candidate.shadow(model, None, TEXTS, None, answered)
        await asyncio.sleep(0.05)
        await model.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}  # nobody waits for its answer

    asyncio.run(scenario())
    assert (len(seen), seen[0].inputs) == (1, len(TEXTS))
    assert not caplog.records
