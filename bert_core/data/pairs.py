"""Documents to next-sentence pairs, as the BERT paper has them.

A pair is four positions in the flat ids of its shard, because a segment is always a run of adjacent
sentences: nothing is copied until `assemble`. Masking comes after, in `masking`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Integer, UInt8

from bert_core.data.ragged import ragged_ranges
from bert_core.errors import ConfigError, CorpusError

IS_NEXT, IS_RANDOM = 0, 1  # Hugging Face's and Google's `next_sentence_label`
SPECIAL_TOKENS_PER_PAIR = 3  # [CLS] A [SEP] B [SEP]


@dataclass(frozen=True, kw_only=True)
class PairsConfig:
    """How sentences become pairs. Defaults: google-research/bert, create_pretraining_data.py."""

    max_length: int = 128
    """Most ids of a row, special tokens included."""
    short_seq_prob: float = 0.1
    """Share of pairs that aim at a random shorter length, so that both kinds are seen."""
    dupe_factor: int = 10
    """How many times every document is paired and masked anew."""

    def __post_init__(self) -> None:
        if not 8 <= self.max_length <= 65_535:
            raise ConfigError(f"max_length: wanted 8 to 65535, got {self.max_length}: 128 is usual")
        if not 0.0 <= self.short_seq_prob <= 1.0:
            raise ConfigError(f"short_seq_prob: wanted 0 to 1, got {self.short_seq_prob}")
        if self.dupe_factor < 1:
            raise ConfigError(f"dupe_factor: wanted at least 1, got {self.dupe_factor}")


@dataclass(frozen=True)
class Documents:
    """Encoded documents, flat: ids of sentences one after the other, no sentence empty.

    `sentence_offsets` (sentences + 1) cuts `input_ids`; `document_offsets` (documents + 1) cuts the
    sentences; equal `digests` are adjacent among the first `own`. Documents from `own` on are
    borrowed: random sentences may come from them, no pair begins in them.
    """

    input_ids: Integer[np.ndarray, "tokens"]
    sentence_offsets: Integer[np.ndarray, "sentences_1"]
    document_offsets: Integer[np.ndarray, "documents_1"]
    digests: list[bytes]
    own: int


@dataclass(frozen=True)
class Pairs:
    """Segments A and B of each pair as half-open ranges of the flat ids, and the label."""

    a_start: Integer[np.ndarray, "pairs"]
    a_end: Integer[np.ndarray, "pairs"]
    b_start: Integer[np.ndarray, "pairs"]
    b_end: Integer[np.ndarray, "pairs"]
    next_sentence_label: UInt8[np.ndarray, "pairs"]

    @classmethod
    def concatenate(cls, several: Sequence["Pairs"]) -> "Pairs":
        """All pairs of `several`, in their order."""
        columns = zip(
            *((p.a_start, p.a_end, p.b_start, p.b_end, p.next_sentence_label) for p in several),
            strict=True,
        )
        return cls(*(np.concatenate(column) for column in columns))

    def __len__(self) -> int:
        return len(self.a_start)

    def take(self, order: Integer[np.ndarray, "picked"]) -> "Pairs":
        """The pairs at the positions `order`, in that order."""
        return Pairs(
            self.a_start[order],
            self.a_end[order],
            self.b_start[order],
            self.b_end[order],
            self.next_sentence_label[order],
        )


@dataclass(frozen=True)
class Rows:
    """`[CLS] A [SEP] B [SEP]` of every pair, flat; `offsets` (rows + 1) cuts `input_ids`.

    `segment_b_start` counts from the row's beginning; `maskable` is False on special tokens.
    """

    input_ids: Integer[np.ndarray, "tokens"]
    offsets: Integer[np.ndarray, "rows_1"]
    segment_b_start: Integer[np.ndarray, "rows"]
    maskable: Bool[np.ndarray, "tokens"]


def make_pairs(
    documents: Documents,
    word_start: Bool[np.ndarray, "tokens"],
    config: PairsConfig,
    rng: np.random.Generator,
) -> Pairs:
    """Pair every own document's sentences once.

    For every pair a fair coin says whether B is what follows A or comes from a document with
    another text. A chunk that is one sentence takes the next one in as well or, at the end of its
    document, is cut at a word, so that either label stays possible; one that is a single word is
    left out. A chunk's sentences that a random B displaces are put back.

    Raises: CorpusError if all documents have one text.
    Source: Devlin et al. 2019, section 3.1 and appendix A.2; google-research/bert
    create_instances_from_document, which makes every one-sentence chunk random.
    """
    runs = _runs_of_equal_digests(documents)
    found: list[tuple[int, int, int, int, int]] = []
    for document in range(documents.own):
        before, after = runs[document]
        others = before + len(documents.digests) - after
        if not others:
            raise CorpusError(
                "next-sentence pairs: wanted at least two documents with different texts, got one: "
                "add documents, or mark their boundaries with blank lines (document_boundary)"
            )
        _pair_document(documents, document, (before, after), word_start, config, rng, found)
    columns = np.array(found, dtype=np.int64).reshape(-1, 5)
    a_start, a_end, b_start, b_end, label = columns.T
    return Pairs(a_start, a_end, b_start, b_end, label.astype(np.uint8))


def _pair_document(
    documents: Documents,
    document: int,
    run: tuple[int, int],
    word_start: np.ndarray,
    config: PairsConfig,
    rng: np.random.Generator,
    found: list[tuple[int, int, int, int, int]],
) -> None:
    budget = config.max_length - SPECIAL_TOKENS_PER_PAIR
    starts = documents.sentence_offsets
    sentence, end = (int(i) for i in documents.document_offsets[document : document + 2])
    while sentence < end:
        target = budget
        if rng.random() < config.short_seq_prob:
            target = int(rng.integers(2, budget + 1))
        chunk_start, chunk_tokens = int(starts[sentence]), 0
        chunk_end = sentence
        while chunk_end < end and chunk_tokens < target:
            chunk_end += 1
            chunk_tokens = int(starts[chunk_end]) - chunk_start
        if chunk_end - sentence == 1 and chunk_end < end:
            chunk_end += 1
        if chunk_end - sentence == 1:
            a_end = _cut_at_a_word(chunk_start, int(starts[chunk_end]), word_start, rng)
            if a_end is None:
                return
            put_back = chunk_end
        else:
            put_back = sentence + int(rng.integers(1, chunk_end - sentence))
            a_end = int(starts[put_back])
        if rng.random() < 0.5:
            label, b_start, b_end = IS_NEXT, a_end, int(starts[chunk_end])
            sentence = chunk_end
        else:
            label = IS_RANDOM
            b_start, b_end = _random_segment(
                documents, run, max(target - (a_end - chunk_start), 1), rng
            )
            sentence = put_back
        found.append((*_truncate(chunk_start, a_end, b_start, b_end, budget, rng), label))


def _runs_of_equal_digests(documents: Documents) -> list[tuple[int, int]]:
    """For each own document the half-open run of own documents with its text."""
    runs: list[tuple[int, int]] = []
    start = 0
    for index in range(1, documents.own + 1):
        if index == documents.own or documents.digests[index] != documents.digests[start]:
            runs.extend([(start, index)] * (index - start))
            start = index
    return runs


def _cut_at_a_word(
    start: int, end: int, word_start: np.ndarray, rng: np.random.Generator
) -> int | None:
    cuts = np.flatnonzero(word_start[start + 1 : end])
    return None if cuts.size == 0 else start + 1 + int(cuts[rng.integers(cuts.size)])


def _random_segment(
    documents: Documents, run: tuple[int, int], target: int, rng: np.random.Generator
) -> tuple[int, int]:
    """Adjacent sentences of about `target` ids from a document outside `run`."""
    before, after = run
    other = int(rng.integers(before + len(documents.digests) - after))
    if other >= before:
        other += after - before
    first, end = (int(i) for i in documents.document_offsets[other : other + 2])
    sentence = int(rng.integers(first, end))
    start = stop = int(documents.sentence_offsets[sentence])
    while sentence < end and stop - start < target:
        sentence += 1
        stop = int(documents.sentence_offsets[sentence])
    return start, stop


def _truncate(
    a_start: int, a_end: int, b_start: int, b_end: int, budget: int, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Take ids from the longer segment until both fit, each from a random end."""
    a, b = a_end - a_start, b_end - b_start
    excess = a + b - budget
    if excess <= 0:
        return a_start, a_end, b_start, b_end
    # The longer side loses ids until both are equal; then they lose in turn, B first.
    from_longer = min(excess, abs(a - b))
    rest = excess - from_longer
    from_a = (from_longer if a > b else 0) + rest // 2
    from_b = (from_longer if b > a else 0) + rest - rest // 2
    a_front = int(rng.binomial(from_a, 0.5))
    b_front = int(rng.binomial(from_b, 0.5))
    return (
        a_start + a_front,
        a_end - (from_a - a_front),
        b_start + b_front,
        b_end - (from_b - b_front),
    )


