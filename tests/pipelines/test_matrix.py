"""Every task and kind of its rows through every command that takes every task, and from every kind
of source: as command lines, in the order in which a user types them.

A task that is added with its kinds is in it that day. `make matrix` runs all of it, the drills what
takes minutes: the commands that no other test takes through every kind, and a third of the sources.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bert_core import files
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.vocabulary import train_vocabulary
from bert_core.errors import CorpusError
from bert_core.manifest import read_manifest
from bert_core.tasks.base import Kind, Task
from pipelines import cli
from pipelines import evaluate as evaluating
from pipelines.configure import parse
from tests.labelled_rows import KINDS, holds_lists, rows_of, write
from tests.with_ray import run_with_ray

pytestmark = pytest.mark.usefixtures("unchecked")

# All that is asked of a kind goes to one process, which trains its model once.
GROUPS = {name: pytest.mark.xdist_group(f"matrix-{name}") for name in KINDS}


def raybert(word: str, *arguments: str) -> None:
    """Run a command line in this process; what it says stands in the failure if it fails."""
    with pytest.raises(SystemExit) as ended:
        cli.main([word, *arguments])
    assert ended.value.code == 0, f"raybert {word} {' '.join(arguments)}"


@dataclass(frozen=True)
class Learned:
    """A model that was fine-tuned on rows of a kind, and how to go on with it; with random weights
    if its task is not trained."""

    folder: Path
    task: type[Task]
    kind: Kind
    shared: tuple[str, ...]
    """Arguments of every command."""

    @property
    def bundle(self) -> str:
        return str(self.folder / "finetune" / "bundle")

    @property
    def training(self) -> tuple[str, ...]:
        """Arguments of the stages that train on a few rows of this kind."""
        options = [f"--options.{name}={json.dumps(v)}" for name, v in self.kind.options.items()]
        few = ["--max_length=48", "--batch_size=16", "--precision=fp32"]
        return (f"--task={self.task.name}", *options, *few, *self.shared)

    def run(self, word: str, *arguments: str, output: str | None = None) -> Path:
        """Run a stage that trains nothing, into a folder of its own beside the model."""
        folder = self.folder / (output or word)
        raybert(word, f"--output={folder}", *arguments, *self.shared)
        return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small bundle with random weights that knows every word of the rows."""
    from bert_core.objectives.mlm import MaskedLanguageModeling
    from bert_core.objectives.sentence_pairs import NextSentencePrediction
    from tests import tiny

    texts = [json.dumps(row) for _, kind in KINDS.values() for row in rows_of(kind, 40)]
    vocabulary = train_vocabulary(texts, vocab_size=600, lowercase=True, min_frequency=1)
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    config = tiny.encoder_config(
        tokenizer.vocab_size,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.02,
    )
    folder = tmp_path_factory.mktemp("encoder") / "bundle"
    objectives = [MaskedLanguageModeling, NextSentencePrediction]
    return tiny.bundle(folder, tokenizer, config, objectives=objectives)


@pytest.fixture(scope="module")
def learned(
    encoder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[type[Task], Kind], Learned]:
    """Gives the model of a kind, which is trained the first time that it is asked for."""
    from bert_core.bundle.format import load_bundle
    from tests import tiny

    models: dict[tuple[str, str], Learned] = {}

    def model(task: type[Task], kind: Kind) -> Learned:
        key = task.name, kind.name
        if key not in models:
            folder = tmp_path_factory.mktemp("-".join(key))
            shared = ("--num_workers=0", f"--tracking_uri=sqlite:///{encoder.parent}/mlflow.db")
            models[key] = made = Learned(folder, task, kind, shared)
            write(folder / "train.jsonl", rows_of(kind, 24))
            write(folder / "dev.jsonl", rows_of(kind, 8, start=24))
            if task.trainable:
                raybert(
                    "finetune",
                    f"--model={encoder}",
                    f"--output={folder / 'finetune'}",
                    f"--train.source={folder / 'train.jsonl'}",
                    "--epochs=1",
                    *made.training,
                )
            else:
                parent = load_bundle(encoder)
                tiny.bundle(
                    Path(made.bundle),
                    parent.tokenizer,
                    parent.encoder_config,
                    task=task.from_rows(kind.rows, task.options_of(kind.options)),
                )
        return models[key]

    return model


# ---------------------------------------------------------------------------- commands


def evaluate(model: Learned) -> None:
    folder = model.run(
        "evaluate", f"--model={model.bundle}", f"--held_out.source={model.folder / 'dev.jsonl'}"
    )
    assert read_manifest(str(folder)).counts["rows"] == 8


