"""Processes of a live server are killed under load, with the effects that
`docs/serving/operate.md` states."""

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serve import live
from tests.serve.faults import (
    ALONE,
    DOCS,
    PATIENCE_S,
    QUIET_S,
    REPLICAS,
    SHORT,
    Fault,
    Load,
    Mortal,
    Question,
    assert_only_fails,
    documented_s,
    in_progress,
    kind_of,
    newest,
    same,
)
from tests.serve.live import Server
from tests.serve.wire import first_read

pytestmark = pytest.mark.guard


@pytest.fixture(scope="module")
def questions(mortal_server: Mortal, versions: dict[str, Path]) -> list[Question]:
    """Below each model's own path, and at the root, with and without the name of a model."""
    from bert_core.inference.predictor import Predictor

    folders = {DOCS: versions["1"], ALONE: mortal_server.bundles[ALONE]}
    wanted = {
        name: Predictor(folder, device="cpu").predict(SHORT) for name, folder in folders.items()
    }
    body = {"inputs": SHORT}
    return [
        *(Question(f"/v1/models/{name}", body, answer) for name, answer in wanted.items()),
        *(Question("/", body | {"model": name}, answer) for name, answer in wanted.items()),
        Question("/", body, wanted[DOCS]),
    ]


@pytest.fixture
def server(mortal_server: Mortal) -> Server:
    mortal_server.settle("1")
    return mortal_server.server


