"""Serves `/v1/indexes`: the list of indexes, and a search in one.

A search embeds its texts with a model that is served here, and only compares vectors of one space:
the model says with each answer what made it, and the index is searched whose vectors were made so.
An index may be served in several versions, so that a model can move to its next one.
"""

import asyncio
import base64
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response

from bert_core.indexes.table import Hit, Index
from bert_core.tasks.text_ranking import TextRanking
from serve.http.routes.base import (
    ALWAYS,
    BY_BODY,
    READY_TIMEOUT_S,
    SurfaceRoute,
    admit,
    errors_of,
    handler,
    headers_to_model,
    json_response,
    unknown_model,
    usable,
)
from serve.http.routes.index_shapes import (
    Found,
    IndexAnswer,
    Indexes,
    IndexList,
    IndexSearch,
    card_of,
    check,
)
from serve.model.card import Response as ModelResponse
from serve.model.card import ServedModel
from serve.model.sizes import SMALL
from serve.observe.records import PART, record_of
from serve.request.auth import Caller, Keys
from serve.request.body import deadline_of, receive
from serve.request.disconnects import while_connected
from serve.request.errors import DeadlineError, NotReadyError, RequestError, UnknownPathError
from serve.request.limits import Limits, check_size
from serve.surfaces import huggingface
from serve.surfaces.base import JSON, read
from serve.surfaces.openapi import request_body, responses, schema_of

LIST = "/v1/indexes"


def index_routes(
    indexes: Indexes, models: Mapping[str, ServedModel], limits: Limits, keys: Keys | None = None
) -> APIRouter:
    """Return the routes of the list of indexes, and of a search in one."""
    router, searching = APIRouter(tags=["front"]), _Searching(indexes, models, limits, keys)

    @router.get(LIST, responses=errors_of(keys))
    async def listing(request: Request) -> IndexList:
        """The indexes that are served here, a version each."""
        admit(keys, request, None)
        return IndexList(
            data=[card_of(name, each) for name, versions in indexes.items() for each in versions]
        )

    router.add_api_route(
        f"{LIST}/{{name}}/search",
        handler(huggingface.SURFACE, searching.answer, searching.answer.__doc__),
        name="search_index",
        methods=["POST"],
        summary="Search in an index",
        response_model=None,
        route_class_override=SurfaceRoute,
        openapi_extra=request_body(schema_of(IndexSearch))
        | {
            "parameters": [
                {"name": "name", "in": "path", "required": True, "schema": {"enum": [*indexes]}}
            ]
        },
        responses=responses((JSON,), IndexAnswer) | errors_of(keys, *ALWAYS, *BY_BODY),
    )
    return router


class _RefusedError(Exception):
    """A model has refused its part of a search."""

    def __init__(self, model: str, answer: ModelResponse) -> None:
        super().__init__(answer)
        content = orjson.loads(answer.body)
        content["error"] = f"{model}: {content['error']}"
        self.response = json_response(answer.status, content)
        repeated = {"retry-after", "www-authenticate"}
        self.response.headers.update(
            {name: value for name, value in answer.headers if name in repeated}
        )


