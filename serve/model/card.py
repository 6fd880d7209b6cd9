"""Describes a model as clients and the front see it, in whatever process it runs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from serve.config import ComparisonMode
from serve.model.lineage import Ancestor
from serve.request.limits import Limits

State = Literal["ready", "loading", "problem"]
"""`loading` while another version, which its alias points to, is loaded beside the one that
answers; `problem` if that version is not served, and the card says why."""


@dataclass(frozen=True, kw_only=True)
class CandidateCard:
    """Information about what a model is compared with."""

    version: str | None
    digest: str
    mode: ComparisonMode
    share: float


@dataclass(frozen=True, kw_only=True)
class Card:
    """Information about a model for clients."""

    id: str
    """The model's name here."""
    object: str = "model"
    created: int
    """Time at which the model was loaded, in seconds since 1970."""
    owned_by: str = "raybert"
    version: str | None
    """Version in the registry, if the model comes from there."""
    task: str
    """Hugging Face's name for the task."""
    also: list[str]
    """Other tasks that the same weights answer."""
    labels: list[str]
    examples: list[Any]
    """Inputs, as in requests: some of the data that the model was made with, if its bundle has
    them."""
    metrics: dict[str, float]
    """Metrics stored in the bundle: its evaluation by the stage that made it."""
    lineage: list[Ancestor]
    """The models that it was made from, from the first ancestor to itself."""
    digest: str
    """sha256 of the bundle: servers with equal digests, backend and precision give equal
    answers."""
    encoder_digest: str | None
    """sha256 of the encoder's config and weights, its pooler left out: models of one process with
    equal ones share passes. None if the backend does not tell encoder and head apart."""
    backend: str
    """`torch`, or the engine that runs its graph."""
    precision: str
    """Precision of matrix products."""
    spaces: dict[str, str] = field(default_factory=dict)
    """Task → digest of the space of its vectors, for the tasks whose answers are vectors. Only
    vectors of one space can be compared."""
    max_tokens: int
    """Maximum tokens of a text, special ones included; longer texts are cut, or read in windows."""
    limits: Limits
    note: str | None = None
    """Advice on its answers, if there is any."""
    state: State = "ready"
    candidate: CandidateCard | None = None
    problem: str | None = None
    """Why another version answers than the one that its alias points to, or why that is not known;
    None if all is well."""
    changed: str | None = None
    """How answers changed with the last version that took over: it has other labels, or its vectors
    cannot be compared with earlier ones. None if they did not."""


@dataclass(frozen=True)
class Response:
    """An HTTP response for the client."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


class ServedModel(ABC):
    """A model as the front sees it, in this or another process. All calls raise if the model is
    down."""

    is_local: ClassVar[bool] = False
    """Whether it is in this process."""
    has_failed: bool = False
    """Whether it could not be loaded, so that its calls raise; it is tried again."""

    @abstractmethod
    async def tasks(self) -> Sequence[str]:
        """Return the tasks that the model does, its own first."""

    @abstractmethod
    async def card(self) -> Card: ...

    @abstractmethod
    async def check_ready(self) -> None:
        """Run a real forward pass."""

    @abstractmethod
    async def request(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> Response:
        """Return the model's response at one of its paths. `path` is percent-encoded, with its
        query."""
