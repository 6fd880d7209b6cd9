"""Answers inputs with a model: used by evaluation, batch prediction, the registry and the
server. A process that answers with graphs only never imports torch."""

import copy
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args, get_type_hints

import numpy as np

from bert_core.bundle.format import Bundle, load_bundle
from bert_core.bundle.layout import CONFIG, RECORD, WEIGHTS, Execution
from bert_core.collation import longest_row
from bert_core.data.windows import Window
from bert_core.errors import ConfigError, FormatError, InputError, ResourceError
from bert_core.files import is_uri
from bert_core.inference.engines.catalog import ENGINES
from bert_core.inference.executions import AUTO, possible_executions, seconds_per_token
from bert_core.manifest import folder_with
from bert_core.scores import Backend, Precision
from bert_core.tasks.base import Parameters, Task, check_length
from bert_core.tasks.catalog import TASKS, also
from bert_core.tasks.fill_mask import FillMask
from bert_core.tasks.shapes import Row, as_row

if TYPE_CHECKING:
    from bert_core.objectives.base import ObjectiveModel


class Predictor:
    """A bundle that answers inputs: with torch if it holds weights, with one of `ENGINES` if it
    holds a graph.

    With torch in fp32 on a CPU, an answer is the same to the bit whatever else is in its batch
    (`determinism` says on which CPUs). So it is with a graph, unless `Bundle.ranges_of_batch` is
    set. Safe to call from several threads at once.
    """

    def __init__(
        self,
        folder: str | Path | Bundle,
        device: str | None = None,
        threads: int | None = None,
        task: str | None = None,
        options: Mapping[str, Any] | None = None,
        precision: str | None = None,
        backend: str | None = None,
        prefer: Execution | None = None,
    ) -> None:
        """Load the bundle.

        Args:
            folder: the bundle's folder, the output of a stage that made one, or a bundle already
                read, which several heads can share. `tracking.models.references` finds the folder
                of models elsewhere.
            task: name in `TASKS` of a task that shares the head of the bundle's own, whose head
                pretraining has trained, or that needs none; None takes the bundle's own task, or
                `fill-mask` if it was only pretrained.
            options: values by name, for a task that is not trained or has no head; options left out
                keep the values that the task was trained with.
            precision: of matrix products: fp32 or bf16 with torch; with a graph, one of those in
                `Bundle.executions`. None takes fp32 for weights, and any of a graph's.
            backend: `torch` or one of `ENGINES`. None takes the backend with which the bundle's
                metrics were measured, if it is installed; `auto` measures all that may run the
                bundle, on the task's examples, and takes the fastest.
            prefer: what `auto` takes without measuring, if it may run the bundle; if it may not,
                what None takes.
            device: torch's name; None takes the GPU if there is one, except for a graph.
            threads: CPU threads, of the whole process for torch, which has one pool, or of the
                graph; None leaves torch's unchanged, and gives a graph as many.
        Raises: FormatError if the bundle is damaged or was not trained for the task; ConfigError if
            the options are invalid, or a graph is to run on a GPU; ResourceError if a package that
            it needs is not installed.
        """
        if not isinstance(folder, Bundle):
            # The output of a stage may be given for its bundle, as in every command.
            folder = (
                not is_uri(str(folder)) and folder_with(str(folder), CONFIG, RECORD)
            ) or folder
        bundle = folder if isinstance(folder, Bundle) else load_bundle(folder)
        where = bundle.digest[:12] if isinstance(folder, Bundle) else folder
        self.task = _task_of(bundle, task, options or {}, where)
        config = self.task.encoder_config(bundle.encoder_config)
        if bundle.graph is not None and config != bundle.encoder_config:
            raise ConfigError(
                f"options: wanted those of the graph in {where}, which has every layer, got "
                f"{dict(options or {})}: export the model with these options"
            )
        bundle = replace(bundle, encoder_config=config)
        own_folder = None if isinstance(folder, Bundle) else Path(folder)
        build = partial(_backend, bundle, self.task, own_folder, device, threads)
        executions = possible_executions(bundle, where, backend or AUTO, precision)
        longest = longest_row(bundle.encoder_config.max_length)
        self.max_length = min(longest, self.task.max_length or longest)
        if backend == AUTO and prefer is None and len(executions) > 1:
            self.backend = self._fastest(bundle, executions, build)
        else:
            self.backend = build(prefer if prefer in executions else executions[0])
        # The model holds a copy of the weights: keeping the bundle's would double the memory.
        self.bundle = replace(bundle, state={})

    @cached_property
    def model(self) -> "ObjectiveModel":
        """Return the model that computes; for a graph, the model that it was made of, with weights
        that have shapes but no values, for which torch is imported."""
        from bert_core.inference.weights import model_without_values

        model: ObjectiveModel | None = getattr(self.backend, "model", None)
        return model_without_values(self.bundle, self.task) if model is None else model

    @property
    def execution(self) -> Execution:
        """Return the engine and the precision that compute its scores."""
        return Execution(self.backend.engine, self.backend.precision)

    @property
    def examples(self) -> Sequence[Any]:
        """Return example inputs: the bundle's own, or else the task's."""
        return self.bundle.examples_for(self.task) or self.task.examples

    def _fastest(
        self, bundle: Bundle, executions: Sequence[Execution], build: Callable[[Execution], Backend]
    ) -> Backend:
        """Return the fastest backend that this machine can run, measured on the task's examples.

        Args:
            build: creates the backend of an execution.
        Raises: ResourceError if it can run none.
        """
        rows, tokenizer = self.rows(self.task.examples), bundle.tokenizer
        windows = self.task.encode(rows, tokenizer, self.max_length)
        measured: list[tuple[float, Backend]] = []
        for execution in executions:
            try:
                backend = build(execution)
            except ResourceError:  # an engine is missing, or the CPU does not have the precision
                if execution == executions[-1] and not measured:
                    raise
                continue
            measured.append((seconds_per_token(backend, windows, tokenizer.pad_id), backend))
        return min(measured, key=itemgetter(0))[1]

    @cached_property
    def also(self) -> dict[str, "Predictor"]:
        """Return predictors for the other tasks that the same head answers, by task.

        They share the backend, so that windows of all of them may pass through it together.
        """
        predictors = {}
        for task in also(self.task):
            predictors[task.name] = copy.copy(self)
            predictors[task.name].task = task
        return predictors

    def predict(self, inputs: Any, parameters: Parameters | None = None) -> list[Any]:
        """Answer each input, in order.

        Args:
            inputs: a list of the task's `inputs`: objects, or plain texts if the task needs only a
                text.
            parameters: an instance of `task.parameters`; None takes the defaults.
        Raises: InputError if `inputs` is not a list of at least one such input, or if one is longer
            than `max_length` tokens and is not to be truncated.
        """
        rows = self.rows(inputs)
        windows = self.encode(rows, parameters)
        return self.decode(rows, windows, self.forward(windows), parameters)

    def rows(self, inputs: Any) -> list[Row]:
        """Return each input as a row of the task. Raises: InputError, as `predict` does."""
        if not isinstance(inputs, list | tuple) or not inputs:
            is_list = isinstance(inputs, list | tuple)
            got = "an empty list" if is_list else type(inputs).__name__
            raise InputError(f"inputs: wanted a list of at least one input, got {got}")
        shape = self.task.inputs
        return [as_row(shape, each, f"inputs[{place}]") for place, each in enumerate(inputs)]

    def encode(self, rows: Sequence[Row], parameters: Parameters | None = None) -> list[Window]:
        """Return the windows of the rows. Raises: InputError, as `predict` does."""
        parameters = parameters or self.task.parameters()
        windows = self.task.encode(
            rows, self.bundle.tokenizer, self.max_length, parameters=parameters
        )
        for window in windows:
            check_length(window.row, max(map(len, window.ids)), self.max_length, parameters)
        return windows

    def forward(self, windows: Sequence[Window]) -> list[np.ndarray]:
        """Return the scores of each window before softmax, fp32."""
        return self.backend.scores(windows, self.bundle.tokenizer.pad_id)

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[np.ndarray],
        parameters: Parameters | None = None,
    ) -> list[Any]:
        """Turn scores into answers, in the task's own schema."""
        return self.task.decode(rows, windows, scores, parameters)


