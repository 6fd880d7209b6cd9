"""What labelled rows ask, as digests: to know rows again in another file, order or format."""

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
"""Of a million rows and a million others, two are taken for one by chance in 1 of 10 million."""


def row_digests(rows: Sequence[Row], names: Sequence[str]) -> Digests:
    """BLAKE2 over the fields of these names, in this order; white space counts as one blank."""
    contents = (
        json.dumps([_plain(row[name]) for name in names if row.get(name) is not None])
        for row in rows
    )
    digests = (hashlib.blake2b(each.encode(), digest_size=DIGEST_BYTES) for each in contents)
    return np.frombuffer(b"".join(each.digest() for each in digests), "<u8")


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return " ".join(value.split()) if isinstance(value, str) else value
