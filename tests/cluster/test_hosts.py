"""From `ray up deploy/onprem.yaml` to answers over the network, on hosts of their own."""

import json
import os
import re
import shlex
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import toml

from tests.cluster.hosts import ROOT, Host, Network, missing, running_network
from tests.test_readme import ROWS, SMALL, TEXT, small_checkout

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3000)]

HEAD, WORKERS, CLIENT, SERVICES = "head", ("worker-1", "worker-2"), "client", "services"
NAMES = (HEAD, *WORKERS, CLIENT, SERVICES)
S3_PORT, MLFLOW_PORT, SERVE_PORT = 9000, 5000, 8000
BUCKET = "s3://hosts"
VARIABLES = f"""
export AWS_ENDPOINT_URL=http://{SERVICES}:{S3_PORT} AWS_DEFAULT_REGION=us-east-1
export AWS_ACCESS_KEY_ID=anyone AWS_SECRET_ACCESS_KEY=anything AWS_EC2_METADATA_DISABLED=true
export MLFLOW_TRACKING_URI=http://{SERVICES}:{MLFLOW_PORT}
"""
OF_THE_CLIENT = f"""
export PATH=~/raybert-venv/bin:$PATH PYTHONPATH={ROOT}
export RAY_API_SERVER_ADDRESS=http://localhost:8265
"""
SERVE = f"""
host = "0.0.0.0"
port = {SERVE_PORT}
keys = "{BUCKET}/keys.json"

[models.docstrings]
model = "models:/docstrings@champion"
num_replicas = 2
"""
PUT = """
import sys
from bert_core import files
files.write_bytes(sys.argv[1], sys.stdin.buffer.read())
"""
DIGESTS = """
import json, sys
from bert_core import files
files_of = sorted(files.list_names(sys.argv[1]))
print(json.dumps({each: files.sha256_of(f"{sys.argv[1]}/{each}") for each in files_of
                  if each.endswith(".arrow")}))
"""


class Cluster:
    """The hosts, of which `client` is the one that a user sits at."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.hosts = {name: network.boot(name) for name in NAMES}
        self.times: list[tuple[str, float]] = []
        self.started: list[subprocess.Popen[bytes]] = []

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.times.append((what, time.monotonic() - start))
        print(f"{what}: {self.times[-1][1]:.1f} s", flush=True)

    def at_client(self, script: str, *, timeout_s: float = 300) -> str:
        """Run it in the checkout."""
        return self[CLIENT].run(f"cd {ROOT} && {script}", timeout_s=timeout_s)

    def start(self, name: str, script: str) -> Path:
        """Start it and go on; what it prints is in the file."""
        says = self.folder / f"{len(self.started)}-{name}.txt"
        self.started.append(self[name].start(script, says))
        return says

    def submit(self, stage: str, *options: str, before: str = "") -> str:
        """`raybert submit` of a stage with its small config, until it has ended."""
        return self.at_client(self.submission(stage, *options, before=before))

    def submission(self, stage: str, *options: str, before: str = "") -> str:
        config = f"--config ~/configs/{stage}.toml --output {BUCKET}/{stage}"
        return f"raybert submit {before} {stage} {config} {shlex.join(options)}"

    def put(self, name: str, content: str) -> None:
        """Put a file into the bucket."""
        command = f"python -c {shlex.quote(PUT)} {BUCKET}/{name}"
        subprocess.run(self[CLIENT].command(command), input=content, text=True, check=True)

    def shards(self, folder: str) -> dict[str, str]:
        """The digest of each."""
        return json.loads(self.at_client(f"python -c {shlex.quote(DIGESTS)} {folder}"))


def wait_until(what: str, done: Callable[[], Any], *, timeout_s: float = 120) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := done()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s until {what}"
        time.sleep(0.2)
    return found


def onprem(network: Network) -> str:
    """`deploy/onprem.yaml` with what is marked CHANGE changed, and nothing else."""
    text = (ROOT / "deploy" / "onprem.yaml").read_text()
    workers = ", ".join(network.addresses[name] for name in WORKERS)
    for pattern, value in (
        (r"(head_ip:) .*", network.addresses[HEAD]),
        (r"(worker_ips:) .*", f"[{workers}]"),
        (r"(ssh_user:) .*", "raybert"),
        (r"# (ssh_private_key:) .*", "~/.ssh/id_ed25519"),
    ):
        text, count = re.subn(pattern, rf"\1 {value}", text)
        assert count == 1, pattern
    return text


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Hosts with a bucket, MLflow and a client; no Ray yet."""
    if lack := missing():
        pytest.skip(lack)
    folder = tmp_path_factory.mktemp("hosts")
    with running_network(folder, NAMES, VARIABLES) as (network, key):
        cluster = Cluster(network, folder)
        client = cluster[CLIENT]
        client.write("~/.ssh/id_ed25519", key)
        client.write("~/.bashrc", VARIABLES + OF_THE_CLIENT)
        client.write("~/onprem.yaml", onprem(network))
        client.run("chmod 600 ~/.ssh/id_ed25519; ray get-auth-token --generate; chmod 600 ~/.ray/*")
        start_services(cluster)
        small_files(cluster, folder)
        try:
            yield cluster
        finally:
            print("\n".join(f"{seconds:7.1f} s  {what}" for what, seconds in cluster.times))


