"""Every config that is shipped loads, and what `--print_config` shows runs again as is."""

from pathlib import Path

import pytest

from pipelines.configure import ALL, STAGES, parse, parser_for

CONFIGS = Path(__file__).parents[1] / "configs"
SHIPPED = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.toml"))


def printed(capsys: pytest.CaptureFixture[str], word: str, arguments: list[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(word, [*arguments, "--print_config"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_loads_and_prints_as_one_that_means_the_same(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    word = Path(name).parts[0]
    arguments = ["--config", str(CONFIGS / name)]
    config = parse(word, arguments)
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(printed(capsys, word, arguments))
    assert parse(word, ["--config", str(resolved)]) == config


def test_every_stage_has_a_config_to_start_from() -> None:
    assert {Path(name).parts[0] for name in SHIPPED} >= STAGES.keys()
    assert {Path(name).parts[0] for name in SHIPPED} <= ALL.keys()


@pytest.mark.parametrize("word", ALL)
def test_every_field_of_a_config_says_what_it_is(word: str) -> None:
    options = parser_for(word)._actions
    assert [option.dest for option in options if not (option.help or "").strip()] == []