def _backend(
    bundle: Bundle,
    task: Task,
    folder: Path | None,
    device: str | None,
    threads: int | None,
    execution: Execution,
) -> Backend:
    if bundle.graph is None or folder is None:
        from bert_core.inference.weights import torch_backend

        precision = cast("Precision", execution.precision)
        return torch_backend(bundle, task, device, threads, precision)
    path = folder / bundle.graph
    if device not in (None, "cpu"):
        raise ConfigError(
            f"device: wanted cpu for {path}, where {execution.engine} runs it, "
            f"got {device}: leave it unset, or give the bundle with {WEIGHTS} that it was exported "
            "from"
        )
    if task.graph_scores is None:
        raise FormatError(
            f"{path}: wanted a graph for a task that has one, got {task.name} with options that "
            "allow none: copy the bundle again, or give the bundle that it was exported from"
        )
    engine, positions = ENGINES[execution.engine], bundle.encoder_config.max_length
    threads = _usual_threads() if threads is None else threads
    return engine(path, task.graph_scores, positions, threads, execution.precision)


def _usual_threads() -> int:
    """Return torch's number of threads if this process has imported it, or else the number of CPUs
    that the process may use."""
    if "torch" in sys.modules:
        return int(sys.modules["torch"].get_num_threads())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _task_of(
    bundle: Bundle, name: str | None, options: Mapping[str, Any], folder: str | Path
) -> Task:
    able = _tasks_of(bundle)
    usual = FillMask.name if bundle.task is None else bundle.task.name
    task = able.get(name or usual)
    if task is None:
        raise FormatError(_unable(bundle, name, able, folder))
    poolings = get_args(get_type_hints(type(task.chosen)).get("pooling"))  # of tasks with vectors
    if poolings and bundle.unread_modules and "pooling" not in options:
        raise ConfigError(
            f"options: wanted a pooling, since sentence-transformers computes the vectors of "
            f"{folder} by modules that are not read here ({bundle.unread_modules}): set pooling to "
            f"{' or '.join(poolings)} for vectors without them, or give another model"
        )
    if not options:
        return task
    shares_head = usual in task.shares_head_with and bundle.task is not None
    if task.trainable and not (task.headless or task.pretrained or shares_head):
        raise ConfigError(
            f"options: wanted none, since a model for {task.name} keeps those that it was "
            f"trained with, got {', '.join(options)}: leave them out"
        )
    task.options.check_given(options)
    return type(task)(task.labels, task.options_of(asdict(task.chosen) | dict(options)))


