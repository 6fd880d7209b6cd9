import json
import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_core.errors import ConfigError, FormatError, ResourceError
from bert_core.metrics.bootstrap import Verdict, not_worse
from pipelines.cli import main
from tracking.models.model_card import without_front_matter
from tracking.models.references import Reference
from tracking.models.registry import (
    Comparison,
    Publication,
    Release,
    champion,
    describe,
    promote,
    publish,
    rollback,
)
from tracking.runs.recorder import RunRecorder
from tracking.store.server import connect

RIGHT, WRONG = [1.0] * 40, [0.0] * 40
_numbers = count()


@pytest.fixture
def name() -> str:
    return f"model-{next(_numbers)}"


def publish_at(
    store: str,
    name: str,
    bundle: Path,
    *,
    run_id: str | None = None,
    force: bool = False,
    **compared: Any,
) -> Publication:
    release = Release(
        bundle=bundle,
        name=name,
        metrics={"accuracy": 0.75},
        input_example=["abc", "def"],
        experiment="registry",
        run_id=run_id,
    )
    return publish(release, Comparison(**compared), uri=store, force=force)


def verdict_of(new: list[float], old: list[float]) -> Verdict:
    columns = [{"right": np.array(each)} for each in (new, old)]
    return not_worse("accuracy", lambda of: {"accuracy": of["right"].mean()}, *columns)


@pytest.mark.guard
def test_the_champion_is_replaced_only_by_one_that_is_not_worse(
    store: str, name: str, bundles: list[Path]
) -> None:
    assert champion(name, uri=store) is None
    first = publish_at(store, name, bundles[0])
    assert (first.is_new, first.is_champion) == (True, True)
    assert first.why == "version 1 is the champion: there was none before"
    uncompared = publish_at(store, name, bundles[1])
    assert (uncompared.is_new, uncompared.is_champion) == (True, False)
    assert "nothing compares version 2 with it; give rows" in uncompared.why
    worse = publish_at(store, name, bundles[1], verdict=verdict_of(WRONG, RIGHT))
    assert (worse.is_new, worse.is_champion) == (False, False)
    assert worse.why == (
        "version 1 stays the champion, version 2 is worse, the difference is accuracy -1.0000 "
        "(-1.0000 to -1.0000 by paired bootstrap on 40 rows); --force makes it the champion "
        "anyway"
    )
    assert champion(name, uri=store) == first.version
    better = publish_at(store, name, bundles[1], verdict=verdict_of(RIGHT, WRONG))
    assert (better.is_new, better.is_champion) == (False, True)
    assert better.why.startswith("version 2 is the champion, not worse than version 1, the diff")
    assert champion(name, uri=store) == better.version
    forced = publish_at(store, name, bundles[0], verdict=verdict_of(WRONG, RIGHT), force=True)
    assert forced.why.startswith("version 1 is the champion by force, the difference is accuracy")
    again = publish_at(store, name, bundles[0])
    assert again.why == "version 1 is already the champion"
    assert champion(name, uri=store) == first.version
    versions = connect(store).search_model_versions(f"name = '{name}'")
    assert sorted(str(version.version) for version in versions) == ["1", "2"]


def test_a_comparison_says_nothing_about_a_champion_that_came_after_it(
    store: str, name: str, bundles: list[Path]
) -> None:
    first = publish_at(store, name, bundles[0])
    compared = champion(name, uri=store)
    meanwhile = publish_at(store, name, bundles[1], force=True)
    late = publish_at(store, name, bundles[2], champion=compared, verdict=verdict_of(RIGHT, WRONG))
    assert compared == first.version
    assert not late.is_champion
    assert late.why == (
        "version 2 stays the champion: it became the champion while version 3 was compared with "
        "version 1; publish again, with another output, to compare them"
    )
    assert champion(name, uri=store) == meanwhile.version


