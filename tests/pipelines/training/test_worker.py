"""What a training worker says when it cannot go on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bert_core import files
from bert_core.errors import ResourceError
from bert_core.train.config import LoopConfig, OptimizerConfig
from pipelines.runtime.cluster import users_mistake
from pipelines.runtime.description import STARTED
from pipelines.training.config import TrainingConfig
from pipelines.training.driver import fit
from pipelines.training.records import Report


def test_running_out_of_memory_names_the_settings(tmp_path: Path) -> None:
    import torch

    from pipelines.training.worker import explained

    message = r"wanted more memory than there is .*: lower micro_batch_tokens, .*activation_check"
    with pytest.raises(ResourceError, match=message), explained(str(tmp_path)):
        torch.empty(1 << 50)
    with (
        pytest.raises(RuntimeError, match=r"size mismatch|shapes cannot"),
        explained(str(tmp_path)),
    ):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_a_diverged_run_can_resume_from_its_last_checkpoint(tmp_path: Path) -> None:
    from torch import nn

    from bert_core.train.checkpoint import CheckpointWriter
    from bert_core.train.loop import DivergedError
    from bert_core.train.optim import build_optimizer
    from pipelines.training.worker import explained

    with (
        pytest.raises(DivergedError, match="up; there is no checkpoint yet"),
        explained(str(tmp_path)),
    ):
        raise DivergedError("the loss went up")
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, OptimizerConfig())
    with CheckpointWriter(str(tmp_path), run_digest="run") as writer:
        writer.save(7, model, optimizer)
    message = r"up; .*step-00000007 has the weights after step 7"
    with pytest.raises(DivergedError, match=message), explained(str(tmp_path)):
        raise DivergedError("the loss went up")


def test_storage_that_is_not_shared_or_not_writable_is_found_before_the_first_step(
    tmp_path: Path,
) -> None:
    from pipelines.training.worker import check_storage

    output = str(tmp_path / "out")
    with pytest.raises(
        ResourceError, match=r"out: wanted a place that all nodes share, .* does not"
    ):
        check_storage(output, 0)
    files.write_json(files.join(output, STARTED), {})
    check_storage(output, 0)
    assert list((tmp_path / "out" / "checkpoints").iterdir()) == []
    (tmp_path / "out" / "checkpoints").rmdir()
    (tmp_path / "out" / "checkpoints").write_text("no folder")
    with pytest.raises(ResourceError, match=r"checkpoints/probe-0.* could not be written"):
        check_storage(output, 0)


def test_a_rank_that_finds_a_different_checkpoint_than_rank_0_does_not_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pipelines.training import worker
    from pipelines.training.worker import check_agreement

    check_agreement("here", 40)
    monkeypatch.setattr(worker, "from_rank_0", lambda step: 80.0)
    with pytest.raises(ResourceError, match=r"here: wanted the checkpoint after step 80, .* 40 as"):
        check_agreement("here", 40)


@pytest.mark.usefixtures("local_ray")
def test_an_error_on_any_rank_is_retried_but_a_users_mistake_ends_training_at_once(
    small: Any, tmp_path: Path
) -> None:
    """While the other rank waits for the one that fails."""
    config = replace(small.pretrain(tmp_path / "out"), num_workers=2, max_failures=2)
    message = "/data: wanted a folder, got nothing: mount it\non every node"
    attempts = tmp_path / "attempts"

    def worker(config: TrainingConfig, digest: str, report: Report) -> None:
        from torch import distributed

        if distributed.get_rank() == 1:
            is_first = not attempts.exists()
            with attempts.open("a") as file:
                file.write("tried\n")
            raise OSError("a cable") if is_first else ResourceError(message)
        distributed.barrier()

    files.write_json(files.join(config.output, STARTED), {})
    with pytest.raises(ResourceError) as error:
        fit(worker, config, "digest", LoopConfig(max_steps=1), "a mistake")
    assert attempts.read_text().count("tried") == 2
    assert type(error.value) is ResourceError
    assert str(error.value) == message


def test_other_failures_end_training_as_rays_own_error() -> None:
    from ray.train import WorkerGroupError

    cable, full = OSError("a cable"), ResourceError("the disk is full")
    assert users_mistake(WorkerGroupError("failed", {1: cable})) is None
    mistake = WorkerGroupError("failed", {1: cable})
    mistake.__cause__ = full
    assert str(users_mistake(mistake)) == str(full)
