"""The routes of Text Embeddings Inference, as LlamaIndex, Haystack and others call them.

Requests and responses have the shapes of its OpenAPI (huggingface/text-embeddings-inference 1.9).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, Literal

import orjson
import pydantic
from fastapi import Response

from bert_core.errors import TooLongError
from bert_core.tasks.compared_texts import PromptOptions
from bert_core.tasks.text_classification import TextClassification
from serve.model.answers import Answered
from serve.request.errors import RequestError
from serve.request.limits import check_count, check_tokens
from serve.surfaces import vectors
from serve.surfaces.base import (
    Body,
    Call,
    Count,
    Endpoint,
    Ignored,
    Surface,
    Texts,
    headers,
    json_response,
)
from serve.surfaces.rerank import RANKING, best_first, ranked
from serve.surfaces.rerank import rerank as rerank_documents
from serve.surfaces.vectors import EVEN, SPARSE, UNEVEN, VECTORS

if TYPE_CHECKING:
    from serve.model.model import Model

CLASSES, SIMILARITY = TextClassification.name, "sentence-similarity"
Direction = Literal["left", "right", "Left", "Right"]
VERSION = "1.9.3"
"""The version of Text Embeddings Inference whose routes these are."""


class Cut(Body):
    """How texts that are too long are cut."""

    truncate: bool | None = None
    truncation_direction: Direction | None = None
    model: Ignored = None
    options: Ignored = None

    @property
    def side(self) -> str | None:
        return self.truncation_direction and self.truncation_direction.lower()


class VectorSettings(Cut):
    """The prompt before each text, and how a text that is too long is cut."""

    prompt_name: str | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The task's parameters, by name; for `Call.parameters`."""
        return {
            "truncate": self.truncate,
            "truncation_direction": self.side,
            "prompt_name": self.prompt_name,
        }


class Embed(VectorSettings):
    """Texts for vectors."""

    inputs: str | Texts
    normalize: bool = True
    dimensions: Count | None = None


class EmbedAll(VectorSettings):
    """Texts for a vector per token."""

    inputs: str | Texts


class EmbedSparse(VectorSettings):
    """Texts for the weights of vocabulary entries."""

    inputs: str | Texts


class Rerank(Cut):
    """A query, and the texts to be ranked."""

    query: str
    texts: Texts
    raw_scores: bool = False
    return_text: bool = False
    top_n: Count | None = None
    """LiteLLM's, which Text Embeddings Inference ignores: how many of the texts to return."""


_PAIR = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}
_PAIRS = {"type": "array", "items": _PAIR, "minItems": 1}


class Predict(Cut):
    """A text, a pair, or a list of lists of one or two texts."""

    inputs: Annotated[
        str | list[str] | list[list[str]],
        pydantic.WithJsonSchema({"anyOf": [{"type": "string"}, _PAIR, _PAIRS]}),
    ]
    raw_scores: bool = False


class Sentences(Body):
    """A sentence and those that it is compared with."""

    source_sentence: str
    sentences: Texts


class Similarity(Body):
    """A request for similarities."""

    inputs: Sentences
    parameters: VectorSettings | None = None
    options: Ignored = None


class Tokenize(Body):
    """Texts to be tokenized."""

    inputs: str | Texts
    add_special_tokens: bool = True
    prompt_name: str | None = None
    model: Ignored = None


Id = Annotated[int, pydantic.Field(ge=0)]


