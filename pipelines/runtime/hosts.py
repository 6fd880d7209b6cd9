"""Asks the hosts in a Ray cluster launcher's file by ssh, before `ray up` or after it has
failed."""

import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from bert_core.errors import ConfigError
from bert_core.wording import last_line
from pipelines.runtime import nodes
from pipelines.runtime.nodes import Node, compared, read_nodes

CONNECT_TIMEOUT_S = 10
ANSWER_TIMEOUT_S = 40.0
AT_ONCE = 32
PORT = re.compile(r"--[a-z-]*port[= ](\d+)")
PYTHON = "$(ls ~/raybert-venv/bin/python 2> /dev/null || echo python3)"
NEEDED = """
import sys
if sys.version_info < (3, 11):
    sys.exit("wanted Python 3.11 or newer, got " + sys.version.split()[0])
"""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts that the launcher's file describes."""

    head: str
    workers: tuple[str, ...]
    user: str
    key: str | None
    head_ports: tuple[int, ...]
    """That Ray is to listen on there; the job server's is not known from outside."""
    worker_ports: tuple[int, ...]

    @classmethod
    def read(cls, path: str) -> "Hosts":
        """Read a launcher's file. Raises: ConfigError if it does not describe a cluster of the
        user's own machines."""
        try:
            config: Any = yaml.safe_load(Path(path).read_text())
            provider, login = config["provider"], config["auth"]
            return cls(
                head=provider["head_ip"],
                workers=tuple(provider["worker_ips"]),
                user=login["ssh_user"],
                key=login.get("ssh_private_key"),
                head_ports=_ports(config["head_start_ray_commands"]),
                worker_ports=_ports(config["worker_start_ray_commands"]),
            )
        except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
            raise ConfigError(
                f"hosts: wanted a file for `ray up` with provider local, such as "
                f"deploy/onprem.yaml, got {path} ({type(error).__name__}: {error})"
            ) from error

    def ask(self) -> Iterator[Node]:
        """Ask all hosts at the same time; yield them with the head first."""
        ports = {self.head: self.head_ports} | dict.fromkeys(self.workers, self.worker_ports)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            yield from pool.map(self._ask, ports, ports.values())

    def _ask(self, address: str, ports: tuple[int, ...]) -> Node:
        login = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}"]
        # Accept unknown host keys, as Ray's launcher does.
        login += ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
        login += ["-o", "LogLevel=ERROR"]
        if self.key is not None:
            login += ["-i", str(Path(self.key).expanduser())]
        there = f"{PYTHON} - {shlex.join([nodes.ALONE, *map(str, ports)])}"
        asked_s = time.time()
        try:
            done = subprocess.run(
                ["ssh", *login, f"{self.user}@{address}", there],
                input=NEEDED + Path(nodes.__file__).read_text(),
                capture_output=True,
                text=True,
                timeout=ANSWER_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return Node(versions={}, address=address, problem=f"ssh: {error}")
        answered = read_nodes(done.stdout)
        if not answered:
            reason = last_line(done.stderr or done.stdout) or "no answer"
            return Node(versions={}, address=address, problem=f"ssh: {reason}")
        node = compared(answered[0], asked_s, time.time())
        if node.versions["ray"] is None:  # the launcher has not installed it yet
            node = replace(node, versions={"python": node.versions["python"]})
        return replace(node, address=address)


def _ports(commands: list[str]) -> tuple[int, ...]:
    return tuple(sorted({int(port) for command in commands for port in PORT.findall(command)}))
