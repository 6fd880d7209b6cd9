"""`python -m site_builder.attention MODEL`: the pictures of attention in docs/images/.

MODEL is the folder of a BERT with 6 layers of 12 heads: all-MiniLM-L6-v2, which is one of those of
`make checkpoints` (`benchmarks/checkpoints.py`). What layouts and windows let tokens read is
measured on encoders without training, by gradients.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from jaxtyping import Bool
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure

from bert_core.batches import pack, pad
from bert_core.inference.inspection import Attention, attention
from bert_core.inference.predictor import Predictor
from bert_core.model.attention import RelativeBias
from bert_core.model.config import AttentionConfig, EncoderConfig, RotaryAttentionConfig
from bert_core.model.disentangled import RelativePositions
from bert_core.model.encoder import Encoder
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import Batch

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SENTENCE = "The old dog slept on the porch because it was tired."
HEADS = [
    (1, 3, "the token before"),
    (2, 9, "the token after"),
    (3, 9, "the noun of an article"),
    (5, 6, "[CLS], nearly always"),
]
"""Layer and head, from 1, and what it looks at."""
LENGTHS, REACH = (16, 5, 9), 3
PAPER, INK, FAINT, ACCENT, GREY = "#f7f8fd", "#26305f", "#5b659c", "#3d4db0", "#c9cddd"
SHADES = LinearSegmentedColormap.from_list("shades", ["#ffffff", ACCENT])
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "raybert",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": GREY,
    "axes.titlesize": 9.5,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": PAPER,
    "figure.constrained_layout.h_pad": 0.12,
    "figure.constrained_layout.w_pad": 0.12,
    "legend.frameon": False,
}


def heads(seen: Attention) -> Figure:
    """Four heads over the tokens of a sentence: row i shows what token i attends to."""
    figure = Figure(figsize=(8.6, 8.4), layout="constrained")
    for axes, (layer, head, title) in zip(figure.subplots(2, 2).flat, HEADS, strict=True):
        shares = seen.weights[layer - 1, head - 1]
        axes.imshow(shares, cmap=SHADES, vmin=0, vmax=1, interpolation="none")
        axes.set_title(f"layer {layer}, head {head}: {title}")
        axes.set_xticks(range(len(seen.tokens)), seen.tokens, rotation=90)
        axes.set_yticks(range(len(seen.tokens)), seen.tokens)
        axes.tick_params(length=0)
    return figure


def habits(seen: Attention) -> Figure:
    """The share of every head's attention that goes to each of four places."""
    figure = Figure(figsize=(8.6, 5), layout="constrained")
    for axes, (place, shares) in zip(
        figure.subplots(2, 2).flat, seen.habits().items(), strict=True
    ):
        drawn = axes.imshow(shares, cmap=SHADES, vmin=0, vmax=1, interpolation="none")
        axes.set_title(place)
        axes.set_xticks(range(shares.shape[1]), range(1, shares.shape[1] + 1))
        axes.set_yticks(range(shares.shape[0]), range(1, shares.shape[0] + 1))
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
        axes.tick_params(length=0)
    bar = figure.colorbar(drawn, ax=figure.axes, shrink=0.5, ticks=[0, 0.5, 1])
    bar.ax.set_yticklabels(["0 %", "50 %", "100 %"])
    return figure


def reads(encoder: Encoder, batch: Batch, layer: int) -> Bool[np.ndarray, "tokens tokens"]:
    """Which tokens of a batch the vector of each token depends on, through one layer.

    Args:
        layer: from 0.
    """
    encoded = encoder(**batch, all_layers=True)
    before, after = encoded.layers[layer : layer + 2]
    # NOTE: the sum of a normalised vector is constant; a random sum of it is not.
    direction = torch.randn(after.shape[-1], generator=torch.Generator().manual_seed(0))
    found = []
    for value in (after @ direction).flatten():
        (gradient,) = torch.autograd.grad(value, before, retain_graph=True)
        found.append((gradient != 0).any(-1).flatten())
    return torch.stack(found).numpy()


