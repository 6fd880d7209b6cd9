"""Bundle → the same bundle with an ONNX graph instead of weights, in 8 bits if metrics allow it."""

import shutil
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bert_core import files
from bert_core.checks import NonNegativeFloat
from bert_core.data.splits import HELD_OUT
from bert_core.errors import ConfigError, FormatError
from bert_core.manifest import BUNDLE, Manifest
from bert_core.metrics.bootstrap import Verdict, not_worse
from pipelines.answering.predictors import ROWS_PER_TASK
from pipelines.corpus.labelled import LabelledConfig, labelled_input, read_labelled, rows_of
from pipelines.runtime.progress import SEEN, meter, say
from pipelines.runtime.stage import (
    INPUT,
    Result,
    StageConfig,
    bundle_input,
    local_outputs,
    recipe,
    run_stage,
)
from tracking.hub import origin
from tracking.runs import DatasetInput

if TYPE_CHECKING:
    from bert_core.graph import GraphBackend
    from bert_core.predictor import Predictor


@dataclass(frozen=True, kw_only=True)
class ExportConfig(StageConfig):
    """Which bundle to export, and what that may cost. Runs in this process."""

    model: str = field(metadata=INPUT)
    """Bundle with weights: a folder, a URI, models:/name@alias, or owner/name of the Hugging Face
    hub."""
    quantize: Literal["int8"] | None = None
    """`int8` computes matrix products in 8 bits; unset is fp32."""
    held_out: LabelledConfig | None = None
    """Labelled rows that were not used to select the model; the export fails if the metric on them
    drops by more than `max_drop`. Required by `quantize`."""
    max_drop: NonNegativeFloat = 0.01
    """Largest drop allowed in the task's metric, in its units. The whole 95 % interval of the drop
    (paired bootstrap) must be within it, so a small set of rows may not suffice."""
    task: str | None = None
    """Task of the graph, for a model that was not fine-tuned, as in `predict`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of a task that needs no head, as in `predict`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantize is not None and self.held_out is None:
            raise ConfigError(
                "held_out: wanted labelled rows that were not used to select the model, to measure "
                f"what {self.quantize} costs, got none: give --held_out.source, or leave quantize "
                "out"
            )


def run(config: ExportConfig) -> Manifest:
    """Write the bundle with a graph, unless the metric drops by more than `max_drop`."""
    from bert_core.graph import EXPORTING, check_installed

    check_installed(EXPORTING, "an export to ONNX")
    folder, model = bundle_input(config, config.model)
    inputs = [model]
    if config.held_out is not None:
        inputs.append(labelled_input(HELD_OUT, config.held_out, HELD_OUT))
    return run_stage("export", config, inputs, partial(_export, config, folder, inputs))


def _export(config: ExportConfig, folder: Path, inputs: list[DatasetInput], digest: str) -> Result:
    from bert_core.bundle.layout import GRAPHS
    from bert_core.export import export_graph
    from bert_core.graph import GraphBackend
    from bert_core.predictor import Predictor

    threads = config.threads_per_worker
    predictor = Predictor(
        folder, device="cpu", threads=threads, task=config.task, options=config.options
    )
    bundle = predictor.bundle
    if bundle.graph is not None:
        raise ConfigError(
            f"model: wanted a bundle with weights, got {config.model}, which was exported and has "
            f"{bundle.graph} instead: give the bundle that it was exported from"
        )
    rows, seen = (None, 0) if config.held_out is None else _unseen(config.held_out, predictor)
    with tempfile.TemporaryDirectory() as scratch:
        graph_path = Path(scratch, GRAPHS[config.quantize])
        graph_path.parent.mkdir()
        export_graph(predictor.model, graph_path, config.quantize)
        size_bytes = sum(path.stat().st_size for path in graph_path.parent.iterdir())
        graph = GraphBackend(graph_path, predictor.model, threads)
        measured = _measured(config, predictor, graph, rows)
        lineage = {
            "stage": "export",
            "data": _data(config, inputs),
            "parent": bundle.digest,
            "parent_lineage": bundle.lineage | origin(folder),
            **recipe(config, digest),
        }
        written = _save(config, predictor, graph_path, measured.metrics, lineage)
    if measured.verdict is not None:
        say(f"export: {measured.verdict}")
    say(f"export: {size_bytes / 1e6:,.1f} MB, bundle in {files.join(config.output, BUNDLE)}")
    counts = {
        "size_bytes": size_bytes,
        "fp32_bytes": 4 * sum(tensor.numel() for tensor in predictor.model.parameters()),
        "largest_difference": measured.difference,
        **measured.counts,
        **({} if config.held_out is None else {SEEN: seen}),
    }
    return Result(outputs=local_outputs(config, written), counts=counts)


def _unseen(source: LabelledConfig, predictor: "Predictor") -> tuple[list[dict[str, Any]], int]:
    """The held-out rows not used to train or select the model, and how many were used.

    Raises: ConfigError if all were used.
    """
    task = predictor.task
    rows = read_labelled(source, HELD_OUT, task.shapes(task.chosen))
    with rows_of(source.source):
        task.baseline(rows)  # raises on a label unknown to the task, with its row in the file
    seen = predictor.bundle.has_seen(task, rows)
    if seen.all():
        raise ConfigError(
            f"held_out: wanted rows that the model was not trained on, got {source.source}, whose "
            "rows are all in its training record: give others"
        )
    if seen.any():
        say(f"export: {seen.sum():,} {SEEN.replace('_', ' ')} in {source.source} left out")
    return [row for row, out in zip(rows, seen, strict=True) if not out], int(seen.sum())


def _data(config: ExportConfig, inputs: list[DatasetInput]) -> list[dict[str, Any]]:
    """The held-out rows, for the lineage."""
    if config.held_out is None:
        return []
    (rows,) = (item for item in inputs if item.name == HELD_OUT)
    return [{"name": HELD_OUT, "digest": rows.digest, "source": config.held_out.source}]


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """How the graph's scores compare with those of the weights."""

    difference: float
    """The largest difference of a score, relative for scores above 1."""
    metrics: dict[str, float]
    """The graph's if there are labelled rows, else the bundle's."""
    verdict: Verdict | None = None

    @property
    def counts(self) -> dict[str, Any]:
        if self.verdict is None:
            return {}
        verdict, metric = self.verdict, self.verdict.metric
        return {
            "rows": verdict.rows,
            "primary_metric": metric,
            **self.metrics,
            f"{metric}_drop": 0 - verdict.difference,  # no drop is 0.0, not -0.0
            f"{metric}_drop_low": 0 - verdict.high,
            f"{metric}_drop_high": 0 - verdict.low,
        }


