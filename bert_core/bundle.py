"""A bundle: a model in a folder, the contract between training, serving and Hugging Face.

`config.json`, `model.safetensors` and the tokenizer's files are Hugging Face's layout under its own
names; `raybert.json` adds what it has no place for: task, metrics, lineage, and the sha256 of every
other file. Heads that transformers does not know are in `objective.safetensors`, which it ignores,
and models that an objective trains beside the encoder are bundles themselves, in folders of it.
`trained_rows.npy` has the digests of the labelled rows that the weights have seen.
An exported bundle holds an ONNX graph instead of weights, where optimum and transformers.js look.
A folder without `raybert.json`, as transformers writes it, is a bundle too, unverified. Folders are
local: fetching one from elsewhere is for `tracking.resolve`.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bert_core import files
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import ConfigError, FormatError
from bert_core.model.config import EncoderConfig
from bert_core.model.families import LAYOUTS
from bert_core.model.heads import LinearHead
from bert_core.model.hf import (
    architecture,
    encoder_config_from_huggingface,
    encoder_config_to_huggingface,
    from_huggingface,
    objectives_of,
    to_huggingface,
)
from bert_core.model.sharing import load_plain_state, plain_state
from bert_core.objectives.base import Objective, ObjectiveModel
from bert_core.objectives.classification import Classification
from bert_core.tasks.base import Task
from bert_core.tasks.digests import NO_ROWS, Digests
from bert_core.tasks.feature_extraction import MODULES, POOLING, SETTINGS, FeatureExtraction
from bert_core.tasks.registry import TASKS
from bert_core.tasks.rows import Row

FORMAT_VERSION = 1
CONFIG, WEIGHTS, RECORD = "config.json", "model.safetensors", "raybert.json"
OBJECTIVE = "objective.safetensors"
TRAINED_ROWS = "trained_rows.npy"
GRAPHS = {None: "onnx/model.onnx", "int8": "onnx/model_quantized.onnx"}
"""Where a graph lies, by how it is quantized."""
# Where weights are in folders of others: in parts, or as torch itself saved them.
WEIGHTS_INDEX, OLD_WEIGHTS = "model.safetensors.index.json", "pytorch_model.bin"
# What counts in a folder that holds no record of its own.
_FOREIGN = (
    CONFIG,
    WEIGHTS,
    OBJECTIVE,
    TRAINED_ROWS,
    "tokenizer.json",
    "vocab.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    MODULES,
    POOLING,
    SETTINGS,
)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What a bundle's folder holds."""

    encoder_config: EncoderConfig
    state: dict[str, Tensor]
    """Weights under our names, on the CPU, fp32; none where there is a graph."""
    graph: str | None = None
    """The ONNX graph's path in the folder, where that stands for the weights."""
    tokenizer: Tokenizer
    task: Task | None
    """None where the model was pretrained only, or for a task that is not known here."""
    metrics: dict[str, float]
    lineage: dict[str, Any]
    """What it was made from, as its maker wrote it: digests of corpus, shards, parent bundle."""
    digest: str
    """sha256 over names and sha256 of the files: two bundles that are one model have one digest."""
    submodels: dict[str, Path] = field(default_factory=dict)
    """The bundles in its folder, by their names there."""
    trained_rows: Digests = field(default_factory=lambda: NO_ROWS)
    """`Task.digests` of the labelled rows that its weights were trained on or selected by, those of
    its parents and teachers included."""

    def has_seen(self, task: Task, rows: Sequence[Row]) -> Bool[np.ndarray, "rows"]:
        """Which of a task's rows are among `trained_rows`."""
        return np.isin(task.digests(rows, task.chosen), self.trained_rows)


