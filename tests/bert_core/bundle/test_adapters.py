"""Folders that peft writes, merged, give peft's outputs; what cannot be merged is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from bert_core.bundle.adapter_layout import CONFIG, PICKLE, WEIGHTS
from bert_core.bundle.adapters import merged, read_adapter
from bert_core.bundle.format import load_bundle
from bert_core.bundle.weights import build_model
from bert_core.errors import FormatError
from bert_core.model.config import EncoderConfig
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import Batch
from bert_core.tasks.text_classification import TextClassification
from tests import tiny

NAMES = (
    *("bert-tiny", "albert-base", "roberta-base", "deberta-base", "deberta-v3-tiny"),
    *("distilbert", "mpnet-base", "modernbert-base", "electra-small"),
)
pytestmark = pytest.mark.filterwarnings(  # peft 0.21 with transformers 5.23
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
LABELS = ["a", "b", "c"]
IDS = torch.tensor([[5, 9, 6, 7, 10, 8, 9], [8, 6, 6, 5, 7, 10, 10]])


def config_of(name: str) -> EncoderConfig:
    variant = VARIANTS[name].config
    small = replace(
        variant, hidden_size=48, num_hidden_layers=2, initializer_range=0.2,
        feed_forward=replace(variant.feed_forward, intermediate_size=64),
    )  # fmt: skip
    return small.adapted(
        vocab_size=11, pad_token_id=1, hidden_dropout_prob=0.0, attention_dropout=0.0
    )


def base_of(folder: Path, name: str = "bert-tiny") -> Path:
    """A bundle of a small encoder with a head of other labels."""
    task = TextClassification(LABELS)
    return tiny.bundle(folder, tiny.tokenizer(), config_of(name), task=task)


def adapted(base: Path, folder: Path, kind: Any, **settings: Any) -> Any:
    """peft's model over transformers' class, with random factors, saved in `folder`."""
    plain = kind.from_pretrained(base).double().eval()
    torch.manual_seed(1)
    config = LoraConfig(**{"r": 3, "init_lora_weights": False, **settings})
    model = get_peft_model(plain, config).double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "modules_to_save" in name:
                weight.add_(0.1 * torch.randn_like(weight))
            elif "lora_" in name:
                weight.mul_(0.5)
    model.save_pretrained(str(folder))
    return model


def batch() -> Batch:
    return {"input_ids": IDS, "token_type_ids": torch.zeros_like(IDS)}


def ours(base: Path, folder: Path) -> Tensor:
    bundle = merged(load_bundle(base), folder)
    assert bundle.task is not None
    objective = bundle.task.build_objective(bundle.encoder_config)
    model = build_model(bundle, [objective], require_heads=True).double().eval()
    read = batch()
    if objective.position_key is not None:
        read[objective.position_key] = torch.arange(IDS.numel())
    return next(iter(model.logits(read).values())).detach()


SETTINGS: dict[str, dict[str, Any]] = {
    "all linear": {"target_modules": "all-linear", "lora_alpha": 5},
    "rank-stabilized": {"target_modules": "all-linear", "use_rslora": True},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", [name for name in NAMES if name in VARIANTS])
def test_a_merged_adapter_of_every_family_gives_what_peft_computes(
    name: str, settings: str, tmp_path: Path
) -> None:
    base = base_of(tmp_path / "base", name)
    kind = AutoModelForSequenceClassification
    changes = SETTINGS[settings] | {"task_type": TaskType.SEQ_CLS}
    if name == "distilbert":
        changes["exclude_modules"] = ["pre_classifier"]  # peft saves it as a part of the head
    model = adapted(base, tmp_path / "lora", kind, **changes)
    theirs = model(input_ids=IDS).logits.detach()
    plain = AutoModelForSequenceClassification.from_pretrained(base).double().eval()
    assert not torch.allclose(theirs, plain(input_ids=IDS).logits, atol=1e-3), "nothing changed"
    torch.testing.assert_close(ours(base, tmp_path / "lora"), theirs, rtol=0, atol=1e-6)


def test_patterns_of_ranks_and_scales_are_read(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    model = adapted(
        base, tmp_path / "lora", AutoModelForSequenceClassification, task_type=TaskType.SEQ_CLS,
        target_modules=["query", "value", "dense"], lora_alpha=4,
        rank_pattern={"value": 5, "layer.0.output.dense": 2},
        alpha_pattern={"attention.output.dense": 9, "^bert.encoder.layer.1.output.dense": 1},
    )  # fmt: skip
    theirs = model(input_ids=IDS).logits.detach()
    torch.testing.assert_close(ours(base, tmp_path / "lora"), theirs, rtol=0, atol=1e-6)
    adapter = read_adapter(tmp_path / "lora")
    ranks = {name.rpartition("self.")[2]: each.a.shape[0] for name, each in adapter.changes.items()}
    assert (ranks["query"], ranks["value"]) == (3, 5)


def test_biases_embeddings_and_saved_modules_are_read(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    model = adapted(
        base, tmp_path / "lora", AutoModelForSequenceClassification, task_type=TaskType.SEQ_CLS,
        target_modules=["query", "position_embeddings"], bias="all",
        modules_to_save=["classifier", "pooler"],
    )  # fmt: skip
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("attention.self.key.bias"):
                weight.add_(1.0)
    model.save_pretrained(str(tmp_path / "lora"))
    theirs = model(input_ids=IDS).logits.detach()
    torch.testing.assert_close(ours(base, tmp_path / "lora"), theirs, rtol=0, atol=1e-6)
    stored = load_file(tmp_path / "lora" / WEIGHTS)
    wrapped = "classifier.modules_to_save."  # as older versions name them
    old = {name.replace("classifier.", wrapped): tensor for name, tensor in stored.items()}
    save_file(old, tmp_path / "lora" / WEIGHTS)
    torch.testing.assert_close(ours(base, tmp_path / "lora"), theirs, rtol=0, atol=1e-6)


def test_an_adapter_brings_the_head_of_another_task_to_an_encoder(tmp_path: Path) -> None:
    from bert_core.objectives.mlm import MaskedLanguageModeling

    base = tiny.bundle(
        tmp_path / "base", tiny.tokenizer(), config_of("bert-tiny"),
        objectives=[MaskedLanguageModeling],
    )  # fmt: skip
    kind = AutoModelForTokenClassification
    model = adapted(base, tmp_path / "lora", kind, task_type=TaskType.TOKEN_CLS,
                    target_modules=["query", "value"])  # fmt: skip
    bundle = merged(load_bundle(base), tmp_path / "lora", ("O", "B-x"))
    assert bundle.task is not None
    assert (bundle.task.name, bundle.task.labels) == ("token-classification", ["O", "B-x"])
    theirs = model(input_ids=IDS).logits.detach().flatten(0, 1)
    torch.testing.assert_close(ours(base, tmp_path / "lora"), theirs, rtol=0, atol=1e-6)
    plain = adapted(base, tmp_path / "bare", AutoModel, target_modules=["query"])
    del plain
    without = merged(load_bundle(base), tmp_path / "bare")
    assert without.task is None
    assert {name for name in without.state if ".mlm." in name}


def test_the_digest_covers_base_and_adapter(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    for name, alpha in (("one", 4), ("two", 8)):
        adapted(base, tmp_path / name, AutoModelForSequenceClassification,
                task_type=TaskType.SEQ_CLS, target_modules=["query"], lora_alpha=alpha)  # fmt: skip
    bundle = load_bundle(base)
    digests = {merged(bundle, tmp_path / name).digest for name in ("one", "two")}
    assert len(digests | {bundle.digest}) == 3


Damage = Callable[[Path], object]


def settings(**changes: Any) -> Damage:
    def edit(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Damage:
    def edit(folder: Path) -> None:
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)

    return edit


def without_b(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in stored.items() if "lora_B" not in name}


def of_dora(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    name = "base_model.model.bert.encoder.layer.0.attention.self.query.lora_magnitude_vector"
    return stored | {name: torch.ones(48)}


def elsewhere(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace(".query.", ".q_proj."): tensor for name, tensor in stored.items()}


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (settings(peft_type="IA3"), "peft_type: wanted LORA, got IA3: merge it into its base with"),
        (settings(use_dora=True), "use_dora: wanted False, got True, under which its magnitudes"),
        (tensors(of_dora), "wanted LoRA, got DoRA's"),
        (settings(r=4), r"wanted factors of rank 4 for bert\.encoder.*query, as adapter_config"),
        (settings(init_lora_weights="pissa"), "wanted a start that leaves the base as it is, got"),
        (settings(alpha_pattern={"(a+)+": 2}), r"wanted names of modules in rank_pattern and alph"),
        (settings(r="three"), "adapter_config.json: r: wanted"),
        (tensors(without_b), "wanted matrices lora_A and lora_B of bert.encoder"),
        (tensors(elsewhere), "wanted tensors of the base, one of .*, got bert.*q_proj.weight"),
        (
            lambda folder: (folder / WEIGHTS).rename(folder / PICKLE),
            "got a pickle, which co",
        ),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"x"), "copy the ad"),
        (lambda folder: (folder / WEIGHTS).unlink(), "wanted this file"),
    ],
)
def test_folders_that_cannot_be_merged_are_refused(
    damage: Damage, wanted: str, tmp_path: Path
) -> None:
    base, folder = base_of(tmp_path / "base"), tmp_path / "lora"
    adapted(base, folder, AutoModelForSequenceClassification, task_type=TaskType.SEQ_CLS,
            target_modules=["query"])  # fmt: skip
    damage(folder)
    with pytest.raises(FormatError, match=wanted):
        merged(load_bundle(base), folder)


def test_an_adapter_of_another_base_or_family_is_refused(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    adapted(base, tmp_path / "lora", AutoModelForSequenceClassification,
            task_type=TaskType.SEQ_CLS, target_modules=["query"])  # fmt: skip
    wider = tiny.bundle(tmp_path / "wider", tiny.tokenizer(), task=TextClassification(LABELS))
    with pytest.raises(FormatError, match=r"wanted factors of bert\..*, \(32, 32\), got those of"):
        merged(load_bundle(wider), tmp_path / "lora")
    other = base_of(tmp_path / "other", "mpnet-base")
    with pytest.raises(FormatError, match=r"wanted tensors of the base, .*of its family"):
        merged(load_bundle(other), tmp_path / "lora")
