"""Fine-tuning against transformers' Trainer, and batch prediction against its `pipeline`.

Rows are sentences of SST-2 at their real lengths, from the folder that RAYBERT_DATA names. The
model has MiniLM's shape (6 layers × 384) and fresh weights, which are as fast as any; what a model
learns either way is measured in `tasks`. Both sides fine-tune with the same number of rows per
step, precision and dropout, each in its own process, the Trainer with rows grouped by length; and
again with the Trainer keeping freed memory as our workers do. Both predict the same rows in fp32 on
the same cores; ours with everything that the stage does, including reading and writing files, on a
running Ray.

`--quick` trains only in bf16, for fewer steps, and predicts fewer rows, so the stage's fixed cost
weighs more.
"""

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    pipeline,
)

from benchmarks.harness import Planned, compare, main
from benchmarks.peer import SETTINGS, WARM_UP, TimedTrainer, training_arguments
from benchmarks.peer_tasks import Examples, Padded
from benchmarks.training import steps_of
from bert_core.batches import RankBatches, WindowSource
from bert_core.bundle.format import About
from bert_core.bundle.writing import save_bundle
from bert_core.data.labelled_formats import labelled_records
from bert_core.data.order import GlobalOrder
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.vocabulary import train_vocabulary
from bert_core.data.windows import Window
from bert_core.model.attention import packing
from bert_core.model.config import AttentionConfig, EncoderConfig, FeedForwardConfig
from bert_core.model.hf import encoder_config_to_huggingface
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import ObjectiveModel
from bert_core.scores import Precision
from bert_core.tasks.shapes import labelled
from bert_core.tasks.text_classification import TextClassification
from bert_core.train.config import LoopConfig, OptimizerConfig
from bert_core.train.hardware import (
    HUGE_PAGES,
    flush_denormals,
    keep_freed_memory,
    make_deterministic,
)
from bert_core.train.words import train_read_words

ROWS = 32  # per step: the paper's larger batch
LONGEST = 128
BUDGET_TOKENS = 16_384
MINILM: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "attention": AttentionConfig(num_heads=12),
    "feed_forward": FeedForwardConfig(intermediate_size=1536),
}


def benchmark(rounds: int, quick: bool) -> Iterator[Planned]:
    rows = sst2()
    task = TextClassification.from_rows(rows)
    texts = [row["text"] for row in rows]
    vocabulary = train_vocabulary(texts, vocab_size=30_522, lowercase=True)
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    windows = task.encode(rows, tokenizer, LONGEST, labelled=True)
    steps = 60 if quick else 600
    lines: list[tuple[str, Precision, bool]] = [
        ("finetune_sst2_vs_trainer", "bf16", False),
        ("finetune_sst2_vs_trainer_memory_kept", "bf16", True),
        ("finetune_sst2_fp32_vs_trainer", "fp32", False),
    ]
    for name, precision, keeps_memory in lines[:1] if quick else lines:
        pair = _Training(task, windows, tokenizer, steps, precision, keeps_memory)
        yield compare(
            name,
            partial(_alone, pair.ours, HUGE_PAGES),  # as in our workers
            partial(_alone, pair.trainer, HUGE_PAGES if keeps_memory else {}),
            unit="tokens/s",
            rounds=rounds,
            warm_up=not quick,
            what=f"MiniLM's shape, {ROWS} rows per step",
            **pair.settings,
        )
    if importlib.util.find_spec("ray"):
        inputs = texts[: 4_096 if quick else 32_768]
        yield from _predicting(task, tokenizer, inputs, min(rounds, 3), warm_up=not quick)


def _alone(side: Callable[[], float], environment: dict[str, str]) -> float:
    """Its rate in a fresh process, so that allocator settings stay with one side."""
    with (
        patch.dict(os.environ, environment),
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh,
    ):
        return fresh.submit(side).result()