def publish(model: Learned) -> None:
    name = f"matrix-{model.task.name}-{model.kind.name}"
    evaluate(model)
    folder = model.run(
        "publish",
        f"--model={model.bundle}",
        f"--evaluation={model.folder / 'evaluate'}",
        f"--name={name}",
    )
    assert read_manifest(str(folder)).counts["is_champion"]
    model.run(
        "predict",
        f"--model=models:/{name}@champion",
        f"--source={model.folder / 'dev.jsonl'}",
        "--prefix=registered_",
        output="registered",
    )


def predict(model: Learned) -> None:
    folder = model.run(
        "predict", f"--model={model.bundle}", f"--source={model.folder / 'dev.jsonl'}"
    )
    assert read_manifest(str(folder)).counts["rows"] == 8


def export(model: Learned) -> None:
    model.run("export", f"--model={model.bundle}")
    model.run(
        "evaluate",
        f"--model={model.folder / 'export'}",
        f"--held_out.source={model.folder / 'dev.jsonl'}",
        output="evaluate-graph",
    )


def export_int8(model: Learned) -> None:
    model.run(
        "export",
        f"--model={model.bundle}",
        "--quantize=int8",
        "--max_drop=1",
        f"--held_out.source={model.folder / 'dev.jsonl'}",
        output="export-int8",
    )


def distill(model: Learned) -> None:
    few = ("--max_length=48", "--batch_size=16", "--precision=fp32", "--epochs=1")
    model.run(
        "distill",
        f"--teacher={model.bundle}",
        f"--train.source={model.folder / 'train.jsonl'}",
        f"--held_out.source={model.folder / 'dev.jsonl'}",
        *few,
    )


def tune(model: Learned) -> None:
    """Without what it ends with: `evaluate` and `publish`."""
    raybert(
        "tune",
        f"--model={model.bundle}",
        f"--output={model.folder / 'tune'}",
        f"--train.source={model.folder / 'train.jsonl'}",
        "--selection.share=0.3",
        '--search.space={"lr": [1e-4, 1e-3]}',
        "--epochs=1",
        *model.training,
    )


def inspect(model: Learned) -> None:
    page = model.folder / "page.html"
    raybert("inspect", f"--model={model.bundle}", "--text=Open the file.", f"--output={page}")
    assert page.stat().st_size > 1000


def drilled(is_drilled: bool) -> pytest.MarkDecorator:
    """The rest is left to `make matrix`."""
    return pytest.mark.drill if is_drilled else pytest.mark.matrix


TRAINING = (tune, distill)


def drilled_command(command: Callable[[Learned], None], task: type[Task], kind: Kind) -> bool:
    """The drills have `predict` below, and the others in `pipelines/test_tasks.py`, as well as all
    that is asked of tasks that are not trained. The kinds of a task have one graph."""
    return task.trainable and (
        command is tune or (command is export and kind.name == task.kinds[0].name)
    )


COMMANDS = [
    pytest.param(
        *both, command, id=f"{name}-{command.__name__}", marks=[GROUPS[name], drilled(is_drilled)]
    )
    for name, both in KINDS.items()
    for command in (evaluate, publish, predict, export, export_int8, distill, tune, inspect)
    for is_drilled in [drilled_command(command, *both)]
    if both[0].trainable or command not in TRAINING
]


@pytest.mark.parametrize(("task", "kind", "command"), COMMANDS)
def test_a_command_takes_a_model_of_every_kind_of_rows(
    task: type[Task],
    kind: Kind,
    command: Callable[[Learned], None],
    learned: Callable[[type[Task], Kind], Learned],
) -> None:
    command(learned(task, kind))


# ---------------------------------------------------------------------------- sources


def compressed(path: str, suffix: str) -> str:
    data = Path(path).read_bytes()
    packed = pa.compress(data, codec={"gz": "gzip", "zst": "zstd"}[suffix], asbytes=True)
    Path(f"{path}.{suffix}").write_bytes(packed)
    Path(path).unlink()
    return f"{path}.{suffix}"


def several(folder: Path, rows: list[dict[str, Any]], name: str) -> None:
    half = len(rows) // 2
    write(folder / f"{name}-1.jsonl", rows[:half])
    write(folder / f"{name}-2.jsonl", rows[half:])


def in_a_folder(folder: Path, rows: list[dict[str, Any]]) -> str:
    """A folder with two splits, of which each stage takes its own."""
    write(folder / "rows" / "train.jsonl", rows)
    write(folder / "rows" / "test.jsonl", rows)
    return str(folder / "rows")


def by_a_glob(folder: Path, rows: list[dict[str, Any]]) -> str:
    several(folder / "many", rows, "part")
    return str(folder / "many" / "part-*.jsonl")


