"""Azurite, Microsoft's emulator of Azure's object store, on a port of this machine."""

import base64
import hashlib
import hmac
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.processes import start
from tests.waiting import wait_until
from tracking.store.ports import free_ports

PROGRAM, VARIABLE = "azurite-blob", "RAYBERT_AZURITE"
# Of every Azurite: https://github.com/Azure/Azurite#default-storage-account
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
API_VERSION = "2023-11-03"
START_TIMEOUT_S = 60


@contextmanager
def running_azurite(folder: Path) -> Iterator[str]:
    """The address of its account, while the block runs; skips where it is not installed."""
    program = os.environ.get(VARIABLE) or shutil.which(PROGRAM)
    if program is None:
        pytest.skip(
            f"{PROGRAM} is not on PATH, and {VARIABLE} does not name it: `npm install azurite` in "
            f"some folder, and set {VARIABLE} to its node_modules/.bin/{PROGRAM}"
        )
    (port,) = free_ports(1)
    command = [program, "--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry"]
    log = folder / "azurite.log"
    process = start(command, log, cwd=folder)
    try:
        address = f"http://127.0.0.1:{port}/{ACCOUNT}"
        wait_until(
            "Azurite answers", partial(_answers, address),
            timeout_s=START_TIMEOUT_S, process=process, log=log,
        )  # fmt: skip
        yield address
    finally:
        process.kill()
        process.wait()


def _answers(address: str) -> bool:
    try:
        httpx.get(address, timeout=5)
    except httpx.TransportError:
        return False
    return True


def create_container(address: str, name: str) -> None:
    """Create a container, for which obstore has no call, with a request signed by `KEY`."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": API_VERSION}
    stamps = "".join(f"{header}:{value}\n" for header, value in headers.items())
    # Of the twelve headers that a signature is about, a request without a body has none.
    text = "PUT" + 12 * "\n" + stamps + f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    digest = hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    httpx.put(f"{address}/{name}?restype=container", headers=headers).raise_for_status()
