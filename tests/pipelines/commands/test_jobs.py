"""Jobs are found again, followed over a broken connection, listed and stopped, on a cluster."""

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from bert_core.errors import ConfigError
from pipelines.commands.jobs import JobsConfig
from tests import processes
from tests.commands import raybert
from tests.tcp_proxy import Proxy
from tests.waiting import wait_for_words, wait_until

ROOT = Path(__file__).parents[3]
WITHIN_S = 120.0


def ask(head: Any, method: str, path: str, **arguments: Any) -> Any:
    """Ask the job server directly."""
    url = f"{head.environment['RAY_API_SERVER_ADDRESS']}{path}"
    token = {"Authorization": f"Bearer {head.environment['RAY_AUTH_TOKEN']}"}
    answer = httpx.request(method, url, headers=token, timeout=60, **arguments)
    assert answer.is_success, answer.text
    return answer.json() if answer.content else None


def start(head: Any, name: str, *words: str, **runtime_env: Any) -> None:
    """Start a job as `ray job submit` does."""
    entrypoint = shlex.join(words)
    request = {"submission_id": name, "entrypoint": entrypoint, "runtime_env": runtime_env}
    ask(head, "POST", "/api/jobs/", json=request)


def log_of_success(head: Any, name: str) -> str:
    """What a job printed that ends well."""
    ended = ("SUCCEEDED", "FAILED", "STOPPED")
    wait_until(
        f"{name} has ended",
        lambda: ask(head, "GET", f"/api/jobs/{name}")["status"] in ended,
        timeout_s=WITHIN_S,
    )
    log = ask(head, "GET", f"/api/jobs/{name}/logs")["logs"]
    assert ask(head, "GET", f"/api/jobs/{name}")["status"] == "SUCCEEDED", log
    return log