def save_bundle(
    folder: str | Path,
    model: ObjectiveModel,
    tokenizer: Tokenizer,
    *,
    task: Task | None,
    metrics: dict[str, float],
    lineage: dict[str, Any],
    trained_rows: Digests = NO_ROWS,
    graph: tuple[str, Callable[[Path], object]] | None = None,
) -> None:
    """Write a bundle; the folder appears whole or not at all.

    Args:
        trained_rows: as a bundle has them, in any order.
        graph: one of `GRAPHS` and what writes it there, with data beside it, instead of weights.
    Raises: ConfigError if something lies at `folder` already, or the tokenizer has more tokens
        than the model.
    """
    folder = Path(folder)
    if folder.exists():
        raise ConfigError(
            f"{folder}: wanted a path where nothing lies yet, found something: "
            "remove it, or give another output"
        )
    config = model.encoder.config
    _check_vocabulary(folder, config, tokenizer, ConfigError)
    theirs = model.in_transformers
    entries = encoder_config_to_huggingface(config) | {
        "architectures": [architecture(config, theirs)],
        "dtype": "float32",
    }
    special = {"cls": tokenizer.cls_id, "sep": tokenizer.sep_id}
    token_ids = LAYOUTS[config.family].token_ids
    entries |= {entry: special[token] for entry, token in token_ids.items()}
    for objective in model.objectives.values():
        if task is not None and isinstance(objective, Classification):
            entries["problem_type"] = objective.problem_type
    labels = _labels(model, task)
    if labels:
        entries["id2label"] = {str(index): label for index, label in enumerate(labels)}
        entries["label2id"] = {label: index for index, label in enumerate(labels)}
    partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        partial.mkdir(parents=True)
        files.write_json(str(partial / CONFIG), entries)
        if graph is None:
            _write_weights(partial, model)
            for name, _, other in _submodels(model):
                about: dict[str, Any] = {"task": None, "metrics": {}, "lineage": lineage}
                about["trained_rows"] = trained_rows
                save_bundle(partial / name, other, tokenizer, **about)
        else:
            name, write = graph
            (partial / name).parent.mkdir()
            write(partial / name)
        segments = config.embeddings.type_vocab_size > 1
        tokenizer.save(partial, config.max_length, segments=segments)
        if len(trained_rows):
            np.save(partial / TRAINED_ROWS, np.unique(trained_rows))
        for path, value in ({} if task is None else task.files(config)).items():
            files.write_json(str(partial / path), value)
        record = {
            "format_version": FORMAT_VERSION,
            "task": None if task is None else task.name,
            **({"labels": None} if task is None else task.record),
            "metrics": metrics,
            "lineage": lineage,
            "files": _sha256s(partial, names_in(partial)),
        }
        files.write_json(str(partial / RECORD), record)
        _sync(partial)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_weights(folder: Path, model: ObjectiveModel) -> None:
    """Those of its own, without its submodels'."""
    whole = {
        name: tensor.detach().float().cpu()
        for name, tensor in plain_state(model).items()
        if name.startswith(("encoder.", "objectives."))  # else for its training alone
    }
    heads = {name: tensor for name, tensor in whole.items() if _is_ours(name, model)}
    state = {name: tensor for name, tensor in whole.items() if name not in heads}
    for _, prefix, _ in _submodels(model):
        heads = {name: tensor for name, tensor in heads.items() if not name.startswith(prefix)}
    theirs = to_huggingface(state, model.encoder.config)
    save_file(theirs, folder / WEIGHTS, metadata={"format": "pt"})
    if heads:
        save_file(heads, folder / OBJECTIVE, metadata={"format": "pt"})


