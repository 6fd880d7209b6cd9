"""Our training loop against transformers' Trainer, and Ray's share of it.

Rows are next-sentence pairs of WikiText-2 if RAYBERT_DATA names its folder, else of docstrings, of
up to 128 tokens with real lengths. Both train from fresh weights with AdamW, masked words and next
sentences, in the same precision and with the same dropout. The Trainer groups rows by length and
pads a batch to its longest row. On a CPU both run in bf16, in which both are faster on chips with
native support, and again in fp32. What needs Ray is skipped if Ray is not installed.

`--quick` on a CPU skips fp32, except for one worker against two, and takes fewer steps, with fewer
rows for large models and for runs of several processes.
"""

import importlib.util
import os
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks.harness import Planned, compare, main
from benchmarks.training import steps_of
from bert_core.batches import RankBatches, ShardSource
from bert_core.data.docstrings import docstrings_of
from bert_core.data.documents import split_sentences
from bert_core.data.masking import MaskingConfig
from bert_core.data.order import GlobalOrder
from bert_core.data.pairs import Documents, PairsConfig
from bert_core.data.ragged import offsets_of
from bert_core.data.row_maker import RowMaker
from bert_core.data.shards import ShardRows
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.vocabulary import train_vocabulary
from bert_core.model.attention import packing
from bert_core.model.hf import encoder_config_to_huggingface
from bert_core.model.size import training_flops
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import ObjectiveModel
from bert_core.objectives.catalog import PRETRAINING
from bert_core.scores import Precision
from bert_core.train.config import LoopConfig, OptimizerConfig
from bert_core.train.hardware import peak_flops

VOCAB_SIZE = 30_522
QUICK_ROUNDS_OF_LONG = 2
QUICK_ROUNDS_ON_RAY = 1
CPU_TOKENS, GPU_TOKENS = 4096, 65_536
"""Tokens of a micro-batch: what fits into CPU caches, and what fills a GPU."""


def benchmark(rounds: int, quick: bool) -> Iterator[Planned]:
    texts = pretraining_texts()
    vocabulary = train_vocabulary(texts, vocab_size=VOCAB_SIZE, lowercase=True)
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    if torch.cuda.is_available():
        for name, variant, length, size in (
            ("mfu_base_512", "bert-base", 512, 256),
            ("mfu_large_128", "bert-large", 128, 512),
        ):
            pair = Pair(variant, tokenizer, pair_rows(texts, tokenizer, length), size, steps=20)
            yield _compare(name, pair, rounds)
        return
    rows = pair_rows(texts, tokenizer, 128)
    pairs: list[tuple[str, str, int, int, Precision, int]] = [
        ("pretrain_4x256_vs_trainer", "bert-mini", 32, 6, "bf16", rounds),
        ("pretrain_base_vs_trainer", "bert-base", 32, 2, "bf16", min(rounds, 3)),
        ("pretrain_4x256_fp32_vs_trainer", "bert-mini", 32, 6, "fp32", rounds),
        ("pretrain_base_fp32_vs_trainer", "bert-base", 32, 2, "fp32", min(rounds, 3)),
    ]
    if quick:
        pairs = [
            ("pretrain_4x256_vs_trainer", "bert-mini", 32, 2, "bf16", rounds),
            ("pretrain_base_vs_trainer", "bert-base", 8, 2, "bf16", QUICK_ROUNDS_OF_LONG),
        ]
    for name, variant, size, steps, precision, pair_rounds in pairs:
        pair = Pair(variant, tokenizer, rows, size, steps, precision)
        yield _compare(name, pair, pair_rounds, warm_up=not quick)
    if importlib.util.find_spec("ray"):
        yield from _on_ray(texts, min(rounds, 3), quick)


def _compare(name: str, pair: "Pair", rounds: int, *, warm_up: bool = True) -> Planned:
    return compare(
        name,
        pair.ours,
        pair.trainer,
        unit="tokens/s" if pair.peak is None else "MFU",
        rounds=rounds,
        warm_up=warm_up,
        what=f"{pair.variant}, {pair.size} rows per step",
        **pair.settings,
    )