def test_an_alias_is_moved_by_hand_with_the_card_and_a_champion_only_by_force(
    store: str, name: str, bundles: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """What MLflow itself then says, which is what servers ask."""
    first, second = (publish_at(store, name, bundle).version for bundle in bundles[:2])
    for version in (first, second):
        describe(version, f"card {version.version}", f"text {version.version}", uri=store)
    client = connect(store)
    wanted = "version 1 stays the champion: nothing is compared here; --force makes version 2 the"
    with pytest.raises(ConfigError, match=wanted):
        promote(name, "2", uri=store)
    raybert = ["promote", name, "2", "--force", "--tracking_uri", store]
    with pytest.raises(SystemExit) as done:
        main(raybert)
    assert done.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"models:/{name}@champion: version 2 is the champion by force; it was version 1" in told
    assert str(client.get_model_version_by_alias(name, "champion").version) == "2"
    assert client.get_registered_model(name).description == "text 2"
    assert promote(name, "2", uri=store).endswith("version 2 is already the champion")
    moved = promote(name, "1", alias="candidate", uri=store)
    assert moved == f"models:/{name}@candidate: candidate is version 1"
    assert client.get_registered_model(name).aliases.keys() == {"champion", "candidate"}
    assert client.get_registered_model(name).description == "text 2"
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"version": "3"}, r"wanted a version of .*, got '3'; there are: 1, 2"),
        ({"name": "nothing"}, "there are: none"),
        ({"alias": "latest"}, "alias: wanted one that MLflow takes, got 'latest'"),
    ]
    for wrong, message in wrongs:
        given: dict[str, Any] = {"name": name, "version": "1", "uri": store, "force": True} | wrong
        with pytest.raises(ConfigError, match=message):
            promote(**given)


