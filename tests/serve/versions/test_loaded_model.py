"""A loaded model whose plan changes, and the candidate that it is compared with: a real registry, a
live server."""

import asyncio
import gc
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bert_core import files
from bert_core.bundle.format import bundle_digest, load_bundle
from bert_core.bundle.layout import WEIGHTS
from bert_core.cache import FOLDER
from bert_core.errors import ConfigError, FormatError, ResourceError
from bert_core.inference.predictor import Predictor
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.feature_extraction import FeatureExtractionParameters
from bert_core.tasks.text_classification import TextClassification
from serve.config import ServeConfig
from serve.http.app import create_model_app
from serve.model.changes import difference
from serve.model.model import Model
from serve.observe.records import Recorder
from serve.request import auth
from serve.request.auth import Keys
from serve.request.errors import FailedError
from serve.request.limits import Limits
from serve.versions.comparison import Pairing, Tally, compared
from serve.versions.comparison_runs import EXPERIMENT, CandidateRuns
from serve.versions.follower import Aim
from serve.versions.loaded_model import LoadedModel
from serve.versions.plan import PLAN, CandidatePlan, Plan, Source, find
from tests import tiny
from tests.serve import live
from tracking.models.attempts import attempt
from tracking.models.references import Folder, Registered
from tracking.models.registry import Release, publish
from tracking.store.server import connect

TEXTS = ["Parse a string.", "Open a socket on a port.", "A fox."]
NAME = "hosted"
REFERENCE = Registered(NAME, alias="champion")


