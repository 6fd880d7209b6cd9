"""What the model of time and cost reads: every number with its interval, unit and source.

`Values()` has the likely ones; `drawn` takes each from a triangular distribution over its interval.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

GPUS_PER_HOST = 8
GPU_RESULT = "benchmarks/results/2026-11-26-gpu.json"
MLPERF = "MLPerf Training v3.0 and v3.1, NVIDIA's logs"
ASSUMED = "assumed, not measured"


@dataclass(frozen=True, kw_only=True)
class Input:
    """A number that the model reads; low, likely and high are equal if it is exact."""

    low: float
    likely: float
    high: float
    unit: str
    source: str


def _uncertain(low: float, likely: float, high: float, unit: str, source: str) -> Any:
    values = Input(low=low, likely=likely, high=high, unit=unit, source=source)
    return field(default=likely, metadata={"input": values})


def _exact(value: float, unit: str, source: str) -> Any:
    return _uncertain(value, value, value, unit, source)


@dataclass(frozen=True, kw_only=True)
class Values:
    """One number for every input: H200s, eight per host, as the MFU was measured on one."""

    peak_flops: float = _exact(989e12, "FLOP/s", "NVIDIA's data sheet, dense bf16")
    mfu: float = _uncertain(
        0.288, 0.334, 0.348, "of the peak", f"{GPU_RESULT}: eager, compiled, tried"
    )
    """Of a step of BERT-base with 256 rows of 457 tokens, the fixed time included."""
    fill: float = _uncertain(
        0.89, 0.95, 1.0, "of a row", "WikiText-2 in benchmarks/results: 457 of 512, 122 of 128"
    )
    fixed_s: float = _uncertain(
        0.2e-3,
        0.58e-3,
        1.7e-3,
        "s per step and layer",
        f"fitted to {MLPERF}; not measured for ours",
    )
    gradient_bytes: float = _exact(4, "bytes per weight", "fp32, torch's DistributedDataParallel")
    bucket_bytes: float = _exact(25 * 2**20, "bytes", "torch's DistributedDataParallel, default")
    overlap: float = _uncertain(
        0.5, 0.9, 1.0, "of the last backward pass", f"{ASSUMED}: hides the all-reduce"
    )
    nvlink_bytes_per_s: float = _uncertain(
        350e9,
        400e9,
        470e9,
        "bytes/s",
        "nccl-tests' busbw on 8 H100 (docs.alayanew.com: 460 to 480)",
    )
    network_bytes_per_s: float = _uncertain(
        25e9,
        40e9,
        47e9,
        "bytes/s per GPU",
        "400 Gbit/s per GPU, 50 to 95 % of it reached (assumed)",
    )
    hop_s: float = _uncertain(2e-6, 5e-6, 15e-6, "s per hop and bucket", ASSUMED)
    plan_s_per_row: float = _uncertain(
        0.5e-6,
        0.7e-6,
        2e-6,
        "s per row of the global batch",
        "one rank's plan of 65,536 rows, two CPUs (results/2026-11-26-scale.json)",
    )
    read_bytes_per_s: float = _uncertain(0.5e9, 1.5e9, 5e9, "bytes/s per host", ASSUMED)
    copy_bytes_per_s: float = _uncertain(
        2e9, 6e9, 20e9, "bytes/s", f"{ASSUMED}: GPU to pageable memory"
    )
    upload_bytes_per_s: float = _uncertain(0.1e9, 0.4e9, 1.5e9, "bytes/s", f"{ASSUMED}: one writer")
    start_s: float = _uncertain(
        20, 60, 180, "s", f"10 s here for Ray; {ASSUMED} with NCCL and torch.compile"
    )
    restart_s: float = _uncertain(
        23, 185, 600, "s", "23 s here (docs/benchmarks/pretrain.md); a new host: 185 s (ray#65047)"
    )
    failure_gpu_h: float = _uncertain(
        8_090, 20_000, 50_700, "GPU-hours per failure", "Meta RSC (arXiv 2410.21680), Llama 3"
    )
    spot_host_h: float = _uncertain(
        1.4, 4.4, 16.7, "host-hours per reclaim", "skypilot-org/spot-traces, 7 of V100s, AWS 2023"
    )
    price: float = _exact(3.50, "$ per GPU-hour", "skypilot-catalog v7, nebius, H200")
    spot_price: float = _exact(1.45, "$ per GPU-hour", "skypilot-catalog v7, nebius, H200")


def inputs() -> dict[str, Input]:
    """Every input by name."""
    return {each.name: each.metadata["input"] for each in fields(Values)}


def drawn(rng: np.random.Generator) -> Values:
    """Every input from its interval, independently of the others."""
    return Values(
        **{
            name: value.likely
            if value.low == value.high
            else rng.triangular(value.low, value.likely, value.high)
            for name, value in inputs().items()
        }
    )
