"""What is minimised: an encoder, and for each part of the loss a head and its labels.

An objective gives an unreduced sum and a count; dividing is for the training loop alone, once, by
the counts of the whole global batch, so that neither workers nor micro-batches change a gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

Batch = dict[str, Tensor]
"""Tensors of B rows, int64, in one of two layouts (`model.layout`).

Padded to S tokens: `input_ids`, `token_type_ids` (B, S); `attention_mask` (B, S), 1 = attend,
absent where all are 1. End to end: `input_ids`, `token_type_ids` (T,) and `offsets` (B + 1,).
Labels: `mlm_positions`, `mlm_labels`, `mlm_draws` (M,) and `token_positions`, `token_labels` (N,),
positions counting along the flattened tokens (draws, float64 from 0 up to 1, say what a generator
puts there); `mlm_span_lengths` (K,), how many of the first, which ascend, are each of the spans
that they make; `next_sentence_label`, `sentence_order_label` (B,), 0 = is next, in order; `labels`
(B,), or one a question, whose rows `choices` (Q,) counts; `start_positions`, `end_positions` (B,),
within the row. Vectors (V,): `vector_starts` and `vector_ends`, the tokens that each is the mean
of; `similarities`, `texts` (equal texts have equal numbers), of rows that `choices` counts and
`groups` (G,) joins.
"""


@dataclass(frozen=True)
class LossPart:
    """One part of the loss over one batch."""

    sum: Float[Tensor, ""]
    """Loss summed over the items, fp32 at least."""
    count: int
    """Items summed; the mean is `sum / count` over all workers' batches."""
    correct: Int[Tensor, ""] | None
    """Items whose best score is the label's; carries no gradient. None where nothing is chosen."""


