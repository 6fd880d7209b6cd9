"""Time and cost of training on 1 to 1,024 GPUs.

    python -m benchmarks.scale [--json FILE]

A model, not a measurement: its inputs have sources and intervals (`benchmarks/scaling/inputs.py`),
and it is compared with everything that was measured (`checks.py`). `docs/scale.md` has the results.
"""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import provenance
from benchmarks.scaling.checks import Check, checks, recipe_of_2018
from benchmarks.scaling.dials import batches, intervals
from benchmarks.scaling.inputs import inputs
from benchmarks.scaling.training import GPU_COUNTS, RECIPES, Estimate, Spread, estimate


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it there")
    arguments = parser.parse_args()
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
    if arguments.json:
        arguments.json.write_text(json.dumps(_document(estimates, compared), indent=2) + "\n")


def _document(estimates: list[Estimate], compared: list[Check]) -> dict[str, Any]:
    return {
        "made": provenance(),
        "inputs": {name: asdict(value) for name, value in inputs().items()},
        "training": [_finite(asdict(row)) for row in estimates],
        "batches": [asdict(batch) for batch in batches()],
        "intervals": [asdict(interval) for interval in intervals()],
        "checks": [{**asdict(check), "error": round(check.error, 4)} for check in compared],
        "recipe_of_2018": recipe_of_2018(),
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
    theirs = recipe_of_2018()
    print(
        f"the 2018 recipe: 96 h on 16 TPU v2 chips at {theirs['their_share_of_peak']:.0%} of their "
        f"peak; {theirs['our_hours_on_one_gpu']:.0f} h on one H200"
    )


if __name__ == "__main__":
    main()
