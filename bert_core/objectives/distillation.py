"""A student that learns from a teacher: what it answers, and what it computes on the way there.

DistilBERT (Sanh et al. 2019) compares scores and last vectors, TinyBERT (Jiao et al. 2019)
embeddings, the vectors of layers and what attention's softmax is taken of. Which of these count,
and how much, is said by name. Real tokens alone are compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from bert_core.errors import ConfigError
from bert_core.model.attention import Scores
from bert_core.model.config import EncoderConfig, RotaryAttentionConfig
from bert_core.model.encoder import Encoded, Encoder
from bert_core.model.layers import initialise
from bert_core.model.layout import RowLayout, gather_tokens
from bert_core.objectives.base import Batch, LossPart, ObjectiveModel

HARD, SOFT = "hard", "soft"
COSINE, EMBEDDINGS, HIDDEN, ATTENTION = "cosine", "embeddings", "hidden", "attention"
MATCHED = (COSINE, EMBEDDINGS, HIDDEN, ATTENTION)
"""What is compared of every token; a token is an item of these parts."""
_LAYERS = "encoder.layers."


class Distillation(ObjectiveModel):
    """A student, with a teacher that runs once a batch and stays as it is.

    The teacher is no submodule: it is neither trained, saved nor sharded, and moves with the
    student alone. Where its vectors are wider, the student's pass a linear map that is trained with
    it and belongs to no bundle: one for all layers, one for the embeddings (TinyBERT, section 3.1).
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
        """
        Args:
            student: what becomes this model, of one objective or none; its head stays as it is
                where neither labels nor the teacher's scores count.
            teacher: with the same objective where scores are compared.
            weights: how much each part counts, by its name: `hard` is the student's own objective.
                What is 0 is not computed.
            temperature: of scores (`Objective.soft_part`).
            layer_map: for each layer of the student the one of the teacher that it is compared
                with, from 0; nothing takes the last of as many equal shares.
        Raises: ConfigError if the two cannot be compared so.
        """
        nn.Module.__init__(self)  # the student's own parts, not fresh ones
        self.encoder, self.objectives = student.encoder, student.objectives
        self.frozen = student.frozen
        object.__setattr__(self, "teacher", teacher.eval().requires_grad_(False))
        counted = {name: weight for name, weight in weights.items() if weight}
        self._answers = HARD in counted or SOFT in counted
        self._matched = [name for name in MATCHED if name in counted]
        self._temperature = temperature
        for objective in self._parts if HARD in counted else ():
            counted = {objective.name: counted.pop(HARD)} | counted
        self.weights = counted
        if self._matched:
            self.frozen = False
            self.encoder.requires_grad_(True)
        if not self._answers:
            self.objectives.requires_grad_(False)
            if self.encoder.pooler is not None:
                self.encoder.pooler.requires_grad_(False)
        own, its = self.encoder.config, teacher.encoder.config
        self._layer_map: Sequence[int] = ()
        if {HIDDEN, ATTENTION} & counted.keys():
            self._layer_map = fitting_map(
                own.num_hidden_layers, its.num_hidden_layers, tuple(layer_map)
            )
        if ATTENTION in counted and own.attention.num_heads != its.attention.num_heads:
            raise ConfigError(
                f"losses.attention: wanted a student with {its.attention.num_heads} heads a layer, "
                f"as its teacher has, got {own.attention.num_heads}: take another student, or set "
                "losses.attention = 0"
            )
        self.projections = nn.ModuleDict(
            {
                name: nn.Linear(own.hidden_size, its.hidden_size, bias=False)
                for name, parts in ((EMBEDDINGS, {EMBEDDINGS}), (HIDDEN, {COSINE, HIDDEN}))
                if parts & counted.keys() and own.hidden_size != its.hidden_size
            }
        )
        initialise(self.projections, own)

    def _apply(self, fn: Any, recurse: bool = True) -> "Distillation":
        self.teacher._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def forward(self, batch: Batch) -> dict[str, LossPart]:
        """The parts that count, by name."""
        with torch.no_grad():
            its = self._seen(self.teacher, batch)
        own = self._seen(self, batch)
        parts = dict(self._answered(own, its, batch))
        if self._matched:
            tokens = _real_tokens(batch)
            for name in self._matched:
                errors = torch.stack(list(self._errors(name, own, its, batch)))
                parts[name] = LossPart(errors.sum(), tokens, None)
        return parts

    @property
    def chooses(self) -> dict[str, bool]:
        own = super().chooses
        return {name: own.get(name, name == SOFT and any(own.values())) for name in self.weights}

    def counts(self, batch: Batch) -> dict[str, int]:
        items = next(iter(super().counts(batch).values()), 0)
        tokens = _real_tokens(batch) if self._matched else 0
        return {name: tokens if name in MATCHED else items for name in self.weights}

    @property
    def reads_words(self) -> bool:
        return self._answers and super().reads_words

    def outputs(self, batch: Batch) -> int | None:
        return None if self._matched else super().outputs(batch)

    def _seen(self, model: ObjectiveModel, batch: Batch) -> Encoded:
        """What a model makes of the batch, as far as it is compared."""
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

    def _answered(self, own: Encoded, its: Encoded, batch: Batch) -> Iterator[tuple[str, LossPart]]:
        """The parts of the student's scores: by its labels, and by its teacher's."""
        if not self._answers:
            return
        (objective,) = self._parts
        scores = self._scored(self, own, batch)
        if objective.name in self.weights:
            yield objective.name, objective.part(scores, batch)
        if SOFT in self.weights:
            with torch.no_grad():
                wanted = self._scored(self.teacher, its, batch)
            yield SOFT, objective.soft_part(scores, wanted, batch, self._temperature)

    def _scored(self, model: ObjectiveModel, encoded: Encoded, batch: Batch) -> Tensor:
        (objective,) = model._parts
        if self._matched:
            hidden = gather_tokens(encoded.hidden, objective.places(batch))
            encoded = replace(encoded, hidden=hidden)
        return objective.logits(encoded, batch, model.word_embeddings)

    def _errors(
        self, name: str, own: Encoded, its: Encoded, batch: Batch
    ) -> Iterator[Float[Tensor, ""]]:
        """How far a student is from its teacher in what a part compares, over all real tokens; of
        every pair of layers where it compares them."""
        if name == COSINE:
            student, teacher = self._fitted(HIDDEN, own.hidden), _wide(its.hidden)
            cosines = functional.cosine_similarity(student, teacher, dim=-1)
            yield _over_real_tokens(1 - cosines, batch)
        elif name == EMBEDDINGS:
            yield self._distance(EMBEDDINGS, own.layers[0], its.layers[0], batch)
        for layer, at in enumerate(self._layer_map):
            if name == HIDDEN:
                yield self._distance(HIDDEN, own.layers[layer + 1], its.layers[at + 1], batch)
            elif name == ATTENTION:
                yield attention_error(own.scores[layer], its.scores[at], own.rows)

    def _distance(
        self,
        name: str,
        own: Float[Tensor, "*tokens hidden"],
        its: Float[Tensor, "*tokens width"],
        batch: Batch,
    ) -> Float[Tensor, ""]:
        """The mean of the squared differences of two vectors (TinyBERT's equations 8 and 9)."""
        errors = (self._fitted(name, own) - _wide(its)).square().mean(-1)
        return _over_real_tokens(errors, batch)

    def _fitted(
        self, name: str, vectors: Float[Tensor, "*tokens hidden"]
    ) -> Float[Tensor, "*tokens width"]:
        """As wide as the teacher's."""
        return _wide(self.projections[name](vectors) if name in self.projections else vectors)


