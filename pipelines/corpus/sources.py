"""Lists the files of a corpus and their sizes.

`digest` hashes them; `blocks` cuts them into blocks and reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool

from bert_core import files
from bert_core.errors import ConfigError, CorpusError
from pipelines.corpus import docstrings, hub
from pipelines.corpus.config import DOCSTRINGS, CorpusConfig
from pipelines.corpus.readers import reader_of
from pipelines.corpus.readers.base import CorpusFile

# Looking into a file on an object store is mostly waiting.
THREADS = 8
MOST_USES = 1000
"""As `CorpusConfig.weights` allows."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The files of a corpus as they were when the run began.

    It is listed once, so that hashing, cutting into blocks and the data card use the same files.
    """

    config: CorpusConfig
    files: tuple[CorpusFile, ...]
    """Sorted by path, or as `digest.corpus_input` orders them."""

    @property
    def name(self) -> str:
        """Return the sources, for messages and records."""
        return ", ".join(self.config.sources)


def list_corpus(config: CorpusConfig, output: str | None = None) -> Corpus:
    """Find the files of a corpus.

    Args:
        output: where a stage writes; its files are left out of sources that contain it.
    Raises: CorpusError if a source names no file.
    """
    own = None if output is None else _as_folder(output)
    listed: dict[str, int] = {}
    added: list[tuple[str, int, str | None]] = []
    for number, source in enumerate(config.sources):
        split_column = "split" if source == DOCSTRINGS else None
        paths = _paths_of(source)
        if own is not None and not _as_folder(source).startswith(own):
            paths = [path for path in paths if not path.startswith(own)]
        for path in paths:
            if path not in listed:
                added.append((path, number, split_column))
                listed[path] = number
            elif config.weight(listed[path]) != config.weight(number):
                raise ConfigError(
                    f"corpus.weights: {path} is in two sources with different weights, "
                    f"{config.sources[listed[path]]} and {source}: name it in only one"
                )
    # NOTE: not concurrent.futures, which on Ctrl-C waits for the files it has started.
    with ThreadPool(max(1, min(THREADS, len(added)))) as pool:
        opened = pool.starmap(CorpusFile.at, sorted(added))
    if config.exponent != 1.0:
        weights = weights_by_exponent(_source_bytes(config, opened), config)
        config = replace(config, exponent=1.0, weights=weights)
    return Corpus(config=config, files=tuple(opened))


def _source_bytes(config: CorpusConfig, listed: Sequence[CorpusFile]) -> list[float]:
    """Return the bytes of text of each source, as `corpus_size_bytes` counts them."""
    sizes = [0.0] * len(config.sources)
    for file in listed:
        sizes[file.source] += reader_of(file).text_bytes(file, config)
    return sizes


def weights_by_exponent(sizes: Sequence[float], config: CorpusConfig) -> tuple[float, ...]:
    """Return the weight of each source that makes its share of the text p into one in proportion to
    p to the power of `config.exponent`; 1 for the largest.

    Args:
        sizes: the bytes of text of each source.
    Raises: CorpusError if a source has no text; ConfigError if one would be used too often.
    Source: Conneau and Lample 2019, section 3.1; there batches are drawn with these probabilities.
    """
    for source, size in zip(config.sources, sizes, strict=True):
        if not size:
            raise CorpusError(
                f"{source}: wanted text in every source with corpus.exponent = {config.exponent}, "
                "which says how often each is used, got none there: leave the source out, or check "
                "its path"
            )
    weights = tuple((max(sizes) / size) ** (1 - config.exponent) for size in sizes)
    if max(weights) > MOST_USES:
        source = config.sources[weights.index(max(weights))]
        raise ConfigError(
            f"corpus.exponent: wanted one that uses no text more than {MOST_USES} times, got "
            f"{config.exponent}, which uses {source} {max(weights):,.0f} times: raise it, or find "
            "more text"
        )
    return weights


def _as_folder(path: str) -> str:
    return f"{files.absolute(path).rstrip('/')}/"


def _paths_of(source: str) -> list[str]:
    if source == DOCSTRINGS:
        return [docstrings.corpus_file()]
    paths = hub.data_files(source)
    if paths is None:
        paths = hub.found(source)
    return [files.absolute(path) for path in paths]


def corpus_size_bytes(corpus: Corpus) -> int:
    """Return the bytes of text in the corpus; approximate if it is compressed.

    Raises: CorpusError if all its files are empty, or a Parquet file lacks the text column.
    """
    config = corpus.config
    sizes = (
        reader_of(file).text_bytes(file, config) * config.weight(file.source)
        for file in corpus.files
    )
    size_bytes = sum(sizes)
    if size_bytes == 0:
        raise CorpusError(
            f"{corpus.name}: wanted text, every file there is empty: check the path, or give "
            "another corpus"
        )
    return max(1, int(size_bytes))
