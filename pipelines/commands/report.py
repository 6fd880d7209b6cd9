"""`raybert report`: one or several runs on a page that can be sent to a colleague.

What was learnt in words, the way from the text to the model, the curves, what the model gets wrong,
where everything came from and the commands that make it again: all in one file, which needs neither
network nor script.
"""

import base64
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bert_core import files
from bert_core.checks import check_fields
from bert_core.data.json_rows import jsonl_rows
from bert_core.errors import ConfigError, ResourceError
from bert_core.manifest import Headline
from bert_core.wording import first_line, shortened
from pipelines.commands.drawing import Box, Line, chart, flow, wrapped
from pipelines.commands.inspect import style
from pipelines.commands.report_runs import Run, links, runs_of, with_ancestors
from pipelines.evaluate import CLASSES, PREDICTIONS, WORST
from pipelines.mine import FEWER, NEGATIVE_COUNT, PASSAGES, PICTURE, RULED_OUT, TOO_NEAR
from pipelines.publish import MODEL_CARD
from pipelines.runtime.description import (
    DATA_CARD,
    VOCABULARY_CARD,
    add_link,
    folded,
    run_link,
)
from pipelines.runtime.progress import counted, say
from tracking.runs.curves import Curve
from tracking.runs.goodput import duration
from tracking.runs.metric_names import ACTIVITIES, CURVES
from tracking.runs.story import figure, is_share, score, short_number, words
from tracking.store.server import connect, tracking_uri, without_password

PAGES = Path(__file__).parent
TEMPLATE = REPORT = "report.html"
UNTOLD = ("_std", "_before", "steps_mean", "_cut", "seconds")
"""Ends of the names of figures that say little beside others."""
SHOWN_ROWS, SHOWN_CHARACTERS = 8, 260
KINDS = {
    "scores": "Score",
    "loss": "Loss",
    "accuracy": "Accuracy",
    "learning_rate": "Learning rate",
    "throughput": "Tokens per second",
}
"""Kind of curve → its title; as many as `CURVES`."""
COLOURS = 6
SECTION_LEVEL = 2
"""Level of the sections' headings."""
LEAST_SHARE = 0.005
"""Smallest share of a run's time at which an activity is shown."""
_RULERS = re.compile(r"(\W)\1{3,}")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Which runs to report on."""

    runs: tuple[str, ...] = ()
    """Outputs of finished stages (folders or URIs), or ids of MLflow runs. Several are put beside
    each other; what they were made from is followed up to the text."""
    output: str = "runs/report.html"
    """Path or URI of the page."""
    title: str | None = None
    """Heading; by default the names of the runs."""
    attach: bool = False
    """Also attach the page to the last of these runs in MLflow, and link it from the descriptions
    of all."""
    tracking_uri: str | None = None
    """MLflow store; by default the one in MLFLOW_TRACKING_URI, or else runs/mlflow.db."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.runs:
            raise ConfigError(
                "runs: wanted at least one output of a finished stage, or id of an MLflow run, got "
                "none: `raybert list runs` shows those under runs/"
            )


def run(config: ReportConfig) -> None:
    """Write the page."""
    with tempfile.TemporaryDirectory(prefix="raybert-report-") as downloads:
        runs = runs_of(config.runs, config.tracking_uri, downloads)
        size_bytes = write_report(config.output, runs, title=config.title)
        if config.attach:
            attach(config.output, runs, tracking_uri(config.tracking_uri))
    for text in summary(runs):
        say(text)
    say(f"report: {config.output}, {size_bytes / 1e6:.1f} MB, opens in any browser")


def attach(page: str, runs: Sequence[Run], uri: str) -> None:
    """Attach the page to the last of the runs in MLflow, and link it from the descriptions of all.

    Raises: ConfigError if the store has none of them; ResourceError if it does not take the page.
    """
    place = without_password(uri)
    recorded = [run.recorded for run in runs if run.recorded is not None]
    linked = [
        (each.run_id, link)
        for each in recorded
        if each.tracking_uri == place and each.run_id and (link := run_link(each, REPORT))
    ]
    if not linked:
        raise ConfigError(
            f"attach: wanted a run that MLflow at {place} has, got none: give the tracking_uri "
            "that the runs were recorded to, or leave attach out"
        )
    text, client = files.read_bytes(page).decode(), connect(uri)
    last, link = linked[-1]
    try:
        client.log_text(last, text, REPORT)
        for run_id, _ in linked:
            add_link(client, run_id, "the report", link)
    except Exception as error:  # every artifact store has its own classes
        raise ResourceError(
            f"attach: wanted MLflow at {place} to take {page}, it does not "
            f"({first_line(str(error))}): check that the runs are not deleted there and that you "
            "may write to them, or leave attach out"
        ) from error


