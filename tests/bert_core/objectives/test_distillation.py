"""A student and its teacher: losses as the papers write them, and what stays as it is."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bert_core.bundle.format import About, load_bundle
from bert_core.bundle.writing import save_bundle
from bert_core.errors import ConfigError
from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoder
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import Batch, LossPart, Objective, ObjectiveModel, soft_cross_entropy
from bert_core.objectives.classification import Classification, ProblemType
from bert_core.objectives.distillation import Distillation, fitting_map, with_layers
from bert_core.objectives.enhanced_mlm import EnhancedMaskedLanguageModeling
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.objectives.span import Span
from bert_core.tasks.text_classification import TextClassification
from tests import tiny

TOKENIZER = tiny.tokenizer(f"word{number}" for number in range(60))
ALL = {"soft": 5.0, "hard": 2.0, "cosine": 1.0, "embeddings": 0.5, "hidden": 3.0, "attention": 0.7}
LENGTHS = (9, 4, 12, 7)


def encoder_of(hidden: int, layers: int, dropout: float = 0.0) -> EncoderConfig:
    return tiny.encoder_config(
        TOKENIZER.vocab_size, hidden_size=hidden, num_hidden_layers=layers, dropout=dropout
    )


def pair_of(
    weights: Mapping[str, float] = ALL,
    *,
    width: int = 16,
    layers: int = 2,
    objective: type[Objective] = MaskedLanguageModeling,
    dropout: float = 0.0,
    layer_map: tuple[int, ...] = (),
) -> Distillation:
    """A student of a teacher with 4 layers of 32."""
    torch.manual_seed(0)
    own, its = encoder_of(width, layers, dropout), encoder_of(32, 4, dropout)
    student, teacher = (ObjectiveModel(one, [objective(one)]) for one in (own, its))
    return Distillation(student, teacher, weights, temperature=2.0, layer_map=layer_map)


def rows_of() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, TOKENIZER.vocab_size, (n,), generator=generator) for n in LENGTHS]


def batch_of(rows: list[Tensor], first: int = 0, *, packed: bool = False) -> Batch:
    """Rows from `first` on of all: two masked words in each, and where a span is."""
    lengths = torch.tensor([len(row) for row in rows])
    if packed:
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        starts, ids = offsets[:-1], torch.cat(rows)
        layout = {"input_ids": ids, "token_type_ids": ids * 0, "offsets": offsets}
    else:
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        starts = torch.arange(len(rows)) * ids.shape[1]
        layout = {"input_ids": ids, "token_type_ids": ids * 0, "attention_mask": mask}
    numbers = torch.arange(first, first + len(rows))
    return layout | {
        "mlm_positions": torch.stack([starts + 1, starts + lengths - 1], 1).flatten(),
        "mlm_labels": torch.stack([numbers + 7, numbers + 11], 1).flatten(),
        "start_positions": numbers % 3,
        "end_positions": numbers % 3 + 1,
        "labels": numbers % 2,
    }


def loss_of(model: Distillation, batches: list[Batch]) -> Tensor:
    """What the training loop minimises: means over all items, weighted and added."""
    counts = [model.counts(batch) for batch in batches]
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        for name, part in model(batch).items():
            count = sum(each[name] for each in counts)
            total = total + model.weights[name] * part.sum.double() / count
    return total


def gradient(model: Distillation) -> Tensor:
    found = [each.grad for each in model.parameters() if each.requires_grad]
    assert None not in found, "every trained parameter has a gradient, which DDP wants"
    return torch.cat([one.flatten() for one in found if one is not None])


def plain_softmax(scores: Tensor) -> list[float]:
    powers = [math.exp(float(score)) for score in scores]
    return [power / sum(powers) for power in powers]


def divergence(own: Tensor, its: Tensor, temperature: float) -> float:
    """T² Σ p log(p / q) of one item."""
    p, q = plain_softmax(its / temperature), plain_softmax(own / temperature)
    return temperature**2 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_soft_targets_are_the_divergence_at_a_temperature() -> None:
    own, its = torch.randn(5, 7), torch.randn(5, 7)
    wanted = sum(divergence(a, b, 3.0) for a, b in zip(own, its, strict=True))
    part = soft_cross_entropy(own, its, 3.0)
    assert part.sum.item() == pytest.approx(wanted, rel=1e-5)
    assert part.count == 5
    # The gradient is that of Hinton's cross-entropy with the teacher's shares.
    own.requires_grad_(True)
    soft_cross_entropy(own, its, 3.0).sum.backward()
    shares = (its / 3).softmax(-1)
    (other,) = torch.autograd.grad(-9 * (shares * (own / 3).log_softmax(-1)).sum(), own)
    torch.testing.assert_close(own.grad, other)


def test_an_excluded_class_changes_nothing() -> None:
    own, its = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7)
    barred = torch.zeros(5, 7, dtype=torch.bool)
    barred[1, 3:] = True
    part = soft_cross_entropy(
        own.masked_fill(barred, float("-inf")), its.masked_fill(barred, float("-inf")), 2.0
    )
    wanted = sum(
        divergence(a[~out].detach(), b[~out], 2.0)
        for a, b, out in zip(own, its, barred, strict=True)
    )
    assert part.sum.item() == pytest.approx(wanted, rel=1e-5)
    part.sum.backward()
    assert own.grad is not None
    assert own.grad.isfinite().all()
    assert not own.grad[barred].any()


@pytest.mark.parametrize("problem_type", ["regression", "multi_label_classification"])
def test_numbers_and_several_labels_have_their_own_way(
    problem_type: ProblemType,
) -> None:
    labels = 1 if problem_type == "regression" else 3
    objective = Classification(encoder_of(16, 1), labels, problem_type=problem_type)
    own, its = torch.randn(4, labels), torch.randn(4, labels)
    part = objective.soft_part(own, its, {}, 2.0)
    wanted = 0.0
    for row, other in zip(own, its, strict=True):
        if problem_type == "regression":
            wanted += float(row[0] - other[0]) ** 2
            continue
        for a, b in zip(row, other, strict=True):
            q, p = (1 / (1 + math.exp(-float(one) / 2)) for one in (a, b))
            wanted += 4 * (p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))) / 3
    assert part.sum.item() == pytest.approx(wanted, rel=1e-4)
    assert part.count == 4


def seen(model: ObjectiveModel, row: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Vectors before and after every layer, and scores before every softmax, of one row alone."""
    encoded = model.encoder(row[None], row[None] * 0, all_layers=True, all_scores=True)
    return [one[0] for one in encoded.layers], [one[0][0] for one in encoded.scores]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", [16, 32])
