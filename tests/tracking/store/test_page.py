"""MLflow's page shows our experiments as training, with our columns."""

import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tracking.runs.recorder import PARENT_TAG, RunRecorder
from tracking.store.page import (
    EXPERIMENT_KIND,
    NOTE,
    RESULT,
    VIEW_TAG,
    experiment_tags,
    missing_tags,
    run_page,
    runs_page,
)
from tracking.store.server import connect, experiment_id

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_a_new_experiment_has_the_kind_and_view_of_training(store: str) -> None:
    client, name = connect(store), uuid.uuid4().hex
    made = client.get_experiment(experiment_id(client, store, name))
    assert made.tags[EXPERIMENT_KIND] == "custom_model_development"
    saved = json.loads(made.tags[VIEW_TAG])
    assert "tags.`result`" in json.loads(saved["state"])["selectedColumns"]
    assert runs_page("7").endswith(f"viewStateShareKey={VIEW_TAG.rpartition('.')[2]}")


def test_an_older_experiment_gets_what_it_lacks_but_a_chosen_kind_stays(store: str) -> None:
    import mlflow

    client, name = mlflow.MlflowClient(store), uuid.uuid4().hex
    made = client.create_experiment(name, tags={EXPERIMENT_KIND: "genai_development"})
    assert experiment_id(connect(store), store, name) == made
    tags = client.get_experiment(made).tags
    assert tags[EXPERIMENT_KIND] == "genai_development"
    assert tags[VIEW_TAG] == experiment_tags()[VIEW_TAG]
    assert missing_tags(tags) == {}


@pytest.mark.drill
def test_a_browser_shows_training_with_results_and_a_sweep_over_its_trials(
    server: Any, browser: "Browser", tmp_path: Path
) -> None:
    server.start()

    def record(name: str, result: str, **tags: str) -> str:
        told = {RESULT: result, NOTE: f"**{result}**\n\n```bash\nraybert tune --lr 1\n```", **tags}
        with RunRecorder.open(
            tmp_path / name, uri=server.uri, run_name=f"tune {name}", params={"lr": 1e-3}, tags=told
        ) as recorder:
            recorder.flush()
        assert recorder.run_id is not None
        return recorder.run_id

    sweep = record("sweep", "best of 1: accuracy 81.7 %")
    client = connect(server.uri)
    experiment = experiment_id(client, server.uri, "raybert")
    client.log_text(sweep, "# Of the sweep", "card.md")
    links = {"the sweep": run_page(experiment, sweep)}
    links["its card"] = run_page(experiment, sweep, "card.md")
    note = ", ".join(f"[{title}]({path.removeprefix('/')})" for title, path in links.items())
    trial = record("trial", "accuracy 81.7 %", **{PARENT_TAG: sweep, NOTE: note})
    page = browser.new_page(viewport={"width": 1600, "height": 950})
    page.set_default_timeout(60_000)  # the page is megabytes of scripts
    page.goto(server.uri + runs_page(experiment))
    page.get_by_text("best of 1: accuracy 81.7 %").wait_for()
    headers = page.get_by_role("columnheader").all_inner_texts()
    assert {"Run Name", "result", "lr"} <= {text.strip() for text in headers}
    assert page.get_by_text("tune trial").count() == 0  # below its sweep
    page.get_by_role("gridcell").filter(has_text="tune sweep").get_by_role("button").first.click()
    page.get_by_text("tune trial").wait_for()
    page.goto(server.uri + run_page(experiment, sweep))
    page.get_by_text("raybert tune --lr 1").first.wait_for()
    page.get_by_role("link", name="tune trial").wait_for()  # of its child runs
    assert page.get_by_text("Evaluation runs").count() == 0  # which the side of GenAI has
    for title, text in (("the sweep", "raybert tune --lr 1"), ("its card", "Of the sweep")):
        page.goto(server.uri + run_page(experiment, trial))
        with page.expect_popup() as popup:
            page.get_by_role("link", name=title, exact=True).click()
        popup.value.get_by_text(text).first.wait_for(timeout=60_000)
        assert popup.value.url == server.uri + links[title]
        assert popup.value.get_by_text("Evaluation runs").count() == 0
    page.close()
