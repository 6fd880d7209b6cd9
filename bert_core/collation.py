"""Turns sequences of token ids into NumPy arrays, packed end to end or padded; padding is added
nowhere else.

Each batch is padded to a multiple of 8 (the vector width that kernels like), or packed if the share
of padding would reach `packed_from`. `batches` makes tensors of the arrays.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Integer

from bert_core.data.ragged import offsets_of
from bert_core.data.windows import PAD_MULTIPLE, Window

Arrays = dict[str, np.ndarray]
"""A batch: the entries of `objectives.base.Batch`, as arrays."""


def pad(
    rows: Sequence[np.ndarray],
    pad_id: int,
    segment_b_start: Integer[np.ndarray, "rows"] | None = None,
    width: int | None = None,
) -> Arrays:
    """Return the inputs of B rows, padded to S: `width`, or the longest row, rounded up to a
    multiple of 8.

    `attention_mask` is omitted if no row is padded; ids from `segment_b_start` on are segment 1.
    """
    lengths = np.array([len(row) for row in rows])
    width = width or _width(lengths)
    input_ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = row
    positions = np.arange(width)
    attends = positions < lengths[:, None]
    token_type_ids = np.zeros_like(input_ids)
    if segment_b_start is not None:
        token_type_ids[(positions >= segment_b_start[:, None]) & attends] = 1
    batch = {"input_ids": input_ids, "token_type_ids": token_type_ids}
    if not attends.all():
        batch["attention_mask"] = attends.astype(np.int64)
    return batch


def pack(
    rows: Sequence[np.ndarray], segment_b_start: Integer[np.ndarray, "rows"] | None = None
) -> Arrays:
    """Return the inputs of B rows packed end to end: T tokens, no padding.

    Segments are assigned as in `pad`.
    """
    lengths = np.array([len(row) for row in rows])
    offsets = offsets_of(lengths)
    token_type_ids = np.zeros(offsets[-1], dtype=np.int64)
    if segment_b_start is not None:
        positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        token_type_ids[positions >= np.repeat(segment_b_start, lengths)] = 1
    return {
        "input_ids": np.concatenate(rows).astype(np.int64),
        "token_type_ids": token_type_ids,
        "offsets": offsets,
    }


def pad_or_pack(
    rows: Sequence[np.ndarray],
    pad_id: int,
    segment_b_start: Integer[np.ndarray, "rows"],
    packed_from: float,
) -> Arrays:
    """Return the inputs of rows, packed if the share of padding would reach `packed_from`."""
    lengths = np.array([len(row) for row in rows])
    if _is_packed(lengths, packed_from):
        return pack(rows, segment_b_start)
    return pad(rows, pad_id, segment_b_start)


def collate(
    windows: Sequence[Window], pad_id: int, packed_from: float = 1.0, width: int | None = None
) -> Arrays:
    """Return one batch of the windows' sequences, in order, with the positions to score and the
    labels.

    Args:
        packed_from: share of padding from which sequences are packed; 1 always pads.
        width: what to pad to; sequences are not packed then. None takes the width that `pad`
            chooses.
    """
    ids = [each for window in windows for each in window.ids]
    segments = np.array([each for window in windows for each in window.segment_b_start])
    if width is None:
        batch = pad_or_pack(ids, pad_id, segments, packed_from)
    else:
        batch = pad(ids, pad_id, segments, width)
    ends = np.cumsum([len(window.ids) for window in windows])
    starts = np.split(row_starts(batch, len(ids)), ends[:-1])
    for name in windows[0].positions:
        places = [
            window.positions[name] + start for window, start in zip(windows, starts, strict=True)
        ]
        batch[name] = np.concatenate(places)
    if len(ids) > len(windows):
        batch["choices"] = np.array([len(window.ids) for window in windows], dtype=np.int64)
    for name in windows[0].labels:
        batch[name] = np.concatenate([window.labels[name] for window in windows])
    return batch


def row_starts(batch: Mapping[str, np.ndarray], rows: int) -> Integer[np.ndarray, "rows"]:
    """Return the index at which each row begins among the flattened tokens."""
    if "offsets" in batch:
        return batch["offsets"][:-1]
    return np.arange(rows) * batch["input_ids"].shape[1]


def longest_row(positions: int) -> int:
    """Return the length of the longest row that a model with `positions` positions can read:
    padding the row to a multiple of 8 never exceeds the last position."""
    return positions // PAD_MULTIPLE * PAD_MULTIPLE


def laid_out_tokens(windows: Sequence[Window], packed_from: float = 1.0) -> int:
    """Return the number of tokens in the batch that `collate` makes of the windows, padding
    included."""
    lengths = np.array([len(ids) for window in windows for ids in window.ids])
    if _is_packed(lengths, packed_from):
        return int(lengths.sum())
    return len(lengths) * _width(lengths)


def buckets(lengths: Integer[np.ndarray, "rows"], most_tokens: int) -> list[np.ndarray]:
    """Group rows of similar length: return their indices, shortest first, in groups of at most
    `most_tokens` tokens with padding.

    A row longer than that is a group by itself.
    """
    order = np.argsort(lengths, kind="stable")
    widths = -(-lengths[order] // PAD_MULTIPLE) * PAD_MULTIPLE
    groups, start = [], 0
    for end, width in enumerate(widths):
        if end > start and (end + 1 - start) * width > most_tokens:
            groups.append(order[start:end])
            start = end
    return [*groups, order[start:]] if len(order) else []


def _width(lengths: Integer[np.ndarray, "rows"]) -> int:
    return -(-int(lengths.max()) // PAD_MULTIPLE) * PAD_MULTIPLE


def _is_packed(lengths: Integer[np.ndarray, "rows"], packed_from: float) -> bool:
    padding = 1 - lengths.sum() / (len(lengths) * _width(lengths))
    return bool(padding >= packed_from)
