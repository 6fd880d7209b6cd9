"""What `raybert jobs` shows of the record in an output."""

from pathlib import Path

from bert_core import files
from pipelines.jobs.listing import figures_of_record
from tracking.goodput import CLUSTER, FILE, Goodput
from tracking.metric_names import COMPUTING
from tracking.mirror import RECORD


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


def test_a_record_that_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    assert figures_of_record("") == figures_of_record(str(tmp_path / "elsewhere")) == ("", "", "")
    (tmp_path / FILE).write_text("{")
    assert figures_of_record(str(tmp_path)) == ("", "", "")
