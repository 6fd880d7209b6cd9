"""URIs of object stores, parsed."""

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from bert_core.storage_schemes import SCHEMES, Scheme

_URI = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<host>[^/\s]+)(?:/(?P<key>\S*))?", re.IGNORECASE)
IN_A_URI = "/!$&'()*+,;=:@"  # allowed in a path without escaping (RFC 3986)


def opens(path: str) -> bool:
    """Whether `path` is a URI of an object store."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme.lower() in SCHEMES


@dataclass(frozen=True)
class Location:
    """An object, or all objects whose key begins with `key` and a slash."""

    scheme: Scheme
    bucket: str
    """A container on Azure."""
    key: str
    """Empty for the bucket itself."""
    account: str | None = None
    """The account on Azure, if the URI names it."""

    @classmethod
    def of(cls, path: str) -> "Location":
        """Parse a URI. Raises: ValueError if it is not `scheme://bucket/key`."""
        match = _URI.fullmatch(path)
        if match is None:
            raise ValueError("wanted scheme://bucket/key")
        scheme, host, key = SCHEMES[match["scheme"].lower()], match["host"], match["key"] or ""
        if "?" in key:
            raise ValueError(
                "options stand in environment variables, not in the URI (docs/storage.md); a "
                "question mark in a name is written %3F"
            )
        key = unquote(key).strip("/")
        if scheme.names_account:
            container, at, server = host.partition("@")
            return cls(scheme, container, key, server.partition(".")[0] if at else None)
        if "@" in host:
            raise ValueError("credentials stand in environment variables, not in the URI")
        return cls(scheme, host, key)

    @property
    def uri(self) -> str:
        account = f"@{self.account}" if self.account else ""
        return f"{self.scheme.name}://{self.bucket}{account}/{quote(self.key, safe=IN_A_URI)}"
