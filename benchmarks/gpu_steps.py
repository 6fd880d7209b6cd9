"""What `benchmarks.gpu` measures besides the other benchmarks: each step is a function of a device
that yields its result so far, again and again, so that a step that is cut off has not run in vain.

On a CPU they do the same with less work, which is how the tests run them.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.pretrain import GPU_TOKENS, VOCAB_SIZE, Pair, pair_rows, pretraining_texts
from benchmarks.training import steps_of
from bert_core.batches import RankBatches, ShardSource, pack, pad
from bert_core.bundle.format import About
from bert_core.bundle.writing import save_bundle
from bert_core.data.order import GlobalOrder
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.vocabulary import train_vocabulary
from bert_core.inference.predictor import Predictor
from bert_core.model.attention import packing
from bert_core.model.dot_product import attend
from bert_core.model.encoder import Encoder
from bert_core.model.layout import Packed
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import Batch, ObjectiveModel
from bert_core.objectives.catalog import PRETRAINING
from bert_core.tasks.feature_extraction import (
    FeatureExtraction,
    FeatureExtractionParameters,
)
from bert_core.train.config import LoopConfig, OptimizerConfig
from bert_core.train.hardware import peak_flops, peak_memory_bytes
from bert_core.train.loop import Step
from bert_core.train.parallel import shard

Result = dict[str, Any]
Results = Iterator[Result]
SMALL, FEW = 384, 20
"""Widest encoder that is compared on a CPU, and documents there."""

FP32_BAR, BF16_BAR = 1e-4, 3e-2
"""Most that vectors and gradients may differ from the CPU's in fp32, as a share of their norm."""


def parity(device: torch.device) -> Results:
    """Every variant, two layers deep: vectors and gradients on the device against the CPU in fp32.
    On a CPU, the small variants.

    Raises: AssertionError if they differ by more than rounding explains.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    errors: dict[str, dict[str, float]] = {}
    for name, variant in VARIANTS.items():
        if device.type == "cpu" and variant.config.hidden_size > SMALL:
            continue
        torch.manual_seed(0)
        config = replace(
            variant.config.adapted(
                vocab_size=1000,
                pad_token_id=min(1, variant.config.embeddings.pad_token_id),  # RoBERTa's must be 1
                hidden_dropout_prob=0.0,
                attention_dropout=0.0,
            ),
            num_hidden_layers=2,
        )
        encoder = Encoder(config, pooler=False)
        lengths = np.random.default_rng(0).integers(4, min(400, config.max_length), 6)
        rows = [np.random.default_rng(n).integers(6, 1000, n) for n in lengths]
        padded, packed = pad(rows, config.embeddings.pad_token_id), pack(rows)
        on_cpu = _encode(encoder, padded)
        moved = encoder.to(device)
        errors[name] = {
            "fp32_padded": _difference(_encode(moved, padded), on_cpu),
            "fp32_packed": _difference(_encode(moved, packed), on_cpu),
            "bf16_padded": _difference(_encode(moved, padded, bf16=True), on_cpu),
            "bf16_packed": _difference(_encode(moved, packed, bf16=True), on_cpu),
        }
    too_far = {
        f"{name}, {kind}": error
        for name, kinds in errors.items()
        for kind, error in kinds.items()
        if not error <= (FP32_BAR if kind.startswith("fp32") else BF16_BAR)
    }
    yield {"errors": errors}
    assert not too_far, json.dumps(too_far)


def _encode(encoder: Encoder, batch: Batch, *, bf16: bool = False) -> Tensor:
    """Vectors of the real tokens, and gradients of the layers' weights for a fixed loss, as one
    vector of fp32 each, on the CPU."""
    device = next(encoder.parameters()).device
    encoder.zero_grad(set_to_none=True)
    mask = batch.get("attention_mask")
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        hidden = encoder(**{name: tensor.to(device) for name, tensor in batch.items()}).hidden
    if mask is not None:
        hidden = hidden[mask.bool().to(device)]
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(device)
    (hidden.float() * weights).mean().backward()
    gradients = [p.grad.flatten().cpu() for p in encoder.parameters() if p.grad is not None]
    return torch.stack(
        [_scaled(hidden.detach().float().flatten().cpu()), _scaled(torch.cat(gradients))]
    )


def _scaled(vector: Tensor, entries: int = 50_000) -> Tensor:
    """Evenly chosen entries of a vector, as a vector of norm 1."""
    chosen = vector[torch.arange(entries) * (len(vector) - 1) // (entries - 1)]
    return chosen / chosen.norm()


def _difference(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm(dim=-1).max())


def windows(device: torch.device) -> Results:
    """Attention within a window over packed rows: the GPU's kernel against blocks in fp32."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 7, 64, 65, 128, 129, 300, 511, 512])
    offsets = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device)
    ids = torch.zeros(int(offsets[-1]), dtype=torch.long, device=device)
    qkv = torch.randn(len(ids), 3, 12, 64, generator=generator).to(device)
    errors = {}
    for reach in (None, 16, 64, 128):
        kernel, blocks = (
            attend(qkv.to(kind), Packed(ids, offsets, 512), 0.0, reach=reach).float()
            for kind in (torch.bfloat16, torch.float32)
        )
        errors[str(reach)] = float((kernel - blocks).norm() / blocks.norm())
    yield {"relative_error": errors}
    assert max(errors.values()) < 1e-2, errors


