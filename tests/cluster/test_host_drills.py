"""What befalls hosts: work ends as if nothing had happened, within the time that
docs/operations.md promises."""

import json
import os
import platform
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from tests.cluster.hosts import ROOT, Host
from tests.cluster.on_hosts import (
    BUCKET,
    CLIENT,
    HEAD,
    SERVE_PORT,
    SPARE,
    STORAGE,
    TRACKING,
    WORKERS,
    Cluster,
    alive,
    listens,
    serving,
    serving_key,
    wait_until,
    wait_until_whole,
)
from tests.cluster.runs import (
    CHECKPOINT_EVERY_STEPS,
    CLIENTS,
    STEPS,
    TRAINING,
    Load,
    Pretraining,
    Submitted,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3000)]

FIRST, SECOND = WORKERS
AT_STEP = 15
"""Past the first checkpoint, and in the middle of an epoch."""
STORAGE_AWAY_S = 30.0
MLFLOW_AWAY_S = 180.0
GRACE_S = 60
BAD_ENVIRONMENT_S = 12
"""How long Ray remembers that a node could not get a job's code, and a bit more."""
RESULTS = "RAYBERT_HOST_DRILLS"
"""Variable with the path of a file for the table of times."""
PATH_THERE = "export PATH=~/raybert-venv/bin:$PATH;"
ALL_OF_RAY = "ps -eo pid=,comm= | awk '$2 !~ /^(sshd|bash|sleep|ps|awk|xargs)$/ {print $1}'"
ROW = re.compile(r"^\| (?P<drill>[^|]+) \| (?P<promised_s>\d+) s \|", re.MULTILINE)


class Table:
    """How long each drill took, beside what the documentation promises."""

    def __init__(self) -> None:
        text = (ROOT / "docs" / "operations.md").read_text()
        self._promised_s = {row["drill"]: int(row["promised_s"]) for row in ROW.finditer(text)}
        self.rows: dict[str, dict[str, object]] = {}

    def add(self, drill: str, seconds: float, **more: float) -> None:
        """Raises: AssertionError if it took longer than is promised."""
        promised_s = self._promised_s[drill]
        row = {"drill": drill, "promised_s": promised_s, "measured_s": round(seconds, 1)}
        row |= {name: round(value, 1) for name, value in more.items()}
        when = datetime.now(UTC).isoformat(timespec="seconds")
        # What ran beside it, as the mean number of processes that could run.
        self.rows[drill] = row | {"when": when, "load": round(os.getloadavg()[0], 1)}
        print(json.dumps(self.rows[drill]), flush=True)
        if path := os.environ.get(RESULTS):
            self.save(Path(path))
        assert seconds <= promised_s

    def save(self, path: Path) -> None:
        """Into a file that keeps its rows of drills that were not run this time."""
        machine = {
            "cpu_count": os.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9),
        }
        machine |= {"python": platform.python_version(), "kernel": platform.release()}
        kept = json.loads(path.read_text())["drills"] if path.exists() else []
        rows = {row["drill"]: row for row in kept} | self.rows
        drills = [rows[drill] for drill in self._promised_s if drill in rows]
        path.write_text(json.dumps({"machine": machine, "drills": drills}, indent=2) + "\n")


@pytest.fixture(scope="module")
def table() -> Table:
    return Table()


@pytest.fixture(scope="module")
def with_shards(up: Cluster) -> Cluster:
    """With a vocabulary and shards in the bucket."""
    for stage in ("vocab", "prepare"):
        up.submit(stage)
    return up


@pytest.fixture
def prepared(with_shards: Cluster) -> Iterator[Cluster]:
    """With shards, and mended after a drill."""
    yield with_shards
    mend(with_shards)


def mend(cluster: Cluster) -> None:
    for host in cluster.hosts.values():
        host.mend()
    wait_until_whole(cluster)


@pytest.fixture(scope="module")
def undisturbed(with_shards: Cluster) -> Pretraining:
    """The run that others are compared with."""
    run = Pretraining(with_shards, "undisturbed")
    run.ends_well()
    run.is_whole()
    return run


