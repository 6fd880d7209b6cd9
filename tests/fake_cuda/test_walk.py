"""Every branch for CUDA, walked without a GPU: devices, dtypes and shapes. `make fake-cuda`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import distributed as dist

from bert_core.batches import RankBatches, ShardSource, WindowSource, pack, pad
from bert_core.data.order import GlobalOrder
from bert_core.data.ragged import offsets_of
from bert_core.data.shards import ShardRows
from bert_core.data.windows import Window
from bert_core.inference.inspection import attention, word_uses
from bert_core.inference.predictor import Predictor
from bert_core.model.attention import packing
from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoder
from bert_core.model.layout import Padded
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import ObjectiveModel
from bert_core.objectives.catalog import PRETRAINING
from bert_core.objectives.distillation import MATCHED, Distillation
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.tasks.base import Kind, Task
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.fill_mask import FillMask
from bert_core.tasks.text_classification import TextClassification
from bert_core.tasks.token_classification import TokenClassification
from bert_core.torch_scores import TorchBackend
from bert_core.train.checkpoint import (
    CheckpointWriter,
    latest_checkpoint,
    load_optimizer,
    load_weights,
)
from bert_core.train.config import LoopConfig, OptimizerConfig
from bert_core.train.loop import evaluate, training_steps
from bert_core.train.optim import build_optimizer
from bert_core.train.parallel import shard
from bert_core.train.words import train_read_words
from tests import tiny
from tests.labelled_rows import EVERY_KIND, EVERY_TRAINED_KIND, rows_of

if TYPE_CHECKING:
    from tests.fake_cuda.fake_gpu import FakeGpu

pytestmark = pytest.mark.fake_cuda

CUDA = torch.device("cuda", 0)
VOCABULARY = 1000
LONGEST = 200
LAYOUTS = {"packed": 0.0, "padded": 1.0}
PRECISIONS = ("bf16", "fp32")


@pytest.fixture
def gpu() -> Iterator["FakeGpu"]:
    idle = torch.cuda.is_available() and "idle" in torch.cuda.get_device_name()
    if not idle:
        pytest.skip("needs torch's build for CUDA and the GPU of idle_gpu.c: `make fake-cuda`")
    from tests.fake_cuda.fake_gpu import FakeGpu  # here: it imports seconds of torch

    # cuDNN would ask the device itself; without it, torch has the same layers.
    with torch.backends.cudnn.flags(enabled=False), FakeGpu() as entered:
        yield entered


def adapted(config: EncoderConfig, vocab_size: int = VOCABULARY, **changes: Any) -> EncoderConfig:
    """Three layers, so that a local one is among ModernBERT's, and no dropout in attention, which
    the kernel for packed rows does not have."""
    pad_id = min(1, config.embeddings.pad_token_id)
    smaller = config.adapted(
        vocab_size=vocab_size, pad_token_id=pad_id, **{"attention_dropout": 0.0, **changes}
    )
    return replace(smaller, num_hidden_layers=3)


def model_of(config: EncoderConfig, *builds: tiny.Build) -> ObjectiveModel:
    """A model on the GPU; weights have no numbers there, and need none here."""
    with torch.device("meta"):
        model = ObjectiveModel(config, [build(config) for build in builds])
    return model.to(CUDA)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_computes_vectors_and_gradients(
    gpu: "FakeGpu", name: str, layout: str, precision: str
) -> None:
    config = adapted(VARIANTS[name].config)
    with torch.device("meta"):
        encoder = Encoder(config)
    encoder.to(CUDA)
    rows = [np.arange(6, 6 + length) for length in (5, 130, 1, 70)]
    batch = pack(rows) if layout == "packed" else pad(rows, config.embeddings.pad_token_id)
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        encoded = encoder(**{key: value.to(CUDA) for key, value in batch.items()})
    assert encoded.hidden.device == CUDA
    assert encoded.hidden.shape == (*batch["input_ids"].shape, config.hidden_size)
    (encoded.hidden.float().sum() + encoded.pooled.float().sum()).backward()
    without = [key for key, weight in encoder.named_parameters() if weight.grad is None]
    assert without == []
    if layout == "packed":
        by_kernel = packing(config, CUDA, precision) == 0.0
        assert ("torch_attn::_varlen_attn" in gpu.seen) == by_kernel


def shard_rows() -> ShardRows:
    """Rows of unlike lengths, with masked positions that are no special tokens and labels of every
    pretraining objective."""
    rng = np.random.default_rng(0)
    count = 12
    lengths, picks = rng.integers(20, LONGEST, count), rng.integers(1, 6, count)
    positions = [
        np.sort(1 + rng.permutation(n - 2)[:k]) for n, k in zip(lengths, picks, strict=True)
    ]
    return ShardRows(
        input_ids=rng.integers(6, VOCABULARY, lengths.sum()),
        offsets=offsets_of(lengths),
        segment_b_start=lengths // 2,
        labels={
            name: rng.integers(0, 2, count).astype(np.uint8)
            for name in ("next_sentence_label", "sentence_order_label")
        },
        masked_positions=np.concatenate(positions),
        masked_labels=rng.integers(6, VOCABULARY, picks.sum()),
        masked_offsets=offsets_of(picks),
    )


ROWS = shard_rows()


def pretraining_batches(packed_from: float, rank: int = 0, world_size: int = 1) -> RankBatches:
    source = ShardSource(lambda _: ROWS, pad_id=0, packed_from=packed_from)
    return RankBatches(source, GlobalOrder([len(ROWS)], seed=0), 8, 400, rank, world_size)


def walk(
    model: ObjectiveModel,
    batches: RankBatches,
    precision: Any,
    *,
    optimizer: str = "adamw",
    steps: int = 2,
    **loop: Any,
) -> None:
    """Training steps with clipping, then an evaluation."""
    config = LoopConfig(max_steps=steps, precision=precision, **loop)
    settings = OptimizerConfig(name=optimizer, max_grad_norm=0.5)  # type: ignore[arg-type]
    taken = training_steps(
        model,
        batches.from_step(0),
        build_optimizer(model, settings),
        lambda _: 1e-4,
        config,
        max_grad_norm=settings.max_grad_norm,
    )
    last = [step.last for step in taken]
    assert last == [False] * (steps - 1) + [True]
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert all(weight.device == CUDA and weight.grad is not None for weight in trained)
    assert evaluate(model, batches.once(), config)["loss"] > 0


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PRETRAINING)
def test_every_objective_of_pretraining_trains(
    gpu: "FakeGpu", name: str, layout: str, precision: str
) -> None:
    variant = "deberta-v3-tiny" if name in ("emd_mlm", "rtd") else "bert-tiny"
    config = adapted(VARIANTS[variant].config)
    walk(model_of(config, PRETRAINING[name]), pretraining_batches(LAYOUTS[layout]), precision)


@pytest.mark.parametrize("family", ["bert-tiny", "modernbert-base", "mpnet-base", "albert-base"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_that_are_computed_again_train(gpu: "FakeGpu", family: str, layout: str) -> None:
    model = model_of(adapted(VARIANTS[family].config), PRETRAINING["mlm"])
    walk(model, pretraining_batches(LAYOUTS[layout]), "bf16", activation_checkpointing=True)


def test_lamb_trains(gpu: "FakeGpu") -> None:
    model = model_of(adapted(VARIANTS["bert-tiny"].config), PRETRAINING["mlm"])
    walk(model, pretraining_batches(0.0), "bf16", optimizer="lamb")


def test_dropout_in_attention_trains(gpu: "FakeGpu") -> None:
    config = adapted(VARIANTS["bert-tiny"].config, attention_dropout=0.1)
    walk(model_of(config, PRETRAINING["mlm"]), pretraining_batches(0.0), "bf16")


@pytest.fixture(params=[1, 4])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A group of so many ranks, of which this process is the first and the others say nothing. It
    is taken for NCCL's."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize(("optimizer", "again"), [("adamw", True), ("lamb", False)])
@pytest.mark.parametrize("name", ["mlm nsp", "rtd"])
def test_sharded_weights_train(
    gpu: "FakeGpu", ranks: int, name: str, optimizer: str, again: bool
) -> None:
    variant = "deberta-v3-tiny" if name == "rtd" else "bert-tiny"
    model = model_of(
        adapted(VARIANTS[variant].config), *(PRETRAINING[part] for part in name.split())
    )
    shard(model)
    batches = pretraining_batches(0.0, world_size=ranks)
    walk(model, batches, "bf16", optimizer=optimizer, activation_checkpointing=again)


MASKED = [word for kind in FillMask.kinds for row in kind.rows for word in row["words"]]
TOKENIZER = tiny.tokenizer(dict.fromkeys([*tiny.WORDS, *MASKED, *tiny.pieces(tiny.ALPHABET)]))
FEATURE_BASED = replace(TokenClassification.kinds[0], options={"feature_based": True})


def task_of(kind_of_task: type[Task], kind: Kind) -> Task:
    return kind_of_task.from_rows(rows_of(kind, 8), kind_of_task.options_of(kind.options))


def encoder_of(task: Task) -> EncoderConfig:
    """Heads of 8, as the kernel for packed rows needs them."""
    config = tiny.encoder_config(TOKENIZER.vocab_size, max_position_embeddings=64)
    return task.encoder_config(config.adapted(attention_dropout=0.0))


def windows_of(task: Task, kind: Kind, *, labelled: bool) -> list[Window]:
    rows = rows_of(kind, 8)
    return task.encode(rows, TOKENIZER, 64, labelled=labelled, parameters=task.parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kind_of_task", "kind"),
    [*EVERY_TRAINED_KIND, pytest.param(TokenClassification, FEATURE_BASED, id="feature-based")],
)
def test_every_task_trains(
    gpu: "FakeGpu", kind_of_task: type[Task], kind: Kind, layout: str
) -> None:
    task = task_of(kind_of_task, kind)
    model = tiny.model(encoder_of(task), task.build_objective)
    windows = windows_of(task, kind, labelled=True)
    train_read_words(model, windows, TOKENIZER.pad_id)
    source = WindowSource(windows, TOKENIZER.pad_id, LAYOUTS[layout])
    order = GlobalOrder([len(windows)], seed=0)
    walk(
        model.to(CUDA),
        RankBatches(source, order, 8, 200, joint=task.joint),
        "bf16",
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind_of_task", "kind"), EVERY_KIND)
def test_every_task_answers(
    gpu: "FakeGpu", kind_of_task: type[Task], kind: Kind, layout: str, precision: Any
) -> None:
    task = task_of(kind_of_task, kind)
    model = tiny.model(encoder_of(task), task.build_objective).to(CUDA).eval()
    backend = TorchBackend(model, LAYOUTS[layout], precision=precision)
    windows = windows_of(task, kind, labelled=False)
    scores = backend.scores(windows, TOKENIZER.pad_id)
    assert len(scores) == len(windows)
    assert all(score.dtype == np.float32 for score in scores)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_bundle_answers_and_shows_its_attention(
    gpu: "FakeGpu", precision: Any, tmp_path: Path
) -> None:
    folder = tiny.bundle(tmp_path / "bundle", TOKENIZER, task=FeatureExtraction())
    predictor = Predictor(folder, device="cuda", precision=precision)
    model = predictor.model
    assert next(model.parameters()).device == CUDA
    assert len(predictor.predict(["the sea is blue", "a tree"])) == 2
    shown = attention(model, TOKENIZER, "the sea is blue")
    assert shown.weights.shape == (2, 4, 6, 6)
    assert len(word_uses(model, TOKENIZER, "sea", ["the sea", "a sea is a sea"]).uses) == 3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compared", [["hard", "soft"], ["soft", *MATCHED]])
def test_a_student_learns_from_its_teacher(
    gpu: "FakeGpu", compared: list[str], layout: str
) -> None:
    [kind, *_] = TextClassification.kinds
    task = task_of(TextClassification, kind)
    config = encoder_of(task)
    wide = replace(config, hidden_size=64, num_hidden_layers=4)
    student, teacher = (tiny.model(each, task.build_objective) for each in (config, wide))
    model = Distillation(student, teacher, dict.fromkeys(compared, 1.0), temperature=2.0)
    source = WindowSource(windows_of(task, kind, labelled=True), TOKENIZER.pad_id, LAYOUTS[layout])
    walk(model.to(CUDA), RankBatches(source, GlobalOrder([8], seed=0), 8, 200), "bf16")


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_checkpoint_returns_to_the_gpu(gpu: "FakeGpu", optimizer: Any, tmp_path: Path) -> None:
    settings, loop = OptimizerConfig(name=optimizer), LoopConfig(max_steps=2)
    batches = pretraining_batches(0.0)

    def start() -> tuple[ObjectiveModel, torch.optim.Optimizer]:
        config = tiny.encoder_config(VOCABULARY, max_position_embeddings=LONGEST)
        model = tiny.model(config, MaskedLanguageModeling).to(CUDA)
        return model, build_optimizer(model, settings)

    def go_on(model: ObjectiveModel, made: torch.optim.Optimizer, start: int) -> int:
        steps = training_steps(
            model, batches.from_step(start), made, lambda _: 1e-4, loop, start=start
        )
        return next(steps).index

    model, made = start()
    with CheckpointWriter(str(tmp_path), run_digest="run") as writer:
        writer.save(go_on(model, made, 0), model, made)
    checkpoint = latest_checkpoint(str(tmp_path))
    assert checkpoint is not None
    model, made = start()
    load_weights(checkpoint, model, run_digest="run")
    load_optimizer(checkpoint, made, run_digest="run")
    assert go_on(model, made, checkpoint.step) == 2
    assert all(
        value.device == CUDA
        for state in made.state.values()
        for name, value in state.items()
        if name != "step" or optimizer == "adamw"
    )


def mixes_devices() -> None:
    torch.zeros(3, device=CUDA) + torch.zeros(3)


def indexes_from_another_device() -> None:
    torch.zeros(3)[torch.zeros(2, dtype=torch.long, device=CUDA)]


def mixes_dtypes() -> None:
    torch.zeros(3, 3, device=CUDA) @ torch.zeros(3, 3, device=CUDA, dtype=torch.bfloat16)


def packs_in_fp32() -> None:
    from torch.nn.attention.varlen import varlen_attn  # here: it imports torch._dynamo

    qkv, starts = torch.zeros(8, 4, 16, device=CUDA), torch.tensor([0, 8], device=CUDA)
    varlen_attn(qkv, qkv, qkv, starts.int(), starts.int(), 8, 8)


def packs_with_wide_offsets() -> None:
    from torch.nn.attention.varlen import varlen_attn  # here: it imports torch._dynamo

    qkv = torch.zeros(8, 4, 16, device=CUDA, dtype=torch.bfloat16)
    starts = torch.tensor([0, 8], device=CUDA)
    varlen_attn(qkv, qkv, qkv, starts, starts, 8, 8)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (mixes_devices, "two devices, cuda:0 and cpu"),
        (indexes_from_another_device, "it is on the GPU"),
        (mixes_dtypes, "wanted operands of one dtype"),
        (packs_in_fp32, "wanted half precision"),
        (packs_with_wide_offsets, "wanted offsets of int32"),
    ],
)
def test_requests_that_a_gpu_refuses_are_refused(
    gpu: "FakeGpu", wrong: Callable[[], None], told: str
) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=told):
        wrong()


def test_sums_over_ranks_on_the_cpu_are_refused(gpu: "FakeGpu", ranks: int) -> None:
    with pytest.raises(AssertionError, match="which NCCL sums"):
        dist.all_reduce(torch.zeros(3))


def test_positions_on_the_cpu_in_the_model_are_found(
    gpu: "FakeGpu", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault as it could be made: places without a device."""
    monkeypatch.setattr(Padded, "positions", lambda self: torch.arange(self.longest))
    model = model_of(adapted(VARIANTS["bert-tiny"].config), PRETRAINING["mlm"])
    with pytest.raises(RuntimeError, match="two devices"):
        walk(model, pretraining_batches(1.0), "bf16")
