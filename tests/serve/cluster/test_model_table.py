"""The models of one process, as its plans change."""

import asyncio
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bert_core.errors import ConfigError
from serve.cluster import model_table
from serve.cluster.model_table import ModelTable
from serve.http.routes.listing import ModelEntry, list_models
from serve.observe.records import Recorder
from serve.versions.loaded_model import LoadedModel
from serve.versions.plan import PLAN, Plan, Source
from tests.serve import live
from tracking.models.references import Folder

TEXTS = ["Parse a string.", "A fox."]


def plan_as_json(name: str, folder: Path) -> dict[str, Any]:
    source = Source(reference=Folder(str(folder)), tracking_uri="sqlite://")
    content: dict[str, Any] = PLAN.dump_python(Plan(name=name, source=source), mode="json")
    return content


async def entries(served: ModelTable) -> dict[str, ModelEntry]:
    return {entry.id: entry for entry in (await list_models(served.served(None))).data}


@pytest.mark.guard
def test_one_model_that_cannot_be_loaded_leaves_the_others_and_is_tried_again(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_table, "RETRY_S", 0.1)
    gone = tmp_path / "gone"

    async def scenario() -> None:
        served, changes = ModelTable(Recorder(), lambda pairing, tally: None), []
        first = {name: plan_as_json(name, bundle) for name in ("a", "b")}
        await served.change(first, lambda: changes.append(1))
        before = dict(served.models)
        await served.change({**first, "c": plan_as_json("c", gone)}, lambda: changes.append(2))
        assert {**served.models} == before  # returns before the new one is loaded
        while "not served" not in str((await entries(served))["c"].problem):
            await asyncio.sleep(0.02)
        listed = await entries(served)
        assert [(name, entry.state) for name, entry in listed.items()] == [
            ("a", "ready"), ("b", "ready"), ("c", "failed"),
        ]  # fmt: skip
        assert str(listed["c"].problem).startswith(f"{gone} is not served: ")
        assert len(await served.models["a"].slot.model.predict(TEXTS, None)) == 2
        shutil.copytree(bundle, gone)
        while (await entries(served))["c"].state == "failed":
            await asyncio.sleep(0.02)
        assert (await entries(served))["c"].problem is None
        await served.change({"c": plan_as_json("c", gone)}, lambda: changes.append(3))
        assert list(await entries(served)) == ["c"]
        assert changes[-1] == 3
        for model in served.models.values():
            model.close()
        await asyncio.sleep(0.1)

    asyncio.run(scenario())


def test_a_model_that_is_being_added_is_loaded_once_however_often_its_plan_comes(
    bundle: Path,
) -> None:
    """A change of any model hands over the plans of all."""
    may_load = asyncio.Event()
    loads: list[bool] = []
    changes: list[int] = []

    class Slow(ModelTable):
        async def _load(self, plan: Plan) -> LoadedModel:
            if plan.name != "a":
                loads.append(plan.truncate)
                await may_load.wait()
            return await super()._load(plan)

    async def scenario() -> None:
        served = Slow(Recorder(), lambda pairing, tally: None)
        plans = {name: plan_as_json(name, bundle) for name in ("a", "b", "c")}
        changed = {**plans, "c": plans["c"] | {"truncate": True}}
        await served.change({"a": plans["a"]}, lambda: None)
        for number, wanted in enumerate((plans, plans, changed)):
            await served.change(wanted, partial(changes.append, number))
            await asyncio.sleep(0)
        assert loads == [False, False, True]  # b, c, and c as it is wanted then
        may_load.set()
        while len(served.models) < 3:
            await asyncio.sleep(0.02)
        await asyncio.gather(*served._tasks)
        assert changes == [0, 1, 2, 2, 2]  # what is to be done then is what was said last
        assert served.models["c"].plan.truncate
        for model in served.models.values():
            model.close()

    before = threading.active_count()
    asyncio.run(scenario())
    live.eventually(lambda: threading.active_count() <= before)  # nobody follows a model's plan


def test_a_model_that_takes_the_place_of_all_is_loaded_once_too(bundle: Path) -> None:
    """Until then the process has no model, but is not new: it must not wait for others."""
    may_load = asyncio.Event()
    loads: list[str] = []

    class Slow(ModelTable):
        async def _load(self, plan: Plan) -> LoadedModel:
            loads.append(plan.name)
            if plan.name != "a":
                await may_load.wait()
            return await super()._load(plan)

    async def scenario() -> None:
        served = Slow(Recorder(), lambda pairing, tally: None)
        plans = {name: plan_as_json(name, bundle) for name in ("a", "b", "c")}
        await served.change({"a": plans.pop("a")}, lambda: None)
        await served.change({"b": plans["b"]}, lambda: None)
        await asyncio.sleep(0)
        await asyncio.wait_for(served.change(plans, lambda: None), 5)
        may_load.set()
        await asyncio.gather(*served._tasks)
        assert sorted(served.models) == ["b", "c"]
        for model in served.models.values():
            model.close()

    asyncio.run(scenario())
    assert loads == ["a", "b", "c"]


def test_what_kept_a_model_from_being_added_is_not_said_of_its_next_plan(
    bundle: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        served = ModelTable(Recorder(), lambda pairing, tally: None)
        plans = {"a": plan_as_json("a", bundle)}
        await served.change(plans, lambda: None)
        failed = asyncio.Event()
        await served.change(plans | {"b": plan_as_json("b", tmp_path / "gone")}, failed.set)
        failed.clear()
        await failed.wait()
        assert "not served" in str((await entries(served))["b"].problem)
        await served.change(plans | {"b": plan_as_json("b", bundle)}, lambda: None)
        assert (await entries(served))["b"].problem == "b is being loaded: try again"
        while "b" not in served.models:
            await asyncio.sleep(0.01)
        for model in served.models.values():
            model.close()

    asyncio.run(scenario())


def test_models_that_are_being_added_leave_threads_to_the_requests(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large bodies are read on asyncio's threads, of which there are 32 at most."""
    may_load = threading.Event()

    class Slow(LoadedModel):
        def __init__(self, plan: Plan, *arguments: Any) -> None:
            if plan.name != "a":
                assert may_load.wait(30)
                raise ConfigError("it is not wanted")
            super().__init__(plan, *arguments)

    async def scenario() -> None:
        served = ModelTable(Recorder(), lambda pairing, tally: None)
        plans = {"a": plan_as_json("a", bundle)}
        await served.change(plans, lambda: None)
        others = {f"b{number}": plan_as_json(f"b{number}", bundle) for number in range(40)}
        await served.change(plans | others, lambda: None)
        try:
            assert await asyncio.wait_for(asyncio.to_thread(len, others), 5) == 40
        finally:
            may_load.set()
        served.models["a"].close()

    monkeypatch.setattr(model_table, "LoadedModel", Slow)
    asyncio.run(scenario())


def test_a_process_that_serves_nothing_yet_fails_with_its_model(tmp_path: Path) -> None:
    served = ModelTable(Recorder(), lambda pairing, tally: None)
    with pytest.raises(ConfigError, match="wanted the folder of a bundle"):
        asyncio.run(served.change({"a": plan_as_json("a", tmp_path / "gone")}, lambda: None))