def _texts(device: torch.device) -> list[str]:
    return pretraining_texts()[: None if device.type == "cuda" else FEW]


@dataclass(frozen=True)
class Corpus:
    """Rows to pretrain on."""

    tokenizer: Tokenizer
    batches: Callable[[str], RankBatches]
    """For a variant: with what its attention can read."""


def _corpus(device: torch.device, length: int, size: int, tokens: int) -> Corpus:
    texts = _texts(device)
    vocabulary = train_vocabulary(texts, vocab_size=VOCAB_SIZE, lowercase=True)
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    rows = pair_rows(texts, tokenizer, length)

    def batches(variant: str) -> RankBatches:
        config = VARIANTS[variant].config.adapted(attention_dropout=0.0)
        source = ShardSource(
            lambda _: rows, tokenizer.pad_id, packed_from=packing(config, device, "bf16")
        )
        return RankBatches(source, GlobalOrder([len(rows)], seed=0), size, tokens)

    return Corpus(tokenizer, batches)


def _model(
    variant: str, tokenizer: Tokenizer, device: torch.device, dropout: float | None = None
) -> ObjectiveModel:
    torch.manual_seed(0)
    config = VARIANTS[variant].config.adapted(
        vocab_size=tokenizer.vocab_size, attention_dropout=0.0, hidden_dropout_prob=dropout
    )
    return ObjectiveModel(config, [PRETRAINING[name](config) for name in ("mlm", "nsp")]).to(device)