def start_services(cluster: Cluster) -> None:
    """A server for S3 and one for MLflow, on their own host."""
    path = "export PATH=~/raybert-venv/bin:$PATH;"
    cluster.start(SERVICES, f"{path} moto_server --host 0.0.0.0 --port {S3_PORT}")
    names = f"{SERVICES}:{MLFLOW_PORT},localhost:{MLFLOW_PORT}"
    cluster.start(
        SERVICES,
        f"{path} MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false mlflow server --host 0.0.0.0 "
        f"--port {MLFLOW_PORT} --workers 1 --allowed-hosts {names} "
        "--backend-store-uri sqlite:///mlflow.db --artifacts-destination ~/artifacts",
    )
    for port in (S3_PORT, MLFLOW_PORT):
        listens(cluster, SERVICES, port)
    make = f"import boto3; boto3.client('s3').create_bucket(Bucket='{BUCKET[5:]}')"
    cluster.at_client(f"python -c {shlex.quote(make)}")


def listens(cluster: Cluster, host: str, port: int) -> None:
    """Wait until the client can connect to it."""
    cluster[CLIENT].run(f"until (exec 3<> /dev/tcp/{host}/{port}) 2> /dev/null; do sleep 0.2; done")


def small_files(cluster: Cluster, folder: Path) -> None:
    """Text and rows in the bucket, and configs at the client."""
    checkout = folder / "checkout"
    checkout.mkdir()
    small_checkout(checkout)
    for name in (TEXT, ROWS["train"]):
        cluster.put(name, (checkout / name).read_text())
    inputs = {
        "prepare": {"tokenizer": "vocab"},
        "pretrain": {"shards": "prepare", "tokenizer": "vocab"},
        "finetune": {"model": "pretrain"},
        "evaluate": {"model": "finetune"},
        "publish": {"model": "finetune", "evaluation": "evaluate"},
    }
    for stage in SMALL:
        text = (checkout / "configs" / stage / "docstrings.toml").read_text()
        settings: dict[str, Any] = tomllib.loads(text.replace(f"{checkout}/", f"{BUCKET}/"))
        settings |= {name: f"{BUCKET}/{each}" for name, each in inputs.get(stage, {}).items()}
        settings["num_workers"] = 2
        settings["threads_per_worker"] = os.cpu_count()  # one worker per host
        if stage == "prepare":
            settings["block_bytes"] = 4096  # enough blocks for two
        cluster[CLIENT].write(f"~/configs/{stage}.toml", toml.dumps(settings))


