"""Decompresses request bodies (RFC 9110, section 8.4.1), up to a limit of size."""

import zlib

from serve.request.errors import CodingError, NotJSONError

CODINGS = ("gzip", "deflate")
"""Values of `Content-Encoding`. br and zstd are not read: no client sends them unasked."""
_FORMATS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Content coding → zlib's number for its format: gzip's, and for deflate zlib's own."""
MOST_MEMBERS = 64
"""Maximum members of a gzip body, which may have several in a row."""


class Coding:
    """The coding of a body that is not compressed, and the base class of the others."""

    def feed(self, part: bytes, most: int) -> bytes:
        """Return a part of the body, decoded; a compressed part gives at most `most` + 1 bytes.

        Raises: NotJSONError if the body does not have this coding.
        """
        return part

    def end(self) -> None:
        """Check that the body is complete. Raises: NotJSONError."""


class _Compressed(Coding):
    def __init__(self, name: str) -> None:
        self._name, self._members = name, 1
        self._inflater = zlib.decompressobj(_FORMATS[name])

    def feed(self, part: bytes, most: int) -> bytes:
        came = b""
        while part and len(came) <= most:
            if self._inflater.eof:
                if self._name == "deflate" or self._members == MOST_MEMBERS:
                    raise self._damaged("there are bytes after its end")
                self._members += 1
                self._inflater = zlib.decompressobj(_FORMATS[self._name])
            try:
                came += self._inflater.decompress(part, most + 1 - len(came))
            except zlib.error as error:
                raise self._damaged(str(error)) from error
            part = self._inflater.unconsumed_tail or self._inflater.unused_data
        return came

    def end(self) -> None:
        if not self._inflater.eof:
            raise self._damaged("it ends too early")

    def _damaged(self, reason: str) -> NotJSONError:
        return NotJSONError(
            f"the body: wanted {self._name}, as Content-Encoding says, got other bytes ({reason}): "
            "compress it again, or send it as it is without the header"
        )


def coding_of(header: str) -> Coding:
    """Return the coding that a value of `Content-Encoding` names. Raises: CodingError."""
    names = [name for part in header.lower().split(",") if (name := part.strip()) != "identity"]
    names = [name for name in names if name]
    if not names:
        return Coding()
    if len(names) > 1 or names[0] not in _FORMATS:
        raise CodingError(
            f"Content-Encoding: wanted one of {', '.join(CODINGS)}, got {header[:100]!r}: compress "
            "the body by one of these, or send it as it is without the header"
        )
    return _Compressed(names[0])
