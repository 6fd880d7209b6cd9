"""A bundle: a model in a folder, the contract between training, serving and Hugging Face.

`config.json`, `model.safetensors` and the tokenizer's files are Hugging Face's layout under its own
names; `raybert.json` adds what it has no place for: task, metrics, lineage, and the sha256 of every
other file. A folder without `raybert.json`, as transformers writes it, is a bundle too, unverified.
Folders are local: fetching one from elsewhere is for `tracking.resolve`.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bert_core import files
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import ConfigError, FormatError
from bert_core.model.hf import (
    encoder_config_from_huggingface,
    encoder_config_to_huggingface,
    from_huggingface,
    to_huggingface,
)
from bert_core.model.variants import EncoderConfig
from bert_core.objectives.base import Objective, ObjectiveModel
from bert_core.tasks.base import Task
from bert_core.tasks.registry import TASKS

FORMAT_VERSION = 1
CONFIG, WEIGHTS, RECORD = "config.json", "model.safetensors", "raybert.json"
# What counts in a folder that holds no record of its own.
_FOREIGN = (
    CONFIG,
    WEIGHTS,
    "tokenizer.json",
    "vocab.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
# Hugging Face's class for what a model without a task was trained on.
_ARCHITECTURES = {
    frozenset[str](): "BertModel",
    frozenset({"mlm"}): "BertForMaskedLM",
    frozenset({"nsp"}): "BertForNextSentencePrediction",
    frozenset({"mlm", "nsp"}): "BertForPreTraining",
}


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What a bundle's folder holds."""

    encoder_config: EncoderConfig
    state: dict[str, Tensor]
    """Weights under our names, on the CPU, fp32."""
    tokenizer: Tokenizer
    task: Task | None
    """None where the model was pretrained only, or for a task that is not known here."""
    metrics: dict[str, float]
    lineage: dict[str, Any]
    """What it was made from, as its maker wrote it: digests of corpus, shards, parent bundle."""
    digest: str
    """sha256 over names and sha256 of the files: two bundles that are one model have one digest."""


def save_bundle(
    folder: str | Path,
    model: ObjectiveModel,
    tokenizer: Tokenizer,
    *,
    task: Task | None,
    metrics: dict[str, float],
    lineage: dict[str, Any],
) -> None:
    """Write a bundle; the folder appears whole or not at all.

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
    entries = encoder_config_to_huggingface(config) | {
        "architectures": [_architecture(model, task)],
        "dtype": "float32",
    }
    if task is not None:
        entries["id2label"] = {str(index): label for index, label in enumerate(task.labels)}
        entries["label2id"] = {label: index for index, label in enumerate(task.labels)}
    state = {
        name: tensor.detach().float().cpu()
        for name, tensor in to_huggingface(model.state_dict()).items()
    }
    partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        partial.mkdir(parents=True)
        files.write_json(str(partial / CONFIG), entries)
        save_file(state, partial / WEIGHTS, metadata={"format": "pt"})
        tokenizer.save(partial, config.max_position_embeddings)
        record = {
            "format_version": FORMAT_VERSION,
            "task": None if task is None else task.name,
            "labels": None if task is None else task.labels,
            "metrics": metrics,
            "lineage": lineage,
            "files": _sha256s(partial, sorted(path.name for path in partial.iterdir())),
        }
        files.write_json(str(partial / RECORD), record)
        _sync(partial)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load_bundle(folder: str | Path) -> Bundle:
    """Read a bundle that this project or transformers wrote, and check every file's sha256.

    Raises: FormatError if a file is missing, changed or damaged, or newer code wrote the bundle.
    """
    folder = Path(folder)
    record = _read_record(folder)
    sha256s = _verified(folder, record)
    entries = _read_json(folder / CONFIG)
    try:
        config = encoder_config_from_huggingface(entries)
        theirs = {name: _single(tensor) for name, tensor in load_file(folder / WEIGHTS).items()}
        state = from_huggingface(theirs)
    except (FormatError, SafetensorError) as error:
        raise FormatError(
            f"{folder}: wanted a BERT in Hugging Face layout, it cannot be read: {error}: "
            "copy or write the bundle again"
        ) from error
    tokenizer = Tokenizer.load(folder)
    _check_vocabulary(folder, config, tokenizer, FormatError)
    architecture = (entries.get("architectures") or ["BertModel"])[0]
    if record is None:
        task = _foreign_task(architecture, entries, state)
    else:
        task = _recorded_task(folder, record)
    if task is None:
        # Other classes of transformers call their heads `classifier` too.
        state = {name: value for name, value in state.items() if ".classification." not in name}
    return Bundle(
        encoder_config=config,
        state=state,
        tokenizer=tokenizer,
        task=task,
        metrics=(record or {}).get("metrics", {}),
        lineage=(record or {}).get("lineage", {}),
        digest=_digest(sha256s),
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
    Raises: FormatError if the encoder's weights do not fit the bundle's config, or a head is
        required that is not there.
    """
    model = ObjectiveModel(bundle.encoder_config, objectives)
    wanted = model.state_dict()
    unfit = [
        name
        for name, tensor in wanted.items()
        if name not in bundle.state or bundle.state[name].shape != tensor.shape
    ]
    fresh = {_part(name) for name in unfit}
    if "encoder" in fresh or (require_heads and fresh):
        name = next(name for name in unfit if require_heads or _part(name) == "encoder")
        came = f"of shape {tuple(bundle.state[name].shape)}" if name in bundle.state else "absent"
        raise FormatError(
            f"{WEIGHTS}: wanted {name} of shape {tuple(wanted[name].shape)}, it is {came}: "
            "the weights do not belong to this config.json; write the bundle again"
        )
    taken = {name: bundle.state[name] for name in wanted if _part(name) not in fresh}
    model.load_state_dict(taken, strict=False)
    return model


