"""Time and cost of training on 1 to 1,024 GPUs, and of preparing and serving on many hosts.

    python -m benchmarks.scale [--json FILE] [--plot FILE]

A model, no measurement: its inputs have sources and intervals (`benchmarks/scaling/inputs.py`),
and it is compared with everything that was measured (`checks.py`). Only the planning of a thousand
hosts is run. `docs/scale.md` says what follows.
"""

import argparse
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import provenance
from benchmarks.scaling.checks import Check, checks, mosaicbert, recipe_of_2018
from benchmarks.scaling.dials import batches, intervals
from benchmarks.scaling.inputs import inputs
from benchmarks.scaling.plan import DriverPlan, RankPlan, driver_plan, rank_plan
from benchmarks.scaling.services import CORPUS_WORDS, prepare, serve
from benchmarks.scaling.training import GPU_COUNTS, RECIPES, Estimate, Spread, estimate
from tracking.runs.plots import COLOURS

PREPARING_CORES = (1, 16, 64, 1_024, 8_192)
ANSWERS_PER_S = (100, 1_000, 10_000, 100_000)
HOSTS, GPUS = 1_000, 8_000
FILES, FILE_BYTES = 64_000, 3 << 20
"""A corpus for a thousand hosts: a compressed file per core."""
ROWS = 65_536
"""Of the global batch whose planning is measured: BERT-large's by LAMB."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the estimates, as PNG")
    arguments = parser.parse_args()
    began = time.perf_counter()
    estimates = [
        possible
        for name in RECIPES
        for gpus in GPU_COUNTS
        if (possible := estimate(name, gpus)) is not None
    ]
    compared = checks()
    print_estimates(estimates)
    print_dials()
    print_checks(compared)
    print_services()
    modelled_s = time.perf_counter() - began
    rank, driver = rank_plan(GPUS, ROWS), driver_plan(FILES, FILE_BYTES)
    print_plans(rank, driver)
    print(f"\nmodelled in {modelled_s:.1f} s, planned in {time.perf_counter() - began:.1f} s")
    if arguments.json:
        arguments.json.write_text(
            json.dumps(_document(estimates, compared, rank, driver), indent=2) + "\n"
        )
    if arguments.plot:
        plot(estimates, arguments.plot)


def _document(
    estimates: list[Estimate], compared: list[Check], rank: RankPlan, driver: DriverPlan
) -> dict[str, Any]:
    return {
        "made": provenance(),
        "inputs": {name: asdict(value) for name, value in inputs().items()},
        "training": [_finite(asdict(row)) for row in estimates],
        "batches": [asdict(batch) for batch in batches()],
        "intervals": [asdict(interval) for interval in intervals()],
        "checks": [{**asdict(check), "error": round(check.error, 4)} for check in compared],
        "recipe_of_2018": recipe_of_2018(),
        "mosaicbert": mosaicbert(),
        "prepare": [
            {"cores": cores, "object_store": store, **asdict(parts), "limit": parts.limit}
            for cores in PREPARING_CORES
            for store in (False, True)
            for parts in (prepare(CORPUS_WORDS, cores, object_store=store),)
        ],
        "serve": [
            {"answers_per_s": rate, "paragraphs": paragraphs, **asdict(needed)}
            for rate in ANSWERS_PER_S
            for paragraphs in (False, True)
            for needed in (serve(rate, paragraphs=paragraphs),)
        ],
        "plans": [asdict(rank), asdict(driver)],
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity: null stands for what never ends."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and math.isinf(value) else value


def print_estimates(estimates: list[Estimate]) -> None:
    """A table per recipe: median and 90 % interval over draws of the inputs."""
    for name, recipe in RECIPES.items():
        rows = recipe.phases[0].rows
        print(f"\n{name}: {recipe.tokens / 1e9:.1f} G tokens, {rows:,} rows per step at first")
        print(
            f"{'GPUs':>6}{'hours':>24}{'$':>24}{'$ on spot':>24}{'ideal':>7}{'goodput':>9}"
            f"{'on spot':>9}  limit"
        )
        for row in estimates:
            if row.recipe == name:
                print(
                    f"{row.gpus:>6,}{spread(row.hours):>24}{spread(row.cost):>24}"
                    f"{spread(row.spot_cost):>24}{row.efficiency:>7.0%}{row.goodput:>9.1%}"
                    f"{row.spot_goodput:>9.0%}  {row.limit}"
                )


def spread(value: Spread) -> str:
    """`1.23 (0.98 to 1.60)`."""
    low, median, high = (_short(each) for each in (value.low, value.median, value.high))
    return f"{median} ({low} to {high})"


def _short(value: float) -> str:
    if math.isinf(value):
        return "never"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def print_dials() -> None:
    """How many GPUs a batch keeps busy, and what the interval of checkpoints does to goodput."""
    print("\nmost GPUs at 80 % of the ideal speed, at 50 %, and at 80 % on 100 Gbit/s per host")
    for batch in batches():
        print(
            f"{batch.variant:<12}{batch.rows:>7,} rows{batch.gpus_at_80:>7,}{batch.gpus_at_50:>7,}"
            f"{batch.gpus_at_80_slow_network:>7,}"
        )
    print("\ngoodput of bert-large by seconds between checkpoints")
    for row in intervals():
        fixed = ", ".join(f"{seconds:,} s {share:.1%}" for seconds, share in row.fixed.items())
        kind = "on spot" if row.spot else "on demand"
        print(f"{row.gpus:>6,} {kind:<10} best {row.best_s:>5,.0f} s {row.best:.1%}; {fixed}")


def print_checks(compared: list[Check]) -> None:
    """What was measured, what the model says, and how far it is off."""
    print(f"\n{'checked at':<62}{'measured':>11}{'model':>11}{'off':>7}")
    for check in compared:
        note = "  (fitted)" if check.fitted else ""
        print(
            f"{check.name:<62}{_short(check.measured):>11}{_short(check.modelled):>11}"
            f"{check.error:>+7.0%}{note}  {check.unit}"
        )
    theirs, twenty = recipe_of_2018(), mosaicbert()
    print(
        f"the 2018 recipe: 96 h on 16 TPU v2 chips at {theirs['their_share_of_peak']:.0%} of their "
        f"peak; {theirs['our_hours_on_one_gpu']:.0f} h on one H200\n"
        f"MosaicBERT's $20 ({twenty['their_gpu_hours']:.1f} h of an A100): "
        f"{twenty['our_rows'] / 1e6:.0f} M rows of 128 here"
    )


def print_services() -> None:
    """Preparation of Wikipedia and books, and serving."""
    print(f"\npreparing {CORPUS_WORDS / 1e9:.1f} G words\n{'cores':>6}{'s':>9}  limit; on S3")
    for cores in PREPARING_CORES:
        local = prepare(CORPUS_WORDS, cores)
        store = prepare(CORPUS_WORDS, cores, object_store=True)
        print(f"{cores:>6,}{local.total_s:>9,.0f}  {local.limit}; {store.total_s:,.0f} s", end="")
        print(f", {store.limit}")
    print(f"\n{'answers/s':>9}{'cores':>8}{'hosts':>7}{'proxies':>9}; for paragraphs")
    for rate in ANSWERS_PER_S:
        short, long = serve(rate), serve(rate, paragraphs=True)
        print(
            f"{rate:>9,}{short.cores:>8,}{short.hosts:>7,}{short.proxies:>9,}; "
            f"{long.cores:,} cores on {long.hosts:,} hosts"
        )


def print_plans(rank: RankPlan, driver: DriverPlan) -> None:
    """What the planning of a thousand hosts took here."""
    print(
        f"\none of {rank.world_size:,} ranks plans {rank.rows:,} rows per step: "
        f"{rank.step_cpu_s * 1e3:.0f} ms ({rank.cpu_s_per_row * 1e6:.2f} µs per row), "
        f"{rank.first_step.cpu_s:.2f} s and {rank.first_step.peak_bytes / 2**20:.0f} MiB at first"
        f"\nthe driver plans {driver.files:,} files in {driver.blocks:,} blocks: "
        f"{driver.planning.cpu_s:.2f} s, {driver.planning.peak_bytes / 2**20:.0f} MiB, of which "
        f"every worker gets {driver.sent_bytes / 2**20:.0f} MiB"
    )


def plot(estimates: list[Estimate], path: Path) -> None:
    """Hours, dollars and efficiency by the number of GPUs."""
    figure = Figure(figsize=(12.0, 4.2), layout="constrained")
    hours, cost, efficiency = figure.subplots(1, 3)
    for colour, name in zip(COLOURS, RECIPES, strict=False):
        rows = [row for row in estimates if row.recipe == name]
        gpus = [row.gpus for row in rows]
        for axes, spreads, style in (
            (hours, [row.hours for row in rows], "-"),
            (cost, [row.cost for row in rows], "-"),
            (cost, [row.spot_cost for row in rows], "--"),
        ):
            _draw(axes, gpus, spreads, colour, style, name)
        efficiency.plot(gpus, [row.efficiency for row in rows], color=colour, label=name)
    hours.set_ylabel("hours")
    cost.set_ylabel("$ (dashed: spot)")
    efficiency.set_ylabel("share of the ideal speed, without failures")
    efficiency.set_ylim(0, 1.05)
    hours.legend(frameon=False, loc="upper right")
    for axes in (hours, cost):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,g}")
    for axes in (hours, cost, efficiency):
        axes.set_xscale("log", base=2)
        axes.set_xticks(GPU_COUNTS[::2], [f"{count:,}" for count in GPU_COUNTS[::2]])
        axes.set_xlabel("GPUs")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e4e7eb", linewidth=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _draw(
    axes: Axes, gpus: list[int], spreads: list[Spread], colour: str, style: str, name: str
) -> None:
    """The median as a line in its interval; what never ends is left out."""
    drawn = [
        (count, value)
        for count, value in zip(gpus, spreads, strict=True)
        if math.isfinite(value.high)
    ]
    counts = [count for count, _ in drawn]
    axes.plot(counts, [value.median for _, value in drawn], style, color=colour, label=name)
    axes.fill_between(
        counts,
        [value.low for _, value in drawn],
        [value.high for _, value in drawn],
        color=colour,
        alpha=0.15 if style == "-" else 0.06,
        linewidth=0,
    )


if __name__ == "__main__":
    main()