class _Training:
    """Training of our model and the Trainer's on the same rows."""

    def __init__(
        self,
        task: TextClassification,
        windows: list[Window],
        tokenizer: Tokenizer,
        steps: int,
        precision: Precision,
        memory_kept: bool,
    ) -> None:
        """`memory_kept`: whether the Trainer also keeps freed memory, which is not its default."""
        self._task, self._tokenizer, self._precision = task, tokenizer, precision
        self._memory_kept = memory_kept
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._config = minilm()
        self._steps = steps + WARM_UP
        order = np.random.default_rng(0).permutation(len(windows))[: ROWS * self._steps]
        self._windows = [windows[place] for place in order]
        lengths = [window.tokens for window in self._windows]
        self.settings = {
            "rows_per_step": ROWS,
            "steps": steps,
            "mean_length": round(float(np.mean(lengths)), 1),
            "longest": max(lengths),
            "precision": precision,
            "threads": torch.get_num_threads(),
            "hidden_dropout": self._config.hidden_dropout_prob,
            "attention_dropout": self._config.attention.dropout,
            "micro_batch_tokens": BUDGET_TOKENS,
            "peer_settings": SETTINGS + ", freed memory kept, in huge pages" * memory_kept,
        }

    def ours(self) -> float:
        flush_denormals()  # these three as in our workers
        keep_freed_memory()
        make_deterministic(self._device)
        torch.manual_seed(0)
        model = ObjectiveModel(self._config, [self._task.build_objective(self._config)])
        model.to(self._device)
        train_read_words(model, self._windows, self._tokenizer.pad_id)
        optimizer = OptimizerConfig(lr=5e-5)
        packed_from = packing(self._config, self._device, self._precision)
        source = WindowSource(self._windows, self._tokenizer.pad_id, packed_from)
        order = GlobalOrder([len(self._windows)], seed=0)
        batches = RankBatches(source, order, ROWS, BUDGET_TOKENS)
        loop = LoopConfig(max_steps=self._steps, precision=self._precision)
        steps = steps_of(model, batches, loop, optimizer, warmup_steps=10)
        began, tokens = 0.0, 0
        for step in steps:  # each waits for its gradient norm, and so for the GPU
            if step.index > WARM_UP:
                tokens += step.tokens
            elif step.index == WARM_UP:
                began = time.perf_counter()
        return tokens / (time.perf_counter() - began)

    def trainer(self) -> float:
        if self._memory_kept:
            keep_freed_memory()
        torch.manual_seed(0)
        entries = encoder_config_to_huggingface(self._config)
        model = BertForSequenceClassification(BertConfig(**entries))  # two labels by default
        with tempfile.TemporaryDirectory() as folder:
            trainer = TimedTrainer(
                model=model,
                args=training_arguments(
                    folder,
                    rows=ROWS,
                    steps=self._steps,
                    precision=self._precision,
                    learning_rate=5e-5,
                    warmup_steps=10,
                ),
                train_dataset=Examples(self._windows),
                data_collator=Padded(self._tokenizer.pad_id),
            )
            trainer.train()
        return int(trainer.timed_lengths.sum()) / trainer.seconds


def _predicting(
    task: TextClassification, tokenizer: Tokenizer, texts: list[str], rounds: int, *, warm_up: bool
) -> Iterator[Planned]:
    from pipelines import predict
    from pipelines.runtime import cluster

    cores = torch.get_num_threads()
    torch.manual_seed(0)
    config = minilm()
    model = ObjectiveModel(config, [task.build_objective(config)])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_bundle(folder / "bundle", model, tokenizer, About(task=task))
        pq.write_table(
            pa.table({"text": texts}), folder / "rows.parquet", row_group_size=len(texts) // 16
        )
        cluster.connect(address=None, num_cpus=cores)

        def ours() -> float:
            began = time.perf_counter()
            predict.run(
                predict.PredictConfig(
                    output=str(folder / f"run-{time.monotonic_ns()}"),
                    model=str(folder / "bundle"),
                    source=str(folder / "rows.parquet"),
                    part_bytes=100_000,
                    num_workers=cores,
                    tracking_uri=f"sqlite:///{folder}/mlflow.db",
                )
            )
            return len(texts) / (time.perf_counter() - began)

        answer = pipeline(
            "text-classification",
            model=BertForSequenceClassification.from_pretrained(folder / "bundle"),
            tokenizer=PreTrainedTokenizerFast.from_pretrained(folder / "bundle"),
            device="cpu",
        )

        def theirs() -> float:
            began = time.perf_counter()
            answered = answer(texts, batch_size=32, truncation=True)
            assert len(answered) == len(texts)
            return len(texts) / (time.perf_counter() - began)

        try:
            yield compare(
                "predict_vs_pipeline",
                ours,
                theirs,
                unit="rows/s",
                rounds=rounds,
                warm_up=warm_up,
                what=f"{len(texts):,} rows, {cores} cores",
                rows=len(texts),
                workers=cores,
                precision="fp32",
                peer_settings="pipeline(batch_size=32) in one process, one thread per core",
            )
        finally:
            cluster.disconnect()


def minilm() -> EncoderConfig:
    """all-MiniLM-L6-v2's encoder, with BERT's dropout."""
    return replace(VARIANTS["bert-base"].config, **MINILM)


def sst2() -> list[dict[str, Any]]:
    folder = os.environ.get("RAYBERT_DATA")
    if not folder:
        raise SystemExit(
            "RAYBERT_DATA: wanted the folder that holds sst2/train.tsv, got nothing: set it"
        )
    path = Path(folder) / "sst2" / "train.tsv"
    found = labelled_records(path.read_bytes(), str(path), "sst2")
    shapes = TextClassification.shapes(TextClassification.options())
    return labelled(found.records, shapes, found.columns, str(path))


if __name__ == "__main__":
    main(benchmark, "finetune")
