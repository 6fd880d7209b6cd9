"""A Ray cluster of hosts, started as a user does, with a bucket and MLflow beside it."""

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

import toml

from tests import waiting
from tests.cluster.hosts import ROOT, Host, Network, running_network
from tests.test_readme import ROWS, SMALL, TEXT, small_checkout

HEAD, WORKERS, CLIENT = "head", ("worker-1", "worker-2"), "client"
STORAGE, TRACKING = "storage", "tracking"
NAMES = (HEAD, *WORKERS, CLIENT, STORAGE, TRACKING)
SPARE = "spare"
"""Has an address, and is started by whoever needs it."""
S3_PORT, MLFLOW_PORT, SERVE_PORT = 9000, 5000, 8000
BUCKET = "s3://hosts"
MLFLOW = f"http://{TRACKING}:{MLFLOW_PORT}/api/2.0/mlflow"
VARIABLES = f"""
export AWS_ENDPOINT_URL=http://{STORAGE}:{S3_PORT} AWS_DEFAULT_REGION=us-east-1
export AWS_ACCESS_KEY_ID=anyone AWS_SECRET_ACCESS_KEY=anything AWS_EC2_METADATA_DISABLED=true
export MLFLOW_TRACKING_URI=http://{TRACKING}:{MLFLOW_PORT}
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
folder, ending = sys.argv[1:]
names = [each for each in sorted(files.list_names(folder)) if each.endswith(ending)]
print(json.dumps({each: files.sha256_of(f"{folder}/{each}") for each in names}))
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
        host = next(each for each in self.network.hosts if each.name == name)
        self.started.append(host.start(script, says))
        return says

    def fails(self, script: str) -> str:
        """What it prints at the client, if it ends with 1."""
        return self.at_client(f"{{ {script}; }}; test $? = 1")

    def doctor(self, options: str) -> str:
        """What it says of hosts that something is wrong with."""
        return self.fails(f"raybert doctor {options}")

    def submit(self, stage: str, *options: str, before: str = "") -> str:
        """`raybert submit` of a stage with its small config, until it has ended."""
        return self.at_client(self.submission(stage, *options, before=before))

    def submission(
        self, stage: str, *options: str, before: str = "", output: str | None = None
    ) -> str:
        """The command line. `before` is of options of `submit`."""
        config = f"--config ~/configs/{stage}.toml --output {BUCKET}/{output or stage}"
        return f"raybert submit {before} {stage} {config} {shlex.join(options)}"

    def get(self, url: str, *options: str) -> str | None:
        """What a server answers the client; None if it has no answer."""
        curl = shlex.join(["curl", "--silent", "--fail", "--max-time", "10", *options, url])
        return self[CLIENT].run(f"{curl} || true") or None

    def content(self, name: str) -> str | None:
        """Of a file in the bucket, or what `?…` asks of the bucket; None if there is none."""
        url = f"http://{STORAGE}:{S3_PORT}/{BUCKET[5:]}/{name}"
        return self.get(url, "--aws-sigv4", "aws:amz:us-east-1:s3", "--user", "anyone:anything")

    def put(self, name: str, content: str) -> None:
        """Put a file into the bucket."""
        command = f"python -c {shlex.quote(PUT)} {BUCKET}/{name}"
        subprocess.run(self[CLIENT].command(command), input=content, text=True, check=True)

    def digests(self, folder: str, ending: str = ".arrow") -> dict[str, str]:
        """Of its files, by name; by default of shards."""
        return json.loads(self.at_client(f"python -c {shlex.quote(DIGESTS)} {folder} {ending}"))


def wait_until(what: str, done: Callable[[], Any], *, timeout_s: float = 120) -> Any:
    return waiting.wait_until(what, done, timeout_s=timeout_s, every_s=0.2)


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


@contextmanager
def running_hosts(folder: Path) -> Iterator[Cluster]:
    """Hosts with a bucket, MLflow and a client; no Ray yet."""
    with running_network(folder, (*NAMES, SPARE), VARIABLES) as (network, key):
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
    """A server for S3 and one for MLflow, each on a host of its own."""
    path = "export PATH=~/raybert-venv/bin:$PATH;"
    cluster.start(STORAGE, f"{path} moto_server --host 0.0.0.0 --port {S3_PORT}")
    names = f"{TRACKING}:{MLFLOW_PORT},localhost:{MLFLOW_PORT}"
    cluster.start(
        TRACKING,
        f"{path} MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false mlflow server --host 0.0.0.0 "
        f"--port {MLFLOW_PORT} --workers 1 --allowed-hosts {names} "
        "--backend-store-uri sqlite:///mlflow.db --artifacts-destination ~/artifacts",
    )
    listens(cluster, STORAGE, S3_PORT)
    listens(cluster, TRACKING, MLFLOW_PORT)
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


@contextmanager
def running_ray(cluster: Cluster) -> Iterator[None]:
    """Ray on the head and on both workers, by Ray's launcher."""
    with cluster.timed("ray up"):
        cluster.at_client("ray up --yes ~/onprem.yaml", timeout_s=400)
    with forwarded(cluster):
        with cluster.timed("the workers join"):
            wait_until_whole(cluster)
        yield
    with cluster.timed("ray down"):
        cluster.at_client("ray down --yes ~/onprem.yaml")
    for name in (HEAD, *WORKERS):
        wait_until(f"Ray has ended on {name}", partial(is_down, cluster[name]))


def wait_until_whole(cluster: Cluster) -> None:
    """Until head and workers are nodes."""
    wait_until(
        "the head and both workers are nodes",
        lambda: alive(cluster) == {HEAD, *WORKERS},
        timeout_s=240,
    )


def is_down(host: Host) -> bool:
    return "raylet" not in host.run("ps -eo comm")


def alive(cluster: Cluster) -> set[str]:
    """Hosts that are nodes of the cluster."""
    token = '"Authorization: Bearer $(cat ~/.ray/auth_token)"'
    answer = cluster[CLIENT].run(
        f"curl --silent --max-time 10 --header {token} http://localhost:8265/api/v0/nodes || true"
    )
    nodes = json.loads(answer)["data"]["result"]["result"] if answer.startswith("{") else []
    up = {node["node_ip"] for node in nodes if node["state"] == "ALIVE"}
    return {name for name, address in cluster.network.addresses.items() if address in up}


def serving_key(cluster: Cluster) -> str:
    """A key of the server, of a model that is trained and published if it was not."""
    champion = "registered-models/alias?name=docstrings&alias=champion"
    if cluster.get(f"{MLFLOW}/{champion}") is None:
        for stage in ("pretrain", "finetune", "evaluate", "publish"):
            with cluster.timed(stage):
                cluster.submit(stage)
    make = f"raybert serve keys create alice{len(cluster.times)} --keys {BUCKET}/keys.json"
    return cluster.at_client(make).split()[-1]


@contextmanager
def serving(cluster: Cluster) -> Iterator[None]:
    """The model, with a replica on each worker."""
    with cluster.timed("raybert serve --apply"):
        cluster[CLIENT].write("~/serve.toml", SERVE)
        cluster.at_client("ray rsync-up ~/onprem.yaml ~/serve.toml '~/serve.toml'")
        on_head(cluster, "raybert serve --apply ~/serve.toml")
    try:
        yield
    finally:
        on_head(cluster, "raybert serve --stop")


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
