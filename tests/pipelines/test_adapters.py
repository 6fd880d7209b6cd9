"""An adapter from rows to a merged bundle, by the stages."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from bert_core.bundle.adapter_layout import ADAPTER, CONFIG, WEIGHTS
from bert_core.errors import ConfigError
from bert_core.inference.predictor import Predictor
from bert_core.train.config import AdapterConfig
from pipelines import export, finetune
from pipelines.corpus.labelled import LabelledConfig
from pipelines.export import ExportConfig
from pipelines.finetune import FinetuneConfig
from tests import tiny
from tests.labelled_rows import write

ROWS = [
    {"text": f"the {noun} is {word}", "label": label}
    for word, label in (("blue", "sea"), ("green", "land"))
    for noun in ("sea", "tree", "house", "bay", "hill", "road")
]
WORDS = sorted({word for row in ROWS for word in row["text"].split()})


def config_of(folder: Path, adapter: AdapterConfig) -> FinetuneConfig:
    model = tiny.bundle(folder / "base", tiny.tokenizer(WORDS), objectives=[])
    rows = LabelledConfig(source=write(folder / "rows.jsonl", ROWS))
    return FinetuneConfig(
        output=str(folder / "out"), model=str(model), train=rows, held_out=rows, adapter=adapter,
        max_length=16, batch_size=4, epochs=10.0, lr=1e-2, precision="fp32", num_workers=0,
        tracking_uri=f"sqlite:///{folder}/mlflow.db",
    )  # fmt: skip


@pytest.mark.guard
def test_an_adapter_is_trained_written_and_merged_by_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, AdapterConfig(rank=4))
    manifest = finetune.run(config)
    assert manifest.counts["accuracy_mean"] > 0.9 > manifest.counts["baseline_accuracy"]
    folder = tmp_path / "out" / "bundle" / ADAPTER
    assert f"bundle/{ADAPTER}/{CONFIG}" in manifest.outputs
    stored, whole = load_file(folder / WEIGHTS), load_file(folder.parent / "model.safetensors")
    assert sum(t.numel() for t in stored.values()) < 0.2 * sum(t.numel() for t in whole.values())
    made: Any = ExportConfig(
        output=str(tmp_path / "merged"), model=config.model, adapter=str(folder), weights=True,
        num_workers=0, tracking_uri=config.tracking_uri,
    )  # fmt: skip
    export.run(made)
    assert "not known" not in capsys.readouterr().err
    texts = [row["text"] for row in ROWS]
    trained, merged = (Predictor(tmp_path / each, device="cpu") for each in ("out", "merged"))
    assert merged.task.labels == trained.task.labels == ["land", "sea"]
    assert merged.predict(texts) == trained.predict(texts)
    assert merged.bundle.has_seen(merged.task, [{"text": ROWS[0]["text"]}]).all()


def test_an_adapter_that_does_not_fit_is_told_before_the_first_step(tmp_path: Path) -> None:
    config = config_of(tmp_path, AdapterConfig(rank=64))
    with pytest.raises(ConfigError, match=r"adapter.rank: wanted at most 32"):
        finetune.run(config)
    assert not (tmp_path / "out" / "checkpoints").exists()
