"""Keeps a served model at what its plan says.

The plan may change, or name an alias of the registry that moves. Either way the new version is
loaded beside the one that answers, on a separate thread, runs the task's examples, and then takes
over between two requests: a request in progress is answered by the version that began it, and no
process is replaced. If the new version cannot be loaded, fails at the examples or does another
task, the old version stays. The new version is retried at growing intervals, since a download may
fail for a while.

The old version is kept until the new version has answered a request. If the new version fails at
its first requests instead, the old version answers again, and the new version is not retried unless
the plan or the alias changes. If a version fails later, the fault is in its process, which Serve's
health check replaces.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from bert_core.errors import ConfigError, FormatError, RaybertError
from serve.model.model import FAILURES, Model
from serve.versions.plan import Runtime, Source
from tracking.models.answered import last_served
from tracking.models.references import Registered

logger = logging.getLogger("ray.serve")

RETRY_S, LONGEST_WAIT_S = 5.0, 300.0
"""Wait before a version that failed is tried again: the first, and the longest."""
LONGEST_LACK_S = 30.0
"""The longest if the version is not to blame, but a store, a disk or memory."""


def reason_of(error: Exception) -> str:
    """Return why a model could not be loaded."""
    return str(error) if isinstance(error, RaybertError) else repr(error)


@dataclass(frozen=True, kw_only=True)
class Aim:
    """The version to serve, and how to compute with it."""

    source: Source
    runtime: Runtime
    follow_s: float = 0.0
    """Interval at which the registry is asked for the alias's version; 0 never asks."""

    def resolved(self) -> "Aim":
        """Return the same aim with the version that the alias means now. Raises: see
        `Reference.pinned`."""
        source = self.source
        if not self.follow_s or not isinstance(source.reference, Registered):
            return self
        version = source.reference.pinned(uri=source.tracking_uri).version
        return replace(self, source=replace(source, version=version, digest=None))

    def served(self) -> "Aim | None":
        """Return the same aim with the version of the alias that last answered on this machine;
        None if no version has answered since this was deployed."""
        source = self.source
        known = last_served(source.reference, source.digest, uri=source.tracking_uri)
        if known is None:
            return None
        return replace(self, source=replace(source, version=known.version, digest=known.digest))

    def is_met_by(self, held: "Aim | None") -> bool:
        return held is not None and held._identity == self._identity

    def takes(self, loaded: "Aim") -> bool:
        """Whether what was loaded for another aim may answer under this one."""
        return self.is_followed_from(loaded) if self.follow_s else self.is_met_by(loaded)

    def is_followed_from(self, held: "Aim") -> bool:
        """Whether `held` is a version of the same alias, with the same settings."""
        same = held.source.reference == self.source.reference
        return same and held.runtime == self.runtime

    @property
    def _identity(self) -> tuple[object, ...]:
        source = self.source
        which = source.digest if source.version is None else source.version
        return source.reference, source.tracking_uri, which, self.runtime


@dataclass(frozen=True, kw_only=True)
class ModelHolder:
    """The functions that a follower needs: load a model, let it answer, report problems."""

    lock: AbstractContextManager[object] = field(default_factory=threading.RLock)
    """Held while the aim changes, and while it is settled what answers under it: no version can
    take over that has just ceased to be wanted."""
    load: Callable[[Aim], Model]
    """Loads a model, and makes sure that it answers."""
    install: Callable[[Model], Model | None]
    """Lets a model answer. Returns: the one that did before, to be retired."""
    set_loading: Callable[[bool], None]
    set_problem: Callable[[str | None], None]
    clear: Callable[[], None] | None = None
    """Removes the model; None if a model must always answer."""
    answered: Callable[[Aim, Model], None] = lambda aim, model: None
    """Called when a version has answered its first request."""
    waits_for: Callable[[Model], str | None] = lambda model: None
    """Tells what a loaded model must wait for before it may answer; None if it may."""


@dataclass(frozen=True)
class _Former:
    """The version that answered before the present version."""

    aim: Aim
    model: Model | None
    """None if it must be loaded again."""


