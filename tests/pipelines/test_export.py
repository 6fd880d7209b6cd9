"""Export: a bundle that every stage takes, refused where it costs more than was allowed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_core import files
from bert_core.bundle.layout import Execution
from bert_core.errors import ConfigError, ResourceError
from bert_core.metrics.bootstrap import Verdict
from bert_core.tasks.text_classification import TextClassification
from pipelines import evaluate, export, predict, publish
from pipelines.corpus.labelled import LabelledConfig
from pipelines.evaluate import EvaluateConfig
from pipelines.export import ExportConfig, adapter_input, check_drop
from pipelines.predict import PredictConfig
from pipelines.publish import PublishConfig
from tests import tiny

pytestmark = pytest.mark.usefixtures("unchecked")

TASK = "feature-extraction"
ROWS = 200


@pytest.fixture(scope="module")
def likeness(pretrained: Any, tmp_path_factory: pytest.TempPathFactory) -> LabelledConfig:
    """Pairs of texts with the cosine that the pretrained encoder gives them: none does better."""
    from bert_core.inference.predictor import Predictor

    lines = [line for line in pretrained.text.read_text().splitlines() if len(line) > 40]
    pairs = [{"text": a, "text_pair": b} for a, b in zip(lines[:ROWS], lines[ROWS:], strict=False)]
    predictor = Predictor(pretrained.folder / "pretrain" / "bundle", device="cpu", task=TASK)
    windows = predictor.task.encode(pairs, predictor.bundle.tokenizer, predictor.max_length)
    for pair, vectors in zip(pairs, predictor.forward(windows), strict=True):
        first, second = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        pair["score"] = float(first @ second)
    path = tmp_path_factory.mktemp("likeness") / "likeness.jsonl"
    path.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    return LabelledConfig(source=str(path))


@pytest.fixture
def swapped(likeness: LabelledConfig, tmp_path: Path) -> LabelledConfig:
    """Other pairs, without labels, and one that is held out."""
    pairs = [json.loads(line) for line in Path(likeness.source).read_text().splitlines()]
    others = [{"text": pair["text_pair"], "text_pair": pair["text"]} for pair in pairs]
    same = {name: pairs[0][name] for name in ("text", "text_pair")}
    path = tmp_path / "swapped.jsonl"
    path.write_text("".join(f"{json.dumps(pair)}\n" for pair in [same, *others]))
    return LabelledConfig(source=str(path))


@pytest.fixture
def config(pretrained: Any, tmp_path: Path) -> ExportConfig:
    return ExportConfig(
        output=str(tmp_path / "export"),
        model=str(pretrained.folder / "pretrain" / "bundle"),
        task=TASK,
        num_workers=0,
        tracking_uri=pretrained.tracking_uri,
    )


@pytest.mark.drill
def test_an_export_is_the_same_model_and_knows_where_it_comes_from(
    config: ExportConfig, likeness: LabelledConfig
) -> None:
    from bert_core.bundle.format import load_bundle
    from bert_core.inference.export import TOLERANCE
    from bert_core.inference.predictor import Predictor

    config = replace(config, held_out=likeness)
    manifest = export.run(config)
    assert manifest.counts["spearman_drop"] == pytest.approx(0)
    folder = Path(config.output, "bundle")
    bundle, parent = load_bundle(folder), load_bundle(config.model)
    assert bundle.graph == "onnx/model.onnx"
    assert manifest.counts["largest_difference"] < TOLERANCE
    there = {f"bundle/{path.relative_to(folder)}" for path in folder.rglob("*") if path.is_file()}
    assert there == manifest.outputs.keys()
    lineage = bundle.lineage
    assert (lineage["stage"], lineage["parent"]) == ("export", parent.digest)
    assert lineage["parent_lineage"] == parent.lineage
    assert lineage["stage_digest"] == manifest.digest
    texts = ["Return the sum.", "Open a file, and close it again when that is done."]
    wanted = Predictor(config.model, device="cpu", task=TASK).predict(texts)
    np.testing.assert_allclose(Predictor(folder).predict(texts), wanted, atol=TOLERANCE)
    assert export.run(config) == manifest


@pytest.mark.drill
def test_8_bits_pass_where_the_fall_is_allowed_and_the_bundle_goes_to_the_registry(
    config: ExportConfig,
    likeness: LabelledConfig,
    swapped: LabelledConfig,
    tmp_path: Path,
    pretrained: Any,
) -> None:
    from bert_core.bundle.format import load_bundle

    config = replace(
        config,
        quantize="int8",
        held_out=likeness,
        calibration=swapped,
        calibration_rows=64,
        max_drop=0.5,
    )
    manifest = export.run(config)
    folder = Path(config.output, "bundle")
    counts = manifest.counts
    assert counts["primary_metric"] == "spearman"
    assert counts["rows"] == ROWS
    assert 0 <= counts["spearman_drop_low"] <= counts["spearman_drop"] < 0.5
    assert counts["spearman_drop"] > 0
    assert counts["size_bytes"] < counts["fp32_bytes"]
    bundle = load_bundle(folder)
    assert bundle.metrics["spearman"] == pytest.approx(1 - counts["spearman_drop"])
    held_out, calibration = bundle.lineage["data"]
    assert (held_out["name"], calibration["name"]) == ("held_out", "calibration")
    assert (calibration["source"], calibration["rows"]) == (swapped.source, 64)
    assert held_out["digest"] != calibration["digest"]
    assert bundle.executions[0] == Execution("onnxruntime", "int8")
    assert Execution("openvino", "int8") in bundle.executions
    assert counts["runs"] == [str(run) for run in bundle.executions]

    common: dict[str, Any] = {"num_workers": 0, "tracking_uri": pretrained.tracking_uri}
    evaluation = str(tmp_path / "evaluate")
    evaluated = evaluate.run(
        EvaluateConfig(output=evaluation, model=str(folder), held_out=likeness, **common)
    )
    assert evaluated.counts["spearman"] == pytest.approx(bundle.metrics["spearman"], abs=1e-6)
    published = publish.run(
        PublishConfig(
            output=str(tmp_path / "publish"),
            model=str(folder),
            evaluation=evaluation,
            name="exported",
            **common,
        )
    )
    assert published.counts["is_champion"]
    card = (tmp_path / "publish" / "model_card.md").read_text()
    assert "onnxruntime or OpenVINO runs `onnx/model_quantized.onnx` in the folder" in card
    predicted = predict.run(
        PredictConfig(
            output=str(tmp_path / "predict"),
            model="models:/exported@champion",
            source=likeness.source,
            **common,
        )
    )
    assert (predicted.counts["rows"], predicted.counts["rejected"]) == (ROWS, 0)


@pytest.mark.drill
def test_bfloat16_passes_if_the_drop_is_allowed_and_is_one_way_to_run_the_graph(
    config: ExportConfig, likeness: LabelledConfig
) -> None:
    from bert_core.bundle.format import load_bundle

    config = replace(config, quantize="bf16", held_out=likeness, max_drop=0.5)
    try:
        manifest = export.run(config)
    except ResourceError as error:
        assert "wanted a CPU that computes in bfloat16" in str(error)  # noqa: PT017
        pytest.skip(str(error))
    bundle = load_bundle(Path(config.output, "bundle"))
    assert bundle.graph == "onnx/model.onnx"
    assert set(bundle.executions) == {
        Execution("openvino", "bf16"),
        Execution("onnxruntime", "fp32"), Execution("openvino", "fp32"),
    }  # fmt: skip
    assert bundle.executions[0].precision == "bf16"
    assert bundle.metrics["spearman"] == pytest.approx(1 - manifest.counts["spearman_drop"])


@pytest.mark.drill
def test_rows_that_are_held_out_do_not_calibrate(
    config: ExportConfig, likeness: LabelledConfig
) -> None:
    config = replace(config, quantize="int8", held_out=likeness, calibration=likeness)
    with pytest.raises(ConfigError, match=r"calibration: wanted rows that are not held out, got"):
        export.run(config)


@pytest.mark.drill
def test_8_bits_that_cost_too_much_are_refused_and_nothing_is_written(
    config: ExportConfig, likeness: LabelledConfig
) -> None:
    config = replace(config, quantize="int8", held_out=likeness, max_drop=0.0)
    message = (
        r"max_drop: wanted spearman to drop by at most 0, got a drop of 0\.\d+ by int8 "
        rf"\(0\.\d+ to 0\.\d+ by paired bootstrap on {ROWS * 3 // 4} rows\): leave quantize out, ra"
    )
    with pytest.raises(ConfigError, match=message):
        export.run(config)
    assert not Path(config.output, "bundle").exists()
    assert not files.exists(f"{config.output}/manifest.json")


def test_an_export_without_8_bits_is_not_advised_to_omit_them() -> None:
    config = ExportConfig(output="out", model="model")
    fallen = Verdict(not_worse=False, metric="f1", difference=-0.1, low=-0.2, high=0.0, rows=9)
    message = r"a drop of 0\.1000 by export .* on 9 rows\): raise max_drop, or give more rows if"
    with pytest.raises(ConfigError, match=message):
        check_drop(config, fallen)


@pytest.mark.drill
def test_8_bits_that_err_on_none_of_too_few_rows_are_refused(
    config: ExportConfig, likeness: LabelledConfig, tmp_path: Path
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(Path(likeness.source).read_text().splitlines(True)[:4]))
    config = replace(config, quantize="int8", held_out=LabelledConfig(source=str(few)))
    with pytest.raises(ConfigError, match=r"held_out: .* by at most 0.01, got 3: .* up to 1: give"):
        export.run(config)


@pytest.mark.drill
def test_rows_that_a_model_was_trained_on_are_refused(
    finetuned: Any, config: ExportConfig, tmp_path: Path
) -> None:
    from bert_core.bundle.format import load_bundle

    tuned = replace(
        config,
        model=str(finetuned.folder / "finetune" / "bundle"),
        task=None,
        quantize="int8",
        held_out=LabelledConfig(source=str(tmp_path / "again.jsonl")),
    )
    lines = Path(finetuned.rows.source).read_text().splitlines()
    seen = load_bundle(tuned.model).has_seen(
        TextClassification([]), [json.loads(line) for line in lines]
    )
    again = [line for line, out in zip(lines, seen, strict=True) if out]
    (tmp_path / "again.jsonl").write_text("".join(f"{line}\n" for line in reversed(again)))
    message = (
        r"held_out: wanted rows that the model was not trained on, .*again.jsonl, .*: give others"
    )
    with pytest.raises(ConfigError, match=message):
        export.run(tuned)


@pytest.mark.drill
def test_a_fine_tuned_model_is_exported_once_by_rows_that_it_has_not_seen(
    finetuned: Any, config: ExportConfig
) -> None:
    from bert_core.bundle.format import bundle_digest, load_bundle

    wide = replace(
        config,
        model=str(finetuned.folder / "finetune" / "bundle"),
        task=None,
        quantize="int8",
        held_out=finetuned.rows,
        max_drop=1.0,
    )
    counts = export.run(wide).counts
    examples = load_bundle(f"{wide.output}/bundle").examples
    assert examples == load_bundle(wide.model).examples != ()
    lines = Path(finetuned.rows.source).read_text().splitlines()
    seen = load_bundle(wide.model).has_seen(
        TextClassification([]), [json.loads(line) for line in lines]
    )
    assert counts["rows_seen_in_training"] == seen.sum() > 0
    unseen = len(lines) - seen.sum()
    assert counts["calibration_rows"] == min(256, unseen // 4)
    assert counts["rows"] == unseen - counts["calibration_rows"]
    assert 0 <= counts["accuracy"] <= 1
    again = replace(config, output=f"{config.output}-2", model=f"{wide.output}/bundle", task=None)
    digest = bundle_digest(again.model)
    with pytest.raises(ConfigError, match=r"has onnx/model_quantized.onnx instead: give"):
        export.run(again)
    assert bundle_digest(again.model) == digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantize": "int8"}, "held_out: wanted labelled rows .* int8 costs, got none: give"),
        (
            {"calibration": LabelledConfig(source="a.csv")},
            "calibration: wanted none without 8 bits, got a.csv: set quantize = int8",
        ),
        ({"quantize": "bf16"}, "held_out: wanted labelled rows .* bf16 costs, got none: give"),
        ({"max_drop": -0.1}, "max_drop: wanted at least 0, got -0.1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExportConfig(output="out", model="model", **changes)


@pytest.mark.guard
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_is_merged_into_a_bundle_that_answers_as_peft_does(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from bert_core.bundle.format import load_bundle
    from bert_core.inference.predictor import Predictor

    base = tiny.bundle(tmp_path / "base", tiny.tokenizer(), task=TextClassification(["a", "b"]))
    plain = AutoModelForSequenceClassification.from_pretrained(base)
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS, target_modules=["query", "value"], init_lora_weights=False
    )
    model = get_peft_model(plain, lora).eval()
    model.save_pretrained(str(tmp_path / "lora"))
    config = ExportConfig(
        output=str(tmp_path / "out"), model=str(base), adapter=str(tmp_path / "lora"),
        adapter_labels=("ham", "spam"), weights=True, num_workers=0,
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
    )  # fmt: skip
    manifest = export.run(config)
    assert {*manifest.inputs} == {"model", "adapter"}
    bundle = load_bundle(tmp_path / "out" / "bundle")
    assert bundle.lineage["parent"] == load_bundle(base).digest
    assert [each["name"] for each in bundle.lineage["data"]] == ["adapter"]
    texts = ["the sea is blue", "a tree"]
    tokens = AutoTokenizer.from_pretrained(base)(texts, padding=True, return_tensors="pt")
    theirs = model(**tokens).logits.softmax(-1)[:, 1]
    answers = Predictor(tmp_path / "out", device="cpu").predict(texts)
    ours = [next(e["score"] for e in answer if e["label"] == "spam") for answer in answers]
    torch.testing.assert_close(torch.tensor(ours), theirs.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"adapter_labels": ("a", "b")}, "adapter_labels: wanted none without adapter, got a, b"),
        ({"weights": True}, "weights: wanted an adapter to merge, and neither quantize nor held"),
    ],
)
def test_settings_of_adapters_without_an_adapter_are_refused(
    changes: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted):
        ExportConfig(output="out", model="model", **changes)


def test_an_adapter_that_is_not_there_is_told_before_the_export(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"adapter: wanted a folder on this machine with adapter_"
    ):
        adapter_input(str(tmp_path))
