"""Other servers of encoders, each at its best documented settings, on the same model files.

Where two settings are in question, both are in a line's list, and the faster one is measured.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.servers import PEERS, QUIET, interpreter, versions
from bert_core.manifest import BUNDLE

CORES = os.cpu_count() or 1
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
ALL_THREADS = {"OMP_NUM_THREADS": str(CORES), "MKL_NUM_THREADS": str(CORES)}
PROJECT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a peer's server is started."""

    command: Sequence[str | Path]
    environment: Mapping[str, str] = field(default_factory=dict)
    working: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A server with certain settings."""

    settings: str
    launch: Callable[[Path, int, Path], Launch]
    """Takes the model's folder, the port, and a folder for what has to be made of the model."""
    path: str
    ready: str
    """Path that gives 200 once it answers."""
    body: Callable[[Any], Any]
    """The JSON that asks about an input."""
    read: Callable[[Any], Any]
    """The answer in its JSON, as our predictor gives it."""
    only_best: bool = False
    """Whether the answer is the best one alone, where our predictor gives all."""
    reads_exported: bool = False
    """Whether it is given our exported bundle where ours is."""
    versions: Callable[[], Mapping[str, str]] = dict


def pipeline(batch_size: int) -> Peer:
    """Ray Serve around transformers' pipeline."""

    def launch(model: Path, port: int, scratch: Path) -> Launch:
        app = PEERS / "pipeline_app.py"
        return Launch(command=[sys.executable, app, model, str(port), str(batch_size)])

    batches = f"@serve.batch of up to {batch_size}" if batch_size > 1 else "one text per call"
    return Peer(
        settings=f"Ray Serve, its own proxy, pipeline, {batches}, num_cpus {CORES}",
        launch=launch,
        path="/",
        ready="/-/healthz",
        body=lambda text: {"inputs": text},
        read=lambda answer: answer,
    )


