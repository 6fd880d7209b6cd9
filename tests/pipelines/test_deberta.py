"""DeBERTa's own objectives from WikiText-2 to bundles, by the recipes that are shipped."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bert_core.train.config import LoopConfig, ScheduleConfig
from pipelines import distill, finetune, prepare, pretrain, vocab
from pipelines.configure import CONFIGS, parse
from pipelines.corpus.labelled import LabelledConfig
from pipelines.distill import DistillConfig
from pipelines.finetune import FinetuneConfig
from pipelines.pretrain import PretrainConfig
from pipelines.training.records import read_records

RECIPES = ("deberta_wikitext2", "deberta_v3_wikitext2")


def recipe(word: str, name: str) -> Any:
    return parse(word, ["--config", str(CONFIGS / word / f"{name}.toml")])


@pytest.fixture(scope="module")
def wikitext(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a vocabulary of the first half megabyte, and each model's rows, by the recipes."""
    folder = tmp_path_factory.mktemp("wikitext")
    text = (data_dir / "wikitext2" / "train.txt").read_bytes()[: 1 << 19].decode(errors="ignore")
    (folder / "train.txt").write_text(text)
    here = {"num_workers": 0, "tracking_uri": f"sqlite:///{folder}/mlflow.db"}
    made = recipe("vocab", "deberta_wikitext2")
    corpus = replace(made.corpus, source=str(folder / "train.txt"), held_out_share=0.05)
    vocab.run(replace(made, output=str(folder / "vocab"), corpus=corpus, vocab_size=1500, **here))
    words = {"tokenizer": str(folder / "vocab"), "corpus": corpus}
    for name in RECIPES:
        rows = recipe("prepare", name)
        prepare.run(replace(rows, output=str(folder / f"shards-{name}"), **words, **here))
    return folder


def config_of(name: str, folder: Path, output: Path) -> PretrainConfig:
    """The recipe, shortened."""
    return replace(
        recipe("pretrain", name),
        output=str(output),
        shards=str(folder / f"shards-{name}"),
        tokenizer=str(folder / "vocab"),
        global_batch_size=16,
        evaluate_every_steps=20,
        held_out_rows=128,
        loop=LoopConfig(max_steps=60, precision="fp32"),
        schedule=ScheduleConfig(warmup_steps=10),
        num_workers=0,
        tracking_uri=f"sqlite:///{folder}/mlflow.db",
    )


@pytest.mark.drill
@pytest.mark.parametrize(
    ("name", "parts"), [("deberta_wikitext2", {"mlm"}), ("deberta_v3_wikitext2", {"mlm", "rtd"})]
)
def test_held_out_losses_fall_and_transformers_loads_the_result(
    name: str, parts: set[str], wikitext: Path, tmp_path: Path
) -> None:
    from transformers import AutoModel, AutoModelForMaskedLM

    from bert_core.inference.predictor import Predictor
    from bert_core.objectives.enhanced_mlm import EnhancedMaskedLanguageModeling

    config = config_of(name, wikitext, tmp_path / "out")
    counts = pretrain.run(config).counts
    records = read_records(config.local_folder)
    for part in parts:
        losses = [r[f"held_out/{part}_loss"] for r in records.values() if "held_out/loss" in r]
        assert len(losses) == 4
        assert losses[-1] < losses[0] - 0.05, (part, losses)
    assert counts["mlm_loss_after"] < counts["mlm_loss_before"] - 0.5
    bundle = tmp_path / "out" / "bundle"
    AutoModel.from_pretrained(bundle)
    generator = bundle / "generator" if "rtd" in parts else bundle
    AutoModelForMaskedLM.from_pretrained(generator)
    predictor = Predictor(generator, task="fill-mask")
    [words] = predictor.predict(["The album was [MASK] in May."])
    assert len(words) == 5
    enhanced = isinstance(predictor.model.objectives["mlm"], EnhancedMaskedLanguageModeling)
    assert enhanced == (name == "deberta_wikitext2")


@pytest.mark.drill
def test_a_decoder_is_fine_tuned_and_asked_as_a_teacher(wikitext: Path, tmp_path: Path) -> None:
    from bert_core.bundle.format import load_bundle
    from bert_core.inference.predictor import Predictor

    config = config_of("deberta_wikitext2", wikitext, tmp_path / "out")
    pretrain.run(replace(config, loop=LoopConfig(max_steps=8, precision="fp32")))
    words = ["the", "and"] * 20
    rows = [{"text": f"one [MASK] of {n} .", "words": [one]} for n, one in enumerate(words)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    here: Any = {
        "task": "fill-mask", "train": LabelledConfig(source=str(tmp_path / "rows.jsonl")),
        "held_out": LabelledConfig(source=str(tmp_path / "rows.jsonl")), "epochs": 1.0,
        "batch_size": 8, "max_length": 16, "precision": "fp32", "num_workers": 0,
        "tracking_uri": config.tracking_uri,
    }  # fmt: skip
    tuned = FinetuneConfig(output=str(tmp_path / "tuned"), model=f"{config.output}/bundle", **here)
    finetune.run(tuned)
    taught = DistillConfig(
        output=str(tmp_path / "taught"), teacher=f"{tuned.output}/bundle", **here
    )
    counts = distill.run(taught).counts
    for output in (tuned.output, taught.output):
        bundle = load_bundle(f"{output}/bundle")
        assert "objectives.mlm.positions.weight" in bundle.state
        assert bundle.task is not None
        assert bundle.task.record["options"] == {"enhanced": True}
    asked = Predictor(f"{tuned.output}/bundle", device="cpu")
    windows = asked.task.encode(rows, asked.bundle.tokenizer, asked.max_length)
    answers = asked.decode(rows, windows, asked.forward(windows))
    wanted = asked.task.metrics(asked.task.compare(rows, answers))
    assert counts["teacher_accuracy"] == pytest.approx(wanted["accuracy"])


@pytest.mark.drill
@pytest.mark.parametrize("name", RECIPES)
def test_the_micro_batch_does_not_change_what_is_learned(
    name: str, wikitext: Path, tmp_path: Path
) -> None:
    losses = []
    for tokens in (2048, 512):
        config = config_of(name, wikitext, tmp_path / str(tokens))
        loop = replace(config.loop, max_steps=6)
        pretrain.run(replace(config, loop=loop, micro_batch_tokens=tokens, log_every_steps=1))
        records = read_records(config.local_folder)
        losses.append([records[step]["loss"] for step in range(1, 7)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
