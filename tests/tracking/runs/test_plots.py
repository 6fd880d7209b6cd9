import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.image import imread

from bert_core.metrics.calibration import reliability
from tracking.runs.goodput import Goodput
from tracking.runs.metric_names import ACTIVITIES
from tracking.runs.plots import (
    plot_confusion,
    plot_curves,
    plot_lengths,
    plot_parallel_coordinates,
    plot_reliability,
    plot_time,
    readable,
)


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
def test_each_kind_of_metric_gets_a_plot(tmp_path: Path, rows: int) -> None:
    paths = plot_curves(write_metrics(tmp_path, rows), tmp_path / "plots")
    assert [path.name for path in paths] == ["loss.png", "accuracy.png", "throughput.png"]
    assert all(map(is_drawn, paths))


def test_a_busy_machine_gets_no_warning_of_large_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """matplotlib 3.11.2, Legend._find_best_position: it asks the clock, not the data."""
    clock = itertools.count(step=2)
    monkeypatch.setattr("matplotlib.legend.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    metrics = tmp_path / "metrics.jsonl"
    values = {"loss": 1.0, "held_out_loss": 1.1}
    lines = [{"step": step, "time_ms": 0, "metrics": values} for step in range(3)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert plot_curves(metrics, tmp_path / "plots")
    assert is_drawn(plot_lengths({1: 3, 2: 4}, tmp_path / "lengths.png"))
    assert next(clock) > 2  # a place was looked for


def test_nothing_recorded_draws_nothing(tmp_path: Path) -> None:
    assert plot_curves(write_metrics(tmp_path, 0), tmp_path) == []


@pytest.mark.parametrize("wall_s", [30.0, 90_000.0])
def test_time_by_activity_is_drawn(tmp_path: Path, wall_s: float) -> None:
    seconds = {activity: wall_s / len(ACTIVITIES) for activity in ACTIVITIES}
    spent = Goodput(began_s=0.0, until_s=wall_s, seconds=seconds)
    assert is_drawn(plot_time(spent, tmp_path / "plots" / "time.png"))


@pytest.mark.parametrize("classes", [2, 150])  # of which the 30 that can be read are drawn
def test_a_confusion_matrix_is_drawn_also_with_an_empty_row(tmp_path: Path, classes: int) -> None:
    matrix = np.diag(np.arange(classes))
    labels = [f"label {index}" for index in range(classes)]
    assert is_drawn(plot_confusion(labels, matrix, tmp_path / "confusion.png"))


def test_labels_with_dollar_signs_are_not_formulas(tmp_path: Path) -> None:
    def drawn(labels: list[str]) -> np.ndarray:
        return imread(plot_confusion(labels, np.eye(2, dtype=np.int64), tmp_path / "confusion.png"))

    assert drawn(["$$", "$_$"]).std() > 0.01
    assert not np.array_equal(drawn(["$a$", "b"]), drawn(["a", "b"]))


def test_with_too_many_labels_those_with_most_errors_are_drawn_and_none_is_lost() -> None:
    matrix = np.diag(np.full(150, 7))
    matrix[140, 3], matrix[5, 6] = 20, 1
    labels, drawn, note = readable([f"{n}" for n in range(150)], matrix)
    assert (len(labels), drawn.shape) == (30, (30, 30))
    assert {"3", "5", "6", "140"} <= set(labels)
    assert labels[:-1] == sorted(labels[:-1], key=int)
    assert labels[-1] == "all others"
    assert drawn.sum() == matrix.sum()
    assert drawn[labels.index("140"), labels.index("3")] == 20
    assert drawn[-1, -1] == 121 * 7
    assert note == "29 of 150 labels: those with most errors"
    assert readable(["a", "b"], np.eye(2, dtype=int))[0] == ["a", "b"]


@pytest.mark.parametrize("rows", [1, 2000])
def test_calibration_is_drawn(tmp_path: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.2, 1, rows)
    fit = reliability(confidence, rng.uniform(size=rows) < confidence**2)
    assert is_drawn(plot_reliability(fit, tmp_path / "calibration.png"))


@pytest.mark.parametrize(
    "counts",
    [{}, {1: 3}, {64: 1}, {1: 1, 2: 5, 4: 0, 1024: 10_000}, {1 << n: n for n in range(40)}],
)
def test_lengths_by_powers_of_two_are_drawn(tmp_path: Path, counts: dict[int, int]) -> None:
    path = tmp_path / "plots" / "documents.png"
    labels = ("tokens of a document", "documents")
    assert plot_lengths(counts, path, *labels, powers=True) == path
    assert is_drawn(path)


def test_lengths_by_powers_of_two_are_bars_above_a_tick_each(tmp_path: Path) -> None:
    def bars_and_ticks(counts: dict[int, int]) -> list[int]:
        """Bars beside each other half way up, and ticks just below the axis."""
        picture = imread(plot_lengths(counts, tmp_path / "lengths.png", powers=True))[..., :3]
        is_dark = picture.max(axis=2) < 0.6
        [*_, axis] = np.flatnonzero(is_dark.mean(axis=1) > 0.5)
        is_tick = is_dark[axis + 4, len(is_dark[0]) // 10 :]
        blue = np.array([0x1F, 0x5A, 0xA6]) / 255
        is_bar = np.abs(picture[len(picture) // 2] - blue).max(axis=1) < 0.02
        return [int((np.diff(row.astype(int)) == 1).sum()) for row in (is_bar, is_tick)]

    assert bars_and_ticks({1 << n: 10 for n in range(8)}) == [8, 8]
    assert bars_and_ticks({1: 10, 2: 1, 4: 10, 32: 10}) == [3, 6]
    assert bars_and_ticks({64: 1}) == [1, 1]


def test_lengths_are_drawn(tmp_path: Path) -> None:
    assert is_drawn(plot_lengths({5: 10, 128: 1000}, tmp_path / "lengths.png"))


GRID = {
    "lr": [2e-5, 2e-5, 3e-5, 3e-5, 5e-5, 5e-5],
    "epochs": [2.0, 3.0, 2.0, 3.0, 2.0, 3.0],
    "accuracy": [0.8, 0.82, 0.83, 0.84, 0.83, 0.81],
}


@pytest.mark.parametrize("lower_is_better", [False, True])
def test_trials_are_lines_and_the_best_one_ends_at_its_score_in_orange(
    tmp_path: Path, lower_is_better: bool
) -> None:
    path = tmp_path / "plots" / "trials.png"
    picture = imread(plot_parallel_coordinates(GRID, path, lower_is_better=lower_is_better))
    assert path.exists()
    orange = np.array([0xD9, 0x62, 0x2B]) / 255
    rows, columns = np.nonzero(np.abs(picture[..., :3] - orange).max(axis=2) < 0.02)
    last = rows[columns == columns.max()].mean() / len(picture)
    assert last > 0.85 if lower_is_better else last < 0.25
    # It begins at 3e-5, in the middle of three places, or at 2e-5, the lowest.
    first = rows[columns == columns.min()].mean() / len(picture)
    assert first > 0.85 if lower_is_better else 0.4 < first < 0.7


@pytest.mark.parametrize(
    "columns",
    [
        {"lr": [1e-3], "loss": [0.4]},
        {"lr": list(np.geomspace(1e-5, 1e-3, 40)), "batch_size": [8.0, 16.0] * 20}
        | {"accuracy": [0.5] * 40},
        {"lr": list(np.linspace(1e-4, 2e-4, 9)), "accuracy": list(np.arange(9.0))},
    ],
)
def test_few_trials_many_and_equal_ones_are_drawn(
    tmp_path: Path, columns: dict[str, list[float]]
) -> None:
    assert is_drawn(plot_parallel_coordinates(columns, tmp_path / "trials.png"))
