"""Reads and encodes the labelled sets of a training stage, and defines what each is for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_core.data.splits import HELD_OUT, SELECTION, TRAIN
from bert_core.data.windows import cut_rows
from bert_core.errors import ConfigError, CorpusError
from bert_core.tasks.digests import Digests
from bert_core.wording import nearest, one_of, without_secrets
from pipelines.corpus.labelled import (
    Columns,
    RowsRead,
    labelled_input,
    labelled_rows,
    rows_of,
    usual_columns,
)
from pipelines.runtime.inputs import bundle_input
from pipelines.runtime.progress import BROKEN, CUT, LEFT_OUT, SEEN, print_remarks, say
from pipelines.training.config import LabelledTrainingConfig
from pipelines.training.decisions import check_decisions
from pipelines.training.selection import SelectionConfig
from tracking.runs.recorder import DatasetInput

if TYPE_CHECKING:
    from bert_core.bundle.format import Bundle
    from bert_core.data.tokenizer import Tokenizer
    from bert_core.data.windows import Window
    from bert_core.tasks.base import Remarks, Task


Taught = Callable[[list[dict[str, Any]], str], list[dict[str, Any]]]


def inputs_of(config: LabelledTrainingConfig) -> tuple[Path, list[DatasetInput]]:
    """Return the local folder of the bundle to start from, and all inputs of the stage."""
    trainable_task(config.task)
    folder, model = bundle_input(config, config.model)
    inputs = [model, labelled_input(TRAIN, config.train, TRAIN)]
    if config.held_out is not None:
        inputs.append(labelled_input(HELD_OUT, config.held_out, HELD_OUT))
    return folder, inputs


def trainable_task(name: str) -> "type[Task]":
    """Return the task of this name. Raises: ConfigError if there is none that labelled rows
    train."""
    from bert_core.tasks.catalog import TASKS

    trainable = [task.name for task in TASKS.values() if task.trainable]
    if name in TASKS and not TASKS[name].trainable:
        others = ", ".join(TASKS[name].shares_head_with)
        raise ConfigError(
            f"task: wanted {one_of(trainable)}, got {name!r}, which is not trained: train a model "
            f"for {others}, and give --task {name} to the stages that answer"
        )
    if name not in TASKS:
        raise ConfigError(
            f"task: wanted {one_of(trainable)}, got {name!r}{nearest(name, trainable)}"
        )
    return TASKS[name]


@dataclass(frozen=True)
class Parts:
    """The rows for a training, divided by purpose, before they are encoded."""

    task: "Task"
    """As the training rows define it."""
    rows: dict[str, list[dict[str, Any]]]
    read: dict[str, "Remarks"]
    """Changes and omissions while reading, training rows and selection rows together."""


@dataclass(frozen=True)
class LabelledSet:
    """A set of rows as they were read, and encoded as windows."""

    rows: list[dict[str, Any]]
    windows: "list[Window]"
    """Windows of the rows; of training rows, only those that have something to learn from."""
    cut: int
    """Number of rows whose windows lack a part of the input, or the answer."""
    plain: "Sequence[Window]" = ()
    """Windows of the plain inputs of rows that measure a model, if those differ."""
    read: "Remarks" = field(default_factory=dict)
    """Changes and omissions while the rows were read."""

    @property
    def left_out(self) -> int:
        """Return the number of rows without a window."""
        return len(self.rows) - len({window.row for window in self.windows})


def read_sets(
    config: LabelledTrainingConfig, bundle: "Bundle", taught: Taught | None = None
) -> tuple["Task", dict[str, LabelledSet]]:
    """Return the task, with the labels of the training rows, and its sets by name. If the bundle
    has the same labels, they are in its order.

    Args:
        taught: as in `read_parts`.
    Raises: ConfigError or CorpusError naming what does not fit the task.
    """
    from bert_core.tasks.catalog import TASKS

    kind = TASKS[config.task]
    kind.options.check_given(config.options)
    usual = usual_columns(bundle, config.task)
    parts = read_parts(config, kind, kind.options_of(config.options), usual=usual, taught=taught)
    task = parts.task.in_order_of(bundle.task).adapted(bundle.state)
    return task, encoded(config, bundle, config.model, task, parts)


def read_parts(
    config: LabelledTrainingConfig,
    kind: "type[Task]",
    options: Any,
    known: "Task | None" = None,
    usual: Columns | None = None,
    taught: Taught | None = None,
) -> Parts:
    """Return the task as the training rows define it, and the rows of each set.

    Args:
        known: the task, if another model has already learned it.
        usual: the columns of the rows that the other model learned it from.
        taught: adds a teacher's scores to training rows and, if each of them has negatives, to
            held-out rows, given the rows and their source.
    Raises: CorpusError naming what does not fit the task.
    """
    config.classes.check_task(kind)
    checked = partial((known or kind(options=options)).fitting, trained=True)
    read = labelled_rows(config.train, "train", kind.shapes(options), checked, usual)
    rows, remarks = few_per_class(read.rows, config.rows_per_class), {TRAIN: _remarks(read)}
    if taught is not None:
        rows = taught(rows, config.train.source)
    with rows_of(config.train.source):
        task = known or kind.from_rows(rows, options)
    check_decisions(config.selection, task)
    parts = divided(rows, task.groups(rows, task.chosen), config.selection)
    with rows_of(config.train.source):
        task = task.to_learn(parts[TRAIN], config.max_length)
    if SELECTION in parts and config.selection.metric is not None:
        # Resolved now: training would only know the names of its scores after an epoch.
        metric = config.selection.named(task.baseline(parts[SELECTION]))
        if metric != config.selection.metric:
            say(f"selection.metric: {config.selection.metric} is {metric}")
    if config.held_out is not None:
        read = labelled_rows(
            config.held_out,
            HELD_OUT,
            task.shapes(task.chosen),
            task.fitting,
            {**(usual or {}), **config.train.columns},
        )
        parts[HELD_OUT], remarks[HELD_OUT] = read.rows, _remarks(read)
        if taught is not None and all(row.get("negatives") for row in read.rows):
            parts[HELD_OUT] = taught(read.rows, config.held_out.source)
    return Parts(task, parts, remarks)


def _remarks(read: RowsRead) -> "Remarks":
    return read.remarks | {BROKEN: read.broken}


def encoded(
    config: LabelledTrainingConfig,
    bundle: "Bundle",
    name: str,
    task: "Task",
    parts: Parts,
) -> dict[str, LabelledSet]:
    """Return the rows of each set, encoded for the encoder of a bundle with this name.

    Raises: ConfigError if `max_length` is too long for it, or a batch is too small for all workers;
        CorpusError if there are too few training rows, or a row does not fit the task.
    """
    _check_negatives(config.batch_size, task, parts.rows[TRAIN])
    training, selecting = len(parts.rows[TRAIN]), len(parts.rows.get(SELECTION, []))
    if training < config.batch_size:
        of_which = f", of which {selecting} are selection rows" if selecting else ""
        raise CorpusError(
            f"{config.train.source}: wanted at least batch_size = {config.batch_size} rows to "
            f"train on, got {training + selecting}{of_which}: lower batch_size, or add rows"
        )
    _check_length(config.max_length, bundle, name)
    sets = {}
    for part, rows in parts.rows.items():
        source = config.held_out if part == HELD_OUT else config.train
        assert source is not None
        with rows_of(f"{source.source} ({part})"):
            windows = task.encode(rows, bundle.tokenizer, config.max_length, labelled=True)
        cut = cut_rows(windows)
        inputs = None
        if part == TRAIN:
            windows = [window for window in windows if not window.is_unlabelled]
        else:
            inputs = task.plain(rows)
        plain = task.encode(inputs, bundle.tokenizer, config.max_length) if inputs else ()
        sets[part] = LabelledSet(rows, windows, cut, plain, parts.read.get(part, {}))
    if sets[TRAIN].left_out and len(sets[TRAIN].windows) < config.batch_size:
        raise CorpusError(
            f"{config.train.source}: wanted at least batch_size = {config.batch_size} rows with "
            f"something to learn within max_length = {config.max_length} tokens, got "
            f"{training - sets[TRAIN].left_out} of {training}: raise max_length, or lower "
            "batch_size"
        )
    return sets


def _check_negatives(batch_size: int, task: "Task", rows: list[dict[str, Any]]) -> None:
    """Raise ConfigError if a batch is a single row without negatives."""
    if batch_size > 1 or not task.joint:
        return
    if task.kept_together is not None:
        raise ConfigError(
            "batch_size: wanted at least 2, since a query's passages are compared with each other, "
            "got 1, with which nothing is learnt: raise it"
        )
    if not all(row.get("negatives") for row in rows):
        raise ConfigError(
            "batch_size: wanted at least 2, since a row's negatives are the other texts of its "
            "batch, got 1, with which nothing is learnt: raise it, or give every row negatives"
        )


def divided(rows: list[dict], groups: Digests, config: SelectionConfig) -> dict[str, list[dict]]:
    """Split rows into training rows and, if `config` has a share for them, selection rows.

    Groups are drawn whole as long as they fit, so that no group is split. Raises: ConfigError if no
    group fits.
    """
    if not config.share:
        return {TRAIN: rows}
    left = max(1, round(config.share * len(rows)))
    _, first, group_of, sizes = np.unique(
        groups, return_index=True, return_inverse=True, return_counts=True
    )
    if sizes.min() > left:
        raise ConfigError(
            f"selection.share: wanted a share of the {len(rows):,} rows with room for a group of "
            f"rows that belong together (same passage, or duplicates), got {config.share:g} "
            f"({left:,} rows), but the smallest group has {sizes.min():,}: raise it, or set it to 0"
        )
    drawn = np.zeros(len(sizes), dtype=bool)
    for group in np.argsort(first)[np.random.default_rng(config.seed).permutation(len(first))]:
        if sizes[group] <= left:
            drawn[group] = True
            left -= sizes[group]
    is_selected = drawn[group_of]
    return {
        TRAIN: [row for row, out in zip(rows, is_selected, strict=True) if not out],
        SELECTION: [row for row, out in zip(rows, is_selected, strict=True) if out],
    }


def few_per_class(rows: list[dict[str, Any]], most: int | None) -> list[dict]:
    """Return at most `most` rows per label, in order; the same rows for every model compared."""
    if most is None:
        return rows
    if "label" not in rows[0]:
        raise ConfigError(
            f"rows_per_class: wanted rows with one label each, got rows with "
            f"{', '.join(rows[0])}: leave it out for this task"
        )
    places: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row["label"], []).append(place)
    chosen: list[int] = []
    rng = np.random.default_rng(0)
    for label in sorted(places):
        chosen.extend(rng.permutation(places[label])[:most].tolist())
    return [rows[place] for place in sorted(chosen)]


def trained_rows(task: "Task", sets: dict[str, LabelledSet]) -> Digests:
    """Return the digests of the rows that the weights are trained on or selected by."""
    return task.digests(
        [row for name in (TRAIN, SELECTION) if name in sets for row in sets[name].rows],
        task.chosen,
    )


def shown_rows(task: "Task", sets: dict[str, LabelledSet], count: int) -> tuple[Any, ...]:
    """Return example inputs for the bundle, as a caller sends them.

    They come from held-out rows, or else from selection rows, and only from rows that are not cut;
    training rows would flatter the model. `examples_of` has the rest of the rule.
    """
    from bert_core.tasks.examples import examples_of

    measured = sets.get(HELD_OUT) or sets.get(SELECTION)
    if measured is None:
        return ()
    cut = {window.row for window in measured.windows if window.is_cut}
    whole = [row for place, row in enumerate(measured.rows) if place not in cut]
    return examples_of(task, whole, count)


def remarks_of(
    stage: str,
    config: LabelledTrainingConfig,
    task: "Task",
    sets: dict[str, LabelledSet],
    trained_on: Digests,
) -> "Remarks":
    """Return the remarks on the training rows and the held-out rows, and print them.

    Args:
        trained_on: digests of all rows that the model has seen by the time it is scored.
    """
    remarks: Remarks = {}
    for split, source in ((TRAIN, config.train), (HELD_OUT, config.held_out)):
        if source is not None:
            rows = sets[split].rows
            of_split = sets[split].read | task.remarks(rows) | {CUT: sets[split].cut}
            if split == TRAIN:
                of_split[LEFT_OUT] = sets[split].left_out
            if split == HELD_OUT:
                seen = np.isin(task.digests(rows, task.chosen), trained_on)
                of_split[SEEN] = int(seen.sum())
            told = {name: value for name, value in of_split.items() if name != BROKEN}  # as read
            print_remarks(stage, told, f"{source.source} ({split})")
            remarks |= {f"{split}_{name}": count for name, count in of_split.items()}
    return remarks


def _check_length(max_length: int, bundle: "Bundle", name: str) -> None:
    """Raise ConfigError if rows may be longer than the positions of the bundle, which the message
    calls `name`."""
    from bert_core.collation import longest_row

    longest = longest_row(bundle.encoder_config.max_length)
    if max_length > longest:
        raise ConfigError(
            f"max_length: wanted at most {longest}, the number of positions of {name}, "
            f"got {max_length}"
        )


def lineage_of(
    config: LabelledTrainingConfig,
    tokenizer: "Tokenizer",
    inputs: list[DatasetInput],
    sets: dict[str, LabelledSet],
) -> list[dict[str, Any]]:
    """Return the vocabulary and the labelled sets, for the lineage."""
    sources = {TRAIN: config.train, HELD_OUT: config.held_out}
    return [
        {"name": "vocabulary", "digest": tokenizer.digest, "tokens": tokenizer.vocab_size},
        *(
            {
                "name": item.name,
                "digest": item.digest,
                "source": without_secrets(source.source),
                "rows": len(sets[item.name].rows),
            }
            for item in inputs
            if (source := sources.get(item.name)) is not None
        ),
    ]
