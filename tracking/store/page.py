"""Sets the kind and the columns of an experiment on MLflow's page.

MLflow's page keeps both in tags of the experiment, in its own formats: here those of MLflow 3.17.
"""

import json
from collections.abc import Mapping
from urllib.parse import quote

EXPERIMENT_KIND = "mlflow.experimentKind"
TRAINING = "custom_model_development"
"""The kind of an experiment that trains models."""
WORKFLOW = "machine_learning"
"""Side of the page that shows an experiment as training: its default is GenAI for every kind of
experiment, unless the URL says otherwise."""
VIEW = "raybert"
"""Key of the saved view with our columns; the page's URL names it."""
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
RESULT = "result"
"""Tag of a run: what it came to, in one line."""
NOTE = "mlflow.note.content"
"""Tag of a run, in Markdown: its description on the page."""
COLUMNS = (
    f"tags.`{RESULT}`",
    "params.`lr`",
    "params.`epochs`",
    "attributes.`Version`",
    "attributes.`Models`",
    "metrics.`tokens_per_s`",
    "metrics.`goodput`",
    "params.`variant`",
    "params.`task`",
)
_NAME, _CREATED, _DURATION = "attributes.`Run Name`", "runDateAndNestInfo", "duration"
"""Columns that are always there."""
_ORDER = (_NAME, _CREATED, COLUMNS[0], _DURATION, *COLUMNS[1:])
_WIDTHS = {_NAME: 240, COLUMNS[0]: 320, "params.`lr`": 80, "params.`epochs`": 80}
"""In pixels."""


def experiment_tags() -> dict[str, str]:
    """Return the tags that every experiment of ours gets."""
    state = {
        "searchFilter": "",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "selectedColumns": list(COLUMNS),
        "columnOrder": list(_ORDER),
        "columnWidths": _WIDTHS,
    }
    saved = {"name": "raybert", "createdAt": 0, "updatedAt": 0, "state": json.dumps(state)}
    return {EXPERIMENT_KIND: TRAINING, VIEW_TAG: json.dumps(saved)}


def missing_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that an experiment lacks; a kind that somebody chose is kept."""
    return {
        key: value
        for key, value in experiment_tags().items()
        if (key not in tags if key == EXPERIMENT_KIND else tags.get(key) != value)
    }


def runs_page(experiment_id: str) -> str:
    """Return the path of the page of an experiment's runs, with our columns."""
    chosen = f"workflowType={WORKFLOW}&viewStateShareKey={VIEW}"
    return f"/#/experiments/{experiment_id}/runs?{chosen}"


def run_page(experiment_id: str, run_id: str, artifact: str | None = None) -> str:
    """Return the path of the page of a run, or of one of its artifacts, in the "training" part of
    MLflow's page."""
    shown = "" if artifact is None else f"/artifacts/{artifact}"
    return f"/#/experiments/{experiment_id}/runs/{run_id}{shown}?workflowType={WORKFLOW}"


def model_page(model: str, version: str | None = None) -> str:
    """Return the path of the page of a registered model, or of one of its versions, in the
    "training" part of MLflow's page."""
    shown = "" if version is None else f"/versions/{version}"
    return f"/#/models/{quote(model, safe='')}{shown}?workflowType={WORKFLOW}"
