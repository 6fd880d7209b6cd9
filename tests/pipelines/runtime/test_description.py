"""What MLflow shows of a stage's run besides its figures."""

import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bert_core.errors import CorpusError, ResourceError
from bert_core.manifest import read_manifest
from pipelines import evaluate, finetune, prepare, publish
from pipelines.commands import report
from pipelines.commands.report import ReportConfig
from pipelines.configure import CONFIGS, STAGES, parse
from pipelines.corpus.labelled import LabelledConfig
from pipelines.evaluate import EvaluateConfig
from pipelines.publish import PublishConfig
from pipelines.runtime.description import (
    CARD_OF_DATA,
    add_link,
    card_pages,
    cards_behind,
    described,
    failure,
    folded,
    recorded_run,
    run_name,
)
from pipelines.runtime.result import Result
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import StageConfig, determining_fields
from pipelines.runtime.stage_run import stage_command
from pipelines.search import SearchCounts
from tests.fault_proxy import fault_proxy, xml_error
from tests.web_server import WebServer
from tracking.runs.recorder import TAG_CHARACTERS, DatasetInput
from tracking.runs.spool import Run, Spool
from tracking.store.page import NOTE, RESULT
from tracking.store.server import connect

NOTHING = SearchCounts(queries=0, rows=0)
SHIPPED = sorted(path for word in STAGES for path in (CONFIGS / word).glob("*.toml"))


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("runs/quickstart/pretrain", "pretrain quickstart"),
        ("runs/wiki-base", "pretrain wiki-base"),
        ("/data/me/wiki/base", "pretrain wiki/base"),
        ("s3://bucket/wiki-base/pretrain", "pretrain wiki-base"),
        ("runs/pretrain", "pretrain"),
        ("runs/wiki/tune/trials/003", "trial 003 of wiki"),
        ("s3://bucket/a/sweep/trials/012", "trial 012 of a/sweep"),
        ("runs/trials/books", "pretrain trials/books"),
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


def test_a_command_that_was_cut_within_quotes_is_shown_as_it_is() -> None:
    command = 'raybert prepare --corpus.source \'["a.txt", …'
    assert folded(command) == command


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("https://me:pw@host/a.txt?k=s", "https://host/a.txt"),
        ('["s3://id:key@bucket/a", "https://host/b?k=s"]', '["s3://bucket/a", "https://host/b"]'),
        ("s3://id:a/b+c@bucket/a", "s3://bucket/a"),
        ("http://me:p@ss@host/a@b.txt", "http://host/a@b.txt"),
        ("http://host:8080/a@b.txt", "http://host:8080/a@b.txt"),
        ("http://[::1]:8080/a@b.txt", "http://[::1]:8080/a@b.txt"),
        ("s3://bucket/a@b:c.txt", "s3://bucket/a@b:c.txt"),
        ("texts/part-?.txt", "texts/part-?.txt"),
        (
            '["abfss://c@account.dfs.core.windows.net/a", "az://c@a/b", "ABFS://c@a/b"]',
            '["abfss://c@account.dfs.core.windows.net/a", "az://c@a/b", "ABFS://c@a/b"]',
        ),
    ],
)
def test_a_secret_in_an_address_is_in_no_command(source: str, told: str) -> None:
    config = parse("vocab", ["--output", "runs/v", "--corpus.source", source])
    assert shlex.split(stage_command("vocab", config))[-1] == told


