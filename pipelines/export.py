"""Bundle → the same bundle with an ONNX graph instead of weights, faster if metrics allow it."""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bert_core.checks import NonNegativeFloat, PositiveInt
from bert_core.data.splits import HELD_OUT
from bert_core.errors import ConfigError, FormatError, ResourceError
from bert_core.manifest import BUNDLE, Manifest
from bert_core.metrics.bootstrap import Verdict, not_worse
from bert_core.wording import without_secrets
from pipelines.answering.predictors import ROWS_PER_TASK
from pipelines.corpus.labelled import (
    LabelledConfig,
    Unlabelled,
    labelled_input,
    labelled_rows,
    rows_of,
    usual_columns,
)
from pipelines.runtime.inputs import bundle_input
from pipelines.runtime.outputs import bundle_outputs, recipe
from pipelines.runtime.progress import SEEN, meter, say
from pipelines.runtime.result import SPREAD, Counts, Result
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import INPUT, StageConfig
from tracking.models.hub import origin
from tracking.runs.recorder import DatasetInput

if TYPE_CHECKING:
    from bert_core.bundle.format import Bundle
    from bert_core.bundle.layout import Execution
    from bert_core.inference.predictor import Predictor
    from bert_core.scores import Backend

Rows = list[dict[str, Any]]
Quantized = Literal["int8", "bf16"]
CALIBRATION = "calibration"
"""Name of the rows in the lineage."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig(StageConfig):
    """Which bundle to export, and what that may cost. Runs in this process."""

    model: str = field(metadata=INPUT)
    """Bundle with weights: a folder, a URI, models:/name@alias, or owner/name of the Hugging Face
    hub."""
    adapter: str | None = field(default=None, metadata=INPUT)
    """Folder of an adapter of the model (LoRA) that peft wrote, to merge into its weights first."""
    adapter_labels: tuple[str, ...] = ()
    """Names of the labels of the adapter's head, in their order, which its folder does not say; by
    default those of the model, or transformers' LABEL_0, LABEL_1, …"""
    weights: bool = False
    """Write the merged weights rather than a graph: a bundle for every command."""
    quantize: Quantized | None = None
    """`int8` computes matrix products in 8 bits; `bf16` keeps the graph in fp32, to be run in
    bfloat16 by OpenVINO; unset is fp32."""
    held_out: LabelledConfig | None = None
    """Labelled rows that were not used to select the model; the export fails if the metric on them
    drops by more than `max_drop`. Required by `quantize`."""
    calibration: LabelledConfig | None = None
    """Rows, with or without labels, that decide the ranges of numbers that 8 bits cover; by default
    a quarter of the held-out rows, on which nothing is measured then."""
    calibration_rows: PositiveInt = 256
    """Maximum number of rows to calibrate on, taken at even distances."""
    max_drop: NonNegativeFloat = 0.01
    """Largest drop allowed in the task's metric, in its units. The whole 95 % interval of the drop
    (paired bootstrap) must be within it, so a small set of rows may not suffice."""
    task: str | None = None
    """Task of the graph, for a model that was not fine-tuned, as in `predict`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of a task that needs no head, as in `predict`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapter_labels and self.adapter is None:
            raise ConfigError(
                f"adapter_labels: wanted none without adapter, got {', '.join(self.adapter_labels)}"
                ": give the adapter, or leave them out"
            )
        if self.weights and (self.adapter is None or self.quantize or self.held_out):
            raise ConfigError(
                "weights: wanted an adapter to merge, and neither quantize nor held_out, which are "
                "about graphs: give --adapter alone, and evaluate what is written"
            )
        if self.quantize is not None and self.held_out is None:
            raise ConfigError(
                "held_out: wanted labelled rows that were not used to select the model, to measure "
                f"what {self.quantize} costs, got none: give --held_out.source, or leave quantize "
                "out"
            )
        if self.calibration is not None and self.quantize != "int8":
            raise ConfigError(
                f"calibration: wanted none without 8 bits, got {self.calibration.source}: set "
                "quantize = int8, or leave calibration out"
            )


@dataclass(frozen=True, kw_only=True)
class ExportCounts(Counts):
    size_bytes: int
    fp32_bytes: int
    """Size of the model's weights."""
    largest_difference: float | None
    """Largest difference of a score from the model's, relative for scores above 1; None for merged
    weights, which have no graph."""
    runs: list[str]
    """The engines and precisions that may run the graph."""
    measured: Mapping[str, Any] = field(metadata=SPREAD)
    """On held-out rows, if there are any."""
    calibration_rows: int | None = None
    seen: Mapping[str, int] = field(default_factory=dict, metadata=SPREAD)
    """Held-out rows that were left out because the model was trained on them."""

    @property
    def line(self) -> str:
        size = f"{self.size_bytes / 1e6:,.1f} MB"
        if self.largest_difference is None:
            return f"{size} of merged weights"
        return f"{size}, scores within {self.largest_difference:.2g} of the model's"

    @property
    def sentence(self) -> str:
        size = f"{self.size_bytes / 1e6:,.1f} MB"
        if self.largest_difference is None:
            return f"The adapter was merged into the model's weights, {size}."
        return (
            f"The exported graph is {size}; its scores differ from the model's by "
            f"{self.largest_difference:.2g} at most."
        )


