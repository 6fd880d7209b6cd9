"""Compressed bodies (RFC 9110, sections 8.4.1 and 15.5.16) on every surface."""

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from serve.request.errors import NotJSONError
from serve.request.inflating import coding_of
from serve.request.limits import Limits
from tests.serve import live
from tests.serve.ways import CLASSES, RANKING, VECTORS, WAYS

COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda body: gzip.compress(body, mtime=0),
    "deflate": zlib.compress,
}


def post(url: str, content: bytes, coding: str) -> httpx.Response:
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    return httpx.post(url, content=content, headers=headers, timeout=30)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("coding", COMPRESSED)
def test_a_compressed_body_is_answered_as_the_same_body_is(
    front: str, way: str, coding: str
) -> None:
    url, body = f"{front}{WAYS[way].path}", WAYS[way].with_texts(b'"a fox"')
    plain, came = post(url, body, "identity"), post(url, COMPRESSED[coding](body), coding)
    assert came.status_code == plain.status_code == 200, came.text
    assert came.headers["X-Tokens"] == plain.headers["X-Tokens"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "x"])
def test_an_unsupported_coding_is_refused_with_the_supported_ones(
    front: str, way: str, coding: str
) -> None:
    response = post(f"{front}{WAYS[way].path}", WAYS[way].with_texts(b'"a"'), coding)
    assert response.status_code == 415
    assert response.headers["Accept-Encoding"] == "gzip, deflate"
    told = WAYS[way].message(response.json())
    assert told.startswith(f"Content-Encoding: wanted one of gzip, deflate, got {coding!r}: ")


@pytest.mark.parametrize("coding", COMPRESSED)
def test_a_damaged_body_is_reported_with_what_its_header_says(front: str, coding: str) -> None:
    url, whole = f"{front}/embed", COMPRESSED[coding](b'{"inputs": "a fox"}')
    for body in (b'{"inputs": "a"}', whole[:-1], b"", whole + b"more"):
        response = post(url, body, coding)
        assert response.status_code == 400
        assert response.json()["error"].startswith(
            f"the body: wanted {coding}, as Content-Encoding says, got other bytes ("
        )


def test_several_models_answer_a_compressed_body(front: str) -> None:
    body = b'{"models": ["%s", "%s"], "inputs": "a fox"}' % (CLASSES.encode(), VECTORS.encode())
    response = post(f"{front}/v1/predict", gzip.compress(body), "gzip")
    assert response.json().keys() == {CLASSES, VECTORS}


@pytest.mark.parametrize("at_root", [True, False])
def test_the_limit_of_a_body_is_that_of_what_comes_out(
    bundles: dict[str, Path], *, at_root: bool
) -> None:
    models = {name: bundles[name] for name in (CLASSES, VECTORS, RANKING)}
    with live.fronted(models) as url:
        path = "/predict" if at_root else f"/v1/models/{CLASSES}/predict"
        for coding, compressed in COMPRESSED.items():
            bomb = compressed(b" " * (1 << 28))
            assert len(bomb) < 1 << 19
            response = post(f"{url}{path}", bomb, coding)
            assert response.status_code == 413
            assert "the body: wanted at most 4194304 bytes, got 4194305" in response.text


def test_a_body_in_pieces_of_any_size_is_the_same() -> None:
    body = b"a fox and a socket " * 100
    two = gzip.compress(body[:700]) + gzip.compress(body[700:])  # members (RFC 1952, 2.2)
    for name, compressed in (("gzip", two), ("deflate", zlib.compress(body))):
        for size in (1, 7, len(compressed)):
            coding, came = coding_of(name), b""
            for place in range(0, len(compressed), size):
                came += coding.feed(compressed[place : place + size], 10_000)
            coding.end()
            assert came == body


def test_members_without_end_are_refused() -> None:
    coding = coding_of("gzip")
    with pytest.raises(NotJSONError, match="bytes after its end"):
        coding.feed(gzip.compress(b"") * 100_000, Limits().max_body_bytes)
