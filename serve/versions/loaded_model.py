"""Loads a model in this process, and keeps it at its plan, with the candidate that it is compared
with."""

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bert_core.errors import FormatError
from serve.model.changes import difference, gives_vectors
from serve.model.model import Model
from serve.observe.records import NO_RECORDER, Recorder
from serve.versions.comparison import Report
from serve.versions.follower import Aim, Follower, ModelHolder, reason_of
from serve.versions.plan import CandidatePlan, Plan, Source
from serve.versions.slot import Candidate, Slot
from tracking.models.answered import Served, last_served, remember_served
from tracking.models.attempts import Attempt, attempt
from tracking.models.downloads import release

logger = logging.getLogger("ray.serve")

MODEL, CANDIDATE = "model", "candidate"
"""Parts of a slot that may be loading or have a problem."""


class LoadedModel:
    """Holds a model, and makes it follow its plan (`serve.versions.follower`)."""

    def __init__(
        self,
        plan: Plan,
        report: Report = lambda pairing, tally: None,
        recorder: Recorder = NO_RECORDER,
    ) -> None:
        """Load the model; a candidate is loaded afterwards.

        Args:
            report: receives how a candidate compares, request by request.
            recorder: records requests and passes.
        Raises: see `Model` and `Reference.fetch`.
        """
        self.plan, self._report, self._recorder = plan, report, recorder
        self._lock = threading.RLock()
        """Held while the plan changes, and while a version takes over (`ModelHolder.lock`)."""
        self._attempts: weakref.WeakKeyDictionary[Model, Attempt] = weakref.WeakKeyDictionary()
        held, model = self._first()
        self.slot = Slot(model, recorder)
        holder = self._holder(
            MODEL, install=self._install, answered=self._answered, waits_for=self._waits_for
        )
        aim = self._aim(plan.source)
        former = self._former(held)
        self._follower = Follower(holder, aim, held, model=model, former=former)
        self._follower.start()
        self._candidate_follower: Follower | None = None
        self._compare_with(plan.candidate)

    def change(self, plan: Plan) -> None:
        """Follow another plan from now on, and return at once: the present model answers
        meanwhile."""
        with self._lock:
            self.plan = plan
            self._settle(self.slot.model)
            if self.slot.candidate is not None:
                self._settle(self.slot.candidate.slot.model)
            self._follower.aim(self._aim(plan.source))
            self._compare_with(plan.candidate)

    async def check_health(self) -> None:
        """Check the model as `Model.check_health` does, and that the candidate does not hang.

        A candidate that fails is no reason to replace the process, but one that hangs can only be
        ended with its process.
        """
        await self.slot.model.check_health()
        if self.slot.candidate is not None:
            self.slot.candidate.slot.model.check_progress()

    def close(self) -> None:
        """Stop following the plan; models are closed once no request uses them."""
        with self._lock:
            self._compare_with(None)
            self._follower.stop(wait=False)
            self.slot.close()

    def _settle(self, model: Model) -> None:
        """Apply the settings that can change while the model answers."""
        model.limits, model.truncate = self.plan.limits, self.plan.truncate
        model.max_ongoing_requests = self.plan.max_ongoing_requests
        model.size_cache(self.plan.cache_mib)

    def _aim(self, source: Source) -> Aim:
        plan = self.plan
        follow_s = plan.follow_s if plan.follows(source) else 0.0
        return Aim(source=source, runtime=plan.runtime, follow_s=follow_s)

    def _holder(self, what: str, **others: Any) -> ModelHolder:
        return ModelHolder(
            lock=self._lock,
            load=self._load,
            set_loading=partial(self.slot.set_loading, what),
            set_problem=partial(self.slot.set_problem, what),
            **others,
        )

    def _first(self) -> tuple[Aim, Model]:
        """Load the alias's present version, or else the version that last answered on this machine,
        or else the version of the plan."""
        aim = self._aim(self.plan.source)
        ways: tuple[Callable[[], Aim | None], ...] = (aim.resolved, aim.served)
        for way in ways if aim.follow_s else ():
            try:
                version = way()
                if version is not None:
                    model = self._load(version)
                    if (missing := self._missing(model, aim.source.digest)) is None:
                        return version, model
                    logger.warning("%s: %s", aim.source.reference, missing)
                    model.retire()
            except Exception as error:  # the follower retries it, and reports it
                logger.error("%s: %s", aim.source.reference, reason_of(error))
        return aim, self._load(aim)

    def _former(self, held: Aim) -> Aim | None:
        """Return the version to go back to if the first version fails at its first requests; None
        if there is none."""
        deployed = self._aim(self.plan.source)
        if not deployed.follow_s or deployed.source.version is None:
            return None
        former = deployed.served() or deployed
        return None if held.is_met_by(former) else former

    def _install(self, model: Model) -> Model:
        self._settle(model)
        return self.slot.switch(model)

    def _waits_for(self, model: Model) -> str | None:
        return self._missing(model, self.slot.model.digest)

    def _missing(self, model: Model, before: str | None) -> str | None:
        """Return what a model of vectors lacks before it may answer in place of the model of the
        digest `before`; None if it lacks nothing.

        An index that is served with the vectors of the one needs an index beside it with those of
        the other: otherwise searches would find nothing, or nonsense.
        """
        indexed = self.plan.indexed
        if before not in indexed or model.digest in indexed or not gives_vectors(model):
            return None
        return (
            f"an index is served with the vectors of {str(before)[:12]}, none with those of "
            f"{model.digest[:12]}: serve one beside it"
        )

    def _answered(self, aim: Aim, model: Model) -> None:
        self._got_through(aim, model)
        self._remember(aim, model)

    def _got_through(self, aim: Aim, model: Model) -> None:
        if (trying := self._attempts.pop(model, None)) is not None:
            trying.close()

    def _remember(self, aim: Aim, model: Model) -> None:
        """Store which version has answered, for processes that start without the registry."""
        source, deployed = aim.source, self.plan.source
        if not aim.follow_s or model.version is None or source.reference != deployed.reference:
            return
        version = Served(model.version, model.digest)
        try:
            remember_served(version, source.reference, deployed.digest, uri=deployed.tracking_uri)
        except OSError as error:
            logger.warning("%s: which version answers was not kept: %s", source.named, error)

    def _load(self, aim: Aim) -> Model:
        """Load the model, which has then answered the task's examples.

        Raises: see `Model` and `Reference.fetch`; ResourceError for a version that has killed a
            process.
        """
        with self._attempt(aim) as trying:
            model = self._fetched(aim)
        if trying is not None:
            self._attempts[model] = trying
            weakref.finalize(model, trying.close)
        return model

    @contextmanager
    def _attempt(self, aim: Aim) -> Iterator[Attempt | None]:
        """Keep a note while a new version is loaded inside this context
        (`tracking.models.attempts`)."""
        with ExitStack() as entered:
            trying, source = None, aim.source
            if source.version is not None and self._is_new(source, source.version):
                try:
                    noting = attempt(source.reference, source.version, uri=source.tracking_uri)
                    trying = entered.enter_context(noting)
                except OSError as error:
                    logger.warning("%s: that it is tried was not noted: %s", source.named, error)
            yield trying

    def _is_new(self, source: Source, version: str) -> bool:
        """Whether a version has neither been loaded by the machine that deployed it nor answered
        here."""
        candidate = self.plan.candidate
        deployed = [self.plan.source, *([] if candidate is None else [candidate.source])]
        for each in deployed:
            if each.reference == source.reference:
                served = last_served(each.reference, each.digest, uri=each.tracking_uri)
                if version in (each.version, None if served is None else served.version):
                    return False
        return True

    def _fetched(self, aim: Aim) -> Model:
        folder, version = aim.source.fetch()
        with ExitStack() as failed:
            failed.callback(release, folder)
            model = self._loaded(aim, folder, version)
            failed.pop_all()
        weakref.finalize(model, release, folder)
        return model

    def _loaded(self, aim: Aim, folder: Path, version: str | None) -> Model:
        model = Model(
            self.plan.name,
            folder,
            limits=self.plan.limits,
            truncate=self.plan.truncate,
            max_ongoing_requests=self.plan.max_ongoing_requests,
            cache_mib=self.plan.cache_mib,
            digest=aim.source.digest,
            version=version,
            recorder=self._recorder,
            **vars(aim.runtime),
        )
        task, labels = aim.source.task, aim.source.labels
        if task not in (None, model.task.name):
            raise FormatError(
                f"wanted a model for {task}, as {self.plan.name} was deployed for, got one for "
                f"{model.task.name}: deploy it under another name, or apply the change"
            )
        has_others = labels is not None and labels != tuple(model.task.labels)
        if has_others and not self.plan.allow_other_labels:
            raise FormatError(
                f"wanted the labels that {self.plan.name} was deployed with, got others "
                f"({difference(labels or (), model.task.labels)}), which clients may not know: "
                "apply the config again, or set allow_other_labels"
            )
        return model

    def _compare_with(self, plan: CandidatePlan | None) -> None:
        if plan is None:
            self._drop_candidate()
            return
        candidate = self.slot.candidate
        if candidate is not None:
            candidate.share, candidate.mode = plan.share, plan.mode
        aim = self._aim(plan.source)
        if self._candidate_follower is not None:
            self._candidate_follower.aim(aim)
            return
        holder = self._holder(
            CANDIDATE,
            install=self._install_candidate,
            clear=self._clear_candidate,
            answered=self._got_through,
        )
        holder.set_loading(True)
        self._candidate_follower = Follower(holder, aim)
        self._candidate_follower.start()

    def _install_candidate(self, model: Model) -> Model | None:
        plan, candidate = self.plan.candidate, self.slot.candidate
        assert plan is not None, "a follower of no candidate is stopped"
        self._settle(model)
        if candidate is not None:
            return candidate.slot.switch(model)
        self.slot.candidate = Candidate(
            slot=Slot(model, self._recorder),
            share=plan.share,
            mode=plan.mode,
            report=self._report,
        )
        return None

    def _clear_candidate(self) -> None:
        candidate, self.slot.candidate = self.slot.candidate, None
        if candidate is not None:
            candidate.slot.close()

    def _drop_candidate(self) -> None:
        follower, self._candidate_follower = self._candidate_follower, None
        if follower is not None:
            follower.stop(wait=False)
        self._clear_candidate()
        self.slot.set_problem(CANDIDATE, None)
        self.slot.set_loading(CANDIDATE, False)
