"""A stage runs as a job on a cluster, and the cluster's description is one that Ray takes."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from bert_core.errors import ConfigError, ResourceError
from pipelines import vocab
from pipelines.sources import CorpusConfig
from pipelines.submit import SubmitConfig, run, split_arguments
from pipelines.vocab import VocabConfig

ROOT = Path(__file__).parents[2]
# Every port that `ray start` gives a fixed number to, so that another cluster is in nobody's way.
PORTS = (
    "port",
    "ray-client-server-port",
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
)
TOKEN = "0123456789abcdef" * 4


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@dataclass(frozen=True)
class Cluster:
    """A cluster that `ray start --head` made, and what a client of it has in its environment."""

    job_server: str
    environment: dict[str, str]


@pytest.fixture(scope="module")
def head() -> Iterator[Cluster]:
    """A cluster of its own with its own ports, one CPU, and a token that it asks for."""
    job_server_port, *ports = free_ports(1 + len(PORTS))
    # A short path: Ray's sockets lie under it, and a socket's path ends at 107 bytes.
    folder = tempfile.mkdtemp(prefix="ray-")
    environment = {name: value for name, value in os.environ.items() if name[:3] != "RAY"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    # What a job calls `python` is what the cluster was started in.
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--num-cpus=1", f"--temp-dir={folder}", "--disable-usage-stats"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={job_server_port}"),
            *(f"--{name}={port}" for name, port in zip(PORTS, ports, strict=True)),
        ],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    job_server = f"http://127.0.0.1:{job_server_port}"
    try:
        wait_until_it_answers(job_server, process)
        yield Cluster(job_server, environment)
    finally:
        process.terminate()  # with --block it ends its own processes
        process.communicate(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def wait_until_it_answers(job_server: str, process: subprocess.Popen[str]) -> None:
    request = urllib.request.Request(f"{job_server}/api/jobs/")
    request.add_header("Authorization", f"Bearer {TOKEN}")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    process.terminate()
    pytest.fail(f"ray start did not come up: {process.communicate(timeout=60)[0]}")


def submit(head: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelines.cli", "submit", "--address", head.job_server]
    return subprocess.run(
        [*command, *arguments],
        env=head.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.ray
def test_prepare_runs_as_a_job_on_a_cluster(head: Cluster, tmp_path: Path) -> None:
    corpus = tmp_path / "two words.txt"  # a name that a shell would cut in two
    corpus.write_text("\n\n".join(f"One sentence, {i}. Another one, {i}." for i in range(50)))
    tracking_uri = f"sqlite:///{tmp_path}/mlflow.db"
    vocab.run(
        VocabConfig(
            corpus=CorpusConfig(source=str(corpus)),
            vocab_size=200,
            num_workers=0,
            output=f"{tmp_path}/vocab",
            tracking_uri=tracking_uri,
        )
    )
    prepare = ["prepare", "--corpus.source", str(corpus), "--tokenizer", f"{tmp_path}/vocab"]
    prepare += ["--num_workers", "1", "--tracking_uri", tracking_uri]
    done = submit(head, *prepare, "--output", f"{tmp_path}/rows")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded, exit code 0" in done.stdout
    assert (tmp_path / "rows" / "manifest.json").is_file()


@pytest.mark.ray
def test_the_output_and_the_exit_code_are_those_of_the_job(head: Cluster, tmp_path: Path) -> None:
    done = submit(head, "vocab", "--vocab_size", "3", "--output", f"{tmp_path}/vocab")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "vocab_size: wanted at least 100, got 3" in done.stdout
    assert "failed, exit code 2" in done.stdout


@pytest.mark.ray
def test_without_the_token_the_cluster_is_closed(head: Cluster) -> None:
    stranger = {name: value for name, value in head.environment.items() if name[:3] != "RAY"}
    done = submit(Cluster(head.job_server, {**stranger, "HOME": "/nonexistent"}), "vocab")
    assert done.returncode == 1
    assert "could not reach or join it" in done.stderr


def test_a_cluster_that_does_not_answer_is_named() -> None:
    address = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ResourceError, match=f"wanted a Ray cluster at {address}, could not reach"):
        run(SubmitConfig(address=address), ["prepare"])


def test_a_submission_without_a_stage_says_what_was_wanted() -> None:
    with pytest.raises(ConfigError, match="wanted a stage to run on the cluster, got none"):
        run(SubmitConfig(), [])


def test_a_folder_that_is_not_there_cannot_be_sent() -> None:
    with pytest.raises(ConfigError, match="working_dir: wanted a folder, absent is none"):
        run(SubmitConfig(working_dir="absent"), ["prepare"])


@pytest.mark.parametrize(
    ("arguments", "own", "command"),
    [
        ("prepare --config a.toml", "", "prepare --config a.toml"),
        ("--address http://h vocab --address auto", "--address http://h", "vocab --address auto"),
        ("--address=http://h:1 -- prepare -x", "--address=http://h:1", "prepare -x"),
        ("--working_dir . --help", "--working_dir . --help", ""),
    ],
)  # fmt: skip
def test_options_before_the_stage_are_submits_and_the_rest_is_the_stages(
    arguments: str, own: str, command: str
) -> None:
    assert split_arguments(arguments.split()) == (own.split(), command.split())


def test_ray_takes_the_description_of_the_cluster() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    prepared = prepare_config(config)
    validate_config(prepared)
    for node_type in config["available_node_types"]:
        assert node_type in prepared["available_node_types"]
    # The image has the Ray that is installed here.
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = next(line for line in constraints if line.startswith("ray=="))
    assert config["docker"]["image"].split(":")[1].startswith(f"{pinned[5:]}-")
