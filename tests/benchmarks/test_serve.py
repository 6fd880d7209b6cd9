"""What the benchmark of servers asks, how it finds the rate that one bears, and what it starts."""

import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from benchmarks import served
from benchmarks.loops import highest_rate, p99_of, shown
from benchmarks.servers import ServerError, running
from bert_core.inference.predictor import Predictor
from pipelines.commands.load import OK, Measured
from tests import tiny
from tracking.store.ports import free_ports


@pytest.mark.parametrize("borne", [3.0, 40.0, 97.0])
def test_the_sustained_rate_is_found_within_a_fraction_of_the_maximum(borne: float) -> None:
    asked: list[float] = []

    def p99_at(per_s: float) -> float:
        asked.append(per_s)
        return 20.0 if per_s <= borne else 5_000.0

    found = highest_rate(p99_at, 100.0, tries=6)
    assert found <= borne < found + 100.0 / 2**6
    assert len(asked) == 6


def test_a_server_that_is_always_late_sustains_no_rate() -> None:
    assert highest_rate(lambda per_s: math.nan, 100.0) == 0.0


def test_a_loop_with_a_failed_request_is_not_within_any_limit() -> None:
    answered = Measured(latencies_ms=[1.0, 3.0], outcomes=Counter({OK: 2}), duration_s=2.0)
    refused = Measured(latencies_ms=[1.0], outcomes=Counter({OK: 1, "429": 1}), duration_s=2.0)
    assert p99_of(answered) == pytest.approx(2.98)
    assert p99_of(refused) == math.inf
    assert "failed" not in shown(answered)
    assert shown(refused)["failed"] == {"429": 1}
    assert shown(refused)["answers_per_s"] == 0.5


def test_texts_are_those_that_are_read_whole(tmp_path: Path) -> None:
    task = served.TextClassification(["good", "bad"])
    tokenizer = tiny.tokenizer()
    config = tiny.encoder_config(tokenizer.vocab_size, max_position_embeddings=512)
    predictor = Predictor(tiny.bundle(tmp_path / "bundle", tokenizer, config, task=task))
    fits, too_long = "the sea " * 127, "the sea " * 128
    far_too_long = "the sea " * 300
    given = served.texts(["the sea", too_long, far_too_long, fits], predictor)
    assert given.inputs == ["the sea", fits]
    assert given.tokens == [4, served.LONGEST]
    assert given.settings == {"texts": 2, "mean_tokens": 130.0, "longest_tokens": served.LONGEST}


def test_sentences_with_quotes_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "sst2").mkdir()
    lines = 'sentence\tlabel\n" a fine film\t1\nit \'s "bad"\t0\n'
    (tmp_path / "sst2" / "dev.tsv").write_text(lines)
    assert served.sentences(tmp_path) == ['" a fine film', 'it \'s "bad"']


def test_answers_differ_by_their_numbers_alone() -> None:
    answer = [{"label": "good", "score": 0.75}, {"label": "bad", "score": 0.25}]
    near = [{"label": "good", "score": 0.5}, {"label": "bad", "score": 0.5}]
    assert served.difference([answer], answer) == 0.0
    assert served.difference(answer, [answer]) == 0.0
    assert served.difference(answer, near) == 0.25
    assert served.difference(answer, answer[::-1]) == math.inf
    assert served.difference(answer, answer[:1]) == math.inf
    assert served.difference([1.0, 1.0], [1.0, math.nan]) == math.inf


SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""


@pytest.mark.drill
def test_a_server_ends_with_what_it_has_started(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-c", SERVER, str(port)]
    with running(command, f"http://127.0.0.1:{port}/", tmp_path) as process:
        child = int((tmp_path / "server.log").read_text().split()[0])
        assert psutil.pid_exists(child)
    assert process.poll() is not None
    _, alive = psutil.wait_procs(_processes(child), timeout=10)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def _processes(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid)] if psutil.pid_exists(pid) else []


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(ServerError, match="no such model"),
        running(command, f"http://127.0.0.1:{port}/", tmp_path),
    ):
        pass


def test_threads_sleep_where_they_wait_unless_told_otherwise() -> None:
    script = "import os, benchmarks.passive; print(os.environ['OMP_WAIT_POLICY'])"
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    clean["PYTHONPATH"] = str(Path(served.__file__).parents[1])
    for given, wanted in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        done = subprocess.run(
            [sys.executable, "-c", script], env=clean | given, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        assert done.stdout.strip() == wanted
