"""Adds tokens to a bundle's vocabulary, for text whose words it cuts into many pieces."""

import json
from collections.abc import Sequence
from typing import Any

import tokenizers
import torch

from bert_core.bundle.format import Bundle
from bert_core.bundle.weights import build_model
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import ConfigError
from bert_core.objectives.base import ObjectiveModel
from bert_core.objectives.mlm import MaskedLanguageModeling


def with_new_tokens(tokenizer: Tokenizer, tokens: Sequence[str]) -> Tokenizer:
    """Return the tokenizer with more tokens, whose ids follow the others.

    WordPiece gets entries of its vocabulary, so that a word that begins with one is cut there.
    Other kinds get added tokens, which match whole words only.

    Raises: ConfigError for a token that it has, that is given twice, or that is no single word.
    """
    as_read = [_as_read(tokenizer, token) for token in tokens]
    for token, word in zip(tokens, as_read, strict=True):
        if len(tokenizer.ids([token])[0]) == 1 and word in tokenizer.vocabulary:
            raise ConfigError(
                f"add_tokens: wanted tokens that the vocabulary lacks, it has {word!r}: leave it "
                "out"
            )
        if as_read.count(word) > 1:
            raise ConfigError(f"add_tokens: wanted each token once, got {word!r} twice")
    if tokenizer.kind == "wordpiece":
        contents: dict[str, Any] = json.loads(tokenizer.inner.to_str())
        first = tokenizer.vocab_size
        contents["model"]["vocab"] |= {word: first + n for n, word in enumerate(as_read)}
        inner = tokenizers.Tokenizer.from_str(json.dumps(contents))
    else:
        inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
        inner.add_tokens(
            [tokenizers.AddedToken(word, normalized=True, single_word=True) for word in as_read]
        )
    wider = Tokenizer(inner, tokenizer._special)
    wider.keeps_end, wider.longest = tokenizer.keeps_end, tokenizer.longest
    return wider


def _as_read(tokenizer: Tokenizer, token: str) -> str:
    """Return a token as texts are before they are cut into pieces: lower-cased, say."""
    inner = tokenizer.inner
    word = inner.normalizer.normalize_str(token) if inner.normalizer else token
    word = word.replace("▁", " ").strip() if tokenizer.kind == "unigram" else word.strip()
    splits = inner.pre_tokenizer
    cut = splits.pre_tokenize_str(word) if splits else [word]
    if not word or len(word.split()) > 1 or len(cut) != 1:
        raise ConfigError(
            f"add_tokens: wanted single words, without spaces or signs at which this tokenizer "
            f"cuts, got {token!r}: give its parts, or leave it out"
        )
    return word


def widened(bundle: Bundle, tokenizer: Tokenizer) -> ObjectiveModel:
    """Return the bundle's encoder and masked-word head for a tokenizer with more tokens.

    The row of a new token, and its bias, is the mean of those of the pieces that the bundle's
    tokenizer cuts it into (Hewitt 2021).
    """
    config = bundle.encoder_config
    old = build_model(bundle, [MaskedLanguageModeling(config)])
    wider = config.adapted(vocab_size=max(config.vocab_size, tokenizer.vocab_size))
    model = ObjectiveModel(wider, [MaskedLanguageModeling(wider)])
    new = range(bundle.tokenizer.vocab_size, tokenizer.vocab_size)
    pieces = bundle.tokenizer.ids([tokenizer.vocabulary[index] for index in new])
    state = old.state_dict()
    for name, wanted in model.state_dict().items():
        tensor = state[name]
        if len(tensor.shape) and tensor.shape[0] == config.vocab_size:
            rows = torch.zeros_like(wanted)
            rows[: len(tensor)] = tensor
            for index, ids in zip(new, pieces, strict=True):
                rows[index] = tensor[torch.as_tensor(ids.astype("int64"))].mean(0)
            state[name] = rows
    model.load_state_dict(state)
    return model
