"""Faults of versions, disks and memory against a live server under load: the registry is away, the
disk is full, a version fails once it has taken over, memory is short. Never a wrong answer, no
failure beyond what was in progress, and full service again within the time that
docs/serving/operate.md states."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from bert_core.bundle.format import bundle_digest, load_bundle
from bert_core.errors import FormatError
from bert_core.inference.predictor import Predictor
from serve.model.model import FAILURES
from serve.versions.plan import CandidatePlan
from serve.versions.slot import CALLER
from tests.serve import live
from tests.serve.faults import (
    DISK_BYTES,
    DOCS,
    REPLICAS,
    SHORT,
    SOUND_TOKENS,
    WIDE,
    Mortal,
    same,
    saved,
)
from tests.serve.live import Server

pytestmark = pytest.mark.guard

LONG = [f"{text} {'sort the values of an array ' * 8}" for text in SHORT]
"""Longer than every example of the task."""
CLIENTS, WITHIN = 4, 1e-5

# What docs/serving/operate.md states.
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
        versions: Mapping[str, Path],
        *,
        number: int = CLIENTS,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._url, self._texts, self._headers = url, texts, headers
        self._right = {}
        for folder in versions.values():
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
            is_right = same(response.json(), self._right[digest], within=WITHIN)
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


def seconds_until(holds: Callable[[], bool], timeout_s: float) -> float:
    """How long it takes; fails after the time."""
    began_s = time.monotonic()
    live.eventually(holds, timeout_s)
    return time.monotonic() - began_s


def test_version_3_fails_only_on_inputs_unlike_every_example(versions: dict[str, Path]) -> None:
    predictor = Predictor(versions["3"], device="cpu")
    assert len(predictor.predict(SHORT)) == len(SHORT)
    with pytest.raises(FormatError, match="got NaN"):
        predictor.predict(LONG)


@pytest.mark.parametrize("away", ["hangs", "is gone"])
def test_a_roll_over_waits_for_an_unreachable_registry(
    mortal_server: Mortal, versions: dict[str, Path], away: str
) -> None:
    mortal_server.settle("1")
    with Clients(mortal_server.url, SHORT, versions) as clients:
        clients.wait_for_more()
        with mortal_server.without_registry(hangs=away == "hangs"):
            mortal_server.point("2")
            told_s = seconds_until(lambda: mortal_server.all_are("1", "problem"), TOLD_S)
            # The other replica may find out later.
            live.eventually(
                lambda: all(
                    "the registry does not answer" in (card["problem"] or "")
                    for card in mortal_server.cards()
                )
            )
            entry = httpx.get(f"{mortal_server.server.url}/v1/models", timeout=30).json()["data"][0]
            assert (entry["state"], entry["card"]["version"]) == ("problem", "1")
            clients.wait_for_more()
            assert clients.digests() == {bundle_digest(versions["1"])}
        took_s = seconds_until(lambda: mortal_server.all_are("2"), ROLLOVER_S)
        clients.wait_for_more()
    print(f"registry that {away}: told after {told_s:.1f} s, version 2 after {took_s:.1f} s")
    assert clients.failed() == []


def test_a_replica_that_dies_while_the_registry_is_down_returns_with_the_served_version(
    mortal_server: Mortal, versions: dict[str, Path]
) -> None:
    mortal_server.settle("2")  # it was deployed with 1
    with Clients(mortal_server.url, SHORT, versions) as clients:
        clients.wait_for_more()
        with mortal_server.without_registry(hangs=True):
            is_back = mortal_server.kill_replica()
            took_s = seconds_until(is_back, REPLACED_S)
            clients.wait_for_more()
    print(f"replica without registry: after {took_s:.1f} s")
    assert len(clients.failed()) <= CLIENTS
    assert clients.digests() == {bundle_digest(versions["2"])}
    live.eventually(lambda: mortal_server.all_are("2"), ROLLOVER_S)


def test_a_version_too_large_for_the_disk_is_loaded_once_there_is_room(
    mortal_server: Mortal, versions: dict[str, Path]
) -> None:
    cache = mortal_server.cache
    if shutil.disk_usage(cache).total != DISK_BYTES:
        pytest.skip("this process may not mount a small disk: full disks are not tested")
    mortal_server.settle("2")
    for other in (cache / "bundles").iterdir():  # what could be removed to make room
        if other.name != bundle_digest(versions["2"]):
            shutil.rmtree(other)
    known = sorted((cache / "bundles").rglob("*"))
    with Clients(mortal_server.url, SHORT, versions) as clients:
        ballast = cache / "ballast"
        ballast.write_bytes(bytes(shutil.disk_usage(cache).free - 64 * 1024))
        mortal_server.point("4")
        problem = mortal_server.problem("2", ROLLOVER_S)
        assert problem.startswith(f"version 4 of models:/{DOCS}@champion is not served: {cache}/")
        assert "of free space for a download, got" in problem
        assert "RAYBERT_CACHE" in problem
        clients.wait_for_more()
        assert sorted((cache / "bundles").rglob("*")) == known
        assert clients.digests() == {bundle_digest(versions["2"])}
        ballast.unlink()
        took_s = seconds_until(lambda: mortal_server.all_are("4"), DISK_S)
        clients.wait_for_more()
    print(f"full disk: version 4 after {took_s:.1f} s")
    assert clients.failed() == []


def test_a_version_that_fails_every_request_is_rolled_back(
    mortal_server: Mortal, versions: dict[str, Path]
) -> None:
    mortal_server.settle("2")
    sound = bundle_digest(versions["2"])
    with Clients(mortal_server.url, LONG, versions) as clients:
        clients.wait_for_more()
        moved_s = time.monotonic()
        mortal_server.point("3")  # answers its examples, and nothing longer
        problem = mortal_server.problem("2", ROLLOVER_S + FALLBACK_S)
        assert problem.startswith(f"version 3 of models:/{DOCS}@champion fails at every request")
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
        is_back = mortal_server.kill_replica()
        took_s = seconds_until(is_back, REPLACED_S)
        live.eventually(lambda: mortal_server.all_are("2", "problem"), FALLBACK_S)
        clients.wait_for_more()
        failed = clients.failed()[before:]
        print(f"a replica that starts with it: {took_s:.1f} s, {len(failed)} requests")
        if failed:
            assert failed[-1].at_s - failed[0].at_s < FALLBACK_S
        mortal_server.point("2")
        live.eventually(lambda: mortal_server.all_are("2"), ROLLOVER_S)
        clients.wait_for_more()
        assert clients.digests(moved_s) == {sound}


def test_a_version_that_kills_the_process_loading_it_does_so_once(
    mortal_server: Mortal, versions: dict[str, Path]
) -> None:
    """As the kernel ends a process that has no memory for it."""
    mortal_server.settle("2")
    notes, killed = mortal_server.cache / "tried", list[int]()
    done = threading.Event()

    def end_whoever_loads_it() -> None:
        while not done.is_set():
            for note in notes.glob("*.json"):
                with suppress(OSError, ValueError):
                    content = json.loads(note.read_text())
                    if content["is_tried"] and content["pid"] not in killed:
                        killed.append(content["pid"])
                        os.kill(content["pid"], signal.SIGKILL)
            time.sleep(0.002)

    killer = threading.Thread(target=end_whoever_loads_it)
    with Clients(mortal_server.url, SHORT, versions) as clients:
        clients.wait_for_more()
        killer.start()
        try:
            mortal_server.point("4")
            problem = mortal_server.problem("2", ROLLOVER_S + REPLACED_S)
            assert problem.startswith(
                f"version 4 of models:/{DOCS}@champion is not served: loading"
            )
            live.eventually(lambda: len(mortal_server.server.replicas(DOCS)) == REPLICAS)
            clients.wait_for_more()
        finally:
            done.set()
            killer.join()
        mortal_server.point("2")
        took_s = seconds_until(lambda: mortal_server.all_are("2"), ROLLOVER_S)
    print(f"a version that ends its process: {len(killed)} ended, ready after {took_s:.1f} s")
    assert len(killed) == 1
    assert len(clients.failed()) <= CLIENTS
    assert clients.digests() == {bundle_digest(versions["2"])}


def test_a_replica_whose_memory_is_damaged_is_replaced(
    mortal_server: Mortal, versions: dict[str, Path]
) -> None:
    mortal_server.settle("2")
    weights = load_bundle(versions["2"]).state
    [table] = [tensor for name, tensor in weights.items() if "word_embeddings" in name]
    known = table.numpy().tobytes()
    victim = mortal_server.server.replicas(DOCS)[0]
    with Clients(mortal_server.url, SHORT, versions) as clients:
        clients.wait_for_more()
        assert overwrite(victim, known, b"\xff" * len(known))  # all NaN
        live.eventually(lambda: len(clients.came) > 0 and bool(clients.failed()))
        took_s = seconds_until(lambda: is_replaced(mortal_server.server, DOCS, victim), REPLACED_S)
        clients.wait_for_more()
        last_s = clients.failed()[-1].at_s
        clients.wait_for_more()
        failed = clients.failed()
    print(f"damaged memory: {len(failed)} requests, again after {took_s:.1f} s")
    assert "model_failed" in {each.error_type for each in failed}
    assert failed[-1].at_s == last_s
    assert clients.digests() == {bundle_digest(versions["2"])}


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
    versions: dict[str, Path], tmp_path: Path
) -> None:
    predictor = Predictor(versions["2"], device="cpu")
    with torch.no_grad():
        for name, parameter in predictor.model.named_parameters():
            if "position" in name:
                parameter[SOUND_TOKENS:] = float("nan")
    damaged = saved(predictor, tmp_path / "nan")
    with (
        live.hosted(live.plan_of(versions["1"])) as (model, url),
        Clients(url, LONG, versions) as clients,
    ):
        model.change(live.plan_of(damaged))
        live.eventually(lambda: model.slot.problem is not None)
        assert "wanted numbers as weights, there is NaN in" in str(model.slot.problem)
        clients.wait_for_more()
    assert clients.failed() == []
    assert clients.digests() == {bundle_digest(versions["1"])}


def test_a_plan_whose_model_fails_every_request_is_rolled_back(
    versions: dict[str, Path],
) -> None:
    with (
        live.hosted(live.plan_of(versions["1"])) as (model, url),
        Clients(url, LONG, versions) as clients,
    ):
        clients.wait_for_more()
        model.change(live.plan_of(versions["3"]))
        live.eventually(lambda: "fails at every request" in str(model.slot.problem))
        assert model.slot.model.digest == bundle_digest(versions["1"])
        clients.wait_for_more()
        assert 0 < len(clients.failed()) <= FAILURES + CLIENTS
        model.change(live.plan_of(versions["2"]))  # the way out
        live.eventually(lambda: model.slot.model.digest == bundle_digest(versions["2"]))
        live.eventually(lambda: model.slot.problem is None)
        clients.wait_for_more()
    assert clients.digests() == {bundle_digest(versions[version]) for version in "12"}


@pytest.mark.parametrize("mode", ["shadow", "split"])
def test_a_candidate_that_fails_every_request_is_disabled_and_affects_nobody_else(
    versions: dict[str, Path], mode: Any
) -> None:
    candidate = CandidatePlan(source=live.plan_of(versions["3"]).source, share=1.0, mode=mode)
    with live.hosted(live.plan_of(versions["1"], candidate=candidate)) as (model, url):
        live.eventually(lambda: model.slot.candidate is not None)
        chosen = {CALLER: "somebody"}  # whom a split gives the candidate
        with (
            Clients(url, LONG, versions) as others,
            Clients(url, LONG, versions, headers=chosen) as clients,
        ):
            live.eventually(lambda: model.slot.candidate is None)
            others.wait_for_more()
            clients.wait_for_more()
        assert others.failed() == []
        most = FAILURES + CLIENTS if mode == "split" else 0
        assert len(clients.failed()) <= most
        assert clients.digests() == others.digests() == {bundle_digest(versions["1"])}
        problem = httpx.get(url, timeout=30).json()["problem"]
        assert f"{versions['3']} fails at every request" in problem
        # Another candidate is asked again.
        other = replace(candidate, source=live.plan_of(versions["2"]).source)
        model.change(live.plan_of(versions["1"], candidate=other))
        live.eventually(lambda: model.slot.candidate is not None)
        live.eventually(lambda: model.slot.problem is None)


def widest_text(folder: Path) -> str:
    """One text of some 1,000 tokens, nearly as many as the model reads."""
    predictor = Predictor(folder, device="cpu")
    word = "socket "
    one, two = predictor.encode(predictor.rows([word * 10, word * 20]))
    return word * (990 * 10 // (two.tokens - one.tokens))


def test_a_request_that_does_not_fit_memory_fails_alone(mortal_server: Mortal) -> None:
    server, wide = mortal_server.server, mortal_server.bundles[WIDE]
    url, pids = f"{server.url}/v1/models/{WIDE}", server.replicas(WIDE)
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
            assert same(answer.json(), right, within=WITHIN)
        for pid in pids:
            psutil.Process(pid).rlimit(psutil.RLIMIT_AS, (psutil.RLIM_INFINITY,) * 2)
        assert httpx.post(url, json={"inputs": long}, timeout=60).status_code == 200
        clients.wait_for_more()
    assert clients.failed() == []
    assert server.replicas(WIDE) == pids


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


def test_a_replica_that_is_killed_for_its_memory_is_replaced(mortal_server: Mortal) -> None:
    server, wide = mortal_server.server, mortal_server.bundles[WIDE]
    url, pids = f"{server.url}/v1/models/{WIDE}", server.replicas(WIDE)
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
            assert same(answer.json(), right, within=WITHIN)
        assert kills_of(group) == 1
        took_s = seconds_until(lambda: is_replaced(server, WIDE, pids[0]), REPLACED_S)
        clients.wait_for_more()
        failed = clients.failed()
    print(f"killed for its memory: {len(failed)} requests failed, again after {took_s:.1f} s")
    assert len(failed) <= CLIENTS


def is_replaced(server: Server, name: str, victim: int) -> bool:
    """Whether as many replicas as before answer their health checks."""
    now = server.replicas(name)
    url = f"{server.url}/v1/models/{name}/readyz"
    is_ready = httpx.get(url, timeout=30).status_code == 200
    return is_ready and len(now) == REPLICAS and victim not in now
