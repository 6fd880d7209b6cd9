"""Lists the files of a corpus and their sizes.

`digest` hashes them; `blocks` cuts them into blocks and reads them.
"""

from dataclasses import dataclass
from multiprocessing.pool import ThreadPool

from bert_core import files
from bert_core.errors import ConfigError, CorpusError
from pipelines.corpus import docstrings, hub
from pipelines.corpus.config import DOCSTRINGS, CorpusConfig
from pipelines.corpus.readers import reader_of
from pipelines.corpus.readers.base import CorpusFile

# Looking into a file on an object store is mostly waiting.
THREADS = 8


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
    return Corpus(config=config, files=tuple(opened))


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
