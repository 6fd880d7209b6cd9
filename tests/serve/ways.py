"""How texts are sent to every surface, and where its errors have their message."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CLASSES, VECTORS, RANKING = "text-classification", "feature-extraction", "text-ranking"


@dataclass(frozen=True)
class Way:
    """How a surface is sent texts, and where its errors have their message."""

    path: str
    body: str
    """With TEXTS for the texts, as JSON, and COUNT for how many there are."""
    message: Callable[[Any], str]
    is_plain: bool = True
    """Whether it has 400 for what is 413 or 422 elsewhere."""

    def with_texts(self, texts: bytes, count: int = 1) -> bytes:
        return self.body.encode().replace(b"TEXTS", texts).replace(b"COUNT", b"%d" % count)

    def status(self, status: int) -> int:
        return 400 if self.is_plain and status in (413, 422) else status


WAYS = {
    "huggingface": Way(
        f"/v1/models/{CLASSES}", '{"inputs": [TEXTS]}', lambda error: error["error"], is_plain=False
    ),
    "openai": Way(
        "/v1/embeddings",
        '{"input": [TEXTS], "model": "feature-extraction"}',
        lambda error: error["error"]["message"],
    ),
    "tei embed": Way("/embed", '{"inputs": [TEXTS]}', lambda error: error["error"], is_plain=False),
    "tei rerank": Way(
        "/rerank",
        '{"query": "a", "texts": [TEXTS]}',
        lambda error: error["error"],
        is_plain=False,
    ),
    "cohere embed": Way("/v2/embed", '{"texts": [TEXTS]}', lambda error: error["message"]),
    "cohere rerank": Way(
        "/v1/rerank",
        '{"query": "a", "documents": [TEXTS]}',
        lambda error: error["detail"],
    ),
    "open inference": Way(
        f"/v2/models/{CLASSES}/infer",
        '{"inputs": [{"name": "text", "shape": [COUNT], "datatype": "BYTES", "data": [TEXTS]}]}',
        lambda error: error["error"],
    ),
    "invocations": Way(
        f"/v1/models/{CLASSES}/invocations",
        '{"inputs": [TEXTS]}',
        lambda error: error["message"],
    ),
}