def run(config: ExportConfig) -> Manifest:
    """Write the bundle with a graph, unless the metric drops by more than `max_drop`; or the merged
    weights."""
    if not config.weights:
        _check_installed(config)
    folder, model = bundle_input(config, config.model)
    inputs = [model]
    if config.adapter is not None:
        inputs.append(adapter_input(config.adapter))
    if config.held_out is not None:
        inputs.append(labelled_input(HELD_OUT, config.held_out, HELD_OUT))
    if config.calibration is not None:
        inputs.append(labelled_input(CALIBRATION, config.calibration, "train"))
    work = _write_merged if config.weights else _export
    return run_stage("export", config, inputs, partial(work, config, folder, inputs))


def adapter_input(folder: str) -> DatasetInput:
    """Return an adapter as an input. Raises: ConfigError if there is no such folder; FormatError if
    it cannot be read."""
    from bert_core.bundle.adapter_layout import CONFIG
    from bert_core.bundle.adapters import read_adapter

    if not Path(folder, CONFIG).is_file():
        raise ConfigError(
            f"adapter: wanted a folder on this machine with {CONFIG}, as peft's save_pretrained "
            f"writes it, got {folder}: download it first"
        )
    return DatasetInput("adapter", read_adapter(folder).digest, folder)


def _check_installed(config: ExportConfig) -> None:
    """Raise ResourceError if a package that the graph needs is not installed."""
    from bert_core.inference.engines.base import check_installed
    from bert_core.inference.export import EXPORTING

    check_installed(EXPORTING, "an export to ONNX")
    check_installed(
        (_deciding(config.quantize).engine,), f"an export in {config.quantize or 'fp32'}"
    )


def _merged(config: ExportConfig, folder: Path) -> "Path | Bundle":
    """Return what to export: the bundle's folder, or the bundle with the adapter merged in."""
    if config.adapter is None:
        return folder
    from bert_core.bundle.adapters import merged, read_adapter
    from bert_core.bundle.format import load_bundle

    if read_adapter(config.adapter).trained_rows is None:
        say(
            "export: the rows that the adapter was trained on are not known, so none of them are "
            "left out or reported as seen"
        )
    return merged(load_bundle(folder), config.adapter, config.adapter_labels)