def wait_until_given_up(cluster: Cluster, *names: str) -> None:
    """Until no other host is a node."""
    wait_until("a host is no node any more", lambda: alive(cluster) == {*names}, timeout_s=150)


def test_a_worker_host_that_is_cut_off_in_an_epoch_and_back_changes_nothing(
    prepared: Cluster, undisturbed: Pretraining, table: Table
) -> None:
    run = Pretraining(prepared, "cut-off")
    run.reaches(AT_STEP)
    cut = cut_off_and_back(prepared)
    run.ends_well()
    run.is_the_same_as(undisturbed)
    table.add("a silent host is given up", cut.given_up_s)
    table.add("a host that is back is a node again, by itself", cut.back_s)
    recovered_s = run.recovered_s(cut.began) - cut.given_up_s
    table.add("training after a host was given up and is back", recovered_s)


def test_the_same_on_a_link_with_200_ms_of_delay_and_5_percent_of_loss(
    prepared: Cluster, undisturbed: Pretraining, table: Table
) -> None:
    """Some steps before the cut and some after it; the rest on a mended link, to be done sooner."""
    run = Pretraining(prepared, "slow-link")
    run.reaches(CHECKPOINT_EVERY_STEPS)
    prepared[SECOND].slow_down(delay_s=0.1, loss=0.05)  # each way
    run.reaches(AT_STEP)
    cut = cut_off_and_back(prepared)
    run.reaches(run.curve[-1].step + 2, timeout_s=600)
    mend(prepared)
    run.ends_well()
    run.is_the_same_as(undisturbed)
    recovered_s = run.recovered_s(cut.began) - cut.given_up_s
    more = {"given_up_s": cut.given_up_s, "back_s": cut.back_s}
    table.add("the same, with 200 ms of delay and 5 % of loss", recovered_s, **more)


@dataclass(frozen=True)
class Cut:
    began: float
    """Seconds since 1970."""
    given_up_s: float
    back_s: float
    """From the moment that the link was up again."""


def cut_off_and_back(cluster: Cluster) -> Cut:
    """Cut a worker host off until Ray has given it up, and wait until it is a node again."""
    began = time.time()
    cluster[SECOND].unplug()
    wait_until_given_up(cluster, HEAD, FIRST)
    given_up = time.time()
    cluster[SECOND].plug()
    wait_until_whole(cluster)
    return Cut(began, given_up - began, time.time() - given_up)


def test_a_preempted_host_leaves_a_checkpoint_and_training_continues_without_it(
    prepared: Cluster, undisturbed: Pretraining, table: Table
) -> None:
    second = prepared[SECOND]
    second.run("rm -f /run/preempted")
    command = f"raybert drain --on_notice /run/preempted --grace_s {GRACE_S} --wait"
    drain = prepared.start(SECOND, f"{PATH_THERE} {command}")
    run = Pretraining(prepared, "notice", "--num_workers", "[1,2]")
    run.reaches(AT_STEP)
    noticed = time.time()
    second.run("touch /run/preempted")

    def out_of_turn() -> list[int]:
        return [step for step in run.checkpoints if step % CHECKPOINT_EVERY_STEPS]

    run.wait_until("a checkpoint is written on the notice", out_of_turn)
    checkpoint_s = time.time() - noticed
    assert "draining this node" in drain.read_text()
    second.crash()
    run.ends_well()
    run.is_whole()
    lines = (prepared.content(f"{run.output}/record/metrics.jsonl") or "").splitlines()
    workers = [each["metrics"].get("workers") for each in map(json.loads, lines)]
    assert {1, 2} <= set(workers)
    for mine, other in zip(run.curve, undisturbed.curve, strict=True):
        assert abs(mine.value - other.value) < 1e-3, mine
    table.add("a checkpoint after notice of preemption", checkpoint_s)
    table.add("training after notice, without the host", run.recovered_s(noticed))


