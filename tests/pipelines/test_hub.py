"""Stages that take their model from the Hugging Face hub by its id, and give one back to it."""

import json
import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, ModelCardData, constants

from bert_core import files
from bert_core.errors import ConfigError, ResourceError
from bert_core.manifest import Manifest, read_manifest
from pipelines import evaluate, finetune, predict, prepare, pretrain, publish, tune
from pipelines.evaluate import EvaluateConfig
from pipelines.predict import PredictConfig
from pipelines.publish import PublishConfig
from pipelines.runtime.description import STARTED
from pipelines.training.selection import SelectionConfig
from pipelines.training.sweep import SweepConfig
from pipelines.tune import TuneConfig
from tests.commands import raybert
from tests.hub import OWNER, STRANGER, Hub, Repository, contents, running_hub
from tracking.models.hub import load_bundle as load_with_origin
from tracking.models.references import Reference
from tracking.store.server import connect

NAME = "somebody/encoder"

# The client gives a file to its own HTTP library in a way that this deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def foreign(bundle: Path) -> dict[str, bytes]:
    """A bundle's files as transformers would have written them."""
    return {name: data for name, data in contents(bundle).items() if name != "raybert.json"}


@pytest.fixture
def encoder(hub: Hub, pretrained: Any) -> Repository:
    """A model without a task at `NAME`."""
    hub.models[NAME] = Repository()
    hub.models[NAME].commit(foreign(pretrained.folder / "pretrain" / "bundle"))
    return hub.models[NAME]


@pytest.fixture
def classifier(hub: Hub, finetuned: Any) -> Repository:
    hub.models["somebody/classifier"] = Repository()
    hub.models["somebody/classifier"].commit(contents(finetuned.folder / "finetune" / "bundle"))
    return hub.models["somebody/classifier"]


def lineage_of(output: str | Path) -> dict[str, Any]:
    from bert_core.bundle.format import load_bundle

    return load_bundle(Path(output) / "bundle").lineage


@pytest.mark.drill
def test_a_bundle_that_started_from_the_hub_says_from_which_commit(
    encoder: Repository, pretrained: Any, tmp_path: Path
) -> None:
    from bert_core.bundle.format import bundle_digest

    config = replace(pretrained.finetune(tmp_path / "finetune"), model=NAME, seeds=(0,), epochs=0.5)
    manifest = finetune.run(config)
    commit = f"{NAME}@{encoder.branches['main']}"
    assert manifest.hub == {"model": commit} == read_manifest(config.output).hub
    assert lineage_of(config.output)["parent_lineage"] == {"hub": commit}
    local = replace(config, output=str(tmp_path / "local"), model=str(tmp_path / "clone"))
    for name, data in encoder.files().items():
        files.write_bytes(f"{tmp_path}/clone/{name}", data)
    assert finetune.run(local).digest == manifest.digest
    assert bundle_digest(tmp_path / "local" / "bundle") == bundle_digest(
        Path(config.output) / "bundle"
    )


@pytest.mark.drill
def test_a_resumed_run_keeps_its_commit_when_the_branch_has_moved(
    encoder: Repository, pretrained: Any, finetuned: Any, tmp_path: Path
) -> None:
    config = replace(pretrained.finetune(tmp_path / "finetune"), model=NAME, seeds=(0,), epochs=0.5)
    first = finetune.run(config)
    encoder.commit(foreign(finetuned.folder / "finetune" / "bundle"))
    assert finetune.run(config).digest == first.digest, "finished: skipped"
    (Path(config.output) / "manifest.json").unlink()
    note = Path(config.output, STARTED).read_text()
    assert finetune.run(config).hub == first.hub, "killed: goes on"
    assert Path(config.output, STARTED).read_text() == note
    forced = finetune.run(replace(config, force=True))
    assert forced.hub == {"model": f"{NAME}@{encoder.branches['main']}"} != first.hub
    other = replace(config, model=f"{NAME}@{next(iter(encoder.commits))}")
    with pytest.raises(ConfigError, match="made with another model: give another output"):
        finetune.run(other)


