"""Chromium for the tests of pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

Scheme = Literal["light", "dark"]


@contextmanager
def chromium() -> Iterator[Browser]:
    """The machine's own; the test is skipped where there is none.

    While it runs, asyncio believes that its thread has an event loop: end it with its tests.
    """
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()


def assert_within_reach(page: Page) -> None:
    """No finding of axe, in light and dark, which differ by their colours alone."""
    axe = Axe()
    for scheme, rules in SCHEMES.items():
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        found = axe.run(page, options={"resultTypes": ["violations"], **rules})
        axe = Axe(axe_script="")  # the page has it now: half a megabyte of script
        assert found.violations_count == 0, found.generate_report()


SCHEMES: dict[Scheme, dict[str, Any]] = {
    "light": {},
    "dark": {"runOnly": {"type": "rule", "values": ["color-contrast"]}},
}
"""With options of axe: which rules look at it, if not all."""


@dataclass
class Opened:
    """A page that was opened from a file, and what was heard of it."""

    page: Page
    requests: list[str] = field(default_factory=list)
    """Other than for data that is in the page."""
    messages: list[str] = field(default_factory=list)
    """Of the console, and errors."""


@contextmanager
def opened(
    browser: Browser, path: Path, *, width: int = 1280, scheme: Scheme = "light"
) -> Iterator[Opened]:
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, is_mobile=width < 600
    )
    result = Opened(context.new_page())

    def request(url: str) -> None:
        if not url.startswith("data:"):
            result.requests.append(url)

    result.page.on("request", lambda each: request(each.url))
    result.page.on("pageerror", lambda error: result.messages.append(str(error)))
    result.page.on("console", lambda message: result.messages.append(message.text))
    result.page.goto(path.absolute().as_uri())
    try:
        yield result
    finally:
        context.close()
