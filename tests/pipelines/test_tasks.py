"""Every task from labelled rows to the registry: the stages know nothing of any of them."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from huggingface_hub import ModelCard

from bert_core.errors import ConfigError
from bert_core.manifest import Output, read_manifest
from bert_core.tasks.base import Kind, Task
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.token_classification import TokenClassification
from pipelines import distill, evaluate, export, finetune, predict, publish
from pipelines.corpus.labelled import LabelledConfig
from pipelines.distill import DistillConfig
from pipelines.evaluate import EvaluateConfig
from pipelines.export import ExportConfig
from pipelines.finetune import FinetuneConfig
from pipelines.predict import PredictConfig
from pipelines.publish import PublishConfig
from pipelines.training.records import read_records
from pipelines.training.student import LossesConfig
from tests.labelled_rows import EVERY_UNTRAINED_KIND, TRAINED, rows_of, write
from tracking.models.references import Reference
from tracking.runs.spool import read_run
from tracking.store.server import as_default, connect

LINES = [
    "Return the number of bytes", "Open a file and close it", "Raise an error", "Parse a string",
    "Close the socket", "Read all lines of the file", "Write bytes", "Return a new list",
]  # fmt: skip


def tagged(line: str) -> dict[str, list[str]]:
    """The words of a line that says what to do, with their tags."""
    words = line.split()
    return {"tokens": words, "tags": ["B-verb", *["O"] * (len(words) - 1)]}


@pytest.mark.drill
def test_tags_are_learned_from_the_features_of_an_encoder_that_stays_as_it_is(
    pretrained: Any, tmp_path: Path
) -> None:
    import torch

    from bert_core.bundle.format import load_bundle
    from bert_core.inference.predictor import Predictor

    rows = LabelledConfig(source=write(tmp_path / "tags.jsonl", list(map(tagged, LINES))))
    config = replace(
        pretrained.finetune(tmp_path / "finetune"),
        task="token-classification", options={"feature_based": True}, train=rows, held_out=rows,
        rows_per_class=None, seeds=(0,), epochs=20.0, batch_size=8, lr=1e-2,
    )  # fmt: skip
    counts = finetune.run(config).counts
    assert counts["f1_mean"] > 0.8 > counts["baseline_f1"]
    before = load_bundle(config.model).state
    after = load_bundle(tmp_path / "finetune" / "bundle").state
    encoder = [name for name in after if name.startswith("encoder.")]
    assert all(torch.equal(after[name], before[name]) for name in encoder)
    answer = Predictor(tmp_path / "finetune" / "bundle", device="cpu").predict([LINES[1]])
    assert [(each["word"], each["entity_group"]) for each in answer[0]] == [("Open", "verb")]


def check_files(folder: Path, task: Task, table: list[dict[str, Any]], uri: str) -> None:
    """An evaluation's files: those that the manifest and MLflow have, and what is in them."""
    manifest = read_manifest(str(folder))
    for name, output in manifest.outputs.items():
        assert Output.of(str(folder / name)) == output
    recorded = read_run(folder)
    assert recorded is not None
    stored = {each.path for each in connect(uri).list_artifacts(recorded.run_id or "")}
    assert manifest.outputs.keys() <= stored
    rows = [{k: v for k, v in row.items() if v is not None} for row in table]
    answers = [json.loads(row["answer"]) for row in table]
    columns = task.compare(rows, answers)
    wrong = [json.loads(line) for line in (folder / "worst.jsonl").read_text().splitlines()]
    faults = task.faults(columns)
    assert len(wrong) == (faults > 0).sum()
    # An answer that is nearer or further is neither right nor wrong.
    told_apart = task.wrong(columns) is not None
    assert manifest.counts.get("wrong_rows") == (len(wrong) if told_apart else None)
    assert [each["fault"] for each in wrong] == sorted(faults[faults > 0], reverse=True)
    for fault in wrong:
        row, shown = rows[fault["row"] - 1], fault["input"] | fault["wanted"]
        assert shown == {name: row[name] for name in shown}
        assert fault["answer"] == task.cells(json.loads(row["answer"]))
    classes = task.by_class(columns)
    assert ("classes.json" in manifest.outputs) == (classes is not None)
    if classes is not None:
        assert json.loads((folder / "classes.json").read_text()) == classes
    claims = task.claims(rows, answers)
    count = 0 if claims is None else len(claims[0])
    assert {"calibration.json", "calibration.png"} & manifest.outputs.keys() == (
        {"calibration.json", "calibration.png"} if count else set()
    )
    if count:
        calibration = json.loads((folder / "calibration.json").read_text())
        assert sum(row["count"] for row in calibration["bins"]) == count
        error = calibration["expected_calibration_error"]
        assert error == manifest.counts["expected_calibration_error"]
        assert 0 <= error <= 1


