"""A student that learns from a teacher's scores and intermediate values.

DistilBERT (Sanh et al. 2019) compares scores and last-layer vectors; TinyBERT (Jiao et al. 2019)
compares embeddings, layer outputs and attention scores before the softmax. Weights by name choose
which of these count, and how much. Only real tokens are compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn import functional

from bert_core.errors import ConfigError
from bert_core.model.config import EncoderConfig, RotaryAttentionConfig
from bert_core.model.dot_product import Scores
from bert_core.model.encoder import Encoded, Encoder
from bert_core.model.layers import initialise, without_values
from bert_core.model.layout import RowLayout, gather_tokens
from bert_core.model.size import training_flops
from bert_core.objectives.base import Batch, JointPart, LossPart, ObjectiveModel, widened

HARD, SOFT = "hard", "soft"
COSINE, EMBEDDINGS, HIDDEN, ATTENTION = "cosine", "embeddings", "hidden", "attention"
MATCHED = (COSINE, EMBEDDINGS, HIDDEN, ATTENTION)
"""The parts of the loss whose items are tokens."""
_LAYERS = "encoder.layers."


class Distillation(ObjectiveModel):
    """A student, with a frozen teacher that runs once per batch.

    The teacher is not a submodule: it is not trained, saved or sharded, but moves to other devices
    with the student. If the teacher's vectors have another width, the student's pass through a
    linear layer that is trained with the student but saved in no bundle: one for all layers, one
    for the embeddings (TinyBERT, section 3.1).
    """

    teacher: ObjectiveModel

    def __init__(
        self,
        student: ObjectiveModel,
        teacher: ObjectiveModel,
        weights: Mapping[str, float],
        *,
        temperature: float = 1.0,
        layer_map: Sequence[int] = (),
    ) -> None:
        """Connect a student and its teacher.

        Args:
            student: the model to train, with one objective or none; its head is frozen if neither
                labels nor the teacher's scores count.
            teacher: must have the same objective if scores are compared.
            weights: weight of each part, by name; `hard` is the student's own objective. Parts with
                weight 0 are not computed.
            temperature: of the softmax over scores (`Objective.soft_part`).
            layer_map: for each layer of the student, the teacher's layer to compare it with, from
                0; if empty, TinyBERT's map (`fitting_map`).
        Raises: ConfigError if the two cannot be compared this way.
        """
        nn.Module.__init__(self)  # reuse the student's modules instead of building new ones
        self.encoder, self.objectives = student.encoder, student.objectives
        self.frozen = student.frozen
        object.__setattr__(self, "teacher", teacher.eval().requires_grad_(False))
        counted = {name: weight for name, weight in weights.items() if weight}
        self._answers = HARD in counted or SOFT in counted
        self._matched = [name for name in MATCHED if name in counted]
        self._temperature = temperature
        for objective in self._parts if HARD in counted else ():
            counted = {objective.key: counted.pop(HARD)} | counted
        self.weights = counted
        if self._matched:
            self.frozen = False
            self.encoder.requires_grad_(True)
        if not self._answers:
            self.objectives.requires_grad_(False)
            if self.encoder.pooler is not None:
                self.encoder.pooler.requires_grad_(False)
        ours, theirs = self.encoder.config, teacher.encoder.config
        self._layer_map: Sequence[int] = ()
        if {HIDDEN, ATTENTION} & counted.keys():
            self._layer_map = fitting_map(
                ours.num_hidden_layers, theirs.num_hidden_layers, tuple(layer_map)
            )
        if ATTENTION in counted and ours.attention.num_heads != theirs.attention.num_heads:
            raise ConfigError(
                f"losses.attention: wanted a student with {theirs.attention.num_heads} heads per "
                f"layer, as its teacher has, got {ours.attention.num_heads}: use another student, "
                "or set losses.attention = 0"
            )
        self.projections = nn.ModuleDict(
            {
                name: nn.Linear(ours.hidden_size, theirs.hidden_size, bias=False)
                for name, parts in ((EMBEDDINGS, {EMBEDDINGS}), (HIDDEN, {COSINE, HIDDEN}))
                if parts & counted.keys() and ours.hidden_size != theirs.hidden_size
            }
        )
        initialise(self.projections, ours)

    def _apply(self, fn: Any, recurse: bool = True) -> "Distillation":
        self.teacher._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def forward(self, batch: Batch) -> dict[str, LossPart | JointPart]:
        """Return the parts that have a weight, by name."""
        with torch.no_grad():
            teacher = self._compared(self.teacher, batch)
        student = self._compared(self, batch)
        parts: dict[str, LossPart | JointPart] = dict(self._score_parts(student, teacher, batch))
        if self._matched:
            tokens = _real_tokens(batch)
            for name in self._matched:
                errors = torch.stack(list(self._errors(name, student, teacher, batch)))
                parts[name] = LossPart(errors.sum(), tokens, None)
        return parts

    @property
    def chooses(self) -> dict[str, bool]:
        hard = super().chooses
        return {name: hard.get(name, name == SOFT and any(hard.values())) for name in self.weights}

    def counts(self, batch: Batch) -> dict[str, int]:
        items = next(iter(super().counts(batch).values()), 0)
        tokens = _real_tokens(batch) if self._matched else 0
        return {name: tokens if name in MATCHED else items for name in self.weights}

    def divisors(self, batch: Batch) -> dict[str, float]:
        hard = super().divisors(batch)
        return {name: hard.get(name, float(items)) for name, items in self.counts(batch).items()}

    @property
    def joint(self) -> bool:
        return self._answers and super().joint

    @property
    def reads_words(self) -> bool:
        return self._answers and super().reads_words

    def outputs(self, batch: Batch) -> int | None:
        return None if self._matched else super().outputs(batch)

    def flops(self, batch: Batch, lengths: Integer[np.ndarray, "rows"]) -> int:
        """Return the FLOPs of the student, and of the teacher's forward pass."""
        teacher = self.teacher
        outputs = None if self._matched else teacher.outputs(batch)
        passed = training_flops(teacher.encoder.config, lengths, outputs=outputs)
        passed += 6 * sum(part.item_weights * part.counts(batch) for part in teacher._parts)
        passed += sum(part.flops(batch, lengths) for part in teacher._parts)
        return super().flops(batch, lengths) + passed // 3

    def _compared(self, model: ObjectiveModel, batch: Batch) -> Encoded:
        """Return those of a model's outputs for the batch that are compared."""
        places = None
        if self._answers and not self._matched:
            places = model._parts[0].places(batch)
        layers = bool({EMBEDDINGS, HIDDEN} & self.weights.keys())
        return model.encode(
            batch,
            places,
            all_layers=layers or any(part.reads_layers for part in model._parts),
            all_scores=ATTENTION in self.weights,
        )

    def _score_parts(
        self, student: Encoded, teacher: Encoded, batch: Batch
    ) -> Iterator[tuple[str, LossPart | JointPart]]:
        """Yield the parts that compare the student's scores, with labels and with the teacher's."""
        if not self._answers:
            return
        (objective,) = self._parts
        scores = self._scores(self, student, batch)
        if objective.key in self.weights:
            yield objective.key, objective.part_of((scores,), batch, objective.part)
        if SOFT in self.weights:
            with torch.no_grad():
                targets = self._scores(self.teacher, teacher, batch)
            soft_part = partial(objective.soft_part, temperature=self._temperature)
            yield SOFT, objective.part_of((scores, targets), batch, soft_part)

    def _scores(self, model: ObjectiveModel, encoded: Encoded, batch: Batch) -> Tensor:
        (objective,) = model._parts
        if self._matched:
            hidden = gather_tokens(encoded.hidden, objective.places(batch))
            encoded = replace(encoded, hidden=hidden)
        return objective.logits(encoded, batch, model.word_embeddings)

    def _errors(
        self, name: str, student: Encoded, teacher: Encoded, batch: Batch
    ) -> Iterator[Float[Tensor, ""]]:
        """Yield the distances between student and teacher in what a part compares, summed over all
        real tokens; one per pair of layers for parts that compare layers."""
        if name == COSINE:
            fitted = self._fitted(HIDDEN, student.hidden)
            cosines = functional.cosine_similarity(fitted, widened(teacher.hidden), dim=-1)
            yield _over_real_tokens(1 - cosines, batch)
        elif name == EMBEDDINGS:
            yield self._distance(EMBEDDINGS, student.layers[0], teacher.layers[0], batch)
        for layer, at in enumerate(self._layer_map):
            if name == HIDDEN:
                own, target = student.layers[layer + 1], teacher.layers[at + 1]
                yield self._distance(HIDDEN, own, target, batch)
            elif name == ATTENTION:
                yield attention_error(student.scores[layer], teacher.scores[at], student.rows)

    def _distance(
        self,
        name: str,
        student: Float[Tensor, "*tokens hidden"],
        teacher: Float[Tensor, "*tokens width"],
        batch: Batch,
    ) -> Float[Tensor, ""]:
        """Return the mean squared difference of two vectors (TinyBERT's equations 8 and 9), summed
        over real tokens."""
        errors = (self._fitted(name, student) - widened(teacher)).square().mean(-1)
        return _over_real_tokens(errors, batch)

    def _fitted(
        self, name: str, vectors: Float[Tensor, "*tokens hidden"]
    ) -> Float[Tensor, "*tokens width"]:
        """Return the student's vectors in the teacher's width."""
        return widened(self.projections[name](vectors) if name in self.projections else vectors)