def test_a_secret_in_the_address_of_data_is_written_nowhere(
    finetuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither into outputs nor into MLflow, whose store is among the files here."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    site = web.Application()
    site.router.add_static("/", finetuned.folder)
    shared: dict[str, Any] = {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db", "num_workers": 0}
    with WebServer(site) as server:
        text, rows = (
            f"{server.url}/{name}?X-Amz-Signature=s3cret" for name in ("text.txt", "rows.jsonl")
        )
        corpus = replace(finetuned.corpus, source=text)
        prepare.run(replace(finetuned.prepare(tmp_path / "shards"), corpus=corpus, **shared))
        labelled = LabelledConfig(source=rows)
        tuned = replace(finetuned.finetune(tmp_path / "tuned"), train=labelled, held_out=labelled)
        finetune.run(replace(tuned, seeds=(0,), epochs=0.25, **shared))
        evaluate.run(
            EvaluateConfig(
                output=str(tmp_path / "scores"), model=tuned.output, held_out=labelled, **shared
            )
        )
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"mlflow.db", "data_card.md", "raybert.json"} <= {path.name for path in found}
    assert [path for path in found if b"s3cret" in path.read_bytes()] == []


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
    assert card_pages(run, CARD_OF_DATA) == {"the data card": card}
    assert card_pages(unknown, CARD_OF_DATA) == card_pages(run, {}) == card_pages(None, {}) == {}


def test_every_run_leads_to_its_cards_and_its_report(finetuned: Any, tmp_path: Path) -> None:
    made, uri = finetuned.folder, finetuned.tracking_uri
    shared: dict[str, Any] = {"num_workers": 0, "tracking_uri": uri}
    model, scores = str(made / "finetune" / "bundle"), str(tmp_path / "scores")
    evaluate.run(EvaluateConfig(output=scores, model=model, held_out=finetuned.rows, **shared))
    published = PublishConfig(
        output=str(tmp_path / "published"), model=model, evaluation=scores, name="a b", **shared
    )
    publish.run(published)
    page = str(tmp_path / "report.html")
    report.run(
        ReportConfig(
            runs=(str(made / "pretrain"), scores), output=page, attach=True, tracking_uri=uri
        )
    )
    client = connect(uri)
    outputs = [made / name for name in ("vocab", "shards", "pretrain", "finetune")]
    runs = {each.name: recorded_run(str(each)) for each in (*outputs, Path(scores))}
    runs["published"] = recorded_run(published.output)
    notes, pages = {}, {}
    for name, run in runs.items():
        assert run is not None
        assert run.run_id is not None
        notes[name] = client.get_run(run.run_id).data.tags[NOTE]
        pages[name] = f"#/experiments/{run.experiment_id}/runs/{run.run_id}"
    training = "?workflowType=machine_learning"
    cards = {
        "the vocabulary card": f"{pages['vocab']}/artifacts/vocabulary_card.md{training}",
        "the data card": f"{pages['shards']}/artifacts/data_card.md{training}",
        "the model card": f"#/models/a%20b/versions/1{training}",
        "the report": f"{pages['scores']}/artifacts/report.html{training}",
    }
    links = {
        name: dict(re.findall(r"\[([^]]+)\]\(([^)]+)\)", note)) for name, note in notes.items()
    }
    linked = {
        name: [title for title, page in cards.items() if found.get(title) == page]
        for name, found in links.items()
    }
    vocabulary, data, of_model, of_run = cards
    assert linked == {
        "vocab": [vocabulary],
        "shards": [vocabulary, data],
        "pretrain": [vocabulary, data, of_run],
        "finetune": [vocabulary, data, of_model],
        "scores": [*cards],
        "published": [vocabulary, data, of_model],
    }
    assert f"{pages['finetune']}{training}" in links["scores"].values()
    assert all("\n\n```bash\nraybert " in note for note in notes.values())
    [scored] = [each for each in (runs["scores"],) if each is not None]
    attached = client.download_artifacts(str(scored.run_id), "report.html", str(tmp_path))
    assert Path(attached).read_bytes() == Path(page).read_bytes()


def note_of(
    stage: str,
    config: StageConfig,
    *inputs: DatasetInput,
    work: Callable[[str], Result] = lambda _: Result(outputs={}, counts=NOTHING),
) -> str:
    """Runs a stage; returns the description of its run."""
    run_stage(stage, config, inputs, work)
    run = recorded_run(config.output)
    assert run is not None
    return connect(str(config.tracking_uri)).get_run(str(run.run_id)).data.tags[NOTE]


def taken(name: str, config: StageConfig) -> DatasetInput:
    """The output of a stage as an input."""
    return DatasetInput(name, read_manifest(config.output).digest, config.output)


def test_the_card_of_remade_data_is_not_attached_to_the_run(small: Any, tmp_path: Path) -> None:
    shards, encoder, tuned = (
        StageConfig(output=str(tmp_path / name), tracking_uri=small.tracking_uri)
        for name in ("shards", "encoder", "tuned")
    )
    note_of("prepare", shards, DatasetInput("corpus", "as it was", "a.txt"))
    note_of("pretrain", encoder, taken("shards", shards))
    note = note_of("finetune", tuned, taken("model", encoder))
    assert "[the data card]" in note
    again = replace(shards, force=True)
    note_of("prepare", again, DatasetInput("corpus", "newer", "a.txt"))
    note = note_of("finetune", replace(tuned, force=True), taken("model", encoder))
    assert "[the data card]" not in note
    note = note_of("pretrain", replace(encoder, force=True), taken("shards", shards))
    newer = recorded_run(shards.output)
    assert newer is not None
    assert f"[the data card](#/experiments/{newer.experiment_id}/runs/{newer.run_id}/" in note


def test_a_runs_inputs_may_disappear_while_it_runs(small: Any, tmp_path: Path) -> None:
    shards, encoder = (
        StageConfig(output=str(tmp_path / name), tracking_uri=small.tracking_uri)
        for name in ("shards", "encoder")
    )
    note_of("prepare", shards, DatasetInput("corpus", "d", "a.txt"))

    def work(digest: str) -> Result:
        shutil.rmtree(shards.output)
        return Result(outputs={}, counts=NOTHING)

    note = note_of("pretrain", encoder, taken("shards", shards), work=work)
    assert "Made from shards [prepare " in note
    assert "[the data card]" in note


def test_storage_that_refuses_us_is_asked_once_in_a_process(
    object_store: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, uri = f"{object_store}/out/bundle", "sqlite:///x.db"
    with fault_proxy(s3_endpoint) as proxy:
        proxy.refuse = lambda signed_by: (403, xml_error("AccessDenied", "Access Denied"))
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        assert cards_behind([source], uri) == {}
        requests = len(proxy.seen)
        assert requests
        told = described("raybert x", "o", [DatasetInput("model", "0" * 40, source)], uri)
        assert f"Made from model `{source}` (000000000000)." in told[NOTE]
        assert cards_behind([source], uri) == {}
        assert len(proxy.seen) == requests


def test_a_link_is_added_to_a_description_that_is_as_long_as_mlflow_takes(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRUNCATE_LONG_VALUES", "false")
    config = StageConfig(output=str(tmp_path / "out"), tracking_uri=small.tracking_uri)
    note_of("pretrain", config)
    run, client = recorded_run(config.output), connect(small.tracking_uri)
    assert run is not None
    run_id = str(run.run_id)
    client.set_tag(run_id, NOTE, "**good**\n\n```bash\n".ljust(TAG_CHARACTERS, "x"))
    add_link(client, run_id, "the report", "#/r")
    note = client.get_run(run_id).data.tags[NOTE]
    assert note.startswith("**good**\n\nSee [the report](#/r).\n\n```bash\nxxx")
    assert len(note) == TAG_CHARACTERS


def test_a_registered_model_leads_to_its_card() -> None:
    page = "#/models/wiki{}?workflowType=machine_learning"
    for reference, version in (("models:/wiki@champion", ""), ("models:/wiki/3", "/versions/3")):
        link = page.format(version)
        assert cards_behind([reference], "sqlite:///x.db") == {"the model card": link}
        told = described(
            "raybert x", "o", [DatasetInput("model", "0", reference)], "sqlite:///x.db"
        )
        assert f"Made from model [{reference}]({link})." in told[NOTE]


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
