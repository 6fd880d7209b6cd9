"""Processes of a live server are killed under load: what `docs/serving.md` says of it is true."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ray.cluster_utils import Cluster

from bert_core.bundle.format import load_bundle
from bert_core.predictor import Predictor
from bert_core.tasks.text_classification import TextClassification
from serve.haproxy_launcher import WITHOUT_REPLICA_S
from tests import tiny
from tests.serve import live
from tests.serve.raw import first_read
from tests.serve.server import Server, kill
from tests.serve.test_mixed_load import same
from tracking.ports import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.drill]

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"
TEXTS = ["Parse a string.", "Open a socket on a port.", "A fox."]
QUIET_S = 3.0
"""How long every answer must be right for service to count as full."""
PER_REQUEST = 2
"""Connections that send each of a load's requests."""


def documented_s(fault: str) -> float:
    """Within what time the documentation says that service is full again."""
    (row,) = re.findall(rf"^\| {re.escape(fault)} \|.*$", DOCUMENT.read_text(), re.MULTILINE)
    return float(re.search(r"(\d+) s", row.split("|")[3])[1])  # type: ignore[index]


@dataclass(frozen=True)
class Question:
    """A request and its right answer."""

    path: str
    body: Mapping[str, Any]
    wanted: Any

    @property
    def name(self) -> str:
        return f"{self.path} {self.body.get('model', '')}".strip()


@dataclass(frozen=True)
class Answer:
    question: str
    sent_s: float
    came_s: float
    kind: str
    """`right`; `told`, a 503 with `Retry-After`; `refused`, a connection; `cut`, one that was open;
    or what else came."""


class Load:
    """Connections that ask all the time."""

    def __init__(self, url: str, questions: Sequence[Question]) -> None:
        self.answers: list[Answer] = []
        self._url, self._done = url, threading.Event()
        self._names = {question.name for question in questions}
        self.connections = PER_REQUEST * len(questions)
        self._threads = [
            threading.Thread(target=self._ask, args=[question])
            for question in questions
            for _ in range(PER_REQUEST)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, question: Question) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._done.is_set():
                sent_s = time.monotonic()
                kind = kind_of(client, question)
                self.answers.append(Answer(question.name, sent_s, time.monotonic(), kind))
                if kind != "right":
                    time.sleep(0.05)

    def since(self, began_s: float) -> list[Answer]:
        """What came since then, whenever it was asked."""
        return [answer for answer in tuple(self.answers) if answer.came_s >= began_s]

    def wait_until_answered(self) -> None:
        """Wait until every question has been answered once."""
        live.eventually(lambda: {answer.question for answer in tuple(self.answers)} == self._names)

    def wait_until_full(self, killed_s: float, within_s: float) -> float:
        """Wait until every question has been answered rightly for some time.

        Returns: seconds from the fault to the last answer that was not right, 0 if there is none.
        """
        deadline_s = killed_s + within_s + QUIET_S
        while True:
            bad = [answer.came_s for answer in self.since(killed_s) if answer.kind != "right"]
            last_s = max(bad, default=killed_s)
            after = [answer for answer in self.since(last_s) if answer.sent_s > last_s]
            if {
                answer.question for answer in after
            } == self._names and time.monotonic() > last_s + QUIET_S:
                return last_s - killed_s
            assert time.monotonic() < deadline_s, Counter(
                each.kind for each in self.since(killed_s)
            )
            time.sleep(0.1)


def kind_of(client: httpx.Client, question: Question) -> str:
    try:
        response = client.post(question.path, json=question.body)
    except httpx.ConnectError:
        return "refused"
    except httpx.TimeoutException:
        return "timed out"
    except httpx.TransportError as error:
        print(f"{question.name} was cut: {error!r} at {time.monotonic():.2f}")
        return "cut"
    if response.status_code == 503 and int(response.headers.get("Retry-After", 0)):
        return "told"
    if response.status_code != 200:
        return f"{response.status_code}: {response.text}"
    return "right" if same(response.json(), question.wanted) else "wrong"


