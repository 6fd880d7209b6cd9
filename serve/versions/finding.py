"""Finds the models to deploy in a child process, which ends with the models that it has loaded.

A process that serves for weeks would otherwise keep torch and every model in memory, only to have
looked at each once: 190 MiB with one small model.
"""

import json
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe

from bert_core.errors import RaybertError, ResourceError
from serve.config import ServeConfig
from serve.versions.plan import Deployable, find

PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from serve.versions.finding import answer
answer(int(sys.argv[1]))
"""
"""Run with the parent's sys.path and with -P, so that modules in the user's working directory are
not imported."""


def find_in_child(
    config: ServeConfig, loading: Callable[[str], object] = lambda name: None
) -> dict[str, Deployable]:
    """Return what `find` returns, after it has run in a child process.

    Raises: as `find`; ResourceError if the child ends without an answer.
    """
    ours, theirs = Pipe()
    with ours:
        with theirs:
            options = ["-P", "-c", PROGRAM, str(theirs.fileno()), json.dumps(sys.path)]
            child = subprocess.Popen([sys.executable, *options], pass_fds=[theirs.fileno()])
        try:
            ours.send(config)
            while isinstance(came := ours.recv(), str):
                loading(came)
        except (EOFError, ConnectionError) as error:
            raise ResourceError(
                "models: wanted each to be loaded once before it is served, the process that does "
                f"so ended with {child.wait()}: see its message above; -9 often means that the "
                "machine has too little memory"
            ) from error
        finally:
            child.kill()
            child.wait()
    if isinstance(came, RaybertError):
        raise came
    models: dict[str, Deployable] = came
    return models


def answer(descriptor: int) -> None:
    """Answer the parent process over this end of its pipe: first names of models, as they are
    loaded, then all models, or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which ends us
    with Connection(descriptor) as parent:
        config: ServeConfig = parent.recv()
        try:
            parent.send(find(config, parent.send))
        except RaybertError as error:
            parent.send(error)
        except Exception:
            traceback.print_exc()  # with its causes, which pickling loses
            raise SystemExit(1) from None
