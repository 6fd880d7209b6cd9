"""Shared by all benchmarks: ours and the peer in one run, interleaved, and a table of ratios.

Machines are shared and noisy, so only ratios within one run count, and every line says how much of
the CPUs other processes took during it. This module does not need Ray, so benchmarks of `bert_core`
run without it.
"""

import argparse
import datetime as dt
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.processes import Others

ROUNDS, QUICK_ROUNDS = 5, 3
QUIET = 0.05
"""Most of the CPUs that others may take for a round to count as measured on a quiet machine."""
PACKAGES = ("ray", "torch", "tokenizers", "transformers", "datasets", "pyarrow", "numpy", "mlflow")


Mine = TypeVar("Mine")
Theirs = TypeVar("Theirs")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One line of a table; above a ratio of 1 ours is better."""

    name: str
    ours: float
    """Median of the rounds."""
    peer: float
    unit: str
    ratio: float
    """Median over the rounds of ours / peer, both measured one after the other in each round."""
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Planned:
    """A comparison that has not been run yet."""

    name: str
    make: Callable[[], Comparison]


def compare(
    name: str,
    ours: Callable[[], float],
    peer: Callable[[], float],
    *,
    unit: str,
    rounds: int,
    warm_up: bool = True,
    quiet: bool = False,
    **settings: Any,
) -> Planned:
    """Run both `rounds` times, alternating which goes first, after a warm-up round.

    Args:
        ours: does the work once and returns its rate; higher is better.
        peer: the same work.
        warm_up: whether to run the warm-up round; it is useless if each side is a process that has
            just started.
        quiet: whether the ratio means something only if all cores are free: then rounds in which
            other processes took more than `QUIET` are repeated, at most `rounds` times in all, and
            the quietest count.
    """

    def make() -> Comparison:
        if warm_up:
            ours(), peer()
        pairs, cpu_of_others = in_turn(ours, peer, rounds, again=rounds if quiet else 0)
        return compared(name, pairs, cpu_of_others, unit=unit, **settings)

    return Planned(name, make)


def in_turn(
    ours: Callable[[], Mine], peer: Callable[[], Theirs], rounds: int, *, again: int = 0
) -> tuple[list[tuple[Mine, Theirs]], list[float]]:
    """The results of both in each round, and the share of the CPUs that other processes took in it.

    Args:
        again: most extra rounds to run while fewer than `rounds` were quiet; the quietest `rounds`
            are returned.
    """
    measured: list[tuple[float, tuple[Mine, Theirs]]] = []
    for index in range(rounds + again):
        if index >= rounds and sum(share <= QUIET for share, _ in measured) >= rounds:
            break
        other_processes = Others()
        if index % 2:
            theirs = peer()
            pair = (ours(), theirs)
        else:
            pair = (ours(), peer())
        measured.append((other_processes.share(), pair))
    if again:
        measured = sorted(measured, key=lambda entry: entry[0])[:rounds]
    return [pair for _, pair in measured], [share for share, _ in measured]


def compared(
    name: str,
    pairs: Sequence[tuple[float, float]],
    cpu_of_others: Sequence[float],
    *,
    unit: str,
    **settings: Any,
) -> Comparison:
    """A line from the rates of both in each round and the share of the CPUs that others took."""
    return Comparison(
        name=name,
        ours=statistics.median(pair[0] for pair in pairs),
        peer=statistics.median(pair[1] for pair in pairs),
        unit=unit,
        ratio=statistics.median(mine / theirs for mine, theirs in pairs),
        settings={
            **settings,
            "rounds": len(pairs),
            "ratios": [mine / theirs for mine, theirs in pairs],
            "cpu_share_of_others": [round(share, 3) for share in cpu_of_others],
        },
    )


def main(benchmark: Callable[[int, bool], Iterable[Planned | Comparison]], module: str) -> None:
    """`python -m benchmarks.<name> [--quick] [--only NAME …] [--json FILE]`.

    Args:
        benchmark: takes the number of rounds and whether to be quick, and yields each comparison;
            one that is only planned is run before the next is requested.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}")
    parser.add_argument("--quick", action="store_true", help="under five minutes on two cores")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these comparisons")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list of results there")
    arguments = parser.parse_args()
    results = []
    print(f"{'name':<40}{'ours':>14}{'peer':>14}  {'unit':<12}{'ratio':>7}", flush=True)
    for planned in benchmark(QUICK_ROUNDS if arguments.quick else ROUNDS, arguments.quick):
        if arguments.only and planned.name not in arguments.only:
            continue
        comparison = planned.make() if isinstance(planned, Planned) else planned
        print_line(comparison)
        results.append({**asdict(comparison), "made": provenance()})
        if arguments.json:  # after every line, since some take half an hour
            arguments.json.write_text(json.dumps(results, indent=2, default=str) + "\n")


def print_line(line: Comparison) -> None:
    """Print a line of the table; it says so if the machine was not quiet."""
    digits = 0 if min(line.ours, line.peer) >= 10 else 2
    sides = "".join(f"{side:>14,.{digits}f}" for side in (line.ours, line.peer))
    text = f"{line.name:<40}{sides}  {line.unit:<12}{line.ratio:>7.2f}"
    taken = statistics.median(line.settings.get("cpu_share_of_others") or [0.0])
    noise = f"; other processes took {taken:.0%} of the CPUs: NOT QUIET" if taken > QUIET else ""
    print(f"{text}  {line.settings.get('what', '')}{noise}", flush=True)


def provenance() -> dict[str, Any]:
    """When, how and on what machine it was measured."""
    return {
        "date": dt.date.today().isoformat(),
        "command": f"python -m {' '.join([_module(), *sys.argv[1:]])}",
        "machine": machine(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES if _version(name)},
    }


def machine() -> str:
    """Processor, cores and GPU, in words."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    words = f"{names[0] if names else model}, {os.cpu_count()} cores"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        words += f", {torch.cuda.get_device_name()}"
    return words


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec else sys.argv[0]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
