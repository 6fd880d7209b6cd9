"""Sweeps: which trials there are; the best is found, scored once and registered."""

import json
import math
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_core.errors import ConfigError, CorpusError, RaybertError
from bert_core.manifest import read_manifest
from pipelines import evaluate, finetune, tune
from pipelines.answering import predictors
from pipelines.configure import parse
from pipelines.corpus.labelled import LabelledConfig
from pipelines.training.config import LabelledTrainingConfig
from pipelines.training.selection import SelectionConfig
from pipelines.training.sweep import SweepConfig
from pipelines.tune import TuneConfig
from tests.processes import kill_tree, start_with_input
from tests.waiting import wait_until
from tracking.runs.spool import read_run

GRID = {"lr": [1e-3, 1e-5], "epochs": [1.0]}
# By the one rate a loss stays where it begins, by the other it leaves for good.
ASLEEP, HOT = 1e-12, 0.1
RUN = """
import pickle, sys
from pipelines.runtime import cluster
from pipelines import tune

try:
    tune.run(pickle.load(sys.stdin.buffer))
finally:
    cluster.disconnect()
"""


def sweep(made: Any, output: Path, **changes: Any) -> TuneConfig:
    """Two trials of a few steps, at the same time."""
    base = made.finetune(output)
    shared = {one.name: getattr(base, one.name) for one in fields(LabelledTrainingConfig)}
    shared |= {
        "seeds": (0,),
        "selection": SelectionConfig(share=0.25, metric="loss"),
        "search": SweepConfig(space=GRID),
        "num_workers": 2,
        "max_concurrent": 2,
    }
    return TuneConfig(**shared | changes)


def trials_of(config: TuneConfig) -> dict[str, Any]:
    return json.loads((Path(config.output) / "trials.json").read_text())


