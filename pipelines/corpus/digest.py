"""What a corpus counts by: the sha256 of its files, each read once.

The digest has to be there before a stage's work begins, for it says whether the work is done
already. Up to `HERE_BYTES` this process hashes by itself, so that a finished stage is skipped
without Ray; what is more goes to the stage's workers, so that a corpus on a shared store is not
pulled through one machine.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.pool import ThreadPool

from bert_core import files
from pipelines.corpus.readers.base import CorpusFile, unchanged
from pipelines.corpus.sources import Corpus
from pipelines.runtime.distribute import run_tasks
from pipelines.runtime.progress import meter, say
from pipelines.runtime.stage import StageConfig
from tracking.runs import DatasetInput

# A core hashes it in a second, which is what a worker takes to start.
HERE_BYTES = 1 << 30
# A worker's piece of work: small files go together.
TASK_BYTES = 256 << 20
# Hashing runs outside of Python's lock, and a file of an object store is mostly waited for.
THREADS = 8
MEGABYTE = 1_000_000


def corpus_input(corpus: Corpus, config: StageConfig) -> DatasetInput:
    """The corpus by name and digest: sha256 over those of its files, whatever their paths.

    A file's weight counts with it.

    Args:
        config: the stage that reads it, with whose workers it is hashed.
    Raises: CorpusError if a file is gone or was replaced; ResourceError.
    """
    weighted = corpus.config.weight if corpus.config.weights else None
    digests = sorted(
        sha256 + (f" {weighted(file.source)}" if weighted else "")
        for file, sha256 in _hashed(corpus.files, config)
    )
    digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return DatasetInput("corpus", digest, corpus.name)


def _hashed(found: Sequence[CorpusFile], config: StageConfig) -> Iterator[tuple[CorpusFile, str]]:
    """Every file with its sha256, in any order; the largest are begun first."""
    found = sorted(found, key=lambda file: file.size_bytes, reverse=True)
    size_bytes = sum(file.size_bytes for file in found)
    if size_bytes > HERE_BYTES:
        say(f"hashing {size_bytes / MEGABYTE:,.0f} MB in {len(found):,} files")
    here = size_bytes <= HERE_BYTES or config.num_workers == 0
    every = _by_threads(found) if here else _by_workers(found, config)
    with meter("hashing", size_bytes / MEGABYTE, "MB") as progress:
        for file, sha256 in every:
            yield file, sha256
            progress.add(file.size_bytes / MEGABYTE)


def _by_threads(found: Iterable[CorpusFile]) -> Iterator[tuple[CorpusFile, str]]:
    # NOTE: not concurrent.futures, which waits for files that are begun when the user gives up.
    with ThreadPool(THREADS) as pool:
        yield from pool.imap_unordered(_with_sha256, found)


def _with_sha256(file: CorpusFile) -> tuple[CorpusFile, str]:
    with unchanged(file):
        return file, files.sha256_of(file.path)


def _by_workers(
    found: Sequence[CorpusFile], config: StageConfig
) -> Iterator[tuple[CorpusFile, str]]:
    tasks = _tasks(found)
    for index, sha256s in run_tasks(_sha256s, tasks, config):
        yield from zip(tasks[index], sha256s, strict=True)


def _sha256s(task: Sequence[CorpusFile]) -> list[str]:
    """Of the files of a task, in their order."""
    sha256s = dict(_by_threads(task))
    return [sha256s[file] for file in task]


def _tasks(found: Iterable[CorpusFile]) -> list[list[CorpusFile]]:
    tasks: list[list[CorpusFile]] = []
    size_bytes = TASK_BYTES
    for file in found:
        if size_bytes >= TASK_BYTES:
            tasks.append([])
            size_bytes = 0
        tasks[-1].append(file)
        size_bytes += file.size_bytes
    return tasks
