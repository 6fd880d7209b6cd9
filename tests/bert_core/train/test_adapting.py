"""Low-rank adapters: what learns, what is stored, and what peft makes of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from bert_core.bundle.adapter_layout import ADAPTER as FOLDER
from bert_core.bundle.adapter_layout import BASE, CONFIG
from bert_core.bundle.adapters import merged
from bert_core.bundle.format import About, Bundle, load_bundle
from bert_core.bundle.weights import build_model
from bert_core.bundle.writing import save_bundle
from bert_core.errors import ConfigError, FormatError
from bert_core.model.config import EncoderConfig
from bert_core.model.low_rank import adapted_modules
from bert_core.model.sharing import plain_state
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import ObjectiveModel
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.tasks.base import Task
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.multiple_choice import MultipleChoice
from bert_core.tasks.question_answering import QuestionAnswering
from bert_core.tasks.text_classification import TextClassification
from bert_core.tasks.token_classification import TokenClassification
from bert_core.train.adapting import ALL, adapt, check_adapter
from bert_core.train.backward import backward
from bert_core.train.checkpoint import (
    CheckpointWriter,
    latest_checkpoint,
    load_optimizer,
    load_weights,
)
from bert_core.train.config import AdapterConfig, LoopConfig, OptimizerConfig
from bert_core.train.freezing import check_frozen, freeze
from bert_core.train.loop import training_steps
from bert_core.train.optim import build_optimizer
from bert_core.train.parallel import is_part, rank_of_world, replicated, shard
from pipelines.distill import DistillConfig
from pipelines.finetune import FinetuneConfig
from tests import tiny
from tests.ranks import on_ranks

NAMES = ("bert-tiny", "albert-base", "roberta-base", "deberta-base", "deberta-v3-tiny",
         "distilbert", "mpnet-base", "modernbert-base", "electra-small")  # fmt: skip
KINDS = [
    (TextClassification(["a", "b", "c"]), AutoModelForSequenceClassification),
    (TokenClassification(["O", "B-x", "I-x"]), AutoModelForTokenClassification),
    (QuestionAnswering(), AutoModelForQuestionAnswering),
    (MultipleChoice(), AutoModelForMultipleChoice),
    (FeatureExtraction(), AutoModel),
]
IDS = torch.tensor([[5, 9, 6, 7, 10, 8, 9], [8, 6, 6, 5, 7, 10, 10]])
BATCH = {"input_ids": IDS, "token_type_ids": torch.zeros_like(IDS)}
pytestmark = pytest.mark.filterwarnings(  # peft 0.21 with transformers 5.23
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def config_of(name: str) -> EncoderConfig:
    variant = VARIANTS[name].config
    small = replace(
        variant, hidden_size=48, num_hidden_layers=2, initializer_range=0.2,
        feed_forward=replace(variant.feed_forward, intermediate_size=64),
    )  # fmt: skip
    return small.adapted(
        vocab_size=11, pad_token_id=1, hidden_dropout_prob=0.0, attention_dropout=0.0
    )


def trained(base: Bundle, task: Task, adapter: AdapterConfig) -> ObjectiveModel:
    """A model with an adapter, all of whose learning parameters moved."""
    torch.manual_seed(3)
    model = build_model(base, [task.build_objective(base.encoder_config)], task=task)
    adapt(model, adapter)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def outputs(model: ObjectiveModel) -> Tensor:
    """Scores of the head, or vectors of all tokens where there is none."""
    if not any(True for _ in model.objectives.parameters()):
        return model.encode(BATCH).hidden.detach()
    places = {"token_positions": torch.arange(IDS.numel()), "choices": torch.tensor([1, 1])}
    return next(iter(model.logits(BATCH | places).values())).detach()


def theirs(folder: Path, kind: type, labels: int) -> Tensor:
    """The same by peft, over transformers' class, from the base and the adapter's folder."""
    counts = {"num_labels": labels} if labels else {}
    base = kind.from_pretrained(folder / "base", **counts)  # type: ignore[attr-defined]
    plain = base.double().eval()
    model = PeftModel.from_pretrained(plain, folder / "made" / FOLDER).double().eval()
    ids = IDS[:, None] if kind is AutoModelForMultipleChoice else IDS
    made = model(input_ids=ids)
    if kind is AutoModelForQuestionAnswering:
        return torch.stack([made.start_logits, made.end_logits], -1).detach()
    return (made.last_hidden_state if kind is AutoModel else made.logits).detach()


def check_peft_agrees(
    folder: Path, name: str, task: Task, kind: type, adapter: AdapterConfig
) -> None:
    bare = tiny.bundle(folder / "base", tiny.tokenizer(), config_of(name), objectives=[])
    base = load_bundle(bare)
    base = replace(base, encoder_config=task.encoder_config(base.encoder_config))
    model = trained(base, task, adapter)
    about = About(task=task, lineage={"parent": base.digest})
    save_bundle(folder / "made", model, base.tokenizer, about, base="owner/base")
    wanted = outputs(model)
    plain = build_model(base, [task.build_objective(base.encoder_config)], task=task)
    unchanged = plain.double().eval().encode(BATCH).hidden
    assert not torch.allclose(model.encode(BATCH).hidden, unchanged, atol=1e-3)
    torch.testing.assert_close(
        theirs(folder, kind, len(task.labels)).reshape(wanted.shape), wanted, rtol=0, atol=1e-6
    )
    for bundle in (load_bundle(folder / "made"), merged(base, folder / "made" / FOLDER)):
        assert bundle.task is not None
        assert (bundle.task.name, bundle.task.labels) == (task.name, task.labels)
        same = build_model(bundle, [task.build_objective(bundle.encoder_config)], task=task)
        torch.testing.assert_close(outputs(same.double().eval()), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_peft_reads_the_adapter_of_every_family_and_answers_alike(
    name: str, tmp_path: Path
) -> None:
    task, kind = KINDS[0]
    check_peft_agrees(tmp_path, name, task, kind, AdapterConfig(rank=3, targets=(ALL,)))


@pytest.mark.parametrize("index", range(1, len(KINDS)))
def test_peft_reads_the_adapter_of_every_head_and_answers_alike(index: int, tmp_path: Path) -> None:
    task, kind = KINDS[index]
    adapter = AdapterConfig(rank=4, alpha=3, rank_stabilized=True)
    check_peft_agrees(tmp_path, "bert-tiny", task, kind, adapter)


def gradients(model: ObjectiveModel) -> dict[str, Tensor]:
    """Without dropout, which some families have in their heads."""
    part = model.eval()(BATCH | {"labels": torch.tensor([0, 2])})["classification"]
    assert part.sum is not None
    part.sum.backward()
    return {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_factors_have_the_gradient_that_follows_from_that_of_the_whole_weight(name: str) -> None:
    """dA = scale Bᵀ dW and dB = scale dW Aᵀ, in rows of the parts that are changed."""
    task = KINDS[0][0]
    config = task.encoder_config(config_of(name))
    model = tiny.model(config, task.build_objective)
    adapt(model, AdapterConfig(rank=3, alpha=6, targets=("all-linear",)))
    with torch.no_grad():
        for change in adapted_modules(model).values():
            change.lora_b.normal_()
    plain = tiny.model(config, task.build_objective).double()
    plain.load_state_dict(plain_state(model.double()))
    whole, learned = gradients(plain), gradients(model)
    changes = adapted_modules(model)
    assert {name for name in learned if "encoder.layers" in name} == {
        f"{name}.lora_{factor}" for name in changes for factor in "ab" if "layers" in name
    }
    for where, change in changes.items():
        slope = whole[f"{where}.weight"]
        thirds = zip(slope.chunk(len(change.parts)), change.factors(), strict=True)
        a, b = (torch.cat(each) for each in zip(*[
            (2 * factors[1].T @ part, 2 * part @ factors[0].T)
            for part, factors in thirds if factors is not None
        ], strict=True))  # fmt: skip
        torch.testing.assert_close(learned[f"{where}.lora_a"], a, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(learned[f"{where}.lora_b"], b, rtol=1e-4, atol=1e-6)


LOOP = LoopConfig(max_steps=4, precision="fp32")
ADAPTER = AdapterConfig(rank=3, dropout=0.3)


def started(folder: str = "") -> tuple[ObjectiveModel, torch.optim.Optimizer]:
    """A model with dropout and an adapter, from its start or from a checkpoint."""
    config = config_of("bert-tiny").adapted(hidden_dropout_prob=0.2)
    model = tiny.model(config, KINDS[0][0].build_objective)
    adapt(model, ADAPTER)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
    if (checkpoint := latest_checkpoint(folder)) is not None:
        load_weights(checkpoint, model, run_digest="run")
        load_optimizer(checkpoint, optimizer, run_digest="run")
    return model, optimizer


def run(
    model: ObjectiveModel, optimizer: torch.optim.Optimizer, start: int, end: int
) -> ObjectiveModel:
    batches = [[BATCH | {"labels": torch.tensor([0, 2])}]] * (end - start)
    loop = replace(LOOP, max_steps=end)
    for _ in training_steps(model, batches, optimizer, lambda _: 1e-2, loop, start=start):
        pass
    return model


def test_the_adapter_and_the_head_learn_alone_and_only_they_have_moments(tmp_path: Path) -> None:
    model, optimizer = started()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    run(model, optimizer, 0, 2)
    moved = {
        name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])
    }
    layers = [f"encoder.layers.{layer}.attention.qkv.lora_" for layer in (0, 1)]
    learns = (*layers, "encoder.pooler.", "objectives.")
    assert moved == {name for name in before if name.startswith(learns)}
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    assert held == len(optimizer.state_dict()["state"]) == len(moved)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = run(*started(), 0, 4)
    model, optimizer = started()
    run(model, optimizer, 0, 2)
    with CheckpointWriter(str(tmp_path), run_digest="run") as writer:
        writer.save(2, model, optimizer)
        writer.wait()
    resumed = run(*started(str(tmp_path)), 2, 4)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def slopes(sharded: bool = False) -> dict[str, Tensor]:
    """The gradient of six rows, of which every rank has its share."""
    rank, world = rank_of_world()
    config = config_of("bert-tiny")
    model = tiny.model(config, KINDS[0][0].build_objective)
    adapt(model, replace(ADAPTER, dropout=0.0))
    with torch.no_grad():
        for change in adapted_modules(model).values():
            change.lora_b.normal_(generator=torch.Generator().manual_seed(1))
    model.double()
    if sharded:
        shard(model)
    rows = range(rank, 6, world)
    batch = {
        "input_ids": torch.stack([IDS[row % 2].roll(row) for row in rows]),
        "token_type_ids": torch.zeros(len(rows), 7, dtype=torch.int64),
        "labels": torch.tensor([row % 3 for row in rows]),
    }
    trained = replicated(model)
    backward(trained, [batch], 0, LOOP)
    every = {name: weight.grad for name, weight in model.named_parameters()}
    return {name: whole_of(grad) for name, grad in every.items() if grad is not None}


def whole_of(gradient: Any) -> Tensor:
    return gradient.full_tensor() if is_part(gradient) else gradient


def slopes_of_rank() -> list[dict[str, Tensor]]:
    return [slopes(), slopes(sharded=True)]


@pytest.mark.guard
def test_the_number_of_workers_does_not_change_the_gradient(tmp_path: Path) -> None:
    alone = slopes()
    for copied, sharded in on_ranks(2, slopes_of_rank, tmp_path):
        for found in (copied, sharded):
            assert found.keys() == alone.keys()
            for name, slope in alone.items():
                torch.testing.assert_close(found[name], slope, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("adapter", "wanted"),
    [
        (
            AdapterConfig(rank=49),
            r"adapter.rank: wanted at most 48, the rank of bert\.enc.*, got 49",
        ),
        (AdapterConfig(targets=("queri",)), r"adapter.targets: wanted ends .*got 'queri'.*query"),
    ],
)
def test_an_adapter_that_does_not_fit_its_encoder_is_refused(
    adapter: AdapterConfig, wanted: str
) -> None:
    config = config_of("bert-tiny")
    with pytest.raises(ConfigError, match=wanted):
        check_adapter(config, adapter, KINDS[0][0].build_objective(config))


def test_an_adapter_beside_a_head_that_peft_cannot_save_is_refused() -> None:
    config = config_of("bert-tiny")
    with pytest.raises(ConfigError, match=r"adapter: wanted a task .* got the head mlm: leave"):
        check_adapter(config, AdapterConfig(), MaskedLanguageModeling(config))


def test_targets_are_ends_of_names_in_transformers() -> None:
    model = tiny.model(config_of("bert-tiny"), KINDS[0][0].build_objective)
    adapt(model, AdapterConfig(targets=("key", "attention.output.dense")))
    parts = {name: each.parts for name, each in adapted_modules(model.encoder.layers[0]).items()}
    assert parts == {"attention.qkv": (False, True, False), "attention.output": (True,)}


def test_an_adapter_is_merged_into_its_own_base_only(tmp_path: Path) -> None:
    task = KINDS[0][0]
    bundles = [
        load_bundle(tiny.bundle(tmp_path / str(seed), tiny.tokenizer(), config_of("bert-tiny"),
                                task=task, seed=seed))
        for seed in (0, 1)
    ]  # fmt: skip
    model = trained(bundles[0], task, AdapterConfig(rank=2))
    rows = np.array([5, 3], np.uint64)
    about = About(task=task, lineage={"parent": bundles[0].digest}, trained_rows=rows)
    save_bundle(tmp_path / "made", model, bundles[0].tokenizer, about, base="owner/base")
    folder = tmp_path / "made" / FOLDER
    assert merged(bundles[0], folder).trained_rows.tolist() == [3, 5]
    said = json.loads((folder / CONFIG).read_text())
    assert (said["base_model_name_or_path"], said["r"]) == ("owner/base", 2)
    assert said["modules_to_save"] == ["classifier", "pooler"]
    digest = bundles[0].digest[:12]
    with pytest.raises(FormatError, match=f"wanted the base that the .* {digest}, got a bundle"):
        merged(bundles[1], folder)
    newer = json.loads((folder / BASE).read_text()) | {"format_version": 2}
    (folder / BASE).write_text(json.dumps(newer))
    with pytest.raises(FormatError, match=r"base.json: wanted format_version 1 or older, got 2"):
        merged(bundles[0], folder)


def test_biases_learn_alone_if_the_weights_are_frozen() -> None:
    model = tiny.model(config_of("bert-tiny"), KINDS[0][0].build_objective)
    freeze(model, "weights", 0)
    learned = gradients(model)
    assert all(
        name.endswith("bias") or name.startswith(("encoder.pooler.", "objectives."))
        for name in learned
    )
    assert "encoder.layers.0.attention.qkv.bias" in learned
    assert "encoder.embeddings.norm.bias" in learned
    whole = gradients(tiny.model(config_of("bert-tiny"), KINDS[0][0].build_objective))
    for name, slope in learned.items():
        torch.testing.assert_close(slope, whole[name], rtol=1e-4, atol=1e-6)
    bare = config_of("modernbert-base")
    with pytest.raises(ConfigError, match=r"freeze: wanted an encoder with biases.*modernbert"):
        check_frozen(bare, "weights", 0, KINDS[0][0].build_objective(bare))


def test_an_adapter_costs_no_gradients_of_weights() -> None:
    model, _ = started()
    plain = tiny.model(config_of("bert-tiny"), KINDS[0][0].build_objective)
    batch = BATCH | {"labels": torch.tensor([0, 2])}
    flops = [each.flops(batch, np.array([7, 7])) for each in (model, plain)]
    assert flops[0] == pytest.approx(flops[1] * 2 / 3, rel=0.05)


@pytest.mark.parametrize(
    "settings", [{"freeze": "encoder"}, {"freeze_layers": 1}, {"from_scratch": True}]
)
def test_settings_that_contradict_an_adapter_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="adapter: wanted neither freeze nor freeze_layers"):
        FinetuneConfig(output="o", model="m", adapter=AdapterConfig(), **settings)
    with pytest.raises(ConfigError, match="adapter: wanted none, since a student changes as a wh"):
        DistillConfig(output="o", teacher="t", adapter=AdapterConfig())
