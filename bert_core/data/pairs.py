"""Documents to rows of segments: next-sentence pairs, sentence-order pairs, full sentences.

A segment is a run of adjacent sentences of one document, so it is two positions in the flat ids of
its shard: nothing is copied until `assemble`. Masking comes later, in `masking`.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Bool, Integer, UInt8

from bert_core.checks import PositiveInt, Range, Share, check_fields
from bert_core.data.ragged import offsets_of, ragged_ranges
from bert_core.errors import CorpusError

IS_NEXT, IS_RANDOM = 0, 1  # Hugging Face's and Google's `next_sentence_label`
IN_ORDER, SWAPPED = 0, 1  # Hugging Face's `sentence_order_label`
SPECIAL_TOKENS_PER_PAIR = 3  # [CLS] A [SEP] B [SEP]

PairsKind = Literal["nsp", "sop", "full_sentences", "doc_sentences"]
LABELS: dict[PairsKind, str | None] = {
    "nsp": "next_sentence_label",
    "sop": "sentence_order_label",
    "full_sentences": None,
    "doc_sentences": None,
}
"""The column of a kind's labels, if it has any."""


@dataclass(frozen=True, kw_only=True)
class PairsConfig:
    """How sentences become rows. Defaults: google-research/bert, create_pretraining_data.py."""

    kind: PairsKind = "nsp"
    """`nsp`: two segments, the second is next or random (BERT); `sop`: two segments, in order or
    swapped (ALBERT); `full_sentences`: rows filled with sentences, across documents (RoBERTa);
    `doc_sentences`: the same within one document (SpanBERT)."""
    max_length: Annotated[int, Range(least=8, most=65_535)] = 128
    """Maximum number of tokens per row, special ones included."""
    short_seq_prob: Share = 0.1
    """Share of pairs that aim at a random shorter length, so that training sees both."""
    dupe_factor: PositiveInt = 10
    """How many times every document is made into rows, with new random choices each time."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="pairs.")

    @property
    def is_pairs(self) -> bool:
        """Whether a row is two segments with a label."""
        return LABELS[self.kind] is not None


@dataclass(frozen=True)
class Documents:
    """Encoded documents, flat: ids of sentences one after the other, no sentence empty.

    `sentence_offsets` (sentences + 1) divides `input_ids`; `document_offsets` (documents + 1)
    divides the sentences; equal `digests` are adjacent among the first `num_own`. Documents from
    `num_own` on are borrowed: random sentences may come from them, but no row begins in them.
    """

    input_ids: Integer[np.ndarray, "tokens"]
    sentence_offsets: Integer[np.ndarray, "sentences_1"]
    document_offsets: Integer[np.ndarray, "documents_1"]
    digests: list[bytes]
    num_own: int


@dataclass(frozen=True)
class Segments:
    """Segments as half-open ranges of the flat ids; `row_offsets` (rows + 1) divides them by row.

    `labels` has the column that `LABELS` names, one per row; empty if it names none.
    """

    starts: Integer[np.ndarray, "segments"]
    ends: Integer[np.ndarray, "segments"]
    row_offsets: Integer[np.ndarray, "rows_1"]
    labels: UInt8[np.ndarray, "labels"]

    @classmethod
    def concatenate(cls, several: "list[Segments]") -> "Segments":
        """Return all rows of `several`, in order."""
        counts = np.concatenate([np.diff(segments.row_offsets) for segments in several])
        return cls(
            np.concatenate([segments.starts for segments in several]),
            np.concatenate([segments.ends for segments in several]),
            offsets_of(counts),
            np.concatenate([segments.labels for segments in several]),
        )

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    def take(self, rows: Integer[np.ndarray, "picked"]) -> "Segments":
        """Return the rows at the positions `rows`, in that order."""
        counts = np.diff(self.row_offsets)[rows]
        picked = ragged_ranges(self.row_offsets[rows], counts)
        labels = self.labels[rows] if len(self.labels) else self.labels
        return Segments(self.starts[picked], self.ends[picked], offsets_of(counts), labels)

    def lengths(self) -> Integer[np.ndarray, "rows"]:
        """Return the number of ids of each row, special tokens included."""
        tokens = offsets_of(self.ends - self.starts)[self.row_offsets]
        return 1 + np.diff(tokens) + np.diff(self.row_offsets)


@dataclass(frozen=True)
class FlatRows:
    """`[CLS] segment [SEP] segment [SEP] …` of every row, flat; `offsets` (rows + 1) divides them.

    `segment_b_start` is where the second segment of a pair begins, counted from the row's
    beginning; in other rows, which have token type 0 throughout, it is the row's length.
    """

    input_ids: Integer[np.ndarray, "tokens"]
    offsets: Integer[np.ndarray, "rows_1"]
    segment_b_start: Integer[np.ndarray, "rows"]


def make_rows(
    documents: Documents,
    word_start: Bool[np.ndarray, "tokens"],
    config: PairsConfig,
    rng: np.random.Generator,
) -> Segments:
    """Make rows of every own document, once, of the kind that `config` names.

    Args:
        word_start: whether each id of the documents begins a word.
    Raises: CorpusError if `kind` is "nsp" and all documents have the same text.
    """
    return ROWS[config.kind](documents, word_start, config, rng)


def _pairs(
    documents: Documents,
    word_start: Bool[np.ndarray, "tokens"],
    config: PairsConfig,
    rng: np.random.Generator,
    *,
    random_next: bool,
) -> Segments:
    """Make pairs of every own document's sentences, once.

    A fair coin decides the label of every pair. With `random_next`: whether B follows A or comes
    from a document with a different text; without: whether A and B are swapped. A chunk of a single
    sentence also takes the next sentence or, at the end of its document, is cut at a word, so that
    either label stays possible; a chunk of a single word is left out. Sentences of a chunk that a
    random B replaces are put back.

    Source: Devlin et al. 2019, section 3.1 and appendix A.2; google-research/bert
    create_instances_from_document, which makes every one-sentence chunk random; Lan et al. 2020,
    section 3.1, for the order of sentences.
    """
    coins, draws, cuts = rng.spawn(3)
    pairing = _Pairing(documents, word_start, config, _uniform(coins), _uniform(draws), random_next)
    flat = array("q")
    for document, run in enumerate(_runs_of_equal_digests(documents)):
        pairing.add(document, run, flat)
    columns = np.array(flat, dtype=np.int64).reshape(-1, 5)
    ranges = _truncate(columns[:, :4], config.max_length - SPECIAL_TOKENS_PER_PAIR, cuts)
    labels = columns[:, 4].astype(np.uint8)
    if not random_next:
        ranges = np.where(labels[:, None] == SWAPPED, ranges[:, [2, 3, 0, 1]], ranges)
    row_offsets = np.arange(0, 2 * len(labels) + 1, 2)
    return Segments(ranges[:, ::2].reshape(-1), ranges[:, 1::2].reshape(-1), row_offsets, labels)


def _uniform(rng: np.random.Generator) -> Callable[[], float]:
    """Return a function that returns `rng.random`'s numbers, drawn a few thousand at a time: a
    tenth of the time of single calls."""

    def endless() -> Iterator[float]:
        while True:
            yield from rng.random(4096).tolist()

    return endless().__next__


@dataclass
class _Pairing:
    """Walks through documents and draws pairs, on Python integers."""

    documents: Documents
    word_start: np.ndarray
    config: PairsConfig
    coin: Callable[[], float]
    draw: Callable[[], float]
    random_next: bool

    def __post_init__(self) -> None:
        self.budget = self.config.max_length - SPECIAL_TOKENS_PER_PAIR
        self.starts: list[int] = self.documents.sentence_offsets.tolist()
        self.firsts: list[int] = self.documents.document_offsets.tolist()

    def add(self, document: int, run: tuple[int, int], flat: array) -> None:
        """Append (A's start, end, B's start, end, label) to `flat` for each pair of a document.

        Args:
            run: the documents with the same text, from which no random B may come.
        """
        if self.random_next and run == (0, len(self.firsts) - 1):
            raise CorpusError(
                "next-sentence pairs: wanted at least two documents with different texts, got one: "
                "add documents, mark their boundaries with blank lines (document_boundary), or "
                "set pairs.kind to sop or doc_sentences"
            )
        starts, draw = self.starts, self.draw
        sentence, end = self.firsts[document : document + 2]
        while sentence < end:
            target = self.budget
            if draw() < self.config.short_seq_prob:
                target = 2 + int(draw() * (self.budget - 1))
            first = starts[sentence]
            chunk_end = bisect_left(starts, first + target, sentence + 1, end)
            if chunk_end == sentence + 1 < end:
                chunk_end += 1
            if chunk_end == sentence + 1:
                split = _cut_at_a_word(first, starts[chunk_end], self.word_start, draw)
                if split is None:
                    return
                put_back = chunk_end
            else:
                put_back = sentence + 1 + int(draw() * (chunk_end - sentence - 1))
                split = starts[put_back]
            label = int(self.coin() >= 0.5)
            if label and self.random_next:
                b = self._random_segment(run, max(target - (split - first), 1))
                sentence = put_back
            else:
                b = split, starts[chunk_end]
                sentence = chunk_end
            flat.extend((first, split, *b, label))

    def _random_segment(self, run: tuple[int, int], target: int) -> tuple[int, int]:
        """Draw adjacent sentences of about `target` ids from a document outside `run`."""
        before, after = run
        document = int(self.draw() * (before + len(self.firsts) - 1 - after))
        if document >= before:
            document += after - before
        first, end = self.firsts[document : document + 2]
        sentence = first + int(self.draw() * (end - first))
        start = self.starts[sentence]
        return start, self.starts[bisect_left(self.starts, start + target, sentence + 1, end)]


def _runs_of_equal_digests(documents: Documents) -> list[tuple[int, int]]:
    """Return for each own document the half-open run of own documents with the same text."""
    runs: list[tuple[int, int]] = []
    start = 0
    for index in range(1, documents.num_own + 1):
        if index == documents.num_own or documents.digests[index] != documents.digests[start]:
            runs.extend([(start, index)] * (index - start))
            start = index
    return runs


def _cut_at_a_word(
    start: int, end: int, word_start: np.ndarray, draw: Callable[[], float]
) -> int | None:
    cuts = np.flatnonzero(word_start[start + 1 : end])
    return None if cuts.size == 0 else start + 1 + int(cuts[int(draw() * cuts.size)])


def _truncate(
    ranges: Integer[np.ndarray, "pairs 4"], budget: int, rng: np.random.Generator
) -> Integer[np.ndarray, "pairs 4"]:
    """Remove ids from the longer segment of each pair until both fit, each from a random end."""
    lengths = ranges[:, 1::2] - ranges[:, ::2]
    a, b = lengths.T
    excess = np.maximum(a + b - budget, 0)
    # The longer side loses ids until both are equal; then they lose alternately, B first.
    from_longer = np.minimum(excess, np.abs(a - b))
    shared = excess - from_longer
    lost = np.stack(
        [
            np.where(a > b, from_longer, 0) + shared // 2,
            np.where(b > a, from_longer, 0) + shared - shared // 2,
        ],
        axis=1,
    )
    from_front = rng.binomial(lost, 0.5)
    cut = ranges.copy()
    cut[:, ::2] += from_front
    cut[:, 1::2] -= lost - from_front
    return cut


def _full_sentences(
    documents: Documents,
    word_start: Bool[np.ndarray, "tokens"],
    config: PairsConfig,
    rng: np.random.Generator,
    *,
    cross_documents: bool,
) -> Segments:
    """Fill every row with sentences in order, documents in random order.

    With `cross_documents` a row continues in the next document, after a [SEP]. A sentence longer
    than a row is cut; no id is lost.
    Source: Liu et al. 2019, section 4.2, FULL-SENTENCES and DOC-SENTENCES, the single segments of
    Joshi et al. 2020, section 3.3.
    """
    order = rng.permutation(documents.num_own)
    first, counts = documents.document_offsets[order], np.diff(documents.document_offsets)[order]
    sentences = ragged_ranges(first, counts)
    starts, ends = documents.sentence_offsets[sentences], documents.sentence_offsets[sentences + 1]
    longest = config.max_length - 2  # [CLS] and [SEP]
    parts = -(-(ends - starts) // longest)
    document = np.repeat(np.repeat(np.arange(len(order)), counts), parts)
    starts = ragged_ranges(np.zeros_like(parts), parts) * longest + np.repeat(starts, parts)
    ends = np.minimum(starts + longest, np.repeat(ends, parts))
    # Count of ids up to each piece, plus a [SEP] for every document before: a row's length is the
    # difference between its last stop and its first begin, plus two.
    total = np.cumsum(ends - starts)
    begins, stops = (total - (ends - starts) + document), (total + document)
    last_of_document = np.searchsorted(document, document, side="right")
    row_starts = _greedy_rows(
        begins.tolist(),
        stops.tolist(),
        [len(stops)] * len(stops) if cross_documents else last_of_document.tolist(),
        longest,
    )
    new_row = np.zeros(len(starts), dtype=bool)
    new_row[row_starts] = True
    new_segment = new_row | (np.diff(document, prepend=-1) != 0)
    at = np.flatnonzero(new_segment)
    last = np.append(at, len(starts))[1:] - 1
    row_offsets = np.append(np.searchsorted(at, np.flatnonzero(new_row)), len(at))
    return Segments(starts[at], ends[last], row_offsets, np.zeros(0, dtype=np.uint8))


def _greedy_rows(begins: list[int], stops: list[int], limits: list[int], longest: int) -> list[int]:
    """Return the first piece of each row. A row takes the pieces that fit into `longest` ids and
    come before the limit of its first piece."""
    row_starts, at = [], 0
    while at < len(begins):
        row_starts.append(at)
        at = bisect_right(stops, begins[at] + longest, at + 1, limits[at])
    return row_starts


ROWS: dict[PairsKind, Callable[..., Segments]] = {
    "nsp": partial(_pairs, random_next=True),
    "sop": partial(_pairs, random_next=False),
    "full_sentences": partial(_full_sentences, cross_documents=True),
    "doc_sentences": partial(_full_sentences, cross_documents=False),
}


def assemble(
    input_ids: Integer[np.ndarray, "tokens"], segments: Segments, *, cls_id: int, sep_id: int
) -> FlatRows:
    """Lay every row out as `[CLS]` and its segments, each followed by `[SEP]`."""
    lengths = segments.ends - segments.starts
    offsets = offsets_of(segments.lengths())
    first = segments.row_offsets[:-1]
    is_first = np.zeros(len(lengths), dtype=np.int64)
    is_first[first] = 1
    # Every segment takes its ids and a [SEP], the first of a row also a [CLS] before them.
    seps = np.cumsum(lengths + 1 + is_first) - 1
    rows = np.empty(offsets[-1], dtype=input_ids.dtype)
    rows[offsets[:-1]] = cls_id
    rows[seps] = sep_id
    rows[ragged_ranges(seps - lengths, lengths)] = input_ids[
        ragged_ranges(segments.starts, lengths)
    ]
    is_pair = np.full(len(segments), bool(len(segments.labels)))
    segment_b_start = np.where(is_pair, 2 + lengths[first], np.diff(offsets))
    return FlatRows(rows, offsets, segment_b_start)
