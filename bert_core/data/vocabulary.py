"""Trains a vocabulary, the same bytes in every process: WordPiece, byte-level BPE, Unigram.

`pipelines.vocab` chooses the documents to train on.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from bert_core.checks import TokenizerKind
from bert_core.data.special_tokens import CLS, MASK, OTHER_NAMES, PAD, SEP, SPECIAL_TOKENS, UNK
from bert_core.data.subwords import (
    CONTINUATION,
    SPACE,
    bert_normalizer,
    unigram_normalizer,
)
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import ConfigError, CorpusError

# In the order of the published files: fairseq's, and ALBERT's from SentencePiece.
BPE_SPECIAL = tuple(OTHER_NAMES[one] for one in (CLS, PAD, SEP, UNK, MASK))
UNIGRAM_SPECIAL = (OTHER_NAMES[PAD], OTHER_NAMES[UNK], CLS, SEP, MASK)
LONGEST_PIECE = 16
LEAST_ALPHABET = 1000
"""Minimum number of characters to keep, the most frequent ones; others are unknown."""
COVERAGE_PER_MILLION = 999_500
"""More characters are kept until they make up this share of the text, or fill half the vocabulary.
It is SentencePiece's default; Chinese and Japanese take thousands of characters to reach it."""
ROUNDS = 2


def train_tokenizer(
    kind: TokenizerKind,
    texts: Sequence[str],
    *,
    vocab_size: int,
    lowercase: bool,
    min_frequency: int = 2,
) -> Tokenizer:
    """Train a tokenizer. Its vocabulary is the same in every process, with ids in canonical order.

    Args:
        min_frequency: a pair of pieces seen less often is not merged; Unigram has no such limit.
    Raises: CorpusError if there is no text; ConfigError if `vocab_size` cannot hold the alphabet.
    """
    return _TRAINERS[kind](texts, vocab_size, lowercase, min_frequency)


def _train_wordpiece(
    texts: Sequence[str], vocab_size: int, lowercase: bool, min_frequency: int
) -> Tokenizer:
    vocabulary = train_vocabulary(
        texts, vocab_size=vocab_size, lowercase=lowercase, min_frequency=min_frequency
    )
    return Tokenizer.from_vocabulary(vocabulary, lowercase=lowercase)


def _train_bpe(
    texts: Sequence[str], vocab_size: int, lowercase: bool, min_frequency: int
) -> Tokenizer:
    """Train RoBERTa's byte-level BPE (Radford et al. 2019). Order of ids: special tokens, bytes,
    merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    needed = len(BPE_SPECIAL) + len(alphabet)
    if vocab_size < needed:
        raise ConfigError(
            f"vocab_size: wanted at least {needed} (special tokens and 256 bytes), "
            f"got {vocab_size}: raise vocab_size"
        )
    _check_text(texts)
    base = Tokenizer.from_merges([*BPE_SPECIAL, *alphabet], [], lowercase=lowercase).inner
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = base.pre_tokenizer
    if base.normalizer is not None:
        trained.normalizer = base.normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(BPE_SPECIAL),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    # Two merges may give the same token: it has the position of the first.
    vocabulary = dict.fromkeys([*BPE_SPECIAL, *alphabet, *("".join(pair) for pair in merges)])
    return Tokenizer.from_merges(list(vocabulary), merges, lowercase=lowercase)


def _train_unigram(
    texts: Sequence[str], vocab_size: int, lowercase: bool, min_frequency: int
) -> Tokenizer:
    """Train ALBERT's Unigram (Kudo 2018). Order of ids: special tokens, characters, the rest, each
    by code points.

    The trainer of `tokenizers` gives the same pieces in every process, but the last digits of its
    scores depend on the order in which its threads add. So scores are recomputed from integers:
    from counts of the pieces as parts of words, then twice from counts in the best segmentation
    under the scores so far.
    """
    normalizer = unigram_normalizer(lowercase)
    words: Counter[str] = Counter()
    for text in texts:
        words.update(SPACE + word for word in normalizer.normalize_str(text).split())
    _check_text(words)
    characters: Counter[str] = Counter()
    for word, times in words.items():
        characters.update(dict.fromkeys(word, times))
    alphabet = set(_alphabet(characters, set(), vocab_size))
    trained = tokenizers.Tokenizer(models.Unigram())
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, "never")]
    )
    needed = len(UNIGRAM_SPECIAL) + len(alphabet)
    if vocab_size < needed:
        raise ConfigError(
            f"vocab_size: wanted at least {needed} (special tokens and the characters of this "
            f"corpus), got {vocab_size}: raise vocab_size"
        )
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=list(UNIGRAM_SPECIAL),
        unk_token=UNIGRAM_SPECIAL[1],
        max_piece_length=LONGEST_PIECE,
        show_progress=False,
    )
    # Words are cut at unknown characters. The part after such a character gets no SPACE, since it
    # does not begin a word.
    cuts = str.maketrans(dict.fromkeys(set(characters) - alphabet, " "))
    known = (
        " ".join(
            SPACE + word.removeprefix(SPACE) for word in normalizer.normalize_str(text).split()
        ).translate(cuts)
        for text in texts
    )
    trained.train_from_iterator(known, trainer)
    ordinary = set(trained.get_vocab()) - set(UNIGRAM_SPECIAL)
    assert ordinary, "the trainer keeps at least the alphabet"
    pieces = sorted(ordinary, key=lambda piece: (len(piece) > 1, piece))
    counts = _parts(words, ordinary)
    for _ in range(ROUNDS):
        model = Tokenizer.from_pieces(_scored(pieces, counts), lowercase=lowercase)
        counts = _segments(words, model)
    return Tokenizer.from_pieces(_scored(pieces, counts), lowercase=lowercase)


def _parts(words: Counter[str], pieces: set[str]) -> Counter[str]:
    """Count how often each piece is a part of a word."""
    counts: Counter[str] = Counter()
    for word, times in words.items():
        for start in range(len(word)):
            for end in range(start + 1, min(len(word), start + LONGEST_PIECE) + 1):
                if word[start:end] in pieces:
                    counts[word[start:end]] += times
    return counts


def _segments(words: Counter[str], model: Tokenizer) -> Counter[str]:
    """Count how often each piece is in the model's best segmentation of the words."""
    counts: Counter[str] = Counter()
    distinct = sorted(words)
    for word, ids in zip(
        distinct,
        model.encode_column(pa.array([word[1:] for word in distinct], pa.string())).to_pylist(),
        strict=True,
    ):
        for index in ids:
            counts[model.vocabulary[index]] += words[word]
    return counts


