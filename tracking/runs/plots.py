"""Plots a run for people to look at: training curves, and which labels a model confuses.

Uses only matplotlib's objects: no pyplot, no state, no display. Every legend has an explicit place,
even the default: otherwise matplotlib warns of large data when the machine is busy for a second.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bert_core.metrics.calibration import Reliability
from bert_core.wording import shortened
from tracking.runs.curves import Curve, read_curves
from tracking.runs.goodput import Goodput
from tracking.runs.metric_names import ACTIVITIES, CURVES
from tracking.runs.story import short_number

COLOURS = ("#1f5aa6", "#d9622b", "#2f8f6b", "#8a4fa3", "#b8912a", "#5b6770")
TIME_COLOURS = (*COLOURS, "#a8323e", "#7fa8d9", "#c9ced6")
# Up to this many points, each is marked: a line between two points alone says little.
MARKED_UP_TO, FEW_POINTS = 40, 2
"""Points of a line that are marked, and so few that they are no line."""
# Up to this many values, an axis of trials has evenly spaced places for them.
PLACES_UP_TO = 6
# Above this many labels, their names and the numbers in the squares are too small to read.
LABELS_UP_TO = 30
LABEL_UP_TO = 32
"""Maximum characters of a label's name."""
DPI, PADDING_INCHES = 130, 0.1


def plot_curves(
    metrics: str | Path, folder: str | Path, steps_per_seed: int | None = None
) -> list[Path]:
    """Draw the curves of a `metrics.jsonl`, one PNG per kind of metric in it.

    Args:
        steps_per_seed: optimizer steps of each seed, for a run that trained several seeds. They
            are drawn pale over each other, with their mean on top.
    Raises: FileNotFoundError without `metrics`.
    """
    curves = read_curves(metrics, steps_per_seed)
    return [
        _plot_kind(kind, of_kind, Path(folder) / f"{kind}.png")
        for kind in CURVES
        if (of_kind := [curve for curve in curves if curve.kind == kind])
    ]


def _plot_kind(kind: str, curves: list[Curve], path: Path) -> Path:
    """Draw one kind of metric, one colour per metric; metrics on rows other than training rows are
    dashed."""
    figure, axes = _figure(7.2, 4.0)
    metrics = sorted({curve.metric for curve in curves})
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(metrics)}
    for curve in curves:
        _draw_curve(axes, curve, colours[curve.metric])
    axes.set_xlabel("step")
    axes.set_ylabel(CURVES[kind][0])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.yaxis.set_major_formatter(FuncFormatter(_short_number))
    if kind in ("learning_rate", "throughput"):
        axes.set_ylim(bottom=0)
    if len(curves) > 1:
        axes.legend(frameon=False, loc="best")
    else:
        axes.set_title(curves[0].name, loc="left", fontsize=11)
    return _save(figure, path)


def plot_time(spent: Goodput, path: str | Path) -> Path:
    """Draw the wall time of a run as one bar, by activity."""
    figure, axes = _figure(7.2, 2.2)
    activities = {name: s for name in ACTIVITIES if (s := spent.seconds.get(name, 0.0)) > 0}
    unit_s, unit = (3600, "hours") if spent.wall_s >= 7200 else (1, "seconds")
    bar_start = 0.0
    for (name, seconds), colour in zip(activities.items(), TIME_COLOURS, strict=False):
        label = f"{name.replace('_', ' ')} {seconds / spent.wall_s:.1%}"
        axes.barh(0, seconds / unit_s, left=bar_start, color=colour, label=label)
        bar_start += seconds / unit_s
    axes.set_yticks([])
    axes.set_xlabel(unit)
    axes.set_title(f"goodput {spent.goodput:.0%}", loc="left", fontsize=11)
    axes.legend(frameon=False, ncols=3, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    return _save(figure, Path(path))


def plot_confusion(
    labels: Sequence[str], matrix: Int[np.ndarray, "true predicted"], path: str | Path
) -> Path:
    """Draw counts of true (rows) against predicted labels; the shade is the share of the row.

    If there are too many labels to read, those with most errors are drawn, the rest as one.
    """
    labels, matrix, note = readable(labels, matrix)
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    side = 3.0 + 0.42 * len(labels)
    figure, axes = _figure(side + 0.8, side)
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    shown = [shortened(label, LABEL_UP_TO) for label in labels]
    axes.set_xticks(range(len(labels)), shown, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(labels)), shown)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.set_title(note, loc="left", fontsize=11)
    for (row, column), count in np.ndenumerate(matrix):
        if count:
            colour = "white" if share[row, column] > 0.6 else "#222222"
            text = f"{count}" if count < 10_000 else _short_number(float(count))
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03, label="share of the true label")
    return _save(figure, Path(path))


