"""The five special tokens, under BERT's names or others."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import tokenizers

from bert_core.errors import FormatError

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# The same five in RoBERTa's files; ALBERT's mix both, and MPNet's vocabulary has both.
OTHER_NAMES = {PAD: "<pad>", UNK: "<unk>", CLS: "<s>", SEP: "</s>", MASK: "<mask>"}


def special_tokens(
    vocabulary: Mapping[str, int],
    stated: Mapping[str, str] = MappingProxyType({}),
    preferred: Collection[str] = (),
) -> dict[str, str]:
    """Return BERT's name → the name in this vocabulary, for the five special tokens.

    The name in the vocabulary is the one in `stated`, or else BERT's or RoBERTa's. If the
    vocabulary has both of these, it is the one in `preferred`, or else BERT's.

    Args:
        stated: BERT's names → names that the tokenizer's files give.
    Raises: FormatError if the vocabulary lacks one of the tokens, or if [CLS] or [SEP] has the same
        name as another of them.
    """
    named: dict[str, str | None] = {}
    for token in SPECIAL_TOKENS:
        names = [name for name in (token, OTHER_NAMES[token]) if name in vocabulary]
        usual = min(names, key=lambda name: name not in preferred, default=None)
        named[token] = stated[token] if stated.get(token) in vocabulary else usual
    missing = [token for token, name in named.items() if name is None]
    if missing:
        raise FormatError(
            f"tokenizer: wanted the special tokens {', '.join(SPECIAL_TOKENS)} (or "
            f"{', '.join(OTHER_NAMES.values())}), {', '.join(missing)} is not in the vocabulary: "
            "train it with `raybert vocab`, or give the folder of an encoder's tokenizer, with "
            "other names in its tokenizer_config.json"
        )
    for around in (CLS, SEP):
        shared = [token for token in named if named[token] == named[around]]
        if len(shared) > 1:
            raise FormatError(
                f"tokenizer: wanted another token for each of {' and '.join(shared)}, got "
                f"{named[around]!r}: correct the names in tokenizer_config.json, or use another "
                "model"
            )
    return {token: name for token, name in named.items() if name is not None}


def flagged(inner: tokenizers.Tokenizer) -> set[str]:
    """Return the tokens that a tokenizer treats as special."""
    names = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
    return names | {getattr(inner.model, "unk_token", None) or ""}


def around(inner: tokenizers.Tokenizer) -> dict[str, str]:
    """Return [CLS] and [SEP] → the tokens that a tokenizer puts before and after a text; empty if
    it does not add exactly two tokens."""
    bare, whole = (inner.encode("", add_special_tokens=special).tokens for special in (False, True))
    return {CLS: whole[0], SEP: whole[-1]} if len(whole) == len(bare) + 2 else {}
