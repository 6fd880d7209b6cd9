"""All surfaces, in the order in which the documentation lists them."""

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