@torch.no_grad()
def test_compared_token_relations_are_the_papers(width: int, packed: bool) -> None:
    model = pair_of(width=width).eval()
    parts = model(batch_of(rows_of(), packed=packed))
    wanted = dict.fromkeys(("cosine", "embeddings", "hidden", "attention"), 0.0)

    def fitted(name: str, vector: Tensor) -> Tensor:
        return model.projections[name](vector) if width != 32 else vector

    for row in rows_of():
        own, own_scores = seen(model, row)
        its, its_scores = seen(model.teacher, row)
        for token in range(len(row)):
            a, b = fitted("hidden", own[-1][token]), its[-1][token]
            wanted["cosine"] += 1 - float(a @ b / (a.norm() * b.norm()))
            error = fitted("embeddings", own[0][token]) - its[0][token]
            wanted["embeddings"] += float(error.square().mean())
            for layer, mapped in ((1, 2), (2, 4)):  # g(m) = m N / M
                error = fitted("hidden", own[layer][token]) - its[mapped][token]
                wanted["hidden"] += float(error.square().mean())
                for head in range(4):
                    error = own_scores[layer - 1][head, token] - its_scores[mapped - 1][head, token]
                    wanted["attention"] += float(error.square().mean()) / 4
    for name, value in wanted.items():
        assert parts[name].sum.item() == pytest.approx(value, rel=1e-4), name
        assert parts[name].count == sum(LENGTHS)
    assert model.projections.keys() == ({"embeddings", "hidden"} if width != 32 else set())


@torch.no_grad()
def test_scores_are_those_that_each_gives_alone() -> None:
    model, batch = pair_of().eval(), batch_of(rows_of())
    parts = model(batch)
    own, its = model.logits(batch)["mlm"], model.teacher.logits(batch)["mlm"]
    wanted = sum(divergence(a, b, 2.0) for a, b in zip(own, its, strict=True))
    assert parts["soft"].sum.item() == pytest.approx(wanted, rel=1e-4)
    plain = ObjectiveModel.forward(model, batch)["mlm"]
    assert isinstance(plain, LossPart)
    torch.testing.assert_close(parts["mlm"].sum, plain.sum)
    assert {name: part.count for name, part in parts.items()} == model.counts(batch)


