"""Measures where the wall time of a training process goes.

Only the host is timed: a GPU computes while the host goes on, so each moment is attributed to what
the host does or waits for. Nothing here makes the host wait.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Activity = Literal["starting", "computing", "waiting_for_data", "checkpointing", "measuring"]


class Clock:
    """Adds up the seconds of each activity; at every moment exactly one activity is current."""

    def __init__(self) -> None:
        self.began_s = time.time()
        """Seconds since 1970; which also tells a process's clock from another's."""
        self.taken = 0
        """How often its seconds were taken."""
        self._spent_s: dict[str, float] = {}
        self._activity: Activity = "starting"
        self._since_s = time.perf_counter()

    def switch(self, activity: Activity) -> Activity:
        """Make another activity the current one. Returns: the previous activity."""
        now_s, before = time.perf_counter(), self._activity
        self._spent_s[before] = self._spent_s.get(before, 0.0) + now_s - self._since_s
        self._activity, self._since_s = activity, now_s
        return before

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Make `activity` the current one inside the block, then return to the previous one."""
        before = self.switch(activity)
        try:
            yield
        finally:
            self.switch(before)

    def take(self) -> dict[str, float]:
        """Return the seconds of each activity since the last call, and start again from 0; together
        they are all the time that passed."""
        self.switch(self._activity)
        spent_s, self._spent_s = self._spent_s, {}
        self.taken += 1
        return spent_s
