"""Decides which documents of a block are kept, and counts the others: the step before encoding.

The quality criteria are in `bert_core.data.quality`; here they are applied to blocks. Near
duplicates concern the whole corpus and are found in a separate pass.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa

from bert_core import files
from bert_core.data.documents import clean, document_digest, document_fraction
from bert_core.data.json_rows import json_rows
from bert_core.data.parquet import MAGIC, ParquetTable, may_hold_text
from bert_core.data.quality import (
    EvaluationGrams,
    QualityConfig,
    drop_reason,
    near_duplicates,
    signatures,
)
from bert_core.data.tables import table_rows
from bert_core.wording import without_secrets
from pipelines.corpus.blocks import read_block
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.readers.base import Block
from pipelines.runtime.distribute import run_tasks
from pipelines.runtime.progress import meter
from pipelines.runtime.stage_config import StageConfig
from tracking.runs.recorder import DatasetInput

OVERLAP = "overlap"  # prefix of counts of documents that contain an evaluation row
DROPPED = "dropped_"  # prefix of counts of documents that were left out
REASONS = {
    "empty": "empty",
    "unreadable": "not UTF-8, not JSON, or not a row of its table",
    "no_text": "without text in the column",
    "too_short": "fewer words than quality.min_words",
    "too_long": "more words than quality.max_words",
    "other_language": "another language than quality.languages",
    "exact_duplicate": "the same text as another document",
    "near_duplicate": "nearly the text of another document (MinHash)",
    "contaminated": "holds a row of an evaluation set",
    "by_weight": "the weight of its source",
}
_PROSE = re.compile(r"\w\W+\w")


@dataclass(frozen=True)
class Kept:
    """A cleaned document that is neither empty nor filtered."""

    text: str
    digest: bytes
    source: int
    split: str | None


def kept_documents(
    block: Block,
    quality: QualityConfig,
    counts: Counter[str],
    dropped: frozenset[bytes] = frozenset(),
) -> Iterator[Kept]:
    """Yield the documents of a block that are kept.

    Args:
        counts: updated in place with the number of documents read and, by reason, left out.
        dropped: digests of near duplicates.
    """
    grams = _evaluation_grams(quality.contamination, quality.contamination_ngram)
    for document in read_block(block):
        counts["documents_read"] += 1
        if "\x00" in document.text:
            counts["documents_with_nul"] += 1
        text = clean(document.text)
        reason: str | None = document.dropped or (drop_reason(text, quality) if text else "empty")
        if reason is None:
            digest = document_digest(text)
            overlaps = grams.overlaps(text) if grams else []
            for source, row in overlaps:
                counts[f"{OVERLAP}\t{source}\t{row}"] += 1
            if overlaps:
                counts["contaminated"] += 1
            if digest in dropped:
                reason = "near_duplicate"
            elif overlaps and quality.on_contamination == "drop":
                reason = "contaminated"
            else:
                yield Kept(text, digest, document.source, document.split)
        if reason is not None:
            counts[f"dropped_{reason}"] += 1


def in_parts(documents: Iterable[Kept], part_bytes: int) -> Iterator[list[Kept]]:
    """Yield documents in lists of about `part_bytes` of text, so that a block may have any size."""
    part: list[Kept] = []
    characters = 0
    for document in documents:
        part.append(document)
        characters += len(document.text)
        if characters >= part_bytes:
            yield part
            part, characters = [], 0
    if part:
        yield part


def copies_of(document: Kept, corpus: CorpusConfig, seed: int) -> int:
    """Return how often to use a document: the weight of its source, where the document's hash
    decides whether a fraction is rounded up or down."""
    weight = corpus.weight(document.source)
    whole = int(weight)
    rest = weight - whole
    return whole + bool(rest and document_fraction(document.digest, seed, "weight") < rest)


def find_near_duplicates(
    blocks: Sequence[Block], quality: QualityConfig, folder: str, seed: int, config: StageConfig
) -> str:
    """Write the digests of documents that are near duplicates of a kept one.

    In each group of near duplicates, a document with the highest weight is kept. Documents that are
    left out by their weight do not count.

    Returns: the file's path.
    """
    path = files.join(folder, "near_duplicates.arrow")
    if files.exists(path):
        return path
    paths = [files.join(folder, f"signatures-{index:06d}.arrow") for index in range(len(blocks))]
    missing = [task for task in zip(blocks, paths, strict=True) if not files.exists(task[1])]
    with meter("looking for near duplicates", len(blocks), "blocks") as progress:
        progress.set(len(blocks) - len(missing))
        for _ in run_tasks(partial(_sign, quality, seed), missing, config):
            progress.add()
    tables = [pa.ipc.open_file(pa.py_buffer(files.read_bytes(part))).read_all() for part in paths]
    table = pa.concat_tables(tables)
    weights = table.column("weight").to_numpy()
    by_weight = np.argsort(-weights, kind="stable")
    # Equal documents do not count as near: they meet in one shard, which drops them.
    digests, first = np.unique(
        np.array(table.column("digest").to_pylist(), dtype=object)[by_weight], return_index=True
    )
    chosen = by_weight[first]
    flat = table.column("signature").combine_chunks().flatten().to_numpy()
    signed = flat.reshape(len(table), -1)[chosen] if len(table) else signatures([])
    assert quality.near_duplicates is not None
    positions = near_duplicates(
        digests.tolist(), signed, quality.near_duplicates, weights[chosen].tolist()
    )
    dropped = pa.record_batch({"digest": pa.array(digests[positions].tolist(), pa.binary(32))})
    _write(path, dropped)
    dropped_digests.cache_clear()  # it may hold output of an earlier run
    for part in paths:
        files.remove(part)
    return path


def _sign(quality: QualityConfig, seed: int, task: tuple[Block, str]) -> None:
    block, path = task
    digests: list[bytes] = []
    weights: list[float] = []
    signed = [signatures([])]
    documents = kept_documents(block, quality, Counter())
    used = (document for document in documents if copies_of(document, block.corpus, seed))
    for part in in_parts(used, block.part_bytes):
        digests.extend(document.digest for document in part)
        weights.extend(block.corpus.weight(document.source) for document in part)
        signed.append(signatures([document.text for document in part]))
    whole = np.concatenate(signed)
    flat = pa.array(whole.reshape(-1), pa.uint32())
    _write(
        path,
        pa.record_batch(
            {
                "digest": pa.array(digests, pa.binary(32)),
                "weight": pa.array(weights, pa.float64()),
                "signature": pa.FixedSizeListArray.from_arrays(flat, whole.shape[1]),
            }
        ),
    )


def _write(path: str, batch: pa.RecordBatch) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    files.write_bytes(path, sink.getvalue())


@lru_cache(maxsize=2)
def dropped_digests(path: str | None) -> frozenset[bytes]:
    """Return the digests that `find_near_duplicates` wrote; empty without a path."""
    if path is None:
        return frozenset()
    table = pa.ipc.open_file(pa.py_buffer(files.read_bytes(path))).read_all()
    return frozenset(table.column("digest").to_pylist())


def evaluation_files(quality: QualityConfig) -> tuple[str, ...]:
    """Return the absolute paths of `quality.contamination`'s files: workers run in other
    folders."""
    named = (path for source in quality.contamination for path in files.find_files(source))
    return tuple(files.absolute(path) for path in named)


def evaluation_inputs(quality: QualityConfig) -> list[DatasetInput]:
    """Return the evaluation sets to look for, whose files `quality` names, with their sha256."""
    _evaluation_grams.cache_clear()  # the files may have changed since an earlier run
    return [
        DatasetInput(f"evaluation {number}", files.sha256_of(path), path)
        for number, path in enumerate(quality.contamination)
    ]


@lru_cache(maxsize=1)
def _evaluation_grams(paths: tuple[str, ...], ngram: int) -> EvaluationGrams | None:
    """Return the n-grams to look for, built once per process; None if there are no paths."""
    if not paths:
        return None
    return EvaluationGrams((row for path in paths for row in _evaluation_rows(path)), ngram)


def _evaluation_rows(path: str) -> Iterator[tuple[str, int, str]]:
    """Yield (file, row, text) of every text of several words; rows count from 1, without the
    header.

    In text files a row is a line and tabs separate its texts; in JSON every string is a row.
    """
    suffix, _ = files.suffixes(path)
    data = files.read_contents(path)
    if suffix == "txt":
        lines = data.decode("utf-8", "replace").split("\n")
        rows: Sequence[object] = [line.split("\t") for line in lines]
    elif suffix == "json":
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = json_rows(data, path)  # one object per line; else `json_rows` reports the error
        rows = list(_texts_in(value))
    elif data.startswith(MAGIC):
        table = ParquetTable(data, path)
        names = [each.name for each in table.schema if may_hold_text(each.type)]
        rows = [[row[name] for name in names] for row in table.rows()]
    else:
        rows = table_rows(data, path)
    for number, row in enumerate(rows, start=1):
        for text in filter(_PROSE.search, _texts_in(row)):
            yield path, number, text


def _texts_in(value: object) -> Iterator[str]:
    """Yield every string inside a JSON value, in order, as in SQuAD's files."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(item)


def dropped_documents(counts: Mapping[str, Any]) -> dict[str, int]:
    """Return how many documents were left out, by reason."""
    dropped = {name: counts.get(f"{DROPPED}{name}", 0) for name in REASONS}
    return {reason: count for reason, count in dropped.items() if count}


def pop_overlaps(counts: Counter[str]) -> list[dict[str, Any]]:
    """Remove from `counts` the counts of evaluation rows found in documents; return file, row and
    number of documents of each."""
    overlaps = []
    for key in sorted(key for key in counts if key.startswith(f"{OVERLAP}\t")):
        _, source, row = key.split("\t")
        file, documents = without_secrets(source), counts.pop(key)
        overlaps.append({"source": file, "row": int(row), "documents": documents})
    return sorted(overlaps, key=lambda overlap: (overlap["source"], overlap["row"]))
