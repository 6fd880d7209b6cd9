"""Links of documents lead to pages of the site, and those to Python files to the names in them."""

from pathlib import Path

import pytest

from site_builder.check import findings
from site_builder.links import DOCS, ROOT, linked, on_site


@pytest.mark.parametrize(
    ("page", "link", "wanted"),
    [
        ("guides/extend.md", "[a](../design.md#the-flow)", "[a](../design.md#the-flow)"),
        ("cluster.md", "[a](../README.md#on-a-cluster)", "[a](readme.md#on-a-cluster)"),
        ("deploy/index.md", "[a](kuberay/README.md)", "[a](kuberay.md)"),
        ("changelog.md", "[a](docs/jobs.md)", "[a](jobs.md)"),
        ("scale.md", "![a](../benchmarks/x.png)", "![a](files/benchmarks/x.png)"),
        ("tasks.md", "[a](https://b.c/d.py)", "[a](https://b.c/d.py)"),
        ("tasks.md", "```\n[a](../README.md)\n```", "```\n[a](../README.md)\n```"),
        (
            "family.md",
            "[`Masker.choose`](../bert_core/data/masking.py)",
            "[`Masker.choose`](reference/code/bert_core.data.masking.md"
            "#bert_core.data.masking.Masker.choose)",
        ),
        (
            "family.md",
            "[the file](../serve/__init__.py)",
            "[the file](reference/code/serve.md)",
        ),
    ],
)
def test_a_link_to_a_file_is_one_to_its_page(page: str, link: str, wanted: str) -> None:
    assert on_site(link, page) == wanted


def test_only_existing_files_are_copied() -> None:
    text = "[a](../bert_core/files.py) [b](nothing.md) [c](#here) [d](mailto:x@y.z)"
    assert linked(text, "docs/x.md") == {"bert_core/files.py"}


def test_every_result_of_a_benchmark_is_linked_from_a_page() -> None:
    pages = [ROOT / "benchmarks/README.md", *(ROOT / DOCS / "benchmarks").rglob("*.md")]
    shown = {
        file
        for page in pages
        for file in linked(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))
    }
    results = (ROOT / "benchmarks" / "results").rglob("*.json")
    assert {str(path.relative_to(ROOT)) for path in results} - shown == set()


def test_an_unlinked_page_and_one_that_loads_from_elsewhere_are_reported(
    tmp_path: Path,
) -> None:
    front = '<nav><a href="b.html"></a></nav><article><a href="a.html#x"></a></article>'
    (tmp_path / "index.html").write_text(front)
    (tmp_path / "a.html").write_text('<script src="//cdn.example/x.js"></script>')
    (tmp_path / "b.html").write_text("")
    (tmp_path / "404.html").write_text("")
    assert findings(tmp_path) == ["a.html loads //cdn.example/x.js", "b.html is not reached"]
