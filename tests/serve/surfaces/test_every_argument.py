"""Every argument of every client's method works as with the original server, or is refused by name.

The arguments are those of the client's own signature, or of the server's published description: one
that is new there fails `test_every_argument_is_walked` until it has a case here.
"""

import base64
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cohere
import httpx
import huggingface_hub
import numpy as np
import openai
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from serve.surfaces import tei

TEXTS = ["Parse a string.", "Open a socket on a port and listen.", "A fox."]
LONG = "open a port " * 100
CLASSES, VECTORS, RANKING = "text-classification", "feature-extraction", "text-ranking"
Check = Callable[[Any, Any], bool]


@dataclass(frozen=True)
class Case:
    """A value of an argument, and what comes of it."""

    value: Any
    gives: Check | str | None = None
    """What holds for the answers without and with it; a text that refuses it; None if it changes
    nothing, as documented."""
    also: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments, in both calls."""


@dataclass(frozen=True)
class Walk:
    """A method of a client, and all of its arguments."""

    method: Callable[..., Any]
    """As it is declared."""
    call: Callable[["Clients"], Callable[..., Any]]
    """As it is called."""
    needed: Mapping[str, Any]
    """Arguments of the usual call."""
    cases: Mapping[str, Sequence[Case]]


class Clients:
    """The clients of one server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(timeout=30)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.cohere = cohere.Client("none", base_url=url, httpx_client=self.http)
        self.cohere_v2 = cohere.ClientV2("none", base_url=url, httpx_client=self.http)
        self.triton = triton.InferenceServerClient(url.removeprefix("http://"))
        self.hub = huggingface_hub.InferenceClient(provider="hf-inference", timeout=30)

    def of_model(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A method of `InferenceClient` for a model."""
        return lambda **given: method(**{"model": f"{self.url}/v1/models/{name}"} | given)

    def post(self, path: str) -> Callable[..., Any]:
        """A request by the fields of its body."""

        def ask(**given: Any) -> Any:
            response = self.http.post(f"{self.url}{path}", json=given)
            response.raise_for_status()
            return response.json()

        return ask

    def close(self) -> None:
        self.openai.close()
        self.triton.close()
        self.http.close()


@pytest.fixture(scope="module")
def clients(front: str) -> Iterator[Clients]:
    clients = Clients(front)
    yield clients
    clients.close()


# -- what holds for answers ------------------------------------------------------------------------


def differs(plain: Any, other: Any) -> bool:
    return simple(plain) != simple(other)


def shorter(plain: Any, other: Any) -> bool:
    return len(other) < len(plain)


def simple(answer: Any) -> Any:
    """An answer as JSON with rounded numbers, without what is new in every answer."""
    if isinstance(answer, triton.InferResult):
        tensors = {each["name"]: each for each in answer.get_response()["outputs"]}
        answer = {name: answer.as_numpy(name) for name in tensors}
    if hasattr(answer, "model_dump"):
        answer = answer.model_dump()
    if hasattr(answer, "dict"):
        answer = answer.dict()
    if isinstance(answer, np.ndarray):
        answer = answer.tolist()
    if isinstance(answer, Mapping):
        return {name: simple(value) for name, value in answer.items() if name != "id"}
    if isinstance(answer, list | tuple):
        return [simple(each) for each in answer]
    if isinstance(answer, float):
        return round(answer, 5)
    return answer.decode() if isinstance(answer, bytes) else answer


# -- the Open Inference Protocol -------------------------------------------------------------------


def tensor(name: str, *texts: str) -> triton.InferInput:
    made = triton.InferInput(name, [len(texts)], "BYTES")
    made.set_data_from_numpy(np.array(texts, dtype=object))
    return made


def other_scores(plain: Any, other: Any) -> bool:
    return not np.allclose(*(each.as_numpy("score") for each in (plain, other)))


def same_labels(plain: Any, other: Any) -> bool:
    labels = other.get_response()["outputs"][0]["data"]
    return bool(labels == [each.decode() for each in plain.as_numpy("label")])


def outputs(*names: str, **given: Any) -> list[triton.InferRequestedOutput]:
    return [triton.InferRequestedOutput(name, **given) for name in names]


INFER: dict[str, Sequence[Case]] = {
    "model_name": [Case("nothing", 'there is no model "nothing"')],
    "inputs": [
        Case([tensor("text", "a"), tensor("text", "b")], "wanted different names, got 'text'"),
        Case([tensor("texts", "a")], "wanted one of text, text_pair, got 'texts' (did you mean"),
    ],
    "model_version": [Case("1"), Case("2", "there is no version '2' of text-classification")],
    "outputs": [
        Case(outputs("label"), lambda plain, other: other.as_numpy("score") is None),
        Case(outputs("label", binary_data=False), same_labels),
        Case(outputs("label", class_count=2), "outputs.0.parameters: wanted some of binary_data,"),
        Case(outputs("label", "label"), "outputs: wanted different names, got 'label' 2 times"),
    ],
    "request_id": [Case("7", lambda plain, other: other.get_response()["id"] == "7")],
    "sequence_id": [
        Case(7, "sequence_id: wanted none, since text-classification keeps nothing"),
        Case("a", "sequence_id: wanted none"),
    ],
    "sequence_start": [Case(True), Case(True, "sequence_id: wanted none", {"sequence_id": 7})],
    "sequence_end": [Case(True), Case(True, "sequence_id: wanted none", {"sequence_id": 7})],
    "priority": [Case(1), Case(-1, "parameters.priority: wanted at least 0, got a number (-1)")],
    "timeout": [Case(30_000_000), Case(0), Case(1, "wanted an answer within 1e-06 s")],
    "headers": [Case({"X-Caller": "someone"})],
    "query_params": [Case({"a": "b"})],
    "request_compression_algorithm": [Case("gzip"), Case("deflate")],
    "response_compression_algorithm": [Case("gzip"), Case("deflate")],
    "parameters": [
        Case({"function_to_apply": "none"}, other_scores),
        Case({"functions": "none"}, 'got "functions" (did you mean'),
    ],
}
BY_MODEL: dict[str, Sequence[Case]] = {
    name: INFER[name] for name in ("model_name", "model_version", "headers", "query_params")
}
OF_THE_CLIENT = {
    "close", "generate_request_body", "parse_response_body", "plugin", "register_plugin",
    "unregister_plugin",
}  # fmt: skip
"""Methods of `tritonclient` that ask the server nothing."""
MANAGES: dict[str, tuple[Any, ...]] = {
    "get_cuda_shared_memory_status": (),
    "get_inference_statistics": (CLASSES,),
    "get_log_settings": (),
    "get_model_config": (CLASSES,),
    "get_model_repository_index": (),
    "get_system_shared_memory_status": (),
    "get_trace_settings": (),
    "load_model": (CLASSES,),
    "register_cuda_shared_memory": ("a", b"", 0, 1),
    "register_system_shared_memory": ("a", "b", 1),
    "unload_model": (CLASSES,),
    "unregister_cuda_shared_memory": (),
    "unregister_system_shared_memory": (),
    "update_log_settings": ({},),
    "update_trace_settings": (),
}
"""Methods of extensions that the server does not list, and their arguments."""


@pytest.mark.parametrize("name", MANAGES)
def test_tritons_management_calls_are_refused(clients: Clients, name: str) -> None:
    with pytest.raises(InferenceServerException, match="there is no such path") as told:
        getattr(clients.triton, name)(*MANAGES[name])
    assert told.value.status() == "404"


def test_every_method_of_tritonclient_is_walked() -> None:
    kind = triton.InferenceServerClient
    methods = {name for name in dir(kind) if not name.startswith("_")}
    walked = {
        walk.method.__name__ for walk in WALKS.values() if hasattr(kind, walk.method.__name__)
    }
    alike = {"async_infer"}  # `infer`, without waiting
    assert methods == walked | alike | OF_THE_CLIENT | MANAGES.keys()
    same = [inspect.signature(getattr(kind, name)).parameters for name in ("infer", "async_infer")]
    assert same[0] == same[1]


# -- OpenAI, Cohere --------------------------------------------------------------------------------


def in_base64(plain: Any, other: Any) -> bool:
    vectors = [np.frombuffer(base64.b64decode(each.embedding), "<f4") for each in other.data]
    return bool(np.allclose(vectors, [each.embedding for each in plain.data]))


CREATE: dict[str, Sequence[Case]] = {
    "input": [
        Case(TEXTS[0], lambda plain, other: other.data[0] == plain.data[0]),
        Case([1, 2], "input: wanted texts, got token ids"),
        Case([[1, 2]], "input: wanted texts, got token ids"),
        Case([], "input: wanted at least one text, got an empty list"),
    ],
    "model": [Case("nothing", 'there is no model "nothing"')],
    "dimensions": [Case(32), Case(8, "dimensions: wanted")],
    "encoding_format": [Case("float"), Case("base64", in_base64)],
    "user": [Case("someone")],
    "extra_headers": [
        Case({"Accept": "text/html"}, "Accept: wanted one of application/json"),
    ],
    "extra_query": [Case({"a": "b"})],
    "extra_body": [
        Case({"truncate": True}),
        Case({"truncate_prompt_tokens": -1}),
        Case({"truncate_prompt_tokens": 9}, "truncate_prompt_tokens: wanted -1, got"),
        Case({"dimension": 8}, "did you mean dimensions?"),
    ],
    "timeout": [Case(20.0)],
}


def same_vectors(plain: Any, other: Any) -> bool:
    return bool(np.allclose(plain.embeddings, other.embeddings))


TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
EMBED: dict[str, Sequence[Case]] = {
    "texts": [
        Case(TEXTS[:1], differs),
        Case([], "texts: wanted at least one text, got an empty list"),
    ],
    "images": [Case(["data:image/png;base64,AAAA"], "wanted some of texts, inputs, ")],
    "model": [Case("nothing", 'there is no model "nothing"')],
    "input_type": [Case(each) for each in ("search_query", "classification", "clustering")],
    "embedding_types": [
        *(Case([each], lambda plain, other: other.embeddings.dict()) for each in TYPES),
        Case(["float", "float"], "embedding_types: wanted different names, got 'float' 2 times"),
        Case(["int4"], "embedding_types.0: wanted one of 'float', 'base64', 'int8', "),
    ],
    "truncate": [
        Case("NONE"),
        Case("NONE", 'send {"truncate": "END"} too to have it cut', {"texts": [LONG]}),
        Case("START", differs, {"texts": [LONG + "fox"]}),
        Case("END", None, {"texts": [LONG]}),
    ],
    "request_options": [
        Case({"additional_body_parameters": {"a": 1}}, 'got "a"'),
        Case({"timeout_in_seconds": 20}),
    ],
}
RERANK: dict[str, Sequence[Case]] = {
    "query": [Case("A fox.", differs)],
    "documents": [Case([], "documents: wanted at least one text, got an empty list")],
    "model": EMBED["model"],
    "top_n": [
        Case(2, lambda plain, other: other.results == plain.results[:2]),
        Case(0, "top_n: wanted at least 1, got a number (0)"),
    ],
    "request_options": EMBED["request_options"],
}

# -- the paths of Text Embeddings Inference, by the properties of its OpenAPI 1.9.3 ----------------


def texts_are(plain: Any, other: Any) -> bool:
    return [each["text"] for each in other] == [TEXTS[each["index"]] for each in plain]


INPUTS = [Case(TEXTS[0], shorter), Case([[1, 2]], "wanted text, got"), Case([], "at least one")]
CUT: dict[str, Sequence[Case]] = {
    "truncate": [
        Case(True),
        Case(False),
        Case(None),
        Case("yes", "truncate: wanted true or false"),
    ],
    "truncation_direction": [
        *(Case(side) for side in ("Left", "Right", "left", "right")),
        Case("up", "truncation_direction: wanted one of 'left', 'right', 'Left' or 'Right'"),
    ],
}
PROMPT = {"prompt_name": [Case(None), Case("query", "wanted one of the model's prompts (none)")]}
OF_TEI: dict[str, tuple[Mapping[str, Any], Mapping[str, Sequence[Case]]]] = {
    "/embed": (
        {"inputs": TEXTS},
        {
            "inputs": INPUTS,
            "dimensions": [Case(32), Case(8, "dimensions: wanted"), Case(None)],
            "normalize": [Case(True), Case(False, differs)],
            **CUT,
            **PROMPT,
        },
    ),
    "/embed_all": ({"inputs": TEXTS}, {"inputs": INPUTS, **CUT, **PROMPT}),
    "/embed_sparse": ({"inputs": TEXTS}, {"inputs": INPUTS, **CUT, **PROMPT}),
    "/rerank": (
        {"query": "Open a port.", "texts": TEXTS},
        {
            "query": [Case("A fox.", differs)],
            "texts": [Case(TEXTS[:1], shorter), Case([], "texts: wanted at least one text")],
            "raw_scores": [Case(False), Case(True, differs)],
            "return_text": [Case(False), Case(True, texts_are)],
            **CUT,
        },
    ),
    "/predict": (
        {"inputs": [[text] for text in TEXTS]},
        {
            "inputs": [Case("a", differs), Case([["a", "b", "c"]], "a list of one or two texts")],
            "raw_scores": [Case(False), Case(True, differs)],
            **CUT,
        },
    ),
    "/similarity": (
        {"inputs": {"source_sentence": "a", "sentences": TEXTS}},
        {
            "inputs": [Case({"source_sentence": "a"}, 'inputs: wanted the key "sentences"')],
            "parameters": [
                Case({name: case.value}, case.gives)
                for name, cases in {**CUT, **PROMPT}.items()
                for case in cases
            ],
        },
    ),
    "/tokenize": (
        {"inputs": TEXTS},
        {
            "inputs": INPUTS,
            "add_special_tokens": [Case(True), Case(False, differs)],
            **PROMPT,
        },
    ),
    "/decode": (
        {"ids": [[5, 6], [7]]},
        {
            "ids": [Case([5, 6], shorter), Case([[-1]], "ids"), Case([10**6], "wanted ids of the")],
            "skip_special_tokens": [Case(True), Case(False)],
        },
    ),
}


# -- Hugging Face ----------------------------------------------------------------------------------


def hub(task: str, needed: Mapping[str, Any], model: str = "", **cases: Sequence[Case]) -> Walk:
    method = getattr(huggingface_hub.InferenceClient, task)
    name = model or task.replace("_", "-")

    def call(clients: Clients) -> Callable[..., Any]:
        return clients.of_model(getattr(clients.hub, task), name)

    nobody = Case("http://127.0.0.1:1", "Connection refused")
    return Walk(method, call, needed, {"model": [nobody], **cases})


QUESTION = {"question": "Where is the tower?", "context": "The tower stands in Paris by the river."}


def is_answered(plain: Any, other: Any) -> bool:
    """With a part of the passage. Which it is depends on all of the model's numbers."""
    return other.answer in QUESTION["context"]


TASKS = {
    "text_classification": hub(
        "text_classification",
        {"text": TEXTS[0]},
        text=[Case(TEXTS[1], differs)],
        top_k=[Case(1, shorter), Case(0, "top_k: wanted at least 1")],
        function_to_apply=[
            Case("none", differs),
            Case("softmax"),
            Case("a", "wanted one of 'soft"),
        ],
    ),
    "token_classification": hub(
        "token_classification",
        {"text": TEXTS[1]},
        text=[Case(TEXTS[0], differs)],
        aggregation_strategy=[Case("none", differs), Case("simple"), Case("a", "wanted one of")],
        ignore_labels=[Case(["O"]), Case(["O", "place"], shorter)],
        stride=[Case(16), Case(-1, "stride")],
    ),
    "question_answering": hub(
        "question_answering",
        QUESTION,
        question=[Case("Who?", differs)],
        context=[Case("In Rome.", differs)],
        align_to_words=[Case(True, is_answered), Case(False, is_answered)],
        doc_stride=[Case(16), Case(-1, "doc_stride")],
        handle_impossible_answer=[Case(False), Case(True, is_answered)],
        max_answer_len=[Case(1, is_answered), Case(0, "max_answer_len: wanted at least 1")],
        max_question_len=[Case(64), Case(0, "max_question_len: wanted at least 1")],
        max_seq_len=[Case(64), Case(0, "max_seq_len: wanted at least")],
        top_k=[Case(2, lambda plain, other: len(other) == 2), Case(0, "top_k: wanted at least 1")],
    ),
    "fill_mask": hub(
        "fill_mask",
        {"text": "Open a [MASK]."},
        text=[Case("Open a port.", "wanted a text with [MASK]")],
        targets=[Case(["a", "port"], shorter), Case(["a b c"], "targets")],
        top_k=[Case(2, shorter), Case(0, "top_k: wanted at least 1")],
    ),
    "feature_extraction": hub(
        "feature_extraction",
        {"text": TEXTS},
        text=[Case(TEXTS[0], shorter)],
        normalize=[Case(False), Case(True, differs)],
        prompt_name=[Case("query", "wanted one of the model's prompts (none)")],
        truncate=[Case(True), Case(False), Case(False, "to have it cut", {"text": LONG})],
        truncation_direction=[Case("left"), Case("up", "truncation_direction: wanted one of")],
        dimensions=[Case(32), Case(8, "dimensions: wanted")],
        # The client makes numbers of an answer, whatever it has asked for.
        encoding_format=[Case("float"), Case("base64", "could not convert string to float")],
    ),
    "sentence_similarity": hub(
        "sentence_similarity",
        {"sentence": TEXTS[0], "other_sentences": TEXTS},
        model=VECTORS,
        sentence=[Case(TEXTS[1], differs)],
        other_sentences=[Case(TEXTS[:1], shorter)],
    ),
    "zero_shot_classification": hub(
        "zero_shot_classification",
        {"text": TEXTS[0], "candidate_labels": ["food", "sport"]},
        model="nli",
        text=[Case(TEXTS[1], differs)],
        candidate_labels=[Case(["food"], shorter)],
        multi_label=[Case(False), Case(True, differs)],
        hypothesis_template=[Case("About {}.", differs), Case("About.", "hypothesis_template")],
    ),
    "health_check": hub("health_check", {}, model=CLASSES),
    "get_endpoint_info": hub("get_endpoint_info", {}, model=CLASSES),
}
WALKS: dict[str, Walk] = {
    "openai": Walk(
        openai.resources.Embeddings.create,
        lambda clients: clients.openai.embeddings.create,
        {"input": TEXTS, "model": VECTORS},
        CREATE,
    ),
    "cohere.Client.embed": Walk(
        cohere.Client.embed,
        lambda clients: clients.cohere.embed,
        {"texts": TEXTS, "model": VECTORS, "batching": False},
        EMBED | {"batching": [Case(False), Case(True, same_vectors)]},
    ),
    "cohere.ClientV2.embed": Walk(
        cohere.ClientV2.embed,
        lambda clients: clients.cohere_v2.embed,
        {"texts": TEXTS, "model": VECTORS, "input_type": "search_document"},
        EMBED
        | {
            "inputs": [
                Case(
                    [{"content": [{"type": "text", "text": "a"}]}], "one of texts, inputs, got bo"
                ),
                Case([{"content": []}], "inputs.0.content: wanted at least one"),
            ],
            "max_tokens": [Case(128), Case(9, "max_tokens: wanted at least 128, the tokens that")],
            "output_dimension": [Case(32), Case(8, "dimensions: wanted")],
            "priority": [Case(1)],
        },
    ),
    "cohere.Client.rerank": Walk(
        cohere.Client.rerank,
        lambda clients: clients.cohere.rerank,
        {"query": "Open a port.", "documents": TEXTS, "model": RANKING},
        RERANK
        | {
            "rank_fields": [Case(["text"]), Case(["title"], "rank_fields.0: wanted 'text', got")],
            "return_documents": [
                Case(False),
                Case(True, lambda plain, other: other.results[0].document.text in TEXTS),
            ],
            "max_chunks_per_doc": [Case(1), Case(9, "max_chunks_per_doc: wanted 1, got")],
        },
    ),
    "cohere.ClientV2.rerank": Walk(
        cohere.ClientV2.rerank,
        lambda clients: clients.cohere_v2.rerank,
        {"query": "Open a port.", "documents": TEXTS, "model": RANKING},
        RERANK
        | {
            "max_tokens_per_doc": [Case(4096), Case(9, "max_tokens_per_doc: wanted at least 128")],
            "relevant_spans": [Case({"max_spans_per_doc": 1}, 'got "relevant_spans"')],
            "priority": [Case(1)],
        },
    ),
    "tritonclient.infer": Walk(
        triton.InferenceServerClient.infer,
        lambda clients: clients.triton.infer,
        {"model_name": CLASSES, "inputs": [tensor("text", *TEXTS)]},
        INFER,
    ),
    "tritonclient.is_model_ready": Walk(
        triton.InferenceServerClient.is_model_ready,
        lambda clients: clients.triton.is_model_ready,
        {"model_name": CLASSES},
        BY_MODEL
        | {
            "model_name": [Case("nothing", differs)],
            "model_version": [Case("1"), Case("2", differs)],
        },
    ),
    "tritonclient.get_model_metadata": Walk(
        triton.InferenceServerClient.get_model_metadata,
        lambda clients: clients.triton.get_model_metadata,
        {"model_name": CLASSES},
        BY_MODEL,
    ),
    **{
        f"tritonclient.{name}": Walk(
            getattr(triton.InferenceServerClient, name),
            lambda clients, name=name: getattr(clients.triton, name),  # type: ignore[misc]
            {},
            {each: INFER[each] for each in ("headers", "query_params")},
        )
        for name in ("is_server_live", "is_server_ready", "get_server_metadata")
    },
    **{f"InferenceClient.{name}": walk for name, walk in TASKS.items()},
}
ARGUMENTS = [
    (name, argument, number)
    for name, walk in WALKS.items()
    for argument, cases in walk.cases.items()
    for number in range(len(cases))
]
FIELDS = [
    (path, argument, number)
    for path, (_, fields) in OF_TEI.items()
    for argument, cases in fields.items()
    for number in range(len(cases))
]


@pytest.mark.parametrize("name", WALKS)
def test_every_argument_is_walked(name: str) -> None:
    walk = WALKS[name]
    declared = inspect.signature(walk.method).parameters.keys() - {"self"}
    assert declared == walk.cases.keys()


def outcome(call: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """What is answered, or the message of the refusal."""
    try:
        return call(**given)
    except Exception as error:
        response = getattr(error, "response", None)
        return Refused(f"{error} {'' if response is None else response.text}")


class Refused(str):
    """A refusal's message."""

    __slots__ = ()


def check(call: Callable[..., Any], needed: Mapping[str, Any], name: str, case: Case) -> None:
    plain = {**needed, **case.also}
    other = outcome(call, plain | {name: case.value})
    if isinstance(case.gives, str):
        assert isinstance(other, Refused), other
        assert case.gives in other.replace('\\"', '"').replace("\\'", "'")
        return
    assert not isinstance(other, Refused), other
    first = outcome(call, plain)
    if case.gives is None:
        assert simple(other) == simple(first)
    else:
        assert case.gives(first, other)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the clients' own
@pytest.mark.parametrize(("name", "argument", "number"), ARGUMENTS)
def test_an_argument_works_or_is_refused_by_name(
    clients: Clients, name: str, argument: str, number: int
) -> None:
    walk = WALKS[name]
    check(walk.call(clients), walk.needed, argument, walk.cases[argument][number])


@pytest.mark.parametrize(("path", "argument", "number"), FIELDS)
def test_a_field_of_tei_works_or_is_refused_by_name(
    clients: Clients, path: str, argument: str, number: int
) -> None:
    needed, cases = OF_TEI[path]
    check(clients.post(path), needed, argument, cases[argument][number])


def test_every_path_of_tei_is_walked() -> None:
    bodies = {each.path: each.body for each in tei.SURFACE.endpoints if each.method == "POST"}
    assert bodies.keys() == OF_TEI.keys()
    ours = {"model", "options", "top_n"}  # which names a model, is LlamaIndex's, and LiteLLM's
    for path, body in bodies.items():
        assert body is not None
        assert body.model_fields.keys() - ours == OF_TEI[path][1].keys()


def test_teis_info_has_what_typed_clients_need(front: str) -> None:
    """The required properties of `Info`, and their types, in its OpenAPI 1.9.3."""
    required = {
        "model_id": str, "model_dtype": str, "served_model_name": str, "model_type": dict,
        "max_concurrent_requests": int, "max_input_length": int, "max_batch_tokens": int,
        "max_client_batch_size": int, "auto_truncate": bool, "tokenization_workers": int,
        "version": str,
    }  # fmt: skip
    for name in (CLASSES, VECTORS, RANKING, "sparse-embedding", "fill-mask"):
        info = httpx.get(f"{front}/v1/models/{name}/info", timeout=30).json()
        assert {key: type(info[key]) for key in required} == required
        [kind] = info["model_type"]
        assert kind in ("classifier", "embedding", "reranker")
        json.dumps(info)
