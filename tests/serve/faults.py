"""What the drills of a live server share: requests whose answers are judged, and the server that
they harm."""

import os
import re
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.serve import live
from tests.serve.live import COMMAND, Server

if TYPE_CHECKING:
    from bert_core.inference.predictor import Predictor
    from tests.mlflow_server import Server as Registry

DOCS, ALONE, WIDE = "docs", "alone", "wide"
REPLICAS = 2
SHORT = ["Parse a string.", "Open a socket on a port.", "A fox."]
LONG = " ".join(["array socket port"] * 20)
SOUND_TOKENS = 40
"""Up to so many tokens version 3 answers."""
DISK_BYTES = 16 << 20
"""Of the disk for downloads."""
DOCUMENT = Path(__file__).parents[2] / "docs" / "serving" / "operate.md"
QUIET_S = 3.0
"""How long every answer must be right for service to count as full."""
PER_REQUEST = 2
"""Connections that send each of a load's requests."""
PATIENCE_S = 8
"""How long a request waits for a process of its model, instead of the usual half minute."""


@dataclass(frozen=True)
class Question:
    """A request and its right answer."""

    path: str
    body: Mapping[str, Any]
    wanted: Any

    @property
    def name(self) -> str:
        return f"{self.path} {self.body.get('model', '')}".strip()


def kind_of(client: httpx.Client, question: Question) -> str:
    """`right`; `told`, a 503 with `Retry-After`; `refused`, a connection; `cut`, one that was open;
    or what else came."""
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