class Pair:
    """Our model and the Trainer's, and how fast each trains on the same rows."""

    def __init__(
        self,
        variant: str,
        tokenizer: Tokenizer,
        rows: ShardRows,
        size: int,
        steps: int,
        precision: Precision = "bf16",
        compiled: bool | None = None,
    ) -> None:
        """`compiled`: whether ours is; None means on a GPU."""
        from benchmarks.peer import SETTINGS  # and so transformers' Trainer, which takes seconds

        self.variant, self.size, self._steps, self._rows = variant, size, steps, rows
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.peak = peak_flops(self._device)
        on_gpu = self._device.type == "cuda"
        self._compiled = on_gpu if compiled is None else compiled
        self._precision: Precision = precision
        # Attention runs on packed rows only without dropout.
        self._config = VARIANTS[variant].config.adapted(
            vocab_size=tokenizer.vocab_size, attention_dropout=0.0 if on_gpu else None
        )
        self._tokens = GPU_TOKENS if on_gpu else CPU_TOKENS
        self._pad_id = tokenizer.pad_id
        lengths = np.diff(rows.offsets)
        self.settings: dict[str, Any] = {
            "variant": variant,
            "rows_per_step": size,
            "steps": steps,
            "mean_length": round(float(lengths.mean()), 1),
            "longest": int(lengths.max()),
            "precision": self._precision,
            "threads": torch.get_num_threads(),
            "hidden_dropout": self._config.hidden_dropout_prob,
            "attention_dropout": self._config.attention.dropout,
            "micro_batch_tokens": self._tokens,
            "compile": self._compiled,
            "peer_settings": SETTINGS,
        }

    def ours(self) -> float:
        from benchmarks.peer import WARM_UP

        model, optimizer = self._model(), OptimizerConfig()
        source = ShardSource(
            lambda _: self._rows,
            self._pad_id,
            packed_from=packing(self._config, self._device, self._precision),
        )
        order = GlobalOrder([len(self._rows)], seed=0)
        batches = RankBatches(source, order, self.size, self._tokens)
        loop = LoopConfig(
            max_steps=self._steps + WARM_UP, precision=self._precision, compile=self._compiled
        )
        steps = steps_of(model, batches, loop, optimizer, warmup_steps=10)
        began, work, tokens = 0.0, 0, 0
        for step in steps:
            if step.index == WARM_UP:
                self._wait()
                began = time.perf_counter()
            elif step.index > WARM_UP:
                work, tokens = work + step.flops, tokens + step.tokens
        self._wait()
        return self._rate(tokens, work, time.perf_counter() - began)

    def trainer(self) -> float:
        from transformers import BertConfig, BertForPreTraining

        from benchmarks.peer import WARM_UP, TimedTrainer, training_arguments

        torch.manual_seed(0)
        entries = encoder_config_to_huggingface(self._config)
        model = BertForPreTraining(BertConfig(**entries))
        examples = _Examples(self._rows, self.size * (self._steps + WARM_UP))
        on_gpu = self._device.type == "cuda"
        with tempfile.TemporaryDirectory() as folder:
            trainer = TimedTrainer(
                model=model,
                args=training_arguments(
                    folder,
                    rows=self.size,
                    steps=self._steps + WARM_UP,
                    precision=self._precision,
                    learning_rate=1e-4,
                    warmup_steps=10,
                    dataloader_num_workers=2 if on_gpu else 0,
                ),
                train_dataset=examples,
                data_collator=_Padded(self._pad_id),
            )
            trainer.train()
        lengths = trainer.timed_lengths
        work = training_flops(self._config, lengths, trainer.timed_labels)
        return self._rate(int(lengths.sum()), work, trainer.seconds)

    def _model(self) -> ObjectiveModel:
        torch.manual_seed(0)
        parts = [PRETRAINING[name](self._config) for name in ("mlm", "nsp")]
        return ObjectiveModel(self._config, parts).to(self._device)

    def _rate(self, tokens: int, work: int, seconds: float) -> float:
        """Real tokens per second, or the share of the chip's peak FLOP/s."""
        return tokens / seconds if self.peak is None else work / seconds / self.peak

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