def load_bundle(folder: str | Path) -> Bundle:
    """Read a bundle that this project or transformers wrote, and check every file's sha256.

    Raises: FormatError if a file is missing, changed or damaged, or newer code wrote the bundle.
    """
    folder = Path(folder)
    record = _read_record(folder)
    sha256s = _verified(folder, record)
    entries = _read_json(folder / CONFIG)
    graph = next((name for name in GRAPHS.values() if name in sha256s), None)
    try:
        config = encoder_config_from_huggingface(entries)
        name = _class_name(entries)
        weights = {} if graph else _read_weights(folder)
        state = from_huggingface(weights, config, name)
        if (folder / OBJECTIVE).is_file():
            state |= load_file(folder / OBJECTIVE)
    except (FormatError, SafetensorError) as error:
        raise FormatError(
            f"{folder}: wanted an encoder in Hugging Face layout, it cannot be read: {error}: "
            "copy or write the bundle again"
        ) from error
    tokenizer = Tokenizer.load(folder)
    _check_vocabulary(folder, config, tokenizer, FormatError)
    if record is None:
        heads = objectives_of(config, name)
        bare = name == f"{LAYOUTS[config.family].title}Model"
        task = _vector_task(folder, bare=bare) or _foreign_task(heads, entries, state)
    else:
        task = _recorded_task(folder, record)
    if task is None:
        # A head of regression or of several labels at once is a `classifier` there too.
        state = {name: value for name, value in state.items() if ".classification." not in name}
    return Bundle(
        encoder_config=config,
        state=state,
        graph=graph,
        tokenizer=tokenizer,
        task=task,
        metrics=(record or {}).get("metrics", {}),
        lineage=(record or {}).get("lineage", {}),
        digest=_digest(sha256s),
        submodels={path.parent.name: path.parent for path in folder.glob(f"*/{RECORD}")},
        trained_rows=np.load(folder / TRAINED_ROWS) if TRAINED_ROWS in sha256s else NO_ROWS,
    )


def bundle_digest(folder: str | Path) -> str:
    """`Bundle.digest` without loading the model; every file is checked as `load_bundle` does.

    Raises: FormatError if a file is missing or changed.
    """
    folder = Path(folder)
    return _digest(_verified(folder, _read_record(folder)))


def build_model(
    bundle: Bundle, objectives: Sequence[Objective], *, require_heads: bool = False
) -> ObjectiveModel:
    """A model with the bundle's weights and these objectives.

    The encoder comes from the bundle whole. A head, or the pooler, stays fresh where the bundle
    lacks it or holds it in another shape (another number of labels), unless `require_heads`.
    Raises: FormatError if the bundle has a graph instead of weights, the encoder's weights do not
        fit its config, or a head is required that is not there.
    """
    model = ObjectiveModel(require_weights(bundle).encoder_config, objectives)
    wanted, given = plain_state(model), _given(bundle, model)
    unfit = _unfit(wanted, given)
    fresh = {_part(name) for name in unfit}
    if "encoder" in fresh or (require_heads and fresh):
        name = next(name for name in unfit if require_heads or _part(name) == "encoder")
        came = f"of shape {tuple(given[name].shape)}" if name in given else "absent"
        raise FormatError(
            f"{WEIGHTS}: wanted {name} of shape {tuple(wanted[name].shape)}, it is {came}: "
            "the weights do not belong to this config.json; write the bundle again"
        )
    taken = {name: given[name] for name in wanted if _part(name) not in fresh}
    load_plain_state(model, taken)
    return model


def require_weights(bundle: Bundle) -> Bundle:
    """The bundle itself. Raises: FormatError if it has a graph instead of weights."""
    if bundle.graph is not None:
        raise FormatError(
            f"wanted a bundle with {WEIGHTS}, this one was exported and has {bundle.graph} "
            "instead: give the bundle that it was exported from"
        )
    return bundle


def fresh_parts(bundle: Bundle, model: ObjectiveModel) -> set[str]:
    """What of a model a bundle has no weights for: objectives by name, `pooler`, `encoder`."""
    return {_part(name) for name in _unfit(plain_state(model), _given(bundle, model))}


def _given(bundle: Bundle, model: ObjectiveModel) -> dict[str, Tensor]:
    """A bundle's tensors by their names in a model, those of its submodels among them."""
    given = dict(bundle.state)
    for folder, prefix, _ in _submodels(model):
        if folder in bundle.submodels:
            own = load_bundle(bundle.submodels[folder]).state
            given |= {prefix + name: tensor for name, tensor in own.items()}
    return given


def _unfit(wanted: dict[str, Tensor], given: dict[str, Tensor]) -> list[str]:
    """The tensors that are not given, or in another shape."""
    return [
        name
        for name, tensor in wanted.items()
        if name not in given or given[name].shape != tensor.shape
    ]


