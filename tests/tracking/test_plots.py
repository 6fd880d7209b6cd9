import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from tracking.plots import plot_confusion, plot_curves, plot_lengths


def write_metrics(folder: Path, rows: int) -> Path:
    path = folder / "metrics.jsonl"
    with open(path, "w") as file:
        for step in range(rows):
            metrics = {
                "loss": 1 / (step + 1),
                "tokens_per_s": 3e4,
                "nsp_accuracy": 0.5,
                "other": 1.0,
            }
            if step == 3:
                metrics["loss"] = float("nan")
            file.write(json.dumps({"step": step, "time_ms": 0, "metrics": metrics}) + "\n")
    return path


def is_drawn(path: Path) -> bool:
    return bool(imread(path)[..., :3].std() > 0.01)


@pytest.mark.parametrize("rows", [1, 500])
def test_each_kind_of_metric_there_is_gets_a_picture(tmp_path: Path, rows: int) -> None:
    paths = plot_curves(write_metrics(tmp_path, rows), tmp_path / "plots")
    assert [path.name for path in paths] == ["loss.png", "accuracy.png", "throughput.png"]
    assert all(map(is_drawn, paths))


def test_nothing_recorded_draws_nothing(tmp_path: Path) -> None:
    assert plot_curves(write_metrics(tmp_path, 0), tmp_path) == []


@pytest.mark.parametrize("classes", [2, 30])
def test_a_confusion_matrix_is_drawn_also_with_an_empty_row(tmp_path: Path, classes: int) -> None:
    matrix = np.diag(np.arange(classes))
    labels = [f"label {index}" for index in range(classes)]
    assert is_drawn(plot_confusion(labels, matrix, tmp_path / "confusion.png"))


def test_lengths_are_drawn(tmp_path: Path) -> None:
    assert is_drawn(plot_lengths({5: 10, 128: 1000}, tmp_path / "lengths.png"))
