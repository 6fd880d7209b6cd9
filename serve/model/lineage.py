"""Lists the ancestors and data of a served model, as far as its bundle records them.

Configs are left out, and data is named without its folder: clients must not learn where files were
on the machines that trained a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tracking.models.model_card import chain, dataset_name


@dataclass(frozen=True, kw_only=True)
class Data:
    """Rows, a corpus or a vocabulary that a model was made from."""

    name: str
    """Role of the data: `train`, `held_out`, `vocabulary`, …"""
    digest: str | None
    source: str | None
    """A data set of the Hugging Face hub by its id, anything else by its last name."""
    counts: dict[str, int]
    """Number of rows, tokens or documents."""


@dataclass(frozen=True, kw_only=True)
class Ancestor:
    """A model from which another was made, or the model itself."""

    digest: str
    """Digest of the bundle."""
    stage: str | None
    """The stage that made it; None if that was not raybert."""
    stage_digest: str | None
    """Digest of the stage's config and inputs, as in its manifest and its MLflow run."""
    code_version: str | None
    hub: str | None
    """Name on the Hugging Face hub, as `owner/name@commit`."""
    teacher: str | None
    """Digest of the model that it was distilled from."""
    from_scratch: bool
    """Whether only shape and vocabulary come from the model before it."""
    data: list[Data]


def ancestors(digest: str, lineage: Mapping[str, Any]) -> list[Ancestor]:
    """Return the models from the first ancestor to the model itself, from the lineage in its
    bundle."""
    return [
        Ancestor(
            digest=ancestor,
            stage=_text(record.get("stage")),
            stage_digest=_text(record.get("stage_digest")),
            code_version=_text(record.get("code_version")),
            hub=_text(record.get("hub")),
            teacher=_text(record.get("teacher")),
            from_scratch=record.get("from_scratch") is True,
            data=[_data(entry) for entry in record.get("data", ())],
        )
        for ancestor, record in chain(digest, lineage)
    ]


def _data(entry: Mapping[str, Any]) -> Data:
    source = _text(entry.get("source"))
    return Data(
        name=str(entry.get("name")),
        digest=_text(entry.get("digest")),
        source=None if source is None else dataset_name(source),
        counts={name: value for name, value in entry.items() if type(value) is int},
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
