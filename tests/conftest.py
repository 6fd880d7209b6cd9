"""What every test shares: checked types, groups that go to one process, the real data sets.

The fixtures of clusters and servers are in the modules that are imported here for them.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from jaxtyping import config

# NOTE: these import our packages only in functions, after the hook below.
from tests import durations
from tests.mlflow_server import lasting_server, server  # noqa: F401
from tests.ray_clusters import head, local_ray, mortal_head, open_head  # noqa: F401
from tests.s3 import object_store, s3_endpoint  # noqa: F401
from tests.type_checks import check_types

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.hub import Hub

# What is imported to collect the tests stays until the end: the garbage collector would search all
# of it in vain again and again, which takes longer than the imports.
gc.disable()

settings.register_profile("raybert", deadline=None)  # machines are shared
settings.load_profile("raybert")

# Tests compute on small tensors, on machines that do other things too: threads only wait for each
# other there. Before torch is imported, for this process and those that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# As `bert_core.determinism` sets it, for which it would be too late after a test that computes.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# A client of httpx reads all certificates of a file, which takes 50 ms, but of a folder only those
# that it needs.
os.environ.pop("SSL_CERT_FILE", None)
os.environ.setdefault("SSL_CERT_DIR", "/etc/ssl/certs")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every child
# that a test sends it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before the first import of ours: from here on a wrong type or shape is an error, in this process
# only (Ray's workers import the packages unchecked, as in production).
check_types(["bert_core", "pipelines", "raybert", "serve", "tracking"])


@pytest.fixture(scope="module")
def unchecked() -> Iterator[None]:
    """No checks of types: where a model is traced, sizes are symbols and no numbers."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator["Hub"]:
    """A hub of this test alone, with an empty cache and no token."""
    from tests.hub import running_hub

    with running_hub(tmp_path / "hf_home") as hub:
        yield hub


# Session fixtures that take seconds → the group of the tests that use one, which share a process.
# Two heads in two processes would give their clients' servers the same ports, from 23000: nobody
# joins the mortal one, or a head from tests/serve, through Ray's client.
SHARED = {
    "local_ray": "local_ray",
    "head": "head",
    "open_head": "head",
    "mortal_head": "mortal",
    "apart": "apart",
    "together": "together",
    "separate": "separate",
    "mortal_server": "mortal_server",
}
# Fixtures that give a test its marker; one that starts Ray or trains by itself is marked by hand.
MARKED = {
    "ray": {*SHARED},
    "trained": {"prepared", "untrained", "pretrained", "finetuned", "evaluated"},
}


def pytest_configure(config: pytest.Config) -> None:
    """Measure, and take the paths of a command line in the order of their folders.

    NOTE: pytest 9.1 makes a new node of a folder after a file beside the folder is given, and the
    new node has none of the fixtures of the folder's conftest.py, if the first one had them.
    """

    def place(argument: str) -> tuple[str, ...]:
        path = config.invocation_params.dir / argument.partition("::")[0]
        return Path(os.path.normpath(path)).parts

    config.args.sort(key=place)
    config.pluginmanager.register(durations.Durations(), "durations")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole",
        action="store_true",
        help="drills that are cut short by default at their whole size: `make endurance`",
    )


@pytest.fixture
def recovered(
    record_property: Callable[[str, object], None],
) -> Callable[[str, float, float], None]:
    """Takes what failed, when (by the monotonic clock), and within how many seconds all has to go
    on when nothing else runs. `benchmarks.recovery` collects it. Here other tests run beside it, so
    only twice as long fails."""

    def recovered(what: str, began_s: float, within_s: float) -> None:
        seconds = time.monotonic() - began_s
        line = {"what": what, "seconds": round(seconds, 1), "within_s": within_s}
        record_property("recovered", json.dumps(line))
        assert seconds < 2 * within_s, what

    return recovered


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """Chromium; tests of pages are skipped where there is none."""
    from tests.pages import chromium

    with chromium() as browser:
        yield browser


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts disks, each with options of `mount`, such as `size=1m`."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"a small disk cannot be mounted here: {result.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether drills are to be as long as it takes."""
    return bool(request.config.getoption("whole"))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups, and before `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they use, and say which go to one process (else those of a file do); the
    groups that take longest go first."""
    costs = durations.kept()
    seconds: defaultdict[str, float] = defaultdict(float)
    for item in items:
        for marker, fixtures in MARKED.items():
            if not fixtures.isdisjoint(getattr(item, "fixturenames", ())):
                item.add_marker(marker)
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
        cost = costs.get(durations.place_of(item.nodeid, item.keywords))
        seconds[group_of(item)] += cost["seconds"] / cost["cases"] if cost else 0.05
    items.sort(key=lambda item: (-seconds[group_of(item)], group_of(item)))


def group_of(item: pytest.Item) -> str:
    """The tests that go to one process, one after the other."""
    fixtures = getattr(item, "fixturenames", ())
    group = next((SHARED[name] for name in SHARED if name in fixtures), item.path.stem)
    if group == "head":
        group = f"head-{item.path.relative_to(Path(__file__).parent).parts[0]}"
    return group


def uses_ray() -> bool:
    """Whether this process is connected to a cluster; does not import Ray to find out."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test that starts Ray unsaid would take its time in `make fast`."""
    before = uses_ray()
    result = yield
    if uses_ray() and not before and not item.get_closest_marker("ray"):
        pytest.fail("this test has started Ray: give it the fixture local_ray, or mark it ray")
    return result


@pytest.hookimpl(trylast=True)  # after the test's own fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End what a group shares after its last test: servers with nothing to do took half of two
    cores."""
    if nextitem is None or group_of(nextitem) != group_of(item):
        for name in SHARED:
            for fixture in item.session._fixturemanager.getfixturedefs(name, item) or ():
                fixture.finish(item._request)  # type: ignore[attr-defined]  # of a function


@pytest.hookimpl(tryfirst=True)  # before xdist, which asks nobody else
def pytest_runtestloop() -> None:
    """Collect garbage from here on, that of the tests. Rarely: each time all that they have
    imported is searched, which takes a fifth of a second."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes go by the argument's name: those of a gzip file differ by the second they were made."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder that holds `wikitext2`, `sst2`, …, named by RAYBERT_DATA; skips without it."""
    folder = os.environ.get("RAYBERT_DATA")
    if not folder:
        pytest.skip("RAYBERT_DATA is not set: it names the folder that holds wikitext2, sst2, …")
    if not Path(folder).is_dir():
        pytest.fail(f"RAYBERT_DATA is {folder}, which is not a folder: correct it, or unset it")
    return Path(folder)
