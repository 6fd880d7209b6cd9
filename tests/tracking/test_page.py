"""MLflow's page shows our experiments as training, with our columns."""

import json
import uuid

import mlflow

from tracking.page import EXPERIMENT_KIND, VIEW_TAG, experiment_tags, missing_tags, runs_page
from tracking.server import connect, experiment_id


def test_a_new_experiment_is_of_training_and_has_the_view(store: str) -> None:
    client, name = connect(store), uuid.uuid4().hex
    made = client.get_experiment(experiment_id(client, store, name))
    assert made.tags[EXPERIMENT_KIND] == "custom_model_development"
    saved = json.loads(made.tags[VIEW_TAG])
    assert "tags.`result`" in json.loads(saved["state"])["selectedColumns"]
    assert runs_page("7").endswith(f"viewStateShareKey={VIEW_TAG.rpartition('.')[2]}")


def test_an_older_experiment_gets_what_it_lacks_but_a_chosen_kind_stays(store: str) -> None:
    client, name = mlflow.MlflowClient(store), uuid.uuid4().hex
    made = client.create_experiment(name, tags={EXPERIMENT_KIND: "genai_development"})
    assert experiment_id(connect(store), store, name) == made
    tags = client.get_experiment(made).tags
    assert tags[EXPERIMENT_KIND] == "genai_development"
    assert tags[VIEW_TAG] == experiment_tags()[VIEW_TAG]
    assert missing_tags(tags) == {}
