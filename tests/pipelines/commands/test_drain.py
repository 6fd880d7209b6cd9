"""`raybert drain`: a node is drained when the cloud or a file says that its host will go."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bert_core.errors import ConfigError
from pipelines.commands.drain import DrainConfig
from pipelines.runtime import notices
from tests.commands import raybert
from tests.waiting import wait_until


class Metadata(BaseHTTPRequestHandler):
    """The metadata services of three clouds, as they are specified."""

    notice = False

    @property
    def soon(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=100)

    def log_message(self, *arguments: object) -> None:
        pass

    def do_PUT(self) -> None:
        wanted = self.path == "/latest/api/token"
        lasts = "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
        self.answer(200 if wanted and lasts else 400, "a-token")

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        answers: dict[str, tuple[tuple[str, str], Callable[[str], str | None]]] = {
            "/latest/meta-data/spot/instance-action": (
                ("X-aws-ec2-metadata-token", "a-token"),
                self.instance_action,
            ),
            "/computeMetadata/v1/instance/preempted": (
                ("Metadata-Flavor", "Google"),
                lambda _: "TRUE" if self.notice else "FALSE",
            ),
            "/metadata/scheduledevents": (("Metadata", "true"), self.scheduled_events),
            "/metadata/instance/compute/name": (("Metadata", "true"), lambda _: "this-vm"),
        }
        (name, value), answer = answers[path]
        if self.headers[name] != value:
            self.answer(403, "")
        elif (text := answer(query)) is None:
            self.answer(404, "")
        else:
            self.answer(200, text)

    def instance_action(self, query: str) -> str | None:
        told = {"action": "terminate", "time": f"{self.soon:%Y-%m-%dT%H:%M:%SZ}"}
        return json.dumps(told) if self.notice else None

    def scheduled_events(self, query: str) -> str:
        assert "api-version=" in query
        at = format_datetime(self.soon, usegmt=True)
        mine = {"EventType": "Preempt", "Resources": ["this-vm"], "NotBefore": at}
        others = {"EventType": "Preempt", "Resources": ["another"], "NotBefore": at}
        harmless = {"EventType": "Freeze", "Resources": ["this-vm"], "NotBefore": at}
        return json.dumps({"Events": [harmless, others] + [mine] * self.notice})

    def answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Metadata]]:
    """The services, which have no notice yet."""

    class Own(Metadata):
        pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Own) as server:
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        monkeypatch.setattr(notices, "METADATA", f"http://127.0.0.1:{server.server_port}")
        yield Own
        server.shutdown()


@pytest.mark.parametrize(("cloud", "least", "most"), [("aws", 60, 100), ("gcp", 30, 30),
                                                      ("azure", 60, 100)])  # fmt: skip
def test_each_cloud_reports_its_notice_and_when_the_host_stops(
    metadata: type[Metadata], cloud: str, least: float, most: float
) -> None:
    look = notices.source(cloud)
    assert look() is None
    metadata.notice = True
    notice = look()
    assert notice is not None
    assert notice.seconds is not None
    assert least <= notice.seconds <= most


def test_an_unreachable_metadata_service_is_distinguished_from_one_without_a_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notices, "METADATA", "http://127.0.0.1:9")
    for cloud in notices.CLOUDS:
        with pytest.raises(OSError, match="refused"):
            notices.source(cloud)()


def test_preemption_notices_come_from_a_cloud_or_a_path() -> None:
    message = "on_notice: wanted one of aws, gcp, azure, or a path with a slash, .* got amazon"
    with pytest.raises(ConfigError, match=message):
        DrainConfig(on_notice="amazon")


WORK = """
import sys, time
from pathlib import Path
import ray
from pipelines.runtime import cluster

folder = Path(sys.argv[2])


@ray.remote(num_cpus=1, resources={"second": 1})
def work():
    (folder / "began").touch()
    while not (folder / "may end").exists():
        time.sleep(0.1)
    (folder / "ended").touch()


cluster.connect(address=sys.argv[1], allow_open_cluster=True)
ray.get(work.remote())
"""
WITHIN_S = 120.0


@contextmanager
def running(command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def until(process: "subprocess.Popen[str]", pattern: str) -> str:
    """The first line that it prints and that matches."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        if re.search(pattern, line):
            return line
        seen.append(line)
    pytest.fail(f"wanted {pattern}, got {seen}")


@pytest.mark.ray
@pytest.mark.guard
def test_a_node_is_drained_at_the_notice_finishes_its_work_and_leaves(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    notice = tmp_path / "preempted"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    assert nodes.head_node is not None
    try:
        second = nodes.add_node(num_cpus=1, resources={"second": 1})
        drain = raybert("drain", "--address", nodes.address, "--allow_open_cluster")
        head = subprocess.run(
            [*drain, "--node_id", nodes.head_node.node_id],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert head.returncode == 1
        assert "wanted a node besides the head, got the head" in head.stderr
        watch = [*drain, "--node_id", second.node_id, "--poll_every_s=0.2", "--wait"]
        with (
            running([*watch, "--on_notice", str(notice)]) as watcher,
            running([sys.executable, "-c", WORK, nodes.address, str(tmp_path)]),
        ):
            until(watcher, rf"^waiting for a notice of preemption \({notice}\)$")
            wait_until("the work began", (tmp_path / "began").exists, timeout_s=WITHIN_S)
            notice.touch()
            until(watcher, rf"^notice of preemption \({notice} was created\): draining this node$")
            until(
                watcher, rf"^node {second.node_id} \(.*\) gets no new work .* to be gone in 120 s$"
            )
            assert watcher.poll() is None, "it waits for the work"
            (tmp_path / "may end").touch()
            until(watcher, "^it has left the cluster$")
            assert watcher.wait(timeout=WITHIN_S) == 0
            assert (tmp_path / "ended").exists()
    finally:
        nodes.shutdown()
