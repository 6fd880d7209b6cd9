"""The page of `raybert inspect` in a real browser: alone, without an error, on any screen."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.commands.inspect import write_page
from tests.chromium import Browser

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
    width: int, scheme: str, page: Path, browser: Browser
) -> None:
    browser.open(page, width, scheme)
    assert browser.evaluate("document.querySelectorAll('.grid canvas').length") == LAYERS * HEADS
    assert browser.evaluate("document.querySelectorAll('.layers canvas').length") == LAYERS + 1
    headings = "[...document.querySelectorAll('h2')].map(one => one.textContent).join()"
    wanted = "Attention,Next sentence,Masked words,Nearest sentences,“bank” in its sentences"
    assert browser.evaluate(headings) == wanted
    assert browser.evaluate("document.querySelectorAll('b').length") == len(USES)
    drawn = "[...document.querySelectorAll('canvas')].every(one => one.getContext('2d')"
    drawn += ".getImageData(0, 0, one.width, one.height).data.some(value => value))"
    assert browser.evaluate(drawn)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    requests = [one["request"]["url"] for one in browser.of("Network.requestWillBeSent")]
    assert [url for url in requests if not url.startswith("data:")] == [page.absolute().as_uri()]
    assert browser.of("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded") == []


def test_a_head_is_chosen_by_a_click_and_by_keys_and_its_weights_are_told(
    page: Path, browser: Browser
) -> None:
    browser.open(page)
    browser.evaluate("document.querySelectorAll('.grid button')[6].click()")
    assert browser.evaluate("document.querySelector('h3').textContent") == "Layer 2, head 3"
    press = "{}.dispatchEvent(new KeyboardEvent('keydown', {{key: '{}', bubbles: true}}))"
    browser.evaluate(press.format("document.querySelector('.grid')", "ArrowDown"))
    assert browser.evaluate("document.querySelector('h3').textContent") == "Layer 3, head 3"
    canvas = "document.querySelector('.scroll canvas')"
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        browser.evaluate(press.format(canvas, key))
    size, weights = len(TOKENS), found()["attention"]["weights"][2][2]
    share = weights[size + 2] / 1000
    told = browser.evaluate("document.querySelector('output').textContent")
    assert told == f"“{TOKENS[1]}” attends to “{TOKENS[2]}”: {share * 100:.1f} %"
    browser.evaluate("document.querySelectorAll('.choice button')[1].click()")
    lines = browser.evaluate("document.querySelectorAll('svg line').length")
    assert lines == sum(weight >= 20 for weight in weights)
    browser.evaluate(
        "document.querySelectorAll('svg text')[2].dispatchEvent(new Event('pointerenter'))"
    )
    row = weights[size : 2 * size]
    lines = browser.evaluate("document.querySelectorAll('svg line').length")
    assert lines == sum(weight >= 20 for weight in row)
    assert browser.of("Runtime.exceptionThrown", "Log.entryAdded") == []
