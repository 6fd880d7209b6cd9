"""Object stores (`s3://`, `gs://`, `az://`), opened by obstore."""

from typing import Any
from urllib.parse import unquote, urlsplit

SCHEMES = ("s3", "gs", "gcs", "az", "abfs", "abfss")


def opens(path: str) -> bool:
    """Whether `path` is a URI of an object store."""
    return path.partition("://")[0].lower() in SCHEMES and "://" in path


def _store(path: str) -> tuple[Any, str]:
    import obstore.store  # imported here: local files need none of it

    parts = urlsplit(path)
    options = {"allow_http": True}
    store = obstore.store.from_url(f"{parts.scheme}://{parts.netloc}", client_options=options)
    return store, unquote(parts.path).lstrip("/")


def create(path: str, data: bytes) -> str | None:
    """Write an object that does not exist yet; its version tag, or None if it exists."""
    import obstore
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    store, key = _store(path)
    try:
        return str(obstore.put(store, key, data, mode="create")["e_tag"])
    except (AlreadyExistsError, PreconditionError):
        return None


def read_tagged(path: str) -> tuple[bytes, str]:
    """An object's bytes and version tag. Raises: FileNotFoundError."""
    import obstore

    store, key = _store(path)
    result = obstore.get(store, key)
    return bytes(result.bytes()), str(result.meta["e_tag"])


def replace_if(path: str, data: bytes, tag: str) -> str | None:
    """Replace an object whose version tag is still `tag`; its new tag, or None."""
    import obstore
    from obstore.exceptions import PreconditionError

    store, key = _store(path)
    try:
        return str(obstore.put(store, key, data, mode={"e_tag": tag})["e_tag"])
    except (PreconditionError, FileNotFoundError):
        return None