Source = Callable[[Path, list[dict[str, Any]]], str]
TABLES: dict[str, Source] = {
    "csv": lambda folder, rows: write(folder / "rows.csv", rows),
    "tsv": lambda folder, rows: write(folder / "rows.tsv", rows),
    "csv.gz": lambda folder, rows: compressed(write(folder / "packed.csv", rows), "gz"),
}
SOURCES: dict[str, Source] = {
    "jsonl": lambda folder, rows: write(folder / "rows.jsonl", rows),
    "jsonl.zst": lambda folder, rows: compressed(write(folder / "packed.jsonl", rows), "zst"),
    "parquet": lambda folder, rows: write(folder / "rows.parquet", rows),
    "glob": by_a_glob,
    "folder": in_a_folder,
    **TABLES,
}


# The drills have every kind and every source once at least.
CELLS = [
    pytest.param(
        *both,
        source,
        id=f"{name}-{source}",
        marks=[GROUPS[name], drilled(row % len(SOURCES) == column)],
    )
    for row, (name, both) in enumerate(KINDS.items())
    for column, source in enumerate(SOURCES)
]


@pytest.mark.parametrize(("task", "kind", "source"), CELLS)
def test_rows_of_every_kind_are_read_from_every_source(
    task: type[Task],
    kind: Kind,
    source: str,
    learned: Callable[[type[Task], Kind], Learned],
    tmp_path: Path,
) -> None:
    """Trained on, measured on, and answered: the same rows, whatever they lie in."""
    model = learned(task, kind)
    rows = rows_of(kind, 16)
    where = SOURCES[source](tmp_path, rows)
    answered = [f"--model={model.bundle}", *model.shared]
    if source in TABLES and holds_lists(kind):  # which no cell holds
        with pytest.raises(CorpusError, match="wanted a list"):
            evaluating.run(
                parse(
                    "evaluate",
                    [f"--output={tmp_path / 'evaluate'}", f"--held_out.source={where}", *answered],
                )
            )
        where = SOURCES["jsonl"](tmp_path, rows)
    if task.trainable:
        raybert(
            "finetune",
            f"--model={model.bundle}",
            f"--output={tmp_path / 'finetune'}",
            f"--train.source={where}",
            "--epochs=0.1",
            *model.training,
        )
    raybert(
        "evaluate", f"--output={tmp_path / 'evaluate'}", f"--held_out.source={where}", *answered
    )
    assert read_manifest(str(tmp_path / "evaluate")).counts["rows"] == 16
    raybert("predict", f"--output={tmp_path / 'predict'}", f"--source={where}", *answered)
    both = 32 if source == "folder" else 16  # rows without labels have no splits
    assert read_manifest(str(tmp_path / "predict")).counts["rows"] == both


# ---------------------------------------------------------------------------- s3:// with Ray

# The drills have the first kind whose rows hold lists.
DRILLED_ON_S3 = next(name for name, (_, kind) in KINDS.items() if holds_lists(kind))
ON_S3 = [
    pytest.param(task, kind, id=name, marks=[GROUPS[name], drilled(name == DRILLED_ON_S3)])
    for name, (task, kind) in KINDS.items()
    if task.trainable
]


@pytest.mark.ray
@pytest.mark.parametrize(("task", "kind"), ON_S3)
def test_rows_of_every_kind_lie_on_s3_and_are_worked_on_by_ray(
    task: type[Task],
    kind: Kind,
    learned: Callable[[type[Task], Kind], Learned],
    object_store: str,
    tmp_path: Path,
) -> None:
    model = learned(task, kind)
    for split, rows in (("train", rows_of(kind, 32)), ("test", rows_of(kind, 8, start=32))):
        local = write(tmp_path / f"{split}.jsonl", rows)
        files.write_bytes(f"{object_store}/rows/{split}.jsonl", Path(local).read_bytes())
    for path in Path(model.bundle).rglob("*"):
        if path.is_file():
            name = path.relative_to(model.bundle).as_posix()
            files.write_bytes(f"{object_store}/model/{name}", path.read_bytes())
    with_ray = ["--num_workers=1", model.shared[1]]
    training = [one for one in model.training if one not in model.shared]
    run_with_ray(
        [
            ["finetune", f"--model={object_store}/model", f"--train.source={object_store}/rows",
             f"--held_out.source={object_store}/rows", f"--output={object_store}/finetune",
             "--epochs=1", *training, "--batch_size=32", *with_ray, "--num_workers=2"],
            ["evaluate", f"--model={object_store}/finetune/bundle",
             f"--held_out.source={object_store}/rows", f"--output={object_store}/evaluate",
             *with_ray],
            ["predict", f"--model={object_store}/finetune/bundle",
             f"--source={object_store}/rows/test.jsonl", f"--output={object_store}/predict",
             *with_ray],
        ],
        tmp_path,
    )  # fmt: skip
    assert read_manifest(f"{object_store}/evaluate").counts["rows"] == 8
    assert read_manifest(f"{object_store}/predict").counts["rows"] == 8
