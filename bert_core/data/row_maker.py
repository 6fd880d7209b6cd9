"""Makes the finished rows of a shard from its documents: paired, permuted, laid out, masked.

All draws depend on (seed, shard) only. Rows are masked in slices, which bounds the memory that
masking takes.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
from jaxtyping import Integer

from bert_core.data.draws import row_keys
from bert_core.data.masking import Masker, MaskingConfig
from bert_core.data.pairs import LABELS, Documents, PairsConfig, Segments, assemble, make_rows
from bert_core.data.ragged import offsets_of
from bert_core.data.shards import ShardRows
from bert_core.data.tokenizer import Tokenizer

SLICE_TOKENS = 1 << 18  # masking takes about 60 bytes per token


class RowMaker:
    """Makes the rows of shards with a tokenizer and the rules for pairs and masks."""

    def __init__(self, tokenizer: Tokenizer, pairs: PairsConfig, masking: MaskingConfig) -> None:
        self._tokenizer, self._pairs, self._masking = tokenizer, pairs, masking
        self._begins_word = tokenizer.begins_word
        self._masker = Masker(
            masking,
            vocab_size=tokenizer.vocab_size,
            special_ids=tokenizer.special_ids,
            mask_id=tokenizer.mask_id,
        )

    def __call__(
        self, documents: Documents, seed: int, shard: int
    ) -> tuple[ShardRows, Counter[str]]:
        """Make the rows of a shard, with every document `dupe_factor` times, and count them.

        Repetition d is paired with the random generator of (seed, shard, d), all rows are permuted
        with that of (seed, shard, `dupe_factor`), and a row is masked by the key (seed, shard,
        row).
        """
        dupes = self._pairs.dupe_factor
        generators = [np.random.default_rng([seed, shard, n]) for n in range(dupes + 1)]
        begins_word = self._begins_word[documents.input_ids]
        segments = Segments.concatenate(
            [make_rows(documents, begins_word, self._pairs, rng) for rng in generators[:-1]]
        )
        segments = segments.take(generators[-1].permutation(len(segments)))
        rows = self._lay_out(documents.input_ids, segments)
        if self._masking.dynamic:
            bits = np.packbits(self._begins_word[rows.input_ids], bitorder="little")
            finished, counts = replace(rows, begins_word=bits), Counter[str]()
        else:
            finished, counts = self._mask(rows, seed, shard)
        label = LABELS[self._pairs.kind]
        counts.update(
            rows=len(rows),
            row_tokens=len(rows.input_ids),
            **({f"{label}_1": int(segments.labels.sum())} if label else {}),
        )
        return finished, counts

    def _lay_out(self, input_ids: Integer[np.ndarray, "tokens"], segments: Segments) -> ShardRows:
        offsets = offsets_of(segments.lengths())
        laid_out = np.empty(offsets[-1], dtype=input_ids.dtype)
        segment_b_start = np.empty(len(segments), dtype=np.uint16)
        for first, last in _slices(offsets):
            rows = assemble(
                input_ids,
                segments.take(np.arange(first, last)),
                cls_id=self._tokenizer.cls_id,
                sep_id=self._tokenizer.sep_id,
            )
            laid_out[offsets[first] : offsets[last]] = rows.input_ids
            segment_b_start[first:last] = rows.segment_b_start
        label = LABELS[self._pairs.kind]
        return ShardRows(
            input_ids=laid_out,
            offsets=offsets,
            segment_b_start=segment_b_start,
            labels={label: segments.labels} if label else {},
        )

    def _mask(self, rows: ShardRows, seed: int, shard: int) -> tuple[ShardRows, Counter[str]]:
        counts: Counter[str] = Counter()
        positions, labels = [np.zeros(0, np.uint16)], [np.zeros(0, rows.input_ids.dtype)]
        picked = np.zeros(len(rows) + 1, dtype=np.int64)  # how many each row has
        for first, last in _slices(rows.offsets):
            start, end = rows.offsets[first], rows.offsets[last]
            offsets = rows.offsets[first : last + 1] - start
            ids = rows.input_ids[start:end]
            keys = row_keys(seed, shard, np.arange(first, last))
            masked = self._masker(ids, offsets, self._begins_word[ids], keys)
            seen = masked.input_ids[masked.positions]
            rows.input_ids[start:end] = masked.input_ids
            row = np.searchsorted(offsets, masked.positions, side="right") - 1
            positions.append((masked.positions - offsets[row]).astype(np.uint16))
            labels.append(masked.labels)
            picked[first + 1 : last + 1] = np.bincount(row, minlength=last - first)
            counts.update(
                masked_tokens=len(seen),
                masked_as_mask=int((seen == self._tokenizer.mask_id).sum()),
                masked_as_they_are=int((seen == masked.labels).sum()),
            )
        finished = replace(
            rows,
            masked_positions=np.concatenate(positions),
            masked_labels=np.concatenate(labels),
            masked_offsets=np.cumsum(picked),
        )
        return finished, counts


def _slices(offsets: Integer[np.ndarray, "rows_1"]) -> list[tuple[int, int]]:
    """Return runs of rows (start, end), each of about `SLICE_TOKENS` tokens."""
    cuts = np.searchsorted(offsets, np.arange(0, offsets[-1], SLICE_TOKENS))
    return list(pairwise(np.unique([*cuts, len(offsets) - 1]).tolist()))
