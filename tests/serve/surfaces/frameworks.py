"""Every argument of the frameworks that call a server for TEI's or OpenAI's routes, with cases.

Importing these frameworks takes seconds, so only the tests that use them import this module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.rankers.huggingface_api import (
    HuggingFaceTEIRanker,
    TruncationDirection,
)
from langchain_openai import OpenAIEmbeddings
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

TEXTS = ["Parse a string.", "Open a socket on a port and listen.", "A fox."]
LONG = "open a port " * 100
QUERY = "Open a port."
VECTORS, RANKING = "feature-extraction", "text-ranking"
TOKEN = Secret.from_token("none")


@dataclass(frozen=True)
class Case:
    """A value of an argument, and what comes of it."""

    value: Any
    gives: str = "the same"
    """`the same` answer as without it, `another`, or part of what refuses it."""
    also: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments, in both calls; `texts` are what is sent."""


def embedded(url: str, texts: Sequence[str] = TEXTS, **given: Any) -> Any:
    client = TextEmbeddingsInference(**{"base_url": url, "model_name": VECTORS} | given)
    return [[round(number, 5) for number in row] for row in client.get_text_embedding_batch(texts)]


def embedded_as_openai(url: str, texts: Sequence[str] = TEXTS, **given: Any) -> Any:
    usual: dict[str, Any] = {"base_url": f"{url}/v1", "model": VECTORS, "api_key": "none"}
    usual |= {"max_retries": 0, "check_embedding_ctx_length": False}
    client = OpenAIEmbeddings(**usual | given)
    return [[round(number, 5) for number in row] for row in client.embed_documents(list(texts))]


def reranked(url: str, texts: Sequence[str] = TEXTS, **given: Any) -> Any:
    client = TextEmbeddingInference(**{"base_url": url, "model_name": RANKING} | given)
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in texts]
    best = client.postprocess_nodes(nodes, query_str=QUERY)
    return [(each.text, round(each.score or 0.0, 5)) for each in best]


def ranked(url: str, texts: Sequence[str] = TEXTS, **given: Any) -> Any:
    return ranked_by({"url": url, "token": TOKEN} | given, texts, query=QUERY)


def ranked_at_once(url: str, texts: Sequence[str] = TEXTS, **given: Any) -> Any:
    return ranked_by({"url": url, "token": TOKEN}, texts, **{"query": QUERY} | given)


def ranked_by(of_ranker: Mapping[str, Any], texts: Sequence[str], **given: Any) -> Any:
    documents = {"documents": [Document(content=text) for text in texts]}
    answer = HuggingFaceTEIRanker(**of_ranker).run(**documents | given)["documents"]
    return [(each.content, round(each.score or 0.0, 5)) for each in answer]


AWAY = "http://127.0.0.1:1"
OF_LLAMA_INDEX: dict[str, Sequence[Case]] = {
    "model_name": [Case("nothing")],  # which it keeps to itself
    "base_url": [Case(AWAY, "Connection refused")],
    "timeout": [Case(20.0)],
    "truncate_text": [Case(True), Case(False)],
    "auth_token": [Case("Bearer none")],
}
WALKS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Sequence[Case]]]] = {
    "llama_index's embeddings": (
        TextEmbeddingsInference.__init__,
        embedded,
        OF_LLAMA_INDEX
        | {
            "text_instruction": [Case("passage:", "another")],
            "query_instruction": [Case("query:")],  # of queries alone
            "truncate_text": [
                *OF_LLAMA_INDEX["truncate_text"],
                Case(True, also={"texts": [LONG]}),
                Case(False, "Validation", {"texts": [LONG]}),
            ],
            "embed_batch_size": [Case(1)],
            "callback_manager": [Case(None)],
            "endpoint": [Case(f"/v1/models/{VECTORS}/embed"), Case("/nothing", "not_found")],
        },
    ),
    "llama_index's reranker": (
        TextEmbeddingInference.__init__,
        reranked,
        OF_LLAMA_INDEX
        | {
            "top_n": [Case(1, "another"), Case(5)],
            # NOTE: version 0.6.0 sends neither these nor `truncate_text`: docs/serving/clients.md.
            "text_instruction": [Case("passage:")],
            "query_instruction": [Case("query:")],
        },
    ),
    "langchain's embeddings": (
        OpenAIEmbeddings,
        embedded_as_openai,
        {
            "model": [Case("nothing", 'there is no model "nothing"')],
            "base_url": [Case(AWAY, "Connection error")],
            "dimensions": [Case(2, "dimensions")],
            "model_kwargs": [
                Case({"encoding_format": "float"}),
                Case({"extra_body": {"nothing": 1}}, "nothing"),
            ],
            "chunk_size": [Case(1)],
            "api_key": [Case("another")],
            "organization": [Case("another")],
            "max_retries": [Case(1)],
            "timeout": [Case(20.0)],
            "default_headers": [Case({"X-Remark": "a"})],
            "default_query": [Case({"remark": "a"})],
            "http_client": [Case(httpx.Client())],
            "http_async_client": [Case(None)],
            "client": [Case(None)],
            "async_client": [Case(None)],
            "openai_proxy": [Case(None)],
            "show_progress_bar": [Case(True)],
            # Of Azure, of its own tokenizer, of its retries, or of nothing (version 1.7.3).
            "deployment": [Case("another")],
            "api_version": [Case("2024-10-21")],
            "openai_api_type": [Case("openai")],
            "embedding_ctx_length": [Case(2)],
            "allowed_special": [Case("all")],
            "disallowed_special": [Case("all")],
            "tiktoken_enabled": [Case(False)],
            "tiktoken_model_name": [Case("another")],
            "skip_empty": [Case(True)],
            "headers": [Case({"X-Remark": "a"})],
            "retry_min_seconds": [Case(1)],
            "retry_max_seconds": [Case(2)],
        },
    ),
    "haystack's ranker": (
        HuggingFaceTEIRanker.__init__,
        ranked,
        {
            "url": [Case(AWAY, "Connection refused", {"max_retries": 1})],
            "top_k": [Case(1, "another"), Case(10)],
            "raw_scores": [Case(False), Case(True, "another")],
            "timeout": [Case(20)],
            "max_retries": [Case(1)],
            "retry_status_codes": [Case([503])],
            "token": [Case(TOKEN)],
        },
    ),
    "haystack's run": (
        HuggingFaceTEIRanker.run,
        ranked_at_once,
        {
            "query": [Case("A fox.", "another")],
            "documents": [Case([Document(content="A fox.")], "another")],
            "top_k": [Case(1, "another")],
            "truncation_direction": [Case(each) for each in TruncationDirection],
        },
    ),
}
APART = {"use_grpc", "check_embedding_ctx_length"}
"""An argument for another protocol, which the server does not speak, and one of which `test_openai`
says what it has LangChain send."""
