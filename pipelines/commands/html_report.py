"""A run in one self-contained HTML file: figures, pictures, and cards in Markdown."""

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_core import files

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { text-align: left; padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid #8884; }
img { max-width: 100%; background: #fff; border-radius: 4px; margin: .5rem 0; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1rem; }
code { font-size: .92em; }
"""


@dataclass(frozen=True)
class Section:
    """A part of a page, under its own heading."""

    heading: str
    rows: Sequence[tuple[str, str]] = ()
    """A table of labels and figures."""
    pictures: Sequence[Path] = ()
    """PNG files."""
    markdown: Path | None = None
    """A file with its pictures in the same folder."""


def write_report(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write the page, whole or not at all. Raises: FileNotFoundError if a picture is missing."""
    body = "\n".join(_section(section) for section in sections)
    text = (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{html.escape(title)}</h1>\n{body}\n"
        "</body>\n</html>\n"
    )
    files.write_bytes(str(path), text.encode())


def _section(section: Section) -> str:
    parts = [f"<section><h2>{html.escape(section.heading)}</h2>"]
    if section.rows:
        cells = "".join(
            f"<tr><td>{html.escape(label)}</td><td>{html.escape(figure)}</td></tr>"
            for label, figure in section.rows
        )
        parts.append(f"<table>{cells}</table>")
    if section.pictures:
        images = "".join(
            f'<img src="{_data(picture)}" alt="{picture.stem}">' for picture in section.pictures
        )
        parts.append(f'<div class="pictures">{images}</div>')
    if section.markdown is not None:
        parts.append(_rendered(section.markdown))
    return "\n".join([*parts, "</section>"])


def _rendered(path: Path) -> str:
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(path.read_text(encoding="utf-8"))
    for token in tokens:
        if token.type.startswith("heading_"):  # below the section's heading
            token.tag = f"h{min(6, int(token.tag[1:]) + 2)}"
    rendered = markdown.renderer.render(tokens, markdown.options, {})
    return re.sub(
        r'<img src="([^":]+\.png)"', lambda m: f'<img src="{_data(path.parent / m[1])}"', rendered
    )


def _data(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
