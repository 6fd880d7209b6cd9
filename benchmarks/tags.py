"""Entities in words and in plain text: parts of words with labels, without, and transformers.

    python -m benchmarks.tags --model FOLDER [--layers N] [--only NAME …] [--json FILE]

A tagger is trained by `raybert finetune` twice per seed, with `options.label_parts` and without,
which is transformers' recipe (a word's first piece has its label, the others none), and scored on
the held-out words and on the same words joined to plain text. Of the second, transformers'
`pipeline` answers the plain text too, by each of its strategies. Words are what white space
separates, with the punctuation at their edges split off, so that `IL-2` and `U.S.` are one.
"""

import argparse
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import provenance
from benchmarks.peer_tasks import SHARE_OF_WARM_UP
from bert_core.data.words import parts_of
from bert_core.inference.predictor import Predictor
from bert_core.metrics.entities import Entity, entities_of, tags_of
from bert_core.tasks.token_classification import TokenClassification
from pipelines import finetune
from pipelines.corpus.labelled import LabelledConfig, labelled_rows
from pipelines.finetune import FinetuneConfig

SEEDS = (0, 1, 2)
THREADS = 1
BATCH_SIZE, LEARNING_RATE, LONGEST = 16, 3e-4, 128
STRATEGIES = ("simple", "first", "average", "max")
Row = dict[str, list[str]]
_EDGE = re.compile(r"^[(\[{\"'“‘]|[.,;:!?)\]}\"'”’]$")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z(])")
COMMON = {"Material", "Operation", "Number", "Condition-Unit", "Amount-Unit"}
"""The five most frequent types of the materials."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A set, and how it is learned."""

    name: str
    train: str
    """File or files below the data folder."""
    held_out: str
    epochs: float
    rows: int
    held_out_rows: int


LINES = (
    Line(
        name="WNUT-17", train="wnut17/wnut17train.conll", held_out="wnut17/emerging.dev.conll",
        epochs=2, rows=1000, held_out_rows=500,
    ),
    Line(
        name="NCBI diseases", train="pubtator_bioc/NCBIdevelopset_corpus.txt",
        held_out="pubtator_bioc/NCBItestset_corpus.txt", epochs=2, rows=1000, held_out_rows=400,
    ),
    Line(
        name="materials", train="materials_brat/1*[0-7].txt", held_out="materials_brat/1*[89].txt",
        epochs=4, rows=1000, held_out_rows=400,
    ),
)  # fmt: skip


def rows_of(data: Path, pattern: str, most: int) -> list[Row]:
    """Sentences as words with BIO tags; a fixed part of them if there are more than `most`."""
    rows: list[Row] = []
    for path in sorted(data.glob(pattern)):
        if path.suffix == ".conll":
            config = LabelledConfig(source=str(path), format="conll")
            rows += labelled_rows(config, "train", TokenClassification.shapes()).rows
        elif path.suffix == ".txt" and path.with_suffix(".ann").exists():
            rows += _tagged(path.read_text(), _brat(path.with_suffix(".ann").read_text()))
        else:
            for text, marks in _pubtator(path.read_text()):
                rows += _tagged(text, marks)
    chosen = np.sort(np.random.default_rng(0).permutation(len(rows))[:most])
    return [rows[place] for place in chosen]


def _pubtator(contents: str) -> Iterator[tuple[str, list[tuple[int, int, str]]]]:
    for record in contents.strip().split("\n\n"):
        lines = record.strip().split("\n")
        title, abstract = (line.split("|", 2)[2] for line in lines[:2])
        cells = [line.split("\t") for line in lines[2:]]
        marks = [(int(cell[1]), int(cell[2]), "Disease") for cell in cells if len(cell) > 4]
        yield f"{title} {abstract}", marks


def _brat(contents: str) -> list[tuple[int, int, str]]:
    cells = [line.split("\t")[1].split() for line in contents.split("\n") if line.startswith("T")]
    return [(int(first), int(end), kind) for kind, first, end in cells if kind in COMMON]


def _tagged(text: str, marks: list[tuple[int, int, str]]) -> Iterator[Row]:
    """The sentences of a text; entities get the words that they touch, the earliest first."""
    bounds = [0, *(match.end() for match in _SENTENCE.finditer(text)), len(text)]
    inside = [place for first, end, _ in marks for place in range(first + 1, end)]
    bounds = sorted({*bounds} - {*inside})
    for begin, stop in pairwise(bounds):
        spans = list(_words(text, begin, stop))
        entities: list[Entity] = []
        for first, end, kind in sorted(marks):
            of = [n for n, (start, after) in enumerate(spans) if start < end and first < after]
            if of and (not entities or of[0] >= entities[-1].end):
                entities.append(Entity(kind, of[0], of[-1] + 1))
        if spans:
            words = [text[first:end] for first, end in spans]
            yield {"tokens": words, "tags": tags_of(entities, len(words), "BIO")}


