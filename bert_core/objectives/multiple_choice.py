"""Which of several continuations is right (Devlin et al. 2018, section 4.4)."""

from jaxtyping import Float
from torch import Tensor

from bert_core.model.encoder import Encoded
from bert_core.model.heads import LinearHead
from bert_core.model.variants import EncoderConfig
from bert_core.objectives.base import Batch, Objective


class MultipleChoice(Objective):
    """Say which of C choices is right; the rows of a question follow each other."""

    name = "multiple_choice"
    needs_pooler = True
    label_key = "labels"

    def __init__(
        self, config: EncoderConfig, num_choices: int, dropout: float | None = None
    ) -> None:
        super().__init__()
        self.num_choices = num_choices
        self.head = LinearHead(config, 1, dropout)

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "questions choices"]:
        assert encoded.pooled is not None
        return self.head(encoded.pooled).view(-1, self.num_choices)
