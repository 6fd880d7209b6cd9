"""Waiting for what another process or thread does."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def wait_until(
    what: str,
    done: Callable[[], Any],
    *,
    timeout_s: float,
    every_s: float = 0.1,
    process: subprocess.Popen[Any] | None = None,
    log: Path | None = None,
) -> Any:
    """The first true value of `done`.

    Args:
        what: what is waited for, as a clause: "a checkpoint is being written".
        every_s: pause between two calls of `done`.
        process: must not end before.
        log: file that a failure shows.
    Raises: AssertionError after `timeout_s`, or once `process` has ended.
    """
    __tracebackhide__ = True  # pytest shows the line that waits

    def failure(how: str) -> str:
        return f"{how} {what}" if log is None else f"{how} {what}:\n{log.read_text()}"

    deadline_s = time.monotonic() + timeout_s
    while not (value := done()):
        assert process is None or process.poll() is None, failure("the process ended before")
        assert time.monotonic() < deadline_s, failure(f"waited {timeout_s:g} s until")
        time.sleep(every_s)
    return value


def wait_for_words(
    words: str, log: Path, *, timeout_s: float, process: subprocess.Popen[Any] | None = None
) -> None:
    """Wait until a file has these words, of `process` if it is given."""
    __tracebackhide__ = True

    def has_them() -> bool:
        return words in log.read_text()

    wait_until(f"it says {words!r}", has_them, timeout_s=timeout_s, process=process, log=log)
