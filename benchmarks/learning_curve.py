"""What pretraining is worth, by the number of labelled rows.

    python -m benchmarks.learning_curve --output FOLDER --encoders NAME=BUNDLE … \
        [--only SET …] [--rows N …] [--threads N] [--json FILE]

Every encoder, and the first one's architecture with random weights, is fine-tuned on the first
100, 1,000 and 10,000 rows of a set in a fixed random order, and on all of them, with three seeds.
RAYBERT_DATA names the folder of the sets. A plot is written next to the JSON. A killed run resumes
in its folder.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import provenance
from benchmarks.tasks import LINES, Line, stage_config
from pipelines import finetune
from pipelines.finetune import FinetuneConfig

SETS = ("SST-2", "MRPC", "WNUT-17", "UD EWT", "SQuADShifts")
ALL = 1_000_000
"""More rows than any set has."""
ROWS = (100, 1_000, 10_000, ALL)
RANDOM = "random weights"
LR = 3e-4
"""Among those that Turc et al. 2019 (appendix) try on small models."""
DROPOUT = 0.1
"""In fine-tuning; the encoders are pretrained without, for a few passes over the text (Geiping and
Goldstein 2022, section 4.3)."""


def epochs(rows: int) -> int:
    """So many that a few rows are seen often, and all rows in minutes."""
    return 20 if rows <= 100 else 10 if rows <= 1_000 else 3 if rows <= 20_000 else 1


def benchmark(
    folder: Path,
    encoders: Mapping[str, str],
    sets: Sequence[str],
    sizes: Sequence[int],
    threads: int,
) -> Iterator[dict[str, Any]]:
    """A point of a curve for every set, number of rows and encoder."""
    data = Path(os.environ["RAYBERT_DATA"])
    first = next(iter(encoders.values()))
    for line in LINES:
        if line.name not in sets:
            continue
        known = 0
        for size in sizes:
            place = folder / line.name.lower().replace(" ", "-") / str(size)
            place.mkdir(parents=True, exist_ok=True)
            shared = stage_config(replace(line, rows=size), first, data, place)
            rows = len(Path(shared.train.source).read_bytes().splitlines())
            if rows == known:  # the set has no more
                break
            known = rows
            shared = replace(
                shared,
                lr=LR,
                epochs=epochs(rows),
                hidden_dropout_prob=DROPOUT,
                attention_probs_dropout_prob=DROPOUT,
                threads_per_worker=threads,
            )
            for name, bundle in encoders.items():
                yield _point(line, rows, name, replace(shared, model=bundle), place)
            yield _point(line, rows, RANDOM, replace(shared, from_scratch=True), place)


def _point(
    line: Line, rows: int, encoder: str, config: FinetuneConfig, place: Path
) -> dict[str, Any]:
    began = time.monotonic()
    counts = finetune.run(replace(config, output=str(place / encoder.replace(" ", "-")))).counts
    metric = line.metric or counts["primary_metric"]
    scores = [seed[metric] for seed in counts["seeds"]]
    return {
        "set": line.name,
        "rows": rows,
        "encoder": encoder,
        "metric": metric,
        "mean": float(np.mean(scores)),
        "std": float(np.std(scores, ddof=1)),
        "scores": scores,
        "baseline": counts.get(f"baseline_{metric}"),
        "held_out_rows": counts["held_out_rows"],
        "epochs": config.epochs,
        "minutes": (time.monotonic() - began) / 60,
        "made": provenance(),
    }


def draw(points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel per set: the score by the number of rows, a line per encoder, a dot per seed, and a
    dashed line for the best answer that ignores the input, if the scores come near it."""
    from matplotlib.figure import Figure

    sets = list(dict.fromkeys(point["set"] for point in points))
    figure = Figure(figsize=(3.2 * len(sets), 3.6), layout="constrained")
    panels = figure.subplots(1, len(sets), squeeze=False)[0]
    for panel, name in zip(panels, sets, strict=True):
        of_set = [point for point in points if point["set"] == name]
        for number, encoder in enumerate(dict.fromkeys(point["encoder"] for point in points)):
            mine = [point for point in of_set if point["encoder"] == encoder]
            rows = [point["rows"] for point in mine]
            color, named = f"C{number}", encoder.replace("_", " ")
            panel.plot(rows, [100 * point["mean"] for point in mine], color=color, label=named)
            for point in mine:
                seeds = [100 * score for score in point["scores"]]
                panel.plot([point["rows"]] * len(seeds), seeds, "o", color=color, markersize=3)
        metric, baseline = of_set[0]["metric"], of_set[0]["baseline"]
        lowest = min(score for point in of_set for score in point["scores"])
        if baseline and baseline > lowest - 0.1:
            panel.axhline(100 * baseline, color="gray", linestyle="--", linewidth=1)
        panel.set(title=name, xscale="log", xlabel="labelled rows", ylabel=f"{metric} in %")
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.grid(alpha=0.3)
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside upper center", ncols=len(names), frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning_curve")
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--encoders", nargs="+", required=True, metavar="NAME=BUNDLE")
    parser.add_argument("--only", nargs="*", choices=SETS, default=SETS, metavar="SET")
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS, metavar="N")
    parser.add_argument("--threads", type=int, default=2, help="one where others run beside it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list of points there")
    chosen = parser.parse_args()
    encoders = dict(each.split("=", 1) for each in chosen.encoders)
    points = []
    folder = chosen.output.absolute()
    for point in benchmark(folder, encoders, chosen.only, chosen.rows, chosen.threads):
        print(
            f"{point['set']:<12}{point['rows']:>8,} rows  {point['encoder']:<20}"
            f"{point['metric']} {point['mean']:.1%} ± {point['std']:.1%}, "
            f"{point['minutes']:.1f} minutes",
            flush=True,
        )
        points.append(point)
        if chosen.json:  # after every point
            chosen.json.write_text(json.dumps(points, indent=2, default=str) + "\n")
            draw(points, chosen.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
