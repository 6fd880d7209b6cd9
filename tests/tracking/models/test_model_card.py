"""What a card shows of names that come with the data stays what it was, whatever is in it."""

import re
import tomllib
from html import escape

import pytest
from markdown_it import MarkdownIt

from bert_core.manifest import Manifest
from serve.config import parse_models
from tracking.models.model_card import (
    _by_class,
    _evaluated,
    _recipes,
    _use_of_hub,
    code_span,
    time_table,
)
from tracking.runs.goodput import CLUSTER, Goodput


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


def test_labels_and_sources_are_shown_as_they_are() -> None:
    labels = ["<unk>", "*a*", "a|b", "_", "`"]
    figures = {"precision": 0.5, "recall": 0.5, "f1": 0.5}
    table = _by_class({label: figures | {"support": 9 - n} for n, label in enumerate(labels)})
    html = MarkdownIt().enable("table").render(table)
    shown = [re.findall(r"<td>(.*?)</td>", row)[0] for row in html.split("<tr>")[2:]]
    assert shown == [f"<code>{escape(label)}</code>" for label in labels]
    counts = {"rows": 3, "source": "data/*.a.jsonl,data/*.b.jsonl", "primary_metric": "f1"}
    evaluation = Manifest(stage="evaluate", digest="", config={}, inputs={}, counts=counts)
    assert f"<code>{counts['source']}</code>" in MarkdownIt().render(_evaluated(evaluation))


def test_a_recipe_is_toml_whatever_its_keys_are() -> None:
    config = {"options": {"prompts": {"search query": "q: ", "a.b": "x", "ü": "y"}}, "epochs": 3}
    (recipe,) = _recipes({"stage": "finetune", "config": config})
    assert tomllib.loads(recipe.split("```toml\n")[1].removesuffix("\n```")) == config


def test_a_server_takes_the_name_that_the_card_of_an_uploaded_model_gives() -> None:
    (command,) = [
        line for line in _use_of_hub("owner/my.model").splitlines() if "raybert serve" in line
    ]
    models = parse_models(command.partition("--models ")[2])
    assert models == {"my.model": "owner/my.model"}


def test_time_by_activity_is_a_table() -> None:
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
    rows = [re.findall(r"<td[^>]*>(.*)</td>", row) for row in html.split("<tr>")[2:]]
    assert [row[1:] for row in rows] == [
        ["90 min", "75.0%"],
        ["10 min", "8.3%"],
        ["20 min", "16.7%"],
        ["2.0 h", "100.0%"],
    ]
    assert rows[0][0].startswith("computing: steps that were kept")
    assert "were kept: 75.0%. Steps that were done again: 1,500. Cost: 25.00 USD." in table