def _write_merged(
    config: ExportConfig, folder: Path, inputs: list[DatasetInput], digest: str
) -> Result:
    from bert_core.bundle.format import About, load_bundle
    from bert_core.bundle.writing import save_bundle
    from bert_core.inference.predictor import Predictor

    base, bundle = load_bundle(folder), _merged(config, folder)
    assert not isinstance(bundle, Path)
    predictor = Predictor(bundle, device="cpu", task=config.task, options=config.options)
    local = config.local_folder / BUNDLE
    shutil.rmtree(local, ignore_errors=True)
    lineage = {
        "stage": "export",
        "data": _data(config, inputs, None),
        "parent": base.digest,
        "parent_lineage": base.lineage | origin(folder),
        **recipe(config, digest),
    }
    about = About(task=predictor.task, lineage=lineage, trained_rows=bundle.trained_rows)
    save_bundle(local, predictor.model, base.tokenizer, about)
    size_bytes = 4 * sum(tensor.numel() for tensor in predictor.model.parameters())
    counts = ExportCounts(
        size_bytes=size_bytes,
        fp32_bytes=size_bytes,
        largest_difference=None,
        runs=[str(predictor.execution)],
        measured={},
    )
    return Result(outputs=bundle_outputs(config), counts=counts)


def _export(config: ExportConfig, folder: Path, inputs: list[DatasetInput], digest: str) -> Result:
    from bert_core.bundle.layout import GRAPHS
    from bert_core.inference.export import export_graph
    from bert_core.inference.predictor import Predictor

    predictor = Predictor(
        _merged(config, folder),
        device="cpu",
        threads=config.threads_per_worker,
        task=config.task,
        options=config.options,
    )
    bundle = predictor.bundle
    if bundle.graph is not None:
        raise ConfigError(
            f"model: wanted a bundle with weights, got {config.model}, which was exported and has "
            f"{bundle.graph} instead: give the bundle that it was exported from"
        )
    rows, seen = (None, 0) if config.held_out is None else _unseen(config.held_out, predictor)
    precision, chosen = "fp32", None
    calibration = None
    if config.quantize == "int8" and rows is not None:
        precision = "int8"
        chosen, rows = _to_calibrate(config, predictor, rows)
        windows = predictor.task.encode(chosen, bundle.tokenizer, predictor.max_length)
        calibration = windows, bundle.tokenizer.pad_id
    with tempfile.TemporaryDirectory() as scratch:
        graph_path = Path(scratch, GRAPHS[precision])
        graph_path.parent.mkdir()
        export_graph(predictor.model, graph_path, calibration)
        size_bytes = sum(path.stat().st_size for path in graph_path.parent.iterdir())
        measured = _measured(
            config, predictor, _backends(config, predictor, graph_path, precision), rows
        )
        lineage = {
            "stage": "export",
            "data": _data(config, inputs, chosen),
            "parent": bundle.digest,
            "parent_lineage": bundle.lineage | origin(folder),
            **recipe(config, digest),
        }
        _save(config, predictor, graph_path, precision, measured, lineage)
    first = next(iter(measured.values()))
    for run, result in measured.items():
        if result.verdict is not None:
            say(f"export: {run}: {result.verdict}")
    counts = ExportCounts(
        size_bytes=size_bytes,
        fp32_bytes=4 * sum(tensor.numel() for tensor in predictor.model.parameters()),
        largest_difference=first.difference,
        runs=[str(run) for run in measured],
        measured=first.counts,
        calibration_rows=None if chosen is None else len(chosen),
        seen={} if config.held_out is None else {SEEN: seen},
    )
    return Result(outputs=bundle_outputs(config), counts=counts)