def check_card(reference: str, task: Task, measured: dict[str, Any], uri: str) -> None:
    """The model card of a version: read by Hugging Face's library, and its example run."""
    folder = Reference.parse(reference).fetch(uri=uri)
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == (task.pipeline_tag or task.name)
    values = {each.metric_type: each.metric_value for each in card.data.eval_results or []}
    assert measured["primary_metric"] in values
    assert values == {name: measured[name] for name in values}
    (code,) = re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)
    lines: dict[str, Any] = {}
    with as_default(uri):
        exec(code.replace("model.predict", "answer = model.predict"), lines)
    shown = json.loads(re.findall(r"```json\n(.*?)```", card.text, flags=re.DOTALL)[0])
    assert list(lines["answer"].columns) == list(shown)


def check_student(teacher: Path, tuned: FinetuneConfig, output: Path) -> None:
    """A student with half of the layers learns the teacher's task, and answers as it does."""
    from bert_core.inference.predictor import Predictor

    config = DistillConfig(
        output=str(output), teacher=str(teacher), train=tuned.train, held_out=tuned.held_out,
        losses=LossesConfig(soft=1.0, hard=1.0, cosine=1.0), epochs=0.5,
        batch_size=tuned.batch_size, max_length=tuned.max_length, precision="fp32",
        num_workers=0, tracking_uri=tuned.tracking_uri,
    )  # fmt: skip
    made = distill.run(config)
    assert distill.run(replace(config, task=tuned.task)) == made, "the teacher's task, named"
    counts = made.counts
    main = counts["primary_metric"]
    assert counts["student_parameters"] < counts["teacher_parameters"]
    assert {f"{main}_mean", f"teacher_{main}"} <= counts.keys()
    names = {name for each in read_records(output).values() for name in each}
    assert {"train/soft_loss", "train/cosine_loss"} <= names
    asked, student = (Predictor(each, device="cpu") for each in (teacher, output / "bundle"))
    assert (student.task.name, student.task.record) == (asked.task.name, asked.task.record)
    windows = asked.encode(asked.rows(asked.task.examples))
    for wanted, scores in zip(asked.forward(windows), student.forward(windows), strict=True):
        assert scores.shape == wanted.shape
        assert not np.allclose(scores, wanted), "it is another model"


FEATURE_BASED = replace(TokenClassification.kinds[0], options={"feature_based": True})
# One kind guards the way through all stages.
GUARDS, OTHER = "text-classification-single", pytest.mark.drill
WAYS = [
    *(
        pytest.param(task, kind, id=name, marks=pytest.mark.guard if name == GUARDS else OTHER)
        for name, (task, kind) in TRAINED.items()
    ),
    pytest.param(TokenClassification, FEATURE_BASED, id="feature-based", marks=OTHER),
]


@pytest.mark.parametrize(("kind_of_task", "kind"), WAYS)
def test_a_task_goes_all_the_way(
    kind_of_task: type[Task], kind: Kind, pretrained: Any, tmp_path: Path
) -> None:
    import pandas as pd

    from bert_core.inference.predictor import Predictor

    task, options = kind_of_task.name, dict(kind.options)
    registered = "-".join(["walked", task, kind.name, *options])
    rows = LabelledConfig(source=write(tmp_path / "train.jsonl", rows_of(kind, 16)))
    unseen = rows_of(kind, 8, start=16)
    held_out = LabelledConfig(source=write(tmp_path / "dev.jsonl", unseen))
    tuned = replace(
        pretrained.finetune(tmp_path / "finetune"),
        task=task, options=options, train=rows, held_out=held_out,
        rows_per_class=None, seeds=(0,), epochs=1.0, batch_size=16,
    )  # fmt: skip
    counts = finetune.run(tuned).counts
    main = counts["primary_metric"]
    assert f"{main}_mean" in counts
    assert f"baseline_{main}" in counts or task == "fill-mask"
    bundle = tmp_path / "finetune" / "bundle"
    evaluation = EvaluateConfig(
        output=str(tmp_path / "evaluate"), model=str(bundle), held_out=held_out,
        num_workers=0, tracking_uri=pretrained.tracking_uri,
    )  # fmt: skip
    measured = evaluate.run(evaluation).counts
    assert measured[f"{main}_low"] <= measured[main] <= measured[f"{main}_high"]
    # The bundle on all positions answers as the worker measured, where no text was cut.
    assert measured[main] == pytest.approx(counts[f"{main}_mean"], abs=0.35)
    table = pq.read_table(tmp_path / "evaluate" / "predictions.parquet").to_pylist()
    predictor = Predictor(bundle, device="cpu")
    check_files(tmp_path / "evaluate", predictor.task, table, pretrained.tracking_uri)
    names = [one.name for one in fields(predictor.task.inputs)]
    inputs = [{one: row[one] for one in names if row.get(one) is not None} for row in table]
    for row, answer in zip(table, predictor.predict(inputs), strict=True):
        assert (
            json.loads(row["answer"]) == pytest.approx(answer)
            if isinstance(answer, dict)
            # An evaluation ranks negatives too, which nobody asks a served model about.
            else len(json.loads(row["answer"])) == len(answer) + len(row.get("negatives") or [])
        )
    publication = PublishConfig(
        output=str(tmp_path / "publish"), model=str(bundle), evaluation=evaluation.output,
        name=registered, num_workers=0, tracking_uri=pretrained.tracking_uri,
    )  # fmt: skip
    assert publish.run(publication).counts["is_champion"]
    import mlflow

    with as_default(pretrained.tracking_uri):
        model = mlflow.pyfunc.load_model(f"models:/{registered}@champion")
    # As a caller asks, as a table has the same fields, and as the labelled rows have them.
    requests = [predictor.task.request_of(row) for row in unseen[:2]]
    texts = isinstance(requests[0], str)
    frames = [pd.DataFrame(inputs[:2]), pd.DataFrame({"text": requests} if texts else requests)]
    for asked in [*frames, *([requests] if texts else [])]:
        answers = model.predict(asked)
        assert list(answers.columns) == list(predictor.task.cell_types)
        assert len(answers) == 2
    assert model.metadata.signature.outputs.input_names() == list(answers.columns)
    check_card(f"models:/{registered}@champion", predictor.task, measured, pretrained.tracking_uri)
    check_student(bundle, tuned, tmp_path / "student")
    student = str(tmp_path / "student" / "bundle")
    again = replace(evaluation, output=str(tmp_path / "evaluate-2"), model=student)
    evaluate.run(again)
    second = replace(
        publication, output=str(tmp_path / "publish-2"), model=again.model, evaluation=again.output
    )
    assert "paired bootstrap on" in str(publish.run(second).counts["why"])


