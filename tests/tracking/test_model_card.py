"""What a card shows of names that come with the data stays what it was, whatever is in it."""

import pytest
from markdown_it import MarkdownIt

from tracking.model_card import code_span


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("spam", "spam"),
        ("a\n\nb\r\tc", r"a\n\nb\r\tc"),
        ("a `b` ``c``", "a `b` ``c``"),
        ("`", "`"),
        ("naïve 数 | x", "naïve 数 | x"),
        ("a\u2028b", r"a\u2028b"),
    ],
)
def test_code_is_one_line_that_holds_any_text(text: str, shown: str) -> None:
    (paragraph,) = [
        token
        for token in MarkdownIt().parse(f"Its labels: {code_span(text)}, `y`.")
        if token.type == "inline"
    ]
    code = [token.content for token in paragraph.children or () if token.type == "code_inline"]
    assert code == [shown, "y"]