def _to_calibrate(
    config: ExportConfig, predictor: "Predictor", held_out: Rows
) -> tuple[Rows, Rows]:
    """Return the rows to calibrate on, and the held-out rows without them.

    Raises: ConfigError if no rows are left.
    """
    task = predictor.task
    if config.calibration is None:
        chosen = _spread(held_out, min(config.calibration_rows, max(1, len(held_out) // 4)))
    else:
        shapes = task.shapes(task.chosen)[0], Unlabelled
        usual = usual_columns(predictor.bundle, task.name)
        rows = labelled_rows(
            config.calibration, "train", shapes, usual=usual, setting=CALIBRATION
        ).rows
        known = set(task.digests(held_out, task.chosen).tolist())
        digests = task.digests(rows, task.chosen).tolist()
        rows = [row for row, digest in zip(rows, digests, strict=True) if digest not in known]
        if not rows:
            raise ConfigError(
                f"calibration: wanted rows that are not held out, got {config.calibration.source}, "
                "whose rows all are: give others, or leave calibration out"
            )
        return _spread(rows, config.calibration_rows), held_out
    calibrates = set(map(id, chosen))
    rest = [row for row in held_out if id(row) not in calibrates]
    if not rest:
        raise ConfigError(
            f"held_out: wanted rows to calibrate on and others to measure, got {len(held_out)}: "
            "give more, or give calibration"
        )
    return chosen, rest


def _spread(rows: Rows, most: int) -> Rows:
    """Return at most `most` of the rows, evenly spaced."""
    count = min(most, len(rows))
    return [rows[place * len(rows) // count] for place in range(count)]


def _backends(
    config: ExportConfig, predictor: "Predictor", path: Path, precision: str
) -> dict["Execution", "Backend"]:
    """Load the graph in every installed engine, at every requested precision that this machine
    supports. The first entry is the one whose metrics decide about the export."""
    from bert_core.bundle.layout import Execution
    from bert_core.inference.engines.base import is_installed
    from bert_core.inference.engines.catalog import ENGINES

    loaded: dict[Execution, Backend] = {}
    threads = config.threads_per_worker
    positions, graph_scores = (
        predictor.bundle.encoder_config.max_length,
        predictor.task.graph_scores,
    )
    assert graph_scores is not None  # or else there would be no graph
    for name, engine in ENGINES.items():
        for run_precision in engine.runs[precision] if is_installed(name) else ():
            run = Execution(name, run_precision)
            if run_precision == "bf16" and config.quantize != "bf16":  # only if requested
                continue
            try:
                loaded[run] = engine(path, graph_scores, positions, threads, run_precision)
            except ResourceError as error:
                if run == _deciding(config.quantize):
                    raise
                say(f"export: {error}")
    return {_deciding(config.quantize): loaded.pop(_deciding(config.quantize)), **loaded}


def _deciding(quantize: Quantized | None) -> "Execution":
    """Return the engine and precision whose metrics go into the bundle, and whose failure fails the
    export."""
    from bert_core.bundle.layout import Execution

    return Execution("openvino" if quantize == "bf16" else "onnxruntime", quantize or "fp32")


def _unseen(source: LabelledConfig, predictor: "Predictor") -> tuple[list[dict[str, Any]], int]:
    """Return the held-out rows not used to train or select the model, and how many were used.

    Raises: ConfigError if all were used.
    """
    task = predictor.task
    checked = partial(task.fitting, learned=False)
    usual = usual_columns(predictor.bundle, task.name)
    rows = labelled_rows(source, HELD_OUT, task.shapes(task.chosen), checked, usual).rows
    seen = predictor.bundle.has_seen(task, rows)
    if seen.all():
        raise ConfigError(
            f"held_out: wanted rows that the model was not trained on, got {source.source}, whose "
            "rows are all in its training record: give others"
        )
    if seen.any():
        say(f"export: {seen.sum():,} {SEEN.replace('_', ' ')} in {source.source} left out")
    return [row for row, out in zip(rows, seen, strict=True) if not out], int(seen.sum())


def _data(
    config: ExportConfig, inputs: list[DatasetInput], calibrated_on: Rows | None
) -> list[dict[str, Any]]:
    """Return the held-out rows and the calibration rows, for the lineage."""
    digests = {item.name: item.digest for item in inputs}
    data: list[dict[str, Any]] = []
    if config.adapter is not None:
        data.append({"name": "adapter", "source": without_secrets(config.adapter)})
    if config.held_out is not None:
        data.append({"name": HELD_OUT, "source": without_secrets(config.held_out.source)})
    if calibrated_on is not None:
        rows = config.calibration or config.held_out
        assert rows is not None
        source = without_secrets(rows.source)
        data.append({"name": CALIBRATION, "source": source, "rows": len(calibrated_on)})
    return [each | {"digest": digests.get(each["name"], digests.get(HELD_OUT))} for each in data]


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
    backends: Mapping["Execution", "Backend"],
    held_out: Rows | None,
) -> dict["Execution", _Measured]:
    """Compare the graph with the weights, on the held-out rows or else on the task's examples.

    Returns: the executions (engine and precision) that passed, with their results; the deciding one
        first.
    Raises: for the deciding execution only: FormatError if it is fp32 and its scores differ;
        ConfigError if its metric drops too far.
    """
    from bert_core.inference.export import largest_difference

    task, bundle = predictor.task, predictor.bundle
    rows = predictor.rows(task.examples) if held_out is None else held_out
    pad_id, old = bundle.tokenizer.pad_id, list[Any]()
    answers: dict[Execution, list[Any]] = {run: [] for run in backends}
    differences = dict.fromkeys(backends, 0.0)
    with meter("comparing", len(rows), "rows") as progress:
        for start in range(0, len(rows), ROWS_PER_TASK):
            part = rows[start : start + ROWS_PER_TASK]
            windows = task.encode(part, bundle.tokenizer, predictor.max_length)
            of_weights = predictor.backend.scores(windows, pad_id)
            old += task.decode(part, windows, of_weights)
            for run, backend in backends.items():
                scores = backend.scores(windows, pad_id)
                differences[run] = max(differences[run], largest_difference(of_weights, scores))
                answers[run] += task.decode(part, windows, scores)
            progress.add(len(part))
    passed: dict[Execution, _Measured] = {}
    for run in backends:
        try:
            verdict, metrics = None, bundle.metrics
            if config.held_out is not None:
                with rows_of(config.held_out.source):
                    before, after = task.compare(rows, old), task.compare(rows, answers[run])
                metrics = task.metrics(after)
                verdict = not_worse(task.main_metric(metrics), task.metrics, after, before)
            _check(config, run, differences[run], verdict)
        except (ConfigError, FormatError) as error:
            if run == _deciding(config.quantize):
                raise
            say(f"export: the bundle is not for {run}: {error}")
            continue
        passed[run] = _Measured(difference=differences[run], metrics=metrics, verdict=verdict)
    return passed


def _check(
    config: ExportConfig, run: "Execution", difference: float, verdict: Verdict | None
) -> None:
    """Raise as `_measured` describes."""
    from bert_core.inference.export import TOLERANCE

    if run.precision == "fp32" and difference > TOLERANCE:
        raise FormatError(
            f"wanted the graph's scores within {TOLERANCE:g} of torch's, got a difference of "
            f"{difference:.2g} by {run}: report this, with the model; until then use the bundle as "
            "it is"
        )
    if verdict is not None:
        check_drop(config, verdict)


def check_drop(config: ExportConfig, verdict: Verdict) -> None:
    """Raise ConfigError if the metric falls, or may fall, by more than `max_drop`."""
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
    precision: str,
    measured: Mapping["Execution", _Measured],
    lineage: dict[str, Any],
) -> None:
    """Write the bundle with the graph."""
    from bert_core.bundle.format import About
    from bert_core.bundle.layout import GRAPHS
    from bert_core.bundle.writing import Graph, save_bundle

    def move(path: Path) -> None:
        for file in graph_path.parent.iterdir():  # the graph, and its external weights if any
            shutil.move(file, path.parent / file.name)

    local = config.local_folder / BUNDLE
    shutil.rmtree(local, ignore_errors=True)  # left by a run that was killed after writing it
    save_bundle(
        local,
        predictor.model,
        predictor.bundle.tokenizer,
        About(
            task=predictor.task,
            metrics=next(iter(measured.values())).metrics,
            lineage=lineage,
            trained_rows=predictor.bundle.trained_rows,
            examples=predictor.bundle.examples_for(predictor.task),
        ),
        Graph(name=GRAPHS[precision], write=move, executions=list(measured)),
    )
