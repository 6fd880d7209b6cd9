"""The cache of downloads: its limit holds, and what is in use stays, whoever is killed."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from bert_core import cache as cache_module
from bert_core.cache import SHARDS, Cache
from bert_core.errors import ResourceError

KB = 1000


def content_of(name: str) -> bytes:
    """What an entry holds: from 60 to 100 kB."""
    rng = random.Random(name)
    return rng.randbytes(rng.randint(60, 100) * KB)


def writes(name: str) -> "Writer":
    return Writer(content_of(name))


class Writer:
    """Writes an entry, and counts how often."""

    def __init__(self, data: bytes) -> None:
        self.data, self.calls = data, 0

    def __call__(self, path: Path) -> None:
        self.calls += 1
        path.write_bytes(self.data)


def open_entry(cache: Cache, name: str) -> cache_module.CacheEntry:
    return cache.open(name, len(content_of(name)), writes(name))


def names_in(cache: Cache) -> list[str]:
    return sorted(path.name for path in (cache.folder / SHARDS).iterdir())


# Reads every entry several times, in an order of its own, and appends a line to a log per fetch.
READER = """
import os, random, sys, time
from pathlib import Path
from bert_core.cache import Cache

folder, most_bytes, count, passes, seed, log = sys.argv[1:]
cache, rng = Cache(Path(folder), int(most_bytes)), random.Random(int(seed))

def content_of(name):
    own = random.Random(name)
    return own.randbytes(own.randint(60, 100) * 1000)

def fetch(path, data, name):
    with open(log, "a") as lines:
        lines.write(name + "\\n")
    with open(path, "wb") as file:
        for start in range(0, len(data), 8192):
            file.write(data[start : start + 8192])
            file.flush()
            time.sleep(0.0005)

for _ in range(int(passes)):
    order = list(range(int(count)))
    rng.shuffle(order)
    for number in order:
        name = f"shards/{number}"
        data = content_of(name)
        entry = cache.open(name, len(data), lambda path: fetch(path, data, name))
        assert entry.path.read_bytes() == data, f"{name} is not what it was"
        time.sleep(rng.random() * 0.005)
        assert entry.path.read_bytes() == data, f"{name} was removed while it was in use"
        entry.close()
