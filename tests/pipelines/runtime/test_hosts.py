"""The hosts of a launcher's file are asked by ssh: those that answer are in `tests/cluster`."""

import re
from pathlib import Path

import pytest

from bert_core.errors import ConfigError
from pipelines.runtime.hosts import Hosts

ROOT = Path(__file__).parents[3]


def test_the_shipped_file_says_who_its_hosts_are_and_what_listens_there() -> None:
    assert Hosts.read(str(ROOT / "deploy" / "onprem.yaml")) == Hosts(
        head="192.0.2.10",
        workers=("192.0.2.11", "192.0.2.12"),
        user="ubuntu",
        key=None,
        head_ports=(6379, 8076),
        worker_ports=(8076,),
    )


@pytest.mark.parametrize("name", ["cluster.yaml", "README.md", "absent.yaml"])
def test_another_file_is_refused(name: str) -> None:
    path = str(ROOT / name)
    wanted = f"wanted a file for `ray up` with provider local, .* got {re.escape(path)} "
    with pytest.raises(ConfigError, match=wanted):
        Hosts.read(path)


def test_a_host_without_a_name_or_without_ssh_is_reported(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "onprem.yaml").read_text()
    path = tmp_path / "onprem.yaml"
    path.write_text(text.replace("192.0.2.", "127.0.0.1:"))  # no address
    nodes = list(Hosts.read(str(path)).ask())
    assert [node.address for node in nodes] == ["127.0.0.1:10", "127.0.0.1:11", "127.0.0.1:12"]
    assert all(node.problem.startswith("ssh: ") for node in nodes)
