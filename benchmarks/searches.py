"""Mining and evaluation by search against sentence-transformers: time, CPU seconds and memory.

Each side runs in a process of its own, which has a model and files and no more. Ours are the stages
without Ray, with all that they write; theirs have FAISS (`pip install faiss-cpu`) if it is there.
"""

import importlib.util
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import benchmarks.passive  # noqa: F401  # before torch
from benchmarks.harness import Comparison, compared, in_turn

NEGATIVES, LAST_RANK = 3, 100
BATCH_SIZE = 64
"""Texts in a batch of theirs, which they sort by length first."""


@dataclass(frozen=True)
class Ran:
    """What a side took."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    """Of the process, with what it imported."""


def mined(model: Path, pairs: list[tuple[str, str]], rounds: int) -> Comparison:
    """Mine negatives for these pairs of texts, from the second texts of all."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "pairs.jsonl")
        lines = (json.dumps({"text": text, "text_pair": pair}) for text, pair in pairs)
        rows.write_text("".join(f"{line}\n" for line in lines))
        sides = (
            partial(ours_mines, str(model), str(rows), f"sqlite:///{folder}/runs.db"),
            partial(theirs_mines, str(model), pairs),
        )
        return _compared("mine_vs_mine_hard_negatives", sides, len(pairs), "pairs/s", rounds)


def evaluated(model: Path, retrieval_set: Path, texts: int, rounds: int) -> Comparison:
    """Search a set in BEIR's layout that has this many texts, and compute the metrics."""
    with tempfile.TemporaryDirectory() as folder:
        sides = (
            partial(ours_evaluates, str(model), str(retrieval_set), f"sqlite:///{folder}/runs.db"),
            partial(theirs_evaluates, str(model), retrieval_set),
        )
        return _compared("evaluate_vs_ir_evaluator", sides, texts, "texts/s", rounds)


def _compared(
    name: str,
    sides: tuple[Callable[[], None], Callable[[], None]],
    texts: int,
    unit: str,
    rounds: int,
) -> Comparison:
    ours, theirs = (partial(_alone, side) for side in sides)
    ours()  # makes the database of runs
    pairs, others = in_turn(ours, theirs, rounds)
    memory = [mine.peak_bytes / other.peak_bytes for mine, other in pairs]
    return compared(
        name,
        [(texts / mine.wall_s, texts / other.wall_s) for mine, other in pairs],
        others,
        unit=unit,
        what=f"{texts:,} texts; {statistics.median(memory):.2f} of their memory",
        cpu_ratios=[other.cpu_s / mine.cpu_s for mine, other in pairs],
        memory_ratios=memory,
        batch_size=BATCH_SIZE,
        faiss=_has_faiss(),
        peer_version=version("sentence-transformers"),
    )


def _alone(work: Callable[[], None]) -> Ran:
    """Run it in a new process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_measured, work).result()


def _measured(work: Callable[[], None]) -> Ran:
    began, before = time.perf_counter(), time.process_time()
    work()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Ran(time.perf_counter() - began, time.process_time() - before, peak)


def _has_faiss() -> bool:
    return importlib.util.find_spec("faiss") is not None


def ours_mines(model: str, rows: str, store: str) -> None:
    from pipelines import mine
    from pipelines.answering.mining import NearnessConfig

    with tempfile.TemporaryDirectory() as folder:
        near = NearnessConfig(last_rank=LAST_RANK)
        config = mine.MineConfig(
            model=model, source=rows, negatives=NEGATIVES, near=near, **_stage(folder, store)
        )
        mine.run(config)


def theirs_mines(model: str, pairs: list[tuple[str, str]]) -> None:
    from datasets import Dataset
    from sentence_transformers.util import mine_hard_negatives

    texts, others = zip(*pairs, strict=True)
    mine_hard_negatives(
        Dataset.from_dict({"text": texts, "text_pair": others}), _theirs(model),
        range_max=LAST_RANK, num_negatives=NEGATIVES, sampling_strategy="random",
        output_format="n-tuple", batch_size=BATCH_SIZE, use_faiss=_has_faiss(), verbose=False,
    )  # fmt: skip


def ours_evaluates(model: str, retrieval_set: str, store: str) -> None:
    from pipelines import evaluate
    from pipelines.answering.searching import RetrievalConfig
    from pipelines.corpus.labelled import LabelledConfig

    with tempfile.TemporaryDirectory() as folder:
        config = evaluate.EvaluateConfig(
            model=model, task="feature-extraction", held_out=LabelledConfig(source=retrieval_set),
            retrieval=RetrievalConfig(quantized=(), bm25=None), **_stage(folder, store),
        )  # fmt: skip
        evaluate.run(config)


def theirs_evaluates(model: str, retrieval_set: Path) -> None:
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    def texts(name: str) -> dict[str, Any]:
        rows = map(json.loads, (retrieval_set / name).read_text().splitlines())
        return {row["_id"]: f"{row.get('title', '')} {row['text']}".strip() for row in rows}

    judged: dict[str, set[str]] = {}
    for line in (retrieval_set / "qrels" / "test.tsv").read_text().splitlines()[1:]:
        query, document, relevance = line.split("\t")
        if int(relevance) > 0:
            judged.setdefault(query, set()).add(document)
    queries = {key: text for key, text in texts("queries.jsonl").items() if key in judged}
    InformationRetrievalEvaluator(
        queries, texts("corpus.jsonl"), judged, batch_size=BATCH_SIZE, write_csv=False
    )(_theirs(model))


def _theirs(model: str) -> Any:
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    logging.set_verbosity_error()  # it reports the pooler, which it does not need
    logging.disable_progress_bar()
    return SentenceTransformer(model, device="cpu")


def _stage(folder: str, store: str) -> dict[str, Any]:
    """What the stages of both comparisons share: they run without Ray.

    Args:
        store: where their runs are recorded.
    """
    import torch

    threads = torch.get_num_threads()
    return {
        "output": f"{folder}/out",
        "num_workers": 0,
        "threads_per_worker": threads,
        "tracking_uri": store,
    }
