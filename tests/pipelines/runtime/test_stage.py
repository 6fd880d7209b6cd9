"""What every stage shares: done work is skipped, other people's files are safe."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bert_core import files
from bert_core.errors import ConfigError, CorpusError, ResourceError
from bert_core.files import read_json
from bert_core.manifest import Output, is_complete, read_manifest
from pipelines.commands.report_runs import runs_of as runs_of_outputs
from pipelines.corpus.config import CorpusConfig
from pipelines.distill import DistillConfig
from pipelines.evaluate import EvaluateConfig
from pipelines.glue import GlueConfig
from pipelines.prepare import PrepareConfig
from pipelines.runtime import lease
from pipelines.runtime.description import STARTED
from pipelines.runtime.result import Result
from pipelines.runtime.stage import MISTAKES, run_stage
from pipelines.runtime.stage_config import (
    INPUT,
    StageConfig,
    determining_fields,
    input_paths,
    with_absolute_paths,
)
from pipelines.search import SearchCounts
from tests.pipelines.runtime.test_lease import taken_over
from tracking.runs.recorder import DatasetInput, RunRecorder

if TYPE_CHECKING:
    from mlflow.entities import Run


NOTHING, THREE_ROWS = SearchCounts(queries=0, rows=0), SearchCounts(queries=0, rows=3)
BEFORE_WORDS = """{
 "stage": "copy",
 "digest": "f48fa15c6fdd25f2e56c38aa6d23c591cedee37ed7dc3eb2f654232808d0b928",
 "config": {"times": 1},
 "inputs": {"source": "d1"},
 "hub": {},
 "outputs": {
  "copy.txt": {
   "size_bytes": 1,
   "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
  }
 },
 "bundle": "",
 "counts": {"bytes": 1, "seconds": 0.5},
 "code_version": "0.9",
 "format_version": 2,
 "sha256": "5663a092d5dd553aad2181d39208d819663baa544305847063708ca2cba58c23"
}"""
"""A manifest of a version whose stages did not word what they came to."""


@dataclass(frozen=True, kw_only=True)
class CopyConfig(StageConfig):
    source: str = field(metadata=INPUT)
    beside: str = field(default="nothing", metadata=INPUT)
    times: int = 1


@pytest.fixture
def config(tmp_path: Path, small: Any) -> CopyConfig:
    return CopyConfig(output=str(tmp_path / "out"), source="a", tracking_uri=small.tracking_uri)


def run(config: CopyConfig, calls: list[str], digest: str = "d1") -> None:
    def work(stage_digest: str) -> Result:
        calls.append(stage_digest)
        path = files.join(config.output, "copy.txt")
        files.write_bytes(path, b"x" * config.times)
        return Result(
            outputs={"copy.txt": Output.of(path)}, counts=replace(NOTHING, rows=config.times)
        )

    run_stage("copy", config, [DatasetInput("source", digest, config.source)], work)


def test_a_finished_stage_is_skipped_and_its_manifest_says_what_it_made(config: CopyConfig) -> None:
    calls: list[str] = []
    run(config, calls)
    run(config, calls)
    assert len(calls) == 1
    manifest = read_manifest(config.output)
    assert manifest.stage == "copy"
    assert manifest.inputs == {"source": "d1"}
    assert manifest.counts["rows"] == 1
    assert manifest.outputs["copy.txt"].size_bytes == 1


def test_a_stage_that_an_older_version_finished_is_skipped(config: CopyConfig) -> None:
    Path(config.output).mkdir()
    Path(config.output, "copy.txt").write_text("x")
    Path(config.output, "manifest.json").write_text(BEFORE_WORDS)
    calls: list[str] = []
    run(config, calls)
    assert calls == []
    [found] = runs_of_outputs([config.output], None)
    assert (found.result, found.sentence) == (
        "bytes 1",
        "`copy` has finished: bytes 1.",
    )


def test_neither_workers_nor_places_are_in_the_digest(config: CopyConfig) -> None:
    calls: list[str] = []
    run(config, calls)
    run(replace(config, num_workers=7, threads_per_worker=3, source="elsewhere/a"), calls)
    assert len(calls) == 1
    assert determining_fields(config) == {"times": 1}


def test_paths_mean_the_same_in_another_folder_and_words_stay_words(config: CopyConfig) -> None:
    there = with_absolute_paths(config)
    assert there == replace(config, source=str(Path("a").absolute()))
    given = with_absolute_paths(replace(config, beside="b", source="s3://bucket/a"))
    assert (given.beside, given.source) == (str(Path("b").absolute()), "s3://bucket/a")


def test_other_settings_or_inputs_are_refused_and_named_and_the_result_is_untouched(
    config: CopyConfig,
) -> None:
    run(config, [])
    with pytest.raises(
        ConfigError, match=r"another times \(1, now 2\): give another output, or --fo"
    ):
        run(replace(config, times=2), [])
    with pytest.raises(ConfigError, match="made with another source"):
        run(config, [], digest="d2")
    assert Path(config.output, "copy.txt").read_bytes() == b"x"


def test_an_unreachable_mlflow_is_reported_once_before_and_once_after_the_work(
    config: CopyConfig,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tracking.runs.sender.SEND_EVERY_S", 0.1)
    run(replace(config, tracking_uri="http://127.0.0.1:1"), [])
    told = f"copy: MLflow has not answered yet, records are kept in {config.output}"
    assert capsys.readouterr().out.splitlines()[:-1] == [told]
    (line,) = [one for one in caplog.messages if "MLflow" in one]
    assert "has yet to be sent 1 record: " in line


def test_an_output_that_is_an_existing_file_is_refused(config: CopyConfig, tmp_path: Path) -> None:
    (tmp_path / "plain.csv").write_text("a,b\n")
    for output in ("plain.csv", "plain.csv/", "plain.csv/in/it"):
        there = replace(config, output=f"{tmp_path}/{output}", force=True)
        with pytest.raises(
            ConfigError, match=r"output: wanted a folder, .*plain\.csv/? is a file: "
        ):
            run(there, [])
    assert (tmp_path / "plain.csv").read_text() == "a,b\n"


def test_an_output_that_cannot_be_written_is_reported_in_one_line(config: CopyConfig) -> None:
    with pytest.raises(ResourceError, match=r"^/proc/out/.*: could not be written: .*\Z"):
        run(replace(config, output="/proc/out"), [])


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("output", ["data", "data/", "data/in", "link", "above/../data"])
def test_an_output_with_an_input_in_it_is_refused_and_nothing_is_removed(
    config: CopyConfig, tmp_path: Path, output: str, force: bool
) -> None:
    source = tmp_path / "data" / "in"
    files.write_bytes(str(source / "copy.txt"), b"x")
    for folder in (source, source.parent):  # as a stage leaves it that was killed
        files.write_json(str(folder / STARTED), {"stage": "copy", "digest": "other"})
    (tmp_path / "link").symlink_to(tmp_path / "data")
    (tmp_path / "above").mkdir()
    there = replace(config, output=f"{tmp_path}/{output}", force=force)
    given: list[dict[str, Any]] = [
        {"source": str(source)},
        {"source": source.as_uri()},
        {"beside": str(source)},
    ]
    for changes in given:
        with pytest.raises(
            ConfigError, match=r"output: wanted a folder without inputs, .* contains"
        ):
            run(replace(there, **changes), [])
    assert (source / "copy.txt").read_bytes() == b"x"
    assert not files.is_within(f"{source}-2", str(source)), "its name only begins alike"


def test_every_stage_says_where_its_inputs_lie() -> None:
    """What is not marked as an input would not be kept from being removed."""
    assert list(input_paths(EvaluateConfig(output="o", model="m"))) == [("model", "m")]
    corpus = CorpusConfig(source=("a", "s3://b"))
    found = input_paths(PrepareConfig(output="o", tokenizer="v", corpus=corpus))
    assert sorted(found) == [
        ("corpus.source", "a"),
        ("corpus.source", "s3://b"),
        ("tokenizer", "v"),
    ]
    assert [*input_paths(DistillConfig(output="o", teacher="models:/t@champion"))] == []
    glue = GlueConfig(output="o", allow_incomplete=True, tests={"cola": "t"})
    assert [*input_paths(glue)] == [("tests", "t")]


def test_force_makes_it_again(config: CopyConfig) -> None:
    calls: list[str] = []
    run(config, calls)
    run(replace(config, times=2, force=True), calls)
    assert len(calls) == 2
    assert Path(config.output, "copy.txt").read_bytes() == b"xx"


def test_a_folder_that_raybert_did_not_write_is_left_alone(config: CopyConfig) -> None:
    Path(config.output).mkdir()
    Path(config.output, "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"it holds files that raybert did not write \(thesis"):
        run(config, [])
    with pytest.raises(ConfigError, match="did not write"):
        run(replace(config, force=True), [])
    assert Path(config.output, "thesis.tex").read_text() == "years of work"


def left_by(config: CopyConfig, reason: BaseException, *, half: bool) -> None:
    """Have a run end early, and leave a half of its work, or nothing."""

    def ended(digest: str) -> Result:
        if half:
            Path(config.output, "half").write_text("done")
        raise reason

    with pytest.raises(type(reason)):
        run_stage("copy", config, [DatasetInput("source", "d1", "a")], ended)


def runs_of(config: CopyConfig) -> "list[Run]":
    import mlflow

    client = mlflow.MlflowClient(config.tracking_uri)
    experiment = client.get_experiment_by_name(config.experiment)
    return [] if experiment is None else client.search_runs([experiment.experiment_id])


def test_a_killed_run_resumes_in_its_folder(config: CopyConfig) -> None:
    left_by(config, KeyboardInterrupt(), half=True)

    def work(digest: str) -> Result:
        assert Path(config.output, "half").exists()
        return Result(outputs={}, counts=NOTHING)

    run_stage("copy", config, [DatasetInput("source", "d1", "a")], work)


def test_a_start_that_saved_nothing_does_not_block_another(
    config: CopyConfig, tmp_path: Path
) -> None:
    config = replace(config, experiment=tmp_path.name)
    left_by(config, KeyboardInterrupt(), half=False)
    assert [one.info.status for one in runs_of(config)] == ["KILLED"]
    run(replace(config, times=3), [])
    assert [one.data.params["times"] for one in runs_of(config)] == ["3"]


def test_checkpoints_of_an_older_start_without_recorded_settings_are_kept(
    config: CopyConfig,
) -> None:
    left_by(config, KeyboardInterrupt(), half=True)
    marker = Path(config.output, STARTED)
    older = {k: v for k, v in read_json(str(marker)).items() if k not in ("config", "inputs")}
    marker.write_text(json.dumps(older))
    with pytest.raises(
        ConfigError, match=r"made otherwise, by `raybert copy .*`; it has saved 1 file"
    ):
        run(replace(config, times=3), [])
    assert Path(config.output, "half").exists()


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_refused_start_is_no_run_unless_it_has_saved_something(
    kind: type[Exception], config: CopyConfig, tmp_path: Path
) -> None:
    config = replace(config, experiment=tmp_path.name)
    left_by(config, kind("a.csv: wanted a column"), half=False)
    assert runs_of(config) == []
    left_by(config, kind("a.csv: wanted a column"), half=True)
    assert [one.info.status for one in runs_of(config)] == ["FAILED"]
    run(config, [])
    assert [one.info.status for one in runs_of(config)] == ["FINISHED"]


@pytest.mark.parametrize("half", ["half", "checkpoints/step-00000010/checkpoint.json"])
def test_a_run_ended_by_a_mistake_blocks_a_corrected_start_only_by_its_checkpoints(
    config: CopyConfig, half: str
) -> None:
    def ended(digest: str) -> Result:
        files.write_bytes(files.join(config.output, half), b"done")
        raise CorpusError("a.csv: wanted sentences: set times to 2")

    with pytest.raises(CorpusError):
        run_stage("copy", config, [DatasetInput("source", "d1", "a")], ended)
    if half == "half":
        run(replace(config, times=2), [])
        return
    with pytest.raises(ConfigError, match="its newest checkpoint is step-00000010"):
        run(replace(config, times=2), [])


def test_a_failed_run_says_why_until_it_is_resumed(config: CopyConfig, tmp_path: Path) -> None:
    config = replace(config, experiment=tmp_path.name)
    left_by(config, ResourceError("a.csv: wanted a disk"), half=False)
    [failed] = runs_of(config)
    assert failed.info.status == "FAILED"
    assert failed.data.tags["result"] == "failed: a.csv: wanted a disk"
    run(config, [])
    [finished] = runs_of(config)
    assert (finished.info.run_id, finished.info.status) == (failed.info.run_id, "FINISHED")
    assert finished.data.tags["result"] == "0 queries, 1 row"


@pytest.mark.guard
def test_a_stage_killed_after_its_manifest_has_its_run_ended_by_the_next_start(
    tmp_path: Path,
) -> None:
    import mlflow

    config = StageConfig(
        output=str(tmp_path / "out"), tracking_uri=f"sqlite:///{tmp_path}/mlflow.db"
    )
    code = (
        "import os, signal, sys; from pipelines.runtime import stage, stage_config\n"
        "write = stage.write_manifest\n"
        "def write_and_end(*of_what):\n"
        "    write(*of_what)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "stage.write_manifest = write_and_end\n"
        "config = stage_config.StageConfig(output=sys.argv[1], tracking_uri=sys.argv[2])\n"
        "from pipelines.search import SearchCounts\n"
        "made = stage.Result(outputs={}, counts=SearchCounts(queries=0, rows=3))\n"
        "stage.run_stage('copy', config, [], lambda digest: made)\n"
    )
    command = [sys.executable, "-c", code, config.output, str(config.tracking_uri)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    client = mlflow.MlflowClient(str(config.tracking_uri))

    def the_run() -> "Run":
        experiment = client.get_experiment_by_name(config.experiment)
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id])
        return run

    assert the_run().info.status == "RUNNING"
    run_stage("copy", config, [], lambda digest: pytest.fail("it is complete"))
    assert the_run().info.status == "FINISHED"
    assert the_run().data.metrics["rows"] == 3


def test_a_run_in_a_bucket_resumes_on_another_host(
    config: CopyConfig, object_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing but the bucket: the same MLflow run, and its record from the first point on."""
    import mlflow

    there = replace(config, output=f"{object_store}/out")
    source = [DatasetInput("source", "d1", "a")]

    def on_host(name: str) -> None:
        monkeypatch.setenv("RAYBERT_CACHE", str(tmp_path / name))

    def half(digest: str) -> Result:
        recorder = RunRecorder.open(
            there.local_folder, uri=str(there.tracking_uri), copy=there.record_copy
        )
        recorder.record(1, {"loss": 0.5})
        recorder.close("RUNNING")
        raise KeyboardInterrupt

    on_host("first")
    with pytest.raises(KeyboardInterrupt):
        run_stage("copy", there, source, half)
    assert read_json(f"{there.output}/{lease.NAME}")["released"]
    assert there.local_folder.is_relative_to(tmp_path / "first")
    on_host("second")
    run_stage("copy", there, source, lambda digest: Result(outputs={}, counts=THREE_ROWS))
    lines = files.read_bytes(f"{there.output}/record/metrics.jsonl").splitlines()
    assert [sorted(json.loads(line)["metrics"]) for line in lines] == [
        ["loss"],
        ["queries", "rows", "seconds"],
    ]
    client = mlflow.MlflowClient(str(config.tracking_uri))
    experiment = client.get_experiment_by_name(config.experiment)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], f"tags.output = '{there.output}'")
    assert (run.info.status, run.data.metrics["loss"]) == ("FINISHED", 0.5)
    on_host("third")
    run_stage("copy", there, source, lambda digest: pytest.fail("it is complete"))
    assert not there.local_folder.exists()


