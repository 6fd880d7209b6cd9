"""The page of `raybert inspect` in a real browser: alone, without an error, on any screen."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.commands.inspect import write_page

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


class Browser:
    """Headless Chromium, spoken to by its DevTools protocol over two pipes."""

    def __init__(self, program: str, profile: Path) -> None:
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu"]
        options += ["--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"]
        script = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, program, *options, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, answers),
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._from, 1 << 16)
            assert chunk, "chromium ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int = 1280, scheme: str = "light") -> None:
        """Open a file, alone: what was before is forgotten."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=path.absolute().as_uri())
        while self.evaluate("document.readyState") != "complete":
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def of(self, *methods: str) -> list[dict[str, Any]]:
        """What was told of these events."""
        return [one["params"] for one in self.events if one["method"] in methods]

    def end(self) -> None:
        os.close(self._to)  # it ends when nobody speaks to it any more
        self._process.wait(timeout=30)
        os.close(self._from)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    browser = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.end()


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
