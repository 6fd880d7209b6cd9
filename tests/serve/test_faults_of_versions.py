"""Faults of versions, disks and memory against a live server under load: the registry is away, the
disk is full, a version fails once it has taken over, memory is short. Never a wrong answer, no
failure beyond what was in progress, and full service again within the time that docs/serving.md
states."""

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
import torch

from bert_core.bundle.format import bundle_digest, load_bundle, save_bundle
from bert_core.errors import FormatError
from bert_core.predictor import Predictor
from bert_core.tasks.text_classification import TextClassification
from serve.model import FAILURES
from serve.plan import Candidate
from serve.slot import CALLER
from tests import tiny
from tests.serve import live
from tests.serve.server import Server, kill
from tracking.ports import free_ports
from tracking.registry import publish
from tracking.server import connect

if TYPE_CHECKING:
    from tests.mlflow_server import Server as Registry

pytestmark = pytest.mark.drill

NAME, WIDE = "docs", "wide"
SHORT = ["Parse a string.", "Open a socket on a port.", "A fox."]
LONG = [f"{text} {'sort the values of an array ' * 8}" for text in SHORT]
"""Longer than every example of the task."""
SOUND_TOKENS = 40
"""Up to so many tokens `fails_late` answers."""
CLIENTS, REPLICAS = 4, 2
DISK_BYTES = 16 << 20

# What docs/serving.md states.
TOLD_S, ROLLOVER_S, FALLBACK_S, REPLACED_S, DISK_S = 45.0, 30.0, 15.0, 60.0, 60.0


@dataclass(frozen=True)
class Came:
    """What a client got."""

    at_s: float
    status: int
    digest: str | None
    retry_after: str | None
    is_right: bool
    error_type: str | None


class Clients:
    """Clients that ask without a pause, and compare every answer with the right one of the digest
    that it names."""

    def __init__(
        self,
        url: str,
        texts: list[str],
        folders: Mapping[str, Path],
        *,
        number: int = CLIENTS,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._url, self._texts, self._headers = url, texts, headers
        self._right = {}
        for folder in folders.values():
            predictor = Predictor(folder, device="cpu")
            with suppress(FormatError):  # one that fails has no right answer
                self._right[predictor.bundle.digest] = predictor.predict(texts)
        self.came: list[Came] = []
        self.errors: list[Exception] = []
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(number)]

    def _ask(self) -> None:
        with httpx.Client(timeout=60, headers=self._headers) as client:
            while not self._done.is_set():
                try:
                    response = client.post(self._url, json={"inputs": self._texts})
                except httpx.TransportError as error:
                    self.errors.append(error)
                    continue
                self.came.append(self._judged(response))
                if response.status_code != 200:
                    time.sleep(0.2)  # as clients do that are told to try again

    def _judged(self, response: httpx.Response) -> Came:
        digest = response.headers.get("X-Model-Digest")
        is_right = response.status_code == 200 and digest in self._right
        if is_right:
            is_right = same(response.json(), self._right[digest])
        retry_after = response.headers.get("Retry-After")
        error_type = None if response.status_code == 200 else response.json()["error_type"]
        at_s = time.monotonic()
        return Came(at_s, response.status_code, digest, retry_after, is_right, error_type)

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def failed(self) -> list[Came]:
        """Those that were not answered, each of which must have been told to try again; every
        other must be right."""
        assert self.errors == []
        answered = [each for each in self.came if each.status == 200]
        assert answered
        assert all(each.is_right for each in answered)
        failed = [each for each in self.came if each.status != 200]
        assert {each.status for each in failed} <= {503}
        assert all(each.retry_after for each in failed)
        return failed

    def digests(self, since_s: float = 0.0) -> set[str | None]:
        return {each.digest for each in self.came if each.at_s >= since_s and each.status == 200}

    def wait_for_more(self, number: int = 30) -> None:
        before = len(self.came)
        live.eventually(lambda: len(self.came) >= before + number)


