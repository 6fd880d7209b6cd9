"""A plan that changes, or is dropped, while a version of an earlier plan is being loaded."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bert_core.bundle.format import bundle_digest
from bert_core.errors import ResourceError
from serve.model.model import Model
from serve.observe.records import Recorder
from serve.request.limits import Limits
from serve.versions.follower import Aim
from serve.versions.loaded_model import LoadedModel
from serve.versions.plan import CandidatePlan, Plan
from tests.serve import live

FEW = Limits(max_inputs=3)


class Switches(Recorder):
    """Keeps which versions took over."""

    def __init__(self) -> None:
        self.versions: list[str] = []

    def rolled_over(self, model: str, version: str, change: str | None = None) -> None:
        self.versions.append(version)


class Gated(LoadedModel):
    """Loads a version after the first once it may, or then fails to; and may wait again before it
    takes over."""

    def __init__(self, plan: Plan, **arguments: Any) -> None:
        self.may_load: dict[str, threading.Event] = {}
        """By digest."""
        self.failing: set[str] = set()
        self.loading: list[str] = []
        self.is_loaded, self.may_install = threading.Event(), threading.Event()
        self.may_install.set()
        super().__init__(plan, **arguments)

    def _load(self, aim: Aim) -> Model:
        digest = str(aim.source.digest)
        self.loading.append(digest)
        assert digest not in self.may_load or self.may_load[digest].wait(30)
        if digest in self.failing:
            raise ResourceError("the store is away")
        model = super()._load(aim)
        self.is_loaded.set()
        assert self.may_install.wait(30)
        return model

    def pause_before_install(self) -> tuple[threading.Event, threading.Event]:
        """Returns what is set once the next version is loaded, and what lets it be installed."""
        self.is_loaded.clear()
        self.may_install.clear()
        return self.is_loaded, self.may_install

    def gate(self, folder: Path) -> Callable[[], None]:
        """Returns what lets the version in a folder be loaded."""
        event = self.may_load.setdefault(bundle_digest(folder), threading.Event())
        return event.set

    def begins(self, folder: Path) -> None:
        """Wait until the version in a folder is about to be loaded."""
        digest = bundle_digest(folder)
        live.eventually(lambda: self.loading[-1] == digest, every_s=0.01)


@contextmanager
def gated(folder: Path, **arguments: Any) -> Iterator[Gated]:
    model = Gated(live.plan_of(folder), **arguments)
    try:
        yield model
    finally:
        for event in model.may_load.values():
            event.set()
        model.close()


def candidate_of(folder: Path) -> CandidatePlan:
    return CandidatePlan(source=live.plan_of(folder).source, share=1.0, mode="shadow")


def test_a_version_that_is_no_longer_wanted_once_it_is_loaded_does_not_answer(
    versions: dict[str, Path],
) -> None:
    switches = Switches()
    with gated(versions["1"], recorder=switches) as model:
        load_second = model.gate(versions["2"])
        model.change(live.plan_of(versions["2"]))
        model.begins(versions["2"])
        model.change(live.plan_of(versions["4"]))
        load_second()
        wanted = bundle_digest(versions["4"])
        live.eventually(lambda: model.slot.model.digest == wanted)
        live.eventually(lambda: model.slot.card().state == "ready")
    assert switches.versions == [wanted[:12]]


def test_the_failure_of_a_version_that_is_no_longer_wanted_is_no_problem_of_the_next(
    versions: dict[str, Path],
) -> None:
    """`raybert serve --apply` would report it as its own."""
    with gated(versions["1"]) as model:
        fail, load = model.gate(versions["2"]), model.gate(versions["4"])
        model.failing.add(bundle_digest(versions["2"]))
        model.change(live.plan_of(versions["2"]))
        model.begins(versions["2"])
        model.change(live.plan_of(versions["4"]))
        fail()
        model.begins(versions["4"])
        assert (model.slot.card().state, model.slot.problem) == ("loading", None)
        load()
        live.eventually(lambda: model.slot.card().state == "ready")


def test_the_failure_of_a_candidate_that_is_no_longer_wanted_is_not_reported(
    versions: dict[str, Path],
) -> None:
    with gated(versions["1"]) as model:
        fail = model.gate(versions["2"])
        model.failing.add(bundle_digest(versions["2"]))
        model.change(live.plan_of(versions["1"], candidate=candidate_of(versions["2"])))
        model.begins(versions["2"])
        follows = [thread for thread in threading.enumerate() if thread.name == "follower"]
        model.change(live.plan_of(versions["1"]))
        fail()
        live.eventually(lambda: sum(thread.is_alive() for thread in follows) < len(follows))
        assert (model.slot.card().state, model.slot.problem) == ("ready", None)


def test_settings_that_change_while_a_candidate_is_loaded_are_its_settings(
    versions: dict[str, Path],
) -> None:
    with gated(versions["1"]) as model:
        loaded, go_on = model.pause_before_install()
        candidate = candidate_of(versions["2"])
        model.change(live.plan_of(versions["1"], candidate=candidate))
        assert loaded.wait(30)
        model.change(live.plan_of(versions["1"], candidate=candidate, limits=FEW))
        go_on.set()
        live.eventually(lambda: model.slot.candidate is not None)
        assert model.slot.candidate is not None
        assert model.slot.candidate.slot.model.limits == FEW


def test_a_version_does_not_take_over_once_the_change_of_its_plan_has_returned(
    versions: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    switches, checked, changed = Switches(), threading.Event(), threading.Event()
    takes, second = Aim.takes, bundle_digest(versions["2"])

    def take_slowly(self: Aim, loaded: Aim) -> bool:
        wanted = takes(self, loaded)
        if loaded.source.digest == second:
            checked.set()
            changed.wait(0.3)  # the change may have to wait for this
        return wanted

    with gated(versions["1"], recorder=switches) as model:
        monkeypatch.setattr(Aim, "takes", take_slowly)
        model.change(live.plan_of(versions["2"]))
        assert checked.wait(30)
        model.change(live.plan_of(versions["4"]))
        until_then = [*switches.versions]
        changed.set()
        wanted = bundle_digest(versions["4"])
        live.eventually(lambda: model.slot.model.digest == wanted)
    assert switches.versions == [*until_then, wanted[:12]]


def test_settings_that_change_while_a_version_takes_over_are_its_settings(
    versions: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated(versions["1"]) as model:
        switches, changed, switch = threading.Event(), threading.Event(), model.slot.switch

        def switch_slowly(version: Model) -> Model:
            switches.set()
            changed.wait(0.3)  # the change may have to wait for this
            return switch(version)

        monkeypatch.setattr(model.slot, "switch", switch_slowly)
        model.change(live.plan_of(versions["2"]))
        assert switches.wait(30)
        model.change(live.plan_of(versions["2"], limits=FEW))
        changed.set()
        live.eventually(lambda: model.slot.card().state == "ready")
        assert model.slot.model.digest == bundle_digest(versions["2"])
        assert model.slot.model.limits == FEW


def test_a_candidate_that_is_loaded_as_its_model_is_closed_is_not_kept(
    versions: dict[str, Path],
) -> None:
    with gated(versions["1"]) as model:
        loaded, go_on = model.pause_before_install()
        model.change(live.plan_of(versions["1"], candidate=candidate_of(versions["2"])))
        assert loaded.wait(30)
        follows = [thread for thread in threading.enumerate() if thread.name == "follower"]
        model.close()
        go_on.set()
        live.eventually(lambda: not any(thread.is_alive() for thread in follows))
        assert model.slot.candidate is None
