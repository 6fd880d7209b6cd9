"""The command line is instant, and says what was wanted when it is misused."""

import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest

from bert_core.errors import ConfigError
from bert_core.files import write_bytes
from bert_core.manifest import Manifest, write_manifest
from pipelines import cli
from pipelines.commands.listing import Listed
from pipelines.configure import ALL, parse
from pipelines.runtime.code_version import code_version

PREPARE = ["--output", "out", "--tokenizer", "vocab"]


def test_help_takes_under_half_a_second_and_imports_neither_torch_nor_ray() -> None:
    code = """
import sys
from pipelines.cli import main
main(["--help"])
assert not {"torch", "ray", "mlflow", "pyarrow", "numpy"} & set(sys.modules), sorted(sys.modules)
"""
    times: list[float] = []
    while len(times) < 3 and min(times, default=1) > 0.5:  # the machine may be busy
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        times.append(time.perf_counter() - began)
        assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ALL)
    assert min(times) < 0.5


def test_errors_of_a_command_come_without_torch_and_ray() -> None:
    code = """
import sys
from pipelines.cli import main
for word in sys.argv[1:]:
    try:
        main([word, "--no_such_field", "1"])
    except SystemExit as ended:
        assert ended.code == 2, word
    else:
        raise AssertionError(word)
    assert not {"torch", "ray", "mlflow"} & set(sys.modules), word
"""
    words = ["vocab", "prepare", "pretrain", "finetune", "evaluate", "serve"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no_such_field: wanted a field of this command") == len(words)


def test_an_unknown_key_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pairs.max_lenght: .* \(did you mean pairs.max_length"):
        parse("prepare", [*PREPARE, "--pairs.max_lenght", "3"])
    (tmp_path / "typo.toml").write_text("shard_byts = 3\n")
    with pytest.raises(ConfigError, match=r"shard_byts: .* \(did you mean shard_bytes\?\)"):
        parse("prepare", [*PREPARE, "--config", str(tmp_path / "typo.toml")])


def test_a_value_out_of_range_or_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="dupe_factor: wanted at least 1, got 0"):
        parse("prepare", [*PREPARE, "--pairs.dupe_factor", "0"])
    with pytest.raises(ConfigError, match="seed: wanted a whole number, got three"):
        parse("prepare", [*PREPARE, "--seed", "three"])


def test_the_command_line_wins_over_the_config_whatever_comes_first(tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_text("seed = 1\n[pairs]\nmax_length = 32\n")
    for order in (0, 1):
        options = [["--config", str(tmp_path / "some.toml")], ["--seed", "7"]]
        config = parse("prepare", [*PREPARE, *options[order], *options[1 - order]])
        assert (config.seed, config.pairs.max_length) == (7, 32)


def test_a_missing_config_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"configs/prepare/docstrngs.toml.*did you mean configs/"):
        parse("prepare", ["--config", "configs/prepare/docstrngs.toml"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed = 1\noutput = runs/mine\n", r"at line 2, column 10\)\): text is in quotes, as in"),
        ("[pairs\nmax_length = 1\n", r"Expected ']' at the end of a table declaration"),
    ],
)
def test_a_config_that_is_not_toml_is_named_with_the_place(
    tmp_path: Path, text: str, told: str
) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"--config: wanted TOML in {path}, .*{told}"):
        parse("prepare", [*PREPARE, "--config", str(path)])


def test_a_value_in_place_of_a_table_of_fields_is_answered_with_the_right_form() -> None:
    with pytest.raises(ConfigError, match=r"got rows.csv: give them as --train.source …$"):
        parse("finetune", ["--output", "out", "--model", "bundle", "--train", "rows.csv"])


@pytest.mark.parametrize("value", ["3", "true", "[]", '"x"'])
def test_a_value_in_place_of_a_table_in_a_file_is_answered_with_the_right_form(
    tmp_path: Path, value: str
) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f"masking = {value}\n")
    message = (
        r"^masking: wanted a table of its fields \(strategy, .*: give them as --masking\.strat"
    )
    with pytest.raises(ConfigError, match=message):
        parse("prepare", [*PREPARE, "--config", str(path)])


def test_a_wrong_value_in_a_table_on_the_command_line_is_answered_with_its_field() -> None:
    arguments = ["--output", "out", "--shards", "shards", "--optimizer", "{name = [1]}"]
    with pytest.raises(ConfigError, match=r"^optimizer\.name: wanted one of adamw, .*, got \[1\]$"):
        parse("pretrain", arguments)


def test_a_switch_needs_no_value() -> None:
    assert parse("prepare", [*PREPARE, "--force"]).force
    assert parse("prepare", ["--force", *PREPARE]).force
    assert not parse("prepare", [*PREPARE, "--force", "false"]).force


