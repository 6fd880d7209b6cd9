"""The digest of a corpus: the sha256 of its files, each read once.

The digest is needed before a stage's work begins, since it shows whether the work is already done.
Up to `HERE_BYTES` this process does the hashing, so that a finished stage is skipped without Ray;
a larger corpus is hashed by the stage's workers, so that a corpus on a shared store is not pulled
through one machine.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.pool import ThreadPool

from bert_core import files
from pipelines.corpus.readers.base import CorpusFile, unchanged
from pipelines.corpus.sources import Corpus
from pipelines.runtime.distribute import run_tasks
from pipelines.runtime.progress import meter, say
from pipelines.runtime.stage_config import StageConfig
from tracking.runs.recorder import DatasetInput

# One core hashes this much in a second, about as long as a worker takes to start.
HERE_BYTES = 1 << 30
# The size of a worker's task: small files are grouped.
TASK_BYTES = 256 << 20
# Hashing releases the GIL, and reading from an object store is mostly waiting.
THREADS = 8
MEGABYTE = 1_000_000


def corpus_input(corpus: Corpus, config: StageConfig) -> tuple[Corpus, DatasetInput]:
    """Return the corpus with its files in an order independent of paths, and its `DatasetInput`.

    The digest covers the files in this order: their contents, their suffixes (which decide how they
    are read) and their weights. So it identifies whatever is made from the files in this order.

    Args:
        config: the stage that reads the corpus; its workers do the hashing.
    Raises: CorpusError if a file is missing or was replaced; ResourceError.
    """
    digests = _digests(corpus, config)
    ordered = tuple(sorted(corpus.files, key=digests.__getitem__))
    corpus = replace(corpus, files=ordered)
    return corpus, _as_input(corpus, digests)


def ordered_corpus_input(corpus: Corpus, config: StageConfig) -> DatasetInput:
    """Return the corpus as an input, with the digest of its files in their given order, for a stage
    whose outputs follow that order. Otherwise as `corpus_input`."""
    return _as_input(corpus, _digests(corpus, config))


def _as_input(corpus: Corpus, digests: Mapping[CorpusFile, str]) -> DatasetInput:
    lines = "\n".join(digests[file] for file in corpus.files)
    return DatasetInput("corpus", hashlib.sha256(lines.encode()).hexdigest(), corpus.name)


def _digests(corpus: Corpus, config: StageConfig) -> dict[CorpusFile, str]:
    """Map each file to its contribution to the digest: its sha256, its weight if the corpus has
    weights, and its suffixes."""
    weights = corpus.config.weight if corpus.config.weights else None
    return {
        file: " ".join(
            [
                sha256,
                *([] if weights is None else [str(weights(file.source))]),
                ".".join(filter(None, files.suffixes(file.path))),
            ]
        )
        for file, sha256 in _hashed(corpus.files, config)
    }


def _hashed(listed: Sequence[CorpusFile], config: StageConfig) -> Iterator[tuple[CorpusFile, str]]:
    """Yield every file with its sha256, in any order; the largest files are started first."""
    listed = sorted(listed, key=lambda file: file.size_bytes, reverse=True)
    size_bytes = sum(file.size_bytes for file in listed)
    if size_bytes > HERE_BYTES:
        say(f"hashing {size_bytes / MEGABYTE:,.0f} MB in {len(listed):,} files")
    here = size_bytes <= HERE_BYTES or config.num_workers == 0
    hashed = _by_threads(listed) if here else _by_workers(listed, config)
    with meter("hashing", size_bytes / MEGABYTE, "MB") as progress:
        for file, sha256 in hashed:
            yield file, sha256
            progress.add(file.size_bytes / MEGABYTE)


def _by_threads(listed: Iterable[CorpusFile]) -> Iterator[tuple[CorpusFile, str]]:
    # NOTE: not concurrent.futures, which on Ctrl-C waits for the files it has started.
    with ThreadPool(THREADS) as pool:
        yield from pool.imap_unordered(_with_sha256, listed)


def _with_sha256(file: CorpusFile) -> tuple[CorpusFile, str]:
    with unchanged(file):
        return file, files.sha256_of(file.path)


def _by_workers(
    listed: Sequence[CorpusFile], config: StageConfig
) -> Iterator[tuple[CorpusFile, str]]:
    tasks = _tasks(listed)
    for index, sha256s in run_tasks(_sha256s, tasks, config):
        yield from zip(tasks[index], sha256s, strict=True)


def _sha256s(task: Sequence[CorpusFile]) -> list[str]:
    """Return the sha256 of each file of a task, in order."""
    sha256s = dict(_by_threads(task))
    return [sha256s[file] for file in task]


def _tasks(listed: Iterable[CorpusFile]) -> list[list[CorpusFile]]:
    tasks: list[list[CorpusFile]] = []
    size_bytes = TASK_BYTES
    for file in listed:
        if size_bytes >= TASK_BYTES:
            tasks.append([])
            size_bytes = 0
        tasks[-1].append(file)
        size_bytes += file.size_bytes
    return tasks
