# ruff: noqa: E501
"""Requests that are no good, from a seeded generator: what is sent to see that it costs nobody.

Each is a good request of some surface and task (`GOOD`) with one or two faults: in its JSON value
(`VALUES`, `CHANGES`), in its bytes (`DAMAGES`), or in what says how to read them (`HEADERS`).
"""

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bert_core.tasks.catalog import TASKS
from tests.serve import wire


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A request."""

    surface: str
    path: str
    body: bytes
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    kind: str = "good"
    """What is wrong with it."""

    def bytes(self) -> bytes:
        return wire.request(self.method, self.path, self.body, self.headers)


PAIR = {"text": "Open a socket.", "text_pair": "Parse a string as JSON."}
TEXTS = ["Open a socket and listen on a port.", "Sort the values of an array."]
TENSOR = {"name": "text", "shape": [2], "datatype": "BYTES", "data": TEXTS}
VECTORS, CLASSES, RANKING = "feature-extraction", "text-classification", "text-ranking"
MODELS = [*(name for name, task in TASKS.items() if task.trainable), "nli"]
"""The models of the fixture `bundles`."""

ROOT: list[tuple[str, str, dict[str, Any]]] = [
    ("openai", "/v1/embeddings", {"input": TEXTS, "encoding_format": "base64", "model": VECTORS}),
    ("openai", "/embeddings", {"input": TEXTS[0]}),
    ("tei", "/embed", {"inputs": TEXTS, "truncate": True}),
    ("tei", "/embed_all", {"inputs": TEXTS[0]}),
    ("tei", "/embed_sparse", {"inputs": TEXTS}),
    ("tei", "/rerank", {"query": TEXTS[0], "texts": TEXTS, "return_text": True}),
    ("tei", "/predict", {"inputs": [[TEXTS[0]], [TEXTS[1]]], "model": CLASSES}),
    ("tei", "/similarity", {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}),
    ("tei", "/tokenize", {"inputs": TEXTS}),
    ("tei", "/decode", {"ids": [[5, 6], [7]], "skip_special_tokens": False}),
    ("attention", "/attention", {"text": TEXTS[0], "text_pair": TEXTS[1], "layer": 1}),
    ("rerank", "/v1/rerank", {"query": TEXTS[0], "documents": [TEXTS[1], {"text": "a"}]}),
    ("rerank", "/v2/rerank", {"query": TEXTS[0], "documents": TEXTS, "return_documents": True}),
    ("rerank", "/v2/embed", {"texts": TEXTS, "embedding_types": ["float", "ubinary"]}),
    ("open_inference", f"/v2/models/{CLASSES}/infer", {"inputs": [TENSOR], "id": "7"}),
    ("open_inference", f"/v2/models/{VECTORS}/infer", {"inputs": [TENSOR]}),
    ("invocations", "/invocations", {"inputs": TEXTS}),
    (
        "invocations",
        f"/v1/models/{VECTORS}/invocations",
        {"inputs": TEXTS, "params": {"normalize": True}},
    ),
    (
        "invocations",
        f"/v1/models/{RANKING}/invocations",
        {"dataframe_split": {"columns": list(PAIR), "data": [TEXTS, TEXTS[::-1]]}},
    ),
    ("invocations", f"/v1/models/{CLASSES}/invocations", {"dataframe_records": [PAIR]}),
]
"""Surface, path and body; below a model's URL as well as at the root."""
ALSO: list[tuple[str, Any, dict[str, Any]]] = [
    (CLASSES, TEXTS, {"top_k": 2, "function_to_apply": "none"}),
    ("token-classification", TEXTS[0], {"aggregation_strategy": "simple"}),
    ("fill-mask", "Open a [MASK] and [MASK].", {"top_k": 3}),
    (VECTORS, TEXTS, {"normalize": True, "truncate": True}),
    (VECTORS, {"source_sentence": TEXTS[0], "sentences": TEXTS}, {}),
    ("nli", TEXTS[0], {"candidate_labels": ["food", "sport"], "multi_label": True}),
    ("sparse-embedding", TEXTS, {"top_k": 5}),
]
"""Model, inputs and parameters for Hugging Face's API, besides every task's example."""


def good_requests() -> list[Sent]:
    """At least one of every surface, path and task."""
    inputs: list[tuple[str, Any, dict[str, Any]]] = [(name, _example(name), {}) for name in MODELS]
    inputs += ALSO
    found = [
        Sent(
            surface="huggingface",
            path=f"/v1/models/{name}",
            body=_json({"inputs": value, **({"parameters": parameters} if parameters else {})}),
        )
        for name, value, parameters in inputs
    ]
    for surface, path, body in ROOT:
        found.append(Sent(surface=surface, path=path, body=_json(body)))
    below = [(VECTORS, "/v1/embeddings"), (RANKING, "/rerank"), (CLASSES, "/predict")]
    for name, path in below:
        body = next(body for _, at, body in ROOT if at == path)
        found.append(
            Sent(surface=_surface_of(path), path=f"/v1/models/{name}{path}", body=_json(body))
        )
    return found


