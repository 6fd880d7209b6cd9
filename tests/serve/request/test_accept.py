"""Which media type a header `Accept` asks for."""

import pytest

from serve.request.accept import MOST_RANGES, chosen

JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"
FLOAT32, FLOAT16 = (f"application/octet-stream; dtype=float{bits}" for bits in (32, 16))
OFFERS = (JSON, FLOAT32, FLOAT16, ARROW)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        ("application/json, text/plain, */*", JSON),
        ("application/json; charset=utf-8", JSON),
        ("application/octet-stream", FLOAT32),
        ("application/octet-stream; dtype=float16", FLOAT16),
        ('APPLICATION/Octet-Stream ;DType="Float16"', FLOAT16),
        ("application/octet-stream;dtype=int8", None),
        ("application/octet-stream;dtype=int8, */*;q=0.1", JSON),
        (ARROW, ARROW),
        (f"{ARROW}, */*", ARROW),
        (f"{ARROW};q=0.5, application/octet-stream;dtype=float16;q=0.8, */*;q=0.1", FLOAT16),
        (f"{ARROW};q=0.9, application/json", JSON),
        (f"application/octet-stream, {ARROW}", FLOAT32),
        (f"{ARROW}, application/octet-stream", ARROW),
        ("application/octet-stream;q=0.2, application/octet-stream;dtype=float16", FLOAT16),
        # What means a type most precisely decides about it.
        ("application/json;q=0, */*", FLOAT32),
        ("application/octet-stream;dtype=float32;q=0, application/octet-stream", FLOAT16),
        ("application/json;q=0", None),
        ("*/*;q=0", None),
        ("text/csv", None),
        ("text/*, image/png", None),
        # Java's own client.
        ("text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2", JSON),
        # What cannot be read says nothing.
        ("json", JSON),
        (",;q=1,/", JSON),
        (f"{ARROW};q=high", JSON),
        ("*/json", JSON),
    ],
)
def test_the_clients_preferred_form_is_chosen(accept: str, wanted: str | None) -> None:
    assert chosen(accept, OFFERS) == wanted


def test_an_endless_header_is_not_read() -> None:
    header = ", ".join(["text/csv"] * MOST_RANGES)
    assert chosen(f"{header}, {JSON}", OFFERS) is None
    assert chosen(header.removesuffix("text/csv") + JSON, OFFERS) == JSON