def _scored(pieces: Sequence[str], counts: Counter[str]) -> list[tuple[str, float]]:
    """Return the special tokens with 0, and the pieces with the logarithm of their share of all
    counts. A piece that was never used counts half.

    Logarithms are rounded to six decimals: more do not survive being written to a file and read
    back.
    """
    total = sum(counts[piece] for piece in pieces)
    scored = [(piece, round(math.log(max(counts[piece], 0.5) / total), 6)) for piece in pieces]
    return [*((token, 0.0) for token in UNIGRAM_SPECIAL), *scored]


def _alphabet(counts: Counter[str], continuations: set[str], vocab_size: int) -> list[str]:
    """Return the characters to keep, the most frequent first.

    Args:
        counts: the number of words that contain each character.
        continuations: the characters that take two entries, with and without `##`.
    """
    by_count = sorted(sorted(counts), key=counts.__getitem__, reverse=True)
    kept = by_count[:LEAST_ALPHABET]
    covered, total = sum(counts[character] for character in kept), counts.total()
    places = sum(1 + (character in continuations) for character in kept)
    for character in by_count[LEAST_ALPHABET:]:
        places += 1 + (character in continuations)
        if covered * 1_000_000 >= COVERAGE_PER_MILLION * total or places > vocab_size // 2:
            break
        kept.append(character)
        covered += counts[character]
    return kept


def _check_text(texts: Iterable[str]) -> None:
    if not any(text.strip() for text in texts):
        raise CorpusError(
            "vocabulary: wanted text to count words in, the sample holds none: "
            "check the corpus and its text column"
        )


def train_vocabulary(
    texts: Sequence[str],
    *,
    vocab_size: int,
    lowercase: bool,
    min_frequency: int = 2,
) -> list[str]:
    """Train a WordPiece vocabulary, and return its tokens in canonical order.

    The order is: special tokens, then single characters by code point (each before its `##` form),
    then all other tokens by code points. The same texts give the same list in every process.

    Args:
        texts: the texts in which words are counted; they are read twice.
        vocab_size: maximum number of tokens, special ones included. A small corpus gives fewer.
        min_frequency: a pair of pieces seen less often is not merged.
    Raises: CorpusError if there is no text; ConfigError if `vocab_size` cannot hold the alphabet.
    Source: Schuster and Nakajima 2012, as in `tokenizers`' WordPieceTrainer, which merges by count.
    """
    normalizer = bert_normalizer(lowercase)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    chunks: Counter[str] = Counter()
    for text in texts:
        chunks.update(normalizer.normalize_str(text).split())
    singles: Counter[str] = Counter()
    continuations: set[str] = set()
    for chunk, count in chunks.items():
        for word, _ in pre_tokenizer.pre_tokenize_str(chunk):
            singles.update(dict.fromkeys(word, count))
            continuations.update(word[1:])
    if not singles:
        raise CorpusError(
            "vocabulary: wanted text to count words in, the sample holds none: "
            "check the corpus and its text column"
        )
    alphabet = sorted(_alphabet(singles, continuations, vocab_size))
    pieces = [CONTINUATION + character for character in alphabet if character in continuations]
    needed = len(SPECIAL_TOKENS) + len(alphabet) + len(pieces)
    if vocab_size < needed:
        raise ConfigError(
            f"vocab_size: wanted at least {needed} (special tokens and the characters of this "
            f"corpus), got {vocab_size}: raise vocab_size"
        )
    # NOTE: the trainer numbers `##c` pieces in the order of a randomly seeded hash map and breaks
    # ties between equally frequent pairs by those numbers. Passed as special tokens, they are
    # numbered by us, so the merges are the same in every process too.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[*SPECIAL_TOKENS, *pieces],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
    )
    trained = tokenizers.Tokenizer(models.WordPiece(unk_token=UNK))
    trained.normalizer, trained.pre_tokenizer = normalizer, pre_tokenizer
    trained.train_from_iterator(texts, trainer)
    return canonical_order(trained.get_vocab())


def canonical_order(tokens: Iterable[str]) -> list[str]:
    """Return the tokens in canonical order: special tokens, single characters (plain before `##`),
    the rest; each group by code points."""

    def key(token: str) -> tuple[int, str, bool]:
        surface = token.removeprefix(CONTINUATION) or token
        return (len(surface) > 1, surface, token != surface)

    return [*SPECIAL_TOKENS, *sorted(set(tokens) - set(SPECIAL_TOKENS), key=key)]


_TRAINERS: dict[TokenizerKind, Callable[[Sequence[str], int, bool, int], Tokenizer]] = {
    "wordpiece": _train_wordpiece,
    "bpe": _train_bpe,
    "unigram": _train_unigram,
}
