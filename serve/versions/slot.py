"""Holds the model that answers; another version can replace it between two requests.

A slot may have a candidate, whose answers are compared with the model's:

`split`: the candidate's answer is returned; which callers get it depends on a hash of who asks, so
that a caller stays on one model. `shadow`: the model's answer is returned, the candidate answers
the same inputs afterwards, and how far the two agree is reported (`serve.versions.comparison`).
"""

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bert_core.tasks.base import Parameters
from serve.config import ComparisonMode
from serve.model.answers import Answered
from serve.model.card import CandidateCard, Card, State
from serve.model.changes import change_between, told
from serve.observe.records import NO_RECORDER, Recorder, Snapshot
from serve.versions.comparison import Pairing, Report, Tally, compared

if TYPE_CHECKING:
    from serve.model.model import Model

logger = logging.getLogger("ray.serve")

CALLER = "x-caller"
"""Header that says who asks, where there are no keys."""
MAX_SHADOWS = 64
"""Maximum shadow requests in progress; beyond them, requests are not shadowed."""


@dataclass(frozen=True)
class Current:
    """The model that answers, and the surfaces' own data about it, by surface."""

    model: "Model"
    prepared: dict[str, Any] = field(default_factory=dict)


class Slot:
    """Holds the model that answers, and its candidate."""

    def __init__(self, model: "Model", recorder: Recorder = NO_RECORDER) -> None:
        """Hold `model`; `recorder` records requests, switches and the state."""
        self.current = Current(model)
        """Read once per request, so that one version answers all of it."""
        self.problems: dict[str, str] = {}
        """Problems of the model and of its candidate, by which of them has one."""
        self.loading: set[str] = set()
        """The ones, model or candidate, that are about to be replaced."""
        self.changed: str | None = None
        """How answers changed with the last version that took over; None if they did not."""
        self.candidate: Candidate | None = None
        """The candidate, once it is loaded."""
        self.recorder = recorder
        recorder.watch(self.snapshot)

    @property
    def model(self) -> "Model":
        return self.current.model

    @property
    def problem(self) -> str | None:
        """All problems in one text; None if there are none."""
        return "; ".join(self.problems.values()) or None

    def set_loading(self, what: str, is_loading: bool) -> None:
        """Set whether the model or its candidate (`what`) is about to be replaced."""
        (self.loading.add if is_loading else self.loading.discard)(what)

    def set_problem(self, what: str, problem: str | None) -> None:
        """Set what is wrong with the model or its candidate (`what`); None if nothing is."""
        if problem is None:
            self.problems.pop(what, None)
        else:
            self.problems[what] = problem

    def card(self) -> Card:
        """Return the card of the model that answers, with its state."""
        state: State = "loading" if self.loading else "ready"
        candidate = self.candidate
        return replace(
            self.model.card(),
            state="problem" if self.problem else state,
            problem=self.problem,
            changed=self.changed,
            candidate=None if candidate is None else candidate.card(),
        )

    def switch(self, model: "Model") -> "Model":
        """Let another version answer from the next request on.

        Returns: the version that answered until now, which the caller must retire.
        """
        old, self.current = self.model, Current(model)
        change = change_between(old, model)
        self.changed = None if change is None else told(change, old, model)
        if change is not None:
            logger.warning("%s: %s", model.name, self.changed)
        self.recorder.rolled_over(model.name, model.version_label, change)
        return old

    async def check_ready(self) -> None:
        """As `Model.check_ready`, of the model that answers when this begins to run: what waits for
        it, such as a timeout, may begin it later than it is called."""
        await self.model.check_ready()

    def close(self) -> None:
        """Close the model once no request uses it."""
        self.recorder.forget(self.snapshot)
        self.model.retire()

    def snapshot(self) -> Snapshot:
        """Return the state at this moment, for metrics."""
        model = self.model
        return Snapshot(
            model=model.name,
            version=model.version_label,
            digest=model.digest,
            queue_tokens=model.waiting_tokens,
            max_queue_tokens=model.limits.max_queue_tokens,
            has_problem=self.problem is not None,
        )


@dataclass(kw_only=True)
class Candidate:
    """A second model in this process that answers some requests, for comparison."""

    slot: Slot
    share: float
    mode: ComparisonMode
    report: Report
    """Takes the tally of one request."""
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    def card(self) -> CandidateCard:
        model = self.slot.model
        return CandidateCard(
            version=model.version, digest=model.digest, mode=self.mode, share=self.share
        )

    def takes(self, caller: str | None) -> bool:
        """Whether the candidate answers this caller, given by its key or by the name that it gives
        itself.

        Callers that do not say who they are get the model itself.
        """
        if self.mode != "split" or caller is None:
            return False
        number = int.from_bytes(hashlib.sha256(caller.encode()).digest()[:8])
        return number < self.share * 2**64

    def shadow(
        self,
        model: "Model",
        task: str | None,
        inputs: Sequence[Any],
        parameters: Parameters | None,
        answered: Answered,
    ) -> None:
        """Ask the candidate too, for a random share of requests, and report how it compares."""
        if self.mode != "shadow" or len(self._running) >= MAX_SHADOWS:
            return
        candidate = self.slot.model
        if candidate.is_retired or candidate.digest == model.digest:
            return  # it was removed during the request, or has become the model itself
        if random.random() >= self.share:
            return
        work = self._compare(model, task, inputs, parameters, answered)
        running = asyncio.get_running_loop().create_task(work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _compare(
        self,
        model: "Model",
        task: str | None,
        inputs: Sequence[Any],
        parameters: Parameters | None,
        answered: Answered,
    ) -> None:
        candidate = self.slot.model
        tally = Tally(requests=1, latency_ms=answered.model_s * 1e3)
        began_s = time.perf_counter()
        try:
            with candidate.in_use():
                other = await candidate.answer(inputs, parameters, task)
            tally.candidate_latency_ms = (time.perf_counter() - began_s) * 1e3
            predictor = model.predictor if task is None else model.predictor_for(task)
            tally.add(
                await candidate.off_loop(compared, predictor.task, answered.answers, other.answers)
            )
        except Exception as error:
            if candidate.is_retired:  # it was replaced meanwhile
                return
            tally = Tally(failed=1)
            logger.warning("the candidate of %s failed: %s", model.name, type(error).__name__)
        pairing = Pairing(
            name=model.name,
            version=model.version or "",
            digest=model.digest,
            candidate_version=candidate.version or "",
            candidate_digest=candidate.digest,
        )
        self.report(pairing, tally)
