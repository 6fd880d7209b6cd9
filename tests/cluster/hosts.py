"""Hosts on this one machine, for `ray up` and for what may befall real ones.

A host is a process in namespaces of its own: network, processes, mounts, IPC and name. It sees this
machine's files, and what it writes is its own, on a disk of a given size (an overlay on a tmpfs).
The hosts share a bridge, which is in a namespace of its own too, so that nothing of this machine is
changed and the kernel removes everything when the processes have ended.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from tests import processes

ROOT = Path(__file__).parent.parent.parent
SLOW_LINK = Path(__file__).parent / "slow_link.py"
PACKAGES = "RAYBERT_TEST_PACKAGES"
"""Variable with a folder of Debian packages that hosts have and this machine has not."""
PROGRAMS = ("ip", "unshare", "nsenter", "pivot_root", "sshd", "rsync", "ssh-keygen")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USER = "raybert"
"""Whoever logs in: the superuser by another name, since the environment of this machine, which may
be in a folder that only the superuser reads, is theirs as well."""
HOME = f"/home/{USER}"

SWITCH = """
set -eu
ip link add bridge type bridge
ip link set bridge up
echo up
exec cat
"""

# NOTE: the host lives as long as its standard input: it ends with the tests, however they end.
HOST = """
set -eu
mount -t tmpfs -o size=$DISK tmpfs "$STATE"
cd "$STATE"
mkdir upper work venv venv-work root tmp
mount -t overlay -o "lowerdir=/,upperdir=$PWD/upper,workdir=$PWD/work" overlay root
chmod 1777 tmp
mount --bind tmp root/tmp
mount -t tmpfs -o size=64m tmpfs root/run
mkdir -p "root$CHECKOUT" "root$VENV" root/run/sshd
mount --bind -o ro "$CHECKOUT" "root$CHECKOUT"
mount -t overlay -o "lowerdir=$VENV,upperdir=$PWD/venv,workdir=$PWD/venv-work" overlay "root$VENV"
mount --rbind /dev root/dev
mount --rbind /sys root/sys
mount -t proc proc root/proc
mount -t tmpfs -o size=$SHARED_MEMORY tmpfs root/dev/shm
mkdir -p root/mnt/machine
for package in $PACKAGES_FOLDER/*.deb; do
    test -e "$package" || continue
    dpkg-deb --fsys-tarfile "$package" | tar --extract --keep-directory-symlink --directory root
done
cd root
pivot_root . mnt/machine
cd /
umount --lazy /mnt/machine

hostname "$NAME"
echo "$HOSTS" > /etc/hosts
: > /etc/resolv.conf
sed -i "1i $LOGIN:x:0:0::$HOME:/bin/bash" /etc/passwd
grep -q ^sshd: /etc/passwd || echo sshd:x:199:65534::/run/sshd:/usr/sbin/nologin >> /etc/passwd
mkdir -p "$HOME/.ssh" "$HOME/.config/pip"
echo "$KEY" > "$HOME/.ssh/authorized_keys"
# There is no internet: what is to be installed is here.
ln -s "$VENV" "$HOME/raybert-venv"
printf '[install]\\nno-index = true\\nno-build-isolation = false\\n' > "$HOME/.config/pip/pip.conf"
echo "$VARIABLES" > "$HOME/.bashrc"
echo '. ~/.bashrc' > "$HOME/.profile"
ip link set lo up
ip addr add "$ADDRESS/24" dev eth0
ip link set eth0 up
ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/host_key
$SSHD
echo up
while read -r; do :; done  # a builtin: no other process is needed for the host to stay
exit  # so that the first process stays bash, which waits for orphans
"""
SSHD = """
"$(command -v sshd)" -f /dev/null -h /etc/ssh/host_key -o UsePAM=no -o StrictModes=no \\
    -o MaxStartups=100 -o PermitRootLogin=yes -E /var/log/sshd
"""


def missing() -> str | None:
    """What this machine lacks for hosts, and how to get it."""
    if os.geteuid() != 0:
        return "wanted the superuser, who makes namespaces: run it with sudo"
    packages = os.environ.get(PACKAGES)
    of_packages = ("sshd", "rsync") if packages else ()
    lacks = [each for each in PROGRAMS if each not in of_packages and not _program(each)]
    if lacks:
        return (
            f"wanted {', '.join(lacks)}: install iproute2, util-linux, openssh-server and rsync, "
            f"or set {PACKAGES} to a folder with their Debian packages"
        )
    command = ["unshare", "--mount", "--net", "--pid", "--fork", "ip", "link", "set", "lo", "up"]
    done = subprocess.run(command, capture_output=True, text=True)
    return f"cannot make namespaces: {done.stderr.strip()}" if done.returncode else None


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:{PATH}")


class Network:
    """A bridge that hosts are plugged into."""

    def __init__(self, folder: Path, addresses: dict[str, str], key: str, variables: str) -> None:
        """
        Args:
            addresses: of the hosts, by their names.
            key: public key of whoever may log in.
            variables: lines of the `~/.bashrc` of every host.
        """
        self.folder = folder
        self.addresses = addresses
        self.key = key
        self.variables = variables
        self.hosts: list[Host] = []
        self._process = _start(("unshare", "--net"), SWITCH, {"PATH": PATH}, folder / "switch.log")
        _await_up(self._process, folder / "switch.log")

    def boot(self, name: str, *, disk: str = "8g", shared_memory: str = "16g") -> "Host":
        """Start a host: an empty disk, an empty home, and sshd."""
        host = Host(self, name, disk, shared_memory)
        self.hosts.append(host)
        host.wait_until_up()
        return host

    @property
    def enter(self) -> tuple[str, str]:
        """The command that runs another in the namespace of the bridge."""
        return "nsenter", f"--net=/proc/{self._process.pid}/ns/net"

    def ip(self, *arguments: str) -> None:
        """Run `ip` in the namespace of the bridge."""
        subprocess.run([*self.enter, "ip", *arguments], check=True)

    def end(self) -> None:
        for host in self.hosts:
            host.end()
        _end(self._process)


class Host:
    """A host that boots."""

    def __init__(self, network: Network, name: str, disk: str, shared_memory: str) -> None:
        self.network, self.name = network, name
        self.address = network.addresses[name]
        self._started: list[subprocess.Popen[bytes]] = []
        self._port = f"{name}-{len(network.hosts)}"  # a name of its own after a reboot
        self._uplink = self._port  # what is connected to the bridge
        self._slow_link: subprocess.Popen[bytes] | None = None
        state = network.folder / self._port
        state.mkdir()
        self._log = network.folder / f"{self._port}.log"
        environment = {
            "NAME": name,
            "ADDRESS": self.address,
            "STATE": str(state),
            "DISK": disk,
            "SHARED_MEMORY": shared_memory,
            "CHECKOUT": str(ROOT),
            "VENV": sys.prefix,
            "PACKAGES_FOLDER": os.environ.get(PACKAGES, "/nonexistent"),
            "HOSTS": "127.0.0.1 localhost\n"
            + "\n".join(f"{each} {host}" for host, each in network.addresses.items()),
            "LOGIN": USER,
            "HOME": HOME,
            "KEY": network.key,
            "VARIABLES": network.variables,
            "PATH": PATH,
        }
        namespaces = ("--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
        # The network comes from outside, so the script waits for it.
        up = HOST.replace("$SSHD", SSHD)
        script = f"until ip link show eth0 > /dev/null 2>&1; do sleep 0.05; done\n{up}"
        self._process = _start(("unshare", *namespaces), script, environment, self._log)
        while not (children := psutil.Process(self._process.pid).children()):
            time.sleep(0.01)
        self._init = children[0].pid
        network.ip(
            *("link", "add", self._port, "type", "veth"),
            *("peer", "name", "eth0", "netns", str(self._init)),
        )
        network.ip("link", "set", self._port, "up")
        self.plug()

    def wait_until_up(self) -> None:
        _await_up(self._process, self._log)

    def plug(self) -> None:
        """Connect it to the bridge."""
        self.network.ip("link", "set", self._uplink, "master", "bridge")

    def unplug(self) -> None:
        """Silence: no packet comes or goes, and no connection is closed."""
        self.network.ip("link", "set", self._uplink, "nomaster")

    def slow_down(self, *, delay_s: float, loss: float) -> None:
        """Frames from it and to it come late, and a share of them never, until it is mended."""
        far, near = f"{self._port}-far", f"{self._port}-by"
        self.network.ip("link", "add", far, "type", "veth", "peer", "name", near)
        for end in (far, near):
            self.network.ip("link", "set", end, "up")
        self.unplug()
        log = self.network.folder / f"{self._port}-link.log"
        relay = f"exec {sys.executable} {SLOW_LINK} {self._port} {near} {delay_s} {loss} 0"
        self._slow_link = _start(self.network.enter, relay, {"PATH": PATH}, log)
        _await_up(self._slow_link, log)
        self._uplink = far
        self.plug()

    def crash(self) -> None:
        """End all of its processes, with nothing said to other hosts; its disk stays."""
        self.unplug()
        with suppress(AssertionError):  # the shell is one of them
            self.run("kill -KILL -1")

    def mend(self) -> None:
        """Bring it back, whatever has befallen it."""
        if "sshd" not in self.run("ps -eo comm"):
            self.run(f"rm -rf /dev/shm/*\n{SSHD}")
        if self._slow_link is not None:
            _end(self._slow_link)
            self.network.ip("link", "delete", self._uplink)
            self._slow_link, self._uplink = None, self._port
        self.plug()

    def end(self) -> None:
        """End all of its processes."""
        if self._slow_link is not None:
            _end(self._slow_link)
        _end(self._process)
        for process in self._started:
            process.wait()

    def command(self, script: str) -> list[str]:
        """What runs a line of bash on it, with the environment of a login."""
        entry = ["nsenter", "--target", str(self._init), "--all"]
        login = ["env", "--ignore-environment", f"HOME={HOME}", f"USER={USER}", f"PATH={PATH}"]
        return [*entry, *login, "bash", "--login", "-c", f"cd; {script}"]

    def run(self, script: str, *, timeout_s: float = 120.0) -> str:
        """What a line of bash prints. Raises: AssertionError if it fails."""
        done = subprocess.run(
            self.command(script),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{self.name}: {script}: {done.stdout}"
        return done.stdout

    def start(self, script: str, says: Path) -> "subprocess.Popen[bytes]":
        """Start a line of bash, with what it prints in a file of this machine."""
        command = self.command(script)
        self._started.append(processes.start(command, says, stdin=subprocess.DEVNULL))
        return self._started[-1]

    def write(self, path: str, text: str) -> None:
        """Write a file on it."""
        script = f"mkdir -p $(dirname {path}) && cat > {path}"
        subprocess.run(self.command(script), input=text, text=True, check=True)


@contextmanager
def running_network(
    folder: Path, names: Sequence[str], variables: str
) -> Iterator[tuple[Network, str]]:
    """A network whose hosts all let in one private key, which comes with it."""
    key = folder / "id_ed25519"
    make = [str(_program("ssh-keygen")), "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
    subprocess.run(make, check=True)
    addresses = {name: f"192.0.2.{10 + place}" for place, name in enumerate(names)}
    network = Network(folder, addresses, key.with_suffix(".pub").read_text().strip(), variables)
    try:
        yield network, key.read_text()
    finally:
        network.end()


def _start(
    within: Sequence[str], script: str, environment: dict[str, str], log: Path
) -> "subprocess.Popen[bytes]":
    with log.open("wb") as output:
        return subprocess.Popen(
            [*within, "bash", "-c", script],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
        )


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with process:  # closes its pipes, and waits
        pass


def _await_up(process: "subprocess.Popen[bytes]", log: Path) -> None:
    assert process.stdout is not None
    output: IO[bytes] = process.stdout
    assert output.readline() == b"up\n", f"did not boot: {log.read_text()}"
