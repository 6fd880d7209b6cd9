"""Pictures of a report as SVG: they take the page's colours, light or dark, and any width."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

import numpy as np
from jaxtyping import Float
from markupsafe import Markup

from tracking.runs.story import short_number

Points = Float[np.ndarray, "_ 2"]

FEW_POINTS = 2
"""So few are no line, but dots."""
MOST_POINTS = 160
"""Points of a line; more would only make the page larger."""
WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 34
BOX, GAP, LINE = 158, 30, 17
"""Width of a box of the flow, the gap between two, and the height of a line of text."""
CHARACTERS = 21
"""Characters in a line of a box."""


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    name: str
    points: Points
    colour: int = 1
    """1 to 6: of the page's data colours."""
    is_dashed: bool = False
    faint: Sequence[Points] = field(default=())
    """Lines behind it: the seeds that it is the mean of, or what it smooths."""


@dataclass(frozen=True)
class Box:
    """A stage in the flow chart."""

    title: str
    text: Sequence[str]
    is_asked: bool = False
    """Whether the report is about it; else it leads there."""


def chart(lines: Sequence[Line], label: str, *, from_zero: bool = False) -> Markup:
    """Draw lines over steps. The page adds the legend."""
    drawn = [points for line in lines for points in (line.points, *line.faint)]
    x = _range(np.concatenate([points[:, 0] for points in drawn]))
    y_low, y_high = _range(np.concatenate([points[:, 1] for points in drawn]))
    margin = 0.05 * (y_high - y_low)
    y = (0.0 if from_zero else y_low - margin, y_high + margin)
    parts = []
    for tick in _ticks(*y):
        height = _y(tick, y)
        parts.append(f'<path class="rule" d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">'
            f"{short_number(tick)}</text>"
        )
    for tick in _ticks(*x):
        parts.append(
            f'<text x="{_x(tick, x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{short_number(tick)}</text>"
        )
    for line in lines:
        parts.extend(
            f'<path class="line faint c{line.colour}" d="{_path(points, x, y)}"/>'
            for points in line.faint
        )
    for line in lines:
        dashed = " dashed" if line.is_dashed else ""
        few = " dots" if len(line.points) <= FEW_POINTS else dashed
        path = _path(line.points, x, y)
        parts.append(f'<path class="line c{line.colour}{few}" d="{path}"/>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">step</text>')
    return _svg(WIDTH, HEIGHT, label, parts, "chart")


def flow(boxes: Sequence[Box], links: Sequence[tuple[int, int]], *, upright: bool) -> Markup:
    """Draw the stages, with an arrow from each to the stages that used its output.

    Args:
        links: (from, to) positions in `boxes`; no cycles.
        upright: draw from top to bottom, for a narrow screen, rather than from left to right.
    """
    depth = [0] * len(boxes)
    for _ in boxes:
        for start, end in links:
            depth[end] = max(depth[end], depth[start] + 1)
    layers = [[n for n, d in enumerate(depth) if d == layer] for layer in range(max(depth) + 1)]
    tall = (1.6 + max(len(box.text) for box in boxes)) * LINE + 12
    places: dict[int, tuple[float, float]] = {}
    across = max(map(len, layers))
    for layer, members in enumerate(layers):
        for place, member in enumerate(members):
            middle = place - (len(members) - 1) / 2 + (across - 1) / 2
            if upright:
                places[member] = (middle * (BOX + 14), layer * (tall + GAP))
            else:
                places[member] = (layer * (BOX + GAP), middle * (tall + 14))
    width = max(x for x, _ in places.values()) + BOX
    height = max(y for _, y in places.values()) + tall
    tip = f"tip-{'down' if upright else 'right'}"  # unique on the page
    parts = [
        f'<defs><marker id="{tip}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>'
    ]
    for start, end in links:
        (x0, y0), (x1, y1) = places[start], places[end]
        if upright:
            x0, y0, x1 = x0 + BOX / 2, y0 + tall, x1 + BOX / 2
            bend = f"C{x0:.0f} {y0 + GAP / 2:.0f} {x1:.0f} {y1 - GAP / 2:.0f}"
        else:
            x0, y0, y1 = x0 + BOX, y0 + tall / 2, y1 + tall / 2
            bend = f"C{x0 + GAP / 2:.0f} {y0:.0f} {x1 - GAP / 2:.0f} {y1:.0f}"
        parts.append(
            f'<path class="arrow" marker-end="url(#{tip})" '
            f'd="M{x0:.0f} {y0:.0f}{bend} {x1:.0f} {y1:.0f}"/>'
        )
    for number, box in enumerate(boxes):
        x, y = places[number]
        marked = " asked" if box.is_asked else ""
        parts.append(
            f'<rect class="box{marked}" x="{x + 0.5:.1f}" y="{y + 0.5:.1f}" width="{BOX - 1}" '
            f'height="{tall - 1:.1f}" rx="8"/>'
        )
        parts.append(
            f'<text class="title" x="{x + 10:.1f}" y="{y + 21:.1f}">{escape(box.title)}</text>'
        )
        for row, text in enumerate(box.text):
            parts.append(
                f'<text x="{x + 10:.1f}" y="{y + 21 + (row + 1) * LINE:.1f}">{escape(text)}</text>'
            )
    label = " → ".join(box.title for box in boxes)
    return _svg(width + 1, height + 1, label, parts, "flow upright" if upright else "flow across")


def wrapped(text: str, most: int = CHARACTERS) -> list[str]:
    """Break a text into lines of about `most` characters."""
    lines = [""]
    for word in text.split(" "):  # not at non-breaking spaces
        if lines[-1] and len(lines[-1]) + 1 + len(word) > most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return [line if len(line) <= most + 4 else f"{line[: most + 3]}…" for line in lines]


def _svg(width: float, height: float, label: str, parts: Sequence[str], kind: str) -> Markup:
    return Markup(
        f'<svg class="{kind}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="max-width:{1.15 * width:.0f}px" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _range(values: np.ndarray) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers between `low` and `high`."""
    rough = (high - low) / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = unit * next(each for each in (1, 2, 5, 10) if each * unit >= rough)
    return [round(n * step, 12) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _x(value: float, bounds: tuple[float, float]) -> float:
    return LEFT + (value - bounds[0]) / (bounds[1] - bounds[0]) * (WIDTH - LEFT - RIGHT)


def _y(value: float, bounds: tuple[float, float]) -> float:
    share = (value - bounds[0]) / (bounds[1] - bounds[0])
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _path(points: Points, x: tuple[float, float], y: tuple[float, float]) -> str:
    kept = points[np.unique(np.linspace(0, len(points) - 1, MOST_POINTS).round().astype(int))]
    places = [f"{_x(step, x):.1f} {_y(value, y):.1f}" for step, value in kept]
    if len(places) <= FEW_POINTS:  # dots: nothing was measured between them
        return "".join(f"M{place}h.1" for place in places)
    return f"M{places[0]}L{' '.join(b for _, b in pairwise(places))}"
