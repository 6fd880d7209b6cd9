"""What a card shows of names that come with the data stays what it was, whatever is in it."""

import re

import pytest
from markdown_it import MarkdownIt

from tracking.goodput import CLUSTER, Goodput
from tracking.model_card import code_span, time_table


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


def test_where_the_time_went_is_a_table() -> None:
    spent = Goodput(
        began_s=0.0,
        until_s=7200.0,
        seconds={"computing": 5400.0, "recomputing": 600.0, "restarting": 1200.0, "stopped": 0.0},
        recomputed_steps=1500,
        prices_usd={CLUSTER: 12.5},
        node_seconds={CLUSTER: 7200.0},
    )
    table = time_table(spent.numbers())
    html = MarkdownIt().enable("table").render(table)
    rows = [re.findall(r"<td>(.*)</td>", row) for row in html.split("<tr>")[2:]]
    assert [row[1:] for row in rows] == [
        ["90 min", "75.0%"],
        ["10 min", "8.3%"],
        ["20 min", "16.7%"],
        ["2.0 h", "100.0%"],
    ]
    assert rows[0][0].startswith("computing: steps that were kept")
    assert "were kept: 75.0%. Steps that were done again: 1,500. Cost: 25.00 USD." in table
