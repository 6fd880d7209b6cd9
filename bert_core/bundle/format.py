"""What a bundle holds, and reading it; `writing` writes it.

Reading one that holds a graph does not import torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool
from numpy.lib.format import MAGIC_PREFIX
from safetensors import SafetensorError

from bert_core.bundle.foreign import (
    listed_modules,
    task_of_modules,
    task_of_transformers,
    weight_files,
)
from bert_core.bundle.layout import (
    CONFIG,
    GRAPHS,
    OBJECTIVE,
    RECORD,
    TRAINED_ROWS,
    UNRECORDED_EXECUTIONS,
    Execution,
    path_of,
    read_json,
)
from bert_core.bundle.memory import available_bytes, check_memory, needed_bytes
from bert_core.bundle.record import (
    Record,
    bundle_digest,
    bundle_files,
    renew,
    verified,
)
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import ConfigError, FormatError, InputError
from bert_core.model.config import EncoderConfig
from bert_core.model.families import LAYOUTS
from bert_core.model.hf import (
    class_name,
    encoder_config_from_huggingface,
    objectives_of,
)
from bert_core.tasks.base import Task
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.digests import NO_ROWS, Digests
from bert_core.tasks.shapes import Row
from bert_core.typed import as_type
from bert_core.wording import first_line

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Bundle", "bundle_digest", "bundle_files", "load_bundle", "renew"]


@dataclass(frozen=True, kw_only=True)
class About:
    """The facts about a model that a bundle holds besides what is needed to compute with it."""

    task: Task | None = None
    """None if the model was only pretrained, or its task is unknown here."""
    metrics: dict[str, float] = field(default_factory=dict)
    lineage: dict[str, Any] = field(default_factory=dict)
    """The inputs it was made from, recorded by the stage that wrote it: digests of corpus, shards,
    parent bundle."""
    spent: dict[str, float] = field(default_factory=dict)
    """Where the time of the run that made it went, and what it cost; unlike the lineage, no two
    runs have the same. Empty if it is unknown."""
    trained_rows: Digests = field(default_factory=lambda: NO_ROWS)
    """`Task.digests` of the labelled rows that its weights were trained on or selected by,
    including those of its parents and teachers; in any order until they are written."""
    examples: Sequence[Any] = ()
    """A few inputs of its task from its own data, as a caller sends them."""


@dataclass(frozen=True, kw_only=True)
class Bundle(About):
    """The contents of a bundle."""

    encoder_config: EncoderConfig
    state: "dict[str, Tensor]"
    """Weights under our names, on the CPU, in fp32; empty if there is a graph."""
    graph: str | None = None
    """Path in the folder of the ONNX graph that replaces the weights, if any."""
    executions: tuple[Execution, ...] = ()
    """How the graph may be run: the first as its metrics were measured, the others by which they
    are not worse."""
    ranges_of_batch: bool = False
    """Whether it is a graph of an older kind, whose 8 bits take their range from each batch, so
    that an answer depends on what is computed with it."""
    tokenizer: Tokenizer
    digest: str
    """sha256 over the names and sha256 of the files; bundles of the same model have the same
    digest."""
    submodels: dict[str, Path] = field(default_factory=dict)
    """The bundles in its subfolders, by folder name."""
    unread_modules: str = ""
    """The modules by which sentence-transformers computes its vectors, where this project cannot
    compute them."""
    memory_bytes: int = 0
    """Memory that its weights take at least, once they are loaded."""

    def examples_for(self, task: Task) -> Sequence[Any]:
        """Return `examples` if they are inputs of this task, or else an empty sequence."""
        return self.examples if self.task is not None and task.name == self.task.name else ()

    def has_seen(self, task: Task, rows: Sequence[Row]) -> Bool[np.ndarray, "rows"]:
        """Return which of a task's rows are among `trained_rows`."""
        return np.isin(task.digests(rows, task.chosen), self.trained_rows)


def load_bundle(folder: str | Path) -> Bundle:
    """Read a bundle written by this project or transformers, and check every file's sha256.

    Raises: FormatError if a file is missing, changed or damaged, or if a newer version wrote the
        bundle; ResourceError if its weights do not fit in memory.
    """
    folder = Path(folder)
    record, sha256s, digest = verified(folder)
    entries = read_json(folder / CONFIG)
    precision, graph = next(
        ((kind, name) for kind, name in GRAPHS.items() if name in sha256s), ("fp32", None)
    )
    said = record or Record(format_version=0)
    try:
        config = encoder_config_from_huggingface(entries)
        name = class_name(entries)
        # A large graph has its weights in a file next to it, such as `model.onnx_data`.
        of_graph = [path for path in sha256s if graph is not None and path.startswith(graph)]
        loaded = of_graph or weight_files(folder)
        memory_bytes = needed_bytes(path_of(folder, path) for path in loaded)
        check_memory(memory_bytes, available_bytes(), str(folder))
        state = {} if graph else _weights(folder, config, name, has_objective=OBJECTIVE in sha256s)
    except (FormatError, SafetensorError) as error:
        raise FormatError(
            f"{folder}: wanted an encoder in Hugging Face layout, it cannot be read: {error}: "
            "copy or write the bundle again"
        ) from error
    tokenizer = Tokenizer.load(folder, among=sha256s.keys())
    check_vocabulary(folder, config, tokenizer, FormatError)
    unread_modules = ""
    if record is None:
        _check_padding(folder, config, tokenizer)
        task, unread_modules = _task_of_settings(folder, config, entries, state)
    else:
        where = str(folder / RECORD)
        task = recorded_task(where, record.task, record.labels, record.options)
    if task is None:
        # transformers also names regression and multi-label heads `classifier`.
        state = {name: value for name, value in state.items() if ".classification." not in name}
    return Bundle(
        encoder_config=config,
        state=state,
        graph=graph,
        executions=said.executions or UNRECORDED_EXECUTIONS[precision] if graph else (),
        ranges_of_batch=precision == "int8" and not said.executions,
        tokenizer=tokenizer,
        task=task,
        metrics=said.metrics,
        lineage=said.lineage,
        spent=said.spent,
        digest=digest,
        submodels=_submodels(folder, sha256s),
        trained_rows=read_trained_rows(folder) if TRAINED_ROWS in sha256s else NO_ROWS,
        examples=tuple(said.examples),
        unread_modules=unread_modules,
        memory_bytes=memory_bytes,
    )


