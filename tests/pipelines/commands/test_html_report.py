"""A page that holds all it shows."""

import re
from pathlib import Path

import pytest

from pipelines.commands.html_report import Section, write_report

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360"
    "606060000000050001a5f645400000000049454e44ae426082"
)


def test_a_page_needs_no_other_file_and_no_network(tmp_path: Path) -> None:
    (tmp_path / "loss.png").write_bytes(PIXEL)
    (tmp_path / "card.md").write_text(
        "# Card\n\n| what | value |\n|---|---|\n| a <b> | 1 |\n\n![loss](loss.png)\n\n"
        "##### Deep\n\n```sh\n# no heading\n```\n"
    )
    sections = [
        Section("In figures", rows=[("loss <before>", "8.3 & more")]),
        Section("Curves", pictures=[tmp_path / "loss.png"]),
        Section("Data", markdown=tmp_path / "card.md"),
    ]
    write_report(tmp_path / "out" / "report.html", "A run", sections)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<td>loss &lt;before&gt;</td><td>8.3 &amp; more</td>" in page
    assert "<h3>Card</h3>" in page
    assert "<h6>Deep</h6>" in page
    assert "\n# no heading\n" in page.replace('<pre><code class="language-sh">', "\n")
    assert "<td>a &lt;b&gt;</td>" in page
    images = re.findall(r'<img src="([^"]{22})', page)
    assert images == ["data:image/png;base64,"] * 2
    assert not re.findall(r'(?:src|href)="(?!data:)', page)


def test_a_picture_that_is_not_there_is_an_error_and_no_half_page(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.png"):
        write_report(tmp_path / "r.html", "A run", [Section("x", pictures=[tmp_path / "gone.png"])])
    assert list(tmp_path.iterdir()) == []