@pytest.mark.drill
def test_evaluate_and_predict_answer_with_a_model_of_the_hub_as_with_its_folder(
    hub: Hub, classifier: Repository, finetuned: Any, tmp_path: Path
) -> None:
    shared: dict[str, Any] = {"num_workers": 0, "tracking_uri": finetuned.tracking_uri}
    revision = classifier.branches["main"]

    def evaluated(output: str, model: str) -> Manifest:
        return evaluate.run(
            EvaluateConfig(
                output=str(tmp_path / output), model=model, held_out=finetuned.rows, **shared
            )
        )

    folder = str(finetuned.folder / "finetune" / "bundle")
    of_hub = evaluated("hub", f"somebody/classifier@{revision}")
    of_folder = evaluated("folder", folder)
    assert (of_hub.digest, of_hub.outputs) == (of_folder.digest, of_folder.outputs)
    assert (of_hub.hub, of_folder.hub) == ({"model": f"somebody/classifier@{revision}"}, {})
    rows = {}
    for output, model in (("a", "hf://somebody/classifier"), ("b", folder)):
        config = PredictConfig(
            output=str(tmp_path / output), model=model, source=finetuned.rows.source, **shared
        )
        rows[output] = predict.run(config).outputs
    assert rows["a"] == rows["b"]


@pytest.mark.drill
def test_a_sweep_passes_the_commit_to_its_trials(
    encoder: Repository, pretrained: Any, tmp_path: Path
) -> None:
    base = pretrained.finetune(tmp_path / "tune")
    names = ("output", "train", "max_length", "batch_size", "precision", "num_workers")
    config = TuneConfig(
        **{name: getattr(base, name) for name in names},
        tracking_uri=base.tracking_uri,
        model=NAME,
        epochs=0.5,
        seeds=(0,),
        selection=SelectionConfig(share=0.2),
        search=SweepConfig(space={"lr": [1e-3, 1e-4]}),
    )
    tune.run(config)
    commit = {"model": f"{NAME}@{encoder.branches['main']}"}
    for number in range(2):
        assert read_manifest(f"{config.output}/trials/{number:03d}").hub == commit


@pytest.mark.drill
def test_shards_and_pretraining_take_vocabulary_and_weights_of_the_hub(
    hub: Hub, encoder: Repository, prepared: Any, tmp_path: Path
) -> None:
    shards = replace(prepared.prepare(tmp_path / "shards"), tokenizer=NAME)
    manifest = prepare.run(shards)
    assert manifest.digest == read_manifest(str(prepared.folder / "shards")).digest
    assert manifest.hub == {"tokenizer": f"{NAME}@{encoder.branches['main']}"}
    assert "model.safetensors" not in hub.fetched()
    config = replace(
        prepared.pretrain(tmp_path / "pretrain", steps=2),
        shards=shards.output, tokenizer=NAME, model=NAME, variant=None,
    )  # fmt: skip
    commit = f"{NAME}@{encoder.branches['main']}"
    assert pretrain.run(config).hub == {"tokenizer": commit, "model": commit}
    assert lineage_of(config.output)["parent_lineage"] == {"hub": commit}


@pytest.mark.drill
def test_a_model_of_the_hub_is_registered_like_its_folder(
    classifier: Repository, finetuned: Any, tmp_path: Path
) -> None:
    from bert_core.bundle.format import bundle_digest

    shared: dict[str, Any] = {"num_workers": 0, "tracking_uri": finetuned.tracking_uri}
    shared["model"] = "somebody/classifier"
    evaluation = str(tmp_path / "evaluate")
    evaluate.run(EvaluateConfig(output=evaluation, held_out=finetuned.rows, **shared))
    output = str(tmp_path / "publish")
    config = PublishConfig(output=output, evaluation=evaluation, name="from-the-hub", **shared)
    assert publish.run(config).counts["is_champion"]
    registered = Reference.parse("models:/from-the-hub@champion").fetch(uri=finetuned.tracking_uri)
    assert bundle_digest(registered) == bundle_digest(finetuned.folder / "finetune" / "bundle")


