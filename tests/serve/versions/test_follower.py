"""A served model that follows its alias: a real registry, a live server under load."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from bert_core.bundle.format import load_bundle
from bert_core.bundle.layout import WEIGHTS
from bert_core.inference.predictor import Predictor
from bert_core.tasks.text_classification import TextClassification
from serve.http.app import create_model_app
from serve.model.model import Model
from serve.versions.follower import Aim, Follower, ModelHolder
from serve.versions.plan import Plan, Runtime, Source
from serve.versions.slot import Slot
from tests import tiny
from tests.serve import live
from tracking.models.references import Reference, Registered
from tracking.models.registry import Release, publish
from tracking.store.server import connect

TEXTS = ["Parse a string.", "Open a socket on a port.", "A fox."]
NAME = "followed"
REFERENCE = Registered(NAME, alias="champion")
EVERY_S = 0.1


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('registry')}/mlflow.db"


@pytest.fixture(scope="module")
def versions(bundle: Path, registry: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of versions 1 and 2, which give other answers."""
    loaded, folders = load_bundle(bundle), []
    for seed in (7, 8):
        folder = tmp_path_factory.mktemp("version") / "bundle"
        task = TextClassification(["json", "numpy", "socket"])
        tiny.bundle(folder, loaded.tokenizer, loaded.encoder_config, task=task, seed=seed)
        publish(Release(bundle=folder, name=NAME, metrics={}, input_example=TEXTS), uri=registry)
        folders.append(folder)
    return folders


def point(registry: str, version: str) -> None:
    connect(registry).set_registered_model_alias(NAME, "champion", version)


def eventually(holds: Callable[[], bool]) -> None:
    __tracebackhide__ = True
    live.eventually(holds, every_s=0.02)


@contextmanager
def following(registry: str) -> Iterator[tuple[str, Slot]]:
    """URL of a server of version 1 that follows the alias, and its slot."""
    point(registry, "1")
    source = Source(reference=REFERENCE, tracking_uri=registry)
    with live.hosted(Plan(name=NAME, source=source, follow_s=EVERY_S)) as (model, url):
        yield url, model.slot


def follower(
    slot: Slot, registry: str, load: Callable[[Aim], Model], every_s: float = EVERY_S
) -> Follower:
    """What has a slot with version 1 follow the alias."""
    source = Source(reference=REFERENCE, tracking_uri=registry)
    aim = Aim(source=source, runtime=Runtime(), follow_s=every_s)
    holder = ModelHolder(
        load=load,
        install=slot.switch,
        set_loading=partial(slot.set_loading, "model"),
        set_problem=partial(slot.set_problem, "model"),
    )
    return Follower(holder, aim, replace(aim, source=replace(source, version="1")))


def version_at(url: str) -> str:
    return str(httpx.post(url, json={"inputs": TEXTS}, timeout=30).headers["X-Model-Version"])


