"""Predicts the relation between two marked spans from the markers before them (Baldini Soares et
al. 2019, "Matching the Blanks", section 3.2: entity markers, entity start)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoded
from bert_core.model.heads import PairHead
from bert_core.objectives.base import Batch, Objective
from bert_core.objectives.classification import Classification, ProblemType
from bert_core.objectives.graph_scores import RELATIONS


class RelationClassification(Classification):
    """Predicts labels of a row from two of its tokens, at `first_positions` and at
    `second_positions`. The losses are those of `Classification`."""

    name = "relation_classification"
    needs_pooler = False
    in_transformers = False
    graph_scores = RELATIONS

    def __init__(self, config: EncoderConfig, num_labels: int, problem_type: ProblemType) -> None:
        Objective.__init__(self)
        self.problem_type = problem_type
        self.deviation = 1.0
        self.head = PairHead(config, num_labels)

    def places(self, batch: Batch) -> Int[Tensor, "two_batch"]:
        return torch.cat([batch["first_positions"], batch["second_positions"]])

    def every(
        self, encoded: Encoded, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "*tokens two_labels"]:
        return self.head(encoded.hidden)

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "batch labels"]:
        first, second = self.every(encoded, word_embeddings).chunk(2, dim=-1)
        rows = len(batch["first_positions"])
        return first[:rows] + second[rows:]
