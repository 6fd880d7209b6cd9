"""`python -m site_builder.check site`: what mkdocs does not check of a site that it has built.

Every page is reached from the front page by links in the text, and no page loads anything from
elsewhere.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING = {"script": "src", "img": "src", "iframe": "src", "link": "href"}
"""Tags by which a page loads something, and the attribute that says what."""


class Page(HTMLParser):
    """The links of a page's article, and what the page loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self._in_article = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self._in_article |= tag == "article"
        if tag == "a" and self._in_article:
            self.links.add(values.get("href") or "")
        if tag in LOADING and values.get("rel") != "canonical":
            self.loaded.add(values.get(LOADING[tag]) or "")

    def handle_endtag(self, tag: str) -> None:
        self._in_article &= tag != "article"


def findings(site: Path) -> list[str]:
    """What is wrong; each names the page."""
    reached: set[Path] = set()
    pending, found = [site / "index.html"], []
    while pending:
        path = pending.pop()
        if path in reached or path.suffix != ".html" or not path.is_file():
            continue
        reached.add(path)
        page = Page(path)
        name = path.relative_to(site)
        found += [f"{name} loads {url}" for url in page.loaded if urlsplit(url).netloc]
        parts = [urlsplit(link) for link in page.links]
        pending += [(path.parent / unquote(url.path)).resolve() for url in parts if not url.netloc]
    pages = {path for path in site.rglob("*.html") if path.name != "404.html"}
    found += [f"{path.relative_to(site)} is not reached" for path in sorted(pages - reached)]
    return found


if __name__ == "__main__":
    found = findings(Path(sys.argv[1]).resolve())
    if found:
        sys.exit("\n".join(found))