def same(came: list[Any], right: list[Any]) -> bool:
    """Whether answers are equal to the fifth digit."""
    pairs = [
        (one, other)
        for answer, expected in zip(came, right, strict=True)
        for one, other in zip(answer, expected, strict=True)
    ]
    return all(
        one["label"] == other["label"] and abs(one["score"] - other["score"]) < 1e-5
        for one, other in pairs
    )


def seconds_until(holds: Callable[[], bool], timeout_s: float) -> float:
    """How long it takes; fails after the time."""
    began_s = time.monotonic()
    live.eventually(holds, timeout_s)
    return time.monotonic() - began_s


def make_fail_late(sound: Path, folder: Path) -> Path:
    """A bundle that answers texts of up to `SOUND_TOKENS`, and fails at every longer one: its
    vectors of later positions are so large that norms overflow."""
    predictor = Predictor(sound, device="cpu")
    [position] = [
        parameter
        for name, parameter in predictor.model.named_parameters()
        if "position" in name and parameter.shape[0] == predictor.bundle.encoder_config.max_length
    ]
    with torch.no_grad():
        position[SOUND_TOKENS:] = 3e38
    return saved(predictor, folder)


def saved(predictor: Predictor, folder: Path) -> Path:
    model, tokenizer = predictor.model, predictor.bundle.tokenizer
    save_bundle(folder, model, tokenizer, task=predictor.task, metrics={}, lineage={})
    return folder


