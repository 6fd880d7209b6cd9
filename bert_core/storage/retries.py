"""Repeats requests to a bucket, with backoff and jitter, until they succeed or time is up.

Only the parts of a large upload are left to obstore, which would not repeat everything that has to
be repeated, nor stop when this process has to (docs/decisions/project.md).
"""

import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TypeVar

from bert_core.storage.config import StorageConfig
from bert_core.storage.failures import Failure, error_of, given_up
from bert_core.storage.location import Location

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
FIRST_CONTACT_S = 10.0
"""Longest wait for a server that this process has never reached."""
SIGNALS_EVERY_S = 0.5
_JITTER = random.Random()

T = TypeVar("T")

# Seconds that may still be spent on failing requests, in total.
_patience_s = math.inf


def give_up_after(seconds: float) -> None:
    """Limit the total time that this process spends on failing requests from now on, because it is
    stopping; once it is spent, no more requests are made."""
    global _patience_s
    _patience_s = seconds


class Retries:
    """Makes the requests to one bucket."""

    def __init__(self, location: Location, config: StorageConfig) -> None:
        self._location, self._config = location, config
        self.was_reached = False
        """Whether the server has ever answered."""

    def run(
        self, key: str, verb: str, request: Callable[[], T], *, longest_s: float = math.inf
    ) -> T:
        """Make a request until it succeeds, fails for good or has failed for `retry_s`.

        Args:
            verb: what the request does with `key`, for errors: `read`, `written`, `listed`,
                `removed`.
            longest_s: used instead of `retry_s` if it is less.
        Raises: FileNotFoundError, if the object is missing; ResourceError.
        """
        global _patience_s
        from obstore.exceptions import BaseError

        location = replace(self._location, key=key)
        if _patience_s <= 0:
            raise given_up(location, verb)
        start = time.monotonic()
        failing_since: float | None = None
        attempts, wait_s = 0, FIRST_WAIT_S
        while True:
            attempts += 1
            asked_s = time.monotonic()
            try:
                result = _interruptible(request)
            except (BaseError, ValueError, OSError) as error:
                failure = Failure.of(error)
            else:
                self.was_reached = True
                return result
            now = time.monotonic()
            self.was_reached |= failure.status is not None or failure.lacks_object
            if failure.lacks_object:
                raise FileNotFoundError(location.uri)
            attempts += failure.retries
            failing_since = failing_since or now - failure.elapsed_s
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            pause_s = wait_s * _JITTER.uniform(0.5, 1.0)
            _patience_s -= now + pause_s - asked_s
            end = failing_since + min(self._budget_s(failure), longest_s)
            if failure.is_permanent or _patience_s <= 0 or now + pause_s > end:
                raise error_of(
                    location,
                    self._config,
                    failure,
                    verb=verb,
                    attempts=attempts,
                    seconds=now - start,
                )
            time.sleep(pause_s)

    def _budget_s(self, failure: Failure) -> float:
        """Return how long a request may go on failing in this way."""
        is_unknown = failure.is_connecting and not self.was_reached
        return min(self._config.retry_s, FIRST_CONTACT_S) if is_unknown else self._config.retry_s


def _interruptible(request: Callable[[], T]) -> T:
    """Make a request so that a signal, such as Ctrl-C, can end the wait for its answer.

    NOTE: the main thread handles signals. While obstore waits in it, none is handled; and CPython
        overlooks a signal that comes just before the main thread waits for a lock.
    """
    if threading.current_thread() is not threading.main_thread():
        return request()
    answered: Future[T] = Future()

    def ask() -> None:
        try:
            answered.set_result(request())
        except BaseException as error:
            answered.set_exception(error)

    threading.Thread(target=ask, name="raybert-request", daemon=True).start()
    while not answered.done():
        wait([answered], timeout=SIGNALS_EVERY_S)
    return answered.result()
