"""Where reading ended in texts that were cut, as characters of the texts as they were sent.

Ids are counted where texts are cut (`bert_core.data.windows`); their characters are found here, for
the few texts of which somebody wants to know.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import CHARACTERS_PER_ID, Cut, Window, end_of, pieces_of


@dataclass(frozen=True, slots=True)
class Place:
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


def places_of(tokenizer: Tokenizer, windows: Sequence[Window], most: int) -> list[Place]:
    """Where the first texts that were cut were, at most `most` of them, in order.

    A text that several windows have, such as that of a zero-shot classifier, was read as far as in
    the window that has the least of it.
    """
    cuts: dict[tuple[int, str], Cut] = {}
    for window in windows:
        for cut in window.cuts:
            key = window.row, cut.name
            if key in cuts or len(cuts) < most:
                cuts[key] = min(cuts.get(key, cut), cut, key=lambda other: other.ids)
    return [
        Place(row, name, character_of(tokenizer, cut), cut.from_end)
        for (row, name), cut in cuts.items()
    ]


def character_of(tokenizer: Tokenizer, cut: Cut) -> int:
    """The character of a `Place`.

    The text up to it has exactly the ids that were read, unless the last of these ends within a
    character, as some bytes of an emoji do. The text from where the end was read need not have
    them: it may begin within a word.
    """
    if not cut.ids:
        return len(cut.text) - cut.prompt if cut.from_end else 0
    characters = CHARACTERS_PER_ID * (cut.ids + 1)
    while True:
        part = end_of(cut.text, characters, from_end=cut.from_end)
        (pieces,) = pieces_of(tokenizer, [part])
        if len(pieces.ids) > cut.ids or len(part) == len(cut.text):
            break
        characters *= 4
    offsets = pieces.offsets
    if cut.from_end:
        (_, end_before), (start, _) = offsets[-cut.ids - 1], offsets[-cut.ids]
        character = len(cut.text) - len(part) + max(int(start), int(end_before))
    else:
        (_, end), (start_after, _) = offsets[cut.ids - 1], offsets[cut.ids]
        character = min(int(end), int(start_after))
    return max(0, character - cut.prompt)
