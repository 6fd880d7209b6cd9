"""Limits on an untrusted `tokenizer.json`, checked before it is used: on the number of its added
tokens, and on settings with which a short text could take unbounded memory or time.

Published tokenizers stay well within these limits.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from bert_core.errors import FormatError
from bert_core.typed import as_type, parse_json

MOST_ADDED = 100_000
MOST_STEPS = 100
"""Steps before, of and after the split of a text, with the pieces of templates."""
MOST_GROWTH = 64
"""Times by which replacements may make a text longer, all of them together."""
MOST_WORD = 1000
"""Characters of a word of WordPiece, whose cost grows with their square; BERT's has 100."""
MOST_PATTERN = 4000
_ENDLESS = re.compile(r"[*+]|\{\d*,\}|\{\d*,?\d{3,}\}")
_MORE = list[dict[str, Any]] | None


def check_tokenizer(data: bytes, where: str) -> None:
    """Check that a tokenizer.json keeps within these limits.

    Args:
        where: names the file in messages.
    Raises: FormatError if it exceeds one, or is not a JSON object.
    """
    contents: dict[str, Any] = as_type(dict[str, Any], parse_json(data, where), where)
    added = as_type(_MORE, contents.get("added_tokens"), where, key="added_tokens") or []
    _check(
        len(added) <= MOST_ADDED, where, f"at most {MOST_ADDED:,} added tokens", f"{len(added):,}"
    )
    model = as_type(dict[str, Any] | None, contents.get("model"), where, key="model") or {}
    longest = model.get("max_input_chars_per_word")
    longest = as_type(int | None, longest, where, key="model.max_input_chars_per_word") or 0
    wanted = f"max_input_chars_per_word of at most {MOST_WORD:,}"
    _check(longest <= MOST_WORD, where, wanted, f"{longest:,}")
    parts = ("normalizer", "pre_tokenizer", "post_processor")
    steps = [step for part in parts for step in _steps(contents.get(part))]
    _check(len(steps) <= MOST_STEPS, where, f"at most {MOST_STEPS} steps", f"{len(steps):,}")
    growth = 1.0
    for step in steps:
        pattern = step.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
        if isinstance(regex, str):
            _check_pattern(regex, where)
        content = step.get("content", step.get("prepend"))
        if isinstance(content, str):
            literal = pattern.get("String") if isinstance(pattern, Mapping) else None
            shortest = max(1, len(literal)) if isinstance(literal, str) else 1
            growth *= max(1.0, len(content) / shortest)
    wanted = f"replacements that make a text at most {MOST_GROWTH} times as long"
    _check(growth <= MOST_GROWTH, where, wanted, f"{growth:,.0f} times")


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objects in a part of a tokenizer, at any depth."""
    if isinstance(part, Mapping):
        yield part
    for below in part.values() if isinstance(part, Mapping) else part or ():
        if isinstance(below, Mapping | list):
            yield from _steps(below)


def _check_pattern(pattern: str, where: str) -> None:
    """Refuse a pattern whose matching can take time exponential in the length of the text: one that
    repeats a group which itself contains a choice or a repetition."""
    _check(
        len(pattern) <= MOST_PATTERN, where, f"patterns of at most {MOST_PATTERN:,}", "a longer one"
    )
    # For each open group, whether it contains a choice or a repetition; `after` says the same of
    # the group that was just closed.
    groups, after, at = [False], False, 0
    while at < len(pattern):
        character, step = pattern[at], 1
        repeated = _ENDLESS.match(pattern, at)
        if character == "\\":
            after, step = False, 2
        elif character == "[":
            after, step = False, _class_end(pattern, at) - at
        elif character == "(":
            groups.append(False)
            after = False
        elif character == ")" and len(groups) > 1:
            after = groups.pop()
            groups[-1] |= after
        elif repeated:
            _check(
                not after, where, "patterns that repeat no choice and no repetition", repr(pattern)
            )
            groups[-1], after, step = True, False, len(repeated.group())
        else:
            groups[-1] |= character == "|"
            after = False
        at += step


def _class_end(pattern: str, start: int) -> int:
    """Return the position after the character class that begins at `start`; classes may nest."""
    depth, at = 0, start
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        else:
            depth += (pattern[at] == "[") - (pattern[at] == "]")
            if not depth:
                return at + 1
        at += 1
    return len(pattern)


def _check(fits: bool, where: str, wanted: str, got: str) -> None:
    if not fits:
        raise FormatError(
            f"{where}: wanted {wanted}, got {got}: use the tokenizer of another model, or describe "
            "this one without that"
        )
