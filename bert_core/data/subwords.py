"""The algorithms that split words: BERT's WordPiece, RoBERTa's byte-level BPE, ALBERT's Unigram."""

from collections.abc import Mapping, Sequence
from typing import cast, get_args

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bert_core.checks import TokenizerKind
from bert_core.data.special_tokens import CLS, MASK, OTHER_NAMES, PAD, SEP, UNK, special_tokens
from bert_core.errors import FormatError

CONTINUATION = "##"
# Prefixes of tokens that begin a word: the space of byte-level BPE, and of Unigram.
BYTE_SPACE, SPACE = "Ġ", "▁"
MAX_CHARACTERS_PER_WORD = 100


def kind_of(inner: tokenizers.Tokenizer) -> TokenizerKind:
    """Return the algorithm that splits words. Raises: FormatError if it is not supported."""
    name = type(inner.model).__name__.lower()
    if name not in get_args(TokenizerKind):
        raise FormatError(
            f"tokenizer: wanted a model of {', '.join(get_args(TokenizerKind))}, got {name}: "
            "convert the tokenizer, or train one with `raybert vocab`"
        )
    return cast("TokenizerKind", name)


def vocabulary_of(inner: tokenizers.Tokenizer) -> list[str]:
    """Return the tokens in the order of their ids."""
    ids = inner.get_vocab(with_added_tokens=True)
    return sorted(ids, key=ids.__getitem__)


def wordpiece(
    vocabulary: Sequence[str],
    *,
    lowercase: bool,
    strip_accents: bool | None = None,
    chinese_characters: bool = True,
    special: Mapping[str, str] | None = None,
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Make BERT's WordPiece over `vocabulary`, whose order gives the ids; or MPNet's, with
    RoBERTa's special tokens and pairs, if the vocabulary has RoBERTa's names too.

    Args:
        special: BERT's names of the special tokens → those of this vocabulary, where they differ.
        strip_accents: None strips them if text is lower-cased.
        chinese_characters: whether each is a separate word.
    Returns: the tokenizer, and BERT's names of all special tokens → those of this vocabulary.
    Raises: FormatError if a special token is missing or a token occurs twice.
    """
    ids = {token: index for index, token in enumerate(vocabulary)}
    others = {OTHER_NAMES[token] for token in (PAD, CLS, SEP, MASK)}
    special = special_tokens(ids, special or {}, others if others <= ids.keys() else ())
    if len(ids) < len(vocabulary):
        twice = next(token for index, token in enumerate(vocabulary) if ids[token] != index)
        raise FormatError(
            f"tokenizer: wanted every token of the vocabulary once, {twice!r} occurs twice: "
            "give each a name of its own"
        )
    inner = tokenizers.Tokenizer(
        models.WordPiece(
            ids,
            unk_token=special[UNK],
            continuing_subword_prefix=CONTINUATION,
            max_input_chars_per_word=MAX_CHARACTERS_PER_WORD,
        )
    )
    inner.normalizer = bert_normalizer(lowercase, strip_accents, chinese_characters)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix=CONTINUATION)
    if special[CLS] == OTHER_NAMES[CLS]:
        cls_, sep = ((special[name], ids[special[name]]) for name in (CLS, SEP))
        inner.post_processor = processors.RobertaProcessing(sep, cls_, add_prefix_space=False)
    inner.add_special_tokens(list(special.values()))
    return inner, special


def byte_level_bpe(
    vocabulary: Sequence[str], merges: Sequence[tuple[str, str]], *, lowercase: bool
) -> tokenizers.Tokenizer:
    """Make RoBERTa's byte-level BPE over `vocabulary`, whose order gives the ids."""
    ids = {token: index for index, token in enumerate(vocabulary)}
    special = special_tokens(ids)
    inner = tokenizers.Tokenizer(models.BPE(ids, list(merges), unk_token=special[UNK]))
    if lowercase:
        inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    cls_, sep = ((special[name], ids[special[name]]) for name in (CLS, SEP))
    inner.post_processor = processors.RobertaProcessing(sep, cls_, add_prefix_space=False)
    inner.add_special_tokens(list(special.values()))
    return inner


def unigram(pieces: Sequence[tuple[str, float]], *, lowercase: bool) -> tokenizers.Tokenizer:
    """Make ALBERT's Unigram over pieces with their log probabilities, in id order."""
    ids = {token: index for index, (token, _) in enumerate(pieces)}
    special = special_tokens(ids)
    inner = tokenizers.Tokenizer(models.Unigram(list(pieces), ids[special[UNK]], False))
    inner.normalizer = unigram_normalizer(lowercase)
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, "always")]
    )
    inner.decoder = decoders.Metaspace(SPACE, "always")
    inner.add_special_tokens(list(special.values()))
    return inner


def bert_normalizer(
    lowercase: bool, strip_accents: bool | None = None, chinese_characters: bool = True
) -> normalizers.Normalizer:
    """Make BERT's normalizer, which cleans text and can separate CJK characters, strip accents and
    lower-case.

    Args:
        strip_accents: None strips them if text is lower-cased.
        chinese_characters: whether to put spaces around each.
    """
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=chinese_characters,
        strip_accents=strip_accents,
        lowercase=lowercase,
    )


def unigram_normalizer(lowercase: bool) -> normalizers.Normalizer:
    """Make ALBERT's normalizer: plain quotes, compatibility forms (NFKD), no accents; lower case if
    `lowercase`."""
    steps = [
        normalizers.Replace("``", '"'),
        normalizers.Replace("''", '"'),
        normalizers.NFKD(),
        normalizers.StripAccents(),
    ]
    return normalizers.Sequence([*steps, normalizers.Lowercase()] if lowercase else steps)
