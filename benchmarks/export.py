"""Vectors by every engine at every precision, against torch in fp32; and what each costs.

The model is all-MiniLM-L6-v2 as it was published (`make checkpoints`). Texts are the sentences of
STS-B and the paragraphs of WikiText-2 at their real lengths, truncated to the model's 256 tokens,
from the folder that RAYBERT_DATA names. All compute the same windows with the same
number of threads, each in its own batches: torch packs rows end to end where that is faster, as in
`predict`, and graphs run rows of one padded width together. Tokenizing is the same for all and not
timed. Ranges of 8 bits come from STS-B's training rows and WikiText-2's training paragraphs.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoints import MINILM, required
from benchmarks.harness import Planned, compare, main
from bert_core.data.labelled_formats import labelled_records
from bert_core.data.windows import Window
from bert_core.errors import ResourceError
from bert_core.inference.engines.catalog import ENGINES
from bert_core.inference.export import export_graph, largest_difference
from bert_core.inference.predictor import Predictor
from bert_core.metrics.bootstrap import not_worse
from bert_core.scores import Backend
from bert_core.tasks.shapes import labelled
from bert_core.torch_scores import TorchBackend

PARAGRAPHS, QUICK_PARAGRAPHS, QUICK_PAIRS = 512, 32, 200
CALIBRATING = 128
"""Rows of each kind to calibrate on."""
SHORTEST = 200
"""Fewest characters of a paragraph, which excludes headings."""


def benchmark(rounds: int, quick: bool) -> Iterator[Planned]:
    data, threads = _data(), os.cpu_count() or 1
    predictor = Predictor(required(MINILM), device="cpu", threads=threads)
    task, tokenizer = predictor.task, predictor.bundle.tokenizer
    pairs = _pairs(data / "stsb" / "sts-dev.csv", task.shapes())
    texts = {
        "STS-B sentences": pairs[: QUICK_PAIRS if quick else None],
        "WikiText-2 paragraphs": _paragraphs(data / "wikitext2" / "valid.txt")[
            : QUICK_PARAGRAPHS if quick else PARAGRAPHS
        ],
    }
    with tempfile.TemporaryDirectory() as scratch:
        backends = _backends(predictor, Path(scratch), threads, _calibrating(predictor, data))
        costs = _costs(predictor, backends, pairs)
        for description, rows in texts.items():
            windows = task.encode(rows, tokenizer, predictor.max_length)
            lengths = [len(ids) for window in windows for ids in window.ids]
            for name, backend in backends.items():
                rates = [
                    partial(_rate, each, windows, tokenizer.pad_id, sum(lengths))
                    for each in (backend, predictor.backend)
                ]
                yield compare(
                    f"{name}_vs_torch_fp32",
                    *rates,
                    unit="tokens/s",
                    rounds=rounds,
                    what=f"{description}, {costs[name]['spearman']}",
                    texts=len(lengths),
                    mean_length=round(float(np.mean(lengths)), 1),
                    longest=max(lengths),
                    threads=threads,
                    versions={engine: version(engine) for engine in ("torch", *ENGINES)},
                    budget_tokens=[backend.budget_tokens, predictor.backend.budget_tokens],
                    **costs[name],
                )


def _backends(
    predictor: Predictor, folder: Path, threads: int, calibrating: list[Window]
) -> dict[str, Backend]:
    """Every engine at every precision that this CPU has, but for torch in fp32."""
    backends: dict[str, Backend] = {
        "torch_bf16": TorchBackend(
            predictor.model, getattr(predictor.backend, "packed_from", 1.0), precision="bf16"
        )
    }
    positions, graph_scores = (
        predictor.bundle.encoder_config.max_length,
        predictor.task.graph_scores,
    )
    assert graph_scores is not None
    for kind, windows in {"fp32": None, "int8": calibrating}.items():
        pad_id = predictor.bundle.tokenizer.pad_id
        calibration = None if windows is None else (windows, pad_id)
        export_graph(predictor.model, path := folder / f"{kind}.onnx", calibration)
        for name, engine in ENGINES.items():
            for precision in engine.runs[kind]:
                try:
                    backend = engine(path, graph_scores, positions, threads, precision)
                except ResourceError as error:  # no bfloat16 here
                    print(error)
                else:
                    backends[f"{name}_{precision}"] = backend
    return backends


def _calibrating(predictor: Predictor, data: Path) -> list[Window]:
    task = predictor.task
    pairs = _pairs(data / "stsb" / "sts-train.csv", task.shapes())
    paragraphs = _paragraphs(data / "wikitext2" / "train.txt")
    rows = [*pairs[:: len(pairs) // CALIBRATING], *paragraphs[:: len(paragraphs) // CALIBRATING]]
    return task.encode(rows, predictor.bundle.tokenizer, predictor.max_length)


def _rate(backend: Backend, windows: Sequence[Window], pad_id: int, tokens: int) -> float:
    began = time.perf_counter()
    backend.scores(windows, pad_id)
    return tokens / (time.perf_counter() - began)


def _costs(
    predictor: Predictor, backends: dict[str, Backend], rows: list[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """How much STS-B's Spearman drops with their vectors, as `raybert export` measures it."""
    task, tokenizer = predictor.task, predictor.bundle.tokenizer
    windows = task.encode(rows, tokenizer, predictor.max_length)
    torch_scores = predictor.forward(windows)
    old = task.compare(rows, task.decode(rows, windows, torch_scores))
    costs = {}
    for name, backend in backends.items():
        scores = backend.scores(windows, tokenizer.pad_id)
        new = task.compare(rows, task.decode(rows, windows, scores))
        costs[name] = {
            "spearman": str(not_worse("spearman", task.metrics, new, old)),
            "spearman_torch_fp32": task.metrics(old)["spearman"],
            "spearman_ours": task.metrics(new)["spearman"],
            "largest_difference": largest_difference(torch_scores, scores),
        }
    return costs


def _data() -> Path:
    folder = os.environ.get("RAYBERT_DATA")
    if not folder:
        raise SystemExit(
            "RAYBERT_DATA: wanted the folder that holds stsb and wikitext2, got nothing: set it"
        )
    return Path(folder)


def _pairs(path: Path, shapes: tuple[type, type]) -> list[dict[str, Any]]:
    found = labelled_records(path.read_bytes(), str(path), "sts_benchmark")
    return labelled(found.records, shapes, found.columns, str(path))


def _paragraphs(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [{"text": line.strip()} for line in lines if len(line) >= SHORTEST]


if __name__ == "__main__":
    main(benchmark, "export")
