"""What MLflow shows of a stage's run besides its figures."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from bert_core.errors import CorpusError, ResourceError
from pipelines.configure import CONFIGS, STAGES, parse
from pipelines.publish import PublishConfig
from pipelines.runtime.description import card_links, described, failure, folded, run_name
from pipelines.runtime.stage import determining_fields, stage_command
from tracking.page import NOTE, RESULT
from tracking.runs import DatasetInput
from tracking.spool import Run, Spool

SHIPPED = sorted(path for word in STAGES for path in (CONFIGS / word).glob("*.toml"))


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("runs/quickstart/pretrain", "pretrain quickstart"),
        ("runs/wiki-base", "pretrain wiki-base"),
        ("/data/me/wiki/base", "pretrain wiki/base"),
        ("s3://bucket/wiki-base/pretrain", "pretrain wiki-base"),
        ("runs/pretrain", "pretrain"),
        ("runs/sweep/trials/003", "pretrain sweep/003"),
    ],
)
def test_a_run_is_named_after_its_folder(output: str, name: str) -> None:
    assert run_name("pretrain", output) == name


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_command_makes_the_same_output(path: Path) -> None:
    word = path.parent.name
    config = parse(word, ["--config", str(path)])
    line = shlex.split(stage_command(word, config))
    again = parse(word, line[2:])
    assert line[:2] == ["raybert", word]
    shell = folded(shlex.join(line)).replace("\\\n", "")  # as a shell joins lines
    assert shlex.split(shell) == line
    assert (again.output, determining_fields(again)) == (config.output, determining_fields(config))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("https://me:pw@host/a.txt?k=s", "https://host/a.txt"),
        ('["s3://id:key@bucket/a", "https://host/b?k=s"]', '["s3://bucket/a", "https://host/b"]'),
        ("texts/part-?.txt", "texts/part-?.txt"),
    ],
)
def test_a_secret_in_an_address_is_in_no_command(source: str, told: str) -> None:
    config = parse("vocab", ["--output", "runs/v", "--corpus.source", source])
    assert shlex.split(stage_command("vocab", config))[-1] == told


def test_a_description_leads_to_what_a_run_was_made_from(tmp_path: Path) -> None:
    here = "sqlite:///here.db"
    made = Run(tracking_uri=here, experiment="e", run_name="pretrain wiki")
    spool = Spool(tmp_path / "wiki", made)
    spool.belongs_to("7", "abc")
    spool.close()
    inputs = [
        DatasetInput("model", "0" * 40, str(tmp_path / "wiki" / "bundle")),
        DatasetInput("train", "1" * 40, "https://host/rows.jsonl?token=s"),
    ]
    told = described(
        "raybert x --n 1", "runs/x", inputs, here, result="good", links={"card": "#/models/m"}
    )
    assert told[RESULT] == "good"
    assert "```bash\nraybert x \\\n  --n 1\n```" in told[NOTE]
    assert (
        "model [pretrain wiki](#/experiments/7/runs/abc?workflowType=machine_learning), "
        "train `https://host/rows.jsonl` (111111111111)" in told[NOTE]
    )
    assert "[card](#/models/m)" in told[NOTE]
    elsewhere = described("raybert x", "runs/x", inputs, "sqlite:///there.db")
    assert "#/experiments/" not in elsewhere[NOTE]
    assert elsewhere[RESULT] == ""


def test_a_card_is_one_click_away_once_mlflow_has_answered() -> None:
    unknown = Run(tracking_uri="sqlite:///x.db", experiment="e", run_name="prepare wiki")
    run = replace(unknown, experiment_id="7", run_id="abc")
    card = "#/experiments/7/runs/abc/artifacts/data_card.md?workflowType=machine_learning"
    assert card_links("prepare", run, None, {}) == {"the data card": card}
    model = "#/models/wiki/versions/3?workflowType=machine_learning"
    config = PublishConfig(output="o", model="m", evaluation="e", name="wiki")
    assert card_links("publish", run, config, {"version": "3"}) == {"the model card": model}
    assert card_links("prepare", unknown, None, {}) == card_links("pretrain", run, None, {}) == {}


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (CorpusError("a.csv: wanted a column"), "failed: a.csv: wanted a column"),
        (ValueError("no\nmore"), "failed: ValueError: no"),
        (ResourceError("https://me:pw@host/a.csv is away"), "failed: https://host/a.csv is away"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_a_run_without_a_result_says_why(error: BaseException, told: str) -> None:
    assert failure(error) == told