@pytest.mark.guard
def test_an_alias_moves_ten_times_under_load_without_a_failed_or_mixed_answer(
    registry: str, versions: list[Path]
) -> None:
    scores = {}
    for number, folder in enumerate(versions, 1):
        predictor = Predictor(folder, device="cpu")
        scores[str(number)] = [
            {each["label"]: each["score"] for each in answer} for answer in predictor.predict(TEXTS)
        ]
    assert scores["1"][0] != scores["2"][0]
    digests = {str(n): Predictor(folder).bundle.digest for n, folder in enumerate(versions, 1)}
    answers: list[httpx.Response] = []
    done = threading.Event()

    def ask(url: str) -> None:
        with httpx.Client(timeout=60) as client:
            while not done.is_set():
                answers.append(client.post(url, json={"inputs": TEXTS}))

    with following(registry) as (url, slot):
        threads = [threading.Thread(target=ask, args=[url]) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for move in range(10):
                wanted = "12"[(move + 1) % 2]
                point(registry, wanted)
                eventually(lambda: slot.model.version == wanted)  # noqa: B023
                before = len(answers)
                eventually(lambda: len(answers) > before + 8)  # noqa: B023
        finally:
            done.set()
            for thread in threads:
                thread.join()
    assert {answer.status_code for answer in answers} == {200}
    seen = set()
    for answer in answers:
        version = answer.headers["X-Model-Version"]
        assert answer.headers["X-Model-Digest"] == digests[version]
        seen.add(version)
        for came, wanted_scores in zip(answer.json(), scores[version], strict=True):
            for each in came:
                assert each["score"] == pytest.approx(wanted_scores[each["label"]], abs=1e-5)
    assert seen == {"1", "2"}


@pytest.mark.guard
@pytest.mark.usefixtures("versions")
def test_a_version_that_cannot_answer_is_reported_and_the_old_one_stays(
    registry: str, bundle: Path, tmp_path: Path
) -> None:
    loaded = load_bundle(bundle)
    other = tmp_path / "other"
    task = TextClassification(["a", "b"])
    tiny.bundle(other, loaded.tokenizer, loaded.encoder_config, task=task, seed=9)
    publish(Release(bundle=other, name=NAME, metrics={}, input_example=TEXTS), uri=registry)
    broken = "3"
    stored = connect(registry).get_model_version_download_uri(NAME, broken)
    [weights] = Path(stored.removeprefix("file://")).rglob(WEIGHTS)
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    with following(registry) as (url, slot):
        point(registry, broken)
        eventually(lambda: slot.problem is not None)
        card = httpx.get(url, timeout=30).json()
        assert card["version"] == "1"
        assert card["state"] == "problem"
        assert card["problem"].startswith(f"version {broken} of {REFERENCE} is not served: ")
        [listed] = httpx.get(f"{url}/v1/models", timeout=30).json()["data"]
        assert (listed["state"], listed["card"]) == ("problem", card)
        assert version_at(url) == "1"
        point(registry, "2")  # a later version that is sound is taken
        eventually(lambda: slot.model.version == "2")
        assert httpx.get(url, timeout=30).json()["problem"] is None
        assert version_at(url) == "2"
        point(registry, "1")  # moving it back rolls back
        eventually(lambda: version_at(url) == "1")


def test_a_version_that_could_not_be_fetched_is_retried(
    registry: str, versions: list[Path]
) -> None:
    point(registry, "2")
    slot = Slot(live.loaded(NAME, versions[0], version="1"))
    tried = []

    def load(aim: Aim) -> Model:
        tried.append(aim.source.version)
        if len(tried) < 3:
            raise ConnectionError("the store is away")
        return live.loaded(NAME, versions[1], version=aim.source.version)

    follows = follower(slot, registry, load)
    follows.start()
    try:
        eventually(lambda: slot.problem is not None)
        eventually(lambda: slot.model.version == "2")
    finally:
        follows.stop()
    assert tried == ["2", "2", "2"]
    assert slot.problem is None


def test_the_card_says_while_another_version_is_loaded(registry: str, versions: list[Path]) -> None:
    point(registry, "2")
    slot = Slot(live.loaded(NAME, versions[0], version="1"))
    may_load = threading.Event()

    def load(aim: Aim) -> Model:
        may_load.wait()
        return live.loaded(NAME, versions[1], version=aim.source.version)

    follows = follower(slot, registry, load)
    with live.running(create_model_app(slot, alone=True)) as url:

        def state() -> tuple[str, str]:
            card = httpx.get(url, timeout=30).json()
            return card["state"], card["version"]

        assert state() == ("ready", "1")
        follows.start()
        try:
            eventually(lambda: state() == ("loading", "1"))
            may_load.set()
            eventually(lambda: state() == ("ready", "2"))
        finally:
            may_load.set()
            follows.stop()


def test_an_unreachable_registry_is_reported_and_changes_nothing_else(
    registry: str, versions: list[Path]
) -> None:
    slot = Slot(live.loaded(NAME, versions[0], version="1"))
    away = follower(slot, "http://127.0.0.1:9", lambda aim: slot.model, every_s=0.01)
    away.start()
    eventually(lambda: slot.problem is not None)
    away.stop()
    assert slot.model.version == "1"
    assert str(slot.problem).startswith(f"{REFERENCE}: the registry does not answer: wanted MLflow")


@pytest.mark.guard
@pytest.mark.usefixtures("versions")
def test_the_threads_of_versions_that_answer_no_more_end(registry: str) -> None:
    def passes() -> int:
        return sum(thread.name.startswith("batch") for thread in threading.enumerate())

    before = passes()
    with following(registry) as (url, slot):
        for wanted in ("2", "1", "2", "1"):
            assert version_at(url)
            point(registry, wanted)
            eventually(lambda: slot.model.version == wanted)  # noqa: B023
        eventually(lambda: version_at(url) == "1")
        eventually(lambda: passes() <= before + 1)


def test_only_an_alias_is_followed() -> None:
    plan = Plan(name=NAME, source=Source(reference=REFERENCE, tracking_uri="sqlite://"))
    assert plan.follows(plan.source)
    assert not replace(plan, follow_s=0.0).follows(plan.source)
    for other in ("models:/followed/3", "runs/x/bundle", "owner/name"):
        assert not plan.follows(replace(plan.source, reference=Reference.parse(other)))