class _Examples(torch.utils.data.Dataset):
    """As many rows as `count`, repeated if need be, in the Trainer's format, with a label at every
    masked position."""

    def __init__(self, rows: ShardRows, count: int) -> None:
        self._rows, self._count = rows, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not index < self._count:
            raise IndexError(index)  # ends a loop over the rows
        row = self._rows.row(index % len(self._rows))
        labels = np.full(len(row.input_ids), -100, dtype=np.int64)
        labels[row.masked_positions] = row.masked_labels
        segments = (np.arange(len(labels)) >= row.segment_b_start).astype(np.int64)
        return {
            "input_ids": row.input_ids.astype(np.int64),
            "token_type_ids": segments,
            "labels": labels,
            "next_sentence_label": row.labels["next_sentence_label"],
            "length": len(labels),
        }


class _Padded:
    """Pads a batch to its longest example, rounded up to a multiple of 8."""

    def __init__(self, pad_id: int) -> None:
        self._pad_id = pad_id

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        lengths = np.array([example["length"] for example in examples])
        width = -(-int(lengths.max()) // 8) * 8
        fills = {"input_ids": self._pad_id, "token_type_ids": 0, "labels": -100}
        batch = {}
        for name, fill in fills.items():
            table = np.full((len(examples), width), fill, dtype=np.int64)
            for row, example in zip(table, examples, strict=True):
                row[: example["length"]] = example[name]
            batch[name] = torch.from_numpy(table)
        batch["attention_mask"] = torch.from_numpy((np.arange(width) < lengths[:, None]) * 1)
        labels = [int(example["next_sentence_label"]) for example in examples]
        return batch | {"next_sentence_label": torch.tensor(labels)}


ROWS, QUICK_ROWS = 256, 48  # per step, as in the paper; each of two workers gets half
STEPS, QUICK_STEPS = 8, 4
QUICK_TEXTS = 150  # documents; enough rows for every step


def _on_ray(texts: list[str], rounds: int, quick: bool) -> Iterator[Planned]:
    """The stage itself, measured by its records: after start-up, without evaluation."""
    from pipelines.pretrain import PretrainConfig
    from pipelines.runtime import cluster

    rows, steps = (QUICK_ROWS, QUICK_STEPS) if quick else (ROWS, STEPS)
    if quick:
        texts, rounds = texts[:QUICK_TEXTS], QUICK_ROUNDS_ON_RAY
    share: Any = {
        "precision": "bf16",
        "rows_per_step": rows,
        "micro_batch_tokens": CPU_TOKENS,
    }
    # Where bf16 products have a dedicated unit, one core alone may drive it faster than two.
    scaling: Any = {
        "precision": "fp32",
        "rows_per_step": 2 * rows,
        "micro_batch_tokens": PretrainConfig.micro_batch_tokens,
    }
    settings: Any = {"variant": "bert-mini", "threads_per_worker": 1}
    with tempfile.TemporaryDirectory() as scratch:
        stage = _Stage(Path(scratch), texts, steps)
        try:
            yield compare(
                "ray_vs_bare_loop",
                lambda: stage.rate(1, **share),
                lambda: stage.rate(0, **share),
                unit="tokens/s",
                rounds=rounds,
                warm_up=not quick,
                what="one worker on Ray Train, against the loop in a process without Ray",
                **share,
                **settings,
            )
            yield compare(
                "pretrain_2_workers_vs_1",
                lambda: stage.rate(2, **scaling),
                lambda: stage.rate(1, **scaling),
                unit="tokens/s",
                rounds=rounds,
                warm_up=not quick,
                quiet=True,
                what="two workers of one thread each, against one",
                **scaling,
                **settings,
            )
        finally:
            cluster.disconnect()


class _Stage:
    """`raybert pretrain` on rows made from the texts."""

    def __init__(self, folder: Path, texts: list[str], steps: int) -> None:
        from pipelines import prepare, vocab
        from pipelines.corpus.config import CorpusConfig

        self._folder, self._steps = folder, steps
        self._words, self._shards = str(folder / "vocab"), str(folder / "shards")
        (folder / "text.txt").write_text("\n\n".join(texts), encoding="utf-8")
        corpus = CorpusConfig(source=str(folder / "text.txt"), held_out_share=0.02)
        self._common: Any = {"tracking_uri": f"sqlite:///{folder}/mlflow.db", "num_workers": 0}
        vocab.run(vocab.VocabConfig(output=self._words, corpus=corpus, **self._common))
        prepare.run(
            prepare.PrepareConfig(
                output=self._shards,
                corpus=corpus,
                tokenizer=self._words,
                pairs=PairsConfig(max_length=128, dupe_factor=1),
                masking=MaskingConfig(),
                **self._common,
            )
        )

    def rate(
        self, workers: int, *, precision: Precision, rows_per_step: int, micro_batch_tokens: int
    ) -> float:
        """Tokens per second; without workers, the stage runs in its own process."""
        from benchmarks.peer import WARM_UP
        from pipelines.pretrain import PretrainConfig

        config = PretrainConfig(
            output=str(self._folder / f"run-{time.monotonic_ns()}"),
            shards=self._shards,
            tokenizer=self._words,
            variant="bert-mini",
            global_batch_size=rows_per_step,
            micro_batch_tokens=micro_batch_tokens,
            held_out_rows=64,
            log_every_steps=WARM_UP,
            checkpoint_every_steps=1000,
            threads_per_worker=1,
            loop=LoopConfig(max_steps=self._steps, precision=precision),
            **self._common | {"num_workers": workers},
        )
        if workers:
            return _pretrained(config)
        # Fresh like Ray's workers: every process makes its own kernel for each new shape.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            return fresh.submit(_pretrained, config).result()


def _pretrained(config: Any) -> float:
    """Tokens per second of the stage, from the first point of its curve to the last."""
    from pipelines import pretrain
    from pipelines.training.records import read_records

    pretrain.run(config)
    records = read_records(config.local_folder).values()
    first, *later = [record for record in records if "tokens" in record]
    tokens = sum(record["tokens"] for record in later)
    return tokens / (later[-1]["elapsed_s"] - first["elapsed_s"])


def pretraining_texts() -> list[str]:
    """Documents: articles, or a module's docstrings."""
    folder = os.environ.get("RAYBERT_DATA")
    if folder:
        text = (Path(folder) / "wikitext2" / "train.txt").read_text(encoding="utf-8")
        articles: list[list[str]] = [[]]
        for line in text.split("\n"):
            if line.startswith(" = ") and not line.startswith(" = = "):
                articles.append([])
            articles[-1].append(line)
        return ["\n".join(lines) for lines in articles if len(lines) > 3]
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = ["\n".join(docstrings_of(path.read_bytes())) for path in paths]
    return [text for text in texts if len(text) > 1000]


def pair_rows(texts: list[str], tokenizer: Tokenizer, length: int) -> ShardRows:
    """Next-sentence pairs with masks, enough for all steps."""
    split_up = [split_sentences(text) for text in texts]
    sentences = [sentence for document in split_up for sentence in document]
    encoded = tokenizer.encode_column(pa.array(sentences, pa.string()))
    documents = Documents(
        input_ids=encoded.values.to_numpy(),
        sentence_offsets=encoded.offsets.to_numpy().astype(np.int64),
        document_offsets=offsets_of([len(document) for document in split_up]),
        digests=[index.to_bytes(8) for index in range(len(texts))],
        num_own=len(texts),
    )
    pairs = PairsConfig(max_length=length, dupe_factor=1)
    masking = MaskingConfig(max_predictions_per_seq=max(20, length * 15 // 100))
    rows, _ = RowMaker(tokenizer, pairs, masking)(documents, seed=0, shard=0)
    return rows


if __name__ == "__main__":
    main(benchmark, "pretrain")
