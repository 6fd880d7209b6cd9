"""A report holds all that it shows, of folders and of what only MLflow has left."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_core.errors import ConfigError, ResourceError
from bert_core.manifest import Manifest, Output, read_manifest, write_manifest
from pipelines import evaluate
from pipelines.cli import main
from pipelines.commands import report_runs
from pipelines.commands.drawing import Box, Line, chart, flow, wrapped
from pipelines.commands.report import ReportConfig, run, summary, write_report
from pipelines.commands.report_runs import links, runs_of, with_ancestors
from pipelines.evaluate import EvaluateConfig, EvaluateCounts
from pipelines.prepare import PrepareCounts
from pipelines.pretrain import PretrainCounts
from pipelines.runtime.result import Counts, Result
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import StageConfig
from pipelines.search import SearchCounts
from pipelines.training.seeds import SeedsCounts
from tests.fault_proxy import fault_proxy, xml_error
from tracking.runs.goodput import Goodput
from tracking.runs.recorder import DatasetInput, RunRecorder
from tracking.runs.spool import read_run
from tracking.store.server import connect

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests import pages

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360"
    "606060000000050001a5f645400000000049454e44ae426082"
)
NASTY = "<script>alert(1)</script> =========== & more"
SEPARATED = "before\u2028after\x85that"  # which ends no line of JSON
LABELS = ("ham", "spam")
STEPS = 4


def add(folder: Path, manifest: Manifest, started: dict[str, Any] | None = None) -> str:
    """A finished run, as its stage leaves it."""
    folder.mkdir(parents=True)
    note = {"stage": manifest.stage, "digest": manifest.digest} | (started or {})
    (folder / "started.json").write_text(json.dumps(note))
    write_manifest(str(folder), manifest)
    return str(folder)


def words_of(counts: Counts) -> dict[str, Any]:
    """The entries of a manifest that come from the counts."""
    said = {name: getattr(counts, name) for name in ("line", "sentence", "headline")}
    return said | {"counts": counts.entries()}


def shards(folder: Path, digest: str = "d-shards") -> str:
    counts = PrepareCounts(
        source="corpus", read={}, written={}, documents=9, tokens=7_400_000, rows=143,
        corpus_bytes=1, peak_memory_bytes=1, tokenizer_digest="d", vocab_size=1, max_length=64,
        layout={},
    )  # fmt: skip
    manifest = Manifest(stage="prepare", digest=digest, config={}, **words_of(counts))
    place = add(folder, manifest)
    (folder / "data_card.md").write_text(
        "# Card\n\n| a <b> | 1 |\n|---|---|\n\n![l](l.png)\n\n##### Deep\n"
    )
    (folder / "l.png").write_bytes(PIXEL)
    return place


def tuned(
    folder: Path,
    model: str,
    scores: tuple[float, ...],
    *,
    from_scratch: bool,
    metric: str = "accuracy",
) -> str:
    """A fine-tuning with as many seeds as scores, whose loss falls to one minus the score."""
    counts = SeedsCounts(
        remarks={},
        train_rows=64,
        held_out_rows=100,
        labels=2,
        seeds=[{"seed": seed, metric: score} for seed, score in enumerate(scores)],
        primary_metric=metric,
        means={metric: float(np.mean(scores))},
        deviations={metric: float(np.std(scores))},
        baseline={metric: 0.5},
        steps=STEPS,
        tokens_per_s=1.0,
    )
    manifest = Manifest(
        stage="finetune",
        digest=folder.name,
        config={"from_scratch": from_scratch, "lr": 1e-3},
        inputs={"shards": "d-shards"},
        **words_of(counts),
    )
    started = {"command": f"raybert finetune --output {folder}", "sources": {"shards": model}}
    place = add(folder, manifest, started)
    with (folder / "metrics.jsonl").open("w") as file:
        for seed, score in enumerate(scores):
            for step in range(1, STEPS + 1):
                metrics = {"loss": 1 - score * step / STEPS, "learning_rate": 1e-3 / step}
                line = {"step": seed * (STEPS + 2) + step, "time_ms": 0, "metrics": metrics}
                file.write(json.dumps(line) + "\n")
    return place


def evaluated(folder: Path, model: str, digest: str) -> str:
    counts = EvaluateCounts(
        source="rows.jsonl",
        rows=4,
        wrong_rows=1,
        primary_metric="accuracy",
        metrics={"accuracy": 0.75},
        intervals={"accuracy": (0.7, 0.8)},
        baseline={"accuracy": 0.5},
        remarks={},
        tokens_per_s=1.0,
    )
    manifest = Manifest(
        stage="evaluate",
        digest="d-evaluate",
        config={},
        inputs={"model": digest},
        outputs={"worst.jsonl": Output(size_bytes=1, sha256="w")},
        **words_of(counts),
    )
    place = add(folder, manifest, {"sources": {"model": model}})
    columns = {"label": ["ham", "ham", "spam", "spam"], "predicted_label": ["ham"] * 3 + ["spam"]}
    pq.write_table(pa.table({"text": ["a"] * 4, **columns}), folder / "predictions.parquet")
    (folder / "classes.json").write_text(json.dumps({label: {} for label in LABELS}))
    worst = {"row": 3, "fault": 1.0, "confidence": 0.9, "input": {"text": NASTY + SEPARATED}}
    worst |= {"wanted": {"label": "spam"}, "answer": {"label": "ham", "score": 0.9}}
    (folder / "worst.jsonl").write_text(json.dumps(worst, ensure_ascii=False) + "\n")
    return place


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Shards, two fine-tunings of what came of them, and an evaluation of the first."""
    first = shards(tmp_path / "shards")
    second = tuned(tmp_path / "tuned", first, (0.8, 0.7), from_scratch=False)
    third = tuned(tmp_path / "scratch", first, (0.6, 0.5), from_scratch=True)
    return [first, second, third, evaluated(tmp_path / "scores", second, "tuned")]


