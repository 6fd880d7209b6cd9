"""The attention of a model's heads to the words of a text, which the page draws.

No client's API has it. A request costs one pass of at most `MOST_TOKENS` tokens, beside the queue.
"""

import time
from dataclasses import dataclass
from typing import Annotated

import orjson
import pydantic
from fastapi import Response

from bert_core.data.windows import ids_of
from serve.observe.records import Spent, record_of
from serve.request.errors import Error, RequestError, TooLargeError
from serve.surfaces import huggingface
from serve.surfaces.base import Body, Call, Endpoint, Ignored, Surface, headers

MOST_TOKENS = 128
"""An answer grows with the square of the tokens."""


class Attend(Body):
    """A text or a pair of texts, and the layer that is looked at."""

    text: str
    text_pair: str | None = None
    layer: Annotated[int, pydantic.Field(ge=1)] | None = None
    """The first is 1; None takes the last."""
    model: Ignored = None


@dataclass(frozen=True, kw_only=True)
class Attended:
    """How the S tokens of a text, or of a pair, attend to each other in a layer."""

    tokens: list[str]
    """Special ones included."""
    special: list[bool]
    layer: int
    layers: int
    """Number of layers of the model."""
    weights: list[list[list[float]]]
    """By head and token, the share of its attention that goes to each token."""


async def attend(call: Call) -> Response:
    """The attention of every head of a layer."""
    request = await call.read(Attend)
    call.form()
    predictor = call.model.predictor
    if predictor.bundle.graph is not None:
        raise RequestError(
            f"{call.model.name}: wanted a model that runs on torch, this one runs on "
            f"{predictor.backend.engine}, which does not return attention weights: serve it with "
            "--backend torch, or see `raybert inspect`"
        )
    from bert_core.inference.inspection import attention  # it imports torch

    tokenizer, layers = predictor.bundle.tokenizer, predictor.model.encoder.config.num_hidden_layers
    layer = layers if request.layer is None else request.layer
    if layer > layers:
        raise RequestError(f"layer: wanted at most {layers}, as many as the model has, got {layer}")

    def compute() -> tuple[int, bytes]:
        texts = [request.text, request.text_pair or ""]
        tokens = sum(map(len, ids_of(tokenizer, texts)))
        most = min(MOST_TOKENS, predictor.max_length)
        if tokens + 3 > most:
            raise TooLargeError(
                f"text: wanted at most {most} tokens, special ones included, got {tokens + 3}: "
                "send a shorter one"
            )
        all_layers = attention(predictor.model, tokenizer, request.text, request.text_pair)
        answer = Attended(
            tokens=all_layers.tokens,
            special=all_layers.special.tolist(),
            layer=layer,
            layers=layers,
            weights=all_layers.weights[layer - 1].round(4).tolist(),
        )
        return len(answer.tokens), orjson.dumps(answer)

    began_s = time.perf_counter()
    tokens, body = await call.beside_queue(compute, is_long=True)
    record_of(call.request).spent = Spent(
        tokens=tokens, tokenize_s=0.0, queue_s=0.0, compute_s=time.perf_counter() - began_s
    )
    return Response(body, 200, headers(call.model) | {"X-Tokens": str(tokens)}, "application/json")


SURFACE = Surface(
    name="attention",
    endpoints=(Endpoint(path="/attention", answer=attend, body=Attend, shape=Attended),),
    refuse=huggingface.refuse,
    error=Error,
)
