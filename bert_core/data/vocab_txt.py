"""BERT's `vocab.txt`: one token per line, whose number is its id."""

import string
from collections.abc import Sequence

from bert_core.data.special_tokens import OTHER_NAMES, SPECIAL_TOKENS
from bert_core.data.subwords import CONTINUATION
from bert_core.errors import FormatError

# BERT's tokenizer makes each of them a word, so an entry with one beside other characters never
# matches.
PUNCTUATION = frozenset(string.punctuation)
MOST_UNREACHABLE = 0.25
"""Largest share of such entries in a `vocab.txt` of BERT's: published ones have some."""


def tokens_in(data: bytes, path: str) -> list[str]:
    """Return the tokens in the order of their ids; repeated tokens are renamed.

    Raises: FormatError if the file is not UTF-8, or is the vocabulary of another tokenizer.
    """
    tokens = _each_once(_lines(data, path))
    _check_reachable(path, tokens)
    return tokens


def _lines(data: bytes, path: str) -> list[str]:
    # NOTE: str.splitlines would split at U+2028 and other characters that may be tokens.
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path}: wanted UTF-8 with one token per line, byte {error.start:,} is not: copy it "
            "again"
        ) from error
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def _each_once(tokens: Sequence[str]) -> list[str]:
    """Rename repeated tokens, so that no id moves. As in transformers, the last line of a token
    counts; its earlier lines get names that no text can contain."""
    last = {token: index for index, token in enumerate(tokens)}
    return [
        token if last[token] == index else f"{token} (line {index + 1})"
        for index, token in enumerate(tokens)
    ]


def _check_reachable(path: str, tokens: Sequence[str]) -> None:
    """Check that BERT's tokenizer can produce these entries: a folder with only a `vocab.txt` is
    read with that tokenizer.

    Raises: FormatError if too many entries have a punctuation mark beside other characters.
    """
    bodies = {token: token.removeprefix(CONTINUATION) for token in tokens}
    split = [
        token
        for token, body in bodies.items()
        if len(body) > 1
        and not PUNCTUATION.isdisjoint(body)
        and token not in (*SPECIAL_TOKENS, *OTHER_NAMES.values())
        and not body.startswith("[unused")
    ]
    if len(split) > MOST_UNREACHABLE * len(tokens):
        raise FormatError(
            f"{path}: wanted entries of BERT's WordPiece, with each punctuation mark alone, got "
            f"{len(split):,} of {len(tokens):,} with one beside other characters, such as "
            f"{split[0]!r}: another tokenizer reads them; describe it in a tokenizer.json beside "
            "the file (docs/guides/hub.md)"
        )
