"""Describes the plan of a process: the model that it is to serve, and how.

A plan is data, so that Ray Serve can hold it as a deployment's `user_config` and hand a changed one
to processes that run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pydantic

from bert_core.bundle.layout import WEIGHTS, Execution
from bert_core.errors import ConfigError
from bert_core.files import is_uri
from bert_core.indexes.record import IndexRecord, read_record
from bert_core.indexes.table import Index
from bert_core.inference.vector_spaces import VectorSpace, source_of
from serve.config import ComparisonMode, ModelConfig, ServeConfig
from serve.model.changes import difference
from serve.request.limits import Limits
from tracking.models.downloads import downloaded
from tracking.models.references import Folder, OnHub, Reference, Registered
from tracking.store.server import tracking_uri

if TYPE_CHECKING:
    from bert_core.inference.predictor import Predictor


@dataclass(frozen=True, kw_only=True)
class Source:
    """The bundle to load."""

    reference: Annotated[
        Reference, pydantic.PlainValidator(Reference.parse), pydantic.PlainSerializer(str)
    ]
    """As the user gave it; a folder's is absolute, a hub model's has its commit."""
    tracking_uri: str
    """URI of its registry."""
    version: str | None = None
    """The version that the registry had when it was deployed; None elsewhere."""
    digest: str | None = None
    """Digest that the bundle must have, so that all processes have the same weights; None takes
    any."""
    task: str | None = None
    """Task that the model must be for; None takes any."""
    labels: tuple[str, ...] | None = None
    """Labels that the model must have, unless the plan allows others; None takes any."""

    @property
    def named(self) -> str:
        """The reference in words, with the version if that is known."""
        if self.version is None:
            return str(self.reference)
        return f"version {self.version} of {self.reference}"

    def fetch(self) -> tuple[Path, str | None]:
        """Return the bundle's folder on this machine, and its version in the registry, if it has
        one.

        A version that is known by its digest and was downloaded before needs no registry.
        Raises: see `Reference.fetch`.
        """
        if self.version is not None and self.digest is not None:
            folder = downloaded(self.digest)
            if folder is not None:
                return folder, self.version
        reference, version = self.reference, None
        if isinstance(reference, Registered):
            if self.version is not None:
                reference = reference.at(self.version)
            reference = reference.pinned(uri=self.tracking_uri)
            version = reference.version
        return reference.fetch(uri=self.tracking_uri), version


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How a process computes: arguments of `serve.model.model.Model`."""

    device: str = "cpu"
    threads: int = 1
    backend: str = "auto"
    precision: str | None = None
    prefer: Execution | None = None
    """The choice of `auto` for every process, measured where the model was deployed."""
    max_batch_tokens: int = 2048
    max_wait_ms: float = 2.0


@dataclass(frozen=True, kw_only=True)
class CandidatePlan:
    """A second model that answers some of the requests."""

    source: Source
    share: float
    mode: ComparisonMode


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model as a process is to serve it."""

    name: str
    source: Source
    runtime: Runtime = field(default_factory=Runtime)
    limits: Limits = field(default_factory=Limits)
    truncate: bool = False
    max_ongoing_requests: int = 256
    cache_mib: int = 0
    follow_s: float = 5.0
    allow_other_labels: bool = False
    candidate: CandidatePlan | None = None
    indexed: tuple[str, ...] = ()
    """Digests of the bundles whose vectors served indexes have."""

    def follows(self, source: Source) -> bool:
        """Whether other versions of this source may replace it while the process serves."""
        reference = source.reference
        is_alias = isinstance(reference, Registered) and reference.alias is not None
        return self.follow_s > 0 and is_alias


@dataclass(frozen=True, kw_only=True)
class Access:
    """The keys that a server requires."""

    path: str
    """The file that they are in."""


PLAN = pydantic.TypeAdapter(Plan)
"""Plans from and to JSON."""
ACCESS = pydantic.TypeAdapter(Access)
LIMITS = pydantic.TypeAdapter(Limits)


@dataclass(frozen=True)
class Deployable:
    """A model's plan, after the deploying machine has loaded the model once."""

    plan: Plan
    example: Any
    """An input, as in a request."""
    memory_bytes: int
    """Memory that a process takes at least for its weights, and those of its candidate."""
    spaces: tuple[VectorSpace, ...] = ()
    """Those of the vectors that it answers with, one per task."""


def find(
    config: ServeConfig, loading: Callable[[str], object] = lambda name: None
) -> dict[str, Deployable]:
    """Return all models by name, after loading each once, and opening each index, since Serve would
    retry a failing replica for minutes.

    Args:
        loading: called before a model is loaded, with its name.
    Raises: ConfigError for a reference that does not exist, or a graph that should run on a GPU;
        FormatError for a bundle or an index that is damaged, or a bundle that answers no task;
        ResourceError without LanceDB; also see `Reference.fetch`.
    """
    uri = tracking_uri(config.tracking_uri)
    for name, folders in config.served_indexes.items():
        if remote := [folder for folder in folders if is_uri(folder)]:
            raise ConfigError(
                f"indexes.{name}: wanted a folder of this machine, got {remote[0]}: copy it here"
            )
    records = {
        name: [read_record(folder) for folder in folders]
        for name, folders in config.served_indexes.items()
    }
    found = {}
    for name, model in config.served.items():
        loading(name)
        found[name] = _find(uri, name, model)
    _check_indexes(records, found)
    for folder in chain.from_iterable(config.served_indexes.values()):
        Index(folder)
    indexed = sorted({each.vectors.space.model for each in chain.from_iterable(records.values())})
    return {
        name: replace(each, plan=replace(each.plan, indexed=tuple(indexed)))
        for name, each in found.items()
    }