@dataclass(frozen=True)
class _Searching:
    """Answers searches."""

    indexes: Indexes
    models: Mapping[str, ServedModel]
    limits: Limits
    keys: Keys | None
    _models: dict[str, str] = field(default_factory=dict)
    """The model of each index, as far as it is known."""

    async def answer(self, request: Request) -> Response:
        """The rows of an index that are nearest to each text or vector: by meaning, with `hybrid`
        by words too, and with `rerank` as a ranker orders them."""
        record_of(request).surface = "indexes"
        caller = admit(self.keys, request, None)  # each model counts its part
        name = request.path_params["name"]
        if name not in self.indexes:
            listed = ", ".join(self.indexes)
            raise UnknownPathError(f"there is no index {name[:100]!r}: there are {listed}")
        body = await receive(request, self.limits)
        is_long = len(body) > SMALL
        asked = await asyncio.to_thread(_read, body) if is_long else _read(body)
        check(asked, self.limits)
        try:
            return await while_connected(request, self._search(request, caller, name, asked))
        except _RefusedError as error:
            return error.response

    async def _search(
        self, request: Request, caller: Caller | None, name: str, asked: IndexSearch
    ) -> Response:
        spans, began_s = {}, time.perf_counter()
        ends_s = time.monotonic() + deadline_of(request, self.limits)
        if asked.rerank is not None:
            await self._check_ranker(request, caller, asked.rerank)
        if asked.texts is not None:
            index, vectors = await self._embedded(request, caller, name, asked)
            spans["embed"] = time.perf_counter() - began_s
        else:
            index, vectors = self._given(name, asked)
            model = await self._model_of(name)
            admit(self.keys, request, model)  # no model counts this request
        began_s = time.perf_counter()
        found = await asyncio.to_thread(_searched, index, asked, vectors, ends_s)
        spans["search"] = time.perf_counter() - began_s
        if asked.rerank is not None:
            began_s = time.perf_counter()
            found = await self._reranked(request, index, asked, found, ends_s)
            spans["rerank"] = time.perf_counter() - began_s
        answer = IndexAnswer(index=name, space=index.space, results=found)
        body = await asyncio.to_thread(_dumped, answer)
        check_size(body, self.limits)
        headers = {
            "X-Index-Digest": index.digest,
            "X-Vector-Space": index.space,
            "Server-Timing": ", ".join(f"{what};dur={s * 1e3:.2f}" for what, s in spans.items()),
        }
        return Response(body, 200, headers, JSON)

    async def _check_ranker(self, request: Request, caller: Caller | None, name: str) -> None:
        """Check, before anything is computed, that a request may have a model rank rows.
        Raises: UnknownModelError, ForbiddenError, RequestError."""
        if name not in self.models:
            raise unknown_model(name, usable(self.models, caller))
        admit(self.keys, request, name, counts=False)
        if TextRanking.name not in (tasks := await self.models[name].tasks()):
            raise RequestError(
                f"rerank: wanted a model for {TextRanking.name}, got {name}, which is for "
                f"{', '.join(tasks)}: name another, or leave it out"
            )

    def _given(self, name: str, asked: IndexSearch) -> tuple[Index, np.ndarray]:
        """Return the vectors of a request, and the version of the index that they may be compared
        with."""
        assert asked.vectors is not None
        index = self._of_space(name, asked.space or "")
        if index is None:
            known = ", ".join(each.space for each in self.indexes[name])
            raise RequestError(
                f"space: wanted that of this index, {known}, got {asked.space}: vectors of "
                "different spaces cannot be compared, so send texts, or vectors by its model"
            )
        if len({len(vector) for vector in asked.vectors}) > 1:
            raise RequestError("vectors: wanted the same length for all, got several: correct it")
        return index, np.array(asked.vectors, dtype=np.float32)

    def _of_space(self, name: str, space: str) -> Index | None:
        return next((each for each in self.indexes[name] if each.space == space), None)

    async def _embedded(
        self, request: Request, caller: Caller | None, name: str, asked: IndexSearch
    ) -> tuple[Index, np.ndarray]:
        """Return the vectors of the texts by the index's model, and the version of the index whose
        vectors this version of the model has made."""
        model, of_index = await self._model_of(name), self.indexes[name][0].record.vectors
        prompt = asked.prompt_name or of_index.query_prompt
        body = {
            "inputs": asked.texts,
            "parameters": {"dimensions": of_index.space.dimensions}
            | ({} if prompt is None else {"prompt_name": prompt}),
        }
        accepts = [("accept", "application/octet-stream; dtype=float32")]
        answer = await self._ask(request, model, "/", body, accepts)
        headers = dict(answer.headers)
        index = self._of_space(name, headers["x-vector-space"])
        if index is None:
            self._models.pop(name, None)
            raise NotReadyError(
                f"{name}: wanted vectors of the space {self.indexes[name][0].space[:12]}, as this "
                f"index has, {model} now answers with those of "
                f"{headers['x-vector-space'][:12]}: serve an index of its vectors too, or the "
                "version of the model that this index was made with"
            )
        shape = [int(size) for size in headers["x-shape"].split(",")]
        return index, np.frombuffer(answer.body, "<f4").reshape(shape)

    async def _model_of(self, name: str) -> str:
        """Return the name of the served model whose vectors the index has.
        Raises: NotReadyError if none is served, or does not answer."""
        if name in self._models:
            return self._models[name]
        wanted = {each.record.vectors.space.model for each in self.indexes[name]}
        down = []
        for model, served in self.models.items():
            try:
                card = await asyncio.wait_for(served.card(), READY_TIMEOUT_S)
            except Exception:
                down.append(model)
                continue
            if card.digest in wanted:
                self._models[name] = model
                return model
        told = f", and {', '.join(down)} does not answer" if down else ""
        raise NotReadyError(
            f"{name}: wanted the model that made its vectors, "
            f"{' or '.join(sorted(digest[:12] for digest in wanted))}, got none of this "
            f"digest{told}: serve that model, or an index of another's vectors"
        )

    async def _reranked(
        self, request: Request, index: Index, asked: IndexSearch, found: list[list[Found]],
        ends_s: float,
    ) -> list[list[Found]]:  # fmt: skip
        """Return the rows in the order of a ranker's scores of them with their text. Raises:
        DeadlineError."""
        assert asked.rerank is not None
        if index.record.text is None:
            raise RequestError(
                "rerank: wanted an index with words, this one has only vectors: leave it out, or "
                "make the index again with text_column"
            )
        ranked: list[list[Found]] = []
        for query, rows in zip(asked.texts or [], found, strict=True):
            _check_time(ends_s, f"{len(ranked)} of {len(found)} searches are reranked")
            numbers = [each.id for each in rows]
            texts = await asyncio.to_thread(index.rows, numbers, [index.record.text])
            pairs = [{"text": query, "text_pair": text[index.record.text] or ""} for text in texts]
            if not pairs:
                ranked.append([])
                continue
            body = {"inputs": pairs, "parameters": {"truncation": True}}
            answer = await self._ask(request, asked.rerank, "/", body, [])
            scores = [each["score"] for each in orjson.loads(answer.body)]
            scored = sorted(zip(scores, rows, strict=True), key=lambda pair: (-pair[0], pair[1].id))
            best = scored[: asked.top_k]
            ranked.append([Found(**{**vars(row), "score": score}) for score, row in best])
        return ranked

    async def _ask(
        self, request: Request, model: str, path: str, body: Any, more: list[tuple[str, str]]
    ) -> ModelResponse:
        """Return a model's answer. Raises: _RefusedError."""
        own = {"accept", "content-type", "content-length"}
        headers = [each for each in headers_to_model(request) if each[0] not in own]
        headers += [("content-type", JSON), (PART, "1"), *more]
        answer = await self.models[model].request("POST", path, headers, orjson.dumps(body))
        if answer.status != 200:
            raise _RefusedError(model, answer)
        return answer


