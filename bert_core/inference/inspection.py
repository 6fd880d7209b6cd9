"""Shows the inside of a model: how tokens attend to each other, and how a word's vector depends on
its sentence.

Everything is read from one forward pass of a single row. What heads answer is left to `predictor`,
how it is displayed to the caller.
"""

import re
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float

from bert_core.batches import pack
from bert_core.data.subwords import BYTE_SPACE, SPACE
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Ids, Pieces, ids_of, pieces_of, with_special_tokens
from bert_core.errors import InputError
from bert_core.metrics.vector_forms import unit
from bert_core.model.encoder import Encoded
from bert_core.objectives.base import ObjectiveModel


@dataclass(frozen=True)
class Attention:
    """How the tokens of a text, or of a pair of texts, attend to each other."""

    tokens: list[str]
    """S tokens, special ones included."""
    special: Bool[np.ndarray, "seq"]
    """Which of them are special."""
    second_start: int
    """Where the second text begins; S if there is none."""
    weights: Float[np.ndarray, "layers heads seq seq"]
    """The share of a token's attention that goes to each token: rows sum to 1."""

    def habits(self) -> dict[str, Float[np.ndarray, "layers heads"]]:
        """Return where each head's attention goes, as shares averaged over tokens.

        Source: Clark et al. 2019, sections 3.1 and 3.2, who find heads that do little else.
        """
        before, after = np.arange(len(self.tokens) - 1), np.arange(1, len(self.tokens))
        return {
            "the token itself": self.weights.diagonal(axis1=-2, axis2=-1).mean(-1),
            "the token before": self.weights[..., after, before].mean(-1),
            "the token after": self.weights[..., before, after].mean(-1),
            "special tokens": self.weights[..., self.special].sum(-1).mean(-1),
        }


@dataclass(frozen=True)
class Use:
    """An occurrence of a word in a sentence."""

    sentence: str
    start: int
    """Its first character."""
    end: int
    """The character after its last."""
    pieces: list[str]
    """Its tokens."""


@dataclass(frozen=True)
class WordUses:
    """All occurrences of a word, and its vectors there."""

    uses: list[Use]
    vectors: Float[np.ndarray, "depths uses hidden"]
    """The mean over the word's pieces: before the first layer, then after each layer."""


def attention(
    model: ObjectiveModel, tokenizer: Tokenizer, text: str, text_pair: str | None = None
) -> Attention:
    """Return how every layer and head of a model spreads attention over a text, or a pair of texts.

    Args:
        model: in evaluation mode; otherwise dropout is applied.
    Raises: InputError if the text is longer than the model's positions.
    """
    first, second = ids_of(tokenizer, [text, text_pair or ""])
    row = with_special_tokens(tokenizer, first, None if text_pair is None else second)
    encoded = _encoded(model, row.ids, row.segment_b_start, "text")
    weights = torch.cat([block.softmax(-1) for layer in encoded.scores for block in layer])
    special = np.isin(row.ids, [tokenizer.cls_id, tokenizer.sep_id])
    shown = _shown(tokenizer, row.ids)
    return Attention(shown, special, row.second_start, weights.float().cpu().numpy())


def word_uses(
    model: ObjectiveModel, tokenizer: Tokenizer, word: str, sentences: list[str]
) -> WordUses:
    """Return the vectors of a word in each sentence, one for every occurrence.

    Only whole words count: as the tokenizer splits the sentence, or by the characters around them.
    Case is ignored.

    Args:
        model: in evaluation mode; otherwise dropout is applied.
    Raises: InputError if a sentence lacks the word or is longer than the model's positions.
    """
    if not word.strip():
        raise InputError(f"word: wanted a word, got {word!r}: give one that the sentences contain")
    uses, vectors = [], []
    for number, sentence in enumerate(sentences):
        where = f"word_sentences[{number}]"
        (pieces,) = pieces_of(tokenizer, [sentence])
        places = _places(word.strip(), sentence, pieces)
        if not places:
            raise InputError(
                f"{where}: wanted a sentence with the word {word!r}, got {sentence[:80]!r}: "
                "correct one of them, or remove the sentence"
            )
        row = with_special_tokens(tokenizer, pieces.ids)
        encoded = _encoded(model, row.ids, row.segment_b_start, where)
        layers = torch.stack(encoded.layers).float().cpu().numpy()  # (depths, S, hidden)
        for start, end, positions in places:
            uses.append(Use(sentence, start, end, _shown(tokenizer, pieces.ids[positions])))
            vectors.append(layers[:, 1 + positions].mean(1))  # 1 for [CLS], which comes first
    return WordUses(uses, np.stack(vectors, axis=1))


def cosines(vectors: Float[np.ndarray, "*more rows size"]) -> Float[np.ndarray, "*more rows rows"]:
    """Return the cosine of every vector with every other."""
    scaled = unit(vectors)
    return scaled @ scaled.swapaxes(-1, -2)


def _places(word: str, sentence: str, pieces: Pieces) -> list[tuple[int, int, np.ndarray]]:
    """Return, for each occurrence of a word, its first character, the character after its last, and
    its pieces."""
    first, end = pieces.offsets.T
    places = []
    for match in re.finditer(re.escape(word), sentence, re.IGNORECASE):
        positions = np.flatnonzero((first < match.end()) & (end > match.start()))
        if not len(positions):
            continue
        around = sentence[: match.start()][-1:] + sentence[match.end() :][:1]
        covered = sentence[first[positions[0]] : end[positions[-1]]].strip()
        shared = np.isin(pieces.words, pieces.words[positions]).sum() > len(positions)
        # NOTE: in scripts without spaces a word has letters around it; SentencePiece may put a
        # full stop into its last token.
        if not re.search(r"\w", around) or (covered == match.group() and not shared):
            places.append((*match.span(), positions))
    return places


def _encoded(model: ObjectiveModel, ids: Ids, segment_b_start: int, where: str) -> Encoded:
    """Run a single row through the encoder, without padding, keeping all layers and attention
    scores."""
    most = model.encoder.config.max_length
    if len(ids) > most:
        raise InputError(
            f"{where}: wanted at most {most} tokens including special ones, the model's maximum, "
            f"got {len(ids)}: shorten it"
        )
    device = next(model.parameters()).device
    packed = pack([ids], np.array([segment_b_start]))
    batch = {name: tensor.to(device) for name, tensor in packed.items()}
    with torch.inference_mode():
        return model.encode(batch, all_layers=True, all_scores=True)


def _shown(tokenizer: Tokenizer, ids: Ids) -> list[str]:
    """Return tokens as a reader expects them: those of byte-level BPE decoded to characters."""
    tokens = [tokenizer.vocabulary[index] for index in ids.tolist()]
    if tokenizer.kind != "bpe":
        return tokens
    decoded = (tokenizer.inner.decode([index], skip_special_tokens=False) for index in ids.tolist())
    return [
        f"{SPACE}{text.strip()}" if token.startswith(BYTE_SPACE) else text
        for token, text in zip(tokens, decoded, strict=True)
    ]
