"""What a search asks of a task whose answers are vectors: the prompt of each side, and the vectors
as a matrix whose products are the scores."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union

import numpy as np
from jaxtyping import Float

from bert_core.data.windows import Window

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Side = Literal["query", "document"]
Matrix = Union[Float[np.ndarray, "texts size"], "csr_array"]
PROMPTS: Mapping[Side, tuple[str, ...]] = {
    "query": ("query",),
    "document": ("document", "passage", "corpus"),
}
"""Side → names of its prompt, in order of preference, as in sentence-transformers (`encode_query`,
`encode_document`)."""


class Searching(ABC):
    """A task whose vectors find documents: the larger the product, the nearer."""

    decide_space: ClassVar[tuple[str, ...]]
    """Names of the options that decide which vectors may be compared; prompts do not."""
    is_sparse: ClassVar[bool] = False
    """Whether a vector has an entry per token of the vocabulary, most of them zero."""

    parameters: type[Any]
    chosen: Any

    def side(self, side: Side) -> Any:
        """Return the parameters of a side: the prompt that the model was trained with on that side,
        or else one that is named after it, or else the default one; and that texts are cut."""
        trained = {"query": self.chosen.query_prompt, "document": self.chosen.passage_prompt}[side]
        named = next((name for name in PROMPTS[side] if name in self.chosen.prompts), None)
        return self.parameters(truncate=True, prompt_name=trained or named)

    @abstractmethod
    def matrix(self, windows: Sequence[Window], scores: Sequence[np.ndarray]) -> Matrix:
        """Return a vector per text, as they are searched.

        Args:
            windows: those of rows with one text each.
            scores: an array per window, as `decode` takes them.
        """
