"""Which text makes up a corpus, and what counts as a document."""

from dataclasses import dataclass, field
from typing import Annotated

from bert_core.checks import PositiveShare, Range, ShareBelowOne, check_fields
from bert_core.data.formats import Boundary, Errors
from bert_core.errors import ConfigError
from pipelines.runtime.stage_config import INPUT, REMARK

DOCSTRINGS = "docstrings"
"""The source available on every machine; `docstrings` builds it."""


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Which text to read, and what counts as a document."""

    source: str | tuple[str, ...] = field(default=DOCSTRINGS, metadata=INPUT)
    """Files, folders, globs or URIs of .txt, .md, .jsonl, .json, .csv, .tsv, .parquet or the .xml
    of a Wikipedia dump, optionally compressed (.gz, .bz2, .zst, .xz);
    `hf://datasets/<owner>/<name>` on the Hugging Face hub; or `docstrings`."""
    weights: tuple[Annotated[float, Range(above=0, most=1000)], ...] = ()
    """Per source, how often its documents are used: 2 is twice, 0.5 is every second document."""
    exponent: PositiveShare = 1.0
    """Instead of weights: sources, such as languages, are used in proportion to their share of the
    text to this power, the largest as it is and smaller ones several times; 0.3 for XLM-R (Conneau
    et al. 2019, section 3.1), 1 uses each document once."""
    licenses: tuple[str, ...] = field(default=(), metadata=REMARK)
    """Licence per source, for the data card; by default the one that a hub data set states."""
    document_boundary: Boundary = "blank_line"
    """Where a document in a text file ends: at a `blank_line`, at the end of the `line` or of the
    `file`, or before a `heading`."""
    text_column: str = "text"
    """Column that holds the document, in JSON, CSV, TSV and Parquet."""
    errors: Errors = "fail"
    """How to treat an unreadable document: `fail` the run, or count it and `skip` it."""
    held_out_share: ShareBelowOne = 0.02
    """Share of the documents held out of training, to measure the model on."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="corpus.")
        if not self.sources:
            raise ConfigError("corpus.source: wanted a path, a URI or `docstrings`, got none")
        if "" in self.sources:
            raise ConfigError(
                "corpus.source: wanted a path, a URI or `docstrings`, got an empty string"
            )
        if self.weights and self.exponent != 1.0:
            raise ConfigError(
                "corpus.exponent: wanted 1 with corpus.weights, which it would replace, got "
                f"{self.exponent}: leave one of the two out"
            )
        for name in ("weights", "licenses"):
            values = getattr(self, name)
            if values and len(values) != len(self.sources):
                raise ConfigError(
                    f"corpus.{name}: wanted one for each of the {len(self.sources)} sources, "
                    f"got {len(values)}"
                )

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source

    def weight(self, source: int) -> float:
        """Return how often the documents of a source are used."""
        return self.weights[source] if self.weights else 1.0
