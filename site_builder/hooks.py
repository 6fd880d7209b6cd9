"""What mkdocs calls while it builds the site."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parents[1]))

from site_builder import links, reference

ROOT, DOCS = links.ROOT, links.ROOT / links.DOCS


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The pages that nobody lists by hand are put into the nav."""
    assert config.nav is not None
    found = {"Commands": [*reference.command_nav()], "Code": [*code_nav()]}
    config.nav = _filled(config.nav, found)
    config.extra["nav_pages"] = config.nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages from outside docs/, those made from the code, and files that pages link to."""
    made: dict[str, str] = {page: (ROOT / file).read_text() for file, page in links.PAGES.items()}
    made |= reference.pages()
    made |= {f"{links.CODE}/{links.module_of(file)}.md": _code(file) for file in _modules()}
    made[f"{links.CODE}/index.md"] = _code_index()
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    for file in sorted(_linked()):
        if links.page_of(file).startswith("files/"):
            files.append(File.generated(config, links.page_of(file), abs_src_path=str(ROOT / file)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them; the front page lists all pages, that on errors ends with what the
    code says of them."""
    here = page.file.src_uri
    if here == "index.md":
        markdown += "\n".join(
            ["", '<div class="map" markdown>', *_map(config.extra["nav_pages"]), "</div>", ""]
        )
    if here == reference.ERRORS:
        markdown += reference.errors()
    return links.on_site(markdown, here)


def code_nav() -> list[Any]:
    return [f"{links.CODE}/index.md"] + [
        {links.module_of(file): links.page_of(file)} for file in _modules()
    ]


def _documents() -> dict[str, str]:
    """Every document that is written by hand, by its path in the repository."""
    paths = [*DOCS.rglob("*.md"), *(ROOT / file for file in links.PAGES)]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def _linked() -> set[str]:
    return {file for path, text in _documents().items() for file in links.linked(text, path)}


def _modules() -> list[str]:
    """The modules that documents link to, and those that define configs."""
    linked = {file for file in _linked() if file.endswith(".py")} | {"bert_core/errors.py"}
    return sorted(linked | {f"{module.replace('.', '/')}.py" for module in reference.sources()})


def _code(file: str) -> str:
    module = links.module_of(file)
    return f"# `{module}`\n\n::: {module}\n"


def _code_index() -> str:
    lines = [f"- [{module}]({module}.md)" for module in map(links.module_of, _modules())]
    return "# Code\n\nThe modules that these pages refer to, with their source.\n\n" + "\n".join(
        lines
    )


def _filled(entries: list[Any], found: dict[str, list[Any]]) -> list[Any]:
    """The nav with lists in the places of the empty ones."""

    def fill(title: str, value: Any) -> Any:
        if value == []:
            return found[title]
        return _filled(value, found) if isinstance(value, list) else value

    return [
        {title: fill(title, value) for title, value in entry.items()}
        if isinstance(entry, dict)
        else entry
        for entry in entries
    ]


def _map(entries: list[Any]) -> Iterator[str]:
    """The nav as Markdown: a heading per tab, and its pages below."""
    for entry in entries:
        ((title, value),) = entry.items()
        if isinstance(value, list):
            yield f"<div markdown>\n\n## {title}\n"
            yield from (f"- {item}" for item in _items(value, title))
            yield "\n</div>"


def _items(entries: list[Any], parent: str) -> Iterator[str]:
    """Links to pages. A section that has a page of its own is that page, which links to the rest;
    another is its pages in a row."""
    for entry in entries:
        if isinstance(entry, str):
            yield f"[{parent}: overview]({entry})"
            continue
        ((title, value),) = entry.items()
        if isinstance(value, str):
            yield f"[{title}]({value})"
        elif isinstance(value[0], str):
            yield f"[{title}]({value[0]})"
        else:
            yield f"{title}: {' · '.join(_items(value, title))}"
