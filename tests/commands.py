"""Command lines of raybert that tests run."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # conftest.py imports this before the packages are checked
    from pipelines.pretrain import PretrainConfig


def raybert(*arguments: str) -> list[str]:
    """`raybert` with these arguments, from this checkout."""
    return [sys.executable, "-m", "pipelines.cli", *arguments]


def pretrain_arguments(config: "PretrainConfig", *more: str) -> list[str]:
    """`pretrain` of small batches, and more options, of which the last counts."""
    return [
        "pretrain", "--output", config.output, "--shards", config.shards,
        "--tokenizer", config.tokenizer, "--variant", str(config.variant),
        "--global_batch_size", "16", "--micro_batch_tokens", "256", "--held_out_rows", "64",
        "--loop.max_steps", str(config.loop.max_steps), "--loop.precision", "fp32",
        *more,
    ]  # fmt: skip