@pytest.fixture(scope="module")
def folders(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two bundles that give other answers.

    Their encoders are like no other of this process, which would be damaged with them.
    """
    loaded, task = load_bundle(bundle), TextClassification(["json", "numpy", "socket"])
    return [
        tiny.bundle(
            tmp_path_factory.mktemp("hosted") / "bundle",
            loaded.tokenizer,
            loaded.encoder_config,
            task=task,
            seed=seed,
        )
        for seed in (71, 72)
    ]


@pytest.fixture(scope="module")
def registry(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = f"sqlite:///{tmp_path_factory.mktemp('registry')}/mlflow.db"
    for folder in folders:
        publish(Release(bundle=folder, name=NAME, metrics={}, input_example=TEXTS), uri=uri)
    return uri


def ask(url: str, **headers: str) -> httpx.Response:
    response = httpx.post(url, json={"inputs": TEXTS}, headers=headers, timeout=30)
    assert response.status_code == 200, response.text
    return response


def card(url: str) -> Any:
    return httpx.get(url, timeout=30).json()


def test_a_plan_is_the_same_after_serve_has_kept_it(folders: list[Path]) -> None:
    candidate = CandidatePlan(source=live.plan_of(folders[1]).source, share=0.5, mode="split")
    plan = live.plan_of(folders[0], limits=Limits(max_inputs=3), candidate=candidate, cache_mib=2)
    assert PLAN.validate_python(PLAN.dump_python(plan, mode="json")) == plan


def test_another_bundle_takes_over_under_load_without_a_failed_or_mixed_answer(
    folders: list[Path],
) -> None:
    wanted = {bundle_digest(folder): Predictor(folder).predict(TEXTS) for folder in folders}
    digests = list(wanted)
    answers: list[httpx.Response] = []
    done = threading.Event()
    with live.hosted(live.plan_of(folders[0])) as (model, url):

        def load() -> None:
            while not done.is_set():
                answers.append(ask(url))

        def latest() -> str | None:
            return answers[-1].headers["X-Model-Digest"] if answers else None

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        for place in (1, 0, 1):
            model.change(live.plan_of(folders[place]))
            live.eventually(lambda: latest() == digests[place])  # noqa: B023
        done.set()
        for thread in threads:
            thread.join()
    seen = {answer.headers["X-Model-Digest"] for answer in answers}
    assert seen == set(wanted)
    for answer in answers:
        expected = wanted[answer.headers["X-Model-Digest"]]
        for came, row in zip(answer.json(), expected, strict=True):
            assert [each["label"] for each in came] == [each["label"] for each in row]
            scores = [each["score"] for each in row]
            assert [each["score"] for each in came] == pytest.approx(scores, abs=1e-5)


def test_settings_that_do_not_change_the_model_do_not_reload_it(folders: list[Path]) -> None:
    with live.hosted(live.plan_of(folders[0])) as (model, url):
        before = model.slot.model
        model.change(live.plan_of(folders[0], limits=Limits(max_inputs=2)))
        assert model.slot.model is before
        response = httpx.post(url, json={"inputs": TEXTS}, timeout=30)
        assert (response.status_code, response.json()["error_type"]) == (413, "too_large")


def test_limits_that_are_changed_count_at_once_also_higher_ones(folders: list[Path]) -> None:
    body = {"inputs": TEXTS, "parameters": {"top_k": 2}}
    low, high = Limits(max_inputs=2, max_top_k=1), Limits(max_inputs=3, max_top_k=2)
    with live.hosted(live.plan_of(folders[0], limits=low)) as (model, url):
        for limits, status in ((low, 413), (high, 200), (replace(high, max_top_k=1), 413)):
            model.change(live.plan_of(folders[0], limits=limits))
            assert httpx.post(url, json=body, timeout=30).status_code == status


def test_a_cache_can_be_turned_on_and_off_while_serving_and_belongs_to_one_version(
    folders: list[Path],
) -> None:
    digests = list(map(bundle_digest, folders))
    with live.hosted(live.plan_of(folders[0])) as (model, url):
        before = model.slot.model
        assert "X-Cache" not in ask(url).headers
        model.change(live.plan_of(folders[0], cache_mib=1))
        first = ask(url)
        assert [first.headers["X-Cache"], ask(url).headers["X-Cache"]] == ["miss", "hit"]
        assert model.slot.model is before

        model.change(live.plan_of(folders[1], cache_mib=1))
        live.eventually(lambda: card(url)["digest"] == digests[1])
        other = ask(url)
        assert (other.headers["X-Cache"], other.headers["X-Model-Digest"]) == ("miss", digests[1])
        assert other.json() != first.json()
        assert ask(url).headers["X-Cache"] == "hit"

        model.change(live.plan_of(folders[1]))
        assert "X-Cache" not in ask(url).headers


def test_a_version_that_cannot_be_loaded_is_reported_and_the_old_one_stays(
    folders: list[Path], tmp_path: Path
) -> None:
    with live.hosted(live.plan_of(folders[0])) as (model, url):
        gone = live.plan_of(folders[1])
        folder = Folder(str(tmp_path / "gone"))
        gone = replace(gone, source=replace(gone.source, reference=folder))
        model.change(gone)
        live.eventually(lambda: card(url)["state"] == "problem")
        assert card(url)["problem"].startswith(f"{tmp_path}/gone is not served: ")
        assert ask(url).headers["X-Model-Digest"] == bundle_digest(folders[0])
        # What has failed is tried again.
        shutil.copytree(folders[1], tmp_path / "gone")
        model.change(live.plan_of(folders[0]))
        model.change(gone)
        live.eventually(lambda: card(url)["state"] == "ready")
        assert ask(url).headers["X-Model-Digest"] == bundle_digest(folders[1])


def test_a_starting_process_loads_the_current_version_of_its_alias_or_else_the_previous_one(
    folders: list[Path], registry: str
) -> None:
    client = connect(registry)
    client.set_registered_model_alias(NAME, "champion", "2")
    source = Source(
        reference=REFERENCE, tracking_uri=registry, version="1", digest=bundle_digest(folders[0])
    )
    model = LoadedModel(Plan(name=NAME, source=source))
    assert (model.slot.model.version, model.slot.problem) == ("2", None)
    # Applying the same again changes nothing, although the alias has moved since it was deployed.
    before = model.slot.model
    model.change(Plan(name=NAME, source=replace(source, version="2", digest=None)))
    time.sleep(0.3)
    assert model.slot.model is before
    model.close()

    stored = client.get_model_version_download_uri(NAME, "2").removeprefix("file://")
    [weights] = Path(stored).rglob(WEIGHTS)
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    try:
        model = LoadedModel(Plan(name=NAME, source=source))
        assert model.slot.model.version == "1"
        live.eventually(lambda: model.slot.problem is not None)
        assert str(model.slot.problem).startswith(f"version 2 of {REFERENCE} is not served: ")
        model.close()
    finally:
        weights.write_bytes(sound)


class Told(Recorder):
    """Keeps what changes."""

    def __init__(self) -> None:
        self.changes: list[str | None] = []

    def rolled_over(self, model: str, version: str, change: str | None = None) -> None:
        self.changes.append(change)


LABELS = ["json", "numpy", "socket"]
OTHERS = {
    "without json and with regex": ["numpy", "regex", "socket"],
    "with regex": [*LABELS, "regex"],
    "the same in another order": LABELS[::-1],
}


@pytest.mark.parametrize("wanted", OTHERS)
def test_a_difference_of_labels_is_named(wanted: str) -> None:
    assert difference(LABELS, OTHERS[wanted]) == wanted


def test_a_version_with_other_labels_is_served_only_if_allowed(
    bundle: Path, registry: str, tmp_path: Path
) -> None:
    loaded, other, name = load_bundle(bundle), "with regex", "relabelled"
    for labels in (LABELS, OTHERS[other]):
        folder, task = tmp_path / str(len(labels)), TextClassification(labels)
        tiny.bundle(folder, loaded.tokenizer, loaded.encoder_config, task=task, seed=9)
        publish(Release(bundle=folder, name=name, metrics={}, input_example=TEXTS), uri=registry)
    client, reference = connect(registry), f"models:/{name}@champion"
    client.set_registered_model_alias(name, "champion", "1")
    config = ServeConfig(models=[f"{NAME}={reference}"], tracking_uri=registry, follow_s=0.1)
    plan, told = find(config)[NAME].plan, Told()
    with live.hosted(plan, recorder=told) as (model, url):
        client.set_registered_model_alias(name, "champion", "2")
        live.eventually(lambda: card(url)["state"] == "problem")
        problem = card(url)["problem"]
        assert problem.startswith(f"version 2 of {reference} is not served: wanted the labels that")
        assert f"({other})" in problem
        assert ask(url).headers["X-Model-Version"] == "1"
        assert told.changes == []
        model.change(replace(plan, allow_other_labels=True))  # a way out of the message
        live.eventually(lambda: card(url)["version"] == "2")
        assert card(url)["changed"] == f"2 has other labels than 1: {other}"
        listed = httpx.get(f"{url}/v1/models", timeout=30).json()["data"]
        assert listed[0]["card"]["changed"] == card(url)["changed"]
        assert told.changes == ["labels"]
        # The other one: what is deployed now has the new labels.
        assert find(config)[NAME].plan.source.labels == tuple(OTHERS[other])


def test_a_candidate_of_another_kind_than_the_model_is_refused(
    bundle: Path, bundles: dict[str, Path], registry: str, tmp_path: Path
) -> None:
    loaded = load_bundle(bundle)

    def found(candidate: Path, **settings: Any) -> Plan:
        rival = {"model": str(candidate), "share": 0.5}
        models = {NAME: {"model": str(bundle), "candidate": rival, **settings}}
        return find(ServeConfig(models=models, tracking_uri=registry))[NAME].plan

    for number, (other, labels) in enumerate(OTHERS.items()):
        folder, task = tmp_path / str(number), TextClassification(labels)
        tiny.bundle(folder, loaded.tokenizer, loaded.encoder_config, task=task)
        with pytest.raises(ConfigError) as caught:
            found(folder)
        assert str(caught.value).startswith(
            f"models.{NAME}.candidate: wanted the labels of {NAME}, got others ({other}), with"
        )
        candidate = found(folder, allow_other_labels=True).candidate  # the way out
        assert candidate is not None
        assert candidate.source.labels == tuple(labels)
    with pytest.raises(ConfigError, match="wanted a model for text-classification, got one for"):
        found(bundles["fill-mask"])


@pytest.mark.parametrize("name", ["feature-extraction", "sparse-embedding"])
def test_vectors_of_another_version_are_reported_as_incomparable(
    bundles: dict[str, Path], tmp_path: Path, name: str
) -> None:
    loaded = load_bundle(bundles[name])
    about: dict[str, Any] = {"task": loaded.task, "seed": 31}
    other = tiny.bundle(tmp_path / "other", loaded.tokenizer, loaded.encoder_config, **about)
    told = Told()
    with live.hosted(live.plan_of(bundles[name]), recorder=told) as (model, url):
        assert "cannot be compared" in card(url)["note"]
        assert card(url)["changed"] is None
        model.change(live.plan_of(other))
        live.eventually(lambda: card(url)["digest"] == bundle_digest(other))
        before, after = (bundle_digest(each)[:12] for each in (bundles[name], other))
        assert card(url)["changed"] == (
            f"vectors of {after} cannot be compared with those of {before}: make indexes again"
        )
        assert told.changes == ["vectors"]


def test_another_version_with_the_same_labels_is_no_change(folders: list[Path]) -> None:
    told = Told()
    with live.hosted(live.plan_of(folders[0]), recorder=told) as (model, url):
        model.change(live.plan_of(folders[1]))
        live.eventually(lambda: card(url)["digest"] == bundle_digest(folders[1]))
        assert (card(url)["changed"], told.changes) == (None, [None])


DIES = """
import os, signal, sys
from tracking.models.attempts import attempt
from tracking.models.references import Reference
with attempt(Reference.parse(sys.argv[1]), sys.argv[2], uri=sys.argv[3]):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _die_while_trying(registry: str, version: str) -> None:
    """A process of this machine begins to load a version, and is killed."""
    command = [sys.executable, "-c", DIES, str(REFERENCE), version, registry]
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGKILL


def test_a_version_that_killed_a_process_is_skipped_by_the_next_one(
    folders: list[Path],
    registry: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    client = connect(registry)
    source = Source(
        reference=REFERENCE, tracking_uri=registry, version="1", digest=bundle_digest(folders[0])
    )
    client.set_registered_model_alias(NAME, "champion", "2")
    _die_while_trying(registry, "2")
    with live.hosted(Plan(name=NAME, source=source, follow_s=0.1)) as (_, url):
        assert ask(url).headers["X-Model-Version"] == "1"
        live.eventually(lambda: card(url)["state"] == "problem")
        problem = card(url)["problem"]
        assert problem.startswith(f"version 2 of {REFERENCE} is not served: loading it has ended 1")
        assert "memory" in problem
        time.sleep(0.5)  # it is asked for again and again
        assert ask(url).headers["X-Model-Version"] == "1"
        client.set_registered_model_alias(NAME, "champion", "1")  # the way out
        live.eventually(lambda: card(url)["state"] == "ready")

        (note,) = (tmp_path / "tried").glob("*.json")
        files.write_json(str(note), files.read_json(str(note)) | {"again_at": 0})  # it is time
        client.set_registered_model_alias(NAME, "champion", "2")
        live.eventually(lambda: card(url)["version"] == "2")
        assert note.exists()
        ask(url)
        live.eventually(lambda: not note.exists())  # it has answered
        # A version that has answered here is not new: a process that starts takes it.
        _die_while_trying(registry, "2")
    other = LoadedModel(Plan(name=NAME, source=source))
    assert (other.slot.model.version, other.slot.problem) == ("2", None)
    other.close()


def test_a_version_is_loaded_by_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    order = []

    def other() -> None:
        with attempt(REFERENCE, "2", uri="here") as trying:
            order.append("other")
        trying.close()

    thread = threading.Thread(target=other)
    with attempt(REFERENCE, "2", uri="here") as first:
        thread.start()
        time.sleep(0.2)
        order.append("first")
    # It is loaded here, and has not answered: nobody has been ended by it.
    thread.join(10)
    assert order == ["first", "other"]
    first.close()
    with pytest.raises(FormatError), attempt(REFERENCE, "2", uri="here"):
        raise FormatError("damaged")
    with attempt(REFERENCE, "2", uri="here"):  # that ended nobody
        pass


def test_a_change_returns_at_once_and_the_old_version_answers_until_the_new_one_is_loaded(
    folders: list[Path],
) -> None:
    may_load = threading.Event()

    class Slow(LoadedModel):
        def _load(self, aim: Aim) -> Model:
            if aim.source.digest == bundle_digest(folders[1]):
                may_load.wait(60)
            return super()._load(aim)

    model = Slow(live.plan_of(folders[0]))
    with live.running(create_model_app(model.slot, alone=True)) as url:
        began_s = time.monotonic()
        model.change(live.plan_of(folders[1]))
        assert time.monotonic() < began_s + 30
        assert card(url)["state"] == "loading"
        assert ask(url).headers["X-Model-Digest"] == bundle_digest(folders[0])
        may_load.set()
        live.eventually(lambda: card(url)["state"] == "ready")
        assert ask(url).headers["X-Model-Digest"] == bundle_digest(folders[1])
        model.close()


def test_a_bundle_that_was_downloaded_before_needs_no_registry(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    source = Source(
        reference=REFERENCE,
        tracking_uri="http://127.0.0.1:9",  # nobody answers there
        version="1",
        digest=bundle_digest(folders[0]),
    )
    with pytest.raises(ResourceError):
        source.fetch()
    kept = tmp_path / "bundles" / bundle_digest(folders[0])
    shutil.copytree(folders[0], kept)
    assert source.fetch() == (kept, "1")
    model = LoadedModel(Plan(name=NAME, source=source, follow_s=0.0))
    assert (model.slot.model.version, model.slot.problem) == ("1", None)
    model.close()


def test_a_version_of_the_same_number_of_another_model_is_not_taken_for_it(
    folders: list[Path], registry: str
) -> None:
    client = connect(registry)
    client.set_registered_model_alias(NAME, "champion", "1")
    publish(
        Release(bundle=folders[1], name="another", metrics={}, input_example=TEXTS), uri=registry
    )
    client.set_registered_model_alias("another", "champion", "1")
    source = Source(reference=REFERENCE, tracking_uri=registry)
    with live.hosted(Plan(name=NAME, source=source, follow_s=0.2)) as (model, url):
        other = replace(source, reference=Registered("another", alias="champion"), task="fill-mask")
        model.change(Plan(name=NAME, source=other, follow_s=0.2))
        live.eventually(lambda: card(url)["state"] == "problem")
        time.sleep(0.6)  # it is looked at again
        assert "wanted a model for fill-mask" in card(url)["problem"]
        assert card(url)["digest"] == bundle_digest(folders[0])
        model.change(Plan(name=NAME, source=replace(other, task=None), follow_s=0.2))
        live.eventually(lambda: card(url)["digest"] == bundle_digest(folders[1]))
        assert card(url)["problem"] is None


def test_an_unreachable_registry_is_reported_if_another_model_was_wanted(
    folders: list[Path], registry: str
) -> None:
    connect(registry).set_registered_model_alias(NAME, "champion", "1")
    source = Source(reference=REFERENCE, tracking_uri=registry)
    with live.hosted(Plan(name=NAME, source=source, follow_s=0.2)) as (model, url):
        away = Source(
            reference=Registered("other", alias="champion"), tracking_uri="http://127.0.0.1:9"
        )
        model.change(Plan(name=NAME, source=away, follow_s=0.2))
        live.eventually(lambda: card(url)["state"] == "problem")
        assert "the registry does not answer" in card(url)["problem"]
        assert ask(url).headers["X-Model-Digest"] == bundle_digest(folders[0])


@pytest.mark.parametrize("has_answered", [True, False])
def test_the_weights_of_a_version_that_answers_no_more_are_freed_without_garbage_collection(
    folders: list[Path], *, has_answered: bool
) -> None:
    with live.hosted(live.plan_of(folders[0])) as (model, url):
        if has_answered:
            ask(url)
        weights = weakref.ref(model.slot.model.predictor.model)
        gc.disable()
        try:
            model.change(live.plan_of(folders[1]))
            live.eventually(lambda: model.slot.model.digest == bundle_digest(folders[1]))
            assert ask(url).headers["X-Model-Digest"] == bundle_digest(folders[1])
            live.eventually(lambda: weights() is None, timeout_s=10)
        finally:
            gc.enable()


@pytest.mark.guard
def test_a_split_keeps_each_caller_on_one_model(folders: list[Path]) -> None:
    candidate = CandidatePlan(source=live.plan_of(folders[1]).source, share=0.4, mode="split")
    digests = [bundle_digest(folder) for folder in folders]
    with live.hosted(live.plan_of(folders[0], candidate=candidate)) as (model, url):
        live.eventually(lambda: card(url)["candidate"] is not None)
        assert ask(url).headers["X-Model-Digest"] == digests[0]  # nobody in particular
        chosen = {}
        for number in range(60):
            caller = {"X-Caller": f"user {number}"}
            chosen[number] = ask(url, **caller).headers["X-Model-Digest"]
            assert ask(url, **caller).headers["X-Model-Digest"] == chosen[number]
            caller["Authorization"] = "Bearer what clients send to a server without keys"
            assert ask(url, **caller).headers["X-Model-Digest"] == chosen[number]
        # Other settings of the model leave the candidate as it is.
        served = model.slot.candidate
        model.change(live.plan_of(folders[0], candidate=candidate, limits=Limits(max_top_k=3)))
        assert model.slot.candidate is served
        assert served is not None
        assert served.slot.model.limits.max_top_k == 3
        assert card(url)["candidate"]["digest"] == digests[1]
    # 60 callers at 0.4: within three standard deviations, 3.8 callers, of 24.
    assert 13 <= sum(digest == digests[1] for digest in chosen.values()) <= 35


def test_a_split_is_by_key_where_the_server_asks_for_keys(folders: list[Path]) -> None:
    made = [auth.create(f"caller{number}") for number in range(20)]
    keys = Keys([stored for _, stored in made])
    candidate = CandidatePlan(source=live.plan_of(folders[1]).source, share=0.5, mode="split")
    model = LoadedModel(live.plan_of(folders[0], candidate=candidate))
    with live.running(create_model_app(model.slot, alone=True, keys=keys)) as url:
        try:
            live.eventually(lambda: model.slot.candidate is not None)
            chosen = []
            for key, _ in made:
                bearer = {"Authorization": f"Bearer {key}"}
                chosen.append(ask(url, **bearer).headers["X-Model-Digest"])
                others = ask(url, **bearer, **{"X-Caller": made[0][0]})
                assert others.headers["X-Model-Digest"] == chosen[-1]
        finally:
            model.close()
    assert set(chosen) == {bundle_digest(folder) for folder in folders}  # but for one in 2**19


def test_a_shadow_answers_nobody_and_is_compared_in_a_run_of_mlflow(
    folders: list[Path], tmp_path: Path
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    recorder = CandidateRuns(uri)
    candidate = CandidatePlan(source=live.plan_of(folders[1]).source, share=1.0, mode="shadow")
    seen: list[Tally] = []

    def report(pairing: Pairing, tally: Tally) -> None:
        recorder.record(pairing, tally)
        seen.append(tally)

    with live.hosted(live.plan_of(folders[0], candidate=candidate), report=report) as (_, url):
        live.eventually(lambda: card(url)["candidate"] is not None)
        for _ in range(5):
            assert ask(url).headers["X-Model-Digest"] == bundle_digest(folders[0])
        live.eventually(lambda: len(seen) == 5)
    recorder.close()
    first, second = (Predictor(folder).predict(TEXTS) for folder in folders)
    same = sum(
        one[0]["label"] == other[0]["label"] for one, other in zip(first, second, strict=True)
    )
    client = connect(uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    metrics = run.data.metrics
    assert metrics["inputs"] == 5 * len(TEXTS)
    assert metrics["agreement"] == pytest.approx(same / len(TEXTS))
    assert metrics["failed_requests"] == 0
    assert metrics["latency_ms"] > 0
    assert metrics["candidate_latency_ms"] > 0
    assert run.data.params["digest"] == bundle_digest(folders[0])
    assert run.data.params["candidate_digest"] == bundle_digest(folders[1])


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_agrees_with_itself(name: str, bundles: dict[str, Path]) -> None:
    kind = TASKS[name]
    holder = name if kind.trainable or name in bundles else None
    if holder is None:
        holder = next(each for each in bundles if name in Predictor(bundles[each]).also)
    predictor = Predictor(bundles[holder], device="cpu")
    predictor = predictor if predictor.task.name == name else predictor.also[name]
    answers = predictor.predict(list(predictor.task.examples))
    tally = compared(predictor.task, answers, answers)
    assert tally.inputs == len(answers)
    assert tally.agreed == tally.decided
    assert tally.decided or tally.scored == len(answers)
    assert tally.difference == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
def test_vectors_in_base64_are_compared(bundles: dict[str, Path], *, per_token: bool) -> None:
    predictor = Predictor(bundles["feature-extraction"], device="cpu")
    encoded, numbers = (
        predictor.predict(
            TEXTS, FeatureExtractionParameters(encoding_format=form, per_token=per_token)
        )
        for form in ("base64", None)
    )
    tally = compared(predictor.task, encoded, numbers)
    assert tally.scored == len(TEXTS)
    assert tally.difference == pytest.approx(0, abs=1e-6)


def test_another_label_is_disagreement_and_another_score_a_difference(bundle: Path) -> None:
    task = Predictor(bundle, device="cpu").task
    answer = [{"label": "json", "score": 0.9}, {"label": "numpy", "score": 0.1}]
    less = [{"label": "json", "score": 0.7}, {"label": "numpy", "score": 0.3}]
    other = [{"label": "numpy", "score": 0.6}, {"label": "json", "score": 0.4}]
    tally = compared(task, [answer, answer], [less, other])
    assert (tally.inputs, tally.decided, tally.agreed, tally.scored) == (2, 2, 1, 1)
    assert tally.difference == pytest.approx(0.2)


def test_a_failing_candidate_is_counted_and_fails_no_request(folders: list[Path]) -> None:
    seen: list[Tally] = []
    candidate = CandidatePlan(source=live.plan_of(folders[1]).source, share=1.0, mode="shadow")
    with live.hosted(
        live.plan_of(folders[0], candidate=candidate),
        report=lambda pairing, tally: seen.append(tally),
    ) as (model, url):
        live.eventually(lambda: model.slot.candidate is not None)
        assert model.slot.candidate is not None
        damage(model.slot.candidate.slot.model)
        ask(url)
        live.eventually(lambda: len(seen) == 1)
    assert (seen[0].failed, seen[0].inputs) == (1, 0)


def test_a_process_that_starts_without_its_registry_loads_what_last_answered_here(
    folders: list[Path], registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    client, digests = connect(registry), list(map(bundle_digest, folders))
    client.set_registered_model_alias(NAME, "champion", "2")
    source = Source(reference=REFERENCE, tracking_uri=registry, version="1", digest=digests[0])
    with live.hosted(Plan(name=NAME, source=source)) as (_, url):
        assert ask(url).headers["X-Model-Version"] == "2"
        live.eventually(lambda: any(tmp_path.glob("served/*.json")))
    for digest, folder in zip(digests, folders, strict=True):
        shutil.copytree(folder, tmp_path / "bundles" / digest)
    client.delete_registered_model_alias(NAME, "champion")
    with live.hosted(Plan(name=NAME, source=source)) as (_, url):
        assert card(url)["version"] == "2"
    # Of what another deployment served, nothing follows.
    other = replace(source, digest=None)
    with live.hosted(Plan(name=NAME, source=other)) as (_, url):
        assert card(url)["version"] == "1"


def test_a_process_is_not_replaced_because_its_candidate_fails(folders: list[Path]) -> None:
    candidate = CandidatePlan(source=live.plan_of(folders[1]).source, share=1.0, mode="split")
    model = LoadedModel(live.plan_of(folders[0], candidate=candidate))
    live.eventually(lambda: model.slot.candidate is not None)
    assert model.slot.candidate is not None
    served = model.slot.candidate.slot.model

    async def fail() -> None:
        damage(served)
        with pytest.raises(FailedError):
            await served.predict(TEXTS, None)
        await model.check_health()
        damage(model.slot.model)
        with pytest.raises(FailedError):
            await model.slot.model.predict(TEXTS, None)
        with pytest.raises(FormatError):
            await model.check_health()
        model.close()
        await asyncio.sleep(0)  # for what is closed to end

    asyncio.run(fail())


def damage(model: Any) -> None:
    """Make every pass of a model fail, as damaged memory does."""
    with torch.no_grad():
        for parameter in model.predictor.model.parameters():
            parameter.fill_(float("nan"))
