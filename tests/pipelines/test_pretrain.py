"""Pretraining on Ray Train: exact, resumable, one MLflow run whatever happens."""

import math
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from bert_core.data.shards import ShardSet
from bert_core.data.splits import TRAIN
from bert_core.errors import ConfigError, FormatError
from bert_core.manifest import read_manifest
from bert_core.model.config import RotaryAttentionConfig
from bert_core.model.variants import VARIANTS
from bert_core.train.config import LoopConfig, OptimizerConfig, ScheduleConfig
from pipelines import prepare, pretrain, vocab
from pipelines.pretrain import BatchWarmupConfig, PhaseConfig, PretrainConfig, learnt_little
from pipelines.training import driver
from pipelines.training.records import read_records, record_all
from tests import processes
from tests.commands import pretrain_arguments, raybert
from tests.processes import descendants, kill_all
from tests.waiting import wait_until
from tracking.runs import metric_names as names


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "bundle" / "model.safetensors")


def assert_equal_bits(trained: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert trained.keys() == other.keys()
    for name, tensor in trained.items():
        np.testing.assert_array_equal(tensor, other[name], err_msg=name)


def losses(folder: Path) -> list[float]:
    return [numbers["loss"] for numbers in read_records(folder).values() if "loss" in numbers]


def run_of(config: PretrainConfig) -> Any:
    import mlflow

    client = mlflow.MlflowClient(config.tracking_uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    runs = client.search_runs(experiments, f"tags.output = '{config.output}'")
    assert len(runs) == 1, "one MLflow run a stage"
    return runs[0], client


@pytest.mark.usefixtures("local_ray")
def test_no_workers_and_one_worker_give_the_same_losses_and_weights(
    pretrained: Any, tmp_path: Path
) -> None:
    pretrain.run(replace(pretrained.pretrain(tmp_path / "one"), num_workers=1))
    assert losses(tmp_path / "one") == losses(pretrained.folder / "pretrain")
    assert len(losses(tmp_path / "one")) == 12
    assert_equal_bits(weights(tmp_path / "one"), weights(pretrained.folder / "pretrain"))


@pytest.fixture
def alone(prepared: Any, tmp_path: Path) -> PretrainConfig:
    """A run of one process, without dropout, which is drawn by rank."""
    config = without_dropout(prepared.pretrain(tmp_path / "alone", steps=6))
    pretrain.run(config)
    return config


@pytest.mark.usefixtures("forked")
def test_workers_that_share_the_weights_train_as_one_process_does(
    alone: PretrainConfig, tmp_path: Path
) -> None:
    """And one process goes on from their checkpoint."""
    sharded = replace(alone, output=str(tmp_path / "sharded"), num_workers=2, fsdp=True)
    pretrain.run(sharded)
    np.testing.assert_allclose(
        losses(tmp_path / "sharded"), losses(tmp_path / "alone"), rtol=0, atol=1e-4
    )
    names = sorted(path.name for path in (tmp_path / "sharded/checkpoints/step-00000004").iterdir())
    assert names[1:3] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, tensor in weights(tmp_path / "alone").items():
        np.testing.assert_allclose(weights(tmp_path / "sharded")[name], tensor, rtol=0, atol=1e-4)
    cut_back(tmp_path / "sharded", 4)
    done = pretrain.run(replace(sharded, num_workers=0))
    assert done.counts["steps"] == 6
    assert len(losses(tmp_path / "sharded")) == 6


def without_dropout(config: PretrainConfig) -> PretrainConfig:
    return replace(config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def cut_back(folder: Path, step: int) -> None:
    """Leave a run as if it had been killed after its checkpoint of `step`."""
    (folder / "manifest.json").unlink()
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


@pytest.fixture(scope="module")
def masked_later(prepared: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Shards of full sentences whose masks are drawn at training time."""
    config = prepared.prepare(tmp_path_factory.mktemp("masked_later") / "shards")
    prepare.run(
        replace(
            config,
            masking=replace(config.masking, dynamic=True, strategy="span"),
            pairs=replace(config.pairs, kind="full_sentences", dupe_factor=1),
        )
    )
    return config.output


@pytest.fixture
def drawn_alone(prepared: Any, tmp_path: Path, masked_later: str) -> PretrainConfig:
    """A run of one process on them, without dropout."""
    config = replace(prepared.pretrain(tmp_path / "0", steps=8), shards=masked_later)
    config = replace(without_dropout(config), keep_checkpoints=9)
    pretrain.run(config)
    return config


@pytest.mark.usefixtures("forked")
def test_masks_drawn_at_training_time_are_the_same_for_any_number_of_workers(
    drawn_alone: PretrainConfig, tmp_path: Path
) -> None:
    """As are the rows; and their number may change from one start to the next."""
    two = replace(drawn_alone, output=str(tmp_path / "2"), num_workers=2)
    pretrain.run(two)
    for config in (drawn_alone, two):
        counts = read_manifest(config.output).counts
        assert 4.0 < counts["mlm_loss_after"] < counts["mlm_loss_before"] < 8.0
        assert not [name for name in counts if name.startswith("nsp")]  # rows have no such label
    # Without dropout the first steps agree; later ones drift apart by rounding.
    np.testing.assert_allclose(losses(tmp_path / "0"), losses(tmp_path / "2"), rtol=1e-5)
    cut_back(tmp_path / "2", 4)
    pretrain.run(replace(two, num_workers=0))
    np.testing.assert_allclose(losses(tmp_path / "0"), losses(tmp_path / "2"), rtol=1e-4)


def test_rows_whose_label_nothing_learns_are_refused(prepared: Any, tmp_path: Path) -> None:
    config = prepared.prepare(tmp_path / "shards")
    pairs = replace(config.pairs, kind="sop", dupe_factor=1)
    prepare.run(replace(config, pairs=pairs))
    message = "wanted rows that bert-tiny can be trained on, got rows with sentence_order"
    with pytest.raises(ConfigError, match=message):
        pretrain.run(replace(prepared.pretrain(tmp_path / "run"), shards=config.output))


def test_the_record_has_what_a_person_looks_for(pretrained: Any) -> None:
    from bert_core.bundle.format import load_bundle

    config = pretrained.pretrain(pretrained.folder / "pretrain")
    run, client = run_of(config)
    assert run.info.status == "FINISHED"
    assert run.data.params["variant"] == "bert-tiny"
    assert run.data.params["optimizer.lr"] == "0.001"
    assert {each.dataset.name for each in run.inputs.dataset_inputs} == {"shards", "tokenizer"}
    assert all(each.dataset.digest for each in run.inputs.dataset_inputs)
    history = client.get_metric_history(run.info.run_id, "train/mlm_loss")
    assert [point.step for point in history] == list(range(1, 13))
    assert {"held_out/mlm_loss", "held_out/nsp_accuracy", "learning_rate", "grad_norm"} <= set(
        run.data.metrics
    )
    artifacts = {Path(each.path).name for each in client.list_artifacts(run.info.run_id)}
    assert {"loss.png", "accuracy.png", "learning_rate.png", "throughput.png"} <= artifacts
    assert load_bundle(pretrained.folder / "pretrain" / "bundle").metrics["mlm_loss"] > 0


@pytest.mark.trained
def test_a_run_is_measured_as_it_goes_and_its_best_weights_are_kept(
    prepared: Any, tmp_path: Path
) -> None:
    config = replace(
        prepared.pretrain(tmp_path / "out"),
        evaluate_every_steps=3,
        keep_checkpoints=1,
        loop=LoopConfig(max_steps=7, precision="fp32"),
    )
    pretrain.run(config)
    records = read_records(config.local_folder)
    measured = {
        step: r["held_out/mlm_loss"] for step, r in records.items() if "held_out/mlm_loss" in r
    }
    assert sorted(measured) == [0, 3, 6, 7]
    assert records[3]["held_out/perplexity"] == pytest.approx(math.exp(measured[3]))
    totals = {step: r["held_out/loss"] for step, r in records.items() if step in measured and step}
    best = min(totals, key=totals.__getitem__)
    kept = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert kept == sorted({f"step-{best:08d}", "step-00000007"})
    for step in range(1, 8):
        assert 0 <= records[step]["padding_share"] < 0.6
        assert 0 <= records[step]["data_wait_share"] < 1
        assert records[step]["memory_gb"] > 0.1
        # Work counts real tokens and masked words only, so it is no more than all padded would be.
        assert 0 < records[step]["tflops_per_s"] < 10


@pytest.fixture(scope="module")
def longer_rows(prepared: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same corpus in rows of up to 96 tokens."""
    config = prepared.prepare(tmp_path_factory.mktemp("longer") / "shards")
    prepare.run(replace(config, pairs=replace(config.pairs, max_length=96, dupe_factor=1)))
    return str(config.output)


def in_two_phases(prepared: Any, longer_rows: str, output: Path) -> PretrainConfig:
    then = PhaseConfig(shards=longer_rows, steps=5, global_batch_size=8, lr=5e-4, warmup_steps=2)
    return replace(prepared.pretrain(output, steps=12), then=then)


@pytest.mark.trained
def test_the_last_steps_see_other_rows(prepared: Any, longer_rows: str, tmp_path: Path) -> None:
    config = in_two_phases(prepared, longer_rows, tmp_path / "out")
    pretrain.run(config)
    records = read_records(config.local_folder)
    rates = [records[step]["learning_rate"] for step in range(1, 13)]
    peak, second = 1e-3, 5e-4
    # Each of the two climbs for two steps and falls to nothing.
    climbs = [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2], [0.5, 1.0, 1.0, 2 / 3, 1 / 3]
    wanted = [*(peak * share for share in climbs[0]), *(second * share for share in climbs[1])]
    assert rates == pytest.approx(wanted)
    tokens = [records[step]["tokens"] for step in range(1, 13)]
    assert min(tokens[:7]) / 16 < 48 < max(tokens[7:]) / 8


@pytest.mark.guard
def test_a_run_killed_in_either_phase_resumes_where_it_stopped(
    prepared: Any, longer_rows: str, tmp_path: Path
) -> None:
    config = in_two_phases(prepared, longer_rows, tmp_path / "out")
    pretrain.run(config)
    kept, whole = weights(tmp_path / "out"), losses(tmp_path / "out")
    # Killed in the first phase, and in the second: what a checkpoint after step 4, 8 makes of it.
    for step in (4, 8):
        cut = replace(config, output=str(tmp_path / f"cut-{step}"), keep_checkpoints=9)
        with pytest.raises(Killed), killed_after(step):
            pretrain.run(cut)
        pretrain.run(cut)
        assert_equal_bits(weights(Path(cut.output)), kept)
        assert losses(Path(cut.output)) == whole


@pytest.mark.trained
def test_lost_points_are_recorded_by_the_resumed_run(prepared: Any, tmp_path: Path) -> None:
    """A report of Ray Train's comes back before it is recorded."""
    config = prepared.pretrain(tmp_path / "out")

    def record_some(recorder: Any, records: Any) -> None:
        record_all(recorder, [(step, numbers) for step, numbers in records if step < 3])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "record_all", record_some)
        with pytest.raises(Killed), killed_after(4):
            pretrain.run(config)
    assert list(read_records(tmp_path / "out")) == [0, 1, 2]
    pretrain.run(config)
    records = read_records(tmp_path / "out")
    assert [step for step, numbers in records.items() if "loss" in numbers] == list(range(1, 13))


@pytest.mark.trained
def test_a_run_whose_hours_end_before_it_has_made_up_for_lost_steps_is_measured_at_its_end(
    prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bert_core.bundle.format import load_bundle

    config = prepared.pretrain(tmp_path / "out")
    pretrain.run(config)
    cut_back(tmp_path / "out", 4)
    # What a slower machine comes to in the same hours.
    monkeypatch.setattr(LoopConfig, "place", lambda _, steps, __: 12 if steps >= 6 else steps)
    counts = pretrain.run(config).counts
    assert counts["steps"] == 6
    records = read_records(tmp_path / "out")
    assert "loss" in records[12], "the record keeps what was lost"
    metrics = load_bundle(tmp_path / "out" / "bundle").metrics
    assert metrics["mlm_loss"] == counts["mlm_loss_after"] < counts["mlm_loss_before"]
    assert metrics["mlm_loss"] != records[12]["held_out/mlm_loss"]


@pytest.mark.parametrize("step", [8, 12])
def test_a_run_that_lost_its_record_has_the_whole_curve(
    pretrained: Any, tmp_path: Path, step: int
) -> None:
    """Also if it had taken its last step: its newest checkpoint has all points."""
    config = pretrained.pretrain(tmp_path / "out")
    with pytest.raises(Killed), killed_after(step):
        pretrain.run(config)
    whole = read_records(config.local_folder)
    for name in ("metrics.jsonl", "metrics.sent", "mlflow_run.json"):
        (config.local_folder / name).unlink()
    assert pretrain.run(config).counts["mlm_loss_before"] == whole[0]["held_out/mlm_loss"]
    records = read_records(config.local_folder)
    for each in range(step):
        assert of_curves(records[each]) == of_curves(whole[each])
    assert losses(config.local_folder) == losses(pretrained.folder / "pretrain")
    assert_equal_bits(weights(tmp_path / "out"), weights(pretrained.folder / "pretrain"))


def of_curves(numbers: dict[str, float]) -> dict[str, float]:
    """A point without what a run tells of its time and its nodes with whatever point comes next."""
    own = (names.GOODPUT, names.WALL_S, names.RECOMPUTED_STEPS)
    return {
        name: value
        for name, value in numbers.items()
        if name not in own and not name.startswith((names.SYSTEM, "time/"))
    }


class Killed(BaseException):
    pass


@contextmanager
def killed_after(step: int) -> Iterator[None]:
    """Training in this process ends as by a kill when the checkpoint of `step` is written."""
    from bert_core.train.checkpoint import CheckpointWriter

    whole = CheckpointWriter.save

    def save(self: Any, index: int, *arguments: Any) -> None:
        whole(self, index, *arguments)
        if index == step:
            self.wait()
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointWriter, "save", save)
        yield


def test_phases_that_do_not_fit_together_are_refused(
    prepared: Any, longer_rows: str, tmp_path: Path
) -> None:
    config = prepared.pretrain(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"then\.steps: wanted fewer than loop\.max_steps = 12"):
        replace(config, then=PhaseConfig(shards=longer_rows, steps=12))
    small = PhaseConfig(shards=longer_rows, steps=2, global_batch_size=1)
    with pytest.raises(ConfigError, match=r"then\.global_batch_size: wanted at least a row for"):
        replace(config, then=small, num_workers=2)
    other = prepared.prepare(tmp_path / "other")
    prepare.run(replace(other, pairs=replace(other.pairs, kind="full_sentences")))
    then = PhaseConfig(shards=str(other.output), steps=2)
    with pytest.raises(
        ConfigError, match=r"then\.shards: wanted rows with the label of shards, next"
    ):
        pretrain.run(replace(config, then=then))
    for wrong in ({"steps": 0}, {"steps": 1, "lr": 0.0}, {"steps": 1, "warmup_steps": -1}):
        with pytest.raises(ConfigError, match=rf"then\.{list(wrong)[-1]}: wanted"):
            PhaseConfig(shards="x", **wrong)


@pytest.mark.usefixtures("local_ray")
def test_a_run_that_diverges_is_not_retried_and_names_its_last_checkpoint(
    prepared: Any, tmp_path: Path
) -> None:
    from bert_core.train.loop import DivergedError

    config = replace(prepared.pretrain(tmp_path / "out", steps=40), num_workers=1)
    config = replace(
        config, optimizer=OptimizerConfig(lr=30.0, max_grad_norm=0.0), checkpoint_every_steps=1
    )
    with pytest.raises(DivergedError, match=r"step-\d{8} has the weights after step \d+") as error:
        pretrain.run(config)
    assert "train into another output with a lower lr" in str(error.value)
    run, client = run_of(config)
    assert run.info.status == "FAILED"
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "loss")]
    assert steps == sorted(set(steps)), "tried once"


@pytest.mark.ray
@pytest.mark.guard
@pytest.mark.timeout(1800)
def test_a_run_with_every_failure_ends_as_an_undisturbed_one(
    prepared: Any, tmp_path: Path, server: Any, start: "Start"
) -> None:
    """Two workers, dropout on: the same bits, and one MLflow run with every step once, in order."""
    alone = replace(prepared.pretrain(tmp_path / "alone", steps=STEPS), num_workers=2)
    # Undisturbed, a report need not be waited for.
    undisturbed = os.environ | {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.05"}
    subprocess.run(command(alone), check=True, timeout=240, env=undisturbed)
    server.start()
    folder, says = tmp_path / "hurt", tmp_path / "says.txt"
    hurt = replace(alone, output=str(folder), tracking_uri=server.uri)

    # The tracking server is away, and then everything is killed, in the middle of an epoch and
    # while a checkpoint is written.
    process = start(hurt, says)
    wait_for_steps(process, folder)
    server.stop()
    wait_for_steps(process, folder)
    everything = [process.pid, *descendants(process.pid)]
    wait_until(
        "a checkpoint is being written", lambda: checkpoint_in_writing(folder),
        timeout_s=60, every_s=0,  # no sleep: it is written in no time
    )  # fmt: skip
    kill_all(*everything)
    process.wait()
    assert not (folder / "manifest.json").exists()

    # The server comes back while the run goes on. A worker is killed: another takes its place. Then
    # Ctrl-C: it says so and leaves no process.
    process = start(hurt, says)
    wait_for_steps(process, folder)
    server.start()
    wait_for_steps(process, folder)
    victims = ray_processes(process.pid, "RayTrainWorker")
    assert len(victims) == 2
    os.kill(victims[0], signal.SIGKILL)
    wait_for_other_workers(process, victims)
    wait_for_steps(process, folder)
    started = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    output = says.read_text()
    assert "resuming the earlier run of" in output
    assert output.endswith("raybert pretrain: interrupted; run the same command again to resume\n")
    assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []
    assert run_of(hurt)[0].info.status == "KILLED"

    # The controller of training is killed: the run has failed.
    process = start(hurt, says)
    wait_for_steps(process, folder)
    [controller] = ray_processes(process.pid, "TrainController")
    os.kill(controller, signal.SIGKILL)
    assert process.wait(timeout=240) == 1
    assert run_of(hurt)[0].info.status == "FAILED"

    subprocess.run(command(hurt), check=True, timeout=240, env=undisturbed)
    assert_equal_bits(weights(folder), weights(tmp_path / "alone"))
    assert losses(folder) == losses(tmp_path / "alone")
    run, client = run_of(hurt)
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [point.step for point in history] == list(range(1, STEPS + 1)), "each once, in order"
    assert [point.value for point in history] == losses(folder)


STEPS = 240  # more than are trained while a server starts

Start = Callable[[PretrainConfig, Path], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a run whose output goes to a file; what a failed test leaves of it is killed."""
    started: list[subprocess.Popen[Any]] = []

    def start(config: PretrainConfig, says: Path) -> "subprocess.Popen[bytes]":
        started.append(processes.start(command(config), says, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        processes.kill_tree(process)


def wait_for_other_workers(process: "subprocess.Popen[bytes]", victims: list[int]) -> None:
    """Until as many train again, none of whom trained before."""

    def are_others() -> bool:
        workers = ray_processes(process.pid, "RayTrainWorker")
        return len(workers) == len(victims) and not set(workers) & set(victims)

    wait_until("other workers train", are_others, timeout_s=180, every_s=0.05, process=process)


def checkpoint_in_writing(folder: Path) -> bool:
    from bert_core.train.checkpoint import LAST_FILE

    return any(not (each / LAST_FILE).exists() for each in (folder / "checkpoints").glob("step-*"))


@pytest.mark.trained
def test_a_run_of_hours_ends_with_them_and_its_schedule_too(
    prepared: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared.pretrain(tmp_path / "out", steps=1_000_000)
    loop = replace(config.loop, max_hours=2 / 3600)
    done = pretrain.run(replace(config, loop=loop, checkpoint_every_steps=10_000))
    records = read_records(tmp_path / "out")
    steps = done.counts["steps"]
    assert 1 < steps == max(step for step, numbers in records.items() if "loss" in numbers)
    assert records[steps]["elapsed_s"] >= 2
    assert records[steps]["learning_rate"] < 0.2 * config.optimizer.lr
    assert done.counts["mlm_loss_after"] < done.counts["mlm_loss_before"]
    shown = re.search(r"^  pretraining: \d+ of 2 seconds", capsys.readouterr().out, re.MULTILINE)
    assert shown, "short as it is, it shows how far it is"
    with pytest.raises(ConfigError, match=r"then: wanted no loop\.max_hours with it"):
        replace(config, loop=loop, then=PhaseConfig(shards="x", steps=1))


def command(config: PretrainConfig) -> list[str]:
    arguments = pretrain_arguments(
        config,
        "--log_every_steps", "1", "--checkpoint_every_steps", "4",
        "--optimizer.lr", "1e-3", "--schedule.warmup_steps", "2",
        "--num_workers", str(config.num_workers), "--tracking_uri", str(config.tracking_uri),
    )  # fmt: skip
    return raybert(*arguments)


def wait_for_steps(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Until the run has recorded some more steps, and has a checkpoint."""
    target = max(read_records(folder), default=-1) + 4

    def is_far_enough() -> bool:
        has_checkpoint = any(folder.glob("checkpoints/*/checkpoint.json"))
        return has_checkpoint and max(read_records(folder), default=-1) >= target

    wait_until(
        f"step {target} and a checkpoint are recorded", is_far_enough,
        timeout_s=180, every_s=0.05, process=process,
    )  # fmt: skip


def ray_processes(pid: int, name: str) -> list[int]:
    """Ray's processes below `pid`, by what Ray has them call themselves."""
    named = []
    for child in descendants(pid):
        try:
            title = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if name.encode() in title:
            named.append(child)
    return named


def test_a_vocabulary_that_does_not_match_the_shards_is_refused(
    prepared: Any, tmp_path: Path
) -> None:
    vocab.run(replace(prepared.vocab(tmp_path / "vocab"), vocab_size=900))
    config = replace(prepared.pretrain(tmp_path / "out"), tokenizer=str(tmp_path / "vocab"))
    message = r"shards was made with vocabulary [0-9a-f]{6}, .*vocab has [0-9a-f]{6}: run `raybert"
    with pytest.raises(FormatError, match=message):
        pretrain.run(config)
    assert not (tmp_path / "out").exists()


def test_a_truncated_shard_is_refused_by_name_before_training(
    prepared: Any, tmp_path: Path
) -> None:
    shutil.copytree(prepared.folder / "shards", tmp_path / "shards")
    shard = next((tmp_path / "shards").glob("train-*.arrow"))
    os.truncate(shard, shard.stat().st_size // 2)
    config = replace(prepared.pretrain(tmp_path / "out"), shards=str(tmp_path / "shards"))
    with pytest.raises(FormatError, match=rf"{shard.name}: wanted [\d,]+ bytes as its manifest"):
        pretrain.run(config)


def test_a_shard_that_changed_is_refused_by_name(prepared: Any, tmp_path: Path) -> None:
    """By a worker, which reads it; `test_worker.py` has how its error ends training on Ray."""
    shutil.copytree(prepared.folder / "shards", tmp_path / "shards")
    for shard in (tmp_path / "shards").glob("train-*.arrow"):
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    config = replace(prepared.pretrain(tmp_path / "out"), shards=str(tmp_path / "shards"))
    with pytest.raises(FormatError, match=r"train-\d+-of-\d+.arrow: wanted sha256 .* was changed"):
        pretrain.run(config)


def test_settings_out_of_range_are_refused(small: Any) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"variant": "bert-huge"}, "variant: wanted one of bert-tiny"),
        ({"global_batch_size": 0}, "global_batch_size: wanted at least 1, got 0"),
        ({"num_workers": 40}, "global_batch_size: wanted at least a row for each of 40 workers"),
        ({"num_workers": (1, 40)}, "global_batch_size: wanted at least a row for each of 40 work"),
        ({"num_workers": (3, 2)}, r"num_workers: wanted .* and then a maximum, got \[3, 2\]"),
        ({"num_workers": (0, 2)}, r"num_workers: wanted .* at least 1 and .*, got \[0, 2\]"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens: wanted at least 1, got 0"),
        ({"resize_every_s": -1.0}, "resize_every_s: wanted at least 0, got -1.0"),
    ]
    for change, message in refused:
        with pytest.raises(ConfigError, match=message):
            replace(small.pretrain(Path("x")), **change)
    with pytest.raises(ConfigError, match="max_steps: wanted at least 1, got 0"):
        LoopConfig(max_steps=0)


def test_a_warm_up_that_takes_the_whole_schedule_is_refused(small: Any) -> None:
    config = small.pretrain(Path("x"), steps=10)
    then = PhaseConfig(shards="y", steps=4, lr=1e-4, warmup_steps=3)
    message = r"schedule\.warmup_steps: wanted fewer than the 10 steps of its schedule.*, got 10: "
    with pytest.raises(ConfigError, match=message):
        replace(config, schedule=ScheduleConfig(warmup_steps=10))
    almost = replace(config, schedule=ScheduleConfig(warmup_steps=6))
    with pytest.raises(ConfigError, match=r"schedule\.warmup_steps: wanted fewer than the 6 steps"):
        replace(almost, then=then)
    assert replace(almost, then=PhaseConfig(shards="y", steps=4)).learning_rate(5) == 1e-3
    with pytest.raises(ConfigError, match=r"then\.warmup_steps: wanted fewer than the 3 steps"):
        replace(config, then=replace(then, steps=3))
    with pytest.raises(ConfigError, match=r"then\.warmup_steps: wanted then\.lr with it"):
        replace(then, lr=None)


@pytest.mark.parametrize(
    ("before", "after", "unigram", "why"),
    [
        (8.734, 8.709, 6.497, "word frequencies alone have a loss of 6.497, so little was learnt"),
        (6.538, 6.538, 6.6, "the loss began at 6.538, so little was learnt"),
        (8.7, 4.2, 6.5, ""),
        (2.10, 2.05, 6.5, ""),
    ],
)
def test_a_run_that_learnt_little_says_so(
    small: Any, before: float, after: float, unigram: float, why: str
) -> None:
    line = learnt_little(small.pretrain(Path("x")), before, after, unigram)
    assert line.startswith(why)
    assert bool(line) == bool(why)


@pytest.mark.parametrize(
    ("rows", "steps", "message"),
    [
        (16, 2, r"batch_warmup\.rows: wanted at least a row .* fewer than global_batch_size = 16"),
        (4, 12, r"batch_warmup\.steps: wanted fewer than the 12 steps on these shards, got 12"),
        (0, 2, r"batch_warmup\.rows: wanted at least 1, got 0"),
    ],
)
def test_a_batch_that_would_not_grow_is_refused(
    small: Any, rows: int, steps: int, message: str
) -> None:
    config = replace(small.pretrain(Path("x"), steps=12), global_batch_size=16)
    with pytest.raises(ConfigError, match=message):
        replace(config, batch_warmup=BatchWarmupConfig(rows=rows, steps=steps))


@pytest.mark.drill
def test_batches_grow_in_the_first_steps(
    prepared: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = []
    for name, warmup in (("equal", None), ("grown", BatchWarmupConfig(rows=2, steps=4))):
        config = replace(prepared.pretrain(tmp_path / name, steps=5), batch_warmup=warmup)
        pretrain.run(replace(config, global_batch_size=10))
        records = read_records(tmp_path / name)
        tokens.append(sum(point.get(names.TOKENS, 0) for point in records.values()))
    assert tokens[0] > 0
    assert tokens[1] == pytest.approx(tokens[0] * (2 + 4 + 6 + 8 + 10) / 50, rel=0.2)
    told = " ".join(capsys.readouterr().out.split())
    rows = sum(info.rows for info in ShardSet.read(config.shards).split(TRAIN))
    assert f"pretrain: {50 / rows:.3g} passes over the {rows:,} rows of" in told


def test_a_run_says_how_often_it_passes_over_its_rows(small: Any) -> None:
    config = replace(small.pretrain(Path("x"), steps=10), global_batch_size=8)
    assert [rows for _, rows in config.rows_drawn()] == [80]
    grown = replace(config, batch_warmup=BatchWarmupConfig(rows=2, steps=3))
    assert [rows for _, rows in grown.rows_drawn()] == [2 + 4 + 6 + 7 * 8]
    then = PhaseConfig(shards="y", steps=4, global_batch_size=3)
    assert [rows for _, rows in replace(config, then=then).rows_drawn()] == [48, 12]


def test_rotations_have_a_base_only_where_positions_are_rotated() -> None:
    modern = VARIANTS["modernbert-base"].config
    assert isinstance(modern.attention, RotaryAttentionConfig)
    slower = replace(modern, attention=replace(modern.attention, theta=1e4))
    assert modern.adapted(rope_theta=1e4) == slower
    with pytest.raises(ConfigError, match="rope_theta: wanted none for the family bert, which has"):
        VARIANTS["bert-tiny"].config.adapted(rope_theta=1e4)
