"""A model in this process, and how a changed plan takes effect without a failed request.

Another version is loaded and asked its own examples beside the one that answers, then takes its
place from one request to the next. What cannot be loaded leaves the old one in place.
"""

import logging
from pathlib import Path

from bert_core.errors import RaybertError
from serve.comparison import Report
from serve.following import Follower
from serve.model import Model
from serve.observing import NO_RECORDER, Recorder
from serve.plan import Plan, Source
from serve.slot import Challenger, Slot

logger = logging.getLogger("ray.serve")


class HostedModel:
    """A model as its plan says, with what follows its alias."""

    def __init__(
        self,
        plan: Plan,
        report: Report = lambda pairing, tally: None,
        recorder: Recorder = NO_RECORDER,
    ) -> None:
        """Load the model.

        Args:
            report: takes how a candidate compares, request by request.
            recorder: is told of requests and passes.
        Raises: see `Model` and `resolve`.
        """
        self.plan, self._report, self._recorder = plan, report, recorder
        self.slot = self._first(plan.source)
        self._followers: list[Follower] = []
        self._complete()

    def change(self, plan: Plan) -> None:
        """Serve as another plan says; may take as long as loading a model.

        What cannot be loaded is told in `Slot.problem`, and what answered goes on answering.
        """
        for follower in self._followers:
            follower.stop()
        before, self.plan = self.plan, plan
        if self._loads_alike(before):
            self.slot.model.limits = plan.limits
        else:
            self._load_again()
        self._complete()

    def _load_again(self) -> None:
        plan, slot = self.plan, self.slot
        slot.is_loading = True
        try:
            slot.switch(self._loaded(plan.source))
            slot.problem = None
        except Exception as error:
            slot.problem = f"{plan.source.reference} is not served: {_reason(error)}"
            logger.error("%s: %s", plan.name, slot.problem)
        finally:
            slot.is_loading = False

    def close(self) -> None:
        """Follow no more; models are closed once nobody uses them."""
        for follower in self._followers:
            follower.stop()
        self._retire_candidate()
        self.slot.close()

    def _loads_alike(self, before: Plan) -> bool:
        """Whether what answers is what the plan asks for."""
        plan = self.plan
        if before.runtime != plan.runtime or self.slot.problem is not None:
            return False
        if plan.follows(plan.source):  # whichever version it has come to
            return before.source.latest == plan.source.latest
        return plan.source.digest is not None and plan.source.digest == self.slot.model.digest

    def _first(self, source: Source) -> Slot:
        """The version that an alias means now, or else the one it meant when it was deployed."""
        plan = self.plan
        if not plan.follows(source) or source.version is None:
            return Slot(self._loaded(source), self._recorder)
        try:
            return Slot(self._loaded(source.latest), self._recorder)
        except Exception as error:
            slot = Slot(self._loaded(source), self._recorder)
            slot.problem = f"{source.reference} is not served: {_reason(error)}"
            logger.error("%s: %s", plan.name, slot.problem)
            return slot

    def _complete(self) -> None:
        """Start what stands beside the model."""
        self._followers = []
        self._follow(self.slot, self.plan.source)
        self._retire_candidate()
        candidate = self.plan.candidate
        if candidate is None:
            return
        try:
            slot = self._first(candidate.source)
        except Exception as error:  # what is compared with goes on answering
            self.slot.problem = f"its candidate is not served: {_reason(error)}"
            logger.error("%s: %s", self.plan.name, self.slot.problem)
            return
        self.slot.challenger = Challenger(
            slot=slot, share=candidate.share, mode=candidate.mode, report=self._report
        )
        self._follow(slot, candidate.source)

    def _retire_candidate(self) -> None:
        challenger, self.slot.challenger = self.slot.challenger, None
        if challenger is not None:
            challenger.slot.close()

    def _follow(self, slot: Slot, source: Source) -> None:
        plan = self.plan
        if not plan.follows(source):
            return
        follower = Follower(
            slot, source.reference, source.tracking_uri, self._load, every_s=plan.follow_s
        )
        follower.start()
        self._followers.append(follower)

    def _loaded(self, source: Source) -> Model:
        return self._load(*source.fetch(), digest=source.digest)

    def _load(self, folder: Path, version: str | None, digest: str | None = None) -> Model:
        """The model, which has answered its own examples. Raises: see `Model`."""
        plan = self.plan
        return Model(
            plan.name,
            folder,
            limits=plan.limits,
            digest=digest,
            version=version,
            recorder=self._recorder,
            **vars(plan.runtime),
        )


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RaybertError) else repr(error)