def _read(body: bytes) -> IndexSearch:
    """Raises: NotJSONError, RequestError."""
    return read(IndexSearch, body)


def _check_time(ends_s: float, done: str) -> None:
    if time.monotonic() >= ends_s:
        raise DeadlineError(
            f"wanted an answer before the deadline, {done}: send fewer texts at once"
        )


def _searched(
    index: Index, asked: IndexSearch, vectors: np.ndarray, ends_s: float
) -> list[list[Found]]:
    """Return the rows of each search, as many as are wanted, or as a ranker reads.

    Args:
        ends_s: the deadline, by the monotonic clock.
    Raises: DeadlineError; InputError for a filter, columns or vectors that do not fit.
    """
    where = index.filter(asked.filter)
    count = asked.rows_per_search
    columns = index.record.columns if asked.columns is None else asked.columns
    results = []
    for number, vector in enumerate(vectors):
        _check_time(ends_s, f"{number} of {len(vectors)} searches are done")
        hits: Sequence[Hit]
        if asked.hybrid:
            assert asked.texts is not None
            hits = index.hybrid(vector, asked.texts[number], count, where)
        else:
            hits = index.nearest(vector, count, where)
        rows = index.rows([hit.number for hit in hits], columns)
        results.append(
            [
                Found(id=hit.number, score=hit.score, cosine=hit.cosine, bm25=hit.bm25, row=row)
                for hit, row in zip(hits, rows, strict=True)
            ]
        )
    return results


def _dumped(answer: IndexAnswer) -> bytes:
    return orjson.dumps(asdict(answer), option=orjson.OPT_SERIALIZE_NUMPY, default=_in_json)


def _in_json(value: Any) -> str:
    """Return a value of a row that JSON has no form for: bytes in base64, others as Python shows
    them."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