@pytest.mark.drill
def test_the_command_line_takes_an_id_and_the_variables_of_the_client(
    hub: Hub, classifier: Repository, finetuned: Any, tmp_path: Path
) -> None:
    classifier.private = True
    command = raybert(
        "predict", "--model=somebody/classifier@main", f"--source={finetuned.rows.source}",
        f"--output={tmp_path / 'out'}", "--num_workers=0",
        f"--tracking_uri={finetuned.tracking_uri}",
    )  # fmt: skip
    variables = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }

    def run(**more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, env=os.environ | variables | more, capture_output=True, text=True, timeout=120
        )

    refused = run()
    assert refused.returncode == 2, refused.stderr
    assert "the hub has no model somebody/classifier: check its name" in refused.stderr
    assert "Traceback" not in refused.stderr
    done = run(HF_TOKEN=OWNER)
    assert done.returncode == 0, done.stderr
    assert "%|" not in done.stderr
    commit = f"somebody/classifier@{classifier.branches['main']}"
    assert read_manifest(str(tmp_path / "out")).hub == {"model": commit}


@dataclass(frozen=True)
class Ready:
    """A bundle that was fine-tuned from a model of the hub, and the config that publishes it."""

    config: PublishConfig

    @property
    def bundle(self) -> Path:
        return Path(self.config.model)


@pytest.fixture(scope="module")
def made(pretrained: Any, tmp_path_factory: pytest.TempPathFactory) -> PublishConfig:
    """What publishes a bundle that was fine-tuned from a model of a hub."""
    folder = tmp_path_factory.mktemp("made")
    with running_hub(folder / "hf_home") as hub:
        hub.models[NAME] = Repository()
        hub.models[NAME].commit(foreign(pretrained.folder / "pretrain" / "bundle"))
        tuned = pretrained.finetune(folder / "finetune")
        finetune.run(replace(tuned, model=NAME, seeds=(0,), epochs=0.5))
    shared: dict[str, Any] = {"num_workers": 0, "tracking_uri": pretrained.tracking_uri}
    shared["model"] = str(folder / "finetune" / "bundle")
    evaluation = str(folder / "evaluate")
    evaluate.run(EvaluateConfig(output=evaluation, held_out=pretrained.rows, **shared))
    return PublishConfig(
        output="publish",
        evaluation=evaluation,
        name="name",
        hub="somebody/answers",
        license="apache-2.0",
        **shared,
    )


@pytest.fixture
def ready(hub: Hub, made: PublishConfig, tmp_path: Path) -> Ready:
    return Ready(replace(made, output=str(tmp_path / "publish"), name=tmp_path.name))


