"""What the benchmark of servers serves and sends: bundles, texts of real lengths, right answers."""

import csv
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoints import MINILM, required
from bert_core.bundle.format import About, load_bundle
from bert_core.bundle.weights import build_model
from bert_core.bundle.writing import save_bundle
from bert_core.data.windows import Window
from bert_core.errors import InputError
from bert_core.inference.predictor import Predictor
from bert_core.manifest import BUNDLE
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import ObjectiveModel
from bert_core.tasks.base import Task
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.question_answering import QuestionAnswering
from bert_core.tasks.text_classification import TextClassification
from pipelines import export
from pipelines.corpus.labelled import LabelledConfig
from pipelines.export import ExportConfig

LONGEST = 256
"""Most tokens of a text, special ones included: what all-MiniLM-L6-v2 reads. Servers differ in
where they cut longer ones, so that they would not do the same work."""
SHORTEST = 200
"""Fewest characters of a paragraph, which excludes headings."""
MOST = 1024
"""Texts of a kind."""

VECTORS, CLASSIFIER, QUESTIONS, BASE = "vectors", "classifier", "questions", "base"


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Inputs of one kind."""

    inputs: list[Any]
    windows: list[Window]
    """One per input."""

    @property
    def tokens(self) -> list[int]:
        """Of each input."""
        return [window.tokens for window in self.windows]

    @property
    def settings(self) -> dict[str, Any]:
        """What a result says of them."""
        return {
            "texts": len(self.inputs),
            "mean_tokens": round(float(np.mean(self.tokens)), 1),
            "longest_tokens": max(self.tokens),
        }


def texts(inputs: Sequence[Any], predictor: Predictor) -> Texts:
    """The inputs that a model reads whole, in one window of at most `LONGEST` tokens."""
    chosen, windows = [], []
    for value in inputs:
        with suppress(InputError):  # longer than the model's positions
            encoded = predictor.encode(predictor.rows([value]))
            if len(encoded) == 1 and encoded[0].tokens <= LONGEST:
                chosen.append(value)
                windows.extend(encoded)
        if len(chosen) == MOST:
            break
    return Texts(inputs=chosen, windows=windows)


def sentences(data: Path) -> list[str]:
    """Of SST-2's development set."""
    with (data / "sst2" / "dev.tsv").open(encoding="utf-8", newline="") as file:
        return [row["sentence"] for row in csv.DictReader(file, delimiter="\t", quoting=3)]


def paragraphs(data: Path) -> list[str]:
    """Of WikiText-2's validation set."""
    lines = (data / "wikitext2" / "valid.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if len(line) >= SHORTEST]


def questions(data: Path) -> list[dict[str, str]]:
    """Of SQuADShifts' reviews, one question about each passage."""
    path = data / "squadshifts" / "amazon_reviews_v1.0.json"
    articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    passages = [passage for article in articles for passage in article["paragraphs"]]
    return [
        {"question": passage["qas"][0]["question"], "context": passage["context"]}
        for passage in passages
    ]


def data_folder() -> Path:
    """Raises: SystemExit if RAYBERT_DATA is not set."""
    folder = os.environ.get("RAYBERT_DATA")
    if not folder:
        raise SystemExit(
            "RAYBERT_DATA: wanted the folder that holds sst2, wikitext2 and squadshifts, got "
            "nothing: set it"
        )
    return Path(folder)


def bundles(folder: Path) -> dict[str, Path]:
    """The models by name, written below a folder.

    Speed does not depend on weights: the heads of MiniLM and all of BERT-base are random.
    """
    torch.manual_seed(0)
    minilm = load_bundle(required(MINILM))
    tasks: dict[str, Task] = {
        CLASSIFIER: TextClassification(["0", "1"]),
        QUESTIONS: QuestionAnswering(),
    }
    for name, task in tasks.items():
        model = build_model(minilm, [task.build_objective(minilm.encoder_config)])
        save_bundle(folder / name, model, minilm.tokenizer, About(task=task))
    vectors = FeatureExtraction()
    config = vectors.encoder_config(VARIANTS["bert-base"].config)
    model = ObjectiveModel(config, [vectors.build_objective(config)])
    save_bundle(folder / BASE, model, minilm.tokenizer, About(task=vectors))
    return {VECTORS: required(MINILM), **{name: folder / name for name in (*tasks, BASE)}}


def exported(name: str, weights: Path, folder: Path, data: Path, precision: str) -> Path:
    """The bundle that `raybert export` makes of a model in fp32 or, calibrated, in int8.

    Vectors pass the gate on STS-B. The classifier's head is random: no metric can judge it.
    """
    output = folder / f"{name}-{precision}"
    config = ExportConfig(
        model=str(weights),
        output=str(output),
        task="feature-extraction" if name == VECTORS else None,
        threads_per_worker=os.cpu_count() or 1,
        tracking_uri=f"sqlite:///{folder}/exports.db",
    )
    if precision == "int8":
        held_out, calibration = (_labelled(name, data, kind) for kind in ("dev", "train"))
        config = replace(
            config,
            quantize="int8",
            held_out=held_out,
            calibration=calibration,
            max_drop=0.01 if name == VECTORS else 1.0,
        )
    export.run(config)
    return output / BUNDLE


def _labelled(name: str, data: Path, kind: str) -> LabelledConfig:
    if name == CLASSIFIER:
        return LabelledConfig(source=str(data / "sst2" / f"{kind}.tsv"), format="sst2")
    return LabelledConfig(source=str(data / "stsb" / f"sts-{kind}.csv"), format="sts_benchmark")


def difference(a: Any, b: Any) -> float:
    """The largest difference between numbers at the same places; infinite if anything else differs.

    A list of one item and the item itself count as the same.
    """
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max((difference(*pair) for pair in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, list) and len(a) == 1:
        return difference(a[0], b)
    if isinstance(b, list) and len(b) == 1:
        return difference(a, b[0])
    if isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
        return max((difference(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, int | float) and isinstance(b, int | float):
        apart = abs(a - b)
        return math.inf if math.isnan(apart) else apart
    return 0.0 if a == b else math.inf
