"""Caches answers by digest, task, parameters and input.

An answer depends only on these, so a cached answer equals the one that would be computed. It is
kept as JSON, so that its size is known and every request gets its own copy.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from bert_core.data.cuts import CutPlace
from bert_core.tasks.base import Parameters
from bert_core.tasks.shapes import Row

KEY_BYTES = 32
ENTRY_BYTES = 640
"""The most memory that an entry takes besides its answer: the key, four objects, and its places in
two tables, which double when full (`tests/serve/model/test_answer_cache.py` measures it)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedAnswer:
    """The answer to an input, and how much it counts towards the limits of a request."""

    packed: bytes
    """The answer, and where texts of the input were cut."""
    tokens: int
    """Tokens of the input, special ones included."""
    padded_tokens: int
    """The same as passes compute them."""
    masks: int
    """Masks that the input has."""
    numbers: int
    """Numbers in the answer's vectors."""
    has_all_cuts: bool
    """Whether it is known where each text was cut."""

    @classmethod
    def of(cls, answer: Any, cut: Sequence[CutPlace], **counts: Any) -> "CachedAnswer":
        """Return the entry of an answer; `counts` are the fields besides `packed`."""
        places = [(place.name, place.character, place.from_end) for place in cut]
        return cls(packed=_packed([answer, places]), **counts)

    @property
    def size_bytes(self) -> int:
        """Upper bound of the memory that the entry takes in a cache."""
        return len(self.packed) + ENTRY_BYTES


class AnswerCache:
    """A cache of limited size that drops the least recently used entries first.

    Safe to call from several threads: the lock is held for looking up and storing, never while
    something is computed.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._size_bytes = max_bytes, 0
        self._entries: OrderedDict[bytes, CachedAnswer] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """Upper bound of the memory that all entries take."""
        return self._size_bytes

    def find(self, keys: Iterable[bytes]) -> dict[bytes, CachedAnswer]:
        """Return the entries that exist, by key, and mark them as recently used."""
        hits = {}
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None:
                    self._entries.move_to_end(key)
                    hits[key] = entry
        return hits

    def keep(self, entries: Mapping[bytes, CachedAnswer]) -> None:
        """Store these entries, and drop the least recently used if space is short; an entry that is
        larger than the cache is not stored."""
        with self._lock:
            for key, entry in entries.items():
                self._drop(key)
                if entry.size_bytes <= self._max_bytes:
                    self._entries[key] = entry
                    self._size_bytes += entry.size_bytes
                    self._fit()

    def resize(self, max_bytes: int) -> None:
        """Change the size limit, and drop the least recently used entries beyond it."""
        with self._lock:
            self._max_bytes = max_bytes
            self._fit()

    def _drop(self, key: bytes) -> None:
        before = self._entries.pop(key, None)
        if before is not None:
            self._size_bytes -= before.size_bytes

    def _fit(self) -> None:
        while self._size_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._size_bytes -= oldest.size_bytes


def keys_of(digest: str, task: str, parameters: Parameters, rows: Sequence[Row]) -> list[bytes]:
    """Return the key of each row: equal keys mean the same question to the same weights."""
    # NOTE: `repr` tells 1, 1.0, True and "1" apart, takes NaN, escapes halves of surrogate pairs,
    # and has the fields of rows and parameters in the order of their dataclasses.
    asked = blake2b(repr((digest, task, vars(parameters))).encode(), digest_size=KEY_BYTES).digest()
    return [blake2b(repr(row).encode(), key=asked, digest_size=KEY_BYTES).digest() for row in rows]


def unpacked(entries: Sequence[CachedAnswer]) -> tuple[list[Any], list[CutPlace]]:
    """Return a copy of the answer of each row, and where texts of the rows were cut, in order."""
    answers, cut = [], []
    for row, entry in enumerate(entries):
        answer, places = _unpacked(entry.packed)
        answers.append(answer)
        cut += [CutPlace(row, *place) for place in places]
    return answers, cut


def _packed(value: Any) -> bytes:
    try:
        return bytes(memoryview(orjson.dumps(value)))  # copied, as orjson's holds more memory
    except TypeError:  # half of a surrogate pair
        return json.dumps(value).encode()


def _unpacked(packed: bytes) -> Any:
    try:
        return orjson.loads(packed)
    except orjson.JSONDecodeError:
        return json.loads(packed)