def readable(
    labels: Sequence[str], matrix: Int[np.ndarray, "true predicted"]
) -> tuple[list[str], Int[np.ndarray, "shown shown"], str]:
    """Return the labels and counts to draw, in order, and a note on the labels left out."""
    if len(labels) <= LABELS_UP_TO:
        return list(labels), matrix, ""
    errors = matrix.sum(axis=0) + matrix.sum(axis=1) - 2 * matrix.diagonal()
    shown = np.sort(np.argsort(-errors, kind="stable")[: LABELS_UP_TO - 1])
    places = np.full(len(labels), len(shown))
    places[shown] = np.arange(len(shown))
    merged = np.zeros((len(shown) + 1, len(shown) + 1), dtype=np.int64)
    np.add.at(merged, np.ix_(places, places), matrix)
    note = f"{len(shown)} of {len(labels)} labels: those with most errors"
    return [*(labels[place] for place in shown), "all others"], merged, note


def plot_reliability(fit: Reliability, path: str | Path) -> Path:
    """Draw, for each probability, the share of answers that are right, and how many items got it.

    A calibrated model lies on the diagonal (Guo et al. 2017, figure 1).
    """
    figure = Figure(figsize=(5.4, 6.0))
    shares, counts = figure.subplots(
        2, 1, sharex=True, height_ratios=(3, 1), gridspec_kw={"hspace": 0.08}
    )
    filled = fit.counts > 0
    starts, widths = fit.edges[:-1][filled], np.diff(fit.edges)[filled]
    bars: dict[str, Any] = {
        "align": "edge",
        "color": COLOURS[0],
        "edgecolor": "white",
        "linewidth": 0.8,
    }
    shares.bar(starts, fit.accuracy[filled], widths, label="share that is right", **bars)
    shares.plot([0, 1], [0, 1], "--", color=COLOURS[5], linewidth=1.2, label="perfect calibration")
    shares.plot(
        fit.confidence[filled], fit.accuracy[filled], "o", color=COLOURS[1], ms=4,
        label="at the mean probability",
    )  # fmt: skip
    shares.set_ylim(0, 1)
    shares.set_ylabel("share that is right")
    shares.set_title(
        f"expected calibration error {fit.expected_calibration_error:.3f}", loc="left", fontsize=11
    )
    shares.legend(frameon=False, loc="upper left")
    counts.bar(starts, fit.counts[filled], widths, **bars)
    counts.set_ylabel("count")
    counts.yaxis.set_major_formatter(FuncFormatter(_short_number))
    counts.set_xlabel("predicted probability")
    counts.set_xlim(0, 1)
    for axes in (shares, counts):
        _style(axes)
    return _save(figure, Path(path))


def plot_answers(
    columns: Mapping[str, np.ndarray], labels: Sequence[str], path: str | Path
) -> Path | None:
    """Draw predictions against the truth: counts for labels, a scatter plot for numbers.

    Returns None if answers are neither one label nor one number.

    Args:
        columns: `predicted` and `label`, one entry per row; label ids if the answers are labels.
    """
    predicted, truth = columns.get("predicted"), columns.get("label")
    if predicted is None or truth is None or truth.ndim != 1:
        return None
    if truth.dtype.kind == "i":
        if not labels:
            return None
        known = predicted >= 0
        matrix = np.zeros((len(labels), len(labels)), dtype=np.int64)
        np.add.at(matrix, (truth[known], predicted[known]), 1)
        return plot_confusion(labels, matrix, path)
    figure, axes = _figure(5.0, 4.8)
    axes.scatter(truth, predicted, s=10, alpha=0.4, color=COLOURS[0], linewidths=0)
    axes.set_xlabel("true")
    axes.set_ylabel("predicted")
    return _save(figure, Path(path))


def plot_lengths(
    rows_of_length: dict[int, int],
    path: str | Path,
    x_label: str = "tokens per row",
    y_label: str = "rows",
    *,
    powers: bool = False,
) -> Path:
    """Draw a histogram of lengths: how many rows, or other items, have how many tokens.

    Args:
        powers: lengths are powers of two, on a logarithmic axis. Each counts the lengths above half
            of it, up to it.
    """
    figure, axes = _figure(7.2, 3.6)
    lengths = np.array(sorted(rows_of_length), dtype=np.int64)
    counts = np.array([rows_of_length[int(length)] for length in lengths])
    if powers:
        axes.bar(np.log2(lengths), counts, width=0.9, color=COLOURS[0])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda power, _: f"≤ {2 ** max(power, 0):,.0f}")
        )
        axes.tick_params(axis="x", rotation=30)
    else:
        bins = np.linspace(0, max(lengths.max(initial=0), 1), 65)
        axes.hist(lengths, bins=bins.tolist(), weights=counts, color=COLOURS[0])
        mean = float((lengths * counts).sum() / max(counts.sum(), 1))
        axes.axvline(mean, color=COLOURS[1], linewidth=1.5, label=f"mean {mean:.0f}")
        axes.set_xlim(left=0)
        axes.legend(frameon=False, loc="best")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.yaxis.set_major_formatter(FuncFormatter(_short_number))
    return _save(figure, Path(path))


def plot_margins(
    counts: Sequence[int], edges: Float[np.ndarray, "edges"], path: str | Path
) -> Path:
    """Draw how far the cosines of mined negatives are below those of the rows' own passages.

    Args:
        counts: negatives in each bin.
        edges: of the bins, one more than there are counts.
    """
    figure, axes = _figure(7.2, 3.2)
    axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=COLOURS[0])
    axes.axvline(0, color=COLOURS[1], linestyle="--")
    axes.set_xlabel("cosine of the own passage less that of a negative")
    axes.set_ylabel("negatives")
    return _save(figure, Path(path))