def assemble(
    input_ids: Integer[np.ndarray, "tokens"], pairs: Pairs, *, cls_id: int, sep_id: int
) -> Rows:
    """Lay every pair out as `[CLS] A [SEP] B [SEP]`."""
    a_lengths, b_lengths = pairs.a_end - pairs.a_start, pairs.b_end - pairs.b_start
    offsets = np.zeros(len(a_lengths) + 1, dtype=np.int64)
    np.cumsum(a_lengths + b_lengths + SPECIAL_TOKENS_PER_PAIR, out=offsets[1:])
    begins = offsets[:-1]
    rows = np.empty(offsets[-1], dtype=input_ids.dtype)
    maskable = np.ones(offsets[-1], dtype=bool)
    first_sep = begins + 1 + a_lengths
    for positions, token in ((begins, cls_id), (first_sep, sep_id), (offsets[1:] - 1, sep_id)):
        rows[positions] = token
        maskable[positions] = False
    rows[ragged_ranges(begins + 1, a_lengths)] = input_ids[ragged_ranges(pairs.a_start, a_lengths)]
    rows[ragged_ranges(first_sep + 1, b_lengths)] = input_ids[
        ragged_ranges(pairs.b_start, b_lengths)
    ]
    return Rows(rows, offsets, first_sep + 1 - begins, maskable)
