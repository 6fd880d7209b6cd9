"""The page of `raybert inspect` in a real browser: alone, without an error, on any screen."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pipelines.commands.inspect import write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests import pages

LAYERS, HEADS = 3, 4
TEXT = "The </script><b>old</b> man & the bank."
PIECES = "[CLS] the < / script > < b > old < / b > man & the bank . [SEP]"
TOKENS = PIECES.split()
USES = ("The bank of the river.", "A man took the money to the bank.")


def found() -> dict[str, Any]:
    """Every section, of a model that there is not."""
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.full(len(TOKENS), 0.2), size=(LAYERS, HEADS, len(TOKENS)))
    vectors = rng.normal(size=(LAYERS + 1, 2, 8))
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    model = {"name": "a model", "family": "bert", "task": None, "digest": "0123456789ab"}
    habits = {name: rng.random((LAYERS, HEADS)).tolist() for name in ("itself", "others")}
    return {
        "model": {**model, "layers": LAYERS, "heads": HEADS, "hidden_size": 8},
        "attention": {
            "tokens": TOKENS,
            "second_start": 12,
            "weights": np.rint(1000 * weights).astype(int).reshape(LAYERS, HEADS, -1).tolist(),
            "habits": habits,
        },
        "next_sentence": {
            "text": TEXT,
            "text_pair": "It is old.",
            "answer": [{"label": "IsNext", "score": 0.9}, {"label": "NotNext", "score": 0.1}],
        },
        "masks": {"text": "The [MASK].", "masks": [[{"token_str": "bank", "score": 0.7}]] * 2},
        "nearest": {"text": TEXT, "sentences": [{"text": each, "score": 0.5} for each in USES]},
        "word": {
            "word": "bank",
            "uses": [
                {"sentence": each, "start": start, "end": start + 4, "pieces": ["ban", "##k"]}
                for each, start in zip(USES, (4, 28), strict=True)
            ],
            "cosines": (vectors @ vectors.swapaxes(1, 2)).tolist(),
        },
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "inspect.html"
    write_page(str(path), found())
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_draws_every_head_alone_and_without_an_error(
    width: int, scheme: "pages.Scheme", page: Path, browser: "Browser"
) -> None:
    from tests import pages

    with pages.opened(browser, page, width=width, scheme=scheme) as it:
        assert it.page.locator(".grid canvas").count() == LAYERS * HEADS
        assert it.page.locator(".layers canvas").count() == LAYERS + 1
        assert it.page.locator("h2").all_inner_texts() == [
            "Attention", "Next sentence", "Masked words", "Nearest sentences",
            "“bank” in its sentences",
        ]  # fmt: skip
        assert it.page.locator("b").count() == len(USES)
        drawn = "[...document.querySelectorAll('canvas')].every(one => one.getContext('2d')"
        drawn += ".getImageData(0, 0, one.width, one.height).data.some(value => value))"
        assert it.page.evaluate(drawn)
        assert it.page.evaluate("document.documentElement.scrollWidth") <= width
        assert it.requests == [page.absolute().as_uri()]
        assert it.messages == []


def test_a_head_can_be_chosen_by_click_or_key_and_its_weights_are_announced(
    page: Path, browser: "Browser"
) -> None:
    from tests import pages

    with pages.opened(browser, page) as it:
        it.page.locator(".grid button").nth(6).click()
        assert it.page.locator("h3").first.inner_text() == "Layer 2, head 3"
        it.page.locator(".grid").press("ArrowDown")
        assert it.page.locator("h3").first.inner_text() == "Layer 3, head 3"
        for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
            it.page.locator(".scroll canvas").press(key)
        size, weights = len(TOKENS), found()["attention"]["weights"][2][2]
        share = weights[size + 2] / 1000
        told = it.page.locator("output").inner_text()
        assert told == f"“{TOKENS[1]}” attends to “{TOKENS[2]}”: {share * 100:.1f} %"
        it.page.locator(".choice button").nth(1).click()
        lines = it.page.locator("svg line")
        assert lines.count() == sum(weight >= 20 for weight in weights)
        it.page.locator("svg text").nth(2).hover()
        row = weights[size : 2 * size]
        assert lines.count() == sum(weight >= 20 for weight in row)
        assert it.messages == []


def test_the_page_is_accessible(page: Path, browser: "Browser") -> None:
    from tests import pages

    with pages.opened(browser, page) as it:
        for button in it.page.locator(".choice button").all():
            button.click()
            pages.assert_within_reach(it.page)