def write_report(
    path: str,
    runs: Sequence[Run],
    *,
    title: str | None = None,
    tried: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (),
) -> int:
    """Write the page atomically; return its size in bytes.

    Args:
        tried: what the model was asked, and its answers with their scores.
    """
    all_runs = with_ancestors(runs)
    environment = Environment(
        loader=FileSystemLoader(PAGES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(TEMPLATE).render(
        counted=counted,
        style=Markup(style()),
        title=title or ", ".join(run.name for run in runs),
        code=next((run.manifest.code_version for run in runs), ""),
        summary=summary(all_runs),
        tiles=list(_tiles(all_runs)),
        flows=_flows(all_runs, runs),
        compared=_compared(runs),
        tried=tried,
        charts=list(_charts(all_runs)),
        times=_times(all_runs),
        evaluations=[found for run in all_runs if (found := _evaluation(run)) is not None],
        mined=[_mined(run) for run in all_runs if run.stage == "mine" and run.has_finished],
        cards=list(_cards(all_runs)),
        lineage=[_lineage(run, all_runs) for run in all_runs],
        commands=[folded(run.command) for run in all_runs if run.command],
    )
    data = page.encode()
    files.write_bytes(path, data)
    return len(data)


def summary(runs: Sequence[Run]) -> list[str]:
    """Describe the results in words; runs of one stage are distinguished by their names."""
    scratch, worth = _worth_of_pretraining(runs)
    texts = [(run, worth if run is scratch else run.sentence) for run in runs]
    stages = Counter(run.stage for run in runs if run is not scratch)
    return [
        text if run is scratch or stages[run.stage] == 1 else f"{_short_name(run)}: {text}"
        for run, text in texts
    ]


def _short_name(run: Run) -> str:
    """Return the run's name without its stage."""
    return run.name.removeprefix(f"{run.stage} ")


def _worth_of_pretraining(runs: Sequence[Run]) -> tuple[Run | None, str]:
    """Compare two fine-tunings that differ only in whether they start from pretrained weights.
    Return the one from random weights, and the difference in words."""
    tuned = [
        run
        for run in runs
        if run.stage == "finetune" and f"{run.counts.get('primary_metric')}_mean" in run.counts
    ]
    for scratch in tuned:
        for other in tuned:
            differs = {key for key, *_ in _differences([scratch, other])}
            if scratch.manifest.config["from_scratch"] and differs == {"from_scratch"}:
                main = other.counts["primary_metric"]
                gain, error = paired_difference(
                    other.counts["seeds"], scratch.counts["seeds"], main
                )
                mean, points = scratch.counts[f"{main}_mean"], (100, 1, " points")
                reached = score(main, mean)
                # Points of a percentage, or the metric's own unit.
                factor, digits, unit = points if is_share(main, mean) else (1, 3, "")
                spread = (
                    f", standard error {factor * error:.{digits}f}" if np.isfinite(error) else ""
                )
                return scratch, (
                    f"The same from random weights has {reached}: pretraining is worth "
                    f"{factor * gain:.{digits}f}{unit}{spread}."
                )
    return None, ""


def paired_difference(
    ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]], metric: str
) -> tuple[float, float]:
    """Return the mean difference of a metric over the same seeds, and its standard error (NaN for
    one seed)."""
    other = {seed["seed"]: seed[metric] for seed in theirs}
    differences = np.array([seed[metric] - other[seed["seed"]] for seed in ours])
    error = differences.std(ddof=1) / np.sqrt(len(differences)) if len(differences) > 1 else np.nan
    return float(differences.mean()), float(error)


def _tiles(runs: Sequence[Run]) -> Iterator[Headline]:
    """Yield the most important figures."""
    yield from (run.manifest.headline for run in reversed(runs) if run.manifest.headline)
    spent = [run.spent for run in runs if run.spent is not None]
    if spent:
        costs = [each.cost_usd for each in spent if each.cost_usd is not None]
        cost = f", {sum(costs):,.2f} USD" if costs else ""
        time = duration(sum(each.wall_s for each in spent))
        yield Headline(label="training time", value=time, beside=f"wall time{cost}")


def _flows(runs: Sequence[Run], requested: Sequence[Run]) -> list[Markup]:
    boxes = [
        Box(run.stage, wrapped(run.name.removeprefix(f"{run.stage} ")) + wrapped(run.result)[:4],
            any(run is each for each in requested))
        for run in runs
    ]  # fmt: skip
    if len(boxes) < 2:
        return []
    ways = links(runs)
    return [flow(boxes, ways, upright=False), flow(boxes, ways, upright=True)]