def _part(name: str) -> str:
    """What is taken from a bundle together or not at all: the encoder, its pooler, one head."""
    if name.startswith("encoder.pooler."):
        return "pooler"
    return "encoder" if name.startswith("encoder.") else name.split(".")[1]


def _architecture(model: ObjectiveModel, task: Task | None) -> str:
    names = frozenset(model.objectives)
    if task is not None:
        assert names == {task.objective}, f"{task.name} is not what {sorted(names)} trained"
        return task.architecture
    return _ARCHITECTURES[names]


def _check_vocabulary(
    folder: Path, config: EncoderConfig, tokenizer: Tokenizer, error: type[Exception]
) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        raise error(
            f"{folder}: wanted a vocabulary of at most {config.vocab_size} tokens, as many as the "
            f"model has embeddings, the tokenizer has {tokenizer.vocab_size}: "
            "use the tokenizer that the model was trained with"
        )


def _read_json(path: Path) -> dict[str, Any]:
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
    if not isinstance(value, dict):
        raise FormatError(
            f"{path}: wanted a JSON object, found {type(value).__name__}: copy it again"
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
    if not {CONFIG, WEIGHTS} <= set(record.get("files") or ()):
        raise FormatError(
            f"{folder / RECORD}: wanted the sha256 of at least {CONFIG} and {WEIGHTS} under files: "
            "copy the bundle again"
        )
    return record


def _verified(folder: Path, record: dict[str, Any] | None) -> dict[str, str]:
    """The sha256 of each file of the bundle, checked against its record where it has one."""
    wanted = None if record is None else record["files"]
    names = wanted or [name for name in _FOREIGN if (folder / name).is_file()]
    for name in (CONFIG, WEIGHTS, *names):
        if not (folder / name).is_file():
            raise FormatError(
                f"{folder / name}: wanted this file of the bundle, there is none: "
                "copy or write the bundle again (weights must be in one safetensors file)"
            )
    came = _sha256s(folder, names)
    for name, sha256 in came.items():
        if wanted is not None and sha256 != wanted[name]:
            raise FormatError(
                f"{folder / name}: wanted sha256 {wanted[name][:12]}, got {sha256[:12]}: the file "
                "was changed after the bundle was written; copy or write the bundle again, or "
                f"remove {RECORD} to accept the folder as it is"
            )
    return came


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
    return TASKS[name](record["labels"])


def _foreign_task(
    architecture: str, entries: dict[str, Any], state: dict[str, Tensor]
) -> Task | None:
    """The task of a folder that transformers wrote; None for what no task here answers."""
    known = {task.architecture: task for task in TASKS.values()}
    head = state.get("objectives.classification.head.linear.weight")
    single = entries.get("problem_type") in (None, "single_label_classification")
    if architecture not in known or head is None or not single or len(head) < 2:
        return None
    names = {int(index): label for index, label in (entries.get("id2label") or {}).items()}
    # transformers leaves its own default names out of the file.
    return known[architecture]([names.get(index, f"LABEL_{index}") for index in range(len(head))])


def _sync(folder: Path) -> None:
    """Force a folder's files to the disk, so that the rename never shows empty ones."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
