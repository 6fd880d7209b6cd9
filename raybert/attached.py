"""The command `raybert`, ended when the process that started it ends, however that happens.

    python -m raybert.attached serve --models …

Its standard input is a pipe from that process; when the pipe ends, so does the command, as on
SIGTERM.
"""

import os
import signal
import sys
from threading import Thread

from pipelines.cli import main


def end_with_input(fd: int) -> None:
    """Send this process SIGTERM once nothing can write to `fd` any more."""

    def wait() -> None:
        while os.read(fd, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    # The command's own processes must not inherit it: they would read what was meant for it.
    pipe = os.dup(sys.stdin.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    end_with_input(pipe)
    main()