def test_a_head_that_is_killed_and_started_again_gets_its_job_back(
    prepared: Cluster, undisturbed: Pretraining, table: Table
) -> None:
    run = Pretraining(prepared, "head", before="--retries 2")
    run.reaches(AT_STEP)
    killed = time.time()
    prepared[HEAD].run(f"{ALL_OF_RAY} | xargs kill -KILL || true")
    prepared.at_client("ray up --yes ~/onprem.yaml", timeout_s=400)
    started_s = time.time() - killed
    wait_until_whole(prepared)
    run.ends_well()
    assert "retry 1 of 2" in run.says
    run.is_the_same_as(undisturbed)
    table.add(
        "training after the head was killed and `ray up`",
        run.recovered_s(killed),
        ray_up_s=started_s,
    )


def test_a_host_that_dies_while_shards_are_written_changes_no_byte(
    prepared: Cluster, table: Table
) -> None:
    blocks = ("--block_bytes", "1024", "--pairs.dupe_factor", "30")
    Submitted(prepared, "prepare", "shards", *blocks).ends_well()
    again = Submitted(prepared, "prepare", "shards-again", *blocks)
    again.wait_for_words("encoding: ")  # the first of its blocks is done
    died = time.time()
    prepared[SECOND].crash()
    again.ends_well()
    ended_s = time.time() - died
    shards = prepared.digests(f"{BUCKET}/shards")
    assert len(shards) > 1
    assert shards == prepared.digests(f"{BUCKET}/shards-again")
    # Until then, Ray's node of before the crash would pass for the one that is started next.
    wait_until_given_up(prepared, HEAD, FIRST)
    table.add("preparation after a host has died", ended_s)


def test_a_storage_outage_of_half_a_minute_changes_nothing(
    prepared: Cluster, undisturbed: Pretraining, table: Table
) -> None:
    run = Pretraining(prepared, "storage")
    run.reaches(AT_STEP)
    away = time.time()
    prepared[STORAGE].unplug()
    time.sleep(STORAGE_AWAY_S)
    prepared[STORAGE].plug()
    run.ends_well()
    run.is_the_same_as(undisturbed)
    table.add(
        "training after 30 s without storage", max(0.0, run.recovered_s(away) - STORAGE_AWAY_S)
    )


def test_a_run_ends_without_mlflow_and_its_curve_is_sent_by_the_same_command_later(
    prepared: Cluster, undisturbed: Pretraining, table: Table
) -> None:
    """What is kept is a file, so that minutes stand for hours."""
    run = Pretraining(prepared, "mlflow")
    run.reaches(AT_STEP)
    away = time.time()
    prepared[TRACKING].unplug()
    run.ends_well()
    ended_s = time.time() - away
    time.sleep(max(0.0, MLFLOW_AWAY_S - ended_s))
    prepared[TRACKING].plug()
    assert len(run.curve) < STEPS
    back = time.time()
    config = f"--config ~/configs/pretrain.toml --output {BUCKET}/mlflow"
    said = prepared.at_client(f"raybert pretrain {config} {' '.join(TRAINING)}")
    assert "already exists, made with the same settings: skipped" in said
    run.is_the_same_as(undisturbed)
    table.add("the end of a run without MLflow", ended_s, away_s=back - away)
    table.add("its curve, once MLflow is back", time.time() - back)


def test_a_host_that_dies_under_load_loses_only_its_requests_in_progress(
    prepared: Cluster, table: Table
) -> None:
    """Of those that ask another host, which still has connections to replicas on the dead one."""
    key = serving_key(prepared)
    with serving(prepared):
        load = Load(prepared, key, *WORKERS)
        time.sleep(5)
        prepared[SECOND].unplug()
        died = time.time()  # what is sent from now on is lost by nobody
        prepared[SECOND].crash()
        load.send_to(FIRST)
        wait_until_given_up(prepared, HEAD, FIRST)
        wait_until("there are two replicas again", lambda: replicas(prepared) == 2)
        again_s = time.time() - died
        time.sleep(5)
        answers = load.end()
    others = [each for each in answers if each.host == FIRST]
    lost = [each for each in others if each.status != "200"]
    assert len(lost) <= CLIENTS
    assert all(each.began < died for each in lost), (died, lost)
    slowest_s = max(each.ended - each.began for each in others if each.status == "200")
    table.add("the slowest answer of another host after one has died", slowest_s, lost=len(lost))
    table.add("two replicas after a host has died", again_s)