def attention_error(own: Scores, wanted: Scores, rows: RowLayout) -> Float[Tensor, ""]:
    """Squared differences of attention before its softmax, a mean over heads and keys, summed over
    real queries: of a row TinyBERT's equation 7 times its length. Keys that either may not look at
    are left out."""
    totals = []
    for student, teacher, mask in zip(own, wanted, rows.masks(), strict=True):  # (b, H, s, s)
        unseen = student.isneginf() | teacher.isneginf()
        gaps = _wide(student).masked_fill(unseen, 0.0) - _wide(teacher).masked_fill(unseen, 0.0)
        keys = unseen.logical_not().sum((1, 3))  # (b, s), of all heads
        errors = gaps.square().sum((1, 3)) / keys.clamp(min=1)
        totals.append((errors if mask is None else errors.masked_fill(~mask, 0.0)).sum())
    return torch.stack(totals).sum()


def fitting_map(layers: int, teachers: int, given: tuple[int, ...] = ()) -> tuple[int, ...]:
    """For each layer of a student the teacher's that it is compared with, from 0.

    Not given, it is TinyBERT's: layer m of M with layer m N / M of N, both counted from 1.
    Raises: ConfigError if it does not fit them.
    """
    if not given:
        if teachers % layers:
            raise ConfigError(
                f"layer_map: wanted one, as the {teachers} layers of the teacher are no multiple "
                f"of the student's {layers}, got none: give a layer of the teacher, from 0, for "
                "each of the student's"
            )
        return tuple((layer + 1) * teachers // layers - 1 for layer in range(layers))
    if len(given) != layers or not all(0 <= layer < teachers for layer in given):
        raise ConfigError(
            f"layer_map: wanted for each of the student's {layers} layers one of the teacher's, "
            f"0 to {teachers - 1}, got {list(given)}: correct it, or leave it out"
        )
    return given


def with_layers(
    config: EncoderConfig, state: Mapping[str, Tensor], layers: Sequence[int]
) -> tuple[EncoderConfig, dict[str, Tensor]]:
    """An encoder of some of another's layers, in this order, and of everything else that it has
    (DistilBERT, section 3).

    Args:
        state: weights under our names; those of heads stay.
        layers: from 0.
    Raises: ConfigError if there are no such layers, or one is not what it is in another place.
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
    with torch.device("meta"):
        fresh = Encoder(student, pooler=False)
    for place, layer in enumerate(layers):
        prefix = f"{_LAYERS}{layer}."
        own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        attention = config.attention
        turned = isinstance(attention, RotaryAttentionConfig) and (
            attention.reach(place) != attention.reach(layer)
        )
        if turned or own.keys() != fresh.layers[place].state_dict().keys():
            raise ConfigError(
                f"layers: wanted layers that are in their new places what they were, got "
                f"layer {layer} as layer {place}, where this family has another kind: begin with "
                "0, and keep local and global layers in turn"
            )
        moved |= {f"{_LAYERS}{place}.{name}": value for name, value in own.items()}
    return student, moved


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _real_tokens(batch: Batch) -> int:
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else int(mask.sum())


def _over_real_tokens(values: Float[Tensor, "*tokens"], batch: Batch) -> Float[Tensor, ""]:
    mask = batch.get("attention_mask")
    return (values if mask is None else values.masked_fill(mask == 0, 0.0)).sum()
