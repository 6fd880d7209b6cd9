"""What goes into fragments comes back shard by shard, in one order whatever the parts were."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from bert_core.data.fragments import (
    FragmentPart,
    as_documents,
    distinct,
    read_counts,
    read_shard,
    write_fragment,
)
from bert_core.data.pairs import Documents

SHARDS = 5
IDS = pa.uint16()
EMPTY = 3  # the shard that has no documents


@dataclass(frozen=True)
class Written:
    """A document as it is given: which one, its ids by sentence, its copies, its shard."""

    number: int
    sentences: list[list[int]]
    copies: int = 1
    shard: int = 0

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(str(self.number).encode()).digest()


def corpus(seed: int = 0) -> list[Written]:
    """60 documents; some are equal, some have no ids, some sentences neither."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(60):
        sizes = rng.integers(0, 6, rng.integers(0, 5))
        sentences = [rng.integers(0, 1000, size).tolist() for size in sizes]
        shard = int(rng.choice([0, 1, 2, 4]))
        found += [Written(number, sentences, 1, shard)] * int(rng.choice([1, 1, 1, 3]))
    return found


def part(documents: Sequence[Written], id_type: pa.DataType = IDS) -> FragmentPart:
    return FragmentPart(
        digests=[document.digest for document in documents],
        copies=np.array([document.copies for document in documents], dtype=np.int64),
        sources=np.array([document.number for document in documents], dtype=np.int64),
        shards=np.array([document.shard for document in documents], dtype=np.int64),
        sentences=pa.array(
            [document.sentences for document in documents], pa.list_(pa.list_(id_type))
        ),
    )


def write(path: Path, parts: list[FragmentPart], id_type: pa.DataType = IDS) -> str:
    with open(path, "wb") as sink:
        write_fragment(sink, iter(parts), SHARDS, Counter(), id_type)
    return str(path)


def fragments(folder: Path, documents: list[Written], cuts: list[list[int]]) -> list[str]:
    """A fragment for each of `cuts`, the sizes of its parts."""
    rest = iter(documents)
    paths = []
    for number, sizes in enumerate(cuts):
        parts = [part([next(rest) for _ in range(size)]) for size in sizes]
        paths.append(write(folder / f"{number}.arrow", parts))
    assert next(rest, None) is None
    return paths


def table_of(*documents: Written) -> pa.Table:
    """The documents as `read_shard` gives those of a shard: by digest."""
    given = part(sorted(documents, key=lambda document: document.digest))
    columns = {"digest": pa.array(given.digests, pa.binary(32))}
    columns |= {"copies": pa.array(given.copies, pa.uint16())}
    columns |= {"source": pa.array(given.sources, pa.uint16()), "sentences": given.sentences}
    return pa.table(columns)


def contents(documents: Documents) -> list[tuple[bytes, list[list[int]]]]:
    """(digest, sentences) of every document."""
    sentences = np.split(documents.input_ids, documents.sentence_offsets[1:-1])
    cuts = documents.document_offsets
    return [
        (digest, [sentence.tolist() for sentence in sentences[cuts[n] : cuts[n + 1]]])
        for n, digest in enumerate(documents.digests)
    ]


def wanted(documents: Sequence[Written]) -> list[tuple[bytes, list[list[int]]]]:
    """What `contents` is to be: by digest, nothing without ids."""
    every = sorted(documents, key=lambda document: document.digest)
    found = [(document.digest, list(filter(None, document.sentences))) for document in every]
    return [(digest, sentences) for digest, sentences in found if sentences]


@pytest.mark.parametrize("id_type", [pa.uint16(), pa.uint32()])
def test_every_shard_gets_its_documents_back(tmp_path: Path, id_type: pa.DataType) -> None:
    documents = corpus()
    path = write(tmp_path / "a.arrow", [part(documents, id_type)], id_type)
    for shard in range(SHARDS):
        own = [document for document in documents if document.shard == shard]
        table = read_shard([path], shard, SHARDS)
        assert len(table) == len(own)
        found = as_documents(table)
        assert contents(found) == wanted(own)
        assert found.num_own == len(found.digests)
        assert pa.from_numpy_dtype(found.input_ids.dtype) == id_type
        assert found.sentence_offsets[-1] == len(found.input_ids)
        assert (np.diff(found.sentence_offsets) > 0).all()
        assert (np.diff(found.document_offsets) > 0).all()
    assert as_documents(read_shard([path], EMPTY, SHARDS)).digests == []


