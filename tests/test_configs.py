"""Every config that is shipped loads, and what `--print_config` shows runs again as is."""

import re
from pathlib import Path

import pytest

from bert_core.errors import ConfigError
from bert_core.metrics.glue import SCORED_TASKS
from pipelines.configure import ALL, STAGES, parse, parser_for, purpose_of

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


def test_configs_of_the_sets_of_berts_paper_name_its_figures_and_where_they_stand() -> None:
    sets = {f"glue_{name}" for name in SCORED_TASKS}
    sets |= {"squad_bert", "squad2_bert", "conll2003", "swag", "goemotions"}
    for name in sets:
        said = purpose_of(CONFIGS / "finetune" / f"{name}.toml")
        figures = re.findall(r"\b\d\d\.\d\b", said)
        of_base_alone = name in ("glue_wnli", "squad2_bert", "goemotions")
        assert len(figures) >= (1 if of_base_alone else 2), said
        source = r"Demszky" if name == "goemotions" else "Devlin"
        year = r"et al\. (2019, (table [1-7]|section 4\.1)|2020, table 4)"
        assert re.search(rf"\({source} {year}\)\.$", said), said


def test_a_submission_to_glue_takes_what_the_configs_of_its_sets_write() -> None:
    models = parse("glue", ["--config", str(CONFIGS / "glue/submission.toml")]).models
    for name, model in models.items():
        config = parse("finetune", ["--config", str(CONFIGS / f"finetune/glue_{name}.toml")])
        assert model == f"{config.output}/bundle"
