"""What `raybert jobs` shows of the record in an output."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from bert_core import files
from pipelines.jobs.listing import figures_of_record, progress_in
from pipelines.runtime import progress
from tracking.runs.goodput import CLUSTER, FILE, Goodput
from tracking.runs.metric_names import COMPUTING
from tracking.runs.mirror import RECORD


def test_cost_and_progress_come_from_the_record(tmp_path: Path, object_store: str) -> None:
    Goodput(
        began_s=0.0,
        until_s=1800.0,
        seconds={COMPUTING: 1800.0},
        steps=60,
        last_step=60,
        most_steps=240,
        prices_usd={CLUSTER: 3.0},
        node_seconds={CLUSTER: 1800.0},
    ).save(tmp_path)
    assert figures_of_record(str(tmp_path)) == ("$1.50", "25%", "90 min")
    output = f"{object_store}/pretrain"
    assert figures_of_record(output) == ("", "", "")
    files.write_bytes(files.join(output, RECORD, FILE), (tmp_path / FILE).read_bytes())
    assert figures_of_record(output) == ("$1.50", "25%", "90 min")


def test_an_unreadable_record_is_not_an_error(tmp_path: Path) -> None:
    assert figures_of_record("") == figures_of_record(str(tmp_path / "elsewhere")) == ("", "", "")
    (tmp_path / FILE).write_text("{")
    assert figures_of_record(str(tmp_path)) == ("", "", "")


@pytest.mark.parametrize(
    ("total", "unit", "per_s", "after_s", "shown"),
    [
        (240, "steps", 8.0, 20.0, ("161 of 240 steps", "10 s")),
        (24_000, "steps", 8.0, 600.0, ("4,801 of 24,000 steps", "40 min")),
        (240_000, "steps", 8.0, 600.0, ("4,801 of 240,000 steps", "8.2 h")),
        (38, "minutes", 1 / 60, 600.0, ("11 of 38 minutes", "27 min")),
    ],
)
def test_progress_is_read_from_the_lines_that_a_meter_prints(
    total: int,
    unit: str,
    per_s: float,
    after_s: float,
    shown: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))
    with progress.meter("pretraining", total, unit) as meter:
        meter.set(1)
        now_s = after_s
        meter.set(1 + round(after_s * per_s), note="loss 2.5")
    log = f"pretrain: starting\n{capsys.readouterr().out}and something else\n"
    assert progress_in(log) == shown


def test_a_log_without_progress_reports_none() -> None:
    assert progress_in("pretrain: starting\n") == ("", "")