def squares() -> dict[str, np.ndarray]:
    """What the tokens of three rows read, padded, packed, and in a window.

    Returns: title → square, query before key: 2 where a token reads another, 1 where that is
        computed for padding, else 0.
    """
    config = EncoderConfig(
        hidden_size=16,
        num_hidden_layers=2,
        hidden_dropout_prob=0.0,
        attention=AttentionConfig(num_heads=1, dropout=0.0),
    )
    window = RotaryAttentionConfig(num_heads=1, window=2 * REACH, dropout=0.0)
    rows = [np.full(length, 5, np.int64) for length in LENGTHS]
    padded, packed = pad(rows, 0), pack(rows)
    real = padded["attention_mask"].flatten().bool().numpy()
    blocks = np.kron(np.eye(len(rows)), np.ones((max(LENGTHS), max(LENGTHS))))
    plain = Encoder(config).eval()
    local = Encoder(replace(config, attention=window)).eval()
    return {
        "padded": np.where(reads(plain, padded, 1) & real[:, None], 2, blocks),
        "packed": 2 * reads(plain, packed, 1),
        f"window: {REACH} tokens each way": 2 * reads(local, packed, 1),
    }


def layouts() -> Figure:
    """The squares of `squares`, each cell as large in all of them."""
    drawn = squares()
    figure = Figure(figsize=(8.6, 4.2), layout="constrained")
    panels = figure.subplots(1, 3, width_ratios=[len(square) for square in drawn.values()])
    for axes, (title, square) in zip(panels, drawn.items(), strict=True):
        colours = ListedColormap(["#ffffff", GREY, ACCENT])
        axes.imshow(square, cmap=colours, vmin=0, vmax=2, interpolation="none")
        axes.set(title=title, xticks=[], yticks=[])
        axes.set_xlabel(f"{len(square)} places, {np.count_nonzero(square)} scores")
    return figure


def distances() -> Figure:
    """Which pairs of tokens share what is learnt of their distance."""
    bias = RelativeBias(VARIANTS["mpnet-base"].config)
    first, third = (
        RelativePositions(VARIANTS[name].config) for name in ("deberta-base", "deberta-v3-base")
    )
    places = torch.arange(40)
    figure = Figure(figsize=(8.6, 3.9), layout="constrained")
    square, lines = figure.subplots(1, 2)
    steps = bias.bucket(places - places[:, None]) % (bias.config.num_buckets // 2)
    square.imshow(steps.numpy(), cmap=SHADES.reversed(), interpolation="none")
    square.set_title("MPNet: pairs of one shade share a number")
    square.set_xlabel("key")
    square.set_ylabel("query")
    square.tick_params(length=0)
    away = torch.arange(1, 512)
    for name, colour, known in (
        ("DeBERTa", "#8791c4", first.bucket(away)),
        ("DeBERTaV3", ACCENT, third.bucket(away)),
        ("MPNet", INK, bias.bucket(-away)),
    ):
        lines.plot(away.numpy(), known.numpy(), color=colour, label=name)
    lines.set(xscale="log", yscale="log", facecolor=PAPER)
    lines.set_title("how many distances are told apart")
    ticks = [1, 8, 32, 128, 512]
    for axis in (lines.xaxis, lines.yaxis):
        axis.set_ticks(ticks, ticks)
        axis.set_ticks([], minor=True)
    lines.set_xlabel("up to this distance, in tokens")
    lines.legend()
    return figure


def main(arguments: Sequence[str]) -> None:
    (folder,) = arguments
    predictor = Predictor(folder, device="cpu", task="feature-extraction")
    seen = attention(predictor.model, predictor.bundle.tokenizer, SENTENCE)
    with mpl.rc_context(STYLE):
        for name, figure in {
            "heads": heads(seen),
            "habits": habits(seen),
            "layouts": layouts(),
            "distances": distances(),
        }.items():
            path = IMAGES / f"attention-{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