def _surface_of(path: str) -> str:
    return next(surface for surface, at, _ in ROOT if at == path)


def _example(name: str) -> Any:
    task = TASKS.get(name, TASKS[CLASSES])
    return task(["a", "b"]).examples[0] if name != "sparse-embedding" else TEXTS[0]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


# -- values ----------------------------------------------------------------------------------------

RAW = "\0raw:"
"""A text that begins with this stands in the body as it is, without quotes."""
CHARACTERS = [
    "", " ", "\t\r\n", "\0", "\x7f", "\u0085", "\ufeff", "\uffff", "\ufffd", "\u2028", "\U0010ffff",
    "🏳️‍🌈👩🏽‍🚀", "שלום עולם", "\u202egnirts\u202c", "é" + "́" * 300, "\u0600\u0301", "ﷺ" * 40,
    "ß\u1e9e\u0130\u0131", "中文字符", "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    "\u200b\u200d\ufe0f", "[MASK]" * 30, "[CLS][SEP][PAD][UNK]", "##a ##b", "a" * 5_000, "a " * 3_000,
    "\\ud800", "\\x00", "{{7*7}}", "%s%n%x", "'; DROP TABLE a; --", "../../../etc/passwd", "<b>a</b>",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 7, 2**31, 2**63, -(2**63), 2**64, 0.5, 1e300, -0.0, [], {}, [[]], [{}],
    [None], ["a"], [7], {"": ""}, {"text": 7}, {"a": {"b": {"c": []}}}, ["a"] * 2_100, [["a"]] * 300,
    [101, 7592], [[101], [7592]], f"{RAW}NaN", f"{RAW}Infinity", f"{RAW}-Infinity", f"{RAW}1e999",
    f"{RAW}-1e999", f"{RAW}{'9' * 400}", f"{RAW}{'9' * 5_000}", f"{RAW}1{'0' * 400}.5", f"{RAW}1e-999",
    f"{RAW}0x1f", f"{RAW}01", f"{RAW}.5", f"{RAW}+1", f"{RAW}1_000", f"{RAW}undefined", f"{RAW}'a'",
    f'{RAW}"\\ud800"', f'{RAW}"a\\udfffb"', f'{RAW}"\\ude00\\ud83d"', f'{RAW}"\\u00"', f'{RAW}"\\x"',
    f'{RAW}"a\nb"', f"{RAW}{'[' * 900}{']' * 900}", f"{RAW}{'[' * 3_000}{']' * 3_000}",
    f"{RAW}{'[' * 50_000}", RAW + '{"a":' * 900 + "1" + "}" * 900, f"{RAW}[1,]", f"{RAW}[,]", f"{RAW}",
]  # fmt: skip
NAMES = [
    "", "Inputs", "input", "inputs ", "parameter", "__class__", "self", "model", "options", "top_k",
    "x" * 20_000, "🏳️‍🌈", "\0", "\ufeffinputs", "normalize", "truncation", "dimensions", "prompt_name",
    "candidate_labels", "encoding_format", "return_all_scores", "aggregation_strategy", "$ref", "-1",
]  # fmt: skip

Path = tuple[Any, ...]


def _places(value: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _places(item, (*path, name))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _places(item, (*path, place))


def _with(value: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """The value with what is at a place changed."""
    if not path:
        return change(value)
    first, *others = path
    items = value.copy()
    items[first] = _with(value[first], tuple(others), change)
    return items


def _odd_text(rng: random.Random) -> str:
    kind = rng.randrange(3)
    if kind == 0:
        return "".join(rng.choices(CHARACTERS, k=rng.randint(1, 4)))
    if kind == 1:  # any of Unicode, but for halves of surrogate pairs
        points = [rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)))
                  for _ in range(rng.randint(1, 60))]  # fmt: skip
        return "".join(map(chr, points))
    return "".join(rng.choices("ab \n\"\\/{}[]:,'\0", k=rng.randint(0, 40)))


def _replaced(rng: random.Random, body: Any) -> Any:
    value = rng.choice(VALUES) if rng.random() < 0.7 else _odd_text(rng)
    return _with(body, rng.choice(list(_places(body))[1:]), lambda _: value)


def _with_other_texts(rng: random.Random, body: Any) -> Any:
    for path in list(_places(body))[1:]:
        body = _with(body, path, lambda old: _odd_text(rng) if isinstance(old, str) else old)
    return body