def test_parts_and_fragments_change_nothing(tmp_path: Path) -> None:
    documents = corpus(1)
    size = len(documents)
    cuts = [[[size]], [[1, 0, 2], [size - 3]], [[1] * 20, [], [0], [7, size - 27]]]
    found = []
    for number, parts in enumerate(cuts):
        (tmp_path / str(number)).mkdir()
        paths = fragments(tmp_path / str(number), documents, parts)
        found.append([read_shard(paths, shard, SHARDS).to_pylist() for shard in range(SHARDS)])
    assert found[0] == found[1] == found[2]
    assert [bool(rows) for rows in found[0]] == [True, True, True, False, True]


def test_counts_are_those_when_the_last_part_was_written(tmp_path: Path) -> None:
    counts: Counter[str] = Counter(documents=0)

    def counted() -> Iterator[FragmentPart]:
        for n in range(3):
            counts.update(documents=1, **{f"überlapp\t{n}": 1 << 40})
            yield part([Written(n, [[1]], shard=n)])

    with open(tmp_path / "a.arrow", "wb") as sink:
        write_fragment(sink, counted(), SHARDS, counts, pa.uint16())
    assert read_counts(str(tmp_path / "a.arrow")) == counts
    assert counts["documents"] == 3
    path = write(tmp_path / "b.arrow", [])
    assert read_counts(path) == Counter()
    assert len(read_shard([path], 0, SHARDS)) == 0


def test_a_document_counts_as_often_as_it_has_copies(tmp_path: Path) -> None:
    documents = [Written(1, [[1], [2, 3]], 3), Written(2, [[4]], 0), Written(3, [[5]], 500)]
    found = as_documents(read_shard([write(tmp_path / "a.arrow", [part(documents)])], 0, SHARDS))
    counts = Counter(found.digests)
    assert counts == {documents[0].digest: 3, documents[2].digest: 500}
    assert contents(found) == wanted([documents[0]] * 3 + [documents[2]] * 500)


def test_one_of_equal_documents_is_kept_if_only_distinct_ones_are_wanted() -> None:
    same, other = [[1, 2], [3]], Written(2, [[4]])
    table = table_of(Written(1, same), Written(1, same), other, Written(1, same))
    assert contents(as_documents(distinct(table))) == wanted([Written(1, same), other])
    assert len(as_documents(table).digests) == 4


@pytest.mark.parametrize("copies", [(2, 1, 3), (0, 3, 1), (3, 0, 0), (3,)])
def test_the_duplicate_with_the_most_copies_is_kept(
    copies: tuple[int, ...], tmp_path: Path
) -> None:
    equal = [Written(1, [[1, 2]], count) for count in copies]
    documents = [*equal, Written(2, [[3]])]
    cuts = [[1]] * len(documents)
    found = distinct(read_shard(fragments(tmp_path, documents, cuts), 0, SHARDS))
    left = dict(zip(found["digest"].to_pylist(), found["copies"].to_pylist(), strict=True))
    assert left == {equal[0].digest: 3, documents[-1].digest: 1}


def test_no_row_begins_in_what_is_borrowed() -> None:
    own = [Written(1, [[1], [], [2]], 2), Written(2, [[], []]), Written(3, [[3]], 0)]
    borrowed = [Written(4, [[4], [5]], 7), Written(5, []), Written(1, [[1], [2]])]
    found = as_documents(table_of(*own), [table_of(*borrowed[:2]), table_of(borrowed[2])])
    assert found.num_own == 2
    assert contents(found)[:2] == wanted([own[0]]) * 2
    # Of what is borrowed copies do not count.
    assert contents(found)[2:] == [*wanted(borrowed[:2]), *wanted(borrowed[2:])]


def test_a_shard_without_documents_has_none() -> None:
    for table in (table_of(), table_of(Written(1, [])), table_of(Written(1, [[1]], 0))):
        found = as_documents(distinct(table))
        assert (found.num_own, found.digests, found.input_ids.tolist()) == (0, [], [])
        assert found.sentence_offsets.tolist() == found.document_offsets.tolist() == [0]