@pytest.fixture(scope="module")
def bundles_of(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models with different answers: one with two replicas, one with a single one."""
    loaded, folder = load_bundle(bundle), tmp_path_factory.mktemp("alone") / "bundle"
    task = TextClassification(["json", "numpy", "socket"])
    alone = tiny.bundle(folder, loaded.tokenizer, loaded.encoder_config, task=task, seed=8)
    return {"pair": bundle, "alone": alone}


@pytest.fixture(scope="module")
def questions(bundles_of: dict[str, Path]) -> list[Question]:
    """Below each model's own path, and at the root, with and without the name of a model."""
    wanted = {
        name: Predictor(folder, device="cpu").predict(TEXTS) for name, folder in bundles_of.items()
    }
    body = {"inputs": TEXTS}
    return [
        *(Question(f"/v1/models/{name}", body, answer) for name, answer in wanted.items()),
        *(Question("/", body | {"model": name}, answer) for name, answer in wanted.items()),
        Question("/", body, wanted["pair"]),
    ]


def start(bundles: dict[str, Path], folder: Path, port: int | None = None) -> Server:
    if port is None:
        (port,) = free_ports(1)
    models = "\n".join(
        f'[models.{name}]\nmodel = "{bundle}"\nnum_replicas = {1 + (name == "pair")}'
        for name, bundle in bundles.items()
    )
    common = f"port = {port}\nnum_cpus = 0.1\nmax_batch_tokens = 64"
    (folder / "serve.toml").write_text(f"{common}\n{models}\n")
    return Server.start(
        ["pipelines.cli", "serve", "--config", str(folder / "serve.toml")], port, folder
    )


@pytest.fixture(scope="module")
def server(
    bundles_of: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    server = start(bundles_of, tmp_path_factory.mktemp("server"))
    try:
        server.wait_until_ready(say="curl")
        yield server
    finally:
        kill(server)


def processes_of(server: Server, title: str) -> list[int]:
    """The processes of a server whose title or command line begins so."""
    found = []
    for pid in server.pids():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if " ".join(process.cmdline()).startswith(title) or process.name() == title:
                found.append(pid)
    return sorted(found)


@dataclass(frozen=True)
class Fault:
    title: str
    """Of the processes that are killed."""
    told: tuple[str, ...] = ()
    """The questions that may be answered by a 503."""
    cuts: bool = False
    """Whether open connections are cut, and new ones refused until it is there again."""
    loses: bool = False
    """Whether requests in progress there may be cut."""
    of_several: bool = False
    """Whether one process is killed at a time: each in turn, so that the new ones must do."""


EVERY = ("/v1/models/pair", "/v1/models/alone", "/ pair", "/ alone", "/")
FAULTS = {
    "a replica of several": Fault("ray::ServeReplica:model-pair:", of_several=True),
    "the only replica of a model": Fault(
        "ray::ServeReplica:model-alone:", told=("/v1/models/alone", "/ alone"), loses=True
    ),
    "the front": Fault("ray::ServeReplica:front:", told=("/ pair", "/ alone", "/"), loses=True),
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
        before = processes_of(server, fault.title)
        assert before, [psutil.Process(pid).cmdline() for pid in server.pids()]
        for killed in [[pid] for pid in before] if fault.of_several else [before]:
            killed_s, killed_at = time.monotonic(), time.time()
            print(f"killed at {killed_s:.2f}")
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

            def is_replaced() -> bool:
                if fault.of_several:
                    return newest(f"{server.url}/v1/models/pair") > killed_at  # noqa: B023
                return bool(set(processes_of(server, fault.title)) - set(killed))  # noqa: B023

            live.eventually(is_replaced, timeout_s=within_s)
            replaced_s = time.monotonic() - killed_s
            time.sleep(QUIET_S)  # until it does something
            full_s = load.wait_until_full(killed_s, within_s)
            assert full_s <= within_s
            check(load.since(killed_s), fault, load.connections)
            print(f"{name}: full {full_s:.1f} s, process {replaced_s:.1f} s")


def newest(url: str) -> float:
    """When the replica was loaded that answers for a model, to the second."""
    return float(httpx.get(url, timeout=30).json()["created"] + 1)


def check(answers: Sequence[Answer], fault: Fault, connections: int) -> None:
    """Nothing fails but what the fault is documented to fail."""
    kinds = Counter(answer.kind for answer in answers)
    print(kinds, f"slowest {max(answer.came_s - answer.sent_s for answer in answers):.1f} s")
    told = {answer.question for answer in answers if answer.kind == "told"}
    assert told <= set(fault.told)
    lost = ("cut",) if fault.loses else ()
    assert set(kinds) <= {"right", "told", *(("refused", "cut") if fault.cuts else lost)}
    assert kinds["cut"] <= connections  # what was in progress, once each
    assert kinds["right"] > connections


def test_an_answer_comes_at_once_or_not_at_all(
    server: Server, questions: Sequence[Question]
) -> None:
    """Otherwise a process that is killed in between leaves a head without a body."""
    for question in questions:
        body = json.dumps(question.body)
        head = f"POST {question.path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            for _ in range(100):
                read, _, answer = first_read(connection, request).partition(b"\r\n\r\n")
                assert read.startswith(b"HTTP/1.1 200 "), read
                assert same(json.loads(answer), question.wanted)


LONG = [" ".join(["array socket port"] * 20)] * 256


def test_a_request_is_told_where_no_process_can_come_back(
    server: Server, bundles_of: dict[str, Path], questions: Sequence[Question]
) -> None:
    """Nobody waits for ever, and once the cause is mended the model answers by itself."""
    asked = [each for each in questions if "alone" in each.name]

    def ask(question: Question) -> str:
        with httpx.Client(base_url=server.url, timeout=90) as client:
            return kind_of(client, question)

    hidden = bundles_of["alone"].rename(bundles_of["alone"].with_name("hidden"))
    try:
        for pid in processes_of(server, "ray::ServeReplica:model-alone:"):
            os.kill(pid, signal.SIGKILL)
        began_s = time.monotonic()
        with ThreadPoolExecutor() as pool:
            # Each goes to the process that was killed, or waits for the next one.
            kinds = [pool.submit(ask, question) for question in asked]
            (other,) = (each for each in questions if each.path == "/v1/models/pair")
            assert ask(other) == "right"
            assert {kind.result() for kind in kinds} == {"told"}
        assert time.monotonic() - began_s < 2 * WITHOUT_REPLICA_S
    finally:
        hidden.rename(bundles_of["alone"])
    live.eventually(lambda: {ask(question) for question in asked} == {"right"}, timeout_s=120)


@contextmanager
def in_progress(server: Server, bundle: Path, name: str) -> Iterator[list[str]]:
    """Requests that take seconds, under way: the kind of each answer, at the end."""
    answers: list[str] = []
    wanted = Predictor(bundle, device="cpu").predict(LONG)
    questions = [
        Question(path, {"inputs": LONG} | body, wanted)
        for path, body in ((f"/v1/models/{name}", {}), ("/", {"model": name}))
        for _ in range(4)
    ]

    def ask(question: Question) -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            kind = kind_of(client, question)
            print(kind, f"after {time.monotonic() - began_s:.1f} s")
            answers.append(kind)

    threads = [threading.Thread(target=ask, args=[question]) for question in questions]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(1)
    assert len(answers) < len(questions)
    try:
        yield answers
    finally:
        for thread in threads:
            thread.join()
    assert len(answers) == len(questions)


def test_a_server_that_was_killed_is_started_again_by_the_same_command(
    server: Server, bundles_of: dict[str, Path], questions: Sequence[Question], tmp_path: Path
) -> None:
    """The last test that uses the module's server. The new one is stopped by a signal to its
    process group: it answers what it was asked, and leaves nothing."""
    killed_s = time.monotonic()
    server.end(signal.SIGKILL)
    within_s = documented_s("the command itself")
    live.eventually(lambda: is_free(server.port), timeout_s=within_s)
    print(f"the port was free after {time.monotonic() - killed_s:.1f} s")
    # Ray's own agents stay for a while.
    names = ("haproxy", "raylet", "ray::ServeRepli", "ray::ServeContr", "ray::HAProxyMan")
    live.eventually(lambda: not set(names) & set(server.processes()))
    print(f"after {time.monotonic() - killed_s:.1f} s there is left: {server.processes()}")
    again = start(bundles_of, tmp_path, server.port)
    try:
        again.wait_until_ready(say="curl")
        with httpx.Client(base_url=again.url, timeout=60) as client:
            assert {kind_of(client, question) for question in questions} == {"right"}
        with in_progress(again, bundles_of["alone"], "alone") as answers:
            began_s = time.monotonic()
            os.killpg(again.process.pid, signal.SIGTERM)
            assert again.process.wait(documented_s("SIGTERM, Ctrl-C")) == 0
            print(f"SIGTERM: {time.monotonic() - began_s:.1f} s")
        assert set(answers) == {"right"}
        live.eventually(lambda: again.pids() == [], timeout_s=10)
    finally:
        kill(again)


def is_free(port: int) -> bool:
    with socket.socket() as mine:
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            mine.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


ONE_MACHINE = {"SERVE_SOCKET_REUSE_PORT_ENABLED": "1"}
"""For nodes that share a machine: each one's HAProxy has metrics at the same port."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head that has room for one replica."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "env_vars": ONE_MACHINE})
    yield made
    made.shutdown()


def test_a_node_that_is_lost_fails_no_request(
    cluster: Cluster, bundles_of: dict[str, Path], questions: Sequence[Question], tmp_path: Path
) -> None:
    port, *others = free_ports(3)

    def apply(num_replicas: int) -> None:
        file = tmp_path / "serve.toml"
        file.write_text(
            f"port = {port}\n[models.pair]\n"
            f'model = "{bundles_of["pair"]}"\nnum_replicas = {num_replicas}\n'
        )
        command = ["pipelines.cli", "serve", "--apply", str(file), "--allow_open_cluster"]
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env=os.environ | {"RAY_ADDRESS": cluster.address},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "requires no token: anyone who reaches" in done.stdout + done.stderr

    def add_node() -> Any:
        variables = {"RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(others.pop())}
        return cluster.add_node(num_cpus=1, env_vars=ONE_MACHINE | variables)

    asked = [each for each in questions if "alone" not in each.name]
    apply(1)  # with the front, on the head
    second = add_node()
    apply(2)
    within_s = documented_s("a node")
    with Load(f"http://127.0.0.1:{port}", asked) as load:
        load.wait_until_answered()
        (raylet,) = second.all_processes["raylet"]
        lost = [psutil.Process(raylet.process.pid)]
        lost += lost[0].children(recursive=True)
        assert any("ServeReplica:model-pair" in " ".join(each.cmdline()) for each in lost)
        killed_s, killed_at = time.monotonic(), time.time()
        for process in lost:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        cluster.remove_node(second, allow_graceful=False)
        add_node()

        url = f"http://127.0.0.1:{port}/v1/models/pair"
        live.eventually(lambda: newest(url) > killed_at, timeout_s=within_s)
        print(f"two replicas again after {time.monotonic() - killed_s:.1f} s")
        full_s = load.wait_until_full(killed_s, within_s)
    print(f"a node: full {full_s:.1f} s")
    check(load.since(killed_s), Fault("raylet"), load.connections)
