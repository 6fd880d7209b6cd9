"""The models of one process, as its plans change."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from bert_core.errors import ConfigError
from serve.cluster import model_table
from serve.cluster.model_table import ModelTable
from serve.http.routes.listing import ModelEntry, list_models
from serve.observe.records import Recorder
from serve.versions.plan import PLAN, Plan, Source
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
            ("a", "ready"), ("b", "ready"), ("c", "down"),
        ]  # fmt: skip
        assert str(listed["c"].problem).startswith(f"{gone} is not served: ")
        assert len(await served.models["a"].slot.model.predict(TEXTS, None)) == 2
        shutil.copytree(bundle, gone)
        while (await entries(served))["c"].state == "down":
            await asyncio.sleep(0.02)
        assert (await entries(served))["c"].problem is None
        await served.change({"c": plan_as_json("c", gone)}, lambda: changes.append(3))
        assert list(await entries(served)) == ["c"]
        assert changes[-1] == 3
        for model in served.models.values():
            model.close()
        await asyncio.sleep(0.1)

    asyncio.run(scenario())


def test_a_process_that_serves_nothing_yet_fails_with_its_model(tmp_path: Path) -> None:
    served = ModelTable(Recorder(), lambda pairing, tally: None)
    with pytest.raises(ConfigError, match="wanted the folder of a bundle"):
        asyncio.run(served.change({"a": plan_as_json("a", tmp_path / "gone")}, lambda: None))