def test_an_alias_goes_back_to_where_it_was_and_then_further_back(
    store: str, name: str, bundles: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (publish_at(store, name, bundle).version for bundle in bundles[:2])
    for version in (first, second):
        describe(version, f"card {version.version}", f"text {version.version}", uri=store)
    client = connect(store)
    nowhere = rf"champion of '{name}' had before, there is none; it is version 1: `raybert promote"
    with pytest.raises(ConfigError, match=nowhere):
        rollback(name, uri=store)
    for number in ("2", "1", "2"):
        promote(name, number, uri=store, force=True)
    with pytest.raises(SystemExit) as done:
        main(["rollback", name, "--tracking_uri", store])
    assert done.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"models:/{name}@champion: champion is version 1; it was version 2" in told
    assert str(client.get_model_version_by_alias(name, "champion").version) == "1"
    assert client.get_registered_model(name).description == "text 1"
    assert rollback(name, uri=store).endswith("champion is version 2; it was version 1")
    assert rollback(name, uri=store).endswith("champion is version 1; it was version 2")
    with pytest.raises(ConfigError, match=nowhere):
        rollback(name, uri=store)
    promote(name, "1", alias="candidate", uri=store)
    with pytest.raises(ConfigError, match=r"candidate of .* there is none; it is version 1"):
        rollback(name, alias="candidate", uri=store)
    promote(name, "2", alias="candidate", uri=store)
    client.delete_model_version(name, "1")
    gone = r"wanted version 1, which candidate of .* had before, it is no longer .* there are: 2:"
    with pytest.raises(ConfigError, match=gone):
        rollback(name, alias="candidate", uri=store)
    with pytest.raises(ConfigError, match="no model 'nothing' is registered in"):
        rollback("nothing", uri=store)


def test_a_version_shows_its_run_metrics_signature_and_example(
    tmp_path: Path, store: str, name: str, bundles: list[Path]
) -> None:
    from mlflow.models import Model

    recorder = RunRecorder.open(tmp_path, uri=store, experiment="registry")
    assert recorder.flush(60.0)
    published = publish_at(store, name, bundles[0], run_id=recorder.run_id)
    recorder.close()
    client = connect(store)
    version = client.get_model_version(name, published.version.version)
    assert version.run_id == recorder.run_id
    assert version.tags["metric.accuracy"] == "0.75"
    assert version.tags["raybert.task"] == "text-classification"
    assert version.tags["raybert.bundle"] == published.version.digest
    run = client.get_run(recorder.run_id or "")
    assert run.info.status == "FINISHED"
    assert run.outputs is not None
    (output,) = run.outputs.model_outputs
    logged = client.get_logged_model(output.model_id)
    assert [(metric.key, metric.value) for metric in logged.metrics or []] == [("accuracy", 0.75)]
    model = Model.load(logged.artifact_location.removeprefix("file://"))
    assert model.signature is not None
    assert model.signature.params is not None
    names = [field.name for field in model.signature.params]
    assert names == ["truncation", "truncation_direction", "top_k", "function_to_apply"]
    assert model.signature.outputs is not None
    assert model.signature.outputs.input_names() == ["label", "score"]
    assert model.saved_input_example_info is not None


def test_a_card_lies_beside_the_bundle_and_describes_its_version(
    store: str, name: str, bundles: list[Path]
) -> None:
    version = publish_at(store, name, bundles[0]).version
    short = "---\ntags:\n- a\n---\n\n# A model\n\nIt answers.\n"
    long = short + "".join(f"line {number}\n" for number in range(1000))
    for card in (short, long):
        describe(version, card, without_front_matter(card), uri=store)
        folder = Reference.parse(f"models:/{name}/1").fetch(uri=store)
        assert (folder / "README.md").read_text() == card
    description = connect(store).get_model_version(name, "1").description or ""
    assert description.startswith("# A model\n\nIt answers.\nline 0\n")
    assert len(description) <= 5000
    assert connect(store).get_registered_model(name).description == description
    *lines, empty, note = description.splitlines()
    assert lines[-1] == f"line {len(lines) - 4}"
    assert (empty, note) == ("", "… the rest is in artifacts/0/README.md of its files.")


def test_publishing_leaves_mlflows_own_uri_as_it_was(
    store: str, name: str, bundles: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    publish_at(store, name, bundles[2])
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://tracking:5000"
    assert mlflow.get_tracking_uri() == "http://tracking:5000"


def test_nothing_of_a_model_is_pickled(store: str, name: str, bundles: list[Path]) -> None:
    publish_at(store, name, bundles[0])
    client = connect(store)
    stored = client.get_model_version_download_uri(name, "1").removeprefix("file://")
    files = {path.name for path in Path(stored).rglob("*") if path.is_file()}
    assert {"MLmodel", "pyfunc.py", "input_example.json", "raybert.json"} <= files
    assert not {path for path in files if Path(path).suffix in {".pkl", ".pickle", ".pt", ".bin"}}


def test_a_name_that_no_reference_can_hold_is_refused(store: str, bundles: list[Path]) -> None:
    for name in ("a/b", "a@b", "a:b", "a.b", "it's", " "):
        with pytest.raises(ConfigError, match=r"wanted one without .* and quotes"):
            publish_at(store, name, bundles[0])


def test_a_folder_that_is_not_a_bundle_is_not_registered(
    tmp_path: Path, store: str, name: str
) -> None:
    with pytest.raises(FormatError, match=r"wanted this file"):
        publish_at(store, name, tmp_path)
    assert champion(name, uri=store) is None


def test_an_artifact_store_that_rejects_writes_is_named(
    tmp_path: Path, name: str, bundles: list[Path]
) -> None:
    (tmp_path / "mlartifacts").write_text("in the way")
    store = f"sqlite:///{tmp_path}/mlflow.db"
    with pytest.raises(ResourceError, match=r"store .*/0 in file:.*mlartifacts.*raybert doctor"):
        publish_at(store, name, bundles[0])
    assert champion(name, uri=store) is None
    (tmp_path / "mlartifacts").unlink()
    assert publish_at(store, name, bundles[0]).is_champion


def test_mended_labels_are_a_new_version_which_answers_with_them(
    tmp_path: Path, store: str, name: str, bundles: list[Path]
) -> None:
    from bert_core.bundle.format import load_bundle
    from bert_core.bundle.record import renew

    mended = shutil.copytree(bundles[0], tmp_path / "mended")
    record = json.loads((mended / "raybert.json").read_text())
    record["labels"].reverse()
    (mended / "raybert.json").write_text(json.dumps(record))
    renew(mended)
    first, second = (publish_at(store, name, folder, force=True) for folder in (bundles[0], mended))
    assert (second.version.version, second.is_new, second.is_champion) == ("2", True, True)
    assert first.version.digest != second.version.digest
    tasks = [
        load_bundle(Reference.parse(f"models:/{name}/{number}").fetch(uri=store)).task
        for number in (1, 2)
    ]
    assert [task.labels for task in tasks if task is not None] == [["ham", "spam"], ["spam", "ham"]]
    assert not publish_at(store, name, mended).is_new