@pytest.mark.parametrize(("kind_of_task", "kind"), EVERY_UNTRAINED_KIND)
@pytest.mark.drill
def test_a_task_that_is_not_trained_is_answered_by_a_model_for_another(
    kind_of_task: type[Task], kind: Kind, pretrained: Any, unchecked: None, tmp_path: Path
) -> None:
    from bert_core.bundle.format import load_bundle
    from bert_core.inference.predictor import Predictor
    from tests import tiny

    name, options = kind_of_task.name, dict(kind.options)
    task = kind_of_task.from_rows(kind.rows, kind_of_task.options_of(options))
    parent = load_bundle(pretrained.folder / "pretrain" / "bundle")
    other = TASKS[kind_of_task.shares_head_with[0]](task.labels)
    model = tiny.bundle(tmp_path / "model", parent.tokenizer, parent.encoder_config, task=other)
    rows = write(tmp_path / "dev.jsonl", rows_of(kind, 8))
    asked: dict[str, Any] = {"task": name, "options": options}
    shared: dict[str, Any] = {"num_workers": 0, "tracking_uri": pretrained.tracking_uri}
    evaluation = EvaluateConfig(
        output=str(tmp_path / "evaluate"), model=str(model),
        held_out=LabelledConfig(source=rows), **asked, **shared,
    )  # fmt: skip
    measured = evaluate.run(evaluation).counts
    table = pq.read_table(tmp_path / "evaluate" / "predictions.parquet").to_pylist()
    predictor = Predictor(model, device="cpu", **asked)
    check_files(tmp_path / "evaluate", predictor.task, table, pretrained.tracking_uri)
    config = PredictConfig(
        output=str(tmp_path / "predict"), source=rows, model=str(model), **asked, **shared
    )
    assert predict.run(config).counts["rows"] == 8
    export.run(ExportConfig(output=str(tmp_path / "export"), model=str(model), **asked, **shared))
    graph = str(tmp_path / "export" / "bundle")
    assert Predictor(graph).task.record == predictor.task.record
    again = replace(evaluation, output=str(tmp_path / "again"), model=graph, task=None, options={})
    assert evaluate.run(again).counts["primary_metric"] == measured["primary_metric"]
    publication = PublishConfig(
        output=str(tmp_path / "publish"), model=graph, evaluation=again.output,
        name=f"answered-{name}-{kind.name}", **shared,
    )  # fmt: skip
    assert publish.run(publication).counts["is_champion"]
    others = ", ".join(kind_of_task.shares_head_with)
    training = replace(
        pretrained.finetune(tmp_path / "finetune"), task=name, options=options,
        train=LabelledConfig(source=rows),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=f"{name}', which is not trained: train .* {others}, and"):
        finetune.run(training)


def test_an_unknown_metric_is_refused(small: Any, untrained: Any, tmp_path: Path) -> None:
    evaluation = small.evaluate(tmp_path / "evaluate")
    config = replace(evaluation, model=str(untrained.classifier), metric="bleu")
    with pytest.raises(ConfigError, match=r"metric: wanted one of accuracy, .*, got 'bleu'"):
        evaluate.run(config)