def replicas(cluster: Cluster, *names: str) -> int:
    """How many run, on hosts that are nodes."""
    names = names or tuple(alive(cluster) - {HEAD})
    listed = [cluster[name].run("ps -eo args") for name in names]
    return sum(each.count("ServeReplica:model-docstrings") for each in listed)


def test_all_hosts_are_restarted_under_load_without_a_lost_request(
    prepared: Cluster, table: Table
) -> None:
    """One after the other, as for an upgrade: drained, out of the load balancer, stopped."""
    key = serving_key(prepared)
    with serving(prepared):
        load, began = Load(prepared, key, *WORKERS), time.time()
        for name in WORKERS:
            host, [other] = prepared[name], set(WORKERS) - {name}
            drain = prepared.start(name, f"{PATH_THERE} raybert drain --grace_s 300 --wait")
            wait_until("it is drained", lambda: "gets no new work" in drain.read_text())  # noqa: B023
            # A host without a replica has no proxy, and gets its first one now.
            ready = f"http://{other}:{SERVE_PORT}/readyz"
            wait_until(f"{other} is ready", lambda: prepared.get(ready))  # noqa: B023
            load.send_to(other)
            time.sleep(1)  # for requests in progress
            wait_until(f"{other} has all replicas", lambda: replicas(prepared, other) == 2)  # noqa: B023
            host.run(f"{PATH_THERE} ray stop")
            wait_until_given_up(prepared, HEAD, other)
            wait_until_whole(prepared)
        ended_s = time.time() - began
        time.sleep(2)
        answers = load.end()
    print([each for each in answers if each.status != "200"])
    assert {each.status for each in answers} == {"200"}
    assert len(answers) > 100
    table.add("a host started anew under load", ended_s / len(WORKERS), requests=len(answers))


FAKETIME = "$(find /usr/lib -name libfaketime.so.1)"
SLEEP = "monotonic_sleep"
HOUR = f'LD_PRELOAD="$HOME/{SLEEP}.so {FAKETIME}" FAKETIME=+1h FAKETIME_DONT_FAKE_MONOTONIC=1'


def set_clock_an_hour_ahead(host: Host) -> None:
    """For whatever is started there from now on."""
    host.run(f"test -e {FAKETIME}")
    host.run(f"cc -shared -fPIC -o ~/{SLEEP}.so {ROOT}/tests/cluster/{SLEEP}.c")
    host.write("~/.bashrc", f"{host.run('cat ~/.bashrc')}\nexport {HOUR}\n")


def test_a_clock_that_is_an_hour_off_is_named_and_breaks_nothing(
    prepared: Cluster, undisturbed: Pretraining, table: Table
) -> None:
    second = prepared[SECOND]
    bashrc = second.run("cat ~/.bashrc")
    set_clock_an_hour_ahead(second)
    try:
        start_ray_anew(prepared, second)
        asked = time.time()
        told = prepared.doctor("--address http://localhost:8265")
        assert re.search(rf"WRONG +clock +{SECOND} .* its clock is 3,6\d\d s ahead: set it", told)
        table.add("the doctor names what is wrong with nodes", time.time() - asked)
        run = Pretraining(prepared, "clock")
        run.ends_well()
        run.is_the_same_as(undisturbed)
    finally:
        second.write("~/.bashrc", bashrc)
        start_ray_anew(prepared, second)


def start_ray_anew(cluster: Cluster, host: Host) -> None:
    """End it on a worker host, and wait until the head has started it again."""
    host.crash()
    wait_until_given_up(cluster, *({HEAD, *WORKERS} - {host.name}))
    host.mend()
    wait_until_whole(cluster)