def attention_error(students: Scores, teachers: Scores, rows: RowLayout) -> Float[Tensor, ""]:
    """Return the squared differences of attention scores before the softmax, averaged over heads
    and keys and summed over real queries: per row, TinyBERT's equation 7 times the row's length.
    Keys that are masked in either model are left out."""
    totals = []
    # Blocks of (b, H, s, s).
    for student, teacher, mask in zip(students, teachers, rows.masks(), strict=True):
        unseen = student.isneginf() | teacher.isneginf()
        gaps = widened(student).masked_fill(unseen, 0.0) - widened(teacher).masked_fill(unseen, 0.0)
        keys = unseen.logical_not().sum((1, 3))  # (b, s), of all heads
        errors = gaps.square().sum((1, 3)) / keys.clamp(min=1)
        totals.append((errors if mask is None else errors.masked_fill(~mask, 0.0)).sum())
    return torch.stack(totals).sum()


def fitting_map(layers: int, teachers: int, layer_map: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return, for each layer of a student, the teacher's layer to compare it with, from 0.

    By default, TinyBERT's map: layer m of M with layer m N / M of N, both counted from 1.
    Raises: ConfigError if the map does not fit the two models.
    """
    if not layer_map:
        if teachers % layers:
            raise ConfigError(
                f"layer_map: wanted a map, as the teacher's {teachers} layers are no multiple of "
                f"the student's {layers}, got none: give a layer of the teacher, from 0, for each "
                "layer of the student"
            )
        return tuple((layer + 1) * teachers // layers - 1 for layer in range(layers))
    if len(layer_map) != layers or not all(0 <= layer < teachers for layer in layer_map):
        raise ConfigError(
            f"layer_map: wanted a layer of the teacher, 0 to {teachers - 1}, for each of the "
            f"student's {layers} layers, got {list(layer_map)}: correct it, or remove it"
        )
    return layer_map


def with_layers(
    config: EncoderConfig, state: Mapping[str, Tensor], layers: Sequence[int]
) -> tuple[EncoderConfig, dict[str, Tensor]]:
    """Return the config and weights of an encoder with some of another encoder's layers, in this
    order; everything else is kept (DistilBERT, section 3).

    Args:
        config: of the other encoder.
        state: its weights under our names; those of heads are kept.
        layers: indices of the layers to keep, from 0.
    Raises: ConfigError if a layer does not exist, or would be of another kind in its new place.
    """
    if not layers or not all(0 <= layer < config.num_hidden_layers for layer in layers):
        raise ConfigError(
            f"layers: wanted layers of the model, 0 to {config.num_hidden_layers - 1}, got "
            f"{list(layers)}"
        )
    student = replace(config, num_hidden_layers=len(layers))
    if config.shared_layers:
        return student, dict(state)
    moved = {name: value for name, value in state.items() if not name.startswith(_LAYERS)}
    with without_values():
        fresh = Encoder(student, pooler=False)
    for place, layer in enumerate(layers):
        prefix = f"{_LAYERS}{layer}."
        weights = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        attention = config.attention
        reach_differs = isinstance(attention, RotaryAttentionConfig) and (
            attention.reach(place) != attention.reach(layer)
        )
        if reach_differs or weights.keys() != fresh.layers[place].state_dict().keys():
            raise ConfigError(
                "layers: wanted layers of the same kind as in their new places, got "
                f"layer {layer} as layer {place}, where this family has another kind: start with "
                "0, and keep the alternation of local and global layers"
            )
        moved |= {f"{_LAYERS}{place}.{name}": value for name, value in weights.items()}
    return student, moved


def _real_tokens(batch: Batch) -> int:
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else int(mask.sum())


def _over_real_tokens(values: Float[Tensor, "*tokens"], batch: Batch) -> Float[Tensor, ""]:
    mask = batch.get("attention_mask")
    return (values if mask is None else values.masked_fill(mask == 0, 0.0)).sum()