def _weights(
    folder: Path, config: EncoderConfig, name: str, *, has_objective: bool
) -> dict[str, "Tensor"]:
    """Return the tensors of a bundle without a graph, under our names.

    Args:
        name: the transformers class that its config names.
    """
    # Imported late because they import torch.
    from bert_core.bundle.tensors import read_tensors, read_weights
    from bert_core.model.fit import check_fits
    from bert_core.model.hf_weights import from_huggingface

    state = from_huggingface(read_weights(folder), config, name)
    check_fits(state, config)
    return state | (read_tensors(folder / OBJECTIVE) if has_objective else {})


def _submodels(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return the folders of the bundles in subfolders, by name.

    Args:
        names: paths of all files of the bundle.
    """
    paths = [PurePosixPath(name) for name in names]
    return {path.parts[0]: folder / path.parts[0] for path in paths if path.match(f"*/{RECORD}")}


def read_trained_rows(folder: Path) -> Digests:
    """Return the digests of rows in a folder. Raises: FormatError if they are not digests."""
    path = folder / TRAINED_ROWS
    with path.open("rb") as file:
        if file.read(len(MAGIC_PREFIX)) != MAGIC_PREFIX:  # else it may be a zip file of arrays
            raise _no_digests(path, "another kind of file")
    try:
        # Mapped, so that a damaged header that claims a huge size allocates nothing.
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise _no_digests(path, first_line(str(error))) from error
    if (rows.dtype, rows.ndim) != (np.uint64, 1):
        raise _no_digests(path, f"{rows.dtype} of shape {rows.shape}")
    return np.array(rows)


def _no_digests(path: Path, got: str) -> FormatError:
    return FormatError(
        f"{path}: wanted digests of rows, a NumPy file of uint64, got {got}: copy or write the "
        "bundle again"
    )


def check_vocabulary(
    folder: Path, config: EncoderConfig, tokenizer: Tokenizer, error: type[Exception]
) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        raise error(
            f"{folder}: wanted a vocabulary of at most {config.vocab_size} tokens, the number of "
            f"the model's word embeddings, got {tokenizer.vocab_size} in the tokenizer: "
            "use the tokenizer that the model was trained with"
        )


def _check_padding(folder: Path, config: EncoderConfig, tokenizer: Tokenizer) -> None:
    """Check that the config's `pad_token_id`, by which transformers counts positions, is the
    tokenizer's.

    Raises: FormatError if it is the id of another token.
    """
    pad_token_id = config.embeddings.pad_token_id
    if config.embeddings.position_offset and tokenizer.pad_id != pad_token_id:
        raise FormatError(
            f"{folder / CONFIG}: wanted pad_token_id {tokenizer.pad_id}, that of the tokenizer, "
            f"got {pad_token_id}, the id of {tokenizer.vocabulary[pad_token_id]!r}, which gets no "
            "position in transformers: use the tokenizer that the model was trained with"
        )


def _task_of_settings(
    folder: Path, config: EncoderConfig, entries: dict[str, Any], state: Mapping[str, "Tensor"]
) -> tuple[Task | None, str]:
    """Return the task of a model of transformers or sentence-transformers, and
    `Bundle.unread_modules`."""
    name = class_name(entries)
    bare = name == f"{LAYOUTS[config.family].title}Model"
    try:
        if (task := task_of_modules(folder, bare=bare)) is not None:
            return task, ""
        unread = listed_modules(folder)
        return task_of_transformers(folder, objectives_of(config, name), entries, state), unread
    except (ConfigError, InputError) as error:  # options out of range
        raise FormatError(f"{folder}: {error}: correct it in the model's settings") from error


def recorded_task(
    where: str, name: str | None, labels: list[str] | None, options: Mapping[str, Any]
) -> Task | None:
    """Return the task that a file (`where`) records. Raises: FormatError if there is none such."""
    if name is None:
        return None
    if name not in TASKS:
        raise FormatError(
            f"{where}: wanted one of the tasks {', '.join(sorted(TASKS))}, got {name!r}: "
            "update raybert, or load the folder with transformers"
        )
    kind = TASKS[name]
    former = kind.options.former_names
    known = {name: value for name, value in options.items() if name not in former}
    chosen = as_type(kind.options, known, where, key="options", closed=True)
    try:
        return kind(labels or [], chosen)
    except (ConfigError, InputError) as error:
        raise FormatError(f"{where}: {error}") from error