def _compared(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Compare runs of one stage: which settings differ, and the results of each."""
    by_work = defaultdict(list)
    for run in runs:
        by_work[run.work].append(run)
    alike = max(by_work.values(), key=len)
    if len(alike) < 2:
        return None
    figures = [
        (key, [run.counts.get(key) for run in alike])
        for key in dict.fromkeys(key for run in alike for key in run.counts)
        if all(isinstance(run.counts.get(key), int | float | None) for run in alike)
    ]
    return {
        "names": [run.name for run in alike],
        "settings": _differences(alike),
        "figures": [
            (words(key), [figure(key, value) for value in values])
            for key, values in figures
            if len({*values}) > 1 and "/" not in key and not key.endswith(UNTOLD)
        ],
    }


def _differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    from tracking.runs.recorder import flatten

    flat = [flatten(run.manifest.config) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    return [
        (key, values)
        for key in keys
        if len({*(values := [each.get(key, "–") for each in flat])}) > 1
    ]


def _charts(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Yield the curves of each stage that trains, with all runs of a stage in the same charts."""
    by_work: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        if any(len(curve.mean) > 1 for curve in run.curves):
            by_work[run.work].append(run)
    for members in by_work.values():
        drawn = [picture for kind in CURVES if (picture := _chart(kind, members)) is not None]
        if drawn:
            yield {"names": [run.name for run in members], "pictures": drawn}


def _chart(kind: str, runs: Sequence[Run]) -> dict[str, Any] | None:
    curves = [
        (run, curve)
        for run in runs
        for curve in run.curves
        if curve.kind == kind and len(curve.mean) > 1
    ]
    if not curves:
        return None
    several = len(runs) > 1
    identities = [run.place if several else curve.metric for run, curve in curves]
    colours = list(dict.fromkeys(identities))
    line_names = _legends(curves)
    lines = [
        _line(curve, name, colours.index(identity))
        for (_, curve), name, identity in zip(curves, line_names, identities, strict=True)
    ]
    first, last = lines[0].points[0, 1], lines[0].points[-1, 1]
    title = KINDS[kind]
    change = f"from {short_number(first)} to {short_number(last)}"
    label = f"{title} over the steps: {lines[0].name} {change}"
    svg = chart(lines, label, from_zero=kind in ("learning_rate", "throughput"))
    return {"title": title, "svg": svg, "legend": lines if len(lines) > 1 else []}


def _legends(curves: Sequence[tuple[Run, Curve]]) -> list[str]:
    """Name the lines of a chart by what differs between them: the run, the metric, and the rows."""
    runs = len({run.place for run, _ in curves}) > 1
    metrics = len({curve.metric for _, curve in curves}) > 1
    rows = len({curve.name.rpartition("/")[0] for _, curve in curves}) > 1
    return [
        ", ".join(
            [_short_name(run)] * runs
            + [words(curve.metric)] * (metrics or not runs)
            + [words(curve.name.rpartition("/")[0] or "train")] * rows
            + [f"mean of {len(curve.seeds)} seeds"] * (len(curve.seeds) > 1)
        )
        for run, curve in curves
    ]


def _line(curve: Curve, name: str, colour: int) -> Line:
    line, behind = curve.drawn
    return Line(name, line, colour % COLOURS + 1, not curve.is_of_training, behind)


def _times(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Show where the time of each run went, with the same colour for an activity in every run."""
    spent = [(run.name, run.spent) for run in runs if run.spent is not None and run.spent.wall_s]
    shown = [
        name
        for name in ACTIVITIES
        if any(each.seconds.get(name, 0.0) > LEAST_SHARE * each.wall_s for _, each in spent)
    ]
    return [
        {
            "name": name,
            "wall": duration(goodput.wall_s),
            "parts": [
                {
                    "name": activity.replace("_", " "),
                    "share": seconds / goodput.wall_s,
                    "took": duration(seconds),
                    "colour": place % COLOURS + 1,
                }
                for place, activity in enumerate(shown)
                if (seconds := goodput.seconds.get(activity, 0.0)) > LEAST_SHARE * goodput.wall_s
            ],
        }
        for name, goodput in spent
    ]


def _evaluation(run: Run) -> dict[str, Any] | None:
    counts = run.counts
    measured = [name for name in counts if f"{name}_low" in counts]
    if run.stage != "evaluate" or not measured:
        return None
    figures = [
        (
            words(name),
            figure(name, counts[name]),
            f"{figure(name, counts[f'{name}_low'])} to {figure(name, counts[f'{name}_high'])}",
            figure(name, counts.get(f"baseline_{name}")),
        )
        for name in measured
    ]
    worst = list(jsonl_rows((run.text(WORST) or "").encode(), WORST))
    return {
        "name": run.name,
        "source": counts.get("source", ""),
        "rows": int(counts["rows"]),
        "figures": figures,
        "calibration": counts.get("expected_calibration_error"),
        "confusion": _confusion(run),
        "worst": [_worst(row) for row in worst[:SHOWN_ROWS] if row],
        "wrong": None if "wrong_rows" not in counts else int(counts["wrong_rows"]),
    }


def _mined(run: Run) -> dict[str, Any]:
    """Return the counts of mined negatives, the ranker's among them if there was one, and the
    picture of their margins."""
    told = ("rows", PASSAGES, NEGATIVE_COUNT, FEWER, TOO_NEAR, RULED_OUT)
    return {
        "name": run.name,
        "figures": [(words(name), run.counts[name]) for name in told if name in run.counts],
        "picture": _data(files.join(run.place, PICTURE)),
    }


def _confusion(run: Run) -> dict[str, Any] | None:
    """Count true against predicted labels, for a task that gives each row one label."""
    from tracking.runs.plots import readable

    path = files.join(run.place, PREDICTIONS)
    classes = run.text(CLASSES)
    if classes is None or not files.is_file(path):
        return None
    table = pq.read_table(pa.BufferReader(files.read_bytes(path)))
    if not {"label", "predicted_label"} <= {*table.column_names}:
        return None
    true_labels = table.column("label").to_pylist()
    predicted_labels = table.column("predicted_label").to_pylist()
    labels = list(json.loads(classes))
    are_texts = all(isinstance(label, str) for label in (*true_labels, *predicted_labels))
    if not are_texts or len(labels) < 2:
        return None
    places = {label: place for place, label in enumerate(labels)}
    matrix = np.zeros((len(labels), len(labels)), dtype=np.int64)
    for label, predicted in zip(true_labels, predicted_labels, strict=True):
        if label in places and predicted in places:
            matrix[places[label], places[predicted]] += 1
    shown, matrix, note = readable(labels, matrix)
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    errors = matrix * (1 - np.eye(len(shown), dtype=np.int64))
    true, mistaken = np.unravel_index(int(errors.argmax()), errors.shape)
    return {
        "labels": shown,
        "rows": [
            (label, [(int(n), float(s)) for n, s in zip(counts, shares, strict=True)])
            for label, counts, shares in zip(shown, matrix, share, strict=True)
        ],
        "note": note,
        "most": (shown[true], shown[mistaken], int(errors.max())) if errors.any() else None,
    }


def _worst(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "input": shortened(_RULERS.sub(r"\1\1\1", _cells(row["input"])), SHOWN_CHARACTERS),
        "wanted": _cells(row["wanted"]),
        "answer": _cells({k: v for k, v in row["answer"].items() if k != "score"}),
        "confidence": None if "confidence" not in row else f"{row['confidence']:.0%}",
    }


def _cells(fields: Mapping[str, Any]) -> str:
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in fields.items()
    }
    if len(texts) == 1:
        return next(iter(texts.values()))
    return " · ".join(f"{name}: {text}" for name, text in texts.items())


def _cards(runs: Sequence[Run]) -> Iterator[tuple[str, Markup]]:
    for run in runs:
        for title, name in (
            ("Vocabulary", VOCABULARY_CARD), ("Data card", DATA_CARD), ("Model card", MODEL_CARD)
        ):  # fmt: skip
            if (text := run.text(name)) is not None:
                yield f"{title}: {run.name}", _rendered(text, run.place)


def _rendered(text: str, folder: str) -> Markup:
    from markdown_it import MarkdownIt

    if text.startswith("---\n"):
        text = text.split("\n---\n", 1)[1]
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(text)
    level = SECTION_LEVEL
    for token in tokens:
        if token.type == "heading_open":  # below the section's heading, and no level left out
            level = min(int(token.tag[1:]) + SECTION_LEVEL, level + 1, 6)
        if token.type.startswith("heading_"):
            token.tag = f"h{level}"
    rendered = markdown.renderer.render(tokens, markdown.options, {})
    return Markup(
        re.sub(
            r'<img src="([^":]+\.png)"',
            lambda m: f'<img src="{_data(files.join(folder, m[1]))}"',
            rendered,
        )
    )


def _data(path: str) -> str:
    if not files.is_file(path):
        return "data:,"
    return f"data:image/png;base64,{base64.b64encode(files.read_bytes(path)).decode()}"


def _lineage(run: Run, runs: Sequence[Run]) -> dict[str, Any]:
    made_by = {digest: other.name for other in runs if other is not run for digest in other.digests}
    return {
        "name": run.name,
        "place": run.output,
        "digest": run.manifest.digest,
        "code": run.manifest.code_version,
        "inputs": [
            (name.replace("_", " "), made_by.get(digest, run.sources.get(name, "")), digest)
            for name, digest in run.manifest.inputs.items()
        ],
    }
