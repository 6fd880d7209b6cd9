"""Which text a corpus is, and what a document of it is."""

from dataclasses import dataclass, field
from typing import Annotated

from bert_core.checks import Range, ShareBelowOne, check_fields
from bert_core.data.formats import Boundary, Errors
from bert_core.errors import ConfigError
from pipelines.runtime.stage import INPUT, REMARK

DOCSTRINGS = "docstrings"
"""The source that every machine has; `docstrings` makes it."""


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Which text to read, and what a document of it is."""

    source: str | tuple[str, ...] = field(default=DOCSTRINGS, metadata=INPUT)
    """Files, folders, globs or URIs of .txt, .md, .jsonl, .csv, .tsv, .parquet or a Wikipedia
    dump's .xml, also .gz, .bz2 or .zst; `hf://datasets/<owner>/<name>` of the Hugging Face hub; or
    `docstrings`."""
    weights: tuple[Annotated[float, Range(above=0, most=100)], ...] = ()
    """For every source how often its documents are used: 2 is twice, 0.5 is every second one."""
    licenses: tuple[str, ...] = field(default=(), metadata=REMARK)
    """For every source its licence, for the data card; a hub data set says its own."""
    document_boundary: Boundary = "blank_line"
    """In text files: a document ends at a `blank_line`, with its `line` or its `file`, or before a
    `heading`."""
    text_column: str = "text"
    """In JSONL, CSV, TSV and Parquet: the column that holds a document."""
    errors: Errors = "fail"
    """What a document that cannot be read does: `fail` the run, or be counted and `skip`ped."""
    held_out_share: ShareBelowOne = 0.02
    """Share of the documents kept out of training, to measure the model on."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="corpus.")
        if not self.sources:
            raise ConfigError("corpus.source: wanted a path, a URI or `docstrings`, got none")
        for name in ("weights", "licenses"):
            given = getattr(self, name)
            if given and len(given) != len(self.sources):
                raise ConfigError(
                    f"corpus.{name}: wanted one for each of the {len(self.sources)} sources, "
                    f"got {len(given)}"
                )

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source

    def weight(self, source: int) -> float:
        """How often the documents of a source are used."""
        return self.weights[source] if self.weights else 1.0