def _part(name: str) -> str:
    """What is taken from a bundle together or not at all: the encoder, its pooler, one head."""
    if name.startswith("encoder.pooler."):
        return "pooler"
    return "encoder" if name.startswith("encoder.") else name.split(".")[1]


def _is_ours(name: str, model: ObjectiveModel) -> bool:
    """Whether no class of transformers has a tensor."""
    if not name.startswith("objectives."):
        return False
    _, known_as, part, *_ = name.split(".")
    objective = model.objectives[known_as]
    assert isinstance(objective, Objective)
    return known_as not in model.in_transformers or part in objective.beside


def _submodels(model: ObjectiveModel) -> list[tuple[str, str, ObjectiveModel]]:
    """The models that objectives own, each after its folder and what the names of its tensors begin
    with here."""
    return [
        (folder, f"objectives.{name}.{folder}.", other)
        for name, objective in model.objectives.items()
        if isinstance(objective, Objective)
        for folder, other in objective.submodels().items()
    ]


def _labels(model: ObjectiveModel, task: Task | None) -> list[str]:
    """The labels of what a model tells apart; transformers' own names where there is no task."""
    if task is not None:
        return task.labels
    heads = [getattr(one, "head", None) for one in model.objectives.values()]
    counts = [head.linear.out_features for head in heads if isinstance(head, LinearHead)]
    return [f"LABEL_{index}" for index in range(max(counts, default=0))]


def _check_vocabulary(
    folder: Path, config: EncoderConfig, tokenizer: Tokenizer, error: type[Exception]
) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        raise error(
            f"{folder}: wanted a vocabulary of at most {config.vocab_size} tokens, as many as the "
            f"model has embeddings, the tokenizer has {tokenizer.vocab_size}: "
            "use the tokenizer that the model was trained with"
        )


def _read_json(path: Path, wanted: type = dict) -> Any:
    if not path.is_file():
        raise FormatError(
            f"{path}: wanted this file, there is none: give the folder of a bundle, or of a model "
            "that transformers wrote with save_pretrained"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(
            f"{path}: wanted JSON, it cannot be read ({error}): copy it again"
        ) from error
    if not isinstance(value, wanted):
        kind = "object" if wanted is dict else "list"
        raise FormatError(
            f"{path}: wanted a JSON {kind}, found {type(value).__name__}: copy it again"
        )
    return value


def _read_record(folder: Path) -> dict[str, Any] | None:
    if not (folder / RECORD).is_file():
        return None
    record = _read_json(folder / RECORD)
    version = record.get("format_version")
    if not isinstance(version, int):
        raise FormatError(
            f"{folder / RECORD}: wanted a format_version, it has none: copy the bundle again"
        )
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{folder / RECORD}: wanted format_version {FORMAT_VERSION} or older, got {version}: "
            "it was made by a newer raybert, update this one"
        )
    names = set(record.get("files") or ())
    if CONFIG not in names or names.isdisjoint({WEIGHTS, *GRAPHS.values()}):
        raise FormatError(
            f"{folder / RECORD}: wanted the sha256 of at least {CONFIG} and {WEIGHTS}, or an ONNX "
            "graph, under files: copy the bundle again"
        )
    return record


def _verified(folder: Path, record: dict[str, Any] | None) -> dict[str, str]:
    """The sha256 of each file of the bundle, checked against its record where it has one."""
    wanted = None if record is None else record["files"]
    weights = [] if wanted else _weight_files(folder)
    names = wanted or [name for name in _FOREIGN if (folder / name).is_file()]
    for name in (CONFIG, *weights, *names):
        if not (folder / name).is_file():
            raise FormatError(
                f"{folder / name}: wanted this file of the bundle, there is none: "
                "copy or write the bundle again"
            )
    came = _sha256s(folder, dict.fromkeys([*names, *weights]))
    for name, sha256 in came.items():
        if wanted is not None and sha256 != wanted[name]:
            raise FormatError(
                f"{folder / name}: wanted sha256 {wanted[name][:12]}, got {sha256[:12]}: the file "
                "was changed after the bundle was written; copy or write the bundle again, or "
                f"remove {RECORD} to accept the folder as it is"
            )
    return came


