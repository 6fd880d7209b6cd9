"""Training of vectors against sentence-transformers: speed at a large batch, and what memory takes.

`contrastive_vs_cached_mnrl` trains one encoder on the same pairs with the same batch, texts
tokenized before: ours by the training loop, theirs by CachedMultipleNegativesRankingLoss with the
fastest of several sizes of its mini-batches. `contrastive_peak_memory` is ours alone, the peak of a
process at a large batch over that at a small one, of the same rows, without the vectors themselves.

`mine_vs_mine_hard_negatives` and `evaluate_vs_ir_evaluator` are in `searches`.

A busy machine slows both sides unevenly. So both have threads that sleep where they wait, and the
ratios of CPU seconds stand beside those of time.
"""

import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import benchmarks.passive  # noqa: F401  # before torch
from benchmarks.harness import Comparison, Planned, compared, in_turn, main
from benchmarks.searches import evaluated, mined
from bert_core.batches import RankBatches, WindowSource
from bert_core.data.order import GlobalOrder
from bert_core.data.special_tokens import SPECIAL_TOKENS
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Window
from bert_core.model.attention import packing
from bert_core.model.config import EncoderConfig
from bert_core.model.hf import encoder_config_from_huggingface
from bert_core.objectives.base import ObjectiveModel
from bert_core.scores import Precision
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.train.config import LoopConfig, OptimizerConfig
from bert_core.train.hardware import flush_denormals, keep_freed_memory
from bert_core.train.loop import training_steps
from bert_core.train.optim import build_optimizer

QUERY_TOKENS, PASSAGE_TOKENS = (8, 24), (48, 128)
"""Shortest and longest texts, special tokens included, evenly distributed: questions and passages
as in SQuAD."""
MINI_BATCHES = (16, 32, 64, 128)
TRIED_ROWS = 128
"""Rows of a step by which the fastest of these is found."""
TEMPERATURE, LR = 0.05, 2e-5


@dataclass(frozen=True)
class Size:
    """What is trained."""

    hidden_size: int
    layers: int
    vocab_size: int
    batch: int
    steps: int
    small: int
    large: int
    """Batches whose memory is compared."""
    mined: int
    """Pairs for which negatives are mined."""
    micro_batch_tokens: int = 4096

    @property
    def encoder(self) -> EncoderConfig:
        """The encoder, without dropout; at full size, that of MiniLM-L6-H384."""
        entries = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden_size // 32,
            "intermediate_size": 4 * self.hidden_size,
            "max_position_embeddings": 512,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }
        return encoder_config_from_huggingface(entries)


FULL = Size(384, 6, 30_522, batch=1024, steps=2, small=256, large=16_384, mined=20_000)
QUICK = Size(
    64, 2, 1_000, batch=32, steps=1, small=16, large=256, mined=300, micro_batch_tokens=1024
)


def benchmark(rounds: int, quick: bool) -> Iterator[Planned | Comparison]:
    size = QUICK if quick else FULL
    flush_denormals()
    # Kernels for bf16 are compiled for each shape, which would be all of a quick run.
    precision: Precision = "bf16" if _has_bf16() and not quick else "fp32"
    yield Planned("contrastive_peak_memory", partial(peak_memory, size, precision))
    yield Planned("contrastive_vs_cached_mnrl", partial(against_theirs, size, precision, rounds))
    yield Planned("mine_vs_mine_hard_negatives", partial(mining, size, rounds))
    yield Planned("evaluate_vs_ir_evaluator", partial(evaluation, size, rounds, quick))


def against_theirs(size: Size, precision: Precision, rounds: int) -> Comparison:
    """Train the same steps with ours and theirs."""
    texts = drawn_texts(size.vocab_size, size.batch * size.steps)
    with tempfile.TemporaryDirectory() as folder:
        theirs = Theirs(size, texts, precision, Path(folder))
        ours = partial(ours_spent, size, texts, precision)
        ours(), theirs.spent()  # a warm-up
        pairs, others = in_turn(ours, theirs.spent, rounds, again=rounds)
    return compared(
        "contrastive_vs_cached_mnrl",
        [(mine.rows / mine.wall_s, other.rows / other.wall_s) for mine, other in pairs],
        others,
        unit="rows/s",
        what=f"{size.layers} layers of {size.hidden_size}, batch {size.batch}, {precision}",
        cpu_ratios=[mine.rows / mine.cpu_s * other.cpu_s / other.rows for mine, other in pairs],
        hidden_size=size.hidden_size,
        layers=size.layers,
        batch=size.batch,
        steps=size.steps,
        precision=precision,
        threads=torch.get_num_threads(),
        micro_batch_tokens=size.micro_batch_tokens,
        mini_batch_size=theirs.mini_batch_size,
        peer_version=version("sentence-transformers"),
    )