def test_a_host_with_a_full_disk_is_named(prepared: Cluster, table: Table) -> None:
    second = prepared[SECOND]
    # So much that the 5 % that Ray wants free have room for what a job brings.
    second.run("head -c 400M /dev/zero > /tmp/filler")
    used_kb = int(second.run("df --output=used /tmp | tail -1"))
    second.run(f"mount -o remount,size={used_kb + 16384}k /tmp")
    try:
        told = prepared.doctor("--address http://localhost:8265")
        assert re.search(rf"WRONG +disk +{SECOND} .* got 0.0 GB of", told), told
        second.run("cat /dev/zero > /tmp/rest || true")
        asked = time.time()
        refused = prepared.fails(prepared.submission("pretrain", *TRAINING, output="full"))
        refused_s = time.time() - asked
        name = rf"wanted an answer from {SECOND} \({second.address}\), got "
        # Its process may end before it can say why; the doctor has said it.
        why = "(No space left on device|WorkerCrashedError: .*)"
        wanted = f"{name}.*{why}: see `raybert doctor"
        assert re.search(wanted, refused), refused
        table.add("a job names the host whose disk is full", refused_s)
    finally:
        second.run("rm -f /tmp/filler /tmp/rest; mount -o remount,size=8g /tmp")
        time.sleep(BAD_ENVIRONMENT_S)


def test_faults_of_a_host_are_named_before_ray_is_started_there(
    cluster: Cluster, table: Table
) -> None:
    """Everything at once, on a host that is not yet part of the cluster, and one that is away."""
    spare = cluster.network.boot(SPARE, disk="256m", shared_memory="64m")
    packages = "$(readlink -f ~/raybert-venv)/lib/python3*/site-packages"
    spare.run(f"sed -i 's/^Version: .*/Version: 2.9.0/' {packages}/ray-*.dist-info/METADATA")
    spare.run("ray_token=~/.ray/auth_token; mkdir ~/.ray; touch $ray_token; chmod 644 $ray_token")
    set_clock_an_hour_ahead(spare)
    cluster.start(SPARE, "python3 -m http.server 8076")
    listens(cluster, SPARE, 8076)
    free_kb = int(spare.run("df --output=avail /tmp | tail -1"))
    spare.run(f"head -c {(free_kb - 1024) * 1024} /dev/zero > /tmp/full")
    text = cluster[CLIENT].run("cat ~/onprem.yaml")
    addresses = cluster.network.addresses
    hosts = f"[{addresses[SPARE]}, 192.0.2.99]"
    cluster[CLIENT].write("~/spare.yaml", re.sub(r"(worker_ips:).*", rf"\1 {hosts}", text))
    asked = time.time()
    told = cluster.doctor("--hosts ~/spare.yaml")
    table.add("the doctor names what is wrong with hosts, by ssh", time.time() - asked)
    spare_is = rf"{SPARE} \({addresses[SPARE]}\): "
    for check, wrong in (
        ("node", r"wanted an answer from 192.0.2.99, got ssh: .*: start the host and its sshd"),
        ("versions", rf"{spare_is}wanted the versions of this machine, got ray 2.9.0, not "),
        ("shared memory", rf"{spare_is}wanted .* in /dev/shm for Ray's object store, got 0.1 GB"),
        ("disk", rf"{spare_is}wanted 5% of the disk with /tmp free"),
        (
            "key files",
            rf"{spare_is}wanted key files that only their owner reads, .*/auth_token: run",
        ),
        ("clock", rf"{spare_is}.* its clock is 3,6\d\d s ahead"),
        ("ports", rf"{spare_is}wanted ports for Ray, in use: 8076 \(process \d+, python3"),
    ):
        assert re.search(rf"^WRONG +{check} +.*{wrong}", told, re.MULTILINE), (check, told)
    of_head = rf"{HEAD} \({addresses[HEAD]}\)"
    assert not re.search(rf"^WRONG .*{of_head}", told, re.MULTILINE), told