EVERY = ("/v1/models/docs", "/v1/models/alone", "/ docs", "/ alone", "/")
FAULTS = {
    "a replica of several": Fault("ray::ServeReplica:model-docs:", of_several=True),
    "the only replica of a model": Fault(
        "ray::ServeReplica:model-alone:", told=("/v1/models/alone", "/ alone"), loses=True
    ),
    "the front": Fault("ray::ServeReplica:front:", told=("/ docs", "/ alone", "/"), loses=True),
    "HAProxy": Fault("haproxy", told=EVERY, cuts=True),
    "the actor that starts HAProxy": Fault("ray::HAProxyManager", told=EVERY, cuts=True),
    "Serve's controller": Fault("ray::ServeController"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_process_that_is_killed_is_replaced_and_every_answer_is_right(
    server: Server, questions: Sequence[Question], name: str
) -> None:
    fault, within_s = FAULTS[name], documented_s(name)
    with Load(server.url, questions) as load:
        load.wait_until_answered()
        before = server.processes_of(fault.title)
        assert before, [psutil.Process(pid).cmdline() for pid in server.pids()]
        for killed in [[pid] for pid in before] if fault.of_several else [before]:
            killed_s, killed_at = time.monotonic(), time.time()
            print(f"killed at {killed_s:.2f}")
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

            def is_replaced() -> bool:
                if fault.of_several:
                    return newest(f"{server.url}/v1/models/docs") > killed_at  # noqa: B023
                return bool(set(server.processes_of(fault.title)) - set(killed))  # noqa: B023

            live.eventually(is_replaced, timeout_s=within_s)
            replaced_s = time.monotonic() - killed_s
            time.sleep(QUIET_S)  # until it does something
            full_s = load.wait_until_full(killed_s, within_s)
            assert full_s <= within_s
            assert_only_fails(load.since(killed_s), fault, load.connections)
            print(f"{name}: full {full_s:.1f} s, process {replaced_s:.1f} s")


def test_a_stopped_replica_is_replaced_and_its_requests_are_answered(
    server: Server, questions: Sequence[Question]
) -> None:
    """Stopped, not ended: it closes no connection."""
    (question,) = (each for each in questions if each.path == f"/v1/models/{DOCS}")

    def ask() -> str:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            return kind_of(client, question)

    stopped = server.replicas(DOCS)[0]
    with ThreadPoolExecutor(2 * REPLICAS) as pool:
        os.kill(stopped, signal.SIGSTOP)
        began_s = time.monotonic()
        kinds = [pool.submit(ask) for _ in range(4 * REPLICAS)]
        assert {kind.result() for kind in kinds} == {"right"}
    print(f"stopped: all answered after {time.monotonic() - began_s:.1f} s")
    live.eventually(
        lambda: stopped not in server.replicas(DOCS) and len(server.replicas(DOCS)) == REPLICAS,
        timeout_s=documented_s("a replica of several that is stopped, but has not ended (SIGSTOP)"),
    )


def test_an_answer_comes_at_once_or_not_at_all(
    server: Server, questions: Sequence[Question]
) -> None:
    """Otherwise a process that is killed in between leaves a head without a body."""
    for question in questions:
        body = json.dumps(question.body)
        head = f"POST {question.path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
        closed = 0
        connection = socket.create_connection(("127.0.0.1", server.port))
        for _ in range(100):
            read = b""
            with suppress(ConnectionError):
                read = first_read(connection, request)
            if not read and closed < REPLICAS:  # HAProxy closes what is idle when replicas change
                closed += 1
                connection.close()
                connection = socket.create_connection(("127.0.0.1", server.port))
                continue
            start, _, answer = read.partition(b"\r\n\r\n")
            assert start.startswith(b"HTTP/1.1 200 "), read
            assert same(json.loads(answer), question.wanted)
        connection.close()


def test_a_request_is_refused_if_no_process_can_return(
    server: Server, mortal_server: Mortal, questions: Sequence[Question]
) -> None:
    """Nobody waits for ever, and once the cause is mended the model answers by itself."""
    asked = [each for each in questions if ALONE in each.name]

    def ask(question: Question) -> str:
        with httpx.Client(base_url=server.url, timeout=90) as client:
            return kind_of(client, question)

    bundle = mortal_server.bundles[ALONE]
    hidden = bundle.rename(bundle.with_name("hidden"))
    try:
        for pid in server.replicas(ALONE):
            os.kill(pid, signal.SIGKILL)
        began_s = time.monotonic()
        with ThreadPoolExecutor() as pool:
            # Each goes to the process that was killed, or waits for the next one.
            kinds = [pool.submit(ask, question) for question in asked]
            (other,) = (each for each in questions if each.path == f"/v1/models/{DOCS}")
            assert ask(other) == "right"
            assert {kind.result() for kind in kinds} == {"told"}
        assert time.monotonic() - began_s < 3 * PATIENCE_S
    finally:
        hidden.rename(bundle)
    live.eventually(lambda: {ask(question) for question in asked} == {"right"}, timeout_s=120)


def test_a_server_that_was_killed_is_started_again_by_the_same_command(
    server: Server, mortal_server: Mortal, questions: Sequence[Question]
) -> None:
    """The new one is stopped by a signal to its process group: it answers what it was asked, tells
    others so until the port is closed, and leaves nothing."""
    killed_s = time.monotonic()
    server.end(signal.SIGKILL)
    within_s = documented_s("the command itself")
    live.eventually(lambda: is_free(server.port), timeout_s=within_s)
    print(f"the port was free after {time.monotonic() - killed_s:.1f} s")
    # Ray's own agents stay for a while.
    names = ("haproxy", "raylet", "ray::ServeRepli", "ray::ServeContr", "ray::HAProxyMan")
    live.eventually(lambda: not set(names) & set(server.processes()))
    print(f"after {time.monotonic() - killed_s:.1f} s there is left: {server.processes()}")
    mortal_server.stop()
    again = mortal_server.start(models=(DOCS, ALONE))
    with httpx.Client(base_url=again.url, timeout=60) as client:
        assert {kind_of(client, question) for question in questions} == {"right"}
    with in_progress(again, mortal_server.bundles[ALONE], ALONE) as answers:
        began_s = time.monotonic()
        os.killpg(again.process.pid, signal.SIGTERM)
        time.sleep(0.5)  # until Python has noticed
        kind, told = "told", 0
        while kind == "told":
            with httpx.Client(base_url=again.url, timeout=60) as client:
                kind = kind_of(client, questions[told % len(questions)])
            told += kind == "told"
        assert told > len(questions)
        assert kind in ("refused", "cut")  # as the port is closed
        assert again.process.wait(documented_s("SIGTERM, Ctrl-C")) == 0
        print(f"SIGTERM: {time.monotonic() - began_s:.1f} s")
    assert set(answers) == {"right"}
    live.eventually(lambda: again.pids() == [], timeout_s=10)


def is_free(port: int) -> bool:
    with socket.socket() as mine:
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            mine.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
