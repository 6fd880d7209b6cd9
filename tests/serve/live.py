"""A live server in this process: a model by uvicorn, as in a replica, or several behind a front."""

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from bert_core.bundle.format import bundle_digest
from serve import api
from serve.hosted import HostedModel
from serve.limits import Limits
from serve.model import Model
from serve.plan import Plan, Source
from serve.slot import Slot
from tests.waiting import wait_until
from tracking.ports import free_ports


def loaded(name: str, folder: Path, **settings: Any) -> Model:
    """A model on one thread, with small batches."""
    usual: dict[str, Any] = {
        "device": "cpu",
        "threads": 1,
        "max_batch_tokens": 256,
        "max_wait_ms": 1.0,
    }
    return Model(name, folder, **usual | settings)


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """URL of an app that uvicorn runs on a thread."""
    (port,) = free_ports(1)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def served(folder: Path, **settings: Any) -> Iterator[str]:
    """URL that one model answers at."""
    slot = Slot(loaded("own", folder, **settings))
    with running(api.create_model_app(slot, alone=True)) as url:
        yield url


def plan_of(folder: Path, **settings: Any) -> Plan:
    """The plan that serves the bundle in a folder, as it is now."""
    digest = bundle_digest(folder)
    source = Source(reference=str(folder), tracking_uri="sqlite://", digest=digest)
    return Plan(name="docs", source=source, **settings)


@contextmanager
def hosted(plan: Plan, **arguments: Any) -> Iterator[tuple[HostedModel, str]]:
    """A model that follows its plan, and the URL that it answers at."""
    model = HostedModel(plan, **arguments)
    with running(api.create_model_app(model.slot, alone=True)) as url:
        try:
            yield model, url
        finally:
            model.close()


@contextmanager
def fronted(
    models: Mapping[str, Path], limits: Limits | None = None, keys: Any = None
) -> Iterator[str]:
    """URL of a front with models in the same process, which ask for `serve.auth.Keys` if given."""
    local = {
        name: api.LocalModel(Slot(loaded(name, folder)), keys) for name, folder in models.items()
    }
    app = api.create_front_app(local, limits, keys)
    with running(app) as url:
        yield url


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of this machine, by itself and with its private key in one file."""
    key, chain, pem = (folder / name for name in ("key.pem", "chain.pem", "both.pem"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", chain],
        check=True, capture_output=True,
    )  # fmt: skip
    pem.write_text(chain.read_text() + key.read_text())
    return chain, pem


def eventually(
    holds: Callable[[], bool], timeout_s: float = 60.0, *, every_s: float = 0.05
) -> None:
    """Wait until it holds; if it never does, pytest shows the line that waits."""
    __tracebackhide__ = True
    wait_until("this holds", holds, timeout_s=timeout_s, every_s=every_s)