@pytest.mark.drill
def test_a_model_published_to_the_hub_is_the_same_by_its_id(
    hub: Hub, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bert_core.bundle.format import bundle_digest
    from bert_core.inference.predictor import Predictor

    monkeypatch.setenv("HF_TOKEN", OWNER)
    counts = publish.run(ready.config).counts
    there = hub.models["somebody/answers"]
    commit = there.branches["main"]
    assert (counts["hub"], counts["hub_url"]) == (
        f"somebody/answers@{commit}",
        f"{hub.url}/somebody/answers/tree/{commit}",
    )
    assert len(there.commits) == 2, "the one that creates it, and the bundle's"
    assert not there.private
    monkeypatch.delenv("HF_TOKEN")
    folder = Reference.parse("somebody/answers").fetch()
    assert bundle_digest(folder) == bundle_digest(ready.bundle)
    texts = ["Return the number of bytes.", "Raise an error."]
    answers = [Predictor(each, device="cpu").predict(texts) for each in (folder, ready.bundle)]
    assert answers[0] == answers[1]
    assert load_with_origin(folder).lineage["hub"] == counts["hub"]
    version = connect(str(ready.config.tracking_uri)).get_model_version(ready.config.name, "1")
    assert version.tags["raybert.hub"] == counts["hub"]


def test_the_card_on_the_hub_has_the_metadata_that_the_hub_reads(
    hub: Hub, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", OWNER)
    publish.run(ready.config)
    text = hub.models["somebody/answers"].files()["README.md"].decode()
    data = ModelCardData(**ModelCard(text).data.to_dict())
    assert data.license == "apache-2.0"
    assert data.base_model == NAME
    assert (data.pipeline_tag, data.library_name) == (
        "text-classification",
        "transformers",
    )
    measured = read_manifest(ready.config.evaluation).counts
    found = {each.metric_type: each for each in data.eval_results or []}
    assert found["accuracy"].metric_value == measured["accuracy"]
    assert found["accuracy"].dataset_name == "rows.jsonl"
    assert "raybert predict --model somebody/answers --source" in text
    commit = lineage_of(ready.bundle.parent)["parent_lineage"]["hub"]
    assert f"`{commit}` on the Hugging Face hub" in text


def uploads(hub: Hub) -> list[str]:
    """The large files that were sent."""
    return [request for request in hub.requests if request.startswith("PUT ")]


@pytest.mark.guard
def test_a_failed_upload_resumes_and_removes_what_the_bundle_no_longer_has(
    hub: Hub, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", OWNER)
    before = Repository()
    record = json.dumps({"files": {"config.json": "", "onnx/model.onnx": ""}}).encode()
    kept = {"LICENSE": b"mine", "notes/a.txt": b"mine"}
    before.commit({"raybert.json": record, "onnx/model.onnx": b"old", "config.json": b"{}"} | kept)
    hub.models["somebody/answers"] = before
    hub.fail_large_files = True
    with pytest.raises(ResourceError, match=r"could not be uploaded \(HfHubHTTPError: .*check the"):
        publish.run(ready.config)
    hub.fail_large_files, hub.fail_commits = False, True
    hub.requests.clear()
    with pytest.raises(
        ResourceError, match=r"hub: somebody/answers could not be uploaded, the hub"
    ):
        publish.run(ready.config)
    sent = uploads(hub)
    assert sent
    hub.fail_commits = False
    publish.run(ready.config)
    assert uploads(hub) == sent, "none is sent twice"
    assert set(before.files()) == {*contents(ready.bundle), "README.md", *kept}
    versions = connect(str(ready.config.tracking_uri)).search_model_versions(
        f"name = '{ready.config.name}'"
    )
    assert len(versions) == 1


def test_a_forbidden_upload_is_reported_before_anything_is_registered(
    hub: Hub, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="hub: wanted a token that may write to somebody/answers"):
        publish.run(ready.config)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ResourceError, match="HF_HUB_OFFLINE is set: unset it, or leave hub out"):
        publish.run(ready.config)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    client = connect(str(ready.config.tracking_uri))
    assert not client.search_registered_models(f"name = '{ready.config.name}'")
    monkeypatch.setenv("HF_TOKEN", STRANGER)
    with pytest.raises(
        ConfigError, match=r"may write to somebody/answers, the hub refused .*\(403"
    ):
        publish.run(ready.config)


@pytest.mark.guard
def test_a_private_model_is_private_and_never_becomes_public_by_mistake(
    hub: Hub, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", OWNER)
    hub.models["somebody/public"] = Repository()
    hub.models["somebody/public"].commit({})
    with pytest.raises(
        ConfigError, match="hub_private: wanted a private model, somebody/public is"
    ):
        publish.run(replace(ready.config, hub="somebody/public", hub_private=True))
    assert hub.models["somebody/public"].files() == {}
    publish.run(replace(ready.config, output=f"{ready.config.output}-2", hub_private=True))
    assert hub.models["somebody/answers"].private


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hub": "answers"},
            "hub: wanted owner/name, a model on the Hugging Face hub, got 'answers'",
        ),
        ({"hub": "a/b@main"}, "hub: wanted owner/name"),
        ({"hub": None, "hub_private": True}, "hub_private: wanted hub with it, got none"),
    ],
)
def test_an_upload_names_a_model_of_the_hub(changes: dict[str, Any], message: str) -> None:
    given = {"output": "o", "model": "m", "evaluation": "e", "name": "n"} | changes
    with pytest.raises(ConfigError, match=message):
        PublishConfig(**given)
