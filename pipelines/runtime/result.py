"""The result of a stage: its files, its counts, and these in words.

Only the stage knows what its counts mean, so it words them itself. Its manifest keeps the words;
the report, MLflow's page and tables show them and read no counts for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from bert_core.manifest import Headline, Output


def spread(pattern: str) -> dict[str, str]:
    """Return metadata for a field of `Counts` that holds a mapping of further counts: each is named
    by putting its key into the braces of `pattern`."""
    return {"spread": pattern}


SPREAD = spread("{}")
"""The same by the names as they are."""


@dataclass(frozen=True, kw_only=True)
class Counts(ABC):
    """Facts about an output; those that are numbers are sent to MLflow. Each stage has its own
    subclass, with a field for every count that its words need."""

    def entries(self) -> dict[str, Any]:
        """Return the counts by name, as in the manifest; those that are None are left out."""
        found: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if (pattern := each.metadata.get("spread")) is not None:
                found |= {pattern.format(name): count for name, count in value.items()}
            elif value is not None:
                found[each.name] = value
        return found

    @property
    @abstractmethod
    def line(self) -> str:
        """Return the outcome in a few words, for a table; never empty."""

    @property
    @abstractmethod
    def sentence(self) -> str:
        """Return the result in a sentence, for a reader who knows neither the stage nor its
        figures."""

    @property
    def headline(self) -> Headline | None:
        """Return the most important figure, if the stage has one that stands by itself; else
        None."""
        return None


C = TypeVar("C", bound=Counts)


@dataclass(frozen=True, kw_only=True)
class Result(Generic[C]):
    """The result of a stage's work."""

    outputs: dict[str, Output]
    """The files that make up the output, by their path inside it."""
    counts: C
    artifacts: Sequence[Path] = ()
    """Local files to show in MLflow."""
    cards: Mapping[str, str] = field(default_factory=dict)
    """Title → name, for those of the artifacts that describe the output to a reader."""
    pages: Mapping[str, str] = field(default_factory=dict)
    """Title → link, for further pages of MLflow that do."""
