"""The trained model: an encoder and, for each part of the loss, a head and its labels.

An objective returns a summed loss and a count. Only the training loop divides, once, by the counts
of the whole global batch, so that the gradient does not depend on the number of workers or the
micro-batch size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.nn import functional

from bert_core.errors import ConfigError
from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoded, Encoder
from bert_core.model.layout import gather_tokens
from bert_core.model.size import training_flops
from bert_core.objectives.graph_scores import GraphScores

Batch = dict[str, Tensor]
"""Tensors of B rows, int64, in one of two layouts (`model.layout`).

Padded to S tokens: `input_ids`, `token_type_ids` (B, S); `attention_mask` (B, S), 1 = attend,
absent if all are 1; (B, S, S) with `positions` (B, S) where an objective shows tokens elsewhere.
Packed: `input_ids`, `token_type_ids` (T,) and `offsets` (B + 1,). Labels:
`mlm_positions`, `mlm_labels`, `mlm_draws` (M,) and `token_positions`, `token_labels` (N,), where
positions index the flattened tokens and draws, float64 in [0, 1), decide what a generator puts
there; `mlm_span_lengths` (K,), the number of `mlm_positions`, which ascend, in each span;
`next_sentence_label`, `sentence_order_label` (B,), 0 = is next, in order; `labels` (B,), or one per
question, with `choices` (Q,) the number of rows per question; `start_positions`, `end_positions`
(B,), within the row. Vectors (V,): `vector_starts` and `vector_ends`, the tokens that each vector
is the mean of; `similarities`, `texts` (equal texts have equal numbers), and `choices` (Q,), the
number of vectors per example. Examples that share a loss with the rest of their global batch have
`ROWS` (Q,), and the whole batch, of vectors alone, has `OWN_ROWS`.
"""
ROWS = "rows"
"""Batch entry: the place of each example in its global batch, whose examples share one loss."""
OWN_ROWS = "own_rows"
"""Batch entry: the examples whose share of a joint loss to compute; all examples if absent."""


@dataclass(frozen=True)
class LossPart:
    """One part of the loss over one batch."""

    sum: Float[Tensor, ""]
    """Loss summed over the items, in fp32 or wider."""
    count: int
    """Number of items; the mean is `sum / count` over all workers' batches, unless items have
    weights (`Objective.divisor`)."""
    correct: Int[Tensor, ""] | None
    """Items whose best score is the label's, without gradient. None if the objective does not
    choose a class."""


@dataclass(frozen=True)
class JointPart:
    """One part of a loss that is of all examples of a global batch together, over some of them.

    The loss needs the vectors of all examples, which `train.joint` gathers.
    """

    vectors: tuple[Float[Tensor, "items width"], ...]
    """What the loss is computed from: the vectors that are trained, then those of a teacher, if
    any."""
    rows: Int[Tensor, "examples"]
    """The place of each example in the global batch."""
    choices: Int[Tensor, "examples"]
    """The number of vectors of each example."""
    labels: Mapping[str, Tensor]
    """Batch entries with a label per vector."""
    count: int
    """Number of items of the examples."""
    loss: Callable[..., LossPart]
    """Returns the loss from the vectors of all examples, and a batch of their labels, in the global
    order."""


class Objective(nn.Module, ABC):
    """One part of the loss: owns its head and knows where its labels are in the batch."""

    name: ClassVar[str]
    """Key of its weights and scores, and of its loss part and metrics, unless those have
    `part_name`."""
    part_name: ClassVar[str] = ""
    """Key of its loss part and metrics, if its head is another objective's."""
    needs_pooler: ClassVar[bool]
    """Whether its head reads the pooled vector."""
    label_key: ClassVar[str]
    """Batch entry that holds one label per item."""
    position_key: ClassVar[str | None] = None
    """Batch entry with the positions of the scored tokens; None if each row has one score."""
    chooses: bool = True
    """Whether its part counts correct items."""
    joint: bool = False
    """Whether its loss is of all examples of a global batch together."""
    joint_labels: ClassVar[tuple[str, ...]] = ()
    """Batch entries, with a label per vector, that a joint loss reads."""
    reads_layers: ClassVar[bool] = False
    """Whether it reads the output of every layer (`Encoded.layers`)."""
    reads_words: ClassVar[bool] = False
    """Whether it reads the whole word embedding, so that every word gets a gradient."""
    trains_encoder: ClassVar[bool] = True
    """Whether it trains the encoder, or leaves it frozen."""
    in_transformers: bool = True
    """Whether a transformers class of the encoder's family has its head."""
    graph_scores: GraphScores | None = None
    """How its scores are taken from its ONNX graph, which computes `every`; None if it has no
    graph."""
    not_in_transformers: ClassVar[tuple[str, ...]] = ()
    """Its submodules that the transformers class lacks."""
    weight: ClassVar[float] = 1.0
    """Weight of its part in the total loss."""

    @property
    def key(self) -> str:
        """Return the key of its loss part."""
        return self.part_name or self.name

    @property
    def item_weights(self) -> int:
        """Return the number of weights of the head's matrix products that each item passes through,
        a tied decoder's included; 0 if negligible."""
        return 0

    def attach(self, encoder: Encoder) -> None:
        """Connect to the encoder that the objective trains. Called once, when both are built."""

    def submodels(self) -> Mapping[str, "ObjectiveModel"]:
        """Return the models that the objective owns and trains, with loss parts of their own, by
        name; each is saved as a bundle in a folder of that name."""
        return {}

    def begin_step(self, progress: float) -> None:
        """Prepare for a training step, for losses that change in the course of the training.

        Args:
            progress: the share of the steps that are done.
        """

    def shown(self, batch: Batch) -> tuple[Batch, dict[str, LossPart]]:
        """Return the batch as the encoder sees it, and the loss parts of the submodels."""
        return batch, {}

    @abstractmethod
    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "items classes"]:
        """Return the scores of every class for every item, in the order of the labels.

        Args:
            encoded: its `hidden` has the tokens at `places`, in that order, or all tokens.
        """

    def every(
        self, encoded: Encoded, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "..."]:
        """Return `logits` for every token in `encoded.hidden`, or every row, instead of those that
        the batch selects; this is what a graph computes (`graph_scores`)."""
        return self.logits(encoded, {}, word_embeddings)

    def places(self, batch: Batch) -> Int[Tensor, "items"] | None:
        """Return the places of the tokens that the objective reads besides the pooled vector; None
        means all tokens."""
        if self.position_key is not None:
            return batch[self.position_key]
        return batch["input_ids"].new_empty(0) if self.needs_pooler else None

    def counts(self, batch: Batch) -> int:
        """Return the number of items of this part in the batch, known without a forward pass."""
        return batch[self.label_key].numel()

    def divisor(self, batch: Batch) -> float:
        """Return what the summed loss of the batch is divided by, once it is added up over all
        batches of a step: the number of items, or the sum of their weights."""
        return float(self.counts(batch))

    def flops(self, batch: Batch, lengths: Integer[np.ndarray, "rows"]) -> int:
        """Return the additional FLOPs besides encoder, head and submodels, forward and backward."""
        return 0

    def part(self, logits: Float[Tensor, "..."], batch: Batch) -> LossPart:
        """Return the loss of scores against the labels."""
        return cross_entropy(logits, batch[self.label_key])

    def soft_part(
        self,
        logits: Float[Tensor, "..."],
        teachers: Float[Tensor, "..."],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        """Return the loss of scores against a teacher's, over the same items as `part`; 0 for equal
        scores. Objectives whose items do not have one score per class override it."""
        return soft_cross_entropy(logits, teachers, temperature)

    def forward(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> LossPart | JointPart:
        logits = self.logits(encoded, batch, word_embeddings)
        return self.part_of((logits,), batch, self.part)

    def part_of(
        self,
        vectors: tuple[Float[Tensor, "..."], ...],
        batch: Batch,
        loss: Callable[..., LossPart],
    ) -> LossPart | JointPart:
        """Return `loss` of scores and a batch, or, if its examples share the loss with those of
        other batches, what it is computed from."""
        if not self.joint or ROWS not in batch:
            return loss(*vectors, batch)
        labels = {name: batch[name] for name in self.joint_labels}
        count = self.counts(batch)
        choices = batch.get("choices", torch.ones_like(batch[ROWS]))
        return JointPart(vectors, batch[ROWS], choices, labels, count, loss)


def widened(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return values in fp32, or as they are if they are wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def cross_entropy(logits: Float[Tensor, "items classes"], labels: Int[Tensor, "items"]) -> LossPart:
    """Return the softmax cross-entropy as a loss part, in fp32 or wider. Zero if there are no
    items."""
    wide = widened(logits)
    total = functional.cross_entropy(wide, labels, reduction="sum")
    return LossPart(total, labels.numel(), (logits.detach().argmax(-1) == labels).sum())


def soft_cross_entropy(
    logits: Float[Tensor, "*items classes"],
    teachers: Float[Tensor, "*items classes"],
    temperature: float,
) -> LossPart:
    """Return T² KL(teacher ‖ student) of softmax at temperature T, as a loss part, in fp32 or
    wider.

    T² keeps gradients on the scale of those from labels. This is the cross-entropy of Hinton et al.
    2015 (section 2) minus the teacher's entropy, which has no gradient. Classes that the teacher
    scores -inf are ignored. An item counts as correct if its best class is the teacher's.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_probs = (logits.to(wide) / temperature).log_softmax(-1)
    teacher_log_probs = (teachers.to(wide) / temperature).log_softmax(-1)
    gaps = (teacher_log_probs - log_probs).masked_fill(teacher_log_probs.isneginf(), 0.0)
    total = temperature**2 * (teacher_log_probs.exp() * gaps).sum()
    agree = log_probs.detach().argmax(-1) == teacher_log_probs.argmax(-1)
    return LossPart(total, agree.numel(), agree.sum())


class ObjectiveModel(nn.Module):
    """An encoder with the objectives that train it; the module that is trained and saved.

    The encoder has a pooler only if an objective reads it, so that every parameter gets a gradient,
    as DistributedDataParallel requires.
    """

    frozen_parts: Sequence[nn.Module] = ()
    """Parts of the encoder that are frozen."""
    frozen_layers: int = 0
    """How many layers no gradient passes through, from the first."""
    frozen_weights: bool = False
    """Whether the encoder's matrices have no gradient, although gradients pass through them."""

    def __init__(self, encoder_config: EncoderConfig, objectives: Sequence[Objective]) -> None:
        super().__init__()
        self.encoder = Encoder(
            encoder_config, pooler=any(objective.needs_pooler for objective in objectives)
        )
        names = [part.key for part in _with_submodels(objectives)]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"objectives: wanted each part of the loss once, got {', '.join(names)}: "
                "remove the duplicates"
            )
        self.objectives = nn.ModuleDict({objective.name: objective for objective in objectives})
        self.frozen = bool(objectives) and not any(part.trains_encoder for part in objectives)
        """Whether the encoder is frozen: no gradient and no dropout."""
        self.encoder.requires_grad_(not self.frozen)
        self.weights: Mapping[str, float] = {part.key: part.weight for part in self._all_parts}
        """Weight of each part in the loss; 1 if not listed."""
        for objective in objectives:
            objective.attach(self.encoder)

    def freeze(self, parts: Sequence[nn.Module], layers: int) -> None:
        """Freeze parts of the encoder: no gradient and no dropout.

        Args:
            layers: how many layers no gradient passes through, from the first.
        """
        self.frozen_parts, self.frozen_layers = tuple(parts), layers
        for part in parts:
            part.requires_grad_(False)
        self.train(self.training)

    def freeze_weights(self, but: str | None = None) -> None:
        """Freeze the encoder's parameters, except for the pooler's, which belong to the head, and
        those whose names end with `but`. Dropout stays on, since gradients pass through."""
        self.frozen_weights = True
        for name, parameter in self.encoder.named_parameters():
            learns = name.startswith("pooler.") or (but is not None and name.endswith(but))
            parameter.requires_grad_(learns)

    def train(self, mode: bool = True) -> "ObjectiveModel":
        super().train(mode)
        self.encoder.train(mode and not self.frozen)
        for part in self.frozen_parts:
            part.eval()
        return self

    def forward(self, batch: Batch) -> dict[str, LossPart | JointPart]:
        """Return the loss parts of all objectives and their submodels, by name."""
        parts: dict[str, LossPart | JointPart] = {}
        for objective in self._parts:
            batch, others = objective.shown(batch)
            parts |= others
        words = self.word_embeddings
        return parts | {part.key: part(read, batch, words) for part, read in self._encoded(batch)}

    def begin_step(self, progress: float) -> None:
        """Prepare all objectives for a training step (`Objective.begin_step`)."""
        for part in self._all_parts:
            part.begin_step(progress)

    def logits(self, batch: Batch) -> dict[str, Tensor]:
        """Return each objective's scores (items, classes), by name; needs no labels."""
        words = self.word_embeddings
        return {part.name: part.logits(read, batch, words) for part, read in self._encoded(batch)}

    def encode(
        self,
        batch: Batch,
        places: Int[Tensor, "chosen"] | None = None,
        *,
        all_layers: bool = False,
        all_scores: bool = False,
    ) -> Encoded:
        """Return only the encoder's output; with `places`, for those tokens only."""
        return self.encoder(
            batch["input_ids"],
            batch["token_type_ids"],
            batch.get("attention_mask"),
            batch.get("offsets"),
            positions=batch.get("positions"),
            places=places,
            all_layers=all_layers,
            all_scores=all_scores,
        )

    def outputs(self, batch: Batch) -> int | None:
        """Return the number of tokens whose vectors the last layer must return; None means all."""
        read_places = [part.places(batch) for part in self._parts]
        if any(places is None for places in read_places) or not self.encoder.may_take_early:
            return None
        rows = len(batch["input_ids"]) if "offsets" not in batch else len(batch["offsets"]) - 1
        pooled = 0 if self.encoder.pooler is None else rows
        return pooled + sum(len(places) for places in read_places if places is not None)

    def _encoded(self, batch: Batch) -> Iterator[tuple[Objective, Encoded]]:
        """Yield each objective with the encoder output that it reads."""
        readers = [(self, part, batch) for part in self._parts]
        return zip(self._parts, encoded_once(readers), strict=True)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return the number of items of each part in the batch, by name, without a forward pass."""
        return {part.key: part.counts(batch) for part in self._all_parts}

    def divisors(self, batch: Batch) -> dict[str, float]:
        """Return the `Objective.divisor` of each part for the batch, by name."""
        return {part.key: part.divisor(batch) for part in self._all_parts}

    def flops(self, batch: Batch, lengths: Integer[np.ndarray, "rows"]) -> int:
        """Return the floating-point operations of training on a batch with rows of these lengths
        (`model.size.training_flops`)."""
        flops = training_flops(self.encoder.config, lengths, outputs=self.outputs(batch))
        flops = 2 * flops // 3 if self.frozen_weights else flops  # gradients of inputs only
        flops += 6 * sum(part.item_weights * part.counts(batch) for part in self._parts)
        flops = flops // 3 if self.frozen else flops  # a frozen encoder has no backward pass
        if self.frozen_layers:
            frozen = replace(self.encoder.config, num_hidden_layers=self.frozen_layers)
            whole = self.frozen_layers == self.encoder.config.num_hidden_layers
            outputs = self.outputs(batch) if whole else None
            flops -= 2 * training_flops(frozen, lengths, outputs=outputs) // 3
        for part in self._parts:
            flops += part.flops(batch, lengths)
            flops += sum(model.flops(batch, lengths) for model in part.submodels().values())
        return flops

    @property
    def chooses(self) -> dict[str, bool]:
        """Return whether each part counts correct items, by name."""
        return {part.key: part.chooses for part in self._all_parts}

    @property
    def joint(self) -> bool:
        """Whether a part of the loss is of all examples of a global batch together."""
        return any(part.joint for part in self._all_parts)

    @property
    def encoders(self) -> list[Encoder]:
        """Return the model's own encoder and those of its submodels."""
        submodels = (model for part in self._parts for model in part.submodels().values())
        return [self.encoder, *(encoder for model in submodels for encoder in model.encoders)]

    @property
    def in_transformers(self) -> frozenset[str]:
        """Return the objectives whose heads a transformers class has."""
        return frozenset(part.name for part in self._parts if part.in_transformers)

    @property
    def _parts(self) -> list[Objective]:
        return cast("list[Objective]", list(self.objectives.values()))

    @property
    def _all_parts(self) -> list[Objective]:
        return _with_submodels(self._parts)

    @property
    def reads_words(self) -> bool:
        """Whether one of its own objectives gives every word embedding a gradient."""
        return any(part.reads_words for part in self._parts)

    @property
    def word_embeddings(self) -> Float[Tensor, "vocab embedding"]:
        return self.encoder.embeddings.word_embeddings.weight


def encoded_once(readers: Sequence[tuple[ObjectiveModel, Objective, Batch]]) -> list[Encoded]:
    """Return the encoder output that each objective reads, from a single pass; vectors that no
    objective reads are not computed.

    Args:
        readers: each objective, the model that it belongs to, and a batch. The models share an
            encoder, except for their poolers; the batches have the same tokens, and may differ in
            which of them are read.
    """
    if not readers:
        return []
    read_places = [part.places(batch) for _, part, batch in readers]
    chosen = [places for places in read_places if places is not None]
    all_layers = any(part.reads_layers for _, part, _ in readers)
    pooling = [reader for reader in readers if reader[0].encoder.pooler is not None]
    runner, _, batch = (pooling or readers)[0]
    if len(chosen) < len(read_places):
        encoded = runner.encode(batch, all_layers=all_layers)
        hiddens = [gather_tokens(encoded.hidden, places) for places in read_places]
    else:
        encoded = runner.encode(batch, torch.cat(chosen), all_layers=all_layers)
        hiddens = list(encoded.hidden.split([len(places) for places in chosen]))
    read = []
    for (model, _, _), hidden in zip(readers, hiddens, strict=True):
        pooled, pooler = encoded.pooled, model.encoder.pooler
        if pooler is not None and model is not runner:
            pooled = pooler(encoded.unpooled)
        read.append(replace(encoded, hidden=hidden, pooled=pooled))
    return read


def _with_submodels(objectives: Sequence[Objective]) -> list[Objective]:
    """Return the objectives and those of their submodels, which come first."""
    parts: list[Objective] = []
    for objective in objectives:
        for model in objective.submodels().values():
            parts += _with_submodels(list(cast("Iterable[Objective]", model.objectives.values())))
        parts.append(objective)
    return parts