@pytest.fixture(scope="module")
def folders(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles by their versions: 1, 2 and 4 are sound and give other answers, 3 fails late."""
    loaded, root = load_bundle(bundle), tmp_path_factory.mktemp("versions")
    task = TextClassification(["json", "numpy", "socket"])
    result = {
        version: tiny.bundle(
            root / version / "bundle",
            loaded.tokenizer,
            loaded.encoder_config,
            task=task,
            seed=int(version),
        )
        for version in ("1", "2", "4")
    }
    result["3"] = make_fail_late(result["1"], root / "3" / "bundle")
    Predictor(result["3"], device="cpu").predict(SHORT)
    with pytest.raises(FormatError, match="got NaN"):
        Predictor(result["3"], device="cpu").predict(LONG)
    return dict(sorted(result.items()))


class Followed:
    """A server of two replicas that follow an alias of a registry."""

    def __init__(self, server: Server, registry: "Registry", cache: Path) -> None:
        self.server, self.registry, self.cache = server, registry, cache
        self.url = f"{server.url}/v1/models/{NAME}"

    def point(self, version: str) -> None:
        """Move the alias, also while the registry's server is away."""
        store = f"sqlite:///{self.registry.folder}/mlflow.db"
        connect(store).set_registered_model_alias(NAME, "champion", version)

    def cards(self) -> list[dict[str, Any]]:
        """As many as will have come from both replicas."""
        return [httpx.get(self.url, timeout=30).json() for _ in range(10)]

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
            os.killpg(group, signal.SIGSTOP)
        else:
            self.registry.stop()
        try:
            yield
        finally:
            if hangs:
                os.killpg(group, signal.SIGCONT)
            else:
                self.registry.start()

    def kill_replica(self) -> Callable[[], bool]:
        """End a replica, as the kernel does. Returns: whether another answers in its place."""
        at_s = time.time()
        victim = replicas(self.server, NAME)[0]
        os.kill(victim, signal.SIGKILL)
        return lambda: any(card["created"] >= int(at_s) for card in self.cards())


def replicas(server: Server, name: str) -> list[int]:
    """The processes that serve a model."""
    found = []
    for pid in server.pids():
        with suppress(psutil.Error):
            if any(f"ServeReplica:model-{name}:" in part for part in psutil.Process(pid).cmdline()):
                found.append(pid)
    return sorted(found)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for downloads, on a small disk of its own where this process may mount one."""
    folder = tmp_path_factory.mktemp("cache")
    size = f"size={DISK_BYTES}"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True, check=False
    )
    yield folder
    if mounted.returncode == 0:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def followed(
    folders: dict[str, Path],
    wide: Path,
    lasting_server: "Registry",
    cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Followed]:
    lasting_server.start()
    for folder in folders.values():
        publish(folder, name=NAME, uri=lasting_server.uri, metrics={}, input_example=SHORT)
    (port,) = free_ports(1)
    folder = tmp_path_factory.mktemp("followed")
    file = folder / "serve.toml"
    file.write_text(
        f'port = {port}\ntracking_uri = "{lasting_server.uri}"\nfollow_s = 1.0\n'
        f"num_replicas = {REPLICAS}\nnum_cpus = 0.2\n"
        f'[models]\n{NAME} = "models:/{NAME}@champion"\n{WIDE} = "{wide}"\n'
    )
    command = ["pipelines.cli", "serve", "--config", str(file)]
    environment = {"RAYBERT_CACHE": str(cache), "RAYBERT_CACHE_GB": "1"}
    server = Server.start(command, port, folder, **environment)
    try:
        server.wait_until_ready(say="curl")
        for name in (NAME, WIDE):
            live.eventually(lambda: len(replicas(server, name)) == REPLICAS)  # noqa: B023
        yield Followed(server, lasting_server, cache)
    finally:
        kill(server)


@pytest.mark.ray
@pytest.mark.parametrize("away", ["hangs", "is gone"])
def test_a_roll_over_waits_for_a_registry_that_is_away(
    followed: Followed, folders: dict[str, Path], away: str
) -> None:
    followed.settle("1")
    with Clients(followed.url, SHORT, folders) as clients:
        clients.wait_for_more()
        with followed.without_registry(hangs=away == "hangs"):
            followed.point("2")
            told_s = seconds_until(lambda: followed.all_are("1", "problem"), TOLD_S)
            # The other replica may find out later.
            live.eventually(
                lambda: all(
                    "the registry does not answer" in (card["problem"] or "")
                    for card in followed.cards()
                )
            )
            entry = httpx.get(f"{followed.server.url}/v1/models", timeout=30).json()["data"][0]
            assert (entry["state"], entry["card"]["version"]) == ("problem", "1")
            clients.wait_for_more()
            assert clients.digests() == {bundle_digest(folders["1"])}
        took_s = seconds_until(lambda: followed.all_are("2"), ROLLOVER_S)
        clients.wait_for_more()
    print(f"registry that {away}: told after {told_s:.1f} s, version 2 after {took_s:.1f} s")
    assert clients.failed() == []


@pytest.mark.ray
def test_a_replica_that_dies_while_the_registry_is_away_comes_back_with_what_was_served(
    followed: Followed, folders: dict[str, Path]
) -> None:
    followed.settle("2")  # it was deployed with 1
    with Clients(followed.url, SHORT, folders) as clients:
        clients.wait_for_more()
        with followed.without_registry(hangs=True):
            is_back = followed.kill_replica()
            took_s = seconds_until(is_back, REPLACED_S)
            clients.wait_for_more()
    print(f"replica without registry: after {took_s:.1f} s")
    assert len(clients.failed()) <= CLIENTS
    assert clients.digests() == {bundle_digest(folders["2"])}
    live.eventually(lambda: followed.all_are("2"), ROLLOVER_S)


@pytest.mark.ray
def test_a_version_that_the_disk_has_no_room_for_is_taken_once_there_is_room(
    followed: Followed, folders: dict[str, Path], cache: Path
) -> None:
    if shutil.disk_usage(cache).total != DISK_BYTES:
        pytest.skip("this process may not mount a small disk: full disks are not tested")
    followed.settle("2")
    for other in (cache / "bundles").iterdir():  # what could be removed to make room
        if other.name != bundle_digest(folders["2"]):
            shutil.rmtree(other)
    known = sorted((cache / "bundles").rglob("*"))
    with Clients(followed.url, SHORT, folders) as clients:
        ballast = cache / "ballast"
        ballast.write_bytes(bytes(shutil.disk_usage(cache).free - 64 * 1024))
        followed.point("4")
        problem = followed.problem("2", ROLLOVER_S)
        assert problem.startswith(f"version 4 of models:/{NAME}@champion is not served: {cache}/")
        assert "of free space for a download, got" in problem
        assert "RAYBERT_CACHE" in problem
        clients.wait_for_more()
        assert sorted((cache / "bundles").rglob("*")) == known
        assert clients.digests() == {bundle_digest(folders["2"])}
        ballast.unlink()
        took_s = seconds_until(lambda: followed.all_are("4"), DISK_S)
        clients.wait_for_more()
    print(f"full disk: version 4 after {took_s:.1f} s")
    assert clients.failed() == []


@pytest.mark.ray
def test_a_version_that_fails_at_every_request_gives_way_to_the_one_before(
    followed: Followed, folders: dict[str, Path]
) -> None:
    followed.settle("2")
    sound = bundle_digest(folders["2"])
    with Clients(followed.url, LONG, folders) as clients:
        clients.wait_for_more()
        moved_s = time.monotonic()
        followed.point("3")  # answers its examples, and nothing longer
        problem = followed.problem("2", ROLLOVER_S + FALLBACK_S)
        assert problem.startswith(f"version 3 of models:/{NAME}@champion fails at every request")
        assert "version 2" in problem
        clients.wait_for_more()
        failed = clients.failed()
        # Of every replica those that showed it, and what was in progress.
        assert 0 < len(failed) <= REPLICAS * (FAILURES + CLIENTS)
        lasted_s = failed[-1].at_s - failed[0].at_s
        print(f"a failing version: {len(failed)} requests, within {lasted_s:.1f} s")
        assert lasted_s < FALLBACK_S
        assert clients.digests(moved_s) == {sound}

        # A process that starts meanwhile finds out for itself.
        before = len(failed)
        is_back = followed.kill_replica()
        took_s = seconds_until(is_back, REPLACED_S)
        live.eventually(lambda: followed.all_are("2", "problem"), FALLBACK_S)
        clients.wait_for_more()
        failed = clients.failed()[before:]
        print(f"a replica that starts with it: {took_s:.1f} s, {len(failed)} requests")
        if failed:
            assert failed[-1].at_s - failed[0].at_s < FALLBACK_S
        followed.point("2")
        live.eventually(lambda: followed.all_are("2"), ROLLOVER_S)
        clients.wait_for_more()
        assert clients.digests(moved_s) == {sound}


@pytest.mark.ray
def test_a_replica_whose_memory_is_damaged_is_replaced(
    followed: Followed, folders: dict[str, Path]
) -> None:
    followed.settle("2")
    weights = load_bundle(folders["2"]).state
    [table] = [tensor for name, tensor in weights.items() if "word_embeddings" in name]
    known = table.numpy().tobytes()
    victim = replicas(followed.server, NAME)[0]
    with Clients(followed.url, SHORT, folders) as clients:
        clients.wait_for_more()
        assert overwrite(victim, known, b"\xff" * len(known))  # all NaN
        live.eventually(lambda: len(clients.came) > 0 and bool(clients.failed()))
        took_s = seconds_until(lambda: is_replaced(followed.server, NAME, victim), REPLACED_S)
        clients.wait_for_more()
        last_s = clients.failed()[-1].at_s
        clients.wait_for_more()
        failed = clients.failed()
    print(f"damaged memory: {len(failed)} requests, again after {took_s:.1f} s")
    assert "model_failed" in {each.error_type for each in failed}
    assert failed[-1].at_s == last_s
    assert clients.digests() == {bundle_digest(folders["2"])}


def overwrite(pid: int, known: bytes, other: bytes) -> int:
    """Write into a process's memory wherever it has these bytes. Returns: how often. Skips where
    that is forbidden."""
    maps, count = Path(f"/proc/{pid}/maps").read_text().splitlines(), 0
    try:
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            for line in maps:
                places, permissions, *_ = line.split()
                if permissions != "rw-p":  # not Ray's object store, which is shared and large
                    continue
                first, end = (int(place, 16) for place in places.split("-"))
                with suppress(OSError):  # device memory
                    memory.seek(first)
                    content = memory.read(end - first)
                    at = content.find(known)
                    while at >= 0:
                        memory.seek(first + at)
                        memory.write(other)
                        count += 1
                        at = content.find(known, at + 1)
    except PermissionError as error:
        pytest.skip(f"this process may not write to another's memory ({error})")
    return count


def test_a_version_with_nan_in_weights_that_no_example_uses_is_not_served(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    predictor = Predictor(folders["2"], device="cpu")
    with torch.no_grad():
        for name, parameter in predictor.model.named_parameters():
            if "position" in name:
                parameter[SOUND_TOKENS:] = float("nan")
    damaged = saved(predictor, tmp_path / "nan")
    with (
        live.hosted(live.plan_of(folders["1"])) as (model, url),
        Clients(url, LONG, folders) as clients,
    ):
        model.change(live.plan_of(damaged))
        live.eventually(lambda: model.slot.problem is not None)
        assert "wanted numbers as weights, there is NaN in" in str(model.slot.problem)
        clients.wait_for_more()
    assert clients.failed() == []
    assert clients.digests() == {bundle_digest(folders["1"])}


def test_a_plan_whose_model_fails_at_every_request_gives_way_to_the_one_before(
    folders: dict[str, Path],
) -> None:
    with (
        live.hosted(live.plan_of(folders["1"])) as (model, url),
        Clients(url, LONG, folders) as clients,
    ):
        clients.wait_for_more()
        model.change(live.plan_of(folders["3"]))
        live.eventually(lambda: "fails at every request" in str(model.slot.problem))
        assert model.slot.model.digest == bundle_digest(folders["1"])
        clients.wait_for_more()
        assert 0 < len(clients.failed()) <= FAILURES + CLIENTS
        model.change(live.plan_of(folders["2"]))  # the way out
        live.eventually(lambda: model.slot.model.digest == bundle_digest(folders["2"]))
        live.eventually(lambda: model.slot.problem is None)
        clients.wait_for_more()
    assert clients.digests() == {bundle_digest(folders[version]) for version in "12"}


@pytest.mark.parametrize("mode", ["shadow", "split"])
def test_a_candidate_that_fails_at_every_request_is_set_aside_and_harms_nobody_else(
    folders: dict[str, Path], mode: Any
) -> None:
    candidate = Candidate(source=live.plan_of(folders["3"]).source, share=1.0, mode=mode)
    with live.hosted(live.plan_of(folders["1"], candidate=candidate)) as (model, url):
        live.eventually(lambda: model.slot.challenger is not None)
        chosen = {CALLER: "somebody"}  # whom a split gives the candidate
        with (
            Clients(url, LONG, folders) as others,
            Clients(url, LONG, folders, headers=chosen) as clients,
        ):
            live.eventually(lambda: model.slot.challenger is None)
            others.wait_for_more()
            clients.wait_for_more()
        assert others.failed() == []
        most = FAILURES + CLIENTS if mode == "split" else 0
        assert len(clients.failed()) <= most
        assert clients.digests() == others.digests() == {bundle_digest(folders["1"])}
        problem = httpx.get(url, timeout=30).json()["problem"]
        assert f"{folders['3']} fails at every request" in problem
        # Another candidate is asked again.
        other = replace(candidate, source=live.plan_of(folders["2"]).source)
        model.change(live.plan_of(folders["1"], candidate=other))
        live.eventually(lambda: model.slot.challenger is not None)
        live.eventually(lambda: model.slot.problem is None)


@pytest.fixture(scope="module")
def wide(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small bundle whose activations take 256 KiB per token."""
    loaded = load_bundle(bundle)
    config = tiny.encoder_config(
        loaded.tokenizer.vocab_size,
        num_hidden_layers=2,  # the last computes little but the first token
        intermediate_size=1 << 16,
        max_position_embeddings=1024,
    )
    task = TextClassification(["json", "numpy", "socket"])
    folder = tmp_path_factory.mktemp("wide") / "bundle"
    return tiny.bundle(folder, loaded.tokenizer, config, task=task, seed=5)


def widest_text(folder: Path) -> str:
    """One text of some 1,000 tokens, nearly as many as the model reads."""
    predictor = Predictor(folder, device="cpu")
    word = "socket "
    one, two = predictor.encode(predictor.rows([word * 10, word * 20]))
    return word * (990 * 10 // (two.tokens - one.tokens))


@pytest.mark.ray
def test_a_request_that_does_not_fit_memory_fails_alone(followed: Followed, wide: Path) -> None:
    server = followed.server
    url, pids = f"{server.url}/v1/models/{WIDE}", replicas(server, WIDE)
    long, many = widest_text(wide), SHORT * 40
    right = Predictor(wide, device="cpu").predict(many)
    with Clients(url, SHORT, {"wide": wide}) as clients:
        clients.wait_for_more()
        for pid in pids:
            process = psutil.Process(pid)
            room_bytes = process.memory_info().vms + (320 << 20)
            process.rlimit(psutil.RLIMIT_AS, (room_bytes, psutil.RLIM_INFINITY))
        for _ in range(6):
            refused = httpx.post(url, json={"inputs": long}, timeout=60)
            assert refused.status_code == 503, refused.text
            assert refused.json()["error_type"] == "out_of_memory"
            assert refused.json()["error"].startswith("wanted more memory for this request than")
            assert refused.headers["Retry-After"]
            # What does not fit at once is computed text by text.
            answer = httpx.post(url, json={"inputs": many}, timeout=60)
            assert answer.status_code == 200, answer.text
            assert same(answer.json(), right)
        for pid in pids:
            psutil.Process(pid).rlimit(psutil.RLIMIT_AS, (psutil.RLIM_INFINITY,) * 2)
        assert httpx.post(url, json={"inputs": long}, timeout=60).status_code == 200
        clients.wait_for_more()
    assert clients.failed() == []
    assert replicas(server, WIDE) == pids


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A cgroup that limits the memory of what is put into it; skips where none can be made."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    entries = [line.split(":", 2) for line in lines]
    paths = {kinds: path.lstrip("/") for _, kinds, path in entries}
    first = Path("/sys/fs/cgroup/memory", paths["memory"]) if "memory" in paths else None
    parent = first or Path("/sys/fs/cgroup", paths.get("", ""))
    group = parent / f"raybert-drill-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here ({error}): limits of memory are not tested")
    try:
        limit = group / ("memory.max" if first is None else "memory.limit_in_bytes")
        if not limit.exists():
            pytest.skip("cgroups here do not limit memory: that is not tested")
        limit.write_text(str(limit_bytes))
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has just ended
                (parent / "cgroup.procs").write_text(pid)
        group.rmdir()


def kills_of(group: Path) -> int:
    """How many processes the kernel has ended for the group's limit."""
    file = group / "memory.events"
    text = (file if file.exists() else group / "memory.oom_control").read_text()
    values = dict(line.split() for line in text.splitlines())
    return int(values["oom_kill"])


@pytest.mark.ray
def test_a_replica_that_is_killed_for_its_memory_is_replaced(
    followed: Followed, wide: Path
) -> None:
    server = followed.server
    url, pids = f"{server.url}/v1/models/{WIDE}", replicas(server, WIDE)
    long = widest_text(wide)
    right = Predictor(wide, device="cpu").predict([long])
    with memory_group(128 << 20) as group, Clients(url, SHORT, {"wide": wide}) as clients:
        clients.wait_for_more()
        (group / "cgroup.procs").write_text(str(pids[0]))
        for _ in range(100):
            if kills_of(group):
                break
            answer = httpx.post(url, json={"inputs": long}, timeout=60)
            # The other replica answers, if it is asked or asked again.
            assert answer.status_code == 200, answer.text
            assert same(answer.json(), right)
        assert kills_of(group) == 1
        took_s = seconds_until(lambda: is_replaced(server, WIDE, pids[0]), REPLACED_S)
        clients.wait_for_more()
        failed = clients.failed()
    print(f"killed for its memory: {len(failed)} requests failed, again after {took_s:.1f} s")
    assert len(failed) <= CLIENTS


def is_replaced(server: Server, name: str, victim: int) -> bool:
    """Whether as many replicas as before answer their health checks."""
    now = replicas(server, name)
    url = f"{server.url}/v1/models/{name}/readyz"
    is_ready = httpx.get(url, timeout=30).status_code == 200
    return is_ready and len(now) == REPLICAS and victim not in now