def runs_of(config: TuneConfig) -> tuple[Any, list[Any]]:
    """The MLflow run of a sweep, and those that are part of it."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=config.tracking_uri)
    own = read_run(Path(config.output))
    assert own is not None
    assert own.run_id is not None
    parent = client.get_run(own.run_id)
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{own.run_id}'"
    )
    return parent, children


@pytest.fixture(scope="module")
def swept(
    pretrained: Any, tmp_path_factory: pytest.TempPathFactory, local_ray: None
) -> tuple[TuneConfig, list[Any]]:
    """A grid on Ray Tune, and every set of rows that was evaluated meanwhile."""
    folder = tmp_path_factory.mktemp("swept")
    lines = Path(pretrained.rows.source).read_text().splitlines(keepends=True)
    (folder / "dev.jsonl").write_text("".join(lines[::3]))
    config = sweep(
        pretrained,
        folder / "sweep",
        held_out=LabelledConfig(source=str(folder / "dev.jsonl")),
        name="swept",
    )
    scored = []
    with pytest.MonkeyPatch.context() as patch:
        whole = predictors.predict_rows

        def predict_rows(model: Path, rows: Any, *more: Any) -> Any:
            scored.append(rows)
            return whole(model, rows, *more)

        patch.setattr(evaluate, "predict_rows", predict_rows)
        tune.run(config)
    return config, scored


def test_the_best_of_all_trials_on_rows_that_none_trained_on_is_the_bundle(
    swept: tuple[TuneConfig, list[Any]],
) -> None:
    config, _ = swept
    folder = Path(config.output)
    written = trials_of(config)
    assert [row["parameters"] for row in written["trials"]] == [
        {"epochs": 1.0, "lr": lr} for lr in (1e-3, 1e-5)
    ]
    assert [row["state"] for row in written["trials"]] == ["finished"] * 2
    assert [row["steps"] for row in written["trials"]] == [3, 3]
    scores = [row["score"] for row in written["trials"]]
    assert len(set(scores)) == 2
    assert written["metric"] == "loss"
    best = written["best"]
    assert best == int(np.argmin(scores))
    for kept in (folder / "trials" / f"{best:03d}" / "bundle").iterdir():
        assert (folder / "bundle" / kept.name).read_bytes() == kept.read_bytes()
    counts = read_manifest(config.output).counts
    assert counts["parameters"] == written["trials"][best]["parameters"]
    assert (folder / "plots" / "parallel_coordinates.png").stat().st_size > 1000
    assert not list(folder.glob("trials/*/checkpoints"))
    assert not (folder / "ray").exists()


def test_held_out_rows_are_scored_once_and_are_in_no_trial(
    swept: tuple[TuneConfig, list[Any]],
) -> None:
    config, scored = swept
    assert config.held_out is not None
    rows = [json.loads(line) for line in Path(config.held_out.source).read_text().splitlines()]
    assert [[row["text"] for row in each] for each in scored] == [[row["text"] for row in rows]]
    for number in range(2):
        manifest = read_manifest(f"{config.output}/trials/{number:03d}")
        assert manifest.inputs.keys() == {"model", "train"}
        assert "accuracy_mean" not in manifest.counts
    counts = read_manifest(config.output).counts
    evaluated = read_manifest(f"{config.output}/evaluate").counts
    assert counts["held_out_accuracy"] == evaluated["accuracy"]
    assert counts["held_out_rows"] == len(rows)


def test_every_trial_is_a_run_below_that_of_the_sweep_and_the_best_is_registered(
    swept: tuple[TuneConfig, list[Any]],
) -> None:
    config, _ = swept
    parent, children = runs_of(config)
    assert parent.info.status == "FINISHED"
    assert {run.info.status for run in children} == {"FINISHED"}
    stages = sorted(run.data.tags["stage"] for run in children)
    assert stages == ["evaluate", *["finetune"] * 2, "publish"]
    tried = {
        float(run.data.params["lr"]) for run in children if run.data.tags["stage"] == "finetune"
    }
    assert len(tried) == 2
    counts = read_manifest(config.output).counts
    assert counts["version"] == "1" or counts["version"] == 1
    assert counts["is_champion"]


def test_trials_in_this_process_give_the_same_result(
    swept: tuple[TuneConfig, list[Any]], tmp_path: Path
) -> None:
    from bert_core.bundle.format import load_bundle

    alone = replace(
        swept[0], output=str(tmp_path / "alone"), num_workers=0, held_out=None, name=None
    )
    tune.run(alone)
    assert trials_of(alone) == trials_of(swept[0])
    examples = [load_bundle(f"{each.output}/bundle").examples for each in (alone, swept[0])]
    assert examples[0] == examples[1] != ()


@pytest.mark.usefixtures("local_ray")
def test_asha_ends_worse_trials_and_they_stay_ended(pretrained: Any, tmp_path: Path) -> None:
    search = SweepConfig(
        method="asha",
        space={"lr": [ASLEEP, HOT]},
        num_samples=3,
        seed=1,
        reduction_factor=2.0,
    )
    assert [trial["lr"] for trial in search.trials()] == [ASLEEP, HOT, HOT]
    config = sweep(
        pretrained, tmp_path / "out", search=search, epochs=3.0, held_out=None, max_concurrent=1
    )
    tune.run(config)
    rows = trials_of(config)["trials"]
    stopped = [row for row in rows if row["state"] == "stopped"]
    assert [row["parameters"]["lr"] for row in stopped] == [HOT] * 2
    assert [row["steps"] for row in rows] == [9, 3, 3]
    _, children = runs_of(config)
    assert sum(run.info.status == "KILLED" for run in children) == len(stopped)
    # As if killed before its end, with one trial that has not begun.
    folders = [tmp_path / "out" / "trials" / f"{row['trial']:03d}" for row in stopped]
    (tmp_path / "out" / "manifest.json").unlink()
    for path in sorted(folders[-1].rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folders[-1].rmdir()
    written = {
        path: path.stat().st_mtime_ns for path in tmp_path.rglob("trials/*/measurements.json")
    }
    assert len(written) == 2
    tune.run(config)
    assert trials_of(config)["trials"] == rows, "what ended before counts for what comes later"
    assert {path: path.stat().st_mtime_ns for path in written} == written


@pytest.mark.usefixtures("local_ray")
def test_a_trials_error_that_the_user_can_fix_is_reported(pretrained: Any, tmp_path: Path) -> None:
    # The first trial is checked before any begins, the second only by itself.
    search = SweepConfig(space={"batch_size": [8, 64]})
    config = sweep(pretrained, tmp_path / "out", search=search)
    message = r"rows.jsonl: wanted at least batch_size = 64 rows to train on, got 32, of which 8 ar"
    with pytest.raises(CorpusError, match=message):
        tune.run(config)
    assert runs_of(config)[0].info.status == "FAILED"


def test_held_out_rows_that_do_not_fit_are_refused_before_the_first_trial(
    pretrained: Any, tmp_path: Path
) -> None:
    (tmp_path / "odd.jsonl").write_text('{"text": "a", "label": "never"}\n')
    held_out = LabelledConfig(source=str(tmp_path / "odd.jsonl"))
    config = sweep(pretrained, tmp_path / "out", held_out=held_out, num_workers=0)
    message = r"odd.jsonl, row 1: its label 'never' is not one of the model's"
    with pytest.raises(CorpusError, match=message):
        tune.run(config)
    assert not (tmp_path / "out" / "trials").exists()


def test_trials_read_the_names_of_classes_from_the_card(pretrained: Any, tmp_path: Path) -> None:
    """Also where one file of the data set has the training rows."""
    from bert_core.bundle.format import load_bundle

    names = "[{name: label, dtype: {class_label: {names: [neg, pos]}}}]"
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "README.md").write_text(f"---\ndataset_info: {{features: {names}}}\n---\n")
    rows = [{"text": f"word {number}", "label": number % 2} for number in range(32)]
    for split in ("train", "test"):
        path = tmp_path / "set" / f"{split}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = LabelledConfig(source=str(tmp_path / "set"))
    config = sweep(
        pretrained, tmp_path / "out", train=source, held_out=source, num_workers=0,
        search=SweepConfig(space={"lr": [1e-3]}),
    )  # fmt: skip
    assert tune.run(config).counts["held_out_rows"] == len(rows)
    task = load_bundle(tmp_path / "out" / "bundle").task
    assert task is not None
    assert task.labels == ["neg", "pos"]


def test_a_trial_that_diverges_does_not_end_the_sweep(pretrained: Any, tmp_path: Path) -> None:
    config = sweep(
        pretrained,
        tmp_path / "out",
        search=SweepConfig(space={"lr": [1e30, 1e-3]}),
        held_out=None,
        num_workers=0,
    )
    counts = tune.run(config).counts
    assert (counts["finished"], counts["diverged"], counts["best"]) == (1, 1, 1)
    hopeless = replace(
        config, output=str(tmp_path / "none"), search=SweepConfig(space={"lr": [1e30]})
    )
    with pytest.raises(RaybertError, match="wanted a trial with a score, got none of 1"):
        tune.run(hopeless)


@pytest.mark.ray
@pytest.mark.drill
def test_a_killed_sweep_resumes_without_repeating_finished_trials(
    pretrained: Any, tmp_path: Path
) -> None:
    """SIGKILL of the driver and everything it started, with a trial done, one half done, and one
    that has hardly begun."""
    space = {"epochs": [2.0, 30.0, 1.0]}
    config = sweep(pretrained, tmp_path / "killed", search=SweepConfig(space=space), held_out=None)
    trials = tmp_path / "killed" / "trials"
    process = started(config)
    wait_until(
        "one trial is done, and the next half done",
        lambda: (trials / "000" / "manifest.json").exists() and len(measured(trials / "001")) > 3,
        timeout_s=180, every_s=0.05, process=process,
    )  # fmt: skip
    kill_tree(process)
    before = measured(trials / "001")
    assert not (trials / "001" / "manifest.json").exists()
    assert list((trials / "001").glob("checkpoints/0/*/checkpoint.json"))
    kept = ["manifest.json", "measurements.json", "metrics.jsonl", "bundle/model.safetensors"]
    done = {path: path.stat().st_mtime_ns for path in (trials / "000" / name for name in kept)}
    assert started(config).wait(timeout=240) == 0
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert measured(trials / "001")[: len(before)] == before
    alone = replace(config, output=str(tmp_path / "alone"), num_workers=0)
    tune.run(alone)
    assert trials_of(config) == trials_of(alone)
    _, children = runs_of(config)
    assert [run.info.status for run in children] == ["FINISHED"] * 3, "a run per trial, no more"


def measured(trial: Path) -> list[Any]:
    path = trial / "measurements.json"
    return json.loads(path.read_text()) if path.exists() else []


def started(config: TuneConfig) -> subprocess.Popen:
    return start_with_input([sys.executable, "-c", RUN], pickle.dumps(config))


def test_the_default_grid_is_the_papers() -> None:
    trials = SweepConfig().trials()
    assert len(trials) == 18
    assert {trial["lr"] for trial in trials} == {5e-5, 3e-5, 2e-5}
    assert {trial["batch_size"] for trial in trials} == {16, 32}
    assert {trial["epochs"] for trial in trials} == {2.0, 3.0, 4.0}


def test_the_order_in_which_fields_are_named_does_not_change_a_grid() -> None:
    space = {"lr": [1e-3, 1e-5], "epochs": [1, 2]}
    trials = SweepConfig(space=space).trials()
    assert trials == SweepConfig(space=dict(reversed(space.items()))).trials()
    assert trials[1] == {"epochs": 1.0, "lr": 1e-5}


def test_draws_depend_on_the_seed_alone_and_are_in_range() -> None:
    space = {
        "lr": {"low": 1e-5, "high": 1e-3, "log": True},
        "batch_size": {"low": 8, "high": 11},
        "weight_decay": {"low": 0.0, "high": 0.1},
        "epochs": [2, 3.5],
    }
    search = SweepConfig(method="random", space=space, num_samples=400)
    trials = search.trials()
    assert trials == search.trials()
    assert trials[:20] == replace(search, num_samples=20).trials()
    assert trials == replace(search, space=dict(reversed(space.items()))).trials()
    assert trials[0] != replace(search, seed=1).trials()[0]
    assert all(1e-5 <= trial["lr"] <= 1e-3 for trial in trials)
    assert {trial["batch_size"] for trial in trials} == {8, 9, 10, 11}
    assert {trial["epochs"] for trial in trials} == {2.0, 3.5}
    # Half of a log-uniform range lies below its geometric mean; 4 standard deviations of 1 in 40.
    assert abs(np.mean([trial["lr"] < 1e-4 for trial in trials]) - 0.5) < 0.1
    assert abs(np.mean([trial["weight_decay"] < 0.05 for trial in trials]) - 0.5) < 0.1


def test_a_range_may_stand_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(
        'output = "out"\nmodel = "bundle"\n[selection]\nshare = 0.1\n[search]\nmethod = "random"\n'
        "[search.space]\nlr = {low = 1e-5, high = 1e-3, log = true}\nbatch_size = [16, 32]\n"
    )
    config = parse("tune", ["--config", str(path)])
    assert config.search.space["lr"] == {"low": 1e-5, "high": 1e-3, "log": True}
    assert config.held_out is None
    space = '{"lr": [0.001], "epochs": [1, 2]}'
    more = ["--search.method", "grid", "--search.space", space, "--held_out.source", "dev.tsv"]
    config = parse("tune", ["--config", str(path), *more])
    assert [trial.lr for trial in config.trials()] == [0.001, 0.001]
    assert config.held_out.source == "dev.tsv"


@pytest.mark.trained
def test_rows_that_change_during_a_sweep_end_it_before_trials_differ_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests import tiny

    rows = tmp_path / "rows.jsonl"
    row = '{"text": "the %s tree %d", "label": "%s"}\n'
    rows.write_text("".join(row % (word, n, word) for n in range(8) for word in ("sea", "blue")))
    config = TuneConfig(
        output=str(tmp_path / "sweep"), model=str(tiny.bundle(tmp_path / "tiny", tiny.tokenizer())),
        train=LabelledConfig(source=str(rows)), selection=SelectionConfig(share=0.25),
        search=SweepConfig(space={"lr": [1e-3, 1e-4]}), epochs=1.0, batch_size=4, max_length=8,
        precision="fp32", num_workers=0, tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
    )  # fmt: skip
    train, trained = finetune.run, []

    def run(*arguments: Any) -> Any:
        trained.append(train(*arguments))
        with rows.open("a") as file:
            file.write(row % ("blue", 8, "blue"))

    monkeypatch.setattr(finetune, "run", run)
    with pytest.raises(
        RaybertError, match=r"rows\.jsonl: wanted the same contents for every trial"
    ):
        tune.run(config)
    assert len(trained) == 1


def test_an_invalid_search_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"space": {}}, r"search.space: wanted at least one field to vary, got none"),
        ({"space": {"lr": []}}, r"search.space.lr: wanted a list of values, or a range .*got \[\]"),
        ({"space": {"lr": 1e-3}}, r"search.space.lr: wanted a list of values, or a range .*0.001"),
        ({"space": {"lrr": [1.0]}}, r"search.space: wanted fields among .*'lrr' \(did you mean lr"),
        ({"space": {"output": ["x"]}}, r"search.space: wanted fields among max_length, .*'output'"),
        ({"space": {"lr": ["1e-3"]}}, r"search.space.lr: wanted finite numbers, got '1e-3'"),
        ({"space": {"lr": [math.inf]}}, r"search.space.lr: wanted finite numbers, got inf"),
        ({"space": {"batch_size": [8.5]}}, r"batch_size: wanted whole numbers, got 8.5"),
        ({"space": {"batch_size": [True]}}, r"batch_size: wanted whole numbers, got True"),
        ({"space": {"lr": {"low": 1, "high": 2}}}, r"lr: wanted a list of values for a grid"),
        ({"num_samples": 0}, r"search.num_samples: wanted at least 1, got 0"),
        ({"grace_epochs": 0.0}, r"search.grace_epochs: wanted above 0, got 0"),
        ({"reduction_factor": 1.0}, r"search.reduction_factor: wanted above 1, got 1"),
    ]
    for given, message in refused:
        with pytest.raises(ConfigError, match=message):
            SweepConfig(**given)
    ranges: list[tuple[dict[str, Any], str]] = [
        ({"low": 1e-3}, r"lr: wanted a range of low and high, .* got low"),
        ({"low": 1, "high": 2, "step": 1}, r"lr: wanted a range of low and high, .*step"),
        ({"low": 2, "high": 1}, r"lr: wanted low below high, got 2 and 1"),
        ({"low": 0, "high": 1, "log": True}, r"lr: wanted low above 0 with log, got 0"),
        ({"low": 1, "high": 2, "log": "yes"}, r"lr.log: wanted true or false, got 'yes'"),
    ]
    for values, message in ranges:
        with pytest.raises(ConfigError, match=message):
            SweepConfig(method="random", space={"lr": values})


def test_an_invalid_sweep_is_refused(small: Any) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"selection": SelectionConfig()}, r"selection.share: wanted above 0, got 0: trials are"),
        ({"max_concurrent": 0}, r"max_concurrent: wanted at least 1, got 0"),
        ({"held_out": None, "name": "x"}, r"name: wanted held_out too, whose rows decide"),
        ({"name": "team/pairs"}, r"name: wanted one without / : .*, got 'team/pairs'"),
        ({"search": SweepConfig(space={"lr": [-1.0]})}, r"search.space: lr: wanted above 0, got"),
        (
            {"search": SweepConfig(method="asha", grace_epochs=4.0)},
            r"search.grace_epochs: wanted below the 4 epochs of the longest trial, got 4",
        ),
        ({"search": SweepConfig(method="asha"), "seeds": (0, 1)}, r"seeds: wanted one with asha"),
        (
            {"search": SweepConfig(method="asha"), "num_workers": 0},
            r"num_workers: wanted at least 1 with asha, got 0",
        ),
    ]
    for change, message in refused:
        with pytest.raises(ConfigError, match=message):
            sweep(small, Path("x"), **change)