def same(came: Any, expected: Any, within: float = 1e-4) -> bool:
    """Whether answers are the same but for rounding: batches differ."""
    if isinstance(expected, float):
        return bool(came == pytest.approx(expected, rel=0, abs=within))
    if isinstance(expected, dict):
        return came.keys() == expected.keys() and all(
            same(came[key], value, within) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return len(came) == len(expected) and all(
            same(one, other, within) for one, other in zip(came, expected, strict=True)
        )
    return bool(came == expected)


@dataclass(frozen=True)
class Answer:
    question: str
    sent_s: float
    came_s: float
    kind: str
    """See `kind_of`."""


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


def newest(url: str) -> float:
    """When the replica was loaded that answers for a model, to the second."""
    return float(httpx.get(url, timeout=30).json()["created"] + 1)


def assert_only_fails(answers: Sequence[Answer], fault: Fault, connections: int) -> None:
    """What the fault is documented to fail, and nothing else."""
    kinds = Counter(answer.kind for answer in answers)
    print(kinds, f"slowest {max(answer.came_s - answer.sent_s for answer in answers):.1f} s")
    told = {answer.question for answer in answers if answer.kind == "told"}
    assert told <= set(fault.told)
    lost = ("cut",) if fault.loses else ()
    assert set(kinds) <= {"right", "told", *(("refused", "cut") if fault.cuts else lost)}
    assert kinds["cut"] <= connections  # what was in progress, once each
    assert kinds["right"] > connections


def documented_s(fault: str) -> float:
    """Within what time the documentation says that service is full again."""
    _, _, faults = DOCUMENT.read_text().partition("\n## Failure modes\n")
    (row,) = re.findall(rf"^\| {re.escape(fault)} \|.*$", faults, re.MULTILINE)
    return float(re.search(r"(\d+) s", row.split("|")[3])[1])  # type: ignore[index]


@contextmanager
def in_progress(
    server: Server, bundle: Path, name: str, *, texts: int = 256
) -> Iterator[list[str]]:
    """Requests of so many texts, which take seconds, under way: the kind of each answer, at the
    end."""
    from bert_core.inference.predictor import Predictor

    answers: list[str] = []
    wanted = Predictor(bundle, device="cpu").predict([LONG]) * texts
    questions = [
        Question(path, {"inputs": [LONG] * texts} | body, wanted)
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
    time.sleep(0.5)
    assert len(answers) < len(questions)
    try:
        yield answers
    finally:
        for thread in threads:
            thread.join()
    assert len(answers) == len(questions)


def versions_of(bundle: Path, root: Path) -> dict[str, Path]:
    """Bundles by their versions: 1, 2 and 4 are sound and give other answers, 3 fails late."""
    from bert_core.inference.predictor import Predictor

    found = {
        version: another(bundle, root / version / "bundle", seed=int(version)) for version in "124"
    }
    found["3"] = _make_fail_late(Predictor(found["1"], device="cpu"), root / "3" / "bundle")
    return dict(sorted(found.items()))


def _make_fail_late(sound: "Predictor", folder: Path) -> Path:
    """A bundle that answers texts of up to `SOUND_TOKENS`, and fails at every longer one: its
    vectors of later positions are so large that norms overflow."""
    [position] = [
        parameter
        for name, parameter in sound.model.named_parameters()
        if "position" in name and parameter.shape[0] == sound.bundle.encoder_config.max_length
    ]
    position.data[SOUND_TOKENS:] = 3e38
    return saved(sound, folder)


def saved(predictor: "Predictor", folder: Path) -> Path:
    from bert_core.bundle.format import About
    from bert_core.bundle.writing import save_bundle

    model, tokenizer = predictor.model, predictor.bundle.tokenizer
    save_bundle(folder, model, tokenizer, About(task=predictor.task))
    return folder


def another(bundle: Path, folder: Path, seed: int = 8) -> Path:
    """A bundle that gives other answers than `bundle`."""
    from bert_core.bundle.format import load_bundle
    from bert_core.tasks.text_classification import TextClassification
    from tests import tiny

    loaded, task = load_bundle(bundle), TextClassification(["json", "numpy", "socket"])
    return tiny.bundle(folder, loaded.tokenizer, loaded.encoder_config, task=task, seed=seed)


def wide_bundle(bundle: Path, folder: Path) -> Path:
    """A small bundle whose activations take 256 KiB per token."""
    from bert_core.bundle.format import load_bundle
    from bert_core.tasks.text_classification import TextClassification
    from tests import tiny

    loaded = load_bundle(bundle)
    config = tiny.encoder_config(
        loaded.tokenizer.vocab_size,
        num_hidden_layers=2,  # the last computes little but the first token
        intermediate_size=1 << 16,
        max_position_embeddings=1024,
    )
    task = TextClassification(["json", "numpy", "socket"])
    return tiny.bundle(folder, loaded.tokenizer, config, task=task, seed=5)


@dataclass
class Mortal:
    """A server whose processes, registry and disk tests may take away: `docs`, two replicas that
    follow an alias; `alone`, the only replica of a slow model; `wide`, two of a model whose
    activations take much memory."""

    registry: "Registry"
    cache: Path
    """Its folder for downloads."""
    folder: Path
    port: int
    bundles: Mapping[str, Path]
    """Of `alone` and `wide`."""
    latest: Server | None = field(default=None, init=False)

    def start(self, *, models: tuple[str, ...] = (DOCS, ALONE, WIDE)) -> Server:
        """Start it, always by the same command. Returns: it, once it is ready."""
        file = self.folder / "serve.toml"
        places = {DOCS: f"models:/{DOCS}@champion", **self.bundles}
        settings = {
            DOCS: f"num_replicas = {REPLICAS}",
            ALONE: "max_batch_tokens = 64",
            WIDE: f"num_replicas = {REPLICAS}",
        }
        file.write_text(
            f'port = {self.port}\ntracking_uri = "{self.registry.uri}"\nfollow_s = 0.5\n'
            "num_cpus = 0.1\n"
            + "".join(
                f'[models.{name}]\nmodel = "{places[name]}"\n{settings[name]}\n' for name in models
            )
        )
        environment = {
            "RAYBERT_CACHE": str(self.cache),
            "RAYBERT_CACHE_GB": "1",
            "RAYBERT_REPLICA_PATIENCE_S": str(PATIENCE_S),
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        }
        self.latest = Server.start(
            [*COMMAND, "--config", str(file)], self.port, self.folder, **environment
        )
        self.latest.wait_until_ready(say="logs:")
        for name in {DOCS, WIDE} & set(models):
            live.eventually(lambda: len(self.latest.replicas(name)) == REPLICAS)  # type: ignore[union-attr]  # noqa: B023
        return self.latest

    @property
    def server(self) -> Server:
        """It, started again if a test has ended it."""
        if self.latest is None or self.latest.process.poll() is not None:
            self.stop()
            return self.start()
        return self.latest

    def stop(self) -> None:
        """End all that is left of it."""
        if self.latest is not None:
            live.kill(self.latest)

    @property
    def url(self) -> str:
        """Of the model that follows its alias."""
        return f"{self.server.url}/v1/models/{DOCS}"

    def point(self, version: str) -> None:
        """Move the alias, also while the registry's server is away."""
        from tracking.store.server import connect

        store = f"sqlite:///{self.registry.folder}/mlflow.db"
        connect(store).set_registered_model_alias(DOCS, "champion", version)

    def cards(self) -> list[dict[str, Any]]:
        """As many as will have come from both replicas."""
        url = self.url
        return [httpx.get(url, timeout=30).json() for _ in range(10)]

    def all_are(self, version: str, state: str = "ready") -> bool:
        cards = self.cards()
        return all((card["version"], card["state"]) == (version, state) for card in cards)

    def problem(self, version: str, within_s: float) -> str:
        """What all replicas say that is wrong while they serve `version`."""
        cards: list[dict[str, Any]] = []

        def all_have_one() -> bool:
            cards[:] = self.cards()  # later ones may be of another try, which has none yet
            return all((card["version"], card["state"]) == (version, "problem") for card in cards)

        live.eventually(all_have_one, within_s)
        return str(cards[0]["problem"])

    def settle(self, version: str) -> None:
        """Serve a version, which has answered."""
        self.point(version)
        live.eventually(lambda: self.all_are(version))
        for _ in range(10):
            httpx.post(self.url, json={"inputs": SHORT}, timeout=30).raise_for_status()

    @contextmanager
    def without_registry(self, *, hangs: bool) -> Iterator[None]:
        """Inside, its server does not answer, or is not there."""
        assert self.registry.process is not None
        group = self.registry.process.pid
        if hangs:
            live.eventually(lambda: self._stop_between_writes(group))
        else:
            self.registry.stop()
        try:
            yield
        finally:
            if hangs:
                os.killpg(group, signal.SIGCONT)
            else:
                self.registry.start()

    def _stop_between_writes(self, group: int) -> bool:
        """Stop the registry's processes. Returns: whether its database is unlocked; if not, they
        go on, since one that is stopped inside a transaction keeps its lock."""
        os.killpg(group, signal.SIGSTOP)
        with closing(sqlite3.connect(self.registry.folder / "mlflow.db", timeout=0)) as database:
            try:
                database.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                os.killpg(group, signal.SIGCONT)
                return False
        return True

    def kill_replica(self) -> Callable[[], bool]:
        """End a replica, as the kernel does. Returns: whether another answers in its place."""
        at_s = time.time()
        os.kill(self.server.replicas(DOCS)[0], signal.SIGKILL)
        return lambda: any(card["created"] >= int(at_s) for card in self.cards())
