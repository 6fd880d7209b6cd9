"""What is written on a command line or in a file is what a config holds, or it is told why not."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bert_core.errors import ConfigError
from pipelines.configure import ALL, config_class, parse, parser_for
from pipelines.runtime.config_errors import alternatives

NEEDED = {
    "prepare": ["--tokenizer", "vocab"],
    "pretrain": ["--tokenizer", "vocab", "--shards", "shards"],
    "finetune": ["--model", "bundle"],
    "tune": ["--model", "bundle", "--selection.share", "0.1"],
    "distill": ["--teacher", "bundle"],
    "evaluate": ["--model", "bundle"],
    "publish": ["--model", "bundle", "--evaluation", "evaluation", "--name", "docs"],
    "export": ["--model", "bundle"],
    "predict": ["--model", "bundle", "--source", "a.txt"],
    "mine": ["--model", "bundle", "--source", "a.jsonl"],
    "index": ["--vectors", "vectors"],
    "search": ["--corpus", "vectors", "--queries", "asked"],
    "extract": ["--source", "a.txt", "--tagger.model", "b", "--tagger.fields.people", "person"],
    "glue": ["--allow_incomplete"],
    "serve": ["--models", "docs=bundle"],
    "inspect": ["--model", "bundle", "--text", "A text."],
    "bench": ["--url", "http://127.0.0.1:8000", "--source", "a.txt"],
}
"""What a command must be told, beside `output`."""
INTERNALS = re.compile(r"Namespace|NestedArg|class_path|<class|Union|Optional|typing|Parser key|\n")


@cache
def hints(word: str) -> dict[str, Any]:
    """The fields that a command line may give, with their types."""
    return {
        action.dest: action._typehint
        for action in parser_for(word)._actions
        if hasattr(action, "_typehint") and not action.dest.endswith(".help")
    }


def complete(word: str) -> list[str]:
    """A command line that means a run."""
    output = ["--output", "out"] if "output" in get_type_hints(config_class(word)) else []
    return [*output, *NEEDED.get(word, [])]


def held(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def message(word: str, arguments: list[str]) -> str:
    """What is told of a command line that is refused; nothing, of one that is taken."""
    try:
        parse(word, arguments)
    except ConfigError as error:
        return str(error)
    return ""


def printed(word: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        parse(word, [*arguments, "--print_config"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def tables_of_anything(word: str) -> list[str]:
    """The fields of a command that are tables with values of any type."""
    return [
        name
        for name, hint in hints(word).items()
        if hint == dict[str, Any] and name != "search.space"
    ]


TEXTS = st.sampled_from(
    [
        *("0", "1", "1e-4", "007", "-1", "+1", ".5", "1_000", "0x10", "inf", "nan", "2026-01-01"),
        *("true", "True", "null", "none", "", " ", "-", "--", "[1]", "{}", "{", '"', "'", '"0"'),
        *("a b", "a=b", "a,b", "# a", "a # b", "${HOME}", "\\", "\\n", "ä", "日本語", "😀"),
    ]
) | st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]))
VALUES = st.recursive(
    TEXTS | st.integers(-(2**53), 2**53) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


def toml(value: Any) -> str:
    """A value as TOML has it: as JSON, but for tables."""
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.drill
@pytest.mark.parametrize("word", ALL)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(value=VALUES)
def test_an_entry_of_any_type_keeps_it_however_it_is_written_and_as_it_is_printed(
    word: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, again = tmp_path / "spelled.toml", tmp_path / "again.toml"
    for name in tables_of_anything(word):
        section, _, field = name.rpartition(".")
        head = f"[{section}]\n" if section else ""
        file.write_text(f"{head}{field} = {{key = {toml(value)}}}\n", encoding="utf-8")
        ways = [
            ["--config", str(file)],
            [f"--{name}={json.dumps({'key': value})}"],
            [f"--{name}={{key = {toml(value)}}}"],
            [f"--{name}.key={toml(value)}"],
        ]
        for way in ways:
            config = parse(word, [*complete(word), *way])
            assert held(config, name) == {"key": value}
            assert json.dumps(held(config, name)) == json.dumps({"key": value})  # 1, 1.0, true
            assert type(held(config, name)["key"]) is type(value)
            again.write_text(printed(word, [*complete(word), *way], capsys), encoding="utf-8")
            assert parse(word, ["--config", str(again)]) == config


def test_a_field_that_is_text_takes_any_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, again = tmp_path / "spelled.toml", tmp_path / "again.toml"
    for text in ("0", "1e-4", "true", "a b", '"quoted"', "[1]"):
        file.write_text(f"experiment = {toml(text)}\n[train]\nsource = {toml(text)}\n")
        line = [*complete("finetune"), "--config", str(file)]
        config = parse("finetune", line)
        assert (config.experiment, config.train.source) == (text, text)
        assert {type(config.experiment), type(config.train.source)} == {str}
        again.write_text(printed("finetune", line, capsys), encoding="utf-8")
        assert parse("finetune", ["--config", str(again)]) == config


def test_unquoted_values_are_numbers_or_booleans_where_any_type_fits() -> None:
    def option(text: str) -> Any:
        return parse("finetune", [*complete("finetune"), "--options.a", text]).options["a"]

    assert (option("0"), option("1e-4"), option("true"), option("a b")) == (0, 1e-4, True, "a b")


def test_a_value_may_have_several_lines_and_a_file_may_begin_with_a_section(tmp_path: Path) -> None:
    lines = '{\n  "a": "0",\n  "b": [1]\n}'
    config = parse("finetune", [*complete("finetune"), "--options", lines])
    assert config.options == {"a": "0", "b": [1]}
    file = tmp_path / "sections.toml"
    file.write_text('[train]\nsource = "rows.csv"\n[options]\na = "0"\n')
    config = parse("finetune", [*complete("finetune"), "--config", str(file)])
    assert (config.train.source, config.options) == ("rows.csv", {"a": "0"})


@pytest.mark.parametrize(
    ("line", "seeds"),
    [
        ("0,1,2", (0, 1, 2)),
        ("[0,1,2]", (0, 1, 2)),
        ("[0, 1]", (0, 1)),
        ("0, 1", (0, 1)),
        ("3", (3,)),
    ],
)
def test_numbers_are_listed_with_brackets_or_without(line: str, seeds: tuple[int, ...]) -> None:
    for way in (["--seeds", line], [f"--seeds={line}"]):
        assert parse("finetune", [*complete("finetune"), *way]).seeds == seeds


def wrong(hint: Any) -> list[str]:
    """Texts that a field does not take."""
    kinds = alternatives(hint)
    if str in kinds:
        return []  # takes any
    if any(get_origin(kind) is dict for kind in kinds):
        return ["abc", "[[]]", "1"]
    if any(kind in (int, float) for kind in kinds):
        return ["abc", "[[]]", '{"x": 1}', "1.5.2"]
    return ["[[]]", '{"x": 1}', "a b c"]


@pytest.mark.parametrize("word", ALL)
def test_a_value_of_the_wrong_type_is_reported_in_one_line_that_names_the_field(word: str) -> None:
    unclear = []
    for name, hint in hints(word).items():
        for text in wrong(hint):
            said = message(word, [*complete(word), f"--{name}={text}"])
            got = "got" in said or "there is none with that name" in said
            if not (said.startswith(name) and ": wanted" in said and got) or INTERNALS.search(said):
                unclear.append(f"--{name}={text}: {said or 'taken'}")
    assert unclear == []


@pytest.mark.parametrize("word", ALL)
def test_a_field_without_a_value_is_reported(word: str) -> None:
    unclear = []
    for name, hint in hints(word).items():
        if hint is not bool:
            said = message(word, [*complete(word), f"--{name}"])
            is_told = re.match(rf"{re.escape(name)}: wanted .*, got nothing", said)
            if not is_told or INTERNALS.search(said):
                unclear.append(f"--{name}: {said or 'taken'}")
    assert unclear == []


@pytest.mark.parametrize("word", [word for word in NEEDED if word != "glue"])
def test_fields_that_must_be_given_are_named_all(word: str) -> None:
    said = message(word, [])
    assert ": wanted a value, got none" in said
    names = said.partition(":")[0].split(", ")
    assert {f"--{name}" for name in names} <= {*complete(word)}
    assert not INTERNALS.search(said)


def test_a_missing_setting_of_the_extraction_model_is_named() -> None:
    line = ["--output", "out", "--source", "a.txt", "--tagger.model", "models:/tok@champion"]
    assert message("extract", line).startswith("tagger.fields: wanted a value, got none")


def test_an_unknown_field_of_a_table_is_reported() -> None:
    said = message("finetune", [*complete("finetune"), '--held_out={"sorce": "x"}'])
    assert said.startswith("held_out.sorce: wanted a field")
    assert not INTERNALS.search(said)


@pytest.mark.parametrize(
    ("option", "field"),
    [("--max-length", "max_length"), ("--train.rows-per-class", "rows_per_class")],
)
def test_an_option_with_hyphens_is_quoted_as_written_with_the_field_for_it(
    option: str, field: str
) -> None:
    said = message("finetune", [*complete("finetune"), option, "64"])
    assert said.startswith(f"{option.removeprefix('--')}: wanted a field of this command")
    assert f"(did you mean {field}?)" in said


def test_a_config_that_comes_with_raybert_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    there = ["--config", "configs/vocab/docstrings.toml"]
    assert parse("vocab", there).vocab_size == 4000
    (tmp_path / "configs/vocab").mkdir(parents=True)
    (tmp_path / "configs/vocab/docstrings.toml").write_text('output = "mine"\n')
    assert parse("vocab", there).output == "mine"
