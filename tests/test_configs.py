"""Every config that is shipped loads, and what `--print_config` shows runs again as is."""

from pathlib import Path

import pytest

from bert_core.errors import ConfigError
from pipelines.configure import ALL, STAGES, parse, parser_for

CONFIGS = Path(__file__).parents[1] / "configs"
SHIPPED = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.toml"))


def printed(capsys: pytest.CaptureFixture[str], word: str, arguments: list[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(word, [*arguments, "--print_config"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("word", sorted({Path(name).parts[0] for name in SHIPPED}))
def test_shipped_configs_load_and_print_as_ones_that_mean_the_same(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {}
    for name in (name for name in SHIPPED if Path(name).parts[0] == word):
        arguments = ["--config", str(CONFIGS / name)]
        resolved = tmp_path / "resolved.toml"
        try:
            config = parse(word, arguments)
            resolved.write_text(printed(capsys, word, arguments))
            again = parse(word, ["--config", str(resolved)])
        except ConfigError as error:
            wrong[name] = str(error)
        else:
            if again != config:
                wrong[name] = f"{config} is printed as one that means {again}"
    assert wrong == {}


def test_every_stage_has_a_config_to_start_from() -> None:
    assert {Path(name).parts[0] for name in SHIPPED} >= STAGES.keys()
    assert {Path(name).parts[0] for name in SHIPPED} <= ALL.keys()


@pytest.mark.parametrize("word", ALL)
def test_every_field_of_a_config_says_what_it_is(word: str) -> None:
    options = parser_for(word)._actions
    assert [option.dest for option in options if not (option.help or "").strip()] == []
