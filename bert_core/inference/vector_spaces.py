"""What made a vector, and so which vectors may be compared with each other.

Two vectors are of one space if the same weights made them in the same way: the bundle, the task,
what turns tokens into a vector, and the length to which it was cut. The prompt is not part of a
space, since a query and a document of one model have different ones; nor is where texts were cut,
nor the precision of the computation, which change a vector a little and its meaning not at all.
These are told beside the space.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bert_core.errors import FormatError
from bert_core.tasks.base import Parameters
from bert_core.tasks.searching import Searching
from bert_core.typed import as_type

if TYPE_CHECKING:
    from bert_core.inference.predictor import Predictor

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class VectorSpace:
    """What vectors have in common that may be compared."""

    model: str
    """Digest of the bundle."""
    task: str
    how: dict[str, Any]
    """What turns tokens into a vector: the pooling, the layers and so on."""
    dimensions: int
    """Numbers of a vector; of a sparse one, the size of the vocabulary."""

    @cached_property
    def digest(self) -> str:
        """Return the sha256 over the JSON `[1, model, task, how, dimensions]`, keys sorted."""
        parts = [FORMAT_VERSION, self.model, self.task, self.how, self.dimensions]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def difference(self, other: "VectorSpace") -> tuple[str, str, str] | None:
        """Return the name of the first part that differs, and its value here and in `other`; None
        if the spaces are equal."""
        for name in (field.name for field in fields(self)):
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its:
                return name, _shown(mine), _shown(its)
        return None


@dataclass(frozen=True, kw_only=True)
class VectorSource:
    """What made vectors: their space, and what else decided their numbers."""

    space: VectorSpace
    prompt: str
    """The text that was put before each text."""
    max_tokens: int
    """Tokens at which texts were cut, or beyond which they were refused."""
    is_normalized: bool
    """Whether each vector has the length 1."""
    precision: str
    """That of the computation."""
    query_prompt: str | None = None
    """Name of the prompt that the model puts before a query; None for its default one."""

    def entries(self) -> dict[str, Any]:
        """Return all of it as JSON, with the digest of the space."""
        return {"format_version": FORMAT_VERSION, "digest": self.space.digest, **asdict(self)}


def read_source(entries: Any, where: str) -> VectorSource:
    """Return what `VectorSource.entries` say.

    Args:
        where: the file, for messages.
    Raises: FormatError if they are damaged or were written by newer code.
    """
    version = entries.get("format_version") if isinstance(entries, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise FormatError(
            f"{where}: wanted format_version {FORMAT_VERSION} or older, got {version}: it was made "
            "by a newer raybert, update this one"
        )
    source: VectorSource = as_type(VectorSource, entries, where)
    if entries.get("digest") != source.space.digest:
        raise FormatError(
            f"{where}: wanted the digest of what it says made the vectors, "
            f"{source.space.digest[:12]}, got {str(entries.get('digest'))[:12]}: predict again"
        )
    return source


def source_of(predictor: "Predictor", parameters: Parameters | None) -> VectorSource | None:
    """Return what makes the vectors of a request with these parameters; None for a task whose
    answers are no vectors.

    Args:
        parameters: None for the task's defaults.
    """
    task = predictor.task
    if not isinstance(task, Searching):
        return None
    asked: Any = task.parameters() if parameters is None else parameters
    config = predictor.bundle.encoder_config
    chosen: Any = task.chosen
    how = {name: getattr(chosen, name) for name in task.decide_space}
    how["layers"] = config.num_hidden_layers
    if getattr(asked, "per_token", False):
        how["pooling"] = "per_token"
    whole = config.vocab_size if task.is_sparse else config.hidden_size
    scaled = getattr(asked, "normalize", None)
    return VectorSource(
        space=VectorSpace(
            model=predictor.bundle.digest,
            task=task.name,
            how=how,
            dimensions=getattr(asked, "dimensions", None) or whole,
        ),
        prompt=chosen.prompt(asked.prompt_name),
        max_tokens=predictor.max_length,
        is_normalized=bool(getattr(chosen, "normalize", False) if scaled is None else scaled),
        precision=predictor.execution.precision,
        query_prompt=task.side("query").prompt_name,
    )


def _shown(value: Any) -> str:
    """Return the beginning of a digest, or the value of another part."""
    if isinstance(value, str):
        return value[:12] if len(value) == 64 else value
    return json.dumps(value, sort_keys=True)
