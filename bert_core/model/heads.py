"""Heads, which turn vectors into scores: one class per head."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bert_core.model.config import EncoderConfig
from bert_core.model.dropout import Dropout
from bert_core.model.layers import ACTIVATIONS, Transform, initialise
from bert_core.model.layout import RowLayout


class MaskedLanguageModelHead(nn.Module):
    """Vocabulary scores for the chosen positions (Devlin et al. 2018, section 3.1).

    The decoder is the word embedding, passed in with each call and stored once; only its bias
    belongs to the head. E is the width of the embedding.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.transform = Transform(config, config.embedding_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        initialise(self, config)

    def forward(
        self, rows: Float[Tensor, "*rows hidden"], word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "*rows vocab"]:
        return functional.linear(self.transform(rows), word_embeddings, self.bias)


class SpanBoundaryHead(MaskedLanguageModelHead):
    """Vocabulary scores for tokens of spans, from the two tokens around the span and the token's
    place in it, with an additional layer (Joshi et al. 2019, section 3.2).

    Every place up to the longest row has its own embedding; the paper does not give their number.
    """

    PLACE_SIZE = 200  # Joshi et al. 2019, section 4.2

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.place_embeddings = nn.Embedding(config.max_length, self.PLACE_SIZE)
        self.inner = Transform(config, config.hidden_size, 2 * config.hidden_size + self.PLACE_SIZE)
        initialise(self, config)

    def inside(
        self,
        left: Float[Tensor, "spans hidden"],
        right: Float[Tensor, "spans hidden"],
        lengths: Int[Tensor, "spans"],
        tokens: int,
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the decoder's input for every token inside the spans.

        Args:
            left: vectors of the tokens before the spans.
            right: vectors of the tokens after the spans.
            lengths: tokens in each span.
            tokens: tokens in all spans.
        """
        spans = torch.arange(len(lengths), device=lengths.device)
        span_of = spans.repeat_interleave(lengths, output_size=tokens)
        starts = lengths.cumsum(0) - lengths
        places = torch.arange(tokens, device=lengths.device) - starts[span_of]
        boundary = left.index_select(0, span_of), right.index_select(0, span_of)
        return self.inner(torch.cat([*boundary, self.place_embeddings(places)], dim=-1))


class LinearHead(nn.Module):
    """Scores a sequence's labels: dropout, then a linear layer on its vector."""

    def __init__(
        self, config: EncoderConfig, num_labels: int, dropout: float | None = None
    ) -> None:
        """Build the layer; `dropout` defaults to `EncoderConfig.classifier_dropout`."""
        super().__init__()
        self.dropout = Dropout(config.classifier_dropout if dropout is None else dropout)
        self.linear = nn.Linear(config.hidden_size, num_labels)
        initialise(self, config)

    def forward(self, vectors: Float[Tensor, "*items hidden"]) -> Float[Tensor, "*items labels"]:
        return self.linear(self.dropout(vectors))


class TokenHead(LinearHead):
    """Scores tokens' labels; their vectors pass through a `Transform` first if `head.transform` is
    set."""

    def __init__(
        self, config: EncoderConfig, num_labels: int, dropout: float | None = None
    ) -> None:
        super().__init__(config, num_labels, dropout)
        self.transform = Transform(config, config.hidden_size) if config.head.transform else None
        if self.transform is not None:
            initialise(self.transform, config)

    def forward(self, vectors: Float[Tensor, "*items hidden"]) -> Float[Tensor, "*items labels"]:
        return super().forward(vectors if self.transform is None else self.transform(vectors))


class PairHead(nn.Module):
    """Scores the labels of two tokens together: a layer with tanh for each, as R-BERT has them (Wu
    and He 2019), then a linear layer on both."""

    def __init__(self, config: EncoderConfig, num_labels: int) -> None:
        super().__init__()
        self.dropout = Dropout(config.classifier_dropout)
        self.first = nn.Linear(config.hidden_size, config.hidden_size)
        self.second = nn.Linear(config.hidden_size, config.hidden_size)
        self.linear = nn.Linear(2 * config.hidden_size, num_labels)
        initialise(self, config)

    def forward(self, vectors: Float[Tensor, "*items hidden"]) -> Float[Tensor, "*items scores"]:
        """Return each token's part of the scores, as the first token and then as the second: those
        of a pair are their sum."""
        vectors = self.dropout(vectors)
        first, second = torch.tanh(self.first(vectors)), torch.tanh(self.second(vectors))
        of_first, of_second = self.linear.weight.chunk(2, dim=1)
        parts = (
            functional.linear(self.dropout(first), of_first),
            functional.linear(self.dropout(second), of_second, self.linear.bias),
        )
        return torch.cat(parts, dim=-1)


class SpanHead(nn.Module):
    """What scores spans by label, for each token as a span's start and as its end: a biaffine form
    of both (Yu et al. 2020, "Named Entity Recognition as Dependency Parsing", section 3, whose size
    is 150 too).

    The score of a span from token i to token j for a label is starts_i · ends_j + left_i + right_j.
    """

    SIZE = 150
    PRIOR = 0.01
    """The probability of every label of every span at first: most spans have none, and their loss
    would hide that of the others (Lin et al. 2017, "Focal loss", section 3.3)."""

    def __init__(self, config: EncoderConfig, num_labels: int) -> None:
        super().__init__()
        self.dropout = Dropout(config.classifier_dropout)
        self.start = nn.Linear(config.hidden_size, self.SIZE)
        self.end = nn.Linear(config.hidden_size, self.SIZE)
        self.pair = nn.Linear(self.SIZE, num_labels * self.SIZE, bias=False)
        self.left = nn.Linear(self.SIZE, num_labels, bias=False)
        self.right = nn.Linear(self.SIZE, num_labels)
        initialise(self, config)
        nn.init.constant_(self.right.bias, math.log(self.PRIOR / (1 - self.PRIOR)))

    def forward(self, vectors: Float[Tensor, "*items hidden"]) -> Float[Tensor, "*items scores"]:
        """Return `starts` (a vector per label), `ends`, `left` and `right`, one behind the
        other."""
        vectors = self.dropout(vectors)
        start, end = functional.gelu(self.start(vectors)), functional.gelu(self.end(vectors))
        parts = self.pair(start) / self.SIZE**0.5, end, self.left(start), self.right(end)
        return torch.cat(parts, dim=-1)


class RecurrentHead(nn.Module):
    """Scores tokens' labels in context: a two-layer BiLSTM, `hidden_size` wide in both directions
    together, then a linear layer (Devlin et al. 2018, section 5.3)."""

    def __init__(self, config: EncoderConfig, size: int, num_labels: int) -> None:
        """Build the layers; `size` is the width of the input vectors."""
        super().__init__()
        self.dropout = Dropout(config.classifier_dropout)
        self.lstm = nn.LSTM(
            size, config.hidden_size // 2, num_layers=2, batch_first=True, bidirectional=True
        )
        self.linear = nn.Linear(config.hidden_size // 2 * 2, num_labels)
        initialise(self.linear, config)

    def forward(
        self, vectors: Float[Tensor, "*tokens size"], rows: RowLayout
    ) -> Float[Tensor, "*tokens labels"]:
        blocks = []
        for block, mask in zip(rows.blocks(self.dropout(vectors)), rows.masks(), strict=True):
            with torch.autocast(block.device.type, enabled=False):  # no bf16 LSTM on a CPU
                blocks.append(self._read(block.to(self.linear.weight.dtype), mask))
        return self.linear(self.dropout(rows.from_blocks(blocks)))

    def _read(
        self, block: Float[Tensor, "rows seq size"], mask: Bool[Tensor, "rows seq"] | None
    ) -> Float[Tensor, "rows seq hidden"]:
        """Run both directions over each row up to its padding."""
        if mask is None:
            return self.lstm(block)[0]
        packed = pack_padded_sequence(
            block, mask.sum(1).cpu(), batch_first=True, enforce_sorted=False
        )
        output, _ = pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=block.shape[1]
        )
        return output


class DetectionHead(nn.Module):
    """Scores whether each token was replaced: a linear layer, an activation and a linear layer to a
    single number (Clark et al. 2020; google-research/electra, `_get_discriminator_output`)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.feed_forward.activation]
        self.linear = nn.Linear(config.hidden_size, 1)
        initialise(self, config)

    def forward(self, vectors: Float[Tensor, "*items hidden"]) -> Float[Tensor, "*items 1"]:
        return self.linear(self.activation(self.dense(vectors)))