def launch(head: Any, says: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    """A client that runs in the background; what it says goes to a file."""
    return processes.start(raybert(*arguments), says, env=head.environment, cwd=ROOT)


LINES = 60
COUNTS = f"""
import time
for i in range({LINES}):
    print("line", i, "ü" * (i % 7))
    time.sleep(0.05)
"""


@pytest.mark.guard
def test_a_broken_stream_resumes_without_losing_or_repeating_a_line(
    head: Any, tmp_path: Path
) -> None:
    start(head, "raybert-count-0123456789ab", "python", "-u", "-c", COUNTS)
    says = tmp_path / "says.txt"
    with Proxy(head.ports["dashboard-port"]) as proxy:
        process = launch(head, says, "jobs", "attach", "raybert-count-0123456789ab",
                         "--address", proxy.url)  # fmt: skip
        for last in (10, 25, 40):
            wait_for_words(f"\nline {last} ", says, timeout_s=WITHIN_S)
            proxy.cut()
            if last == 25:
                wait_for_words("does not answer", says, timeout_s=WITHIN_S)
            proxy.restore()
        assert process.wait(timeout=120) == 0
    output = says.read_text()
    assert re.findall(r"^line (\d+) ", output, re.M) == [str(i) for i in range(LINES)], output
    assert "succeeded, exit code 0" in output
    away, back = output.count("does not answer"), output.count("is back")
    assert away == back >= 1


@pytest.mark.guard
def test_ctrl_c_leaves_the_job_running_and_says_what_to_do(head: Any, tmp_path: Path) -> None:
    name = "raybert-wait-0123456789ab"
    code = "import time; print('begun'); time.sleep(300)"
    start(head, name, "python", "-u", "-c", code)
    says = tmp_path / "says.txt"
    process = launch(head, says, "jobs", "attach", name)
    wait_for_words("\nbegun", says, timeout_s=WITHIN_S)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert f"`raybert jobs attach {name}` shows it again" in says.read_text()
    assert ask(head, "GET", f"/api/jobs/{name}")["status"] == "RUNNING"

    stopped = head.raybert("jobs", "stop", name)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert re.search(f"job {name} stopped after \\d+ s", stopped.stdout)
    assert "begun" not in stopped.stdout  # that was before
    again = head.raybert("jobs", "stop", name)
    assert f"job {name} has already ended: stopped" in again.stdout


@pytest.mark.guard
def test_submitting_again_finds_the_job(head: Any, tmp_path: Path) -> None:
    (tmp_path / "vocab.toml").write_text("vocab_size = 100\n[corpus]\nheld_out_share = 0.1\n")
    text, output = tmp_path / "text.txt", tmp_path / "vocab"
    submit = ["submit", "vocab", "--config", f"{tmp_path}/vocab.toml", "--num_workers=0",
              f"--corpus.source={text}", f"--output={output}",
              f"--tracking_uri=sqlite:///{tmp_path}/mlflow.db"]  # fmt: skip
    with Proxy(head.ports["dashboard-port"]) as proxy:
        submit[1:1] = ["--address", proxy.url]
        failed = head.raybert(*submit)
        assert failed.returncode == 1, failed.stdout + failed.stderr
        assert "text.txt: wanted a file" in failed.stdout
        assert "failed, exit code 1" in failed.stdout
        [job_id] = set(re.findall(r"job (raybert-vocab-[0-9a-f]{12}) at", failed.stdout))
        proxy.sent_bytes = 0

        text.write_text("\n\n".join(f"A sentence, {i}." for i in range(50)))
        done = head.raybert(*submit)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"job {job_id} failed before: this is attempt 2" in done.stdout
        assert f"job {job_id}-2 succeeded, exit code 0" in done.stdout
        assert proxy.sent_bytes < 100_000, "the code, half a megabyte, is there"

    # All attempts are on record: at the job server, and with the output.
    listed = head.raybert("jobs", COLUMNS="300").stdout
    [row] = [line for line in listed.splitlines() if line.startswith(job_id)]
    assert re.search(rf"^{job_id} +vocab +succeeded .* +2 +0 +{output} *$", row), listed
    assert "wanted a file" in head.raybert("jobs", "logs", f"{job_id}-1").stdout
    assert "wanted a file" not in head.raybert("jobs", "logs", job_id).stdout
    [log] = output.glob(f"logs/*-{job_id}-2/driver.log")
    assert log.read_text() in head.raybert("jobs", "logs", f"{job_id}-2").stdout
    job = ask(head, "GET", f"/api/jobs/{job_id}-2")
    told, sent = job["metadata"], job["runtime_env"]
    assert (told["stage"], told["output"], told["attempt"]) == ("vocab", str(output), "2")

    # What was sent is what ran, before whatever is installed there; all else is the environment
    # that the cluster was started in, and nothing is installed for a job.
    assert re.fullmatch(r"gcs://raybert-[0-9a-f]{16}\.zip", told["code"])
    assert sent.keys() == {"env_vars", "py_modules", "working_dir"}
    code = (
        "import pipelines, sys, importlib.metadata as m; "
        "print(pipelines.__file__, m.version('raybert'), sys.prefix)"
    )
    start(head, "where", "python", "-c", code, py_modules=[told["code"]])
    where = log_of_success(head, "where")
    assert re.search(
        rf"/py_modules_files/raybert-\w+/pipelines/__init__.py 0\.\S* {sys.prefix}$", where, re.M
    ), where

    unknown = head.raybert("jobs", "attach", f"{job_id[:-1]}x")
    assert unknown.returncode == 2
    assert f"(did you mean {job_id}" in unknown.stderr
    assert json.loads((output / "manifest.json").read_text())["stage"] == "vocab"

    made = (output / "manifest.json").read_bytes()
    text.write_text("\n\n".join(f"Another sentence, {i}." for i in range(60)))
    changed = head.raybert("submit", *submit[3:])
    assert changed.returncode == 2, "the output was made from the file as it was"
    assert f"job {job_id}-2 succeeded before: this is attempt 3" in changed.stdout
    assert f"{output} holds a finished `vocab`" in changed.stdout
    assert (output / "manifest.json").read_bytes() == made


@pytest.mark.drill
def test_a_stage_that_ray_job_submit_starts_keeps_its_log_too(head: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"A sentence, {i}." for i in range(50)))
    start(head, "plain", "raybert", "vocab", f"--corpus.source={tmp_path}/text.txt",
          "--vocab_size=100", "--num_workers=1", f"--output={tmp_path}/vocab",
          f"--tracking_uri=sqlite:///{tmp_path}/mlflow.db")  # fmt: skip
    log = log_of_success(head, "plain")
    [copy] = (tmp_path / "vocab" / "logs").glob("*-plain/driver.log")
    assert copy.read_text() in log
    of_workers = copy.parent.glob("*.*.*.*/worker-*.err")
    assert list(of_workers), "a folder for each node"


def test_an_action_on_a_job_needs_its_id() -> None:
    with pytest.raises(ConfigError, match="job: wanted the id of a job after logs, attach or stop"):
        JobsConfig(action="stop")
    with pytest.raises(ConfigError, match="got raybert-x with list"):
        JobsConfig(job="raybert-x")
