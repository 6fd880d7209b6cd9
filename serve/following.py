"""Brings the place of a model to what its plan says, and keeps it there.

Where the plan names an alias of the registry, that may move; where it has changed, another bundle
or other settings are wanted. Either way the new version is loaded and asked its own examples beside
the one that answers, on a thread of its own, and then takes its place from one request to the next:
what is in progress is answered by the version that began it, and no process is replaced. A version
that cannot be loaded, cannot answer its examples or does another task leaves the old one in place;
it is tried again, ever more rarely, since a download may fail for a while.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from bert_core.errors import ConfigError, RaybertError
from serve.model import Model
from serve.plan import Runtime, Source
from tracking.resolve import registered_version

logger = logging.getLogger("ray.serve")

RETRY_S, LONGEST_WAIT_S = 5.0, 300.0
"""How long to wait before a version that failed is tried again: at first, and at most."""


def reason_of(error: Exception) -> str:
    """Why a model could not be loaded."""
    return str(error) if isinstance(error, RaybertError) else repr(error)


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What a place is to hold."""

    source: Source
    runtime: Runtime
    follow_s: float = 0.0
    """How often the registry is asked what the source's alias means; 0 never."""

    def wanted(self) -> "Aim":
        """The same with the version that the alias means now. Raises: see `registered_version`."""
        if not self.follow_s:
            return self
        version = registered_version(self.source.reference, uri=self.source.tracking_uri)
        return replace(self, source=replace(self.source, version=version, digest=None))

    def is_met_by(self, held: "Aim | None") -> bool:
        return held is not None and held._identity == self._identity

    def is_followed_from(self, held: "Aim") -> bool:
        """Whether what is held is a version of the same alias, with the same settings."""
        same = held.source.reference == self.source.reference
        return same and held.runtime == self.runtime

    @property
    def _identity(self) -> tuple[object, ...]:
        source = self.source
        which = source.digest if source.version is None else source.version
        return source.reference, source.tracking_uri, which, self.runtime


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a model goes, and who is told how that went."""

    load: Callable[[Aim], Model]
    """Loads a model, and makes sure that it answers."""
    install: Callable[[Model], None]
    set_loading: Callable[[bool], None]
    set_problem: Callable[[str | None], None]


class Follower:
    """Looks after a place, from a thread of its own."""

    def __init__(self, place: Place, aim: Aim, held: Aim | None = None) -> None:
        """`held`: what the place holds already."""
        self._place, self._held = place, held
        self._aim = aim
        self._failed: Aim | None = None
        self._wait_s, self._again_s = 0.0, 0.0
        self._wake = threading.Event()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def aim(self, aim: Aim) -> None:
        """Aim at something else from now on; returns at once."""
        if aim == self._aim:
            return
        changes_now = not aim.follow_s or aim.source.reference != self._aim.source.reference
        if changes_now or aim.runtime != self._aim.runtime:
            self._place.set_loading(True)
            self._place.set_problem(None)
        self._aim, self._failed = aim, None
        self._wake.set()

    def stop(self, *, wait: bool = True) -> None:
        """Look no more; a load in progress is not installed.

        Args:
            wait: until the thread has ended.
        """
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
                self._look(self._aim)

    def _pause_s(self) -> float | None:
        """How long nothing needs to be done, unless the aim changes; None for ever."""
        if self._failed is not None:
            left_s = max(0.0, self._again_s - time.monotonic())
            return min(left_s, self._aim.follow_s) if self._aim.follow_s else left_s
        return self._aim.follow_s or None

    def _look(self, aim: Aim) -> None:
        try:
            wanted = aim.wanted()
        except ConfigError as error:  # the alias is gone
            self._fail(aim, f"{aim.source.reference}: {error}")
            return
        except Exception as error:
            problem = f"{aim.source.reference}: the registry does not answer: {error}"
            held = self._held
            if held is None or not aim.is_followed_from(held):
                self._fail(aim, problem)
                return
            logger.warning("%s", problem)  # what answers goes on answering
            self._place.set_loading(False)
            return
        if wanted.is_met_by(self._held):
            self._failed = None
            self._place.set_problem(None)
            self._place.set_loading(False)
        elif wanted != self._failed or time.monotonic() >= self._again_s:
            self._take(wanted)

    def _take(self, wanted: Aim) -> None:
        self._place.set_loading(True)
        named = wanted.source.named
        try:
            model = self._place.load(wanted)
        except Exception as error:
            self._fail(wanted, f"{named} is not served: {reason_of(error)}")
            return
        if self._is_stopped:
            model.retire()
            return
        self._place.install(model)
        self._held, self._failed = wanted, None
        self._place.set_problem(None)
        logger.info("%s answers from now on", named)
        self._place.set_loading(False)

    def _fail(self, wanted: Aim, problem: str) -> None:
        again = wanted == self._failed
        first_s = self._aim.follow_s or RETRY_S
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S) if again else first_s
        self._failed, self._again_s = wanted, time.monotonic() + self._wait_s
        self._place.set_problem(problem)
        self._place.set_loading(False)
        logger.error("%s", problem)