class Objective(nn.Module, ABC):
    """One part of the loss: owns its head, knows where its labels are."""

    name: ClassVar[str]
    """Key of its part, its weights and its metrics."""
    needs_pooler: ClassVar[bool]
    """Whether its head reads the pooled vector."""
    label_key: ClassVar[str]
    """Entry of the batch that holds one label an item."""
    position_key: ClassVar[str | None] = None
    """Entry of the batch that names the tokens that are scored; None where a row has one score."""
    chooses: bool = True
    """Whether its part counts what is correct."""
    reads_layers: ClassVar[bool] = False
    """Whether it reads what every layer gave (`Encoded.layers`)."""
    reads_words: ClassVar[bool] = False
    """Whether it reads the embeddings of all words, each of which gets a gradient from it then."""
    trains_encoder: ClassVar[bool] = True
    """Whether the encoder learns from it, or stays as it is."""
    in_transformers: ClassVar[bool] = True
    """Whether a class of transformers has its head."""
    graph_outputs: ClassVar[tuple[str, ...]] = ("logits",)
    """What its ONNX graph gives, by optimum's names: `every`, or where there are several names its
    last dimension in parts. None where there is no such graph."""
    beside: ClassVar[tuple[str, ...]] = ()
    """Its parts that this class lacks."""
    weight: ClassVar[float] = 1.0
    """How much its part counts in what is minimised."""

    @property
    def item_weights(self) -> int:
        """Weights of the matrix products that an item passes in its head, a tied decoder's among
        them; 0 where they are too few to count."""
        return 0

    def attach(self, encoder: Encoder) -> None:
        """Meet the encoder that it trains, once, when both are made."""

    def submodels(self) -> Mapping[str, "ObjectiveModel"]:
        """The models that it owns and trains, whose parts count beside its own; each is saved as a
        bundle, in a folder of this name."""
        return {}

    def shown(self, batch: Batch) -> tuple[Batch, dict[str, LossPart]]:
        """What the encoder is shown of a batch, and the parts that its submodels have in it."""
        return batch, {}

    @abstractmethod
    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "items classes"]:
        """Scores of every class for every item, in the order of the labels.

        Args:
            encoded: its `hidden` has the tokens at `places`, in their order, or all.
        """

    def every(
        self, encoded: Encoded, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "..."]:
        """`logits` where nobody says which are asked for: of every token in `encoded.hidden`, or of
        every row, as a graph has them."""
        return self.logits(encoded, {}, word_embeddings)

    def picked(self, every: Float[Tensor, "..."], batch: Batch) -> Float[Tensor, "..."]:
        """`logits` of what `every` gave, tokens as they lie in the batch."""
        return every if self.position_key is None else gather_tokens(every, self.places(batch))

    def places(self, batch: Batch) -> Int[Tensor, "items"] | None:
        """Places of the tokens that it reads beside the pooled vector; None reads all."""
        if self.position_key is not None:
            return batch[self.position_key]
        return batch["input_ids"].new_empty(0) if self.needs_pooler else None

    def counts(self, batch: Batch) -> int:
        """Items that this part has in the batch, known without a forward pass."""
        return batch[self.label_key].numel()

    def flops(self, batch: Batch, lengths: Integer[np.ndarray, "rows"]) -> int:
        """What it computes beside encoder, head and submodels, forward and backward."""
        return 0

    def part(self, logits: Float[Tensor, "..."], batch: Batch) -> LossPart:
        """How far scores are from what is right."""
        return cross_entropy(logits, batch[self.label_key])

    def soft_part(
        self,
        logits: Float[Tensor, "..."],
        teachers: Float[Tensor, "..."],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        """How far scores are from those of a teacher, over as many items as `part`; equal ones give
        0. Where its items have other scores than one of each class, an objective says its own."""
        return soft_cross_entropy(logits, teachers, temperature)

    def forward(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> LossPart:
        return self.part(self.logits(encoded, batch, word_embeddings), batch)


def cross_entropy(logits: Float[Tensor, "items classes"], labels: Int[Tensor, "items"]) -> LossPart:
    """Softmax cross-entropy as a part, in fp32 at least. No items give zero."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = functional.cross_entropy(wide, labels, reduction="sum")
    return LossPart(total, labels.numel(), (logits.detach().argmax(-1) == labels).sum())


def soft_cross_entropy(
    logits: Float[Tensor, "*items classes"],
    teachers: Float[Tensor, "*items classes"],
    temperature: float,
) -> LossPart:
    """T² KL(teacher ‖ student) of softmax at temperature T, as a part, in fp32 at least.

    T² keeps gradients as large as those of labels. It is the cross-entropy of Hinton et al. 2015
    (section 2) less the entropy of the teacher, which has no gradient. A class that the teacher
    scores -inf is none. What is counted as correct has the teacher's best class.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    own = (logits.to(wide) / temperature).log_softmax(-1)
    wanted = (teachers.to(wide) / temperature).log_softmax(-1)
    gaps = (wanted - own).masked_fill(wanted.isneginf(), 0.0)
    total = temperature**2 * (wanted.exp() * gaps).sum()
    agree = own.detach().argmax(-1) == wanted.argmax(-1)
    return LossPart(total, agree.numel(), agree.sum())


class ObjectiveModel(nn.Module):
    """An encoder with the objectives that train it; the one module that is trained and saved.

    The encoder has a pooler only where an objective reads it, so that every parameter gets a
    gradient, which DistributedDataParallel wants.
    """

    def __init__(self, encoder_config: EncoderConfig, objectives: Sequence[Objective]) -> None:
        super().__init__()
        self.encoder = Encoder(
            encoder_config, pooler=any(objective.needs_pooler for objective in objectives)
        )
        names = [part.name for part in _with_submodels(objectives)]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"objectives: wanted each part of the loss once, got {', '.join(names)}: "
                "leave one of those that are there twice out"
            )
        self.objectives = nn.ModuleDict({objective.name: objective for objective in objectives})
        self.frozen = bool(objectives) and not any(each.trains_encoder for each in objectives)
        """Whether the encoder stays as it is: it gets no gradient, and drops nothing."""
        self.encoder.requires_grad_(not self.frozen)
        self.weights: Mapping[str, float] = {part.name: part.weight for part in self._all_parts}
        """How much each part counts in the loss; 1 where it is not named."""
        for objective in objectives:
            objective.attach(self.encoder)

    def train(self, mode: bool = True) -> "ObjectiveModel":
        super().train(mode)
        self.encoder.train(mode and not self.frozen)
        return self

    def forward(self, batch: Batch) -> dict[str, LossPart]:
        """The parts of each objective and its submodels, by name."""
        parts: dict[str, LossPart] = {}
        for objective in self._parts:
            batch, others = objective.shown(batch)
            parts |= others
        words = self.word_embeddings
        return parts | {part.name: part(own, batch, words) for part, own in self._encoded(batch)}

    def logits(self, batch: Batch) -> dict[str, Tensor]:
        """Each objective's scores (items, classes), by name; labels are not needed."""
        words = self.word_embeddings
        return {part.name: part.logits(own, batch, words) for part, own in self._encoded(batch)}

    def encode(
        self,
        batch: Batch,
        places: Int[Tensor, "chosen"] | None = None,
        *,
        all_layers: bool = False,
        all_scores: bool = False,
    ) -> Encoded:
        """The encoder's output alone; with `places` that of the tokens there."""
        return self.encoder(
            batch["input_ids"],
            batch["token_type_ids"],
            batch.get("attention_mask"),
            batch.get("offsets"),
            places=places,
            all_layers=all_layers,
            all_scores=all_scores,
        )

    def outputs(self, batch: Batch) -> int | None:
        """How many tokens' vectors the last layer has to give; None for those of all."""
        asked = [part.places(batch) for part in self._parts]
        if any(places is None for places in asked) or not self.encoder.may_take_early:
            return None
        rows = len(batch["input_ids"]) if "offsets" not in batch else len(batch["offsets"]) - 1
        pooled = 0 if self.encoder.pooler is None else rows
        return pooled + sum(len(places) for places in asked if places is not None)

    def _encoded(self, batch: Batch) -> Iterator[tuple[Objective, Encoded]]:
        """Each objective with what it reads: what none reads is not computed."""
        asked = [part.places(batch) for part in self._parts]
        chosen = [places for places in asked if places is not None]
        all_layers = any(part.reads_layers for part in self._parts)
        if not chosen or len(chosen) < len(asked):
            encoded = self.encode(batch, all_layers=all_layers)
            hiddens = [gather_tokens(encoded.hidden, places) for places in asked]
        else:
            encoded = self.encode(batch, torch.cat(chosen), all_layers=all_layers)
            hiddens = list(encoded.hidden.split([len(places) for places in chosen]))
        for part, hidden in zip(self._parts, hiddens, strict=True):
            yield part, replace(encoded, hidden=hidden)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Items of each part in the batch, by name, without a forward pass."""
        return {part.name: part.counts(batch) for part in self._all_parts}

    def flops(self, batch: Batch, lengths: Integer[np.ndarray, "rows"]) -> int:
        """Floating-point operations of training on a batch, whose rows are so long
        (`model.size.training_flops`)."""
        flops = training_flops(self.encoder.config, lengths, outputs=self.outputs(batch))
        flops += 6 * sum(part.item_weights * part.counts(batch) for part in self._parts)
        flops = flops // 3 if self.frozen else flops  # then there is no backward pass
        for part in self._parts:
            flops += part.flops(batch, lengths)
            flops += sum(each.flops(batch, lengths) for each in part.submodels().values())
        return flops

    @property
    def chooses(self) -> dict[str, bool]:
        """The parts by name, and whether each counts what is correct."""
        return {part.name: part.chooses for part in self._all_parts}

    @property
    def encoders(self) -> list[Encoder]:
        """Its own and those of submodels."""
        others = (each for part in self._parts for each in part.submodels().values())
        return [self.encoder, *(encoder for each in others for encoder in each.encoders)]

    @property
    def in_transformers(self) -> frozenset[str]:
        """The objectives whose heads a class of transformers has."""
        return frozenset(part.name for part in self._parts if part.in_transformers)

    @property
    def _parts(self) -> list[Objective]:
        return cast("list[Objective]", list(self.objectives.values()))

    @property
    def _all_parts(self) -> list[Objective]:
        return _with_submodels(self._parts)

    @property
    def reads_words(self) -> bool:
        """Whether every word's embedding gets a gradient from an objective of its own."""
        return any(part.reads_words for part in self._parts)

    @property
    def word_embeddings(self) -> Float[Tensor, "vocab embedding"]:
        return self.encoder.embeddings.word_embeddings.weight


def _with_submodels(objectives: Sequence[Objective]) -> list[Objective]:
    """With the objectives of their submodels, each after those that serve it."""
    found: list[Objective] = []
    for objective in objectives:
        for model in objective.submodels().values():
            found += _with_submodels(list(cast("Iterable[Objective]", model.objectives.values())))
        found.append(objective)
    return found
