"""The pictures of attention are what the code draws, and show what the pages say of them."""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks.checkpoints import ABSENT, MINILM, checkpoint
from bert_core.inference.inspection import attention
from bert_core.inference.predictor import Predictor
from site_builder import attention as pictures


@pytest.mark.parametrize("draw", [pictures.layouts, pictures.distances])
def test_a_picture_that_needs_no_weights_is_what_the_code_draws(
    draw: Callable[[], Figure], tmp_path: Path
) -> None:
    with mpl.rc_context(pictures.STYLE):
        draw().savefig(tmp_path / "drawn.svg", metadata={"Date": None})
    shown = pictures.IMAGES / f"attention-{draw.__name__}.svg"
    assert (tmp_path / "drawn.svg").read_bytes() == shown.read_bytes()


def test_packed_rows_read_themselves_and_a_window_its_reach() -> None:
    rows = np.repeat(np.arange(3), pictures.LENGTHS)
    own = rows[:, None] == rows
    near = abs(np.arange(len(rows))[:, None] - np.arange(len(rows))) <= pictures.REACH
    padded, packed, window = pictures.squares().values()
    np.testing.assert_array_equal(packed == 2, own)
    np.testing.assert_array_equal(window == 2, own & near)
    real = np.concatenate([np.arange(16) < length for length in pictures.LENGTHS])
    np.testing.assert_array_equal((padded == 2)[np.ix_(real, real)], own)
    assert (padded == 2).sum() == own.sum()


@pytest.mark.drill
def test_heads_look_at_what_their_titles_say() -> None:
    folder = checkpoint(MINILM)
    if folder is None:
        pytest.skip(ABSENT)
    predictor = Predictor(folder, device="cpu", task="feature-extraction")
    seen = attention(predictor.model, predictor.bundle.tokenizer, pictures.SENTENCE)
    before, after, noun, cls = (
        seen.weights[layer - 1, head - 1] for layer, head, _ in pictures.HEADS
    )
    size = len(seen.tokens)
    assert before[np.arange(1, size), np.arange(size - 1)].min() > 0.9
    assert after[np.arange(size - 1), np.arange(1, size)].mean() > 0.5
    articles = [place for place, token in enumerate(seen.tokens) if token == "the"]
    assert [seen.tokens[noun[place].argmax()] for place in articles] == ["dog", "porch"]
    assert (cls.argmax(-1) == 0).all()
    special = seen.habits()["special tokens"]
    assert (special[1:5].mean(-1) > 0.5).all()