"""


@contextmanager
def readers() -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes to which a test appends its own; what is left of them at the end is killed."""
    running: list[subprocess.Popen[str]] = []
    yield running
    for process in running:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def start_reader(
    cache: Cache, log: Path, *, count: int, passes: int, seed: int
) -> "subprocess.Popen[str]":
    arguments = [cache.folder, cache.most_bytes, count, passes, seed, log]
    return subprocess.Popen(
        [sys.executable, "-c", READER, *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def bytes_in(folder: Path) -> int:
    """What the files take at one moment, without the holes that reserve room."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # no entry appears or disappears meanwhile
        total = 0
        for inner, _, names in os.walk(folder):
            for name in set(names) - {"reserved"}:
                with suppress(FileNotFoundError):  # of a download
                    total += os.lstat(os.path.join(inner, name)).st_size
        return total
    finally:
        os.close(lock)


@pytest.mark.guard
def test_many_processes_share_a_cache_that_is_far_too_small_and_some_are_killed(
    tmp_path: Path,
) -> None:
    """All read the right bytes, and the limit holds at every moment."""
    rng = random.Random(7)
    cache, log, count = Cache(tmp_path / "cache", 350 * KB), tmp_path / "log", 12
    cache.folder.mkdir()
    kills = 6
    with readers() as running:
        for seed in range(5):
            running.append(start_reader(cache, log, count=count, passes=4, seed=seed))
        doomed = [start_reader(cache, log, count=count, passes=400, seed=99)]
        running += doomed
        next_kill_s = time.monotonic() + 1.0
        most = 0
        while any(process.poll() is None for process in running):
            most = max(most, bytes_in(cache.folder))
            if kills and time.monotonic() > next_kill_s:
                os.kill(doomed[-1].pid, signal.SIGKILL)
                kills -= 1
                next_kill_s = time.monotonic() + rng.uniform(0.1, 0.5)
                if kills:
                    doomed.append(start_reader(cache, log, count=count, passes=400, seed=kills))
                    running.append(doomed[-1])
            time.sleep(0.002)
        for process in running:
            error = process.communicate()[1]
            killed = process in doomed
            assert process.returncode == (-signal.SIGKILL if killed else 0), error
    assert kills == 0
    assert 250 * KB < most <= cache.most_bytes
    fetched = log.read_text().splitlines()
    assert len(fetched) > 2 * count, "a cache that holds 4 of 12 cannot have kept all"
    open_entry(cache, "shards/new").close()  # removes what killed processes have left
    assert not [name for name in names_in(cache) if name.endswith(".part")]
    for path in (cache.folder / SHARDS).iterdir():
        assert path.read_bytes() == content_of(f"{SHARDS}/{path.name}")


def test_processes_that_want_the_same_entries_fetch_each_once(tmp_path: Path) -> None:
    cache, log = Cache(tmp_path / "cache", 10_000 * KB), tmp_path / "log"
    with readers() as running:
        for seed in range(4):
            running.append(start_reader(cache, log, count=6, passes=1, seed=seed))
        for process in running:
            error = process.communicate()[1]
            assert process.returncode == 0, error
    assert sorted(log.read_text().splitlines()) == [f"shards/{number}" for number in range(6)]


def test_a_process_killed_while_it_fetches_is_replaced_by_a_waiting_one(
    tmp_path: Path,
) -> None:
    name, began = "shards/0", tmp_path / "began"
    hangs = (
        "import sys, time\nfrom pathlib import Path\nfrom bert_core.cache import Cache\n"
        "def fetch(path):\n"
        "    path.write_bytes(b'half')\n"
        "    Path(sys.argv[2]).touch()\n"
        "    time.sleep(600)\n"
        f"Cache(Path(sys.argv[1]), 10**6).open('{name}', {len(content_of(name))}, fetch)\n"
    )
    cache, log = Cache(tmp_path / "cache", 1000 * KB), tmp_path / "log"
    with readers() as running:
        command = [sys.executable, "-c", hangs, str(cache.folder), str(began)]
        first = subprocess.Popen(command, text=True, cwd=Path(__file__).parents[2])
        running.append(first)
        while not began.exists():
            assert first.poll() is None
            time.sleep(0.01)
        waits = start_reader(cache, log, count=1, passes=1, seed=0)
        running.append(waits)
        time.sleep(0.5)
        assert waits.poll() is None
        assert not log.exists(), "it is being fetched"
        first.kill()
        error = waits.communicate(timeout=60)[1]
        assert waits.returncode == 0, error
    assert log.read_text() == f"{name}\n"
    assert names_in(cache) == ["0"]


def test_the_least_recently_used_goes_first_and_nothing_that_is_in_use(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 3 * 100)
    data = Writer(bytes(100))
    held = [cache.open(f"shards/{name}", 100, data) for name in "abc"]
    held[1].close()
    held[2].close()
    for name in "cb":  # used last: b
        entry = cache.find(f"shards/{name}")
        assert entry is not None
        entry.close()
    cache.open("shards/d", 100, data).close()
    assert names_in(cache) == ["a", "b", "d"], "a is older than c, and in use"
    assert cache.find("shards/c") is None


def test_a_full_cluster_is_waited_for_and_then_an_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "PATIENCE_S", 0.3)
    cache = Cache(tmp_path, 2 * 100)
    held = [cache.open(f"shards/{name}", 100, Writer(bytes(100))) for name in "ab"]
    other = Writer(bytes(100))
    message = (
        "wanted room for 100 bytes, all of the 200 .* are in use .* set RAYBERT_CACHE_GB to mo"
    )
    with pytest.raises(ResourceError, match=message):
        cache.open("shards/c", 100, other)
    assert other.calls == 0
    del held[0]  # garbage holds nothing
    cache.open("shards/c", 100, other).close()
    assert names_in(cache) == ["b", "c"]


def test_an_entry_that_can_never_fit_is_refused_at_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 99)
    kept = cache.open("shards/small", 50, Writer(bytes(50)))
    kept.close()
    large = Writer(bytes(100))
    message = r"shards/large: wanted room for 100 bytes, the cache may take 99 .* RAYBERT_CACHE_GB"
    with pytest.raises(ResourceError, match=message):
        cache.open("shards/large", 100, large)
    assert large.calls == 0
    with pytest.raises(ResourceError, match=message):  # it was said to be smaller
        cache.open("shards/large", 10, large)
    assert names_in(cache) == ["small"], "nothing was removed in vain"


def test_a_failed_fetch_leaves_nothing_and_the_next_process_retries_it(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1000)

    def fail(path: Path) -> None:
        path.mkdir()
        (path / "half").write_bytes(bytes(10))
        raise ValueError("the network is gone")

    with pytest.raises(ValueError, match="the network is gone"):
        cache.open("shards/a", 100, fail)
    assert names_in(cache) == []
    assert cache.open("shards/a", 100, Writer(b"a")).path.read_bytes() == b"a"


def test_a_damaged_entry_is_dropped_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1000)
    damaged, same = (cache.open("shards/a", 10, Writer(b"damaged")) for _ in range(2))
    cache.drop(damaged)
    new = cache.open("shards/a", 10, Writer(b"whole"))
    cache.drop(same)  # by another user of the damaged one, which finds the new one in its place
    assert new.path.read_bytes() == b"whole"
    found = cache.find("shards/a")
    assert found is not None
    assert found.path == new.path


def test_an_entry_named_by_its_content_is_kept_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1000)

    def fetch(path: Path) -> None:
        path.mkdir()
        (path / "file").write_bytes(b"content")

    def name_of(path: Path) -> str:
        return (path / "file").read_text()

    for _ in range(2):
        assert cache.take_in(SHARDS, 7, fetch, name_of).path == tmp_path / SHARDS / "content"
    assert names_in(cache) == ["content"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "cache")
    with pytest.raises(
        ResourceError, match=r"file/cache: wanted a folder for downloads .* set RAYB"
    ):
        cache.open("shards/a", 1, Writer(b"a"))


@pytest.fixture
def disk(small_disk: Callable[[str], Path]) -> Path:
    return small_disk("size=1m")


def test_a_disk_that_others_fill_too_is_shared_with_them(disk: Path) -> None:
    cache, third = Cache(disk / "cache", 100_000 * KB), Writer(bytes(300 * KB))
    for name in "abcd":  # the disk has room for three
        cache.open(f"shards/{name}", 300 * KB, third).close()
    assert names_in(cache) == ["b", "c", "d"]

    # Others fill it while something is fetched: more is removed, and it is fetched again.
    ballast = disk / "ballast"

    def fetch_beside_others(path: Path) -> None:
        if not ballast.exists():
            ballast.write_bytes(bytes(200 * KB))
        third(path)

    cache.open("shards/e", 300 * KB, fetch_beside_others).close()
    assert (cache.folder / "shards/e").read_bytes() == third.data
    assert names_in(cache) == ["e"]

    # Nothing can be removed: it is said at once, and nothing is left.
    held = cache.find("shards/e")
    (disk / "more").write_bytes(bytes(300 * KB))
    with pytest.raises(
        ResourceError, match=r"wanted 300,000 bytes of free space .* RAYBERT_CACHE "
    ):
        cache.open("shards/f", 300 * KB, third)
    assert names_in(cache) == ["e"]
    assert held is not None
    held.close()
    cache.open("shards/f", 300 * KB, third).close()
    assert names_in(cache) == ["f"]
