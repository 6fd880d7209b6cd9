"""Where truncated texts were cut, as character positions in the original texts.

Texts are cut by counts of ids (`bert_core.data.windows`); this module finds the characters, for the
few texts whose cuts are reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Encoding, normalizers

from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import CHARACTERS_PER_ID, Cut, Window, end_of, ids_of

NEARBY = 8
"""How many characters an offset may be off."""


@dataclass(frozen=True, slots=True)
class CutPlace:
    """Where a text was cut.

    As text, `3@512` if the only text of row 3 was read up to character 512, `3.text_pair@512` if it
    is one of several, `3@512-` if it was read from there to its end.
    """

    row: int
    name: str
    """Which text of the row it is; empty if it is the only one."""
    character: int
    """The first character, from 0, that was not read, or not wholly; with `from_end` the first that
    was read wholly."""
    from_end: bool = False

    def __str__(self) -> str:
        where = f"{self.row}.{self.name}" if self.name else str(self.row)
        return f"{where}@{self.character}{'-' if self.from_end else ''}"


def places_of(tokenizer: Tokenizer, windows: Sequence[Window], most: int) -> list[CutPlace]:
    """Return where the first texts that were cut were cut, at most `most` of them, in order.

    If several windows hold the same text, as in zero-shot classification, the cut of the window
    that holds the least of it counts.
    """
    cuts: dict[tuple[int, str], Cut] = {}
    for window in windows:
        for cut in window.cuts:
            key = window.row, cut.name
            if key in cuts or len(cuts) < most:
                cuts[key] = min(cuts.get(key, cut), cut, key=lambda other: other.ids)
    characters = characters_of(tokenizer, list(cuts.values()))
    return [
        CutPlace(row, name, character, cut.from_end)
        for ((row, name), cut), character in zip(cuts.items(), characters, strict=True)
    ]


def characters_of(tokenizer: Tokenizer, cuts: Sequence[Cut]) -> list[int]:
    """Return the `character` of each cut's `CutPlace`.

    The text up to that character has exactly the ids that were read, unless the last of these ends
    within a character, as some bytes of an emoji do. If the end of the text was read, the text from
    that character on may have other ids, since it may begin within a word.
    """
    characters = [len(cut.text) if cut.from_end else 0 for cut in cuts]  # right if nothing was read
    remaining = [at for at, cut in enumerate(cuts) if cut.ids]
    per_id = CHARACTERS_PER_ID
    while remaining:
        parts = [
            end_of(cut.text, per_id * (cut.ids + 1), from_end=cut.from_end)
            for cut in (cuts[at] for at in remaining)
        ]
        too_short = []
        encodings = tokenizer.inner.encode_batch(parts, add_special_tokens=False)
        for at, part, encoding in zip(remaining, parts, encodings, strict=True):
            cut = cuts[at]
            if len(encoding) > cut.ids or len(part) == len(cut.text):
                characters[at] = _character(tokenizer, cut, part, encoding)
            else:
                too_short.append(at)
        remaining, per_id = too_short, 4 * per_id
    return [max(0, character - cut.prompt) for character, cut in zip(characters, cuts, strict=True)]


def _character(tokenizer: Tokenizer, cut: Cut, part: str, encoding: Encoding) -> int:
    """Return the character of a cut.

    Args:
        part: the beginning (or end) of the cut's text that was read, with at least one token more.
        encoding: that of `part`.
    """
    at = len(encoding) - cut.ids if cut.from_end else cut.ids
    # NOTE: `encoding.offsets` would make a list of all of them.
    before, after = encoding.token_to_chars(at - 1), encoding.token_to_chars(at)
    assert before is not None  # both are tokens of the text
    assert after is not None
    (_, end_before), (start_after, _) = before, after
    character = (max if cut.from_end else min)(end_before, start_after)
    # NOTE: with other normalizers, offsets are a few characters off after characters that are
    # composed (NFC), replaced by several or removed (SentencePiece's map).
    if not isinstance(tokenizer.inner.normalizer, normalizers.BertNormalizer):
        reach = 1 if start_after < end_before else NEARBY
        exact = _exact(tokenizer, part, character, encoding.ids[:at], reach)
        if exact is not None:
            character = exact
        elif tokenizer.kind == "unigram" and not cut.from_end:
            character = _some_of(tokenizer, part, character, encoding.ids[:at])
    return character + (len(cut.text) - len(part) if cut.from_end else 0)


def _exact(
    tokenizer: Tokenizer, text: str, character: int, ids: Sequence[int], reach: int
) -> int | None:
    """Return the nearest position, at most `reach` characters away, before which the text has
    exactly these ids; None if there is none, as when an id ends within a character."""
    near = range(max(0, character - reach), min(len(text), character + reach) + 1)
    for end in sorted(near, key=lambda end: abs(end - character)):
        if _before(tokenizer, text, end) == ids:
            return end
    return None


def _some_of(tokenizer: Tokenizer, text: str, character: int, ids: Sequence[int]) -> int:
    """Return the last position, at most `NEARBY` characters back, before which the text has only
    ids that `ids` begin with; `character` if there is none."""
    for end in range(character, max(-1, character - NEARBY), -1):
        some = _before(tokenizer, text, end)
        if some == ids[: len(some)]:
            return end
    return character


def _before(tokenizer: Tokenizer, text: str, end: int) -> list[int]:
    [ids] = ids_of(tokenizer, [text[:end]])
    return list(map(int, ids))
