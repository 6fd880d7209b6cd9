"""A teacher and a smaller bundle: on labelled rows and on shards, in this process and on Ray."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_core.bundle.layout import GRAPHS
from bert_core.errors import ConfigError, FormatError
from bert_core.manifest import read_manifest
from bert_core.tasks.feature_extraction import FeatureExtraction, FeatureExtractionOptions
from bert_core.tasks.text_regression import TextRegression
from bert_core.tasks.texts import TextOptions
from pipelines import distill, evaluate
from pipelines.corpus.labelled import LabelledConfig
from pipelines.distill import DistillConfig
from pipelines.evaluate import EvaluateConfig
from pipelines.training.records import read_records
from pipelines.training.selection import SelectionConfig
from pipelines.training.student import AugmentationConfig, LossesConfig
from tracking.runs.spool import read_run
from tracking.store.server import connect

INTERMEDIATE = LossesConfig(
    soft=0.0, hard=0.0, cosine=0.0, embeddings=1.0, hidden=1.0, attention=1.0
)
Distilling = Callable[..., DistillConfig]


def on_rows_of(small: Any, teacher: Path, folder: Path) -> Distilling:
    def config(name: str = "student", **changes: Any) -> DistillConfig:
        return DistillConfig(
            output=str(folder / name),
            **{
                "teacher": str(teacher), "train": small.rows, "held_out": small.rows,
                "rows_per_class": 16, "max_length": 32, "epochs": 2.0, "batch_size": 8, "lr": 1e-3,
                "precision": "fp32", "num_workers": 0, "tracking_uri": small.tracking_uri,
            } | changes,
        )  # fmt: skip

    return config


@pytest.fixture(name="on_rows")
def _on_rows(finetuned: Any, tmp_path: Path) -> Distilling:
    return on_rows_of(finetuned, finetuned.folder / "finetune" / "bundle", tmp_path)


@pytest.fixture(name="refused")
def _refused(prepared: Any, untrained: Any, tmp_path: Path) -> Distilling:
    """Makes configs that are refused before anything is learnt."""
    return on_rows_of(prepared, untrained.classifier, tmp_path)


@pytest.fixture(name="on_shards")
def _on_shards(pretrained: Any, tmp_path: Path) -> Distilling:
    def config(name: str = "student", **changes: Any) -> DistillConfig:
        return DistillConfig(
            output=str(tmp_path / name),
            **{
                "teacher": str(pretrained.folder / "pretrain" / "bundle"),
                "shards": str(pretrained.folder / "shards"), "epochs": 0.1, "batch_size": 16,
                "lr": 1e-3, "precision": "fp32", "held_out_rows": 64, "micro_batch_tokens": 512,
                "log_every_steps": 1, "num_workers": 0, "tracking_uri": pretrained.tracking_uri,
            } | changes,
        )  # fmt: skip

    return config


def test_a_student_of_a_task_is_measured_beside_its_teacher(on_rows: Distilling) -> None:
    from bert_core.bundle.format import load_bundle
    from bert_core.inference.predictor import Predictor

    config = on_rows()
    counts = distill.run(config).counts
    bundle, teacher = load_bundle(f"{config.output}/bundle"), load_bundle(config.teacher)
    assert bundle.encoder_config.num_hidden_layers == 1
    assert counts["student_parameters"] < counts["teacher_parameters"]
    assert bundle.task is not None
    assert bundle.task.record == teacher.task.record  # type: ignore[union-attr]
    assert counts["kept_accuracy"] == pytest.approx(
        counts["accuracy_mean"] / counts["teacher_accuracy"]
    )
    assert bundle.examples == teacher.examples != (), "of the same held-out rows"
    assert bundle.lineage["stage"] == "distill"
    assert bundle.lineage["teacher"] == bundle.lineage["parent"] == teacher.digest
    assert bundle.lineage["teacher_lineage"] == teacher.lineage
    assert len(teacher.trained_rows) >= 30
    assert np.isin(teacher.trained_rows, bundle.trained_rows).all()
    measured = evaluate.run(
        EvaluateConfig(
            output=f"{config.output}-evaluate", model=config.teacher, held_out=config.train,
            num_workers=0, tracking_uri=config.tracking_uri,
        )
    ).counts  # fmt: skip
    assert counts["teacher_accuracy"] == measured["accuracy"]
    recorded = read_run(Path(config.output))
    assert recorded is not None
    assert config.tracking_uri is not None
    logged = connect(config.tracking_uri).get_run(recorded.run_id or "").data
    assert logged.metrics["kept_accuracy"] == pytest.approx(counts["kept_accuracy"])
    assert {"train/soft_loss", "train/cosine_loss"} <= logged.metrics.keys()
    assert Predictor(f"{config.output}/bundle", device="cpu").predict(["Open a file."])


def test_the_student_begins_with_the_layers_that_are_named(on_rows: Distilling) -> None:
    """At a learning rate of next to nothing it ends with them, and with the dropout it is given."""
    import torch

    from bert_core.bundle.format import load_bundle

    config = on_rows(layers=(1,), lr=1e-12, epochs=0.5, hidden_dropout_prob=0.25, held_out=None)
    distill.run(config)
    student = load_bundle(f"{config.output}/bundle")
    assert student.encoder_config.hidden_dropout_prob == 0.25
    own, its = student.state, load_bundle(config.teacher).state
    for name, value in own.items():
        there = name.replace("layers.0.", "layers.1.")
        torch.testing.assert_close(value, its[there], msg=name)
    counts = distill.run(replace(config, output=f"{config.output}-other", layers=(0,))).counts
    assert counts["steps"] == read_manifest(config.output).counts["steps"]


@pytest.mark.drill
@pytest.mark.usefixtures("local_ray")
def test_workers_train_the_same_student(on_rows: Distilling, tmp_path: Path) -> None:
    losses = replace(INTERMEDIATE, soft=1.0, hard=1.0)
    config = on_rows("none", losses=losses, log_every_steps=1, epochs=1.0)
    # Dropout is drawn by worker.
    config = replace(config, teacher=undropped(config.teacher, tmp_path))
    here = distill.run(config).counts
    there = replace(config, output=f"{config.output}-there", num_workers=2)
    distill.run(there)
    curves = [
        [
            numbers["loss"]
            for numbers in read_records(Path(each.output)).values()
            if "loss" in numbers
        ]
        for each in (config, there)
    ]
    assert len(curves[0]) == here["steps"] > 1
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def undropped(teacher: str, folder: Path) -> str:
    """A bundle that drops nothing, and so has students that drop nothing."""
    from bert_core.bundle.format import About, load_bundle
    from bert_core.bundle.weights import build_model
    from bert_core.bundle.writing import save_bundle

    bundle = load_bundle(teacher)
    encoder = bundle.encoder_config.adapted(hidden_dropout_prob=0.0, attention_dropout=0.0)
    assert bundle.task is not None
    model = build_model(
        replace(bundle, encoder_config=encoder), [bundle.task.build_objective(encoder)]
    )
    save_bundle(folder / "undropped", model, bundle.tokenizer, About(task=bundle.task))
    return str(folder / "undropped")


@pytest.mark.drill
def test_tinybert_goes_through_its_stages(on_shards: Distilling, on_rows: Distilling) -> None:
    from bert_core.bundle.format import load_bundle

    general = on_shards("general", variant="bert-tiny", losses=INTERMEDIATE)
    counts = distill.run(general).counts
    assert counts["loss_after"] < counts["loss_before"]
    bundle = load_bundle(f"{general.output}/bundle")
    assert bundle.task is None
    assert not any(name.startswith(("objectives", "projections")) for name in bundle.state)
    augmentation = AugmentationConfig(copies=2, model=general.teacher)
    intermediate = on_rows(
        "intermediate", model=f"{general.output}/bundle", losses=INTERMEDIATE,
        augmentation=augmentation, held_out=None,
    )  # fmt: skip
    counts = distill.run(intermediate).counts
    assert load_bundle(f"{intermediate.output}/bundle").task is None, "its head learned nothing"
    assert "primary_metric" not in counts
    assert counts["augmented_rows"] == 2 * 32
    assert counts["train_rows"] == 3 * 32
    prediction = on_rows(
        "prediction", model=f"{intermediate.output}/bundle", augmentation=augmentation,
        losses=LossesConfig(soft=1.0, hard=0.0, cosine=0.0, temperature=1.0),
        selection=SelectionConfig(share=0.25),
    )  # fmt: skip
    counts = distill.run(prediction).counts
    assert (counts["train_rows"], counts["selection_rows"]) == (3 * 24, 8)
    assert "kept_accuracy" in counts
    made = load_bundle(f"{prediction.output}/bundle")
    assert made.lineage["parent_lineage"]["parent"] == bundle.digest
    read = [json.loads(line) for line in Path(prediction.train.source).read_text().splitlines()]
    assert made.task is not None
    assert made.has_seen(made.task, read).sum() >= 32, "those that select are seen too"


@pytest.mark.drill
def test_distilbert_learns_from_shards(on_shards: Distilling) -> None:
    from transformers import AutoModelForMaskedLM

    config = on_shards(epochs=0.15)
    counts = distill.run(config).counts
    assert {"mlm_loss", "soft_loss", "cosine_loss", "soft_accuracy"} <= {
        name.removesuffix("_after") for name in counts
    }
    assert counts["loss_after"] < counts["loss_before"]
    weighted = 2 * counts["mlm_loss_after"] + 5 * counts["soft_loss_after"]
    assert counts["loss_after"] == pytest.approx(weighted + counts["cosine_loss_after"])
    theirs = AutoModelForMaskedLM.from_pretrained(f"{config.output}/bundle")
    assert theirs.config.num_hidden_layers == 1


@pytest.mark.drill
@pytest.mark.usefixtures("local_ray")
def test_one_worker_reads_shards_as_without_workers(on_shards: Distilling) -> None:
    none = distill.run(on_shards("none", epochs=0.03)).counts
    one = distill.run(on_shards("one", epochs=0.03, num_workers=1)).counts
    assert one["loss_after"] == none["loss_after"]


def test_without_a_teacher_the_same_student_is_fine_tuned(on_rows: Distilling) -> None:
    from bert_core.bundle.format import load_bundle

    alone = LossesConfig(soft=0.0, hard=1.0, cosine=0.0)
    config = on_rows(losses=alone, epochs=0.5)
    counts = distill.run(config).counts
    assert "teacher_accuracy" not in counts
    lineage = load_bundle(f"{config.output}/bundle").lineage
    assert "teacher" not in lineage
    records = read_records(Path(config.output)).values()
    assert not any("train/soft_loss" in each for each in records)


def other_words(folder: Path) -> str:
    """A bundle of another vocabulary."""
    from tests import tiny

    return str(tiny.bundle(folder / "other", tiny.tokenizer(["a", "b"])))


def test_a_student_with_another_vocabulary_is_refused(refused: Distilling, tmp_path: Path) -> None:
    config = refused(model=other_words(tmp_path))
    with pytest.raises(ConfigError, match="wanted a student with the vocabulary of its teacher"):
        distill.run(config)


@pytest.mark.trained
def test_a_student_reads_pairs_in_training_as_it_will_when_it_answers(tmp_path: Path) -> None:
    """Even if its teacher does not tell the second text from the first by its segment."""
    from bert_core.inference.predictor import Predictor
    from tests import tiny

    words, task = tiny.tokenizer(), TextRegression(options=TextOptions(pairs=True))
    teacher, student = (
        tiny.bundle(
            tmp_path / f"segments-{count}",
            words,
            tiny.encoder_config(words.vocab_size, type_vocab_size=count),
            task=task,
        )
        for count in (1, 2)
    )
    rows = [
        {"text": f"the {word}", "text_pair": "a blue tree", "score": float(number)}
        for number, word in enumerate(["sea", "tree", "blue", "is"])
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = DistillConfig(
        output=str(tmp_path / "out"), teacher=str(teacher), model=str(student),
        train=LabelledConfig(source=str(path)), held_out=LabelledConfig(source=str(path)),
        max_length=16, batch_size=4, epochs=1.0, precision="fp32", num_workers=0,
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
    )  # fmt: skip
    counts = distill.run(config).counts
    predictor = Predictor(f"{config.output}/bundle", device="cpu")
    answers = predictor.predict([predictor.task.request_of(row) for row in rows])
    measured = predictor.task.metrics(predictor.task.compare(rows, answers))
    assert counts["mse_mean"] == pytest.approx(measured["mse"], rel=1e-5)


@pytest.mark.parametrize("name", ["teacher", "model"])
def test_a_bundle_that_has_a_graph_for_weights_is_refused(
    refused: Distilling, name: str, tmp_path: Path
) -> None:
    from bert_core.bundle.format import About, load_bundle
    from bert_core.bundle.weights import build_model
    from bert_core.bundle.writing import Graph, save_bundle

    bundle = load_bundle(refused().teacher)
    assert bundle.task is not None
    save_bundle(
        tmp_path / "exported",
        build_model(bundle, []),
        bundle.tokenizer,
        About(task=bundle.task),
        Graph(name=GRAPHS["fp32"], write=lambda path: path.write_bytes(b"graph")),
    )
    with pytest.raises(FormatError, match=r"got an exported one with onnx/model\.onnx inst"):
        distill.run(refused(**{name: str(tmp_path / "exported")}))


def test_a_student_does_not_take_over_the_sizes_of_its_teachers_vectors(
    on_rows: Distilling, tmp_path: Path
) -> None:
    from bert_core.bundle.format import About, load_bundle
    from bert_core.bundle.weights import build_model
    from bert_core.bundle.writing import save_bundle

    config = on_rows()
    bundle = load_bundle(config.teacher)
    vectors = FeatureExtraction(options=FeatureExtractionOptions(layer=2, dimensions=[8]))
    objectives = [vectors.build_objective(bundle.encoder_config)]
    save_bundle(
        tmp_path / "teacher", build_model(bundle, objectives), bundle.tokenizer, About(task=vectors)
    )
    rows = [{"text": line, "text_pair": line} for line in ("open a file", "read it")] * 8
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pairs = LabelledConfig(source=str(tmp_path / "pairs.jsonl"))
    config = replace(
        config, teacher=str(tmp_path / "teacher"), train=pairs, held_out=None, rows_per_class=None
    )
    distill.run(config)
    student = load_bundle(f"{config.output}/bundle")
    assert student.task is not None
    assert isinstance(student.task.chosen, FeatureExtractionOptions)
    assert (student.task.chosen.layer, student.task.chosen.dimensions) == (None, [])
    assert student.encoder_config.num_hidden_layers == 1


def test_shards_of_other_words_are_refused(on_shards: Distilling, tmp_path: Path) -> None:
    config = on_shards(teacher=other_words(tmp_path))
    with pytest.raises(FormatError, match="was made with vocabulary"):
        distill.run(config)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"layers": (0, 2)}, r"wanted layers of the model, 0 to 1, got \[0, 2\]"),
        (
            {"layer_map": (0, 1), "losses": INTERMEDIATE, "held_out": None},
            r"a layer of the teacher, 0 to 1, for each of the student's 1 layers",
        ),
        (
            {"losses": INTERMEDIATE},
            "held_out: wanted none, since losses.soft and losses.hard are 0",
        ),
        (
            {"losses": INTERMEDIATE, "held_out": None, "selection": SelectionConfig(share=0.1)},
            "selection.metric: wanted loss, .* got None: set it, or selection.share to 0",
        ),
        ({"task": "token-classification"}, "wanted a teacher for token-classification"),
        ({"options": {"multi_label": True}}, "options: wanted those that the teacher"),
        ({"max_length": 10_000}, r"wanted at most \d+, the number of positions of .*/bundle, got"),
    ],
)
def test_students_that_do_not_fit_the_teacher_are_refused(
    refused: Distilling, changes: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    config = refused(**changes)
    if "task" in changes:
        rows = [{"tokens": ["a"], "tags": [tag]} for tag in ("B-x", "O")] * 8
        path = tmp_path / "tags.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = replace(config.train, source=str(path))
        config = replace(config, train=source, held_out=None, rows_per_class=None)
    with pytest.raises(ConfigError, match=wanted):
        distill.run(config)


def test_a_teacher_without_a_task_has_none_for_its_student(
    refused: Distilling, untrained: Any
) -> None:
    with pytest.raises(ConfigError, match=r"task: wanted one of .*regression.*: give --task"):
        distill.run(refused(teacher=str(untrained.encoder)))


def test_rows_whose_answers_are_places_are_not_augmented(
    refused: Distilling, tmp_path: Path
) -> None:
    rows = [{"tokens": ["a"], "tags": [tag]} for tag in ("B-x", "O")] * 8
    path = tmp_path / "tags.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = refused(
        task="token-classification", augmentation=AugmentationConfig(copies=1), held_out=None,
        losses=INTERMEDIATE, rows_per_class=None,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"copies: wanted 0 for token-classification"):
        distill.run(replace(config, train=replace(config.train, source=str(path))))


ON_ROWS: dict[str, Any] = {
    "output": "out", "teacher": "teacher", "train": LabelledConfig(source="rows.jsonl"),
    "held_out": LabelledConfig(source="rows.jsonl"), "rows_per_class": 16, "max_length": 32,
}  # fmt: skip
ON_SHARDS: dict[str, Any] = {"output": "out", "teacher": "teacher", "shards": "shards"}


def test_a_config_that_contradicts_itself_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"variant": "bert-none"}, "variant: wanted one of"),
        ({"variant": "bert-tiny", "layers": (0,)}, "layers: wanted none with variant"),
        ({"shards": "x"}, "shards: wanted no train, held_out, rows_per_class, max_length with"),
        ({"held_out_rows": 0}, "held_out_rows: wanted at least 1"),
        ({"layer_map": (1,)}, r"layer_map: wanted none when no layers are compared, got \[1\]"),
    ]
    for changes, wanted in refused:
        with pytest.raises(ConfigError, match=wanted):
            DistillConfig(**ON_ROWS | changes)


def test_settings_that_shards_do_not_support_are_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"task": "token-classification"}, "shards: wanted no task with it"),
        ({"options": {"multi_label": True}}, "shards: wanted no options with it"),
        ({"selection": SelectionConfig(share=0.1)}, "shards: wanted no selection with it"),
        ({"augmentation": AugmentationConfig(copies=1)}, "shards: wanted no augmentation with"),
        ({"examples": 0}, "shards: wanted no examples with it"),
        ({"seeds": (0, 1)}, "seeds: wanted one with shards, got 2"),
    ]
    for changes, wanted in refused:
        with pytest.raises(ConfigError, match=wanted):
            DistillConfig(**ON_SHARDS | changes)


def test_losses_that_teach_nothing_are_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"soft": -1.0}, "losses.soft: wanted at least 0"),
        (
            {"soft": 0.0, "hard": 0.0, "cosine": 0.0, "attention": 1.0},
            "a part that trains the last",
        ),
        ({"soft": math.inf}, "losses.soft: wanted at least 0 and finite, got inf"),
        ({"temperature": 0.0}, "losses.temperature: wanted above 0"),
        ({"temperature": math.inf}, "losses.temperature: wanted above 0 and finite, got inf"),
    ]
    for weights, wanted in refused:
        with pytest.raises(ConfigError, match=wanted):
            LossesConfig(**weights)


def test_an_augmentation_out_of_range_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"copies": -1}, "augmentation.copies: wanted at least 0"),
        ({"share": 0.0}, "augmentation.share: wanted above 0"),
        ({"candidates": 0}, "augmentation.candidates: wanted at least 1"),
    ]
    for changes, wanted in refused:
        with pytest.raises(ConfigError, match=wanted):
            AugmentationConfig(**changes)
