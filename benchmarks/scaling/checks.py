"""The model beside what was measured, here or by others, and how far it is off at each point."""

from dataclasses import dataclass, replace

from benchmarks.scaling.inputs import MLPERF, Values
from benchmarks.scaling.training import (
    MEASURED,
    RECIPES,
    Phase,
    Recipe,
    failures_of,
    flops_of,
    step_of,
    training_s,
)

MLPERF_POINTS = {
    # H100s: (rows per step, sequences per second).
    8: (768, 7_760),
    64: (4_608, 53_180),
    512: (3_072, 138_700),
    768: (4_608, 190_700),
    3_472: (13_888, 758_000),
}
MLPERF_FITTED = (8, 512)
"""The points from which `MLPERF_VALUES` has its speed and its fixed time; the others are
predicted."""
MLPERF_LENGTH = 256
"""Mean tokens of Wikipedia's sequences of up to 512: half is padding (Krell et al. 2021)."""
# FP8 with gradients in 16 bits; nothing but computing and communication is modelled.
MLPERF_VALUES = Values(
    mfu=0.532, fill=1.0, gradient_bytes=2.0, plan_s_per_row=0.0, read_bytes_per_s=1e15
)
TRAINER_MFU = 0.19
"""results/2026-11-26-gpu.json: transformers' Trainer on an H200."""
A100_FLOPS = 312e12
TPU_V2_FLOPS = 45e12  # per chip, bf16


@dataclass(frozen=True, kw_only=True)
class Check:
    """A point that was measured."""

    name: str
    measured: float
    modelled: float
    unit: str
    source: str
    fitted: bool = False
    """Whether the model has this point as an input, so that it must agree."""

    @property
    def error(self) -> float:
        """How far the model is off, as a share of what was measured."""
        return self.modelled / self.measured - 1


def checks() -> list[Check]:
    """Every point."""
    return [*_mlperf(), *_trainings(), *_goodputs(), *_measured_here()]


def _mlperf() -> list[Check]:
    points = []
    for gpus, (rows, measured) in MLPERF_POINTS.items():
        phase = Phase(steps=1, rows=rows, length=MLPERF_LENGTH)
        step = step_of("bert-large", phase, gpus, MLPERF_VALUES)
        assert step is not None
        points.append(
            Check(
                name=f"MLPerf BERT-large, {gpus:,} H100",
                measured=measured,
                modelled=rows / step.total_s,
                unit="sequences/s",
                source=MLPERF,
                fitted=gpus in MLPERF_FITTED,
            )
        )
    return points


def _trainings() -> list[Check]:
    a100 = Values(peak_flops=A100_FLOPS, mfu=TRAINER_MFU, fill=1.0)
    hf = Recipe(variant="bert-base", phases=(Phase(steps=70_000, rows=4_096, length=128),))
    goodput = failures_of("bert-base", 1, Values(), spot=True).goodput
    return [
        Check(
            name="BERT-base, 286.7 M rows of 128, transformers on 8 A100",
            measured=11.5,
            modelled=training_s(hf, 8, a100) / 3_600,
            unit="hours",
            source="mosaicml/examples; with the Trainer's MFU as measured here",
        ),
        Check(
            name="BERT on one spot machine against on demand: time",
            measured=21 / 20,
            modelled=1 / goodput,
            unit="ratio",
            source="SkyPilot's example, 21 h for 20 h",
        ),
    ]


def _goodputs() -> list[Check]:
    """Others' goodput, by ours: their failures, our restart and checkpoints of BERT-large."""
    large = failures_of("bert-large", 1_024, Values(), spot=False)
    points = {
        "Llama 3, 16,384 GPUs (more than 90 %)": (0.90, 3.09 * 3_600),
        "ByteRobust, 9,600 GPUs": (0.97, Values().failure_gpu_h / 9_600 * 3_600),
    }
    sources = ("datacenterdynamics", "arXiv 2509.16293; failures per GPU-hour as in the inputs")
    return [
        Check(
            name=f"goodput: {name}",
            measured=measured,
            modelled=replace(large, mean_s=mean_s).goodput,
            unit="share",
            source=source,
        )
        for (name, (measured, mean_s)), source in zip(points.items(), sources, strict=True)
    ]


def _measured_here() -> list[Check]:
    whole = Values(fill=1.0)
    return [
        Check(
            name="MFU of BERT-base, 256 rows of 457 on an H200",
            measured=0.334,
            modelled=flops_of(MEASURED, 1.0) / training_s(MEASURED, 1, whole) / whole.peak_flops,
            unit="of the peak",
            source="results/2026-11-26-gpu.json",
            fitted=True,
        ),
        Check(
            name="BERT-mini on a CPU: two workers against one",
            measured=1.76,
            modelled=2.0,
            unit="ratio",
            source="docs/benchmarks/pretrain.md, 1.72 to 1.88; only an all-reduce of 45 MB is lost",
        ),
    ]


def recipe_of_2018() -> dict[str, float]:
    """BERT-base in four days on 16 chips of TPU v2, beside ours on one H200."""
    recipe = RECIPES["bert-base"]
    return {
        "their_hours": 96.0,
        "their_share_of_peak": flops_of(recipe, 1.0) / (96 * 3_600 * 16 * TPU_V2_FLOPS),
        "our_hours_on_one_gpu": training_s(recipe, 1, Values()) / 3_600,
    }