@dataclass(frozen=True)
class Spent:
    """What training took."""

    rows: int
    wall_s: float
    cpu_s: float
    """Of the process."""

    @classmethod
    def by(cls, train: Callable[[], int]) -> "Spent":
        """Measure a function that trains, and returns how many rows."""
        began, before = time.perf_counter(), time.process_time()
        rows = train()
        return cls(rows, time.perf_counter() - began, time.process_time() - before)


def mining(size: Size, rounds: int) -> Comparison:
    """Mine negatives for drawn pairs of texts."""
    with tempfile.TemporaryDirectory() as folder:
        model = saved(size, Path(folder))
        texts = drawn_texts(size.vocab_size, size.mined)
        return mined(model, [(words_of(text), words_of(pair)) for text, pair in texts], rounds)


def evaluation(size: Size, rounds: int, quick: bool) -> Comparison:
    """Evaluate all-MiniLM-L6-v2 on SciFact, if not quick; else a model on drawn texts."""
    if not quick:
        from benchmarks.checkpoints import MINILM, required

        scifact = Path(os.environ["RAYBERT_DATA"], "scifact")
        with (scifact / "corpus.jsonl").open() as documents:
            return evaluated(required(MINILM), scifact, sum(1 for _ in documents), rounds)
    with tempfile.TemporaryDirectory() as folder:
        texts = drawn_texts(size.vocab_size, size.mined)
        drawn = Path(folder, "set")
        (drawn / "qrels").mkdir(parents=True)
        for name, place in (("queries", 0), ("corpus", 1)):
            rows = ({"_id": str(n), "text": words_of(row[place])} for n, row in enumerate(texts))
            (drawn / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        judged = "".join(f"{n}\t{n}\t1\n" for n in range(len(texts)))
        (drawn / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
        return evaluated(saved(size, Path(folder)), drawn, len(texts), rounds)


def words_of(ids: np.ndarray) -> str:
    """The text of drawn token ids, by the vocabulary of `saved`."""
    return " ".join(f"w{each - len(SPECIAL_TOKENS)}" for each in ids[1:-1].tolist())


def _has_bf16() -> bool:
    """Whether this machine's matrix products are faster in bfloat16."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        flags = next((line for line in lines if line.startswith("flags")), "")
    return torch.cuda.is_available() or "amx_bf16" in flags or "avx512_bf16" in flags


def drawn_texts(vocab_size: int, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids of a query and a passage for each row, special tokens included."""
    rng = np.random.default_rng(0)

    def text(lengths: tuple[int, int]) -> np.ndarray:
        words = rng.integers(len(SPECIAL_TOKENS), vocab_size, rng.integers(*lengths) - 2)
        cls, sep = SPECIAL_TOKENS.index("[CLS]"), SPECIAL_TOKENS.index("[SEP]")
        return np.concatenate([[cls], words, [sep]]).astype(np.uint32)

    return [(text(QUERY_TOKENS), text(PASSAGE_TOKENS)) for _ in range(rows)]


def built(size: Size) -> ObjectiveModel:
    """The model that ours trains, and theirs begins with."""
    torch.manual_seed(0)
    config = size.encoder
    task = FeatureExtraction(options=FeatureExtraction.options(temperature=TEMPERATURE))
    return ObjectiveModel(config, [task.build_objective(config)])


def saved(size: Size, folder: Path) -> Path:
    """Write that model as a bundle, with a vocabulary of as many words; return its folder."""
    from bert_core.bundle.format import About
    from bert_core.bundle.writing import save_bundle

    words = [*SPECIAL_TOKENS, *(f"w{n}" for n in range(size.vocab_size - len(SPECIAL_TOKENS)))]
    tokenizer = Tokenizer.from_vocabulary(words, lowercase=True)
    save_bundle(folder / "model", built(size), tokenizer, About(task=FeatureExtraction()))
    return folder / "model"


def windows_of(texts: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Window]:
    """The rows as the task encodes them; all texts differ."""
    windows = []
    for row, ids in enumerate(texts):
        ends = np.array([len(each) for each in ids])
        windows.append(
            Window(
                row=row,
                ids=ids,
                segment_b_start=tuple(ends.tolist()),
                positions={"vector_starts": np.zeros_like(ends), "vector_ends": ends},
                labels={
                    "similarities": np.ones(2, dtype=np.float32),
                    "texts": np.array([2 * row, 2 * row + 1]),
                },
            )
        )
    return windows


def ours_spent(
    size: Size,
    texts: Sequence[tuple[np.ndarray, np.ndarray]],
    precision: Precision,
    batch: int | None = None,
    steps: int | None = None,
) -> Spent:
    """Train some steps; by default, as many as the texts suffice for."""
    batch = batch or size.batch
    model, windows = built(size), windows_of(texts)
    packed_from = packing(model.encoder.config, torch.device("cpu"), precision)
    source = WindowSource(windows, SPECIAL_TOKENS.index("[PAD]"), packed_from)
    batches = RankBatches(
        source, GlobalOrder([len(windows)], seed=0), batch, size.micro_batch_tokens, joint=True
    )
    optimizer = build_optimizer(model, OptimizerConfig(lr=LR), precision)
    loop = LoopConfig(max_steps=steps or len(texts) // batch, precision=precision)

    def train() -> int:
        done = training_steps(model, batches.from_step(0), optimizer, lambda _: LR, loop)
        return batch * sum(1 for _ in done)

    return Spent.by(train)


class Theirs:
    """The same model, pairs and optimizer with sentence-transformers' cached loss."""

    def __init__(
        self,
        size: Size,
        texts: Sequence[tuple[np.ndarray, np.ndarray]],
        precision: Precision,
        folder: Path,
    ) -> None:
        """Write the model for them, and find the fastest size of their mini-batches."""
        self._size, self._texts, self._precision = size, texts, precision
        self._folder = saved(size, folder)
        tried = min(TRIED_ROWS, size.batch)
        costs = {each: self._spent(each, tried, steps=1).cpu_s for each in MINI_BATCHES}
        self.mini_batch_size = min(costs, key=lambda each: costs[each])

    def spent(self) -> Spent:
        return self._spent(self.mini_batch_size, self._size.batch, self._size.steps)

    def _spent(self, mini_batch_size: int, batch: int, steps: int) -> Spent:
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging

        logging.set_verbosity_error()  # it reports the pooler, which it does not need
        logging.disable_progress_bar()
        from sentence_transformers.sentence_transformer.losses import (
            CachedMultipleNegativesRankingLoss,
        )

        model = SentenceTransformer(str(self._folder), device="cpu")
        loss = CachedMultipleNegativesRankingLoss(
            model, scale=1 / TEMPERATURE, mini_batch_size=mini_batch_size
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)
        bf16 = self._precision == "bf16"
        model.train()

        def train() -> int:
            for step in range(steps):
                rows = self._texts[step * batch : (step + 1) * batch]
                columns = [_features([row[place] for row in rows]) for place in (0, 1)]
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    value = loss(columns, None)
                value.backward()
                optimizer.step()
            return steps * batch

        return Spent.by(train)


def _features(rows: Sequence[np.ndarray]) -> dict[str, Any]:
    """Padded tensors, as their tokenizer returns them."""
    longest = max(map(len, rows))
    ids = np.stack([np.pad(row.astype(np.int64), (0, longest - len(row))) for row in rows])
    mask = np.stack([np.arange(longest) < len(row) for row in rows])
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        "token_type_ids": torch.zeros(ids.shape, dtype=torch.int64),
    }


def peak_memory(size: Size, precision: Precision) -> Comparison:
    """The peak memory of a process that trains a step on the large batch over one of the small
    batch, each without its vectors. The rows that are held are the same. Once: peaks hardly
    vary."""
    context = multiprocessing.get_context("spawn")
    peaks: dict[int, int] = {}
    for batch in (size.small, size.large):
        with context.Pool(1) as pool:
            whole = pool.apply(peak_of_step, (size, precision, batch))
        peaks[batch] = whole - 2 * batch * size.hidden_size * 4
    large, small = peaks[size.large] / 1e9, peaks[size.small] / 1e9
    return Comparison(
        name="contrastive_peak_memory",
        ours=large,
        peer=small,
        unit="GB",
        ratio=large / small,
        settings={
            "what": f"batch {size.large:,} over batch {size.small:,}, both ours",
            "hidden_size": size.hidden_size,
            "layers": size.layers,
            "precision": precision,
            "micro_batch_tokens": size.micro_batch_tokens,
            "bytes": peaks,
        },
    )


def peak_of_step(size: Size, precision: Precision, batch: int) -> int:
    """Train one step, as the only work of a process; its peak memory in bytes."""
    keep_freed_memory()
    ours_spent(size, drawn_texts(size.vocab_size, size.large), precision, batch, steps=1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(benchmark, "retrieval")
