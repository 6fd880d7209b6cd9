"""Commands of `raybert` by a process that has imported what they need: it forks for each.

Three of the four seconds of processor time that `raybert serve --apply` takes are imports.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
FORKS = """
import json, os, sys
import bert_core.inference.predictor, pipelines.runtime.cluster, serve.app, tracking.store.ports
from pipelines import cli

for line in sys.stdin:
    arguments, stdout, stderr = json.loads(line)
    pid = os.fork()
    if not pid:
        for number, path in (1, stdout), (2, stderr):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        cli.main(arguments)
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Forked:
    """Runs commands, one after the other."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process, self._folder = process, folder

    def raybert(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a command line, each in a process of its own."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        files = [self._folder / name for name in ("stdout.txt", "stderr.txt")]
        self._process.stdin.write(json.dumps([arguments, *map(str, files)]) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, *(file.read_text() for file in files))


@contextmanager
def forked(folder: Path, environment: Mapping[str, str]) -> Iterator[Forked]:
    """One with an environment; `folder` is for what its commands print."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, "PYTHONPATH": os.fspath(ROOT)},
        cwd=ROOT,
    ) as process:
        yield Forked(process, folder)
        assert process.stdin is not None
        process.stdin.close()