class Follower:
    """Keeps a holder at its aim, on a separate thread."""

    def __init__(
        self,
        holder: ModelHolder,
        aim: Aim,
        held: Aim | None = None,
        *,
        model: Model | None = None,
        former: Aim | None = None,
    ) -> None:
        """Store the aim; the thread is not started yet.

        Args:
            held: the aim that `model` was loaded for, if the holder already has a model.
            former: the version that answers if `model` fails at its first requests.
        """
        self._holder, self._aim, self._looked_at = holder, aim, aim
        self._held, self._model = held, model
        self._former = None if former is None else _Former(former, None)
        self._failed: Aim | None = None
        self._problem = ""
        """Why `_failed` is not served."""
        self._wait_s, self._again_s = 0.0, 0.0
        self._banned: tuple[Aim, str] | None = None
        """The version that failed at its first requests, and the problem to report."""
        self._waiting: tuple[Aim, Model] | None = None
        """A version that is loaded, and waits before it may answer."""
        self._has_answered = False
        self._wake = threading.Event()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        if model is not None:
            model.when_judged = self._wake.set

    def start(self) -> None:
        self._thread.start()

    def aim(self, aim: Aim) -> None:
        """Change the aim; returns at once."""
        with self._holder.lock:
            if aim == self._aim:
                if self._waiting is not None:  # what it waits for may be there now
                    self._wake.set()
                return
            changes_now = not aim.follow_s or aim.source.reference != self._aim.source.reference
            if changes_now or aim.runtime != self._aim.runtime:
                self._holder.set_loading(True)
                self._holder.set_problem(None)
            self._aim, self._failed, self._banned = aim, None, None
        self._wake.set()

    def stop(self, *, wait: bool = True) -> None:
        """Stop following; a model that is being loaded is neither installed nor reported.

        Args:
            wait: for the thread to end.
        """
        with self._holder.lock:
            self._is_stopped = True
        self._wake.set()
        if wait and self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        is_first = True
        while not self._is_stopped:
            if not is_first:
                self._wake.wait(self._pause_s())
            is_first = False
            self._wake.clear()
            if not self._is_stopped:
                self._looked_at = self._aim
                self._judge()
                self._look(self._looked_at)
        self._drop_former()
        self._drop_waiting()

    def _pause_s(self) -> float | None:
        """Return the seconds until the next check; None if only a change of the aim requires a
        check."""
        if self._failed is not None:
            left_s = max(0.0, self._again_s - time.monotonic())
            return min(left_s, self._aim.follow_s) if self._aim.follow_s else left_s
        return self._aim.follow_s or None

    def _judge(self) -> None:
        """Drop the former version once the present version has answered; go back to it if that
        fails."""
        held, model = self._held, self._model
        if held is None or model is None:
            return
        if model.verdict == "sound":
            if not self._has_answered:
                self._has_answered = True
                self._holder.answered(held, model)
                self._drop_former()
        elif model.verdict == "failing" and self._former is not None:
            self._go_back(held, self._former)
        elif model.verdict == "failing" and self._holder.clear is not None:
            with self._holder.lock:
                if self._is_stopped:
                    return
                self._held, self._model = None, None
                self._holder.clear()
            self._ban(held, f"{_failing(held)}; it gets no more requests")

    def _go_back(self, held: Aim, former: _Former) -> None:
        named = former.aim.source.named
        try:
            model = former.model or self._holder.load(former.aim)
        except Exception as error:
            logger.error("%s cannot be loaded again: %s", named, reason_of(error))
            return
        with self._holder.lock:
            if self._is_stopped:
                if former.model is None:
                    model.retire()
                return
            self._former = None
            self._hold(former.aim, model)
        # Only after the switch, so that the problem is never reported too early.
        self._ban(held, f"{_failing(held)}; {named} answers again")
        self._drop_former()

    def _ban(self, aim: Aim, problem: str) -> None:
        logger.error("%s", problem)
        with self._holder.lock:
            if self._is_current:
                self._banned = aim, problem
                self._holder.set_problem(problem)

    @property
    def _is_current(self) -> bool:
        """Whether the aim that was looked at is still to be followed."""
        return self._looked_at is self._aim and not self._is_stopped

    def _report(self, problem: str | None) -> None:
        """Tell the holder how the aim stands that was looked at, unless another has taken its
        place."""
        with self._holder.lock:
            if self._is_current:
                self._holder.set_problem(problem)
                self._holder.set_loading(False)

    def _look(self, aim: Aim) -> None:
        try:
            resolved = aim.resolved()
        except ConfigError as error:  # the alias is gone
            self._fail(aim, f"{aim.source.reference}: {error}", LONGEST_WAIT_S)
            return
        except Exception as error:
            problem = f"{aim.source.reference}: the registry does not answer: {error}"
            held = self._held
            if held is None or not aim.is_followed_from(held):
                self._fail(aim, problem, LONGEST_LACK_S)
                return
            logger.warning("%s", problem)  # the present version continues to answer
            banned = "" if self._banned is None else f"{self._banned[1]}; "
            self._report(banned + problem)
            return
        if self._waiting is not None and not resolved.is_met_by(self._waiting[0]):
            self._drop_waiting()
        if resolved.is_met_by(self._held):
            self._failed = self._banned = None
            is_failing = self._model is not None and self._model.verdict == "failing"
            self._report(_failing(resolved) if is_failing else None)
        elif self._banned is not None and resolved.is_met_by(self._banned[0]):
            self._report(self._banned[1])
        elif self._waiting is not None:
            self._install(*self._waiting)
        elif resolved != self._failed or time.monotonic() >= self._again_s:
            self._take(resolved)
        else:
            self._report(self._problem)

    def _take(self, aim: Aim) -> None:
        with self._holder.lock:
            if not self._is_stopped:
                self._holder.set_loading(True)
        named = aim.source.named
        try:
            model = self._holder.load(aim)
        except Exception as error:
            is_at_fault = isinstance(error, ConfigError | FormatError)
            longest_s = LONGEST_WAIT_S if is_at_fault else LONGEST_LACK_S
            self._fail(aim, f"{named} is not served: {reason_of(error)}", longest_s)
            return
        self._install(aim, model)

    def _install(self, aim: Aim, model: Model) -> None:
        """Let a loaded model answer, or keep it until what it waits for is there."""
        named = aim.source.named
        with self._holder.lock:
            if self._is_stopped or not self._aim.takes(aim):  # another aim has come meanwhile
                self._waiting = None
                model.retire()
                return
            if (missing := self._holder.waits_for(model)) is not None:
                if self._waiting is None:
                    logger.warning("%s is loaded, and waits: %s", named, missing)
                self._waiting = aim, model
                self._report(f"{named} is loaded, and waits: {missing}")
                return
            self._waiting = None
            self._hold(aim, model)
            self._failed = self._banned = None
            self._report(None)
        logger.info("%s answers from now on", named)

    def _drop_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting[1].retire()

    def _hold(self, aim: Aim, model: Model) -> None:
        """Let a model answer, and keep the model before it until this model has answered."""
        model.when_judged = self._wake.set
        replaced = self._holder.install(model)
        if replaced is not None:
            if self._former is None and self._held is not None:
                self._former = _Former(self._held, replaced)
            else:  # it answered no request: keep the former version
                replaced.retire()
        self._held, self._model, self._has_answered = aim, model, False

    def _drop_former(self) -> None:
        former, self._former = self._former, None
        if former is not None and former.model is not None:
            former.model.retire()

    def _fail(self, aim: Aim, problem: str, longest_s: float) -> None:
        again = aim == self._failed
        first_s = self._aim.follow_s or RETRY_S
        self._wait_s = min(2 * self._wait_s, longest_s) if again else first_s
        self._failed, self._problem = aim, problem
        self._again_s = time.monotonic() + self._wait_s
        self._report(problem)
        logger.error("%s", problem)


def _failing(aim: Aim) -> str:
    return (
        f"{aim.source.named} fails at every request ({FAILURES} or more in a row, the log says "
        "why): serve another version"
    )
