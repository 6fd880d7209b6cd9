"""What a start may not lose, and what a refused one leaves: the same in every stage."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bert_core.errors import ConfigError, CorpusError, FormatError
from bert_core.manifest import read_manifest
from bert_core.train.config import OptimizerConfig
from pipelines import distill, evaluate, export, finetune, predict, prepare, pretrain, tune, vocab
from pipelines.configure import STAGES
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.labelled import LabelledConfig
from pipelines.distill import DistillConfig
from pipelines.evaluate import EvaluateConfig
from pipelines.export import ExportConfig
from pipelines.finetune import FinetuneConfig
from pipelines.predict import PredictConfig
from pipelines.runtime.unfinished import in_words, saved_work
from pipelines.training.selection import SelectionConfig
from pipelines.training.sweep import SweepConfig
from pipelines.tune import TuneConfig

CHANGED: dict[str, tuple[str, Any, Callable[[Any], Any], str]] = {
    "vocab": (
        "vocab",
        vocab,
        lambda config: replace(config, vocab_size=999),
        r"another vocab_size \(1000, now 999\); it has saved 4 files, such as vocab\.txt: ",
    ),
    "prepare": (
        "shards",
        prepare,
        lambda config: replace(config, seed=3),
        r"another seed \(0, now 3\); it has saved \d+ files, such as train-",
    ),
    "pretrain": (
        "pretrain",
        pretrain,
        lambda config: replace(config, optimizer=OptimizerConfig(lr=0.002)),
        r"another optimizer\.lr \(0\.001, now 0\.002\); its newest checkpoint is step-00000012: ",
    ),
    "finetune": (
        "finetune",
        finetune,
        lambda config: replace(config, batch_size=4),
        r"another batch_size \(8, now 4\); its newest checkpoint is 1/step-\d{8}: ",
    ),
}


def killed(small: Any, stage: str, tmp_path: Path) -> Any:
    """The config of a stage whose output is what a kill leaves just before the manifest."""
    folder = CHANGED[stage][0]
    shutil.copytree(small.folder / folder, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    return getattr(small, stage)(tmp_path / "out")


@pytest.mark.parametrize("stage", CHANGED)
def test_other_settings_do_not_remove_what_a_killed_run_has_saved(
    stage: str, finetuned: Any, tmp_path: Path
) -> None:
    _, module, change, message = CHANGED[stage]
    config = killed(finetuned, stage, tmp_path)
    before = saved_work(config.output)
    with pytest.raises(ConfigError, match=message) as refused:
        module.run(change(config))
    assert f"out holds an unfinished `{stage}` made with" in str(refused.value)
    assert str(refused.value).endswith(
        "go on with what it was made with, give another output, or --force to lose that and start "
        "over"
    )
    assert saved_work(config.output) == before


def test_the_three_ways_out_work(prepared: Any, tmp_path: Path) -> None:
    config = killed(prepared, "vocab", tmp_path)
    with pytest.raises(ConfigError, match="--force to lose that"):
        vocab.run(replace(config, vocab_size=900))
    assert vocab.run(config).counts["vocab_size"] == 1000
    (tmp_path / "out" / "manifest.json").unlink()
    assert vocab.run(replace(config, vocab_size=900, force=True)).counts["vocab_size"] == 900
    other = replace(config, vocab_size=800, output=f"{tmp_path}/other")
    assert vocab.run(other).counts["vocab_size"] == 800


SAVED = {
    "vocab": ["tokenizer.json"],
    "prepare": ["fragments/block-000003.arrow"],
    "pretrain": ["checkpoints/step-00000200/checkpoint.json"],
    "finetune": ["checkpoints/1/step-00000200/checkpoint.json"],
    "distill": ["checkpoints/0/step-00000200/checkpoint.json"],
    "tune": ["trials/003/checkpoints/0/step-00000200/checkpoint.json"],
    "evaluate": ["scores.jsonl"],
    "publish": ["version.json"],
    "export": ["bundle/model.onnx"],
    "predict": ["parts/part-00002.json", "rows/part-00002.jsonl"],
    "mine": ["parts/part-00002.json", "passages/part-00002.parquet"],
    "index": ["parts/part-00002.arrow"],
    "search": ["parts/part-00002.json"],
    "extract": ["parts/part-00002.json"],
    "glue": ["CoLA.tsv"],
}
NOTES = (
    "started.json", "lease.json", "metrics.jsonl", "metrics.sent", "mlflow_run.json",
    "goodput.json", "logs/20260101T000000Z-1/driver.log", "ray/x/1.json", "plots/time.png",
    "record/metrics.jsonl", "checkpoints/probe-0", ".probe-12345678", "diverged.txt", "stopping",
    "trials/000/started.json", "trials/000/mlflow_run.json", "data_card.md", "fragments/stopped",
    "checkpoints/step-00000200/model.safetensors.1a2b3c4d.part",
)  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_notes_beside_saved_work_do_not_count_as_work(stage: str, tmp_path: Path) -> None:
    for name in (*NOTES, *SAVED[stage]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert saved_work(str(tmp_path)) == sorted(SAVED[stage])


def test_the_newest_checkpoint_is_that_of_the_last_seed() -> None:
    steps = ["0/step-00000300", "10/step-00000100", "10/step-00000020", "9/step-00000200"]
    saved = [f"checkpoints/{step}/checkpoint.json" for step in steps]
    assert in_words(saved) == "its newest checkpoint is 10/step-00000100"


@pytest.mark.parametrize("stage", CHANGED)
def test_a_finished_output_without_one_of_its_files_is_not_skipped(
    stage: str, finetuned: Any, tmp_path: Path
) -> None:
    folder, module, *_ = CHANGED[stage]
    shutil.copytree(finetuned.folder / folder, tmp_path / "out")
    config = getattr(finetuned, stage)(tmp_path / "out")
    name, listed = max(read_manifest(config.output).outputs.items())
    path = tmp_path / "out" / name
    path.write_bytes(path.read_bytes()[:-1])
    short = (
        rf"{name}: wanted the {listed.size_bytes:,} bytes that `raybert {stage}` wrote, it has "
        rf"{listed.size_bytes - 1:,}: copy it back, or add --force"
    )
    with pytest.raises(FormatError, match=short):
        module.run(config)
    path.unlink()
    with pytest.raises(FormatError, match=rf"`raybert {stage}` wrote, it is missing: "):
        module.run(config)


REFUSED: dict[str, tuple[Any, Callable[[Any, dict[str, Any]], Any]]] = {
    "vocab": (vocab, lambda s, run: replace(s.vocab("o"), corpus=corpus_of(run), **run)),
    "finetune": (
        finetune,
        lambda s, run: FinetuneConfig(model=encoder(s), train=rows_of(run), **run),
    ),
    "tune": (
        tune,
        lambda s, run: TuneConfig(
            model=encoder(s),
            train=rows_of(run),
            selection=SelectionConfig(share=0.2),
            search=SweepConfig(space={"lr": [1e-4]}),
            **run,
        ),
    ),
    "distill": (
        distill,
        lambda s, run: DistillConfig(teacher=model(s), train=rows_of(run), **run),
    ),
    "evaluate": (
        evaluate,
        lambda s, run: EvaluateConfig(model=model(s), held_out=rows_of(run), **run),
    ),
    "export": (
        export,
        lambda s, run: ExportConfig(
            model=model(s), quantize="int8", held_out=rows_of(run), calibration=rows_of(run), **run
        ),
    ),
    "predict": (
        predict,
        lambda s, run: PredictConfig(model=model(s), source=rows_of(run).source, **run),
    ),
}


def rows_of(run: dict[str, Any]) -> LabelledConfig:
    path = Path(run["output"]).parent / "rows.csv"
    path.write_text("txt,label\n" + "open the file,x\n" * 40)
    return LabelledConfig(source=str(path))


def corpus_of(run: dict[str, Any]) -> CorpusConfig:
    path = Path(run["output"]).parent / "empty.txt"
    path.write_text(" \n\n \n")
    return CorpusConfig(source=str(path))


def encoder(small: Any) -> str:
    return str(small.folder / "pretrain")


def model(small: Any) -> str:
    return str(small.folder / "finetune")


@pytest.mark.parametrize("stage", REFUSED)
def test_a_refused_start_is_no_run(stage: str, finetuned: Any, tmp_path: Path) -> None:
    module, configured = REFUSED[stage]
    run = {
        "output": f"{tmp_path}/out",
        "num_workers": 0,
        "tracking_uri": finetuned.tracking_uri,
        "experiment": f"refused {stage}",
    }
    config = configured(finetuned, run)
    with pytest.raises((ConfigError, CorpusError)):
        module.run(config)
    import mlflow

    client = mlflow.MlflowClient(finetuned.tracking_uri)
    experiment = client.get_experiment_by_name(f"refused {stage}")
    assert experiment is None or client.search_runs([experiment.experiment_id]) == []
    assert saved_work(config.output) == []
