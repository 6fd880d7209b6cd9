"""Checkpoints: whole or not at all, and never another run's."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from bert_core import files
from bert_core.errors import FormatError, ResourceError
from bert_core.train.checkpoint import (
    FORMAT_VERSION,
    LAST_FILE,
    MODEL,
    OPTIMIZER,
    POINTS,
    SUFFIX,
    Checkpoint,
    CheckpointWriter,
    best_checkpoint,
    latest_checkpoint,
    load_optimizer,
    load_weights,
    read_points,
)
from bert_core.train.config import OptimizerConfig
from bert_core.train.optim import build_optimizer

RUN = "3f2a91" + "0" * 58


def trained(seed: int, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def save_checkpoint(
    folder: str,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    run_digest: str = RUN,
    keep: int = 2,
    cost: float | None = None,
) -> Checkpoint:
    with CheckpointWriter(folder, run_digest=run_digest, keep=keep) as writer:
        writer.save(step, model, optimizer, cost)
        writer.wait()
    return Checkpoint(files.join(folder, f"step-{step:08d}"), step)


def save(folder: str | Path, step: int, seed: int = 0, keep: int = 2) -> Checkpoint:
    return save_checkpoint(str(folder), step, *trained(seed), keep=keep)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_equal_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    a, b = ours.state_dict(), theirs.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for index, values in a["state"].items():
        assert values.keys() == b["state"][index].keys()
        for key, value in values.items():
            assert value.dtype == b["state"][index][key].dtype
            assert torch.equal(value, b["state"][index][key])


def test_weights_and_optimizer_come_back_bit_for_bit(tmp_path: Path, object_store: str) -> None:
    for folder in (str(tmp_path), f"{object_store}/run"):
        save(folder, 7)
        found = latest_checkpoint(folder)
        assert found is not None
        assert found.step == 7
        (model, optimizer), (expected, its_optimizer) = trained(seed=1), trained(seed=0)
        load_weights(found, model, run_digest=RUN)
        load_optimizer(found, optimizer, run_digest=RUN)
        for key, value in expected.state_dict().items():
            assert torch.equal(model.state_dict()[key], value)
        assert_equal_state(optimizer, its_optimizer)


def test_points_of_the_curves_come_back_and_are_verified(tmp_path: Path) -> None:
    points = [(0, {"loss": 0.1 + 0.2}), (7, {"loss": 1e-300})]
    with CheckpointWriter(str(tmp_path), run_digest=RUN) as writer:
        lines = "".join(f"{json.dumps(point)}\n" for point in points).encode()
        writer.save(7, *trained(0), points=lines)
    found = latest_checkpoint(str(tmp_path))
    assert found is not None
    assert read_points(found) == points
    (tmp_path / "step-00000007" / POINTS).write_bytes(b"[]\n")
    with pytest.raises(FormatError, match=r"points\.jsonl: wanted sha256 .* the file has changed"):
        read_points(found)
    assert read_points(save(tmp_path, 8)) == []


def test_a_checkpoint_from_before_the_first_step_has_no_moments(tmp_path: Path) -> None:
    model, optimizer = trained(0, steps=0)
    checkpoint = save_checkpoint(str(tmp_path), 0, model, optimizer, run_digest=RUN)
    other, its_optimizer = trained(1, steps=2)
    load_weights(checkpoint, other, run_digest=RUN)
    load_optimizer(checkpoint, its_optimizer, run_digest=RUN)
    assert its_optimizer.state_dict()["state"] == {}


def test_weights_can_be_loaded_alone(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1)
    (tmp_path / "step-00000001" / f"{OPTIMIZER}{SUFFIX}").unlink()
    model, _ = trained(seed=1)
    load_weights(checkpoint, model, run_digest=RUN)
    assert torch.equal(model.state_dict()["0.weight"], trained(0)[0].state_dict()["0.weight"])


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step)
    assert names_in(tmp_path) == ["step-00000003", "step-00000010"]
    save(tmp_path, 11, keep=1)
    assert names_in(tmp_path) == ["step-00000011"]


def test_leftovers_of_a_killed_run_are_not_a_checkpoint_and_are_cleared(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for step in (2, 30):  # killed before the last file was written
        shutil.copytree(tmp_path / "step-00000001", tmp_path / f"step-{step:08}")
        (tmp_path / f"step-{step:08}" / LAST_FILE).unlink()
    (tmp_path / "notes").mkdir()
    found = latest_checkpoint(str(tmp_path))
    assert found is not None
    assert found.step == 1
    save(tmp_path, 3)
    assert names_in(tmp_path) == ["notes", "step-00000001", "step-00000003"]


def test_a_checkpoint_that_a_killed_run_left_unfinished_is_written_anew(tmp_path: Path) -> None:
    save(tmp_path, 2, seed=5)
    (tmp_path / "step-00000002" / LAST_FILE).unlink()
    assert latest_checkpoint(str(tmp_path)) is None
    checkpoint = save(tmp_path, 2, seed=0)
    model, optimizer = trained(seed=1)
    load_weights(checkpoint, model, run_digest=RUN)
    load_optimizer(checkpoint, optimizer, run_digest=RUN)
    assert torch.equal(model.state_dict()["0.weight"], trained(0)[0].state_dict()["0.weight"])


def test_an_empty_or_absent_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(str(tmp_path)) is None
    assert latest_checkpoint(str(tmp_path / "nothing")) is None


def test_the_step_is_read_from_the_name(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 12_345_678)
    assert latest_checkpoint(str(tmp_path)) == checkpoint
    assert checkpoint.folder == files.join(str(tmp_path), "step-12345678")


def change_model(folder: Path) -> None:
    data = bytearray((folder / f"{MODEL}{SUFFIX}").read_bytes())
    data[-1] ^= 1
    (folder / f"{MODEL}{SUFFIX}").write_bytes(data)


def cut_optimizer(folder: Path) -> None:
    path = folder / f"{OPTIMIZER}{SUFFIX}"
    path.write_bytes(path.read_bytes()[:-8])


def remove_model(folder: Path) -> None:
    (folder / f"{MODEL}{SUFFIX}").unlink()


def make_newer(folder: Path) -> None:
    description = json.loads((folder / LAST_FILE).read_text())
    (folder / LAST_FILE).write_text(
        json.dumps(description | {"format_version": FORMAT_VERSION + 1})
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            change_model,
            f"{MODEL}{SUFFIX}: wanted sha256 .*, got .*: the file has changed; remove this",
        ),
        (
            cut_optimizer,
            f"{OPTIMIZER}{SUFFIX}: wanted sha256 .*, got .*: the file has changed; remove",
        ),
        (
            remove_model,
            f"{MODEL}{SUFFIX}: wanted the file that {LAST_FILE} lists, it is missing; remove",
        ),
        (make_newer, f"wanted format_version {FORMAT_VERSION} or older, got {FORMAT_VERSION + 1}"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    checkpoint = save(tmp_path, 7)
    damage(tmp_path / "step-00000007")
    model, optimizer = trained(0)

    def load() -> None:
        load_weights(checkpoint, model, run_digest=RUN)
        load_optimizer(checkpoint, optimizer, run_digest=RUN)

    with pytest.raises(FormatError, match=f"step-00000007.*{message}"):
        load()


def test_the_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 7)
    with pytest.raises(
        FormatError,
        match=r"step-00000007: wanted a checkpoint of run 91bc07, got one of run 3f2a91 "
        r"\(another config or other shards\): use another output, or start over with --force",
    ):
        load_weights(checkpoint, trained(0)[0], run_digest="91bc07" + "0" * 58)


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    folder = str(tmp_path)
    for step, cost in enumerate([3.0, None, 1.0, 2.0, 1.0, None, 4.0, None]):
        save_checkpoint(folder, step, model, optimizer, run_digest="run", keep=2, cost=cost)
    best = best_checkpoint(folder)
    assert best is not None
    assert best.step == 2, "the earliest of equals"
    assert sorted(int(path.name[5:]) for path in tmp_path.iterdir()) == [2, 6, 7]


def test_one_written_in_the_background_has_the_weights_of_its_step(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    changed = threading.Event()
    with CheckpointWriter(str(tmp_path), run_digest="run") as writer:
        writer._thread.submit(changed.wait)  # nothing is written before the weights change
        writer.save(1, model, optimizer, 2.5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        changed.set()
        writer.wait()
    checkpoint = latest_checkpoint(str(tmp_path))
    assert checkpoint == best_checkpoint(str(tmp_path))
    assert checkpoint is not None
    load_weights(checkpoint, model, run_digest="run")
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def test_background_errors_are_raised_at_the_next_checkpoint(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    (tmp_path / "file").write_text("not a folder")
    with CheckpointWriter(str(tmp_path / "file"), run_digest="run") as writer:
        writer.save(1, model, optimizer)
        with pytest.raises(ResourceError, match=r"file/step-00000001/.* could not be written"):
            writer.save(2, model, optimizer)
