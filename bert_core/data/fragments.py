"""Fragments: files between the two passes of preparation, each with the encoded documents of a
block of the corpus, grouped by shard.

A fragment is an Arrow IPC file of parts; a part is one record batch per shard, in order. So a block
of any size is encoded in bounded memory, and a shard reads only its own batches. An empty batch at
the end carries the counts.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from jaxtyping import Integer

from bert_core import files
from bert_core.data.pairs import Documents
from bert_core.data.ragged import offsets_of


@dataclass(frozen=True)
class FragmentPart:
    """Encoded documents: their digests, how many copies each stands for, which source each is from,
    which shard each belongs to, and their sentences, a list<list<ids>> with one list per
    document."""

    digests: list[bytes]
    copies: Integer[np.ndarray, "documents"]
    sources: Integer[np.ndarray, "documents"]
    shards: Integer[np.ndarray, "documents"]
    sentences: pa.ListArray


def write_fragment(
    sink: BinaryIO | BytesIO,
    parts: Iterable[FragmentPart],
    shards: int,
    counts: Counter[str],
    id_type: pa.DataType,
) -> None:
    """Write the parts as they arrive, then `counts`, which may change until the last part."""
    schema = pa.schema(
        {
            "digest": pa.binary(32),
            "copies": pa.uint16(),
            "source": pa.uint16(),
            "sentences": pa.list_(pa.list_(id_type)),
        }
    )
    with pa.ipc.new_file(sink, schema) as writer:
        for part in parts:
            columns = [
                pa.array(part.digests, pa.binary(32)),
                pa.array(part.copies, pa.uint16()),
                pa.array(part.sources, pa.uint16()),
                part.sentences,
            ]
            batch = pa.record_batch(columns, schema=schema)
            order = np.argsort(part.shards, kind="stable")
            cuts = np.searchsorted(part.shards[order], np.arange(shards + 1))
            for start, end in pairwise(cuts):
                writer.write_batch(batch.take(pa.array(order[start:end])))
        writer.write_batch(
            pa.record_batch([[]] * len(schema), schema=schema),
            custom_metadata={"counts": json.dumps(counts)},
        )


def read_counts(path: str) -> Counter[str]:
    """Return the counts that were made while the fragment was written."""
    with files.open_input(path) as file:
        reader = pa.ipc.open_file(file)
        last = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
        return Counter(json.loads(last.custom_metadata[b"counts"]))


def read_shard(paths: Sequence[str], shard: int, shards: int) -> pa.Table:
    """Return the documents of one shard in all fragments, sorted by digest; of documents with the
    same digest, the one with the most copies comes first.

    Args:
        shards: the number of all shards.
    """
    batches = []
    for path in paths:
        with files.open_input(path) as file:
            reader = pa.ipc.open_file(file)
            last = reader.num_record_batches - 1
            batches += [reader.get_batch(number) for number in range(shard, last, shards)]
            schema = reader.schema
    table = pa.Table.from_batches(batches, schema=schema)
    return table.sort_by([("digest", "ascending"), ("copies", "descending")])


def distinct(documents: pa.Table) -> pa.Table:
    """Keep only the first of documents with the same text.

    Args:
        documents: sorted by digest.
    """
    digests = documents.column("digest").to_pylist()
    firsts = [before != name for before, name in pairwise([None, *digests])]
    return documents.filter(pa.array(firsts, pa.bool_()))


def as_documents(main: pa.Table, borrowed: Sequence[pa.Table] = ()) -> Documents:
    """Return the documents of a shard in the form that `pairs` takes, each as often as it has
    copies.

    Args:
        main: the shard's own documents.
        borrowed: documents of other shards, from which random sentences may come.
    """
    copies = main.column("copies").to_numpy().astype(np.int64)
    main = main.take(pa.array(np.repeat(np.arange(len(main)), copies)))
    table = pa.concat_tables([main, *borrowed])
    sentences = table.column("sentences").combine_chunks()
    encoded = sentences.flatten()
    lengths = encoded.value_lengths().to_numpy()
    filled = np.flatnonzero(lengths)  # a sentence of white space and control characters has no ids
    before = offsets_of(lengths > 0)
    document_offsets = before[np.asarray(sentences.offsets) - sentences.offsets[0].as_py()]
    has_sentences = np.flatnonzero(np.diff(document_offsets))
    names = table.column("digest").to_pylist()
    return Documents(
        input_ids=encoded.flatten().to_numpy(),
        sentence_offsets=offsets_of(lengths[filled]),
        document_offsets=np.append(document_offsets[has_sentences], len(filled)),
        digests=[names[index] for index in has_sentences],
        num_own=int((has_sentences < len(main)).sum()),
    )
