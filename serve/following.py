"""A model that follows its alias in the registry.

The new version is loaded and asked its own examples beside the old one, then requests go to it from
one to the next: what is in progress is answered by the version that began it, and no process is
replaced. A version that does not load, cannot answer its examples or does another task leaves the
old one in place, and the card says why; it is tried again, ever more rarely, since a download may
fail for a while.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert_core.errors import FormatError, RaybertError
from serve.model import Model
from serve.observing import NO_RECORDER, Recorder, State
from tracking.resolve import at_version, registered_version, resolve

logger = logging.getLogger("ray.serve")

LONGEST_WAIT_S = 300.0
"""How long to wait at most before a version that failed is tried again."""

Load = Callable[[Path, str], Model]
"""Loads a version of the model from a folder, and makes sure that it answers."""


@dataclass(frozen=True)
class Current:
    """The model that answers, and what the surfaces have prepared for it, by name."""

    model: Model
    prepared: dict[str, Any] = field(default_factory=dict)


class Slot:
    """The place of a model, which another version may take."""

    def __init__(self, model: Model, recorder: Recorder = NO_RECORDER) -> None:
        """`recorder`: is told of requests, switches and the state."""
        self.current = Current(model)
        """Read once per request, so that one version answers all of it."""
        self.problem: str | None = None
        """Why the newest version is not the one that answers; None if it is."""
        self.recorder = recorder
        recorder.watch(self.state)

    @property
    def model(self) -> Model:
        return self.current.model

    def switch(self, model: Model) -> None:
        """Let another version answer from the next request on."""
        old, self.current = self.model, Current(model)
        old.retire()
        self.recorder.rolled_over(model.name, model.version_label)

    def state(self) -> State:
        """What it is like at this moment."""
        model = self.model
        return State(
            model=model.name,
            version=model.version_label,
            digest=model.digest,
            queue_tokens=model.waiting_tokens,
            max_queue_tokens=model.limits.max_queue_tokens,
            has_problem=self.problem is not None,
        )


class Follower:
    """Looks at the registry from a thread of its own, and switches a slot when the alias moves."""

    def __init__(self, slot: Slot, reference: str, uri: str, load: Load, *, every_s: float) -> None:
        self._slot, self._reference, self._uri = slot, reference, uri
        self._load, self._every_s = load, every_s
        self._failed: str | None = None
        self._wait_s, self._again_s = 0.0, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Wait until it looks no more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                version = registered_version(self._reference, uri=self._uri)
            except Exception as error:  # the registry is away: what answers goes on answering
                logger.warning("%s: the registry was not asked: %s", self._reference, error)
                continue
            assert version is not None
            if version == self._slot.model.version:
                self._failed, self._slot.problem = None, None
            elif version != self._failed or time.monotonic() >= self._again_s:
                self._take(version)

    def _take(self, version: str) -> None:
        slot = self._slot
        try:
            folder = resolve(at_version(self._reference, version), uri=self._uri)
            model = self._load(folder, version)
            if model.task.name != slot.model.task.name:
                raise FormatError(
                    f"wanted a model for {slot.model.task.name}, as the application was deployed "
                    f"for, got one for {model.task.name}: deploy it under another name"
                )
        except Exception as error:
            reason = str(error) if isinstance(error, RaybertError) else repr(error)
            slot.problem = f"version {version} is not served: {reason}"
            self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S) if version == self._failed else 0.0
            self._wait_s = max(self._wait_s, self._every_s)
            self._failed, self._again_s = version, time.monotonic() + self._wait_s
            logger.error("%s: %s", self._reference, slot.problem)
            return
        slot.switch(model)
        slot.problem = None
        logger.info("%s: version %s answers from now on", self._reference, version)