@pytest.mark.parametrize("weights", [ALL, {"soft": 1.0}, {"soft": 1.0, "hard": 1.0}])
@pytest.mark.parametrize("objective", [MaskedLanguageModeling, Span])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_micro_batch_does_not_change_the_gradient(
    weights: dict[str, float], objective: type[Objective], dtype: torch.dtype, most: float
) -> None:
    rows, gradients = rows_of(), []
    for batches in (
        [batch_of(rows)],
        [batch_of(rows[:1]), batch_of(rows[1:], 1)],
        [batch_of(rows[:3], packed=True), batch_of(rows[3:], 3)],
    ):
        model = pair_of(weights, objective=objective).to(dtype)
        loss_of(model, batches).backward()
        gradients.append(gradient(model).double())
    whole = gradients[0]
    assert whole.norm() > 0.01
    for parts in gradients[1:]:
        assert (parts - whole).norm() / whole.norm() < most


@pytest.mark.parametrize("weights", [{"soft": 1.0}, {"hidden": 1.0}, {"soft": 1.0, "hard": 1.0}])
def test_the_operations_of_both_models_are_counted(weights: dict[str, float]) -> None:
    model = pair_of(weights, width=32)
    batch = batch_of([row.repeat(4)[:16] for row in rows_of()])
    # The fused kernel of the CPU is not counted.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss_of(model, [batch]).backward()
    lengths = np.full(len(LENGTHS), 16)
    assert model.flops(batch, lengths) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_the_teacher_stays_as_it_is_and_belongs_to_nothing_that_is_saved() -> None:
    model = pair_of(dropout=0.5)
    model.train()
    before = {name: value.clone() for name, value in model.teacher.state_dict().items()}
    batch = batch_of(rows_of())
    answers = [model.teacher.logits(batch)["mlm"] for _ in range(2)]
    assert torch.equal(*answers)  # it drops nothing
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, [batch]).backward()
    optimizer.step()
    after = model.teacher.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(each.grad is None for each in model.teacher.parameters())
    assert not any("teacher" in name for name, _ in model.named_parameters())
    own = {name.split(".")[0] for name in model.state_dict()}
    assert own == {"encoder", "objectives", "projections"}
    assert next(model.double().teacher.parameters()).dtype == torch.float64


def test_a_head_without_an_objective_stays_unchanged() -> None:
    model = pair_of({"hidden": 1.0, "attention": 1.0, "embeddings": 1.0})
    parts = model(batch_of(rows_of()))
    assert parts.keys() == {"hidden", "attention", "embeddings"}
    torch.stack([part.sum for part in parts.values()]).sum().backward()
    assert gradient(model).any()
    assert not any(each.requires_grad for each in model.objectives.parameters())


def test_a_student_identical_to_its_teacher_has_zero_loss() -> None:
    model = pair_of(ALL | {"hard": 0.0}, width=32, layers=4)
    model.load_state_dict(model.teacher.state_dict())
    for name, part in model(batch_of(rows_of())).items():
        assert part.sum.item() == pytest.approx(0.0, abs=1e-3), name


def test_a_layer_map_says_which_layers_are_compared() -> None:
    weights, batch = {"hidden": 1.0}, batch_of(rows_of())
    usual = pair_of(weights)(batch)["hidden"].sum
    assert torch.equal(usual, pair_of(weights, layer_map=(1, 3))(batch)["hidden"].sum)
    assert usual != pair_of(weights, layer_map=(0, 3))(batch)["hidden"].sum


@pytest.mark.parametrize(
    ("layers", "given", "wanted"),
    [
        (3, (), "wanted a map, as the teacher's 4 layers are no multiple of the student's 3"),
        (2, (1,), r"layer of the teacher, 0 to 3, for each of the student's 2 layers, got \[1\]"),
        (2, (1, 4), r"0 to 3, for each .*, got \[1, 4\]: correct it, or remove it"),
    ],
)
def test_a_layer_map_that_does_not_fit_is_refused(
    layers: int, given: tuple[int, ...], wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted):
        fitting_map(layers, 4, given)