def _steps(
    model: ObjectiveModel, batches: RankBatches, loop: LoopConfig, optimizer: OptimizerConfig
) -> Iterator[Step]:
    return steps_of(model, batches, loop, optimizer, warmup_steps=max(1, loop.max_steps // 10))


def ways(device: torch.device) -> Results:
    """A few steps in every way that the loop knows: losses are those of the plain one, or, where
    sums are taken in another order, close to them."""
    on_gpu = device.type == "cuda"
    variant = "bert-base" if on_gpu else "bert-tiny"
    corpus = _corpus(device, 128, 64 if on_gpu else 8, GPU_TOKENS if on_gpu else 512)
    losses: dict[str, list[float]] = {}
    memory: dict[str, float] = {}

    def run(name: str, *, sharded: bool = False, **changes: Any) -> Result:
        model = _model(variant, corpus.tokenizer, device, dropout=0.0)
        if sharded:
            shard(model)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        loop = LoopConfig(max_steps=4, precision="bf16", **changes)
        losses[name] = [
            float(sum(float(part) / step.counts[key] for key, part in step.loss_sums.items()))
            for step in _steps(model, corpus.batches(variant), loop, OptimizerConfig())
        ]
        memory[name] = peak_memory_bytes(device) / 1e9
        return {"losses": losses, "peak_memory_gb": memory}

    yield run("plain")
    yield run("activation checkpointing", activation_checkpointing=True)
    if on_gpu:
        yield run("compiled", compile=True)
    with _group(device):
        yield run("sharded (FSDP2)", sharded=True)
        yield run("sharded and recomputed", sharded=True, activation_checkpointing=True)
    for values in losses.values():
        assert np.allclose(values, losses["plain"], rtol=2e-3), losses


def mfu(device: torch.device) -> Results:
    """Share of the peak FLOP/s that training reaches, with and without compiling; and the Trainer's
    without. Tokens per second where the peak is unknown."""
    on_gpu, texts = device.type == "cuda", _texts(device)
    vocabulary = train_vocabulary(texts, vocab_size=VOCAB_SIZE, lowercase=True)
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    source = "WikiText-2" if os.environ.get("RAYBERT_DATA") else "Python's docstrings"
    rates: Result = {
        "unit": "tokens/s" if peak_flops(device) is None else "share of peak",
        "documents": f"{len(texts)} of {source}",
    }
    shapes = {"base_512": ("bert-base", 512, 256), "large_128": ("bert-large", 128, 512)}
    runs: list[tuple[str, Callable[[], float]]] = []
    peers: list[tuple[str, Callable[[], float]]] = []
    for name, (variant, length, size) in shapes.items():
        if not on_gpu:
            variant, size = "bert-tiny", 4
        rows = pair_rows(texts, tokenizer, length)
        for compiled in (False, True) if on_gpu else (False,):
            pair = Pair(variant, tokenizer, rows, size, 30 if on_gpu else 1, compiled=compiled)
            runs.append((f"{name}, ours{', compiled' if compiled else ''}", pair.ours))
            rates[f"{name}, rows, mean length"] = len(rows), pair.settings["mean_length"]
        peers.append((f"{name}, trainer", pair.trainer))
    for key, rate in runs + peers:
        began = time.perf_counter()
        rates[key] = [rate() for _ in range(2)]
        print(key, rates[key], f"{time.perf_counter() - began:.1f} s", flush=True)
        yield rates


@contextmanager
def _group(device: torch.device) -> Iterator[None]:
    """A process group of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


CURVE_MINUTES = 2.0


def curve(device: torch.device) -> Results:
    """Some minutes of pretraining: losses, speed and MFU along the way."""
    on_gpu = device.type == "cuda"
    variant = "bert-base" if on_gpu else "bert-tiny"
    corpus = _corpus(device, 128, 256 if on_gpu else 8, GPU_TOKENS if on_gpu else 512)
    model, peak = _model(variant, corpus.tokenizer, device), peak_flops(device)
    minutes = CURVE_MINUTES if on_gpu else 0.02
    loop = LoopConfig(max_steps=100_000, max_hours=minutes / 60, precision="bf16", compile=on_gpu)
    if on_gpu:  # or the time to compile would count towards the schedule
        warm = _model(variant, corpus.tokenizer, device)
        list(_steps(warm, corpus.batches(variant), replace(loop, max_steps=2), OptimizerConfig()))
    points: list[Mapping[str, float]] = []
    every = 100 if on_gpu else 2
    tokens, flops, began = 0, 0, time.perf_counter()
    for step in _steps(model, corpus.batches(variant), loop, OptimizerConfig(lr=4e-4)):
        tokens, flops = tokens + step.tokens, flops + step.flops
        if step.index % every == 0 or step.last:
            mlm = float(step.loss_sums["mlm"]) / step.counts["mlm"]
            seconds = time.perf_counter() - began
            point = {
                "step": step.index,
                "seconds": round(step.elapsed_s, 1),
                "mlm_loss": round(mlm, 3),
                "mlm_accuracy": round(float(step.correct["mlm"]) / step.counts["mlm"], 4),
                "tokens_per_s": round(tokens / seconds),
                **({"mfu": round(flops / seconds / peak, 4)} if peak else {}),
            }
            points.append(point)
            yield {"variant": variant, "minutes": minutes, "points": points}
            tokens, flops, began = 0, 0, time.perf_counter()
    fell = points[-1]["mlm_loss"] < points[0]["mlm_loss"]
    assert fell or len(points) == 1 or not on_gpu, points


def encode(device: torch.device) -> Results:
    """Texts to vectors by `Predictor`, in bfloat16 and MiniLM-L6's shape: texts per second with and
    without tokenizing."""
    on_gpu = device.type == "cuda"
    documents = _texts(device)
    vocabulary = train_vocabulary(documents, vocab_size=VOCAB_SIZE, lowercase=True)
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    texts = [line for text in documents for line in text.split("\n") if len(line) > 40]
    texts = texts[: 8192 if on_gpu else 16]
    task = FeatureExtraction()
    config = VARIANTS["bert-base" if on_gpu else "bert-tiny"].config
    config = config.adapted(vocab_size=tokenizer.vocab_size)
    if on_gpu:  # MiniLM-L6 (Wang et al. 2020)
        inner = replace(config.feed_forward, intermediate_size=1536)
        config = replace(config, hidden_size=384, num_hidden_layers=6, feed_forward=inner)
    config = task.encoder_config(config)
    with tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(0)
        model = ObjectiveModel(config, [task.build_objective(config)])
        save_bundle(Path(scratch, "bundle"), model, tokenizer, About(task=task))
        predictor = Predictor(
            Path(scratch, "bundle"), task="feature-extraction", device=device.type, precision="bf16"
        )
        cut = FeatureExtractionParameters(truncate=True)
        ours = [_rate(lambda: predictor.predict(texts, cut), texts) for _ in range(3)]
        windows = predictor.encode(predictor.rows(texts), cut)
        forward = [_rate(lambda: predictor.forward(windows), texts) for _ in range(2)]
    yield {
        "texts": len(texts),
        "tokens": sum(window.tokens for window in windows),
        "texts_per_s": max(ours[1:]),
        "forward_texts_per_s": max(forward),
    }


def _rate(work: Callable[[], Any], texts: Sequence[str]) -> float:
    began = time.perf_counter()
    work()
    return len(texts) / (time.perf_counter() - began)


STEPS: dict[str, Callable[[torch.device], Results]] = {
    "parity": parity,
    "windows": windows,
    "ways": ways,
    "mfu": mfu,
    "encode": encode,
    "curve": curve,
}
