"""Defines limits on requests, and checks them."""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from bert_core.checks import PositiveFloat, PositiveInt, check_fields
from serve.request.errors import TooLargeError

WORDS_OF_TEXT = ("tokens",)
"""Fields of inputs whose lists are the words of a text, which cost no more than the text."""


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
    """Maximum masks, or searches in an index, of a request times `top_k`; more get 413."""
    max_numbers: PositiveInt = 4_194_304
    """Maximum numbers in the vectors of an answer; more get 413. An entry of a sparse vector is two
    numbers."""
    max_answer_bytes: PositiveInt = 64 << 20
    """Maximum size of an answer; a larger one gets 413 in its place."""
    deadline_s: PositiveFloat = 60.0
    """Maximum time of a request; its header `X-Request-Timeout-Ms` may lower it."""
    body_timeout_s: PositiveFloat = 30.0
    """Maximum time for a request's body to arrive; slower ones get 408."""
    max_receiving: PositiveInt = 128
    """Maximum bodies of more than 16 kB that a replica receives at once; beyond them, the one that
    has been on its way for longest gets 408. Below `max_ongoing_requests`, or those who send slowly
    keep others out."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="limits.")


def check_count(inputs: Sized, limits: Limits) -> None:
    """Check the number of inputs. Raises: TooLargeError if there are more than a request may
    have."""
    if len(inputs) > limits.max_inputs:
        raise TooLargeError(
            f"inputs: wanted at most {limits.max_inputs} per request, got {len(inputs)}: send "
            "several requests"
        )


def check_lists(inputs: Sequence[Any], parameters: object | None, limits: Limits) -> None:
    """Check that the lists in inputs and parameters have at most as many entries, all together, as
    a request may have inputs.

    Each candidate label, sentence or choice costs as much as an input.
    Raises: TooLargeError.
    """
    most = limits.max_inputs
    mappings = [row for row in inputs if isinstance(row, Mapping)]
    mappings += [] if parameters is None else [vars(parameters)]
    lists = [
        (name, len(value))
        for mapping in mappings
        for name, value in mapping.items()
        if isinstance(value, list) and name not in WORDS_OF_TEXT
    ]
    if sum(size for _, size in lists) > most:
        name, size = max(lists, key=lambda item: item[1])
        raise TooLargeError(
            f"{name}: wanted at most {most} in all lists of a request, got {size}: send several "
            "requests"
        )


def check_candidates(masks: int, parameters: object, limits: Limits) -> None:
    """Check the number of candidates for the masks of a request, all masks together.

    Each candidate is answered with its whole text.
    Raises: TooLargeError if there are too many.
    """
    candidates = masks * (getattr(parameters, "top_k", None) or 1)
    if candidates > limits.max_candidates:
        raise TooLargeError(
            f"inputs: wanted at most {limits.max_candidates} candidates for the masks of a "
            f"request, got {candidates} for {masks} masks: lower top_k, or send several requests"
        )


def check_tokens(tokens: int, limits: Limits, *, at_least: bool = False) -> None:
    """Check the number of tokens. Raises: TooLargeError if there are more than a request may have.

    Args:
        at_least: whether `tokens` is a lower bound.
    """
    if tokens > limits.max_request_tokens:
        raise TooLargeError(
            f"inputs: wanted at most {limits.max_request_tokens} tokens per request, got "
            f"{'at least ' if at_least else ''}{tokens}: send several requests, or shorter texts"
        )


def check_size(body: bytes, limits: Limits) -> None:
    """Check the size of an answer's body. Raises: TooLargeError."""
    if len(body) > limits.max_answer_bytes:
        raise TooLargeError(
            f"inputs: wanted an answer of at most {limits.max_answer_bytes} bytes, it has "
            f"{len(body)}: send several requests, or lower top_k"
        )


def check_numbers(numbers: int, limits: Limits) -> None:
    """Check how many numbers the vectors of an answer have. Raises: TooLargeError."""
    if numbers > limits.max_numbers:
        raise TooLargeError(
            f"inputs: wanted an answer of at most {limits.max_numbers} numbers, their vectors have "
            f"{numbers}: send several requests, or for sparse vectors set top_k"
        )