def _measured(
    config: ExportConfig,
    predictor: "Predictor",
    graph: "GraphBackend",
    held_out: list[dict[str, Any]] | None,
) -> _Measured:
    """Compare the graph with the weights, on the held-out rows or else on the task's examples.

    Raises: FormatError if an fp32 graph gives other scores; ConfigError if the metric drops too
        far.
    """
    from bert_core.export import TOLERANCE, largest_difference

    task, bundle = predictor.task, predictor.bundle
    rows = predictor.rows(task.examples) if held_out is None else held_out
    answers: tuple[list[Any], list[Any]] = ([], [])
    difference = 0.0
    with meter("comparing", len(rows), "rows") as progress:
        for start in range(0, len(rows), ROWS_PER_TASK):
            part = rows[start : start + ROWS_PER_TASK]
            windows = task.encode(part, bundle.tokenizer, predictor.max_length)
            pad_id = bundle.tokenizer.pad_id
            both = [backend.scores(windows, pad_id) for backend in (predictor.backend, graph)]
            difference = max(difference, largest_difference(*both))
            for decoded, scores in zip(answers, both, strict=True):
                decoded += task.decode(part, windows, scores)
            progress.add(len(part))
    if config.quantize is None and difference > TOLERANCE:
        raise FormatError(
            f"wanted the graph's scores within {TOLERANCE:g} of torch's, got a difference of "
            f"{difference:.2g}: report this, with the model; until then use the bundle as it is"
        )
    if config.held_out is None:
        return _Measured(difference=difference, metrics=bundle.metrics)
    with rows_of(config.held_out.source):
        old, new = (task.compare(rows, each) for each in answers)
    metrics = task.metrics(new)
    verdict = not_worse(task.main_metric(metrics), task.metrics, new, old)
    check_drop(config, verdict)
    return _Measured(difference=difference, metrics=metrics, verdict=verdict)


def check_drop(config: ExportConfig, verdict: Verdict) -> None:
    """Raises: ConfigError if the metric falls, or may fall, by more than `max_drop`."""
    if config.quantize and verdict.low == verdict.high == 0 and 3 / verdict.rows > config.max_drop:
        # Rule of three (Hanley and Lippman-Hand 1983): the 95 % upper bound when no row differs.
        raise ConfigError(
            f"held_out: wanted enough rows to show that {verdict.metric} drops by at most "
            f"{config.max_drop:g}, got {verdict.rows}: {config.quantize} changes none of them, "
            f"but the drop may still be up to {3 / verdict.rows:.2g}: give more rows, or raise "
            "max_drop; nothing is written"
        )
    if verdict.low < -config.max_drop:
        raise ConfigError(
            f"max_drop: wanted {verdict.metric} to drop by at most {config.max_drop:g}, got a drop "
            f"of {-verdict.difference:z.4f} by {config.quantize or 'export'} "
            f"({-verdict.high:z.4f} to {-verdict.low:z.4f} by paired bootstrap on {verdict.rows} "
            f"rows): {'leave quantize out, ' if config.quantize else ''}raise max_drop, or give "
            "more rows if these are too few to tell; nothing is written"
        )


def _save(
    config: ExportConfig,
    predictor: "Predictor",
    graph_path: Path,
    metrics: dict[str, float],
    lineage: dict[str, Any],
) -> list[Path]:
    """Write the bundle with the graph; returns its files."""
    from bert_core.bundle.format import save_bundle
    from bert_core.bundle.layout import GRAPHS, names_in

    def move(path: Path) -> None:
        for file in graph_path.parent.iterdir():  # the graph, and its external weights if any
            shutil.move(file, path.parent / file.name)

    local = config.local_folder / BUNDLE
    shutil.rmtree(local, ignore_errors=True)  # left by a run that was killed after writing it
    save_bundle(
        local,
        predictor.model,
        predictor.bundle.tokenizer,
        task=predictor.task,
        metrics=metrics,
        lineage=lineage,
        trained_rows=predictor.bundle.trained_rows,
        graph=(GRAPHS[config.quantize], move),
    )
    return [local / name for name in names_in(local)]