def _tasks_of(bundle: Bundle) -> dict[str, Task]:
    """Return every task that a bundle answers, by name: its own, those that share its head, those
    whose head pretraining has trained, and those that need no head."""
    same_head = [] if bundle.task is None else [bundle.task, *also(bundle.task)]
    parts = {name.split(".")[1] for name in bundle.state if name.startswith("objectives.")}
    kinds = list(TASKS.values())
    pretrained = [kind for kind in kinds if kind.pretrained and kind.objective in parts]
    headless = [kind for kind in kinds if kind.headless]
    of_kinds = (kind().adapted(bundle.state) for kind in (*pretrained, *headless))
    return {task.name: task for task in (*of_kinds, *same_head)}


def _unable(bundle: Bundle, name: str | None, able: Collection[str], folder: str | Path) -> str:
    """Return the message for a bundle that does not answer a task."""
    kind = TASKS.get(name or FillMask.name)
    state = "only pretrained (or for a task that is unknown here)"
    if bundle.task is not None:
        state = f"for {bundle.task.name}"
    ways = ["fine-tune it first with `raybert finetune`"]
    if kind is not None and not kind.trainable:
        ways = [f"give a model for {', '.join(kind.shares_head_with)} that can do it"]
    usual = None if bundle.task is None else bundle.task.name
    ways += [f"ask for {task}" for task in able if task != usual]
    if kind is FillMask:  # the task that submodels were trained for
        ways += [f"give {path}" for path in bundle.submodels.values()]
    wanted = name or "a task"
    return f"{folder}: wanted a bundle for {wanted}, this one is {state}: {', or '.join(ways)}"