class Decode(Body):
    """Ids of tokens: those of one text, or of several."""

    ids: list[Id] | list[list[Id]]
    skip_special_tokens: bool = True
    model: Ignored = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of a sparse vector."""

    index: int
    value: float


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A text's score."""

    index: int
    score: float
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class Label:
    """A label's score."""

    label: str
    score: float
    assigned: bool | None = None
    """Whether it is part of the answer, if the model has thresholds or abstains."""


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token, and where it is in its text, after the prompt if there is one, in bytes of UTF-8."""

    id: int
    text: str
    """The part of the text; of a special token, its name."""
    special: bool
    start: int | None
    stop: int | None


def _texts(inputs: str | list[str]) -> list[str]:
    return [inputs] if isinstance(inputs, str) else inputs


def _rows(call: Call, inputs: str | list[str]) -> list[dict[str, str]]:
    """Return texts as inputs of a task. Raises: TooLargeError."""
    texts = _texts(inputs)
    check_count(texts, call.model.limits)
    return [{"text": text} for text in texts]


def _numbers(answered: Answered) -> Any:
    return vectors.vectors_of(answered.answers)


def _cuts(request: Cut) -> dict[str, Any]:
    """Return how texts are cut, for tasks that call it truncation."""
    return {"truncation": request.truncate, "truncation_direction": request.side}


async def embed(call: Call) -> Response:
    """One vector per text."""
    request = await call.read(Embed)
    values = request.values | {"normalize": request.normalize, "dimensions": request.dimensions}
    parameters = call.parameters(VECTORS, values)
    return await vectors.embed(call, _rows(call, request.inputs), parameters, _numbers)


async def embed_all(call: Call) -> Response:
    """One vector per token."""
    request = await call.read(EmbedAll)
    values = request.values | {"per_token": True, "normalize": False}
    parameters = call.parameters(VECTORS, values)
    return await vectors.embed(call, _rows(call, request.inputs), parameters, _numbers)


async def embed_sparse(call: Call) -> Response:
    """The weights of vocabulary entries, per text."""
    request = await call.read(EmbedSparse)
    parameters = call.parameters(SPARSE, request.values)
    return await vectors.embed_sparse(call, _rows(call, request.inputs), parameters)


async def rerank(call: Call) -> Response:
    """The texts by score, best first.

    Documents instead of texts are answered as at `/v1/rerank`: vLLM takes them here.
    """
    if await call.names("documents"):
        try:
            return await rerank_documents(call)
        except TooLongError as error:  # `truncate`, which the path names, goes with texts only
            raise RequestError(error.told("leave out truncation")) from error
    request = await call.read(Rerank)
    values = _cuts(request) | {"raw_scores": request.raw_scores or None}
    answered = await ranked(call, request.query, request.texts, values)

    def content() -> list[dict[str, Any]]:
        return [
            {"index": index, "score": score}
            | ({"text": request.texts[index]} if request.return_text else {})
            for index, score in best_first(answered)[: request.top_n]
        ]

    return await call.respond(answered, content)


async def predict(call: Call) -> Response:
    """Labels with scores: a list for a text or a pair, a list of lists for a list of lists."""
    request = await call.read(Predict)
    several = isinstance(request.inputs, list) and any(
        isinstance(item, list) for item in request.inputs
    )
    items: list[Any] = list(request.inputs) if several else [request.inputs]
    check_count(items, call.model.limits)
    rows = [_pair(item, place) for place, item in enumerate(items)]
    if not rows:
        raise RequestError("inputs: wanted at least one input, got an empty list")
    function = "none" if request.raw_scores else None
    parameters = call.parameters(CLASSES, _cuts(request) | {"function_to_apply": function})
    answered = await call.answer(CLASSES, rows, parameters)
    return await call.respond(
        answered, lambda: answered.answers if several else answered.answers[0]
    )


def _pair(item: Any, place: int) -> dict[str, str]:
    texts = [item] if isinstance(item, str) else item
    if not 1 <= len(texts) <= 2 or not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f"inputs[{place}]: wanted a text, or a list of one or two texts, got {len(texts)}: "
            "send a batch as a list of lists"
        )
    return dict(zip(("text", "text_pair"), texts, strict=False))


async def similarity(call: Call) -> Response:
    """The cosine of each sentence with the first."""
    request = await call.read(Similarity)
    values = request.parameters.values if request.parameters else {}
    parameters = call.parameters(SIMILARITY, values)
    answered = await call.answer(SIMILARITY, [request.inputs.model_dump()], parameters)
    return await call.respond(answered, lambda: answered.answers[0])


async def tokenize(call: Call) -> Response:
    """The tokens of each text, and the parts of the text that they stand for, counted in bytes."""
    request = await call.read(Tokenize)
    call.form()
    texts = _texts(request.inputs)
    check_count(texts, call.model.limits)
    inner = call.model.predictor.bundle.tokenizer.inner
    prompt = _prompt(call.model, request.prompt_name)
    texts = [prompt + text for text in texts]

    def tokens() -> tuple[int, bytes]:
        encodings = inner.encode_batch(texts, add_special_tokens=request.add_special_tokens)
        count = sum(map(len, encodings))
        check_tokens(count, call.model.limits)
        content = [
            [_token(*each) for each in zip(*columns, strict=True)]
            for columns in (
                (each.ids, each.tokens, each.special_tokens_mask, _spans(text, each.offsets))
                for text, each in zip(texts, encodings, strict=True)
            )
        ]
        return count, orjson.dumps(content)

    _, body = await call.beside_queue(tokens, is_long=call.is_long)
    extra = {"X-Prompt-Bytes": str(len(prompt.encode()))}
    return Response(body, 200, headers(call.model) | extra, "application/json")


def _prompt(model: "Model", name: str | None) -> str:
    """Return the text that comes before each text. Raises: InputError if there is no such
    prompt."""
    chosen = model.task.chosen
    return (chosen if isinstance(chosen, PromptOptions) else PromptOptions()).prompt(name)


def _spans(text: str, offsets: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int, int]]:
    """Yield parts of a text, each with the bytes where it starts and ends; `offsets` are in
    characters."""
    sizes = (1 + (c > "\x7f") + (c > "\u07ff") + (c > "\uffff") for c in text)
    places = list(accumulate(sizes, initial=0))
    for start, stop in offsets:
        yield text[start:stop], places[start], places[stop]


def _token(number: int, name: str, special: int, span: tuple[str, int, int]) -> dict[str, Any]:
    text, start, stop = (name, None, None) if special else span
    return {"id": number, "text": text, "special": bool(special), "start": start, "stop": stop}


async def decode(call: Call) -> Response:
    """The text of each list of ids."""
    request = await call.read(Decode)
    call.form()
    is_one = all(isinstance(each, int) for each in request.ids)
    lists: list[Any] = [request.ids] if is_one else request.ids
    check_count(lists, call.model.limits)
    count = sum(map(len, lists))
    check_tokens(count, call.model.limits)
    inner = call.model.predictor.bundle.tokenizer.inner
    size = inner.get_vocab_size()
    unknown = next((token for ids in lists for token in ids if token >= size), None)
    if unknown is not None:
        raise RequestError(
            f"ids: wanted ids of the vocabulary, which are below {size}, got {unknown}: send those "
            "that /tokenize gives"
        )

    def texts() -> tuple[int, bytes]:
        skip = request.skip_special_tokens
        return count, orjson.dumps(inner.decode_batch(lists, skip_special_tokens=skip))

    _, body = await call.beside_queue(texts, is_long=call.is_long)
    return Response(body, 200, headers(call.model), "application/json")


async def info(call: Call) -> Response:
    """The model, and the server's limits."""
    return json_response(call.model, description(call.model))