def _check_indexes(
    records: Mapping[str, Sequence[IndexRecord]], models: Mapping[str, "Deployable"]
) -> None:
    """Raise ConfigError unless the vectors of each index were made by a model that is served, in
    the way in which it makes them there."""
    indexed = {each.vectors.space.model for each in chain.from_iterable(records.values())}
    for name, each in models.items():
        compared = each.plan.candidate
        if (
            compared is not None
            and compared.mode == "split"
            and each.plan.source.digest in indexed
            and compared.source.digest not in indexed
        ):
            raise ConfigError(
                f"models.{name}.candidate: wanted a candidate whose vectors a served index has, "
                f"since an index has those of {name}, got {str(compared.source.digest)[:12]}, "
                "which would answer some searches: serve an index of its vectors too, or compare "
                "in shadow mode"
            )
    by_digest = {each.plan.source.digest: name for name, each in models.items()}
    spaces = {each.plan.source.digest: each.spaces for each in models.values()}
    for name, versions in records.items():
        made_by = [each.vectors.space.model for each in versions]
        if not any(digest in by_digest for digest in made_by):
            served = ", ".join(f"{model} {str(digest)[:12]}" for digest, model in by_digest.items())
            raise ConfigError(
                f"indexes.{name}: wanted vectors by a model that is served ({served}), got those "
                f"of {' and '.join(digest[:12] for digest in made_by)}: serve their model too, or "
                "make an index of vectors by one of these"
            )
        if len({each.vectors.space.digest for each in versions}) < len(versions):
            raise ConfigError(
                f"indexes.{name}: wanted versions by different models, got several of one space: "
                "give them different names"
            )
        for space in (each.vectors.space for each in versions):
            # Fewer dimensions can be asked for; nothing else.
            made = [
                replace(each, dimensions=space.dimensions) for each in spaces.get(space.model, ())
            ]
            if space.model in by_digest and space not in made:
                served = " or ".join(f"{each.task} {each.how}" for each in made) or "no vectors"
                raise ConfigError(
                    f"indexes.{name}: wanted vectors as {by_digest[space.model]} makes them when "
                    f"it is served ({served}), got those of {space.task} {space.how}: serve a "
                    "model that was trained for vectors, and predict with it as it is"
                )


def _find(uri: str, name: str, model: ModelConfig) -> Deployable:
    source, predictor = _load(uri, model, name, model.model)
    candidate, memory_bytes = None, predictor.bundle.memory_bytes
    if model.candidate is not None:
        other, compared = _load(uri, model, f"{name}'s candidate", model.candidate.model)
        if compared.task.name != predictor.task.name:
            raise ConfigError(
                f"models.{name}.candidate: wanted a model for {predictor.task.name}, got one for "
                f"{compared.task.name}: compare models for the same task"
            )
        if other.labels != source.labels and not model.allow_other_labels:
            raise ConfigError(
                f"models.{name}.candidate: wanted the labels of {name}, got others "
                f"({difference(source.labels or (), other.labels or ())}), with which it could not "
                "take over and clients cannot be answered: compare a model with the same labels, "
                "or set allow_other_labels"
            )
        memory_bytes += compared.bundle.memory_bytes
        candidate = CandidatePlan(
            source=other, share=model.candidate.share, mode=model.candidate.mode
        )
    runtime = Runtime(
        device="cuda" if model.num_gpus else "cpu",
        threads=model.threads,
        backend=model.backend,
        precision=model.precision,
        prefer=predictor.execution,
        max_batch_tokens=model.max_batch_tokens,
        max_wait_ms=model.max_wait_ms,
    )
    plan = Plan(
        name=name,
        source=source,
        runtime=runtime,
        limits=model.limits,
        truncate=model.truncate,
        max_ongoing_requests=model.max_ongoing_requests,
        cache_mib=model.cache_mib,
        follow_s=model.follow_s,
        allow_other_labels=model.allow_other_labels,
        candidate=candidate,
    )
    sources = [source_of(each, None) for each in (predictor, *predictor.also.values())]
    spaces = tuple(each.space for each in sources if each is not None)
    return Deployable(plan, predictor.examples[0], memory_bytes, spaces)


def _load(uri: str, model: ModelConfig, name: str, reference: str) -> tuple[Source, "Predictor"]:
    from bert_core.inference.predictor import Predictor

    source = Source(reference=_for_replicas(Reference.parse(reference)), tracking_uri=uri)
    folder, version = source.fetch()
    predictor = Predictor(
        folder,
        # This machine may have no GPU, and only torch runs on GPUs.
        device="cpu",
        threads=None if model.num_gpus else model.threads,
        backend=model.backend,
        precision=model.precision,
    )
    graph = predictor.bundle.graph
    if model.num_gpus and graph is not None:
        raise ConfigError(
            f"num_gpus: wanted 0 for {name}, since {folder / graph} runs on CPUs, got "
            f"{model.num_gpus:g}: leave it out, or serve the bundle with {WEIGHTS} that it was "
            "exported from"
        )
    task = predictor.task
    found = replace(
        source,
        version=version,
        digest=predictor.bundle.digest,
        task=task.name,
        labels=tuple(task.labels),
    )
    return found, predictor


def _for_replicas(reference: Reference) -> Reference:
    """Return a reference that means the same on other machines: a folder's absolute path, or the
    present commit of a model of the hub."""
    if isinstance(reference, Folder):
        return reference.absolute()
    return reference.pinned() if isinstance(reference, OnHub) else reference
