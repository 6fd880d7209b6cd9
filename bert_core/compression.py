"""Compressed streams: detected by their first bytes, whatever the file's name, and read to their
end.

A stream may consist of several members (gzip), streams (bz2, xz) or frames (zstd), some of them
empty, and zeros may follow, as tapes and block devices leave them: GNU gzip and Python read these
too.
"""

import bz2
import io
import lzma
import re
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa

PIECE_BYTES = 1 << 16
HEAD_BYTES = 16
"""How many bytes tell whether a stream is compressed."""


class Compression(NamedTuple):
    """A kind of compressed stream."""

    begins: re.Pattern[bytes]
    """Matches the first bytes of a member."""
    decompressor: Callable[[], Any] | None
    """Makes what decompresses one member; None if Arrow reads the whole stream."""
    suffixes: tuple[str, ...]
    """The end of file names, without the dot."""
    expansion: int
    """Approximate bytes of text per byte."""


COMPRESSIONS = {
    "gz": Compression(
        re.compile(rb"\x1f\x8b\x08"), lambda: zlib.decompressobj(wbits=31), ("gz", "gzip"), 3
    ),
    # A stream without content has no block, only the mark of its end.
    "bz2": Compression(
        re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"), bz2.BZ2Decompressor, ("bz2", "bz"), 4
    ),
    "zst": Compression(
        re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), None, ("zst", "zstd"), 3
    ),
    "xz": Compression(
        re.compile(rb"\xfd7zXZ\x00"), lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), ("xz",), 4
    ),
}
SUFFIXES = {suffix: name for name, each in COMPRESSIONS.items() for suffix in each.suffixes}
"""Suffix of a compressed file, without the dot → the compression."""


def compression_of(head: bytes) -> str | None:
    """Return the compression of a stream that begins with `head`; None if it is not compressed."""
    return next((name for name, each in COMPRESSIONS.items() if each.begins.match(head)), None)


def decompressing(stored: Any, name: str) -> Any:
    """Return a stream of the decompressed contents of `stored`, a file at its beginning.

    If `stored` is damaged, the stream's `readinto` raises what the library of that compression
    raises, or EOFError or ValueError.
    """
    if COMPRESSIONS[name].decompressor is None:
        return pa.CompressedInputStream(stored, "zstd")
    return _Members(stored, COMPRESSIONS[name])


def decompress(data: bytes, name: str) -> bytes:
    """Return the whole decompressed contents of `data`. Raises: as the stream of `decompressing`
    does."""
    return io.BufferedReader(decompressing(io.BytesIO(data), name)).read()


class _Members(io.RawIOBase):
    """The decompressed contents of all members of a stream, one after the other."""

    def __init__(self, stored: Any, compression: Compression) -> None:
        self._stored, self._compression = stored, compression
        self._pending = b""  # read, but not decompressed yet
        self._member: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        wanted = len(buffer)
        while wanted:
            if self._member is None and not self._opens_member():
                return 0
            data = self._member.decompress(self._pending, wanted)
            if self._member.eof:
                self._pending, self._member = self._member.unused_data, None
            else:
                self._pending = getattr(self._member, "unconsumed_tail", b"")
            if data:
                buffer[: len(data)] = data
                return len(data)
            if self._member is not None and not self._pending and not self._refill():
                raise EOFError("Truncated compressed stream")
        return 0

    def _opens_member(self) -> bool:
        """Go to the next member; False at the end."""
        self._pending = self._pending.lstrip(b"\0")
        while len(self._pending) < HEAD_BYTES and self._refill():
            self._pending = self._pending.lstrip(b"\0")
        assert self._compression.decompressor is not None
        if self._pending and not self._compression.begins.match(self._pending):
            raise ValueError("behind its end there are bytes that do not belong to it")
        self._member = self._compression.decompressor() if self._pending else None
        return self._member is not None

    def _refill(self) -> bool:
        data = self._stored.read(PIECE_BYTES)
        self._pending += data
        return bool(data)

    def close(self) -> None:
        if not self.closed:
            self._stored.close()
        super().close()