def test_attention_needs_as_many_heads() -> None:
    own = replace(encoder_of(16, 2), attention=replace(encoder_of(16, 2).attention, num_heads=2))
    student, teacher = ObjectiveModel(own, []), ObjectiveModel(encoder_of(32, 4), [])
    with pytest.raises(ConfigError, match=r"a student with 4 heads per layer, .* got 2"):
        Distillation(student, teacher, {"hidden": 1.0, "attention": 1.0})


def test_a_student_of_chosen_layers_has_exactly_their_weights() -> None:
    torch.manual_seed(0)
    teacher = Encoder(encoder_of(16, 4), pooler=False)
    state = {f"encoder.{name}": value for name, value in teacher.state_dict().items()}
    config, chosen = with_layers(teacher.config, state, [0, 3])
    student = Encoder(config, pooler=False)
    student.load_state_dict({name.removeprefix("encoder."): chosen[name] for name in chosen})
    rows = rows_of()[0][None]
    hidden = teacher(rows, rows * 0, all_layers=True).layers[0]
    layout = teacher(rows, rows * 0).rows
    for layer in (0, 3):
        hidden = teacher.layers[layer](hidden, layout, None, None)
    assert torch.equal(student(rows, rows * 0).hidden, hidden)


@pytest.mark.parametrize(
    "variant",
    ["albert-base", "modernbert-base", "deberta-v3-xsmall", "mpnet-base", "electra-small"],
)
def test_every_family_gives_layers(variant: str) -> None:
    config = VARIANTS[variant].config
    with torch.device("meta"):
        state = {f"encoder.{name}": value for name, value in Encoder(config).state_dict().items()}
    student, chosen = with_layers(config, state, range(0, config.num_hidden_layers, 2))
    with torch.device("meta"):
        wanted = {f"encoder.{name}" for name in Encoder(student).state_dict()}
    assert chosen.keys() == wanted
    assert student.num_hidden_layers == config.num_hidden_layers // 2


def test_missing_or_mismatched_layers_are_refused() -> None:
    config = VARIANTS["modernbert-base"].config
    with torch.device("meta"):
        state = {f"encoder.{name}": value for name, value in Encoder(config).state_dict().items()}
    for layers in ([1, 2], [0, 3]):  # the first has no norm, and looks at whole rows
        with pytest.raises(ConfigError, match="wanted layers of the same kind as in their"):
            with_layers(config, state, layers)
    with pytest.raises(ConfigError, match=r"wanted layers of the model, 0 to 21, got \[0, 22\]"):
        with_layers(config, state, [0, 22])


def test_a_teacher_that_fills_masks_by_its_decoder_is_asked_so() -> None:
    torch.manual_seed(0)
    config = VARIANTS["deberta-base"].config
    its = replace(
        config,
        hidden_size=32,
        num_hidden_layers=2,
        attention=replace(config.attention, num_heads=4),
    ).adapted(vocab_size=TOKENIZER.vocab_size, pad_token_id=0)
    teacher = ObjectiveModel(its, [EnhancedMaskedLanguageModeling(its)])
    own = encoder_of(16, 2)
    for weights in ({"soft": 1.0}, {"soft": 1.0, "cosine": 1.0}):
        student = ObjectiveModel(own, [MaskedLanguageModeling(own)])
        batch = batch_of(rows_of())
        part = Distillation(student, teacher, weights)(batch)["soft"]
        wanted = soft_cross_entropy(
            student.logits(batch)["mlm"], teacher.logits(batch)["mlm"].detach(), 1.0
        )
        torch.testing.assert_close(part.sum, wanted.sum)


def test_a_bundle_has_the_student_alone(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    task = TextClassification(["a", "b"])
    models = [
        ObjectiveModel(config, [task.build_objective(config)])
        for config in (encoder_of(16, 2), encoder_of(32, 4))
    ]
    model = Distillation(models[0], models[1], ALL).eval()
    save_bundle(tmp_path / "bundle", model, TOKENIZER, About(task=task))
    assert not any("projections" in name for name in load_bundle(tmp_path / "bundle").state)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bundle").eval()
    row = rows_of()[0][None]
    ours = model.logits({"input_ids": row, "token_type_ids": row * 0})["classification"]
    torch.testing.assert_close(theirs(row).logits, ours, atol=1e-5, rtol=1e-5)
