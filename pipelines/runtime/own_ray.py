"""How Ray starts the processes of a cluster that a command starts for itself."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

SPARE = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's `Node` that start what a cluster of one machine does without: the autoscaler,
the sender of workers' logs, which are kept in files, and the server of dashboard and jobs."""


@contextmanager
def in_own_session() -> Iterator[None]:
    """While the block runs, have Ray start its processes in sessions of their own."""
    import ray._private.services

    services: Any = ray._private.services  # NOTE: Ray has no setting for this
    usual = services.ConsolePopen
    services.ConsolePopen = partial(subprocess.Popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = usual


@contextmanager
def with_few_processes() -> Iterator[None]:
    """While the block runs, have Ray start a cluster without three processes that take 160 MiB, and
    half of the CPU time of its start.

    A Ray that has other processes starts them.
    """
    from ray._private.node import Node  # NOTE: Ray has no setting for this

    usual = {name: getattr(Node, name) for name in SPARE if hasattr(Node, name)}
    for name in usual:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name, method in usual.items():
            setattr(Node, name, method)


def _start_nothing(*arguments: Any, **settings: Any) -> None:
    pass