def test_a_run_whose_output_another_took_over_writes_no_manifest_and_records_nothing(
    config: CopyConfig, object_store: str
) -> None:
    there = replace(config, output=f"{object_store}/out")

    def work(digest: str) -> Result:
        taken_over(there.output)
        return Result(outputs={}, counts=THREE_ROWS)

    with pytest.raises(ResourceError, match=r"it is now another run's \(\S+ on elsewhere"):
        run_stage("copy", there, [], work)
    assert not is_complete(there.output)
    assert not (there.local_folder / "metrics.jsonl").read_bytes()


def test_a_second_run_of_an_output_is_refused_and_removes_nothing(config: CopyConfig) -> None:
    def work(digest: str) -> Result:
        Path(config.output, "half").write_text("done")
        with pytest.raises(
            ResourceError, match=r"out: wanted to write it, .* has been writing it since"
        ):
            run(replace(config, force=True, times=2), [])
        return Result(outputs={}, counts=NOTHING)

    run_stage("copy", config, [], work)
    assert sorted(path.name for path in Path(config.output).iterdir()) == [
        "half", "manifest.json", "metrics.jsonl", "metrics.sent", "mlflow_run.json", "started.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_workers": -1}, "num_workers: wanted at least 0, got -1"),
        ({"threads_per_worker": 0}, "threads_per_worker: wanted at least 1, got 0"),
        ({"output": ""}, "output: wanted a folder or URI"),
    ],
)
def test_settings_out_of_range_are_refused(
    config: CopyConfig, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(config, **change)  # type: ignore[arg-type]
