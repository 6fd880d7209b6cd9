"""One writer per output: a second one is told, waits, or takes the place of a dead one."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from bert_core import conditional, files
from bert_core.errors import FormatError, ResourceError
from pipelines.runtime import lease
from pipelines.runtime.lease import NAME, Holder, held

EXPIRES_AFTER_S = 1.5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_EVERY_S", 0.2)
    monkeypatch.setattr(lease, "EXPIRES_AFTER_S", EXPIRES_AFTER_S)
    monkeypatch.setattr(lease, "WATCH_EVERY_S", 0.1)


@pytest.fixture(params=["a folder", "a bucket"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "a folder":
        return str(tmp_path / "out")
    return f"{request.getfixturevalue('object_store')}/out"


def holder(output: str) -> Holder:
    return Holder(**files.read_json(files.join(output, NAME)))


def left_by_a_dead_process(output: str) -> Holder:
    """A lease that nobody renews or releases."""
    dead = Holder.me(1, token="of a dead process")
    assert conditional.create(files.join(output, NAME), dead.encoded())
    return dead


def taken_over(output: str) -> None:
    """Another host takes the output, as if this process had been away."""
    path, tag = files.join(output, NAME), None
    while tag is None:  # until it is not renewed in between
        data, before = conditional.read_tagged(path)
        ours = Holder(**json.loads(data))
        other = replace(ours, number=ours.number + 1, token="other", host="elsewhere", pid=7)
        tag = conditional.replace_if(path, other.encoded(), before)


def test_a_second_writer_learns_at_once_who_holds_the_output(output: str) -> None:
    with held(output):
        process = rf"on {re.escape(socket.gethostname())} \(process {os.getpid()}\)"
        since = r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
        message = rf"out: wanted to write it, \S+ {process} has been writing it {since}: .* --wait"
        with pytest.raises(ResourceError, match=message), held(output):
            pytest.fail("two writers")
    with held(output):
        pass


@pytest.mark.guard
def test_a_waiting_writer_continues_when_the_other_has_ended(
    output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    order = []

    def second() -> None:
        with held(output, wait=True):
            order.append("second")

    with held(output):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(2 * EXPIRES_AFTER_S)  # it is renewed all the time
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]
    told = capsys.readouterr().out
    assert told.count("waiting until that run has ended") == 1


@pytest.mark.guard
def test_a_lease_that_nobody_renews_is_taken_over_with_the_next_number(object_store: str) -> None:
    """Whoever takes it need not have said that it would wait: that is for writers that live."""
    output = f"{object_store}/out"
    dead = left_by_a_dead_process(output)
    began = time.monotonic()
    with held(output):
        assert time.monotonic() - began > EXPIRES_AFTER_S
        assert (dead.number, holder(output).number) == (1, 2)
    assert holder(output).released
    with held(output):
        assert holder(output).number == 3


@pytest.mark.guard
def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pipelines.runtime.lease import held\n"
        "with held(sys.argv[1]): print('has it', flush=True); time.sleep(1e9)\n"
    )
    output = str(tmp_path / "out")
    with subprocess.Popen([sys.executable, "-c", code, output], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ResourceError, match=rf"process {other.pid}"), held(output):
            pytest.fail("two writers")
        other.send_signal(signal.SIGKILL)
    with held(output):
        assert holder(output).pid == os.getpid()
    assert not (tmp_path / "out" / NAME).exists()


@pytest.mark.guard
def test_a_process_told_to_stop_releases_its_output(object_store: str) -> None:
    code = (
        "import sys, time; from pipelines.runtime.lease import held\n"
        "with held(sys.argv[1]): print('has it', flush=True); time.sleep(1e9)\n"
    )
    output = f"{object_store}/out"
    with subprocess.Popen([sys.executable, "-c", code, output], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert not holder(output).released
        other.terminate()
        assert other.wait(timeout=30) == 128 + signal.SIGTERM
    assert holder(output).released


@pytest.mark.guard
@pytest.mark.parametrize("before", ["nobody", "a dead one"])
def test_only_one_of_many_concurrent_attempts_succeeds(object_store: str, before: str) -> None:
    output, together = f"{object_store}/out", threading.Barrier(6)
    if before == "a dead one":
        left_by_a_dead_process(output)

    def attempt(_: int) -> bool:
        together.wait()
        try:
            with held(output):
                time.sleep(2 * EXPIRES_AFTER_S)
        except ResourceError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(attempt, range(6))) == 1


LOSES = """
import sys, time
from pipelines.runtime import lease

lease.RENEW_EVERY_S = 0.2
with lease.held(sys.argv[1]):
    print("has it", flush=True)
    time.sleep(60)
"""


@pytest.mark.guard
def test_a_writer_that_lost_its_lease_is_interrupted_and_learns_who_holds_it(
    object_store: str,
) -> None:
    output = f"{object_store}/out"
    message = r"out: wanted to go on writing it, it is now another run's \(\S+ on elsewhere \(proc"
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", LOSES, output],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        taken_over(output)
        _, told = writer.communicate(timeout=50)
    assert writer.returncode == 1
    assert re.search(rf"ResourceError: .*{message}", told), told
    assert time.monotonic() - began < 50
    assert not holder(output).released, "it is the other's"


def test_a_file_that_is_not_a_lease_is_named(object_store: str) -> None:
    output, path = f"{object_store}/out", f"{object_store}/out/{NAME}"
    files.write_bytes(path, b"[]")
    message = r"lease\.json: wanted a lease that raybert wrote"
    with pytest.raises(FormatError, match=message), held(output):
        pytest.fail("it is not a lease")
    files.write_json(path, {"format_version": 2})
    message = r"lease\.json: wanted format_version 1 or older, got 2"
    with pytest.raises(FormatError, match=message), held(output):
        pytest.fail("it is not a lease")