def description(model: "Model") -> dict[str, Any]:
    limits = model.limits
    return {
        "model_id": model.name,
        "model_sha": model.digest,
        "served_model_name": model.name,
        "model_dtype": "float32" if model.predictor.bundle.graph is None else "onnx",
        "model_type": _kind(model),
        "max_concurrent_requests": model.max_ongoing_requests,
        "max_input_length": model.predictor.max_length,
        "max_batch_tokens": model.max_batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": limits.max_inputs,
        "auto_truncate": model.truncate,
        "tokenization_workers": 1,
        "version": VERSION,
        "sha": None,
        "docker_label": None,
    }


def _kind(model: "Model") -> dict[str, Any]:
    labels = {str(index): label for index, label in enumerate(model.task.labels)}
    classes = {"id2label": labels, "label2id": {label: int(at) for at, label in labels.items()}}
    if VECTORS in model.predictors:
        return {
            "embedding": {"pooling": model.predictors[VECTORS].task.record["options"]["pooling"]}
        }
    if RANKING in model.predictors:
        return {"reranker": classes}
    return {"classifier": classes}


_TYPES = {429: "Overloaded", 503: "Unhealthy"}


@dataclass(frozen=True)
class TEIError:
    """The body of an error, as clients of Text Embeddings Inference read it."""

    error: str
    error_type: Literal["Validation", "Overloaded", "Unhealthy", "Backend"]


def refuse(error: RequestError) -> tuple[int, Any]:
    usual = "Validation" if error.status < 500 else "Backend"
    return error.status, {"error": str(error), "error_type": _TYPES.get(error.status, usual)}


def cut(name: str) -> dict[str, Any]:
    return {"truncate": True}


SURFACE = Surface(
    name="tei",
    endpoints=(
        Endpoint(
            path="/embed",
            answer=embed,
            task=VECTORS,
            body=Embed,
            shape=list[list[float]],
            forms=EVEN,
            cut=cut,
        ),
        Endpoint(
            path="/embed_all",
            answer=embed_all,
            task=VECTORS,
            body=EmbedAll,
            shape=list[list[list[float]]],
            forms=UNEVEN,
            cut=cut,
        ),
        Endpoint(
            path="/embed_sparse",
            answer=embed_sparse,
            task=SPARSE,
            body=EmbedSparse,
            shape=list[list[Entry]],
            forms=UNEVEN,
            cut=cut,
        ),
        Endpoint(
            path="/rerank",
            answer=rerank,
            task=RANKING,
            body=Rerank,
            shape=list[Ranked],
            cut=cut,
        ),
        Endpoint(
            path="/predict",
            answer=predict,
            task=CLASSES,
            body=Predict,
            shape=list[Label] | list[list[Label]],
            cut=cut,
        ),
        Endpoint(
            path="/similarity",
            answer=similarity,
            task=SIMILARITY,
            body=Similarity,
            shape=list[float],
        ),
        Endpoint(path="/tokenize", answer=tokenize, body=Tokenize, shape=list[list[Token]]),
        Endpoint(path="/decode", answer=decode, body=Decode, shape=list[str]),
        Endpoint(path="/info", answer=info, method="GET", shape=dict[str, Any]),
    ),
    refuse=refuse,
    error=TEIError,
)