def mlflow(workers: int) -> Peer:
    """`mlflow models serve` of a model that was published."""

    def launch(model: Path, port: int, scratch: Path) -> Launch:
        uri = f"sqlite:///{scratch}/mlflow.db"
        reference = _published(model, uri, scratch)
        command = [
            sys.executable, "-m", "mlflow", "models", "serve", "--model-uri", reference,
            "--env-manager", "local", "--host", "127.0.0.1", "--port", str(port),
            "--workers", str(workers),
        ]  # fmt: skip
        threads = ALL_THREADS if workers == 1 else ONE_THREAD
        environment = {
            **threads,
            "MLFLOW_TRACKING_URI": uri,
            "MLFLOW_REGISTRY_URI": uri,
            "PYTHONPATH": str(PROJECT),
            # It runs `uvicorn` by its name.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        return Launch(command=command, environment=environment)

    threads_per_worker = CORES if workers == 1 else 1
    return Peer(
        settings=f"mlflow models serve, {workers} workers of {threads_per_worker} threads",
        launch=launch,
        path="/invocations",
        ready="/ping",
        body=lambda given: {"inputs": [given]},
        read=lambda answer: answer["predictions"],
        only_best=True,
        reads_exported=True,
    )


def _published(model: Path, uri: str, scratch: Path) -> str:
    """A reference to the model in a registry of its own."""
    from bert_core.inference.predictor import Predictor
    from tracking.models.registry import Release, publish

    examples = list(Predictor(model, device="cpu").task.examples)
    name = model.parent.name if model.name == BUNDLE else model.name
    publish(Release(bundle=model, name=name, metrics={}, input_example=examples), uri=uri)
    return f"models:/{name}@champion"


def infinity(engine: str, precision: str, batch_size: int = 32) -> Peer:
    """Infinity with one of its engines, at one of its precisions."""
    name = {"torch": "infinity-torch", "optimum": "infinity-onnx"}[engine]

    def launch(model: Path, port: int, scratch: Path) -> Launch:
        folder = interpreter(name).parent
        # NOTE: with a graph, it finds the model's files only in the folder that it starts in.
        working = _exported(folder, model, scratch) if engine == "optimum" else scratch
        model_id = "." if engine == "optimum" else str(model)
        command = [
            str(folder / "infinity_emb"), "v2", "--model-id", model_id,
            "--served-model-name", "vectors", "--engine", engine, "--device", "cpu",
            "--dtype", precision, "--no-compile", "--bettertransformer",
            "--pooling-method", "mean", "--batch-size", str(batch_size),
            "--host", "127.0.0.1", "--port", str(port), "--log-level", "error",
        ]  # fmt: skip
        environment = {**ALL_THREADS, "HF_HOME": str(scratch / "hf")}
        return Launch(command=command, environment=environment, working=working)

    words = {"torch": "torch with BetterTransformer", "optimum": "optimum (onnxruntime)"}[engine]
    return Peer(
        settings=f"infinity_emb v2, {words}, {precision}, batches of up to {batch_size}",
        launch=launch,
        path="/embeddings",
        ready="/health",
        body=lambda text: {"input": text, "model": "vectors"},
        read=_vectors,
        versions=lambda: versions(
            interpreter(name), ("infinity-emb", "torch", "transformers", "optimum")
        ),
    )


def _exported(programs: Path, model: Path, scratch: Path) -> Path:
    """The model with a graph, by optimum."""
    folder = scratch / f"{model.name}-onnx"
    if not folder.exists():
        command = [
            str(programs / "optimum-cli"), "export", "onnx", "--model", str(model),
            "--task", "feature-extraction", "--library", "transformers", str(folder),
        ]  # fmt: skip
        subprocess.run(
            command, check=True, capture_output=True, env={**os.environ, **QUIET}, cwd=scratch
        )
    return folder


def litserve(batch_size: int, workers: int) -> Peer:
    """LitServe's example of embeddings."""
    name = "litserve"

    def launch(model: Path, port: int, scratch: Path) -> Launch:
        words = [str(model), str(port), str(batch_size), str(workers)]
        return Launch(
            command=[interpreter(name, with_project=True), PEERS / "litserve_app.py", *words],
            environment=ALL_THREADS if workers == 1 else ONE_THREAD,
        )

    threads_per_worker = CORES if workers == 1 else 1
    return Peer(
        settings=f"LitServe with sentence-transformers, batches of up to {batch_size} within 5 ms, "
        f"fast_queue, {workers} workers of {threads_per_worker} threads",
        launch=launch,
        path="/v1/embeddings",
        ready="/health",
        body=lambda text: {"input": text, "model": "vectors"},
        read=_vectors,
        versions=lambda: versions(
            interpreter(name, with_project=True), ("litserve", "sentence-transformers", "torch")
        ),
    )


def bentoml(batch_size: int, workers: int) -> Peer:
    """BentoML's example of embeddings."""
    name = "bentoml"

    def launch(model: Path, port: int, scratch: Path) -> Launch:
        program = interpreter(name, with_project=True).parent / "bentoml"
        where = ["--host", "127.0.0.1", "--port", str(port)]
        return Launch(
            command=[program, "serve", "bentoml_app:Embeddings", *where],
            environment={
                **(ALL_THREADS if workers == 1 else ONE_THREAD),
                "BENTOML_HOME": str(scratch / "bentoml"),
                "MODEL": str(model),
                "BATCH": str(batch_size),
                "WORKERS": str(workers),
            },
            working=PEERS,
        )

    threads_per_worker = CORES if workers == 1 else 1
    return Peer(
        settings=f"BentoML with sentence-transformers, adaptive batches of up to {batch_size}, "
        f"{workers} workers of {threads_per_worker} threads",
        launch=launch,
        path="/encode",
        ready="/readyz",
        body=lambda text: {"sentences": [text]},
        read=lambda answer: answer[0],
        versions=lambda: versions(
            interpreter(name, with_project=True), ("bentoml", "sentence-transformers", "torch")
        ),
    )


def _vectors(answer: Any) -> Any:
    return answer["data"][0]["embedding"]
