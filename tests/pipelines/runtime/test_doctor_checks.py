"""What is wrong with a machine is found, and said with the command that mends it."""

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from bert_core.errors import ResourceError
from pipelines.runtime import doctor_checks
from pipelines.runtime.nodes import FACTS, Node, compared, facts, read_nodes

HERE = facts()
GB = 10**9
WELL = replace(
    HERE,
    address="10.0.0.7",
    gpus=2,
    torch_gpus=2,
    ray_gpus=2.0,
    memory_bytes=64 * GB,
    shared_memory_bytes=20 * GB,
    object_store_bytes=19 * GB,
    disk_bytes=100 * GB,
    disk_free_bytes=6 * GB,
    exposed=(),
    ahead_s=0.2,
)


def test_this_machine_reports_its_versions() -> None:
    assert None not in [HERE.versions[name] for name in ("python", "ray", "torch", "mlflow")]
    assert HERE.sees is None
    assert not HERE.unreachable


CHECKS = doctor_checks.NODE_CHECKS | doctor_checks.BY_SSH


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_healthy_machine_passes(check: doctor_checks.NodeCheck) -> None:
    assert check(WELL, HERE)


def test_a_client_does_not_need_what_the_nodes_have() -> None:
    client = replace(HERE, versions={**HERE.versions, "torch": None, "mlflow": None})
    node = replace(HERE, versions={**HERE.versions, "torch": "2.0.1", "mlflow": "2.0"})
    assert "torch 2.0.1" in doctor_checks.check_versions(node, client)


WRONG = {
    "versions": (
        {"versions": {**HERE.versions, "torch": "2.0.1+cu118"}},
        f"got torch 2.0.1, not {(HERE.versions['torch'] or '').partition('+')[0]}: run `pip install"
        " torch==",
    ),
    "another python": (
        {"versions": {**HERE.versions, "python": "3.8.1"}},
        rf"use Python {HERE.versions['python']} there, or use the cluster's versions here",
    ),
    "no torch": (
        {"versions": {**HERE.versions, "torch": None}},
        "got torch missing, not",
    ),
    "gpus": (
        {"torch_gpus": 0},
        "wanted torch to use 2 NVIDIA GPUs, it can use 0: install torch's build for CUDA there",
    ),
    "ray's gpus": (
        {"ray_gpus": 1.0},
        "wanted Ray to give out 2 GPUs, it gives out 1: restart the node with `ray start --num-g",
    ),
    "shared memory": (
        {"shared_memory_bytes": 64 << 20},
        r"wanted 19.0 GB in /dev/shm .* got 0.1 GB: start the container with --shm-size=19.5g",
    ),
    "shared memory before Ray starts": (
        {"shared_memory_bytes": 64 << 20, "object_store_bytes": None},
        r"wanted 10.0 GB in /dev/shm .* got 0.1 GB",
    ),
    "disk": (
        {"disk_free_bytes": 4 * GB},
        r"wanted 5% of the disk with .* free, .* got 4.0 GB of 100.0 GB: free some space, or set T",
    ),
    "connections": (
        {"unreachable": ["10.0.0.8:6379"]},
        "cannot connect to 10.0.0.8:6379: start what should listen there, or open these ports",
    ),
    "key files": (
        {"exposed": ["/home/a/.ray/auth_token"]},
        "others may read /home/a/.ray/auth_token: run `chmod 600 /home/a/.ray/auth_token` there",
    ),
    "a clock ahead": (
        {"ahead_s": 3600.0},
        "its clock is 3,600 s ahead: set it by NTP with `timedatectl set-ntp true`, or correct",
    ),
    "a clock behind": ({"ahead_s": -61.0}, "its clock is 61 s behind"),
    "ports": (
        {"taken": ["8076 (process 7, nginx)"]},
        r"wanted ports for Ray, in use: 8076 \(process 7, nginx\): stop that process, or change",
    ),
}


@pytest.mark.parametrize(("changes", "wanted"), WRONG.values(), ids=WRONG)
def test_faults_are_reported_with_the_way_out(changes: dict[str, Any], wanted: str) -> None:
    wrong = []
    for check in CHECKS.values():
        try:
            check(replace(WELL, **changes), HERE)
        except ResourceError as error:
            wrong.append(str(error))
    [line] = wrong  # by one check alone
    with pytest.raises(ResourceError, match=wanted):
        raise ResourceError(line)


def test_a_build_of_torch_counts_as_its_version_and_a_job_brings_its_own_raybert() -> None:
    torch = f"{(HERE.versions['torch'] or '').partition('+')[0]}+cu999"
    versions = {**HERE.versions, "torch": torch, "raybert": None}
    assert torch in doctor_checks.check_versions(replace(WELL, versions=versions), HERE)


def test_a_clock_is_right_if_its_time_is_between_question_and_answer() -> None:
    for clock_s, ahead_s in ((100.0, 0.0), (109.0, 0.0), (95.0, -5.0), (3710.0, 3600.0)):
        assert compared(replace(WELL, clock_s=clock_s), 100.0, 110.0).ahead_s == ahead_s


def test_key_files_that_others_can_read_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (".ssh", ".ray"):
        (tmp_path / folder).mkdir()
    for name, mode in (("id_a", 0o644), ("id_a.pub", 0o644), ("id_b", 0o600)):
        (tmp_path / ".ssh" / name).touch(mode)
    key, token = tmp_path / ".ssh" / "id_a", tmp_path / ".ray" / "auth_token"
    token.touch(0o640)
    for variable in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(variable, raising=False)
    assert facts().exposed == [str(key), str(token)]
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "absent"))
    assert facts().exposed == [str(key)]  # Ray does not read the other
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    assert facts().exposed == [str(key)]


def test_a_port_in_use_is_reported_with_the_process_that_holds_it() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert facts(ports=[port]).taken == [f"{port} (process {os.getpid()}, {name_of_this()})"]
    assert facts(ports=[port]).taken == []


def name_of_this() -> str:
    return psutil.Process().name()


def test_a_file_that_a_node_cannot_see_is_reported(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    assert facts(f"{tmp_path}/there").sees is True
    node = replace(facts(f"{tmp_path}/absent"), address="10.0.0.7")
    with pytest.raises(
        ResourceError, match=r"wanted a place that all nodes share, .* \(10\.0\.0\.7\)"
    ):
        doctor_checks.check_shared(node, "/data/out")


def test_a_node_that_does_not_answer_is_named() -> None:
    node = Node(versions={}, address="10.0.0.7", problem="ModuleNotFoundError: no 'pipelines'")
    with pytest.raises(ResourceError, match=r"wanted an answer from 10\.0\.0\.7, got ModuleNotF"):
        doctor_checks.check_answered(node)


def test_a_job_that_mentions_no_nodes_has_none() -> None:
    assert read_nodes("Traceback …\n") == []
    assert read_nodes(f'noise\n{FACTS}[{{"versions": {{}}, "host": "a"}}]\n')[0].host == "a"