@contextmanager
def forwarded(cluster: Cluster) -> Iterator[None]:
    """The job server's port at the client, as long as it lasts."""
    cluster.start(CLIENT, "ray dashboard ~/onprem.yaml")
    listens(cluster, "localhost", 8265)
    process = cluster.started[-1]
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def up(cluster: Cluster) -> Iterator[Cluster]:
    """With Ray on the head and on both workers."""
    with cluster.timed("ray up"):
        cluster.at_client("ray up --yes ~/onprem.yaml", timeout_s=400)
    with forwarded(cluster):
        with cluster.timed("the workers join"):
            wait_until(
                "both workers have joined",
                lambda: alive(cluster) == {HEAD, *WORKERS},
                timeout_s=240,
            )
        yield cluster
    with cluster.timed("ray down"):
        cluster.at_client("ray down --yes ~/onprem.yaml")
    for name in (HEAD, *WORKERS):
        wait_until(f"Ray has ended on {name}", partial(is_down, cluster[name]))


def is_down(host: Host) -> bool:
    return "raylet" not in host.run("ps -eo comm")


def alive(cluster: Cluster) -> set[str]:
    """Hosts that are nodes of the cluster."""
    token = '"Authorization: Bearer $(cat ~/.ray/auth_token)"'
    told = cluster[CLIENT].run(
        f"curl --silent --max-time 10 --header {token} http://localhost:8265/api/v0/nodes || true"
    )
    listed = json.loads(told)["data"]["result"]["result"] if told.startswith("{") else []
    up = {each["node_ip"] for each in listed if each["state"] == "ALIVE"}
    return {name for name, address in cluster.network.addresses.items() if address in up}


def test_the_whole_path(up: Cluster) -> None:
    """And one run is the same bytes on two hosts as on one."""
    with up.timed("raybert doctor"):
        told = up.at_client(
            f"raybert doctor --address http://localhost:8265 --storage {BUCKET}/doctor"
        )
    assert "3 nodes" in told
    for stage in ("vocab", "prepare"):
        with up.timed(stage):
            up.submit(stage)
    alone = "--num_workers 0 --output ~/alone --tracking_uri sqlite:///$HOME/alone.db"
    up.at_client(f"raybert prepare --config ~/configs/prepare.toml {alone}")
    shards = up.shards(f"{BUCKET}/prepare")
    assert len(shards) > 1
    assert shards == up.shards("~/alone")
    for stage in ("pretrain", "finetune", "evaluate", "publish"):
        with up.timed(stage):
            up.submit(stage)
    key = up.at_client(f"raybert serve keys create alice --keys {BUCKET}/keys.json").split()[-1]
    with up.timed("raybert serve --apply"):
        up[CLIENT].write("~/serve.toml", SERVE)
        up.at_client("ray rsync-up ~/onprem.yaml ~/serve.toml '~/serve.toml'")
        on_head(up, "raybert serve --apply ~/serve.toml")
    for host in WORKERS:
        assert up[host].run("ps -eo args").count("ServeReplica:model-docstrings"), host
        assert query(up, host, key) == 200
        assert query(up, host, "not-a-key") == 401
    on_head(up, "raybert serve --stop")


def on_head(cluster: Cluster, command: str) -> str:
    """Run it there as a user does."""
    script = f"RAY_ADDRESS=auto ~/raybert-venv/bin/{command}"
    return cluster.at_client(f"ray exec ~/onprem.yaml {shlex.quote(script)}")


def query(cluster: Cluster, host: str, key: str) -> int:
    """The status of an answer."""
    ask = json.dumps({"inputs": "Parse an address from a message header."})
    return int(
        cluster.at_client(
            f"curl --silent --max-time 30 --output /dev/null --write-out '%{{http_code}}' "
            f"--oauth2-bearer {key} --json {shlex.quote(ask)} "
            f"http://{host}:{SERVE_PORT}/v1/models/docstrings"
        )
    )
