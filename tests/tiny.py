"""Models small enough for a unit test: a vocabulary of a few words, random weights, a bundle.

The defaults fit tests to which sizes do not matter; a test names those that matter to it.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from bert_core.bundle.format import About
from bert_core.bundle.writing import save_bundle
from bert_core.data.subwords import CONTINUATION, SPACE
from bert_core.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from bert_core.model.config import EncoderConfig
from bert_core.model.hf import encoder_config_from_huggingface
from bert_core.objectives.base import Objective, ObjectiveModel
from bert_core.tasks.base import Task

WORDS = ("the", "sea", "is", "blue", "tree", "a")
LETTERS = "abcdefgh"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"

# Makes an objective for an encoder: its class, or a task's method.
Build = Callable[[EncoderConfig], Objective]


def pieces(letters: str) -> list[str]:
    """What spells every word of the letters: each where a word begins, and each within one."""
    return [*letters, *(f"{CONTINUATION}{letter}" for letter in letters)]


def tokenizer(words: Iterable[str] = WORDS, *, lowercase: bool = True) -> Tokenizer:
    """A WordPiece tokenizer of the special tokens, ids 0 to 4, and of `words` in their order."""
    return Tokenizer.from_vocabulary([*SPECIAL_TOKENS, *words], lowercase=lowercase)


def xlm_roberta_tokenizer() -> Any:
    """transformers' XLM-RoBERTa tokenizer of `WORDS` and of the letters; `<pad>` is id 1."""
    from transformers import XLMRobertaTokenizer

    special = ("<s>", "<pad>", "</s>", "<unk>")
    pieces = [f"{SPACE}{word}" for word in WORDS] + [SPACE, *ALPHABET]
    scores = [(piece, -2.0 - index / 8) for index, piece in enumerate(pieces)]
    return XLMRobertaTokenizer(vocab=[*((name, 0.0) for name in special), *scores, ("<mask>", 0.0)])


def mpnet_vocabulary() -> list[str]:
    """As MPNet's: RoBERTa's special tokens around all of BERT's vocabulary, special ones too."""
    pieces_ = dict.fromkeys([*WORDS, *pieces(ALPHABET)])
    return ["<s>", "<pad>", "</s>", "<unk>", *SPECIAL_TOKENS, *pieces_, "<mask>"]


def mpnet_tokenizer() -> Any:
    """transformers' MPNet tokenizer of `mpnet_vocabulary`."""
    from transformers import MPNetTokenizer

    return MPNetTokenizer(vocab={token: index for index, token in enumerate(mpnet_vocabulary())})


def entries(vocab_size: int, *, dropout: float = 0.1, **changes: Any) -> dict[str, Any]:
    """A `config.json` of a Bert with two layers of 32, and with `changes`.

    Weights begin ten times as far from zero as in BERT, so that every input gets its own output.
    """
    return {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "initializer_range": 0.2,
    } | changes


def encoder_config(vocab_size: int, *, dropout: float = 0.1, **changes: Any) -> EncoderConfig:
    """The encoder that `entries` describe."""
    return encoder_config_from_huggingface(entries(vocab_size, dropout=dropout, **changes))


def model(
    config: EncoderConfig, *objectives: Build, seed: int = 0, noise: float = 0.0
) -> ObjectiveModel:
    """An encoder with objectives; equal arguments give equal weights.

    Args:
        noise: standard deviation of what is added to every parameter; with it biases are off zero
            and norms off one, or a mix-up of two of them would go unseen.
    """
    torch.manual_seed(seed)
    model = ObjectiveModel(config, [build(config) for build in objectives])
    if noise:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn_like(parameter))
    return model


def bundle(
    folder: Path,
    tokenizer: Tokenizer,
    config: EncoderConfig | None = None,
    *,
    task: Task | None = None,
    objectives: Sequence[Build] | None = None,
    metrics: dict[str, float] | None = None,
    lineage: dict[str, Any] | None = None,
    examples: Sequence[Any] = (),
    seed: int = 0,
) -> Path:
    """Save a model with `objectives`, by default that of the task, and give the folder."""
    config = config or encoder_config(tokenizer.vocab_size)
    if task is not None and objectives is None:
        config, objectives = task.encoder_config(config), [task.build_objective]
    save_bundle(
        folder,
        model(config, *(objectives or ()), seed=seed),
        tokenizer,
        About(task=task, metrics=metrics or {}, lineage=lineage or {}, examples=examples),
    )
    return folder