def _without(rng: random.Random, body: Any) -> Any:
    path = rng.choice(list(_places(body))[1:])

    def drop(items: Any) -> Any:
        items = items.copy()
        del items[path[-1]]
        return items

    return _with(body, path[:-1], drop)


def _with_more(rng: random.Random, body: Any) -> Any:
    objects = [path for path in _places(body) if isinstance(_at(body, path), dict)]
    name = rng.choice(NAMES) if rng.random() < 0.8 else _odd_text(rng)
    value = rng.choice(VALUES)
    return _with(body, rng.choice(objects), lambda items: items | {name: value})


def _wrapped(rng: random.Random, body: Any) -> Any:
    depth = rng.choice([1, 1, 2, 30])

    def wrap(value: Any) -> Any:
        for _ in range(depth):
            value = [value] if rng.random() < 0.5 else {rng.choice(NAMES[:9]): value}
        return value

    return _with(body, rng.choice(list(_places(body))), wrap)


def _repeated(rng: random.Random, body: Any) -> Any:
    lists = [path for path in _places(body) if isinstance(_at(body, path), list)]
    count = rng.choice([2, 20, 200])
    if not lists:
        return _with(body, rng.choice(list(_places(body))), lambda value: [value] * count)
    return _with(body, rng.choice(lists), lambda items: items * count)


def _other_body(rng: random.Random, body: Any) -> Any:
    return json.loads(rng.choice(good_requests()).body)


def _at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value


CHANGES: Mapping[str, Callable[[random.Random, Any], Any]] = {
    "another value": _replaced,
    "other texts": _with_other_texts,
    "a missing part": _without,
    "one key more": _with_more,
    "wrapped": _wrapped,
    "repeated": _repeated,
    "for another path": _other_body,
}


def _written(rng: random.Random, body: Any) -> bytes:
    """JSON with what stands for itself, escaped or not."""
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    for value in VALUES:
        if isinstance(value, str) and value.startswith(RAW):
            for quoted in {json.dumps(value), json.dumps(value, ensure_ascii=False)}:
                text = text.replace(quoted, value.removeprefix(RAW))
    return text.encode("utf-8", "surrogatepass")


# -- bytes -----------------------------------------------------------------------------------------


def _cut(rng: random.Random, body: bytes) -> bytes:
    return body[: rng.randrange(len(body))]