def test_a_page_needs_no_other_file_and_escapes_what_it_shows(
    folders: list[str], tmp_path: Path
) -> None:
    tried = [("A <b>question</b>", [("0.9", "an <i>answer</i>")])]
    write_report(str(tmp_path / "out" / "r.html"), runs_of(folders, None), tried=tried)
    page = (tmp_path / "out" / "r.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert re.findall(r'<img src="([^"]{22})', page) == ["data:image/png;base64,"]
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; === &amp; more" in page
    assert "A &lt;b&gt;question&lt;/b&gt;" in page
    assert "<h3>Card</h3>" in page
    assert "<h4>Deep</h4>" in page  # no level is left out


def test_it_says_what_was_learnt_and_what_is_taken_for_what(
    folders: list[str], tmp_path: Path
) -> None:
    write_report(str(tmp_path / "r.html"), runs_of(folders, None))
    page = (tmp_path / "r.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "it reaches accuracy 75.0 % ± 5.0 % over 2 seeds on 100 rows it has not seen" in page
    assert "has accuracy 55.0 %: pretraining is worth 20.0 points, standard error 0.0." in page
    assert "The most frequent error is spam predicted as ham (1 row)." in page
    assert '<td style="--s: 0.500">1</td>' in page
    assert f"<pre>raybert finetune \\\n  --output {folders[1]}</pre>" in page


def test_what_pretraining_is_worth_in_a_correlation_is_no_points(tmp_path: Path) -> None:
    places = [
        tuned(tmp_path / name, "", (0.8, 0.6), from_scratch=name == "scratch", metric="correlation")
        for name in ("tuned", "scratch")
    ]
    assert summary(runs_of(places, None))[-1] == (
        "The same from random weights has correlation 0.7: pretraining is worth 0.000, standard "
        "error 0.000."
    )


def test_runs_beside_each_other_show_the_settings_that_differ_alone(
    folders: list[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", folders[1], folders[2], "--output", str(tmp_path / "r.html")])
    assert ended.value.code == 0
    page = (tmp_path / "r.html").read_text()
    table = page.partition("<h2>Side by side</h2>")[2].partition("</section>")[0]
    assert "<code>from_scratch</code></th><td>False</td><td>True</td>" in table
    assert "<code>lr</code>" not in table
    assert '<th scope="row">accuracy mean</th><td>75.0 %</td><td>55.0 %</td>' in table.replace(
        "\N{NO-BREAK SPACE}", " "
    )


def test_runs_of_one_stage_differ_by_name_and_an_activity_has_one_colour(
    tmp_path: Path,
) -> None:
    first = shards(tmp_path / "shards")
    asked = runs_of([tuned(tmp_path / name, first, (0.8,), from_scratch=False)
                     for name in ("slow", "fast")], None)  # fmt: skip
    spent = [{"computing": 60.0, "checkpointing": 5.0, "starting": 35.0},
             {"computing": 60.0, "starting": 40.0}]  # fmt: skip
    asked = [
        replace(each, spent=Goodput(began_s=0.0, until_s=100.0, seconds=seconds))
        for each, seconds in zip(asked, spent, strict=True)
    ]
    write_report(str(tmp_path / "r.html"), asked)
    page = (tmp_path / "r.html").read_text()
    assert re.findall(r"<p>\S+/(\w+): Fine-tuned on 64", page) == ["slow", "fast"]
    assert re.findall(r'<i class="b(\d)"', page) == ["1", "2", "3", "1", "3"]


def test_seeds_lie_over_each_other(folders: list[str], tmp_path: Path) -> None:
    [found] = runs_of([folders[1]], None)
    [loss] = [curve for curve in found.curves if curve.kind == "loss"]
    assert [seed[:, 0].tolist() for seed in loss.seeds] == [[1, 2, 3, 4]] * 2
    assert loss.mean[-1].tolist() == pytest.approx([4, 1 - 0.75])
    write_report(str(tmp_path / "r.html"), [found])
    page = (tmp_path / "r.html").read_text()
    assert page.count('<path class="line faint') == 2 * 2  # seeds of two metrics


def test_a_runs_inputs_are_followed_unless_they_were_remade(tmp_path: Path) -> None:
    first = shards(tmp_path / "shards")
    second = tuned(tmp_path / "tuned", first, (0.8,), from_scratch=False)
    found = with_ancestors(runs_of([second], None))
    assert [each.place for each in found] == [first, second]
    assert links(found) == [(0, 1)]
    shutil.rmtree(first)
    shards(tmp_path / "shards", digest="another")
    assert [each.place for each in with_ancestors(runs_of([second], None))] == [second]


def test_an_arrow_implied_by_a_longer_path_is_left_out(tmp_path: Path) -> None:
    def added(name: str, *inputs: str) -> str:
        taken = {f"from_{each}": each for each in inputs}
        return add(tmp_path / name, Manifest(stage="x", digest=name, config={}, inputs=taken))

    places = [added("a"), added("b", "a"), added("c", "a", "b"), added("d", "c")]
    assert links(runs_of(places, None)) == [(0, 1), (1, 2), (2, 3)]


def test_pictures_name_themselves_and_escape() -> None:
    points = np.array([[0.0, 2.0], [10.0, 1.0]])
    drawn = chart([Line("loss", points)], "Loss <from> 2 to 1")
    assert 'role="img" aria-label="Loss &lt;from&gt; 2 to 1"' in drawn
    assert 'class="line c1 dots"' in drawn, "between two points nobody measured"
    assert re.search(r'dots" d="M[\d. ]+h\.1M[\d. ]+h\.1"', drawn)
    alone = chart([Line("loss", points[:1])], "one point")
    assert "NaN" not in alone
    boxes = [Box("vocab", ["a & b"]), Box("prepare", ["c"])]
    for upright in (False, True):
        picture = flow(boxes, [(0, 1)], upright=upright)
        assert "a &amp; b" in picture
        assert picture.count('class="arrow"') == 1
    assert wrapped("one two three", 7) == ["one two", "three"]


def test_folders_that_are_not_runs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runs: wanted at least one output of a finished stage"):
        ReportConfig()
    wanted = (
        f"runs: wanted the output of a finished stage or the id of an MLflow run, got {tmp_path}"
    )
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        run(ReportConfig(runs=(str(tmp_path),)))


def test_a_run_is_found_by_its_id_and_shown_from_mlflow_if_its_folder_is_gone(
    tmp_path: Path,
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    config = StageConfig(output=str(tmp_path / "out" / "pretrain"), tracking_uri=uri)

    def work(digest: str) -> Result:
        with_curve = RunRecorder.open(config.local_folder, uri=uri)
        for step in range(3):
            with_curve.record(step, {"train/loss": 3.0 - step})
        with_curve.close("RUNNING")
        counts = PretrainCounts(
            before={"mlm_loss": 8.3},
            after={"mlm_loss": 5.1},
            unigram_loss=6.0,
            unigram_accuracy=0.1,
            steps=2,
            tokens_per_s=1.0,
        )
        return Result(outputs={}, counts=counts)

    run_stage("pretrain", config, [], work)
    run_id = json.loads(Path(config.output, "mlflow_run.json").read_text())["run_id"]
    [here] = runs_of([run_id], uri)
    assert here.place == config.output
    shutil.rmtree(config.output)
    [gone] = runs_of([run_id], uri)
    assert (gone.stage, gone.name) == ("pretrain", "pretrain out")
    assert gone.command == f"raybert pretrain --output {config.output}"
    assert gone.result == "held-out MLM loss 8.30 → 5.10"
    [loss] = [curve for curve in gone.curves if curve.name == "train/loss"]
    assert loss.mean.tolist() == [[0, 3], [1, 2], [2, 1]]
    with pytest.raises(ConfigError, match="runs: wanted an MLflow run, got 00000"):
        runs_of(["0" * 32], uri)


def made(stage: str, config: StageConfig, rows: int, *inputs: DatasetInput) -> str:
    """Runs a stage that comes to so many rows; returns the id of its run in MLflow."""
    counts = SearchCounts(queries=0, rows=rows)
    run_stage(stage, config, inputs, lambda _: Result(outputs={}, counts=counts))
    recorded = read_run(config.local_folder)
    assert recorded is not None
    return str(recorded.run_id)


@pytest.mark.parametrize("damage", ["{", '{"format_version": 99}'])
def test_runs_whose_folders_cannot_be_read_are_taken_from_mlflow(
    damage: str, tmp_path: Path
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    first, second = (
        StageConfig(output=str(tmp_path / name), tracking_uri=uri) for name in ("shards", "tuned")
    )
    made("prepare", first, 3)
    taken = DatasetInput("shards", read_manifest(first.output).digest, first.output)
    run_id = made("finetune", second, 5, taken)
    for output in (first.output, second.output):
        Path(output, "manifest.json").write_text(damage)
    found = with_ancestors(runs_of([run_id], uri, str(tmp_path)))
    assert [(each.stage, each.output) for each in found] == [
        ("prepare", first.output),
        ("finetune", second.output),
    ]


def test_a_run_in_a_bucket_that_refuses_us_is_taken_from_mlflow(
    tmp_path: Path, object_store: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run_id = made("pretrain", StageConfig(output=f"{object_store}/out", tracking_uri=uri), 3)
    with fault_proxy(s3_endpoint) as proxy:
        proxy.refuse = lambda signed_by: (403, xml_error("AccessDenied", "Access Denied"))
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        [found] = runs_of([run_id], uri, str(tmp_path))
        assert proxy.seen
    assert (found.output, found.counts["rows"]) == (f"{object_store}/out", 3)


def test_an_id_shows_its_run_when_the_folder_has_a_newer_one_of_the_same_settings(
    tmp_path: Path,
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    config = StageConfig(output=str(tmp_path / "out"), tracking_uri=uri)
    first = made("pretrain", config, 1)
    second = made("pretrain", replace(config, force=True), 2)
    found = runs_of([first, second], uri, str(tmp_path))
    assert [each.counts["rows"] for each in found] == [1, 2]
    assert found[1].place == config.output


def test_only_the_run_that_wrote_the_read_output_is_downloaded(
    tmp_path: Path,
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    first, second = (
        StageConfig(output=str(tmp_path / name), tracking_uri=uri) for name in ("shards", "tuned")
    )
    made("prepare", first, 3, DatasetInput("corpus", "as it was", "a.txt"))
    taken = DatasetInput("shards", read_manifest(first.output).digest, first.output)
    run_id = made("finetune", second, 5, taken)
    made("prepare", replace(first, force=True), 4, DatasetInput("corpus", "newer", "a.txt"))
    with RunRecorder.open(  # by an older version
        tmp_path / "old", uri=uri, tags={"stage": "prepare", "output": first.output}
    ):
        pass
    (downloads := tmp_path / "downloads").mkdir()
    found = with_ancestors(runs_of([run_id], uri, str(downloads)))
    assert [each.counts.get("rows") for each in found] == [3, 5]
    assert [str(path) for path in downloads.iterdir()] == [found[0].place]


def test_a_run_that_mlflow_has_deleted_gets_no_page_and_the_error_says_so(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    config = StageConfig(output=str(tmp_path / "out"), tracking_uri=uri)
    connect(uri).delete_run(made("pretrain", config, 1))
    page = tmp_path / "r.html"
    wanted = f"attach: wanted MLflow at {uri} to take {page}, it does not (The run "
    with pytest.raises(ResourceError, match=re.escape(wanted)):
        run(ReportConfig(runs=(config.output,), output=str(page), attach=True, tracking_uri=uri))
    assert page.exists()


def test_a_run_without_a_manifest_shows_what_mlflow_has(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tags = {"stage": "predict", "output": "away", "command": "raybert predict", "code_version": "1"}
    inputs = [DatasetInput("model", "abc", "away/model")]
    with RunRecorder.open(
        tmp_path / "run",
        uri=uri,
        run_name="predict x",
        params={"top_k": 5},
        inputs=inputs,
        tags=tags,
    ) as recorder:
        recorder.record(0, {"rows": 7})
    [seen] = runs_of([str(recorder.run_id)], uri)
    assert (seen.stage, seen.name, seen.output) == ("predict", "predict x", "away")
    assert (seen.counts, seen.manifest.inputs) == ({"rows": 7}, {"model": "abc"})
    assert with_ancestors([seen]) == [seen]


def test_a_run_that_has_not_finished_is_said_to_be_so(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    ids = []
    for place, metrics in enumerate(({"rows": 7}, {})):
        tags = {"stage": "predict", "output": "away"}
        with RunRecorder.open(tmp_path / f"{place}", uri=uri, run_name="x", tags=tags) as recorder:
            recorder.record(0, metrics)
        ids.append(str(recorder.run_id))
    assert [(each.sentence, each.result) for each in runs_of(ids, uri)] == [
        ("`predict` has finished: rows 7.", "rows 7"),
        ("`predict` has finished.", "finished"),
    ]
    for run_id in ids:
        connect(uri).set_terminated(run_id, "KILLED")
    assert [(each.sentence, each.result) for each in runs_of(ids, uri)] == [
        ("`predict` has not finished: rows 7.", "rows 7"),
        ("`predict` has not finished.", "not finished"),
    ]


def test_fine_tunings_measured_on_selection_rows_alone_are_summed_up_each_by_itself(
    tmp_path: Path,
) -> None:
    counts = SeedsCounts(
        remarks={}, train_rows=64, selection_rows=9, labels=2, primary_metric="accuracy",
        seeds=[{"seed": 0, "selection_accuracy": 0.8}], means={"selection_accuracy": 0.8},
        deviations={"selection_accuracy": 0.0}, baseline={}, steps=STEPS, tokens_per_s=1.0,
    )  # fmt: skip
    places = []
    for name, from_scratch in (("tuned", False), ("scratch", True)):
        config = {"from_scratch": from_scratch}
        manifest = Manifest(stage="finetune", digest=name, config=config, **words_of(counts))
        places.append(add(tmp_path / name, manifest))
    told = summary(runs_of(places, None))
    assert [text.partition(": ")[2] for text in told] == [counts.sentence] * 2


def test_mlflows_records_make_the_same_page_as_the_folders(
    finetuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an evaluation back to the text, by the id of the last run alone."""
    made = finetuned.folder
    scores = EvaluateConfig(
        output=str(made / "scores"),
        model=str(made / "finetune"),
        held_out=finetuned.rows,
        num_workers=0,
        tracking_uri=finetuned.tracking_uri,
    )
    evaluate.run(scores)
    recorded = read_run(Path(scores.output))
    assert recorded is not None
    pages_of = [tmp_path / "folders.html", tmp_path / "ids.html"]
    run(ReportConfig(runs=(scores.output,), output=str(pages_of[0])))
    config = ReportConfig(runs=(str(recorded.run_id),), tracking_uri=finetuned.tracking_uri)
    # As where the folders are out of reach; other processes of the tests read them meanwhile.
    monkeypatch.setattr(report_runs, "_reachable_run", lambda folder: None)
    run(replace(config, output=str(pages_of[1])))
    from_folders, from_ids = [path.read_text() for path in pages_of]
    assert from_folders.count("<pre>raybert ") == 5
    assert "<h2>Evaluation</h2>" in from_folders
    assert "Where the time went" in from_folders
    assert from_ids == from_folders


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_it_is_read_alone_on_any_screen(
    width: int, scheme: "pages.Scheme", folders: list[str], tmp_path: Path, browser: "Browser"
) -> None:
    from tests import pages

    page = tmp_path / "report.html"
    write_report(str(page), runs_of(folders, None), title="A run")
    with pages.opened(browser, page, width=width, scheme=scheme) as it:
        assert it.page.evaluate("document.documentElement.scrollWidth") <= width
        flows = it.page.locator("svg.flow")
        shown = [flows.nth(place).is_visible() for place in range(flows.count())]
        assert shown == ([True, False] if width > 960 else [False, True])
        assert it.page.locator("svg.chart").count() > 0
        assert it.requests == [page.absolute().as_uri()]
        assert it.messages == []


@pytest.mark.parametrize("several", [False, True])
def test_it_is_accessible(
    several: bool, folders: list[str], tmp_path: Path, browser: "Browser"
) -> None:
    from tests import pages

    page = tmp_path / "report.html"
    spent = Goodput(began_s=0.0, until_s=100.0, seconds={"computing": 60.0, "starting": 40.0})
    shown = [
        replace(each, spent=spent)
        for each in runs_of(folders[1:] if several else folders[-1:], None)
    ]
    write_report(str(page), shown, tried=[("A question", [("0.9", "an answer")])])
    with pages.opened(browser, page) as it:
        it.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        pages.assert_within_reach(it.page)


def test_a_title_replaces_the_names(folders: list[str], tmp_path: Path) -> None:
    config = ReportConfig(runs=(folders[1],), output=str(tmp_path / "r.html"))
    run(config)
    assert "<h1>finetune" in Path(config.output).read_text()
    run(replace(config, title="For Ada"))
    assert "<h1>For Ada</h1>" in Path(config.output).read_text()