def plot_parallel_coordinates(
    columns: Mapping[str, Sequence[float]], path: str | Path, *, lower_is_better: bool = False
) -> Path:
    """Draw every trial as a line across one axis per parameter; the best trial is orange.

    Args:
        columns: parameter → its value in every trial, at least one trial. The last column is the
            result of the trials, which shades the lines: the better, the darker.
    """
    figure, axes = _figure(1.6 + 1.8 * len(columns), 4.2)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_yticks([])
    axes.set_xlim(-0.15, len(columns) - 0.6)
    axes.set_xticks(range(len(columns)), list(columns))
    axes.tick_params(axis="x", top=True, bottom=False, labeltop=True, labelbottom=False, length=0)
    heights = np.empty((len(columns), len(columns[next(iter(columns))])))
    for index, values in enumerate(columns.values()):
        is_result = index == len(columns) - 1
        heights[index], ticks = _axis(np.array(values, dtype=float), places=not is_result)
        axes.axvline(index, color="#9aa5b1", linewidth=1.0, zorder=0)
        for height, label in ticks:
            axes.plot([index - 0.02, index + 0.02], [height, height], color="#9aa5b1", linewidth=1)
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8}
            axes.text(index + 0.04, height, label, fontsize=9, va="center", bbox=box, zorder=3)
    goodness = 1 - heights[-1] if lower_is_better else heights[-1].copy()
    order = np.argsort(goodness, kind="stable")
    # Trials with the same value are drawn next to each other, not on top of each other.
    aside = np.linspace(-0.03, 0.03, len(order)) if len(order) > 1 else 0.0
    for height, values in zip(heights[:-1], columns.values(), strict=False):
        if len(set(values)) <= PLACES_UP_TO:
            height[order] += aside
    along = np.linspace(0, 1, 32)
    bend = along**2 * (3 - 2 * along)
    x = (np.arange(len(columns) - 1)[:, None] + along).ravel()
    for trial in order:
        start, step = heights[:-1, trial], np.diff(heights[:, trial])
        y = (start[:, None] + step[:, None] * bend).ravel()
        if trial == order[-1]:
            axes.plot(x, y, color=COLOURS[1], linewidth=2.6)
        else:
            axes.plot(x, y, color=colormaps["Blues"](0.3 + 0.65 * goodness[trial]), linewidth=1.3)
    return _save(figure, Path(path))


def _axis(
    values: Float[np.ndarray, "trials"], *, places: bool
) -> tuple[Float[np.ndarray, "trials"], list[tuple[float, str]]]:
    """Return heights from 0 to 1 of the values on their axis, and the axis's ticks.

    Args:
        places: whether the values are spaced evenly if few of them are distinct.
    """
    different = np.unique(values)
    low, high = different[0], different[-1]
    if low == high:
        return np.full(len(values), 0.5), [(0.5, _short_number(low))]
    if places and len(different) <= PLACES_UP_TO:
        marks = different
        heights = np.searchsorted(different, values) / (len(different) - 1)
        at = np.linspace(0, 1, len(different))
    else:
        log = places and low > 0 and high > 10 * low
        marks = np.geomspace(low, high, 5) if log else np.linspace(low, high, 5)
        scaled = np.log(values) if log else values
        heights = (scaled - scaled.min()) / np.ptp(scaled)
        at = np.linspace(0, 1, 5)
    return heights, [(float(h), _short_number(float(m))) for h, m in zip(at, marks, strict=True)]


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    axes = figure.add_subplot()
    _style(axes)
    return figure, axes


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_curve(axes: Axes, curve: Curve, colour: str) -> None:
    style = "-" if curve.is_of_training else "--"
    line, behind = curve.drawn
    for seed in behind:
        axes.plot(*seed.T, "-", color=colour, linewidth=0.8, alpha=0.3)
    marker = "o" if len(line) <= MARKED_UP_TO else ""
    style = style if len(line) > FEW_POINTS else " "  # few points: nothing was measured between
    label = f"{curve.name}, mean of {len(curve.seeds)}" if len(curve.seeds) > 1 else curve.name
    axes.plot(*line.T, style, color=colour, linewidth=1.8, marker=marker, ms=4, label=label)


def _short_number(value: float, _: int | None = None) -> str:
    """Return the text of a tick; matplotlib calls this with the value and position."""
    return short_number(value, digits=4)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a label such as `$$` is not a formula
    # What is drawn is measured here: `bbox_inches="tight"` would first draw it without ink, and a
    # layout engine lay it out once more.
    figure.set_dpi(DPI)
    shown = figure.get_tightbbox(FigureCanvasAgg(figure).get_renderer()).padded(PADDING_INCHES)
    # A file is a few kB at any level, and at PNG's usual one takes a tenth of the time.
    figure.savefig(path, dpi=DPI, bbox_inches=shown, pil_kwargs={"compress_level": 3})
    return path
