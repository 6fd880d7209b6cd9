"""Our encoders against transformers' own: the same weights and the same batches of real lengths.

Rows are paragraphs of WikiText-2 if RAYBERT_DATA names its folder, else docstrings of Python; a
batch is drawn from all lengths. transformers pads it to its longest row and uses SDPA. On a GPU
both are compiled and run in bf16.
"""

import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.harness import Planned, compare, main
from bert_core.batches import pack, pad
from bert_core.data.docstrings import docstrings_of
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.vocabulary import train_vocabulary
from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoder
from bert_core.model.hf import encoder_config_to_huggingface
from bert_core.model.hf_weights import to_huggingface
from bert_core.model.variants import VARIANTS

VOCAB_SIZE = 30_522
LENGTH = 512
ROWS = 16
"""Per batch; half as many for large models."""
VARIANTS_HERE = (
    "bert-mini",
    "bert-base",
    "roberta-base",
    "distilbert",
    "albert-base",
    "modernbert-base",
)
ONLY_EAGER = ("deberta-base", "deberta-v3-base")  # transformers has no SDPA for these
QUICK = ("bert-mini", "bert-base", "deberta-v3-base")


def benchmark(rounds: int, quick: bool) -> Iterator[Planned]:
    torch.manual_seed(0)
    rows = _rows()
    generator = np.random.default_rng(0)
    for name in QUICK if quick else VARIANTS_HERE + ONLY_EAGER:
        config = VARIANTS[name].config.adapted(vocab_size=VOCAB_SIZE, pad_token_id=0)
        size = ROWS if name == "bert-mini" else ROWS // 2
        pair = _Pair(config, "eager" if name in ONLY_EAGER else "sdpa")
        chosen = [
            [rows[index] for index in generator.choice(len(rows), size, replace=False)]
            for _ in range(8 if name == "bert-mini" else 1)
        ]
        lengths = [len(row) for batch in chosen for row in batch]
        settings: dict[str, Any] = {
            "what": name,
            "variant": name,
            "rows": size,
            "batches": len(chosen),
            "mean_length": round(float(np.mean(lengths)), 1),
            "longest": max(lengths),
            "precision": "bf16" if pair.device.type == "cuda" else "fp32",
            "threads": torch.get_num_threads(),
            "attention_dropout": config.attention.dropout,
            "hidden_dropout": config.hidden_dropout_prob,
            "peer_settings": f"{pair.attention}, padded to the batch's longest row",
        }
        for measured, backward in (("forward", False), ("forward_backward", True)):
            yield compare(
                f"{measured}_vs_transformers",
                lambda: pair.rate(chosen, pair.ours, backward),  # noqa: B023
                lambda: pair.rate(chosen, pair.theirs, backward),  # noqa: B023
                unit="tokens/s",
                rounds=rounds if name == "bert-mini" else min(rounds, 3),
                **settings,
            )


class _Pair:
    """Our encoder and transformers' own, with the same weights."""

    def __init__(self, config: EncoderConfig, attention: str) -> None:
        self.attention = attention
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        encoder = Encoder(config, pooler=False)
        entries = transformers.AutoConfig.for_model(**encoder_config_to_huggingface(config))
        entries._attn_implementation = attention
        model = transformers.AutoModel.from_config(entries)
        state = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
        named = to_huggingface(state, config)
        prefix = f"{model.base_model_prefix}."
        model.load_state_dict(
            {name.removeprefix(prefix): tensor for name, tensor in named.items()}, strict=False
        )
        self._ours: Any = encoder.to(self.device)
        self._theirs: Any = model.to(self.device)
        self._segments = "token_type_ids" in entries.to_dict() or config.family in (
            "bert",
            "albert",
        )
        if self.device.type == "cuda":
            self._ours, self._theirs = torch.compile(self._ours), torch.compile(self._theirs)

    def ours(self, rows: list[np.ndarray]) -> tuple[torch.Tensor, int]:
        batch = self._moved(pack(rows))
        hidden = self._ours(
            batch["input_ids"], batch["token_type_ids"], offsets=batch["offsets"]
        ).hidden
        return hidden, len(hidden)

    def theirs(self, rows: list[np.ndarray]) -> tuple[torch.Tensor, int]:
        batch = self._moved(pad(rows, pad_id=0))
        tokens = sum(map(len, rows))
        if not self._segments:
            del batch["token_type_ids"]
        return self._theirs(**batch).last_hidden_state, tokens

    def rate(
        self,
        batches: list[list[np.ndarray]],
        forward: Callable[[list[np.ndarray]], tuple[torch.Tensor, int]],
        backward: bool,
    ) -> float:
        """Real tokens per second."""
        self._ours.train(backward)
        self._theirs.train(backward)
        tokens = 0
        began = time.perf_counter()
        for rows in batches:
            with (
                torch.set_grad_enabled(backward),
                torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"),
            ):
                hidden, real = forward(rows)
            tokens += real
            if backward:
                hidden.float().square().mean().backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return tokens / (time.perf_counter() - began)

    def _moved(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}


def _rows() -> list[np.ndarray]:
    """Paragraphs as ids, truncated to `LENGTH`."""
    folder = os.environ.get("RAYBERT_DATA")
    if folder:
        text = (Path(folder) / "wikitext2" / "train.txt").read_text(encoding="utf-8")
        texts = [line for line in text.split("\n") if len(line) > 40]
    else:
        paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        texts = [text for path in paths for text in docstrings_of(path.read_bytes())]
    vocabulary = train_vocabulary(texts[:20_000], vocab_size=VOCAB_SIZE, lowercase=True)
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    return tokenizer.encode(texts[:4000], LENGTH)


if __name__ == "__main__":
    main(benchmark, "encoder")
