"""A stage runs as a job on a cluster, and the cluster's description is one that Ray takes."""

import json
import platform
import re
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from bert_core.errors import ConfigError, ResourceError
from pipelines.commands.submit import SubmitConfig, run, split_arguments
from tests.commands import raybert
from tracking.store.ports import free_ports

ROOT = Path(__file__).parents[3]
REFUSAL = "wanted a Ray cluster that requires a token"


@pytest.mark.guard
def test_without_the_token_the_cluster_is_closed(head: Any) -> None:
    stranger = {"RAY_AUTH_TOKEN": "", "HOME": "/nonexistent"}
    done = head.raybert("submit", "vocab", "--output", "/shared/vocab", **stranger)
    assert done.returncode == 1
    assert "could not reach or join it" in done.stderr


@pytest.mark.guard
def test_a_job_is_sent_to_a_cluster_without_a_token_only_where_that_is_allowed(
    open_head: Any, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"A sentence, {i}." for i in range(50)))
    command = ["vocab", "--corpus.source", f"{tmp_path}/text.txt", "--vocab_size", "100"]
    command += ["--num_workers", "1", "--output", f"{tmp_path}/vocab"]
    command += ["--tracking_uri", f"sqlite:///{tmp_path}/mlflow.db"]
    refused = open_head.raybert("submit", *command)
    assert refused.returncode == 1
    assert REFUSAL in refused.stderr
    assert refused.stdout == ""
    # Told once, the job may join it too.
    done = open_head.raybert("submit", "--allow_open_cluster", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("requires no token: anyone who reaches its ports") == 2
    assert (tmp_path / "vocab" / "manifest.json").is_file()


def test_a_cluster_that_does_not_answer_is_named() -> None:
    address = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ResourceError, match=f"wanted a Ray cluster at {address}, could not reach"):
        run(SubmitConfig(address=address), ["vocab", "--output", "/shared/vocab"])


class OfAnotherVersion(BaseHTTPRequestHandler):
    """A job server of a cluster with another Ray; it takes no job."""

    def do_GET(self) -> None:
        metadata = {"rayVersion": "2.61.0", "pythonVersion": platform.python_version()}
        answers = {
            "/api/version": {"version": "5", "ray_version": "2.61.0"},
            "/api/v0/cluster_metadata": {"result": True, "msg": "", "data": metadata},
        }
        self.send_response(200 if self.path in answers else 404)
        self.end_headers()
        self.wfile.write(json.dumps(answers.get(self.path)).encode())


def test_a_cluster_of_another_version_is_refused_before_anything_is_sent() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), OfAnotherVersion) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        command = raybert(
            "submit", "--allow_open_cluster", "--address", address, "vocab", "--output", "/x"
        )
        done = subprocess.run(command, capture_output=True, text=True)
        server.shutdown()
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(r"Ray: wanted 2\.60\.\d+ on the cluster at .*, got 2\.61\.0: ", done.stderr)


def test_a_submission_without_a_stage_says_what_was_wanted() -> None:
    with pytest.raises(ConfigError, match="wanted a stage to run on the cluster, got none"):
        run(SubmitConfig(), [])


def test_a_missing_folder_cannot_be_sent() -> None:
    with pytest.raises(ConfigError, match="working_dir: wanted a folder, got absent"):
        run(SubmitConfig(working_dir="absent"), ["vocab", "--output", "/shared/vocab"])


def test_an_unknown_retry_reason_is_named() -> None:
    assert SubmitConfig(retry_on="lost,failed").reasons == ["lost", "failed"]
    with pytest.raises(ConfigError, match="retry_on: wanted one of lost, preempted, failed, got x"):
        SubmitConfig(retry_on="lost,x")


@pytest.mark.parametrize(
    ("arguments", "own", "command"),
    [
        ("prepare --config a.toml", "", "prepare --config a.toml"),
        ("--address http://h vocab --address auto", "--address http://h", "vocab --address auto"),
        ("--address=http://h:1 -- prepare -x", "--address=http://h:1", "prepare -x"),
        ("--working_dir . --help", "--working_dir . --help", ""),
        ("--retries 2 --patience=9m vocab -x", "--retries 2 --patience=9m", "vocab -x"),
        ("--allow_open_cluster vocab -x", "--allow_open_cluster", "vocab -x"),
        ("--allow_open_cluster false vocab", "--allow_open_cluster false", "vocab"),
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
