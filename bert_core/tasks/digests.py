"""Digests of labelled rows' inputs, to recognise rows in another file, order or format."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt64

from bert_core.tasks.shapes import Row

Digests = UInt64[np.ndarray, "rows"]

NO_ROWS: Digests = np.empty(0, "<u8")
DIGEST_BYTES = 8
"""Between a million rows and a million others, the chance of any collision is 1 in 10 million."""


def row_digests(rows: Sequence[Row], names: Sequence[str]) -> Digests:
    """Return a BLAKE2 digest of each row's fields with these names, in this order. Any run of white
    space counts as a single space."""
    contents = (
        json.dumps([_plain(row[name]) for name in names if row.get(name) is not None])
        for row in rows
    )
    digests = (hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES) for text in contents)
    return np.frombuffer(b"".join(digest.digest() for digest in digests), "<u8")


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return " ".join(value.split()) if isinstance(value, str) else value