@pytest.mark.parametrize(
    "columns", ['{text = "a b", "label" = \'c\'}', ' {"text": "a b", "label": "c"} ']
)
def test_a_table_of_fields_is_written_as_toml_or_json_has_it(columns: str) -> None:
    arguments = ["--output", "out", "--model", "bundle", "--train.columns", columns]
    config = parse("finetune", [*arguments, "--options", "{multi_label = true}"])
    assert config.train.columns == {"text": "a b", "label": "c"}
    assert config.options == {"multi_label": True}
    with pytest.raises(ConfigError, match="columns"):
        parse("finetune", [*arguments, "--train.columns", "{text = }"])


def test_several_sources_come_as_a_list() -> None:
    config = parse("prepare", [*PREPARE, "--corpus.source", '["a.txt", "b/*.jsonl"]'])
    assert config.corpus.sources == ("a.txt", "b/*.jsonl")


def test_the_version_is_that_of_every_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--version"])
    assert capsys.readouterr().out == f"raybert {code_version()}\n"
    assert version("raybert") in code_version()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["prepar"], 2, "did you mean prepare?"),
        (["prepare"], 2, "output, tokenizer: wanted a value, got none"),
        (
            ["publish", *("--output=o", "--model=m", "--evaluation=e", "--name=team/pairs")],
            2,
            "name: wanted one without / : @ . % and quotes",
        ),
        (["vocab", "--output=o", "--experiment="], 2, "experiment: wanted the name of an MLflow"),
        (["vocab", "--output", "o", "--corpus.source", "nowhere"], 1, "nowhere: wanted a file"),
        # Before the corpus is read.
        (["prepare", *PREPARE, "--tokenizer", "./vocab"], 1, "vocab: wanted tokenizer.json"),
    ],
)
def test_misuse_ends_with_a_message_and_no_traceback(
    arguments: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == code
    assert message in capsys.readouterr().err


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["list", *arguments])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_list_alone_shows_what_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    words = [line.split()[0] for line in listed(capsys).splitlines()[1:]]
    assert words == list(get_args(Listed))


def test_one_task_is_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    told = listed(capsys, "tasks", "text-ranking")
    assert told.startswith("text-ranking: ")
    assert "text-classification: " not in told
    for arguments, message in (
        (["tasks", "text-rank"], "(did you mean text-ranking?)"),
        (["runs", "text-ranking"], "task: wanted `list tasks` with it, got `list runs`"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["list", *arguments])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("what", ["variants", "formats", "configs"])
def test_lists_written_to_a_pipe_are_complete(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = listed(capsys, what).splitlines()
    assert not any("…" in line for line in lines)
    assert max(map(len, lines)) > 80
    if what == "configs":
        purposes = [line for line in lines if not line.startswith("    raybert ")]
        assert [one for one in purposes if one[-1] not in ".?!" and "http" not in one] == []


def test_copies_of_mlflow_and_files_of_others_are_no_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = Manifest(stage="vocab", digest="d" * 64, config={})
    for folder in ("runs/vocab", "runs/mlartifacts/0123/artifacts"):
        write_manifest(f"{tmp_path}/{folder}", manifest)
    write_bytes(f"{tmp_path}/runs/extension/manifest.json", b'{"name": "of a browser"}')
    passed_over, _, *rows = listed(capsys, "runs", f"--folder={tmp_path}/runs").splitlines()
    assert passed_over.startswith(f"list: passed over {tmp_path}/runs/extension: ")
    assert [row.split()[0] for row in rows] == [f"{tmp_path}/runs/vocab"]


@pytest.mark.parametrize("what", ["variants", "tasks", "configs", "runs"])
def test_list_shows_what_exists(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["list", what])
    assert ended.value.code == 0
    wanted = {"variants": "bert-base", "tasks": "text-classification", "configs": "pretrain"}
    assert wanted.get(what, "folder") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        (["vocab", "--output", "out", "--corpus.source", "a.txt"], "torch", "train"),
        (["vocab", "--output", "out", "--corpus.source", "a.txt"], "datasketch", "train"),
        (["serve", "--models", "a=b"], "fastapi_offline", "serve"),
        (["quickstart"], "sklearn", "quickstart"),
    ],
)
def test_a_command_whose_extra_is_missing_says_so_before_it_begins(
    arguments: list[str],
    module: str,
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 1
    told = capsys.readouterr().err
    assert told.startswith(f"raybert {arguments[0]}: wanted {module}, which is not installed: run ")
    assert f"constraints.txt '.[{extra}]'` in raybert's checkout" in told
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit) as exit_:
        cli.main([*arguments, "--help"])
    assert exit_.value.code == 0


def test_a_command_that_needs_an_extra_during_its_run_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: object) -> None:
        import torch  # noqa: F401

    monkeypatch.setattr("pipelines.commands.listing.run", run)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit):
        cli.main(["list"])
    told = capsys.readouterr().err
    assert told.startswith("raybert list: wanted torch, which is not installed: run `pip install")


def test_a_missing_module_that_no_extra_provides_is_our_bug(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(_: object) -> None:
        import nowhere  # noqa: F401

    monkeypatch.setattr("pipelines.commands.listing.run", run)
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        cli.main(["list"])
