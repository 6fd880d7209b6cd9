"""Chooses a media type by the header `Accept` (RFC 9110, section 12.5.1)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

ANYTHING = "*/*"
MOST_RANGES = 32
"""Entries of a header that are read."""
_QUALITY = re.compile(r"0?\.\d+|0\.?|1(\.0*)?")
_KIND = re.compile(r"[\w!#$&^.+-]+/([\w!#$&^.+-]+|\*)|\*/\*")

Precision = tuple[int, int]
"""How precisely an entry names a type: parts of its name, and parameters."""


@dataclass(frozen=True)
class _Type:
    """A media type; as an entry of the header, it may have `*` for parts that are left open."""

    kind: str
    parameters: dict[str, str]
    quality: float = 1.0

    def fits(self, offer: "_Type") -> Precision | None:
        """Return how precisely this entry names what is offered; None if it names another type."""
        (group, name), (offered_group, offered_name) = (
            each.kind.split("/") for each in (self, offer)
        )
        if group not in ("*", offered_group) or name not in ("*", offered_name):
            return None
        # The charset in `application/json; charset=utf-8` does not matter for what is offered.
        asked = self.parameters.keys() & offer.parameters.keys()
        if any(self.parameters[key] != offer.parameters[key] for key in asked):
            return None
        return (group != "*") + (name != "*"), len(asked)


def chosen(accept: str, offers: Sequence[str]) -> str | None:
    """Return the offer that a client prefers; None if it accepts none of them.

    If it prefers several equally, the offer that the header names most precisely is taken, then the
    offer that the header names first, then the first of the offers. If the header is empty or
    cannot be read, the first offer is taken.
    """
    if accept in ("", ANYTHING, offers[0]):
        return offers[0]
    entries = accept.split(",", MOST_RANGES)[:MOST_RANGES]
    ranges = [each for entry in entries if (each := _parsed(entry)) is not None]
    if not ranges:
        return offers[0]
    liked = []
    for place, offer in enumerate(offers):
        kind = _parsed(offer)
        assert kind is not None
        fits = [
            (precision, -number, each.quality)
            for number, each in enumerate(ranges)
            if (precision := each.fits(kind)) is not None
        ]
        if not fits:
            continue
        precision, number, quality = max(fits)
        if quality > 0:
            liked.append((quality, precision, number, -place, offer))
    return max(liked)[-1] if liked else None


def _parsed(entry: str) -> _Type | None:
    """Return a media type with its parameters; None if the text is not a media type."""
    kind, *parts = (part.strip().lower() for part in entry.split(";"))
    kind = ANYTHING if kind == "*" else kind  # Java's built-in client sends `*` for `*/*`
    if not _KIND.fullmatch(kind):
        return None
    parameters = {}
    for part in parts:
        name, _, value = part.partition("=")
        parameters[name.strip()] = value.strip().strip('"')
    quality = parameters.pop("q", "1")
    return _Type(kind, parameters, float(quality)) if _QUALITY.fullmatch(quality) else None
