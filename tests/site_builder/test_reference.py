"""The pages that are written from the code leave nothing out."""

import ast
import re
from dataclasses import fields
from importlib import import_module

import pytest

import serve.request.errors
from pipelines.configure import ALL, parser_for
from serve.config import ModelConfig
from site_builder import reference
from site_builder.links import DOCS, ROOT
from tracking.runs import metric_names

NO_METRICS = {"TASK", "CLOCK", "SYSTEM", "TRAIN"}
OF_SERVE = "RAY_SERVE_"  # what the server sets for Ray Serve, which nobody else should
VARIABLE = re.compile(r"(?:RAYBERT|RAY|MLFLOW|HF|AWS|GLIBC|OTEL|TOKENIZERS)_[A-Z0-9_]+")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference.pages()


def options_of(page: str) -> list[list[str]]:
    """The cells of each option on a page of a command."""
    rows = re.findall(r"^\| (\[`[^`]+`\]\(.*) \|$", page, re.M)
    return [re.split(r" (?<!\\)\| ", row) for row in rows]


def page_of(word: str, pages: dict[str, str]) -> str:
    return pages[f"{reference.COMMANDS}/{reference.file_of(word)}"]


@pytest.mark.parametrize("word", ALL)
def test_a_command_has_every_option_in_the_order_of_its_help(
    word: str, pages: dict[str, str]
) -> None:
    shown = re.findall(r"^\| \[`--([^`]+)`\]", page_of(word, pages), re.M)
    wanted = [
        action.dest
        for group in parser_for(word)._action_groups
        for action in group._group_actions
        if getattr(action, "_typehint", None) is not None and not action.dest.endswith(".help")
    ]
    assert [name for name in shown if name in wanted] == wanted


@pytest.mark.parametrize("word", ALL)
def test_an_option_has_a_meaning_a_default_its_range_and_leads_to_its_source(
    word: str, pages: dict[str, str]
) -> None:
    options = options_of(page_of(word, pages))
    assert options
    for option, values, default, meaning in options:
        assert meaning, option
        assert default, option
        if re.search(r"\b(int|float)\b", values):
            assert re.search(r"(int|float), \w+|list\[int, int\]", values), (option, values)
        found = re.fullmatch(r"\[`.*`\]\(\.\./code/(.+)\.md#\1\.(\w+)\.(\w+)\)", option)
        assert found, option
        module, kind, field = found.groups()
        assert module in reference.sources()
        assert field in vars(getattr(import_module(module), kind))["__annotations__"]


def test_settings_of_a_served_model_are_on_the_page_of_serve(pages: dict[str, str]) -> None:
    page = page_of("serve", pages)
    shown = {*re.findall(r"^\| \[`(?:--|models\.<name>\.)(\w+)`\]", page, re.M)}
    assert shown >= {field.name for field in fields(ModelConfig)} - {"limits"}
    assert "[`--limits.max_inputs`]" in page
    assert "[`models.<name>.candidate.share`]" in page


def test_paths_of_all_surfaces_are_there_with_their_errors(pages: dict[str, str]) -> None:
    from serve.surfaces.catalog import SURFACES

    for surface in SURFACES:
        for endpoint in surface.endpoints:
            assert f"### `{endpoint.method} {endpoint.path or '/'}`" in pages["reference/http.md"]
    assert "| `429` |" in pages["reference/http.md"]


def messages_of_the_code() -> set[str]:
    """Every text of the code, with `…` for what is put into it."""
    found: set[str] = set()
    for package in ("bert_core", "pipelines", "raybert", "serve", "tracking"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (
                        value if isinstance(value, ast.Constant) else None for value in node.values
                    )
                    found.add("".join("…" if part is None else str(part.value) for part in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return found


def test_every_message_on_the_page_of_errors_is_one_of_the_code() -> None:
    page = (ROOT / DOCS / reference.ERRORS).read_text(encoding="utf-8")
    quoted = re.findall(r"^\| (`+)(.+?)\1 \|", page, re.M)
    known = messages_of_the_code()
    unknown = [text for _, text in quoted if not any(text in message for message in known)]
    assert unknown == []
    assert len(quoted) >= 20


def test_errors_have_a_meaning_a_way_out_and_every_status() -> None:
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \| (.+?) \| (.+?) \|", reference.errors(), re.M)
    kinds = [kind for kind in vars(serve.request.errors).values() if hasattr(kind, "retry_after_s")]
    assert {(int(status), name) for status, name, *_ in rows} == {
        (kind.status, kind.error_type) for kind in kinds
    }
    assert all(when and way_out for _, _, when, way_out in rows)
    assert "| 503 | `not_ready` |" in reference.errors()
    for name in ("ConfigError", "ResourceError"):
        assert f"| [`{name}`]" in reference.errors()


def test_every_metric_has_a_meaning() -> None:
    activities = {*metric_names.ACTIVITIES}
    named = {
        value
        for name, value in vars(metric_names).items()
        if name.isupper() and isinstance(value, str) and name not in NO_METRICS
    }
    assert named - activities == metric_names.MEANINGS.keys()


def test_every_environment_variable_in_the_code_is_on_its_page() -> None:
    used: set[str] = set()
    for package in ("bert_core", "pipelines", "raybert", "serve", "tracking"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    used |= {node.value} if VARIABLE.fullmatch(node.value) else set()
    told = set(VARIABLE.findall((ROOT / DOCS / "environment.md").read_text(encoding="utf-8")))
    assert {name for name in used - told if not name.startswith(OF_SERVE)} == set()
    assert "RAYBERT_CACHE" in used


def test_every_decision_has_a_date_what_lost_and_why() -> None:
    pages = {*(ROOT / DOCS / "decisions").glob("*.md")} - {ROOT / DOCS / "decisions/index.md"}
    assert pages
    for page in pages:
        title, *sections = page.read_text(encoding="utf-8").split("\n## ")
        assert re.fullmatch(r"# .+\n", title), page
        assert sections, page
        for section in sections:
            wanted = r".+\n\n\*2\d{3}-\d\d-\d\d\*\n\n.*^\*\*Instead of\*\*.*^\*\*Why\.\*\*"
            assert re.match(wanted, section, re.M | re.S), (page, section)
