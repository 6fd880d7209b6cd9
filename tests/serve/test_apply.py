"""`raybert serve --apply FILE`, `--status` and `--stop` on a cluster that serves on its own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from pipelines import cli
from tests.serve import faults, live
from tests.serve.forked import Forked, forked
from tracking.store.ports import free_ports

if TYPE_CHECKING:
    from tests.ray_clusters import Head

TEXTS = ["Parse a string.", "Open a socket on a port.", "A fox."]
LONG = [" ".join(["array socket port"] * 20)] * 64


@pytest.fixture(scope="module")
def another(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that gives other answers than `bundle`."""
    return faults.another(bundle, tmp_path_factory.mktemp("another") / "bundle")


def digest_of(folder: Path) -> str:
    from bert_core.bundle.format import bundle_digest

    return bundle_digest(folder)


class Cluster:
    """A cluster that is told what to serve."""

    def __init__(self, head: "Head", forked: Forked, folder: Path) -> None:
        (self.port,) = free_ports(1)
        self.tracking_uri = f"sqlite:///{folder}/mlflow.db"
        self._head, self._forked, self._file = head, forked, folder / "serve.toml"
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def raybert(self, *arguments: str) -> Any:
        return self._forked.raybert("serve", *arguments)

    def apply(self, models: str, common: str = "") -> None:
        self._file.write_text(
            f"port = {self.port}\nnum_cpus = 0.1\nfollow_s = 0.5\n{common}\n"
            f'tracking_uri = "{self.tracking_uri}"\n{models}'
        )
        done = self.raybert("--apply", str(self._file))
        assert done.returncode == 0, done.stdout + done.stderr

    def ask(self, name: str) -> httpx.Response:
        response = self.client.post(f"/v1/models/{name}", json={"inputs": TEXTS})
        assert response.status_code == 200, response.text
        return response

    def loaded_at(self, name: str) -> int:
        return int(self.client.get(f"/v1/models/{name}").json()["created"])

    def replicas(self, name: str) -> list[psutil.Process]:
        """Processes that serve a model, those included that load it."""
        found = []
        assert self._head.process is not None
        for process in psutil.Process(self._head.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if f"ServeReplica:model-{name}:" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def count_replicas(self, name: str) -> int:
        return len(self.replicas(name))

    @contextmanager
    def under_load(self, *names: str, body: Any = None) -> Iterator[list[int]]:
        """Status of every answer meanwhile, from a client per name."""
        statuses: list[int] = []
        done = threading.Event()

        def ask(name: str) -> None:
            with httpx.Client(base_url=self.client.base_url, timeout=60) as client:
                while not done.is_set():
                    response = client.post(f"/v1/models/{name}", json=body or {"inputs": TEXTS})
                    statuses.append(response.status_code)

        threads = [threading.Thread(target=ask, args=[name]) for name in names]
        for thread in threads:
            thread.start()
        try:
            yield statuses
        finally:
            done.set()
            for thread in threads:
                thread.join()


@pytest.fixture(scope="module")
def cluster(head: "Head", tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("apply")
    environment = head.environment | {"RAY_ADDRESS": head.addresses["host:port"]}
    with forked(folder, environment) as commands:
        cluster = Cluster(head, commands, folder)
        with cluster.client:
            try:
                yield cluster
            finally:
                with suppress(httpx.TransportError):  # it is stopped, which is tested
                    cluster.client.get("/healthz")
                    cluster.raybert("--stop")


@pytest.mark.guard
def test_models_are_added_changed_and_removed_without_touching_the_others(
    cluster: Cluster, bundle: Path, another: Path
) -> None:
    digests = [digest_of(folder) for folder in (bundle, another)]
    docs, other = f'[models.docs]\nmodel = "{bundle}"\n', f'[models.other]\nmodel = "{bundle}"\n'
    cluster.apply(docs + other, "default = 'other'")
    before = {name: cluster.loaded_at(name) for name in ("docs", "other")}
    assert cluster.ask("docs").headers["X-Model-Digest"] == digests[0]
    root = cluster.client.post("/", json={"inputs": TEXTS})
    assert root.headers["X-Model"] == "other"

    cluster.apply(docs + other, "default = 'other'")  # nothing changes
    assert {name: cluster.loaded_at(name) for name in before} == before

    third = (
        f'[models.third]\nmodel = "{bundle}"\nlimits.max_inputs = 256\nmax_ongoing_requests = 1\n'
    )
    with cluster.under_load("docs", "other") as statuses:
        cluster.apply(docs.replace(str(bundle), str(another)) + other + third)
        assert cluster.ask("docs").headers["X-Model-Digest"] == digests[1]
        assert cluster.ask("other").headers["X-Model-Digest"] == digests[0]
    assert set(statuses) == {200}
    assert cluster.loaded_at("other") == before["other"]
    refused = cluster.client.post("/v1/models/third", json={"inputs": ["a"] * 257})
    assert refused.status_code == 413
    assert_requests_are_refused(cluster, "third")
    listed = [each["id"] for each in cluster.client.get("/v1/models").json()["data"]]
    assert listed == ["docs", "other", "third"]

    status = cluster.raybert("--status").stdout
    for line in (
        "front: running; replicas: 1 running",
        "model-docs: running; replicas: 1 running",
        f"docs: ready; text-classification {digests[1][:12]}",
        f"other: ready; text-classification {digests[0][:12]}",
    ):
        assert line in status

    assert_replicas_answer_the_proxy_only(cluster, "other")
    with cluster.under_load("other") as statuses:
        cluster.apply(other)
        missing = cluster.client.post("/v1/models/docs", json={"inputs": TEXTS})
        assert missing.status_code == 404
    assert set(statuses) == {200}
    assert cluster.loaded_at("other") == before["other"]


def assert_replicas_answer_the_proxy_only(cluster: Cluster, name: str) -> None:
    """On a cluster that was joined, they listen beside HAProxy, in plain HTTP."""
    ports = {
        connection.laddr.port
        for process in cluster.replicas(name)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    statuses = set()
    for port in ports:
        with suppress(httpx.TransportError):  # Ray's own ports speak gRPC
            url = f"http://127.0.0.1:{port}/v1/models/{name}"
            statuses.add(httpx.post(url, json={"inputs": TEXTS}, timeout=10).status_code)
            health = httpx.get(f"http://127.0.0.1:{port}/-/healthz", timeout=10)
            assert health.status_code == 200
    assert statuses == {421}


def assert_requests_are_refused(cluster: Cluster, name: str) -> None:
    """Those beyond what a replica takes, and they are told when to try again."""
    body = {"inputs": LONG * 4, "model": name}

    async def ask(path: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=cluster.client.base_url, timeout=60) as client:
            asking = [client.post(path, json=body) for _ in range(16)]
            return await asyncio.gather(*asking)

    for path in (f"/v1/models/{name}", "/"):  # at the front, too
        responses = asyncio.run(ask(path))
        assert {response.status_code for response in responses} == {200, 429}
        for response in responses:
            if response.status_code == 429:
                assert response.headers["Retry-After"] == "1"


@pytest.fixture(scope="module")
def scaled(cluster: Cluster, bundle: Path, another: Path) -> Cluster:
    """With `docs`, two replicas that have a candidate, and `busy`, one that may become two."""
    from tracking.models.registry import Release, publish
    from tracking.store.server import connect

    for folder in (bundle, another):
        publish(
            Release(bundle=folder, name="docs", metrics={}, input_example=TEXTS),
            uri=cluster.tracking_uri,
        )
    client = connect(cluster.tracking_uri)
    client.set_registered_model_alias("docs", "champion", "1")
    client.set_registered_model_alias("docs", "challenger", "2")
    cluster.apply(
        '[models.docs]\nmodel = "models:/docs@champion"\nnum_replicas = 2\n'
        '[models.docs.candidate]\nmodel = "models:/docs@challenger"\nshare = 1.0\n'
        f'[models.busy]\nmodel = "{bundle}"\nmax_replicas = 2\ntarget_queue_tokens = 512\n'
        "max_batch_tokens = 128\n"
    )
    return cluster


@pytest.mark.drill
def test_a_candidate_is_compared_by_one_process_for_all_replicas(scaled: Cluster) -> None:
    from serve.versions.comparison_runs import EXPERIMENT
    from tracking.store.server import connect

    cluster, client = scaled, connect(scaled.tracking_uri)
    for _ in range(20):
        assert cluster.ask("docs").headers["X-Model-Version"] == "1"

    def compared() -> float:
        experiment = client.get_experiment_by_name(EXPERIMENT)
        runs = [] if experiment is None else client.search_runs([experiment.experiment_id])
        assert len(runs) <= 1
        return sum(run.data.metrics.get("inputs", 0) for run in runs)

    live.eventually(lambda: compared() == 20 * len(TEXTS))

    # The alias moves: every replica follows.
    client.set_registered_model_alias("docs", "champion", "2")
    live.eventually(
        lambda: {cluster.ask("docs").headers["X-Model-Version"] for _ in range(6)} == {"2"}
    )


@pytest.mark.drill
def test_replicas_are_added_while_more_tokens_wait(scaled: Cluster) -> None:
    assert "model-busy: running; replicas: 1 running" in scaled.raybert("--status").stdout
    with scaled.under_load(*["busy"] * 8, body={"inputs": LONG}) as statuses:
        live.eventually(lambda: scaled.count_replicas("busy") == 2)
        live.eventually(
            lambda: "model-busy: running; replicas: 2 running" in scaled.raybert("--status").stdout
        )
    assert set(statuses) == {200}


@pytest.mark.drill
def test_models_in_one_process_are_added_and_removed_while_the_others_answer(
    cluster: Cluster, bundle: Path, another: Path
) -> None:
    docs, other = f'[models.docs]\nmodel = "{bundle}"\n', f'[models.other]\nmodel = "{another}"\n'
    cluster.apply(docs, "together = true")
    loaded_at = cluster.loaded_at("docs")
    with cluster.under_load("docs") as statuses:
        cluster.apply(docs + other, "together = true")
        assert cluster.ask("other").headers["X-Model-Digest"] == digest_of(another)
        cluster.apply(docs, "together = true")
    assert set(statuses) == {200}
    assert cluster.loaded_at("docs") == loaded_at
    assert cluster.client.post("/v1/models/other", json={"inputs": TEXTS}).status_code == 404
    status = cluster.raybert("--status").stdout
    assert "docs: ready; text-classification" in status
    assert "model-docs" not in status


@pytest.mark.guard
def test_faults_are_reported_before_anything_changes(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f'port = {cluster.port}\n[models.docs]\nmodel = "{tmp_path}/gone"\n')
    before = cluster.client.get("/v1/models").json()
    done = cluster.raybert("--apply", str(file))
    assert done.returncode == 2
    assert f"{tmp_path}/gone: wanted the folder of a bundle" in done.stderr
    assert cluster.client.get("/v1/models").json() == before


@pytest.mark.guard
def test_where_it_listens_is_not_changed_while_it_serves(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f'port = {cluster.port}\nno_auth = true\nhost = "0.0.0.0"\n[models]\na = "x"\n')
    done = cluster.raybert("--apply", str(file))
    assert done.returncode == 1
    assert "host: wanted 127.0.0.1, with which this cluster serves, got 0.0.0.0" in done.stderr
    assert "raybert serve --stop" in done.stderr


@pytest.mark.guard
def test_stopping_leaves_nothing_to_answer(cluster: Cluster) -> None:
    assert cluster.raybert("--stop").returncode == 0
    with pytest.raises(httpx.TransportError):
        cluster.client.get("/healthz")
    status = cluster.raybert("--status")
    assert (status.returncode, status.stdout) == (1, "")
    assert "this Ray cluster serves nothing" in status.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "a=x"], "which says all that is served, got a=x too: leave out --models"),
        (["--indexes", "a=x"], "which says all that is served, got a=x too: leave out --indexes"),
        ([], "apply: wanted a TOML file, got none.toml, which does not exist"),
    ],
)
def test_a_file_that_cannot_be_applied_is_reported(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["serve", "--apply", "none.toml", *arguments])
    assert message in capsys.readouterr().err


def test_without_a_cluster_it_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["serve", "--status"])
    told = "RAY_ADDRESS: wanted the address of a running Ray cluster, got none"
    assert told in capsys.readouterr().err