def _flipped(rng: random.Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(rng.randint(1, 5)):
        changed[rng.randrange(len(body))] = rng.randrange(256)
    return bytes(changed)


def _with_bytes_between(rng: random.Random, body: bytes) -> bytes:
    place = rng.randrange(len(body) + 1)
    return body[:place] + rng.choice(ODD_BYTES) + body[place:]


def _with_a_key_twice(rng: random.Random, body: bytes) -> bytes:
    more = rng.choice(
        [b'"inputs": 7', b'"inputs": "a"', b'"model": "feature-extraction"', b'"a": 1']
    )
    return b"{" + b", ".join([more] * rng.choice([1, 2, 500])) + b", " + body.lstrip()[1:]


ODD_BYTES = [
    b"\xff", b"\xfe\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\0", b"\x1b[2J",
    b"\x80" * 50, b",", b"]", b"}", b"/* */", b"\\", b'"',
]  # fmt: skip
DAMAGES: Mapping[str, Callable[[random.Random, bytes], bytes]] = {
    "cut": _cut,
    "flipped bytes": _flipped,
    "bytes between": _with_bytes_between,
    "a key twice": _with_a_key_twice,
    "nothing": lambda rng, body: b"",
    "white space": lambda rng, body: b" \r\n\t" * rng.choice([1, 500]),
    "any bytes": lambda rng, body: rng.randbytes(rng.choice([1, 30, 3_000])),
    "twice": lambda rng, body: body + body,
    "with a BOM": lambda rng, body: b"\xef\xbb\xbf" + body,
    "UTF-16": lambda rng, body: body.decode("utf-8", "replace").encode("utf-16"),
    "UTF-16 without a BOM": lambda rng, body: body.decode("utf-8", "replace").encode("utf-16-le"),
    "UTF-32": lambda rng, body: body.decode("utf-8", "replace").encode("utf-32"),
    "Latin-1": lambda rng, body: body.decode("utf-8", "replace").encode("latin-1", "replace"),
    "gzip": lambda rng, body: gzip.compress(body, mtime=0),
    "deflate": lambda rng, body: zlib.compress(body),
    "a form": lambda rng, body: b"inputs=a&parameters=%7B%7D",
    "XML": lambda rng, body: b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///">]>',
    "a pickle": lambda rng, body: b"\x80\x04cposix\nsystem\n(Vtrue\ntR.",
}
BIG: Mapping[str, Callable[[random.Random], bytes]] = {
    "4 MiB and a byte": lambda rng: b'{"inputs": "' + b"a" * ((4 << 20) - 13) + b'"}',
    "4 MiB": lambda rng: b'{"inputs": "' + b"a " * ((2 << 20) - 7) + b'"}',
    "a million brackets": lambda rng: b'{"inputs": ' + b"[" * 1_000_000,
    "a key of a megabyte": lambda rng: b'{"%s": 1}' % (b"x" * 1_000_000),
    "a model's name of a megabyte": lambda rng: b'{"model": "%s"}' % (b"x" * 1_000_000),
    "300,000 numbers": lambda rng: b'{"inputs": [' + b"1," * 300_000 + b"1]}",
    "any 2 MB": lambda rng: rng.randbytes(2_000_000),
    "a long number": lambda rng: b'{"inputs": ' + b"9" * 1_000_000 + b"}",
}
"""Seldom sent, since they cost time however they are refused."""

# -- what says how to read them --------------------------------------------------------------------

HEADERS: Mapping[str, list[str]] = {
    "Content-Type": [
        "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a",
        "application/json; charset=utf-16", "application/xml", "a" * 3_000, "application/octet-stream",
        "json", "*/*", "ключ",
    ],
    "Content-Encoding": ["gzip", "deflate", "br", "identity, gzip", "x"],
    "Accept": ["text/html", "", "application/json;q=0", "image/*", "a" * 3_000],
    "Accept-Encoding": ["gzip, br;q=1", "*"],
    "Expect": ["100-continue", "200-ok"],
    "X-Request-Timeout-Ms": [
        "0", "-1", "1", "abc", "1e9", "9" * 30, "9" * 5_000, "", "٣", "1.5", "+5", " 7 ", "²", "0x10",
    ],
    "Inference-Header-Content-Length": ["0", "-1", "5", "99999", "9" * 5_000, "²", "", "1e1"],
    "X-Request-ID": ["", "a" * 5_000, "é", "%s%n"],
    "X-Caller": ["a" * 3_000, "é"],
    "Authorization": ["", "Bearer", "Bearer é", f"Bearer {'a' * 3_000}", "Basic Og==", "ключ"],
    "Host": ["", "example.com", "127.0.0.1:1", "[::1]", "localhost.example.com", "é"],
    "traceparent": ["00-0-0-0", "x" * 500, "00-" + "f" * 32 + "-" + "f" * 16 + "-01"],
    "Cookie": ["a=" + "b" * 3_000],
    "X-Forwarded-For": ["' OR 1=1", "::1"],
    "Range": ["bytes=0-0", "bytes=5-1"],
    "Upgrade": ["websocket", "h2c"],
    "TE": ["trailers"],
}  # fmt: skip
METHODS = ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"]
QUERIES = ["?", "?a=b", "?inputs=a&inputs=b", "?%00", "?" + "a" * 3_000, "?é", "#a"]
ENDINGS = ["/", "//", "/..", "/%2e%2e/", "/a", "/%00", "/é", ";a=b", "/" + "a" * 3_000, "%", "/%ff"]


def odd_requests(seed: int, count: int, *, big_every: int = 400) -> Iterator[Sent]:
    """Requests with faults; equal arguments give equal requests."""
    rng, good = random.Random(seed), good_requests()
    for number in range(count):
        base = rng.choice(good)
        if number % big_every == big_every - 1:
            kind = rng.choice(list(BIG))
            yield _sent(base, kind, body=BIG[kind](rng))
            continue
        kind, body = rng.choice(list(CHANGES)), json.loads(base.body)
        fault = rng.random()
        if fault < 0.55:
            value = CHANGES[kind](rng, body)
            yield _sent(base, kind, body=_written(rng, value))
        elif fault < 0.8:
            kind = rng.choice(list(DAMAGES))
            yield _sent(base, kind, body=DAMAGES[kind](rng, base.body))
        elif fault < 0.92:
            name = rng.choice(list(HEADERS))
            kind, headers = f"header {name}", {name: rng.choice(HEADERS[name])}
            body = base.body
            if name == "Content-Encoding" and rng.random() < 0.5:
                body = gzip.compress(body, mtime=0)
            yield _sent(base, kind, body=body, headers=headers)
        elif fault < 0.95:
            yield _sent(base, "method", body=base.body, method=rng.choice(METHODS))
        else:
            ending = rng.choice(QUERIES + ENDINGS)
            yield _sent(base, "path", body=base.body, path=base.path + ending)


def _sent(base: Sent, kind: str, **changes: Any) -> Sent:
    return Sent(**{"surface": base.surface, "path": base.path, "kind": kind} | changes)
