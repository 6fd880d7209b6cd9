"""Measures requests and windows: how much the event loop handles itself, and how limits count."""

from typing import Any

from bert_core.data.windows import PAD_MULTIPLE, Window

SMALL = 4_096
"""Bytes or numbers that are handled on the event loop: anything larger takes over a millisecond."""

FEW_SCORES = 1_024
"""Scores of small inputs that become answers on the event loop."""

FEW_BYTES = 1 << 16
"""Bytes of answers that are copied to or from the cache on the event loop."""


def is_small(value: Any, most: int = SMALL // 4) -> bool:
    """Whether a JSON value is at most `most` large, so that the event loop may handle it.

    The size is the number of characters in its strings, plus one for every value. Tokenizing such
    texts takes less time than handing them to another thread.
    """
    size, uncounted = 0, [value]
    while uncounted and size <= most:
        part = uncounted.pop()
        size += 1 + (len(part) if isinstance(part, str) else 0)
        if isinstance(part, dict):
            uncounted.extend(part.values())
        elif isinstance(part, list | tuple):
            uncounted.extend(part)
    return size <= most


def padded_length(window: Window) -> int:
    """Return the tokens of a window as a pass computes them."""
    return -(-window.tokens // PAD_MULTIPLE) * PAD_MULTIPLE


def real_length(window: Window) -> int:
    """Return the tokens of a window without padding, special tokens included."""
    return sum(map(len, window.ids))


def masks_of(window: Window) -> int:
    """Return the number of masks in a window."""
    return len(window.positions.get("mlm_positions", ()))
