"""All surfaces, in the order in which the documentation lists them."""

import re

from serve.surfaces import attention, huggingface, invocations, open_inference, openai, rerank, tei
from serve.surfaces.base import Surface

SURFACES: tuple[Surface, ...] = (
    huggingface.SURFACE,
    openai.SURFACE,
    tei.SURFACE,
    rerank.SURFACE,
    open_inference.SURFACE,
    invocations.SURFACE,
    attention.SURFACE,
)

_MODEL = re.compile(r"/v1/models/[^/]+(?=/|$)")
_PREFIXES = {
    prefix: surface
    for surface in SURFACES
    for prefix in (*surface.prefixes, *(each.path for each in surface.endpoints))
}


def surface_of(method: str, path: str) -> Surface:
    """Return the surface whose clients call a path, even if there is no such path.

    It is the surface with the longest path or prefix that `path` begins with.
    """
    below = _MODEL.sub("", path, count=1)
    if method in ("GET", "DELETE") and below == "":  # OpenAI's path of a model
        return openai.SURFACE
    parts = below.split("/")
    starts = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next(_PREFIXES[start] for start in starts if start in _PREFIXES)