def _words(text: str, begin: int, stop: int) -> Iterator[tuple[int, int]]:
    for match in re.compile(r"\S+").finditer(text, begin, stop):
        first, end, after = match.start(), match.end(), []
        while end - first > 1 and (edge := _EDGE.search(text[first:end])):
            word = text[first:end]
            is_abbreviation = word.endswith(".") and re.search(r"[A-Za-z]\.", word[:-1])
            is_closed = any(word.endswith(b) and a in word for a, b in ("()", "[]", "{}"))
            if edge.start() == 0:
                yield first, first + 1
                first += 1
            elif is_abbreviation or is_closed:
                break
            else:
                end -= 1
                after.append((end, end + 1))
        yield first, end
        yield from reversed(after)


def shallow(model: str, layers: int, folder: Path) -> str:
    """A copy of a checkpoint with only its first layers."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    weights = load_file(folder / "model.safetensors")
    numbers = {name: re.search(r"layer\.(\d+)\.", name) for name in weights}
    kept = {n: weights[n] for n, found in numbers.items() if not found or int(found[1]) < layers}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def benchmark(model: str, lines: list[Line], layers: int | None = None) -> Iterator[dict[str, Any]]:
    """A result for each set."""
    data = Path(os.environ["RAYBERT_DATA"])
    torch.set_num_threads(THREADS)
    for line in lines:
        rows = {
            "train": rows_of(data, line.train, line.rows),
            "held_out": rows_of(data, line.held_out, line.held_out_rows),
        }
        with tempfile.TemporaryDirectory() as scratch:
            chosen = shallow(model, layers, Path(scratch) / "shallow") if layers else model
            result = _measured(line, chosen, rows, Path(scratch))
            result["settings"]["layers"] = layers
            yield result


def _measured(line: Line, model: str, rows: dict[str, list[Row]], scratch: Path) -> dict[str, Any]:
    sources = {}
    for name, of_set in rows.items():
        path = scratch / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in of_set))
        sources[name] = LabelledConfig(source=str(path))
    scores: dict[str, list[float]] = {}
    for seed in SEEDS:
        for label_parts in (True, False):
            config = FinetuneConfig(
                output=str(scratch / f"{seed}-{label_parts}"),
                model=model,
                task="token-classification",
                options={"label_parts": label_parts},
                **sources,  # type: ignore[arg-type]
                max_length=LONGEST,
                epochs=line.epochs,
                batch_size=BATCH_SIZE,
                lr=LEARNING_RATE,
                warmup_share=SHARE_OF_WARM_UP,
                seeds=(seed,),
                num_workers=0,
                threads_per_worker=THREADS,
                tracking_uri=f"sqlite:///{scratch}/mlflow.db",
            )
            [metrics] = finetune.run(config).counts["seeds"]
            name = "parts" if label_parts else "first pieces"
            scores.setdefault(f"{name}, words", []).append(metrics["f1"])
            scores.setdefault(f"{name}, text", []).append(metrics["text_f1"])
        folder = scratch / f"{seed}-False" / "bundle"
        for strategy, score in _of_pipeline(folder, rows["held_out"]).items():
            scores.setdefault(f"pipeline {strategy}, text", []).append(score)
    in_entities = [
        row["tokens"][place]
        for row in rows["held_out"]
        for entity in entities_of(row["tags"])
        for place in range(entity.first, entity.end)
    ]
    divided = sum(len(parts_of(word)) > 1 for word in in_entities)
    return {
        "name": line.name,
        "metric": "f1",
        "entity_words_of_several_parts": divided / len(in_entities),
        "means": {name: float(np.mean(values)) for name, values in scores.items()},
        "scores": scores,
        "settings": {
            "train_rows": len(rows["train"]), "held_out_rows": len(rows["held_out"]),
            "epochs": line.epochs, "batch_size": BATCH_SIZE, "lr": LEARNING_RATE,
            "max_length": LONGEST,
            "precision": config.precision, "threads": THREADS, "seeds": list(SEEDS),
        },
        "made": provenance(),
    }  # fmt: skip


def _of_pipeline(folder: Path, rows: list[Row]) -> dict[str, float]:
    """F1 of what transformers' pipeline finds in the plain text of rows, by its strategy."""
    from transformers import pipeline
    from transformers.pipelines.token_classification import AggregationStrategy

    task = Predictor(folder, device="cpu").task
    peer: Any = pipeline("token-classification", model=str(folder), device="cpu")
    settings = peer._preprocess_params
    outputs = [
        [peer.forward(part) for part in peer.preprocess(row["text"], **settings)]
        for row in task.plain(rows) or ()
    ]
    scores = {}
    for name in STRATEGIES:
        strategy = AggregationStrategy(name)
        answers = [peer.postprocess(of_row, aggregation_strategy=strategy) for of_row in outputs]
        columns = task.compare(rows, [[] for _ in rows]) | task.compare_plain(rows, answers)
        scores[name] = task.metrics(columns)["text_f1"]
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tags")
    parser.add_argument("--model", required=True, help="folder of the checkpoint to start from")
    parser.add_argument("--only", nargs="*", default=[], help="names of the sets; all by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list of results there")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N of the encoder")
    chosen = parser.parse_args()
    lines = [line for line in LINES if not chosen.only or line.name in chosen.only]
    results = []
    for result in benchmark(chosen.model, lines, chosen.layers):
        results.append(result)
        for name, mean in result["means"].items():
            print(f"{result['name']:<16}{name:<24}{100 * mean:6.1f}", flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps(results, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
