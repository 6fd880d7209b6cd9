"""Where links lead: documents name files of the repository, the site has pages.

A link to a Python file leads to the page that shows its code, and if the link's text is a name,
such as [`choose_runs`](../bert_core/data/masking.py), to that name on the page. So no link has a
line number, and one whose name is gone fails the build.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = "docs"
PAGES = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "deploy/README.md": "deploy/index.md",
    "deploy/kuberay/README.md": "deploy/kuberay.md",
}
"""Documents outside docs/ → their pages."""
CODE = "reference/code"

LINK = re.compile(r"(?P<mark>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
_FENCED = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})[^\n]*\n.*?^(?P=indent)(?P=fence) *$", re.M | re.S
)
_NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")


def source_of(page: str) -> str:
    """The file of the repository that a page shows: `guides/pretrain.md` is in docs/."""
    outside = {shown: file for file, shown in PAGES.items()}
    return outside.get(page, f"{DOCS}/{page}")


def page_of(file: str) -> str:
    """The page, or the copied file of the site, that shows a file of the repository."""
    if file in PAGES:
        return PAGES[file]
    if file.endswith(".py"):
        return f"{CODE}/{module_of(file)}.md"
    return file.removeprefix(f"{DOCS}/") if file.startswith(f"{DOCS}/") else f"files/{file}"


def module_of(file: str) -> str:
    """`bert_core/data/masking.py` → `bert_core.data.masking`."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def prose(markdown: str, change: Callable[[str], str]) -> str:
    """The text with what is outside its fences changed."""
    changed, end = "", 0
    for fence in _FENCED.finditer(markdown):
        changed += change(markdown[end : fence.start()]) + fence[0]
        end = fence.end()
    return changed + change(markdown[end:])


def linked(markdown: str, source: str) -> set[str]:
    """The files of the repository that a document links to."""
    found: set[str] = set()

    def note(text: str) -> str:
        found.update(
            _target(link["path"], source) for link in LINK.finditer(text) if _is_file(link["path"])
        )
        return text

    prose(markdown, note)
    return {file for file in found if (ROOT / file).is_file()}


def on_site(markdown: str, page: str) -> str:
    """A page's text with links to files as links to pages."""
    source = source_of(page)

    def rewritten(link: re.Match[str]) -> str:
        if not _is_file(link["path"]):
            return link[0]
        file = _target(link["path"], source)
        shown = page_of(file)
        anchor = link["anchor"] or ""
        named = _NAME.fullmatch(link["text"])
        if file.endswith(".py") and named and "/" not in link["text"]:
            anchor = f"#{module_of(file)}.{named[1]}"
        path = posixpath.relpath(shown, posixpath.dirname(page) or ".")
        return f"{link['mark']}[{link['text']}]({path}{anchor})"

    return prose(markdown, lambda text: LINK.sub(rewritten, text))


def _is_file(path: str) -> bool:
    return bool(path) and not re.match(r"[a-z]+:|/", path)


def _target(path: str, source: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
