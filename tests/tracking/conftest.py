"""What the tests of tracking share: a store, a tiny bundle, a server of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serve.ports import free_ports


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URI of one SQLite store for all tests (making it takes seconds): experiments keep apart."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three bundles of one task, alike but for their random weights."""
    import torch

    from bert_core.bundle import save_bundle
    from bert_core.data.tokenizer import SPECIAL_TOKENS, Tokenizer
    from bert_core.model.hf import encoder_config_from_huggingface
    from bert_core.objectives.base import ObjectiveModel
    from bert_core.tasks.text_classification import TextClassification

    folder = tmp_path_factory.mktemp("bundles")
    letters = "abcdefgh"
    tokenizer = Tokenizer.from_vocabulary(
        [*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters)], lowercase=True
    )
    config = encoder_config_from_huggingface(
        {
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 32,
        }
    )
    task = TextClassification(["ham", "spam"])
    for seed in range(3):
        torch.manual_seed(seed)
        model = ObjectiveModel(config, [task.build_objective(config)])
        save_bundle(folder / f"{seed}", model, tokenizer, task=task, metrics={}, lineage={})
    return [folder / f"{seed}" for seed in range(3)]


class Server:
    """An `mlflow server` on a port of this machine that can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (self.port,) = free_ports(1)
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        # Its runner of jobs would outlive it, and leave the process group.
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=environment,
                start_new_session=True,
            )
        end = time.monotonic() + 120
        while not self._answers():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < end, (self.folder / "log").read_text()
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.uri}/health", timeout=5).is_success
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that is not started yet."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()