def _weight_files(folder: Path) -> list[str]:
    """The files that hold the weights: one, or the parts that an index names and it."""
    if not (folder / WEIGHTS).is_file():
        if (folder / WEIGHTS_INDEX).is_file():
            index = _read_json(folder / WEIGHTS_INDEX)
            return [WEIGHTS_INDEX, *sorted(set(index.get("weight_map", {}).values()))]
        if (folder / OLD_WEIGHTS).is_file():
            return [OLD_WEIGHTS]
    return [WEIGHTS]


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors under their names in the files, floating ones in fp32.

    Raises: FormatError if a file of torch holds anything but tensors.
    """
    state: dict[str, Tensor] = {}
    for name in _weight_files(folder):
        if name == OLD_WEIGHTS:
            try:
                state |= torch.load(folder / name, map_location="cpu", weights_only=True)
            except Exception as error:  # NOTE: of pickle, of torch or of the zip file
                raise FormatError(
                    f"{name} is no file of tensors alone ({str(error).splitlines()[0]})"
                ) from error
        elif name != WEIGHTS_INDEX:
            state |= load_file(folder / name)
    return {name: _single(tensor) for name, tensor in state.items()}


def _sha256s(folder: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: files.sha256_of(str(folder / name)) for name in names}


def _digest(sha256s: dict[str, str]) -> str:
    lines = "".join(f"{name} {sha256}\n" for name, sha256 in sorted(sha256s.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _recorded_task(folder: Path, record: dict[str, Any]) -> Task | None:
    name = record.get("task")
    if name is None:
        return None
    if name not in TASKS:
        raise FormatError(
            f"{folder / RECORD}: wanted one of the tasks {', '.join(sorted(TASKS))}, got {name!r}: "
            "update raybert, or load the folder with transformers"
        )
    kind = TASKS[name]
    return kind(record["labels"], kind.options(**record.get("options", {})))


def _foreign_task(
    objectives: frozenset[str], entries: dict[str, Any], state: dict[str, Tensor]
) -> Task | None:
    """The task of a folder that transformers wrote; None for what no task here answers."""
    known = [task for task in TASKS.values() if objectives == {task.objective}]
    if not known:
        return None
    head = state.get(f"objectives.{known[0].objective}.head.linear.weight", ())
    named = entries.get("id2label") or {}
    if not isinstance(named, dict):
        raise FormatError(
            f"{CONFIG}: wanted id2label to be a JSON object, found {type(named).__name__}: copy it "
            "again"
        )
    names = {int(index): label for index, label in named.items()}
    # transformers leaves its own default names out of the file.
    labels = [names.get(index, f"LABEL_{index}") for index in range(len(head))]
    tasks = (task.from_huggingface(entries, labels) for task in known)
    task = next(filter(None, tasks), None)
    return None if task is None else task.adapted(state)


def _vector_task(folder: Path, *, bare: bool) -> Task | None:
    """The task of a folder that sentence-transformers wrote, or of an encoder without a head."""

    def read(name: str) -> Any:
        wanted = list if name == MODULES else dict
        return _read_json(folder / name, wanted) if (folder / name).is_file() else None

    if (folder / MODULES).is_file():
        return FeatureExtraction.from_modules(read)
    return FeatureExtraction() if bare else None


def _class_name(entries: dict[str, Any]) -> str:
    """The class of transformers that a folder is of; nothing where it does not say."""
    named = entries.get("architectures") or [""]
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise FormatError(f"architectures = {named!r}: wanted a list of names")
    return named[0]


def names_in(folder: Path) -> list[str]:
    """The files of a bundle, sorted, by their paths in it."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _sync(folder: Path) -> None:
    """Force a folder's files to the disk, so that the rename never shows empty ones."""
    for name in names_in(folder):
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
