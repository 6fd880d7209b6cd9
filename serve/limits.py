"""How much a client may ask for."""

from dataclasses import dataclass

from bert_core.checks import PositiveFloat, PositiveInt, check_fields


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of each request and of the queue; what exceeds them is refused at once."""

    max_body_bytes: PositiveInt = 4 << 20
    """Maximum size of a request's body; larger ones get 413."""
    max_inputs: PositiveInt = 2048
    """Maximum number of inputs per request; more get 413."""
    max_request_tokens: PositiveInt = 262_144
    """Maximum tokens of all inputs of a request, padding included; more get 413."""
    max_queue_tokens: PositiveInt = 262_144
    """Maximum tokens waiting per replica; requests beyond them get 429 and `Retry-After`."""
    max_top_k: PositiveInt = 100
    """Maximum `top_k` of a request."""
    max_candidates: PositiveInt = 5000
    """Maximum masks of a request times `top_k`; more get 413."""
    max_numbers: PositiveInt = 4_194_304
    """Maximum numbers in the vectors of an answer; more get 413. An entry of a sparse vector is two
    numbers."""
    deadline_s: PositiveFloat = 60.0
    """How long a request may take, unless its header `X-Request-Timeout-Ms` says less."""
    body_timeout_s: PositiveFloat = 30.0
    """How long a request's body may take to arrive; slower ones get 408."""
    max_receiving: PositiveInt = 128
    """Maximum bodies of more than 16 kB that a replica receives at once; beyond them, the one that
    has been on its way for longest gets 408. Below `max_ongoing_requests`, or those who send slowly
    keep others out."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="limits.")
