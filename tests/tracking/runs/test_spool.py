import json
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from bert_core import files
from bert_core.errors import FormatError, ResourceError
from tracking.runs.spool import FORMAT_VERSION, METRICS, RUN, Note, Run, Spool, read_run


def open_spool(folder: Path) -> Spool:
    run = Run(tracking_uri="sqlite:///x", experiment="e", run_name="r", run_id="1")
    return Spool(folder, run)


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / METRICS).read_text().splitlines()]


def test_a_repeated_step_is_not_recorded_again(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    assert [spool.append(step, {"loss": 1.0}) for step in (0, 5, 5, 3, 6)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    spool.close()
    again = open_spool(tmp_path)
    assert again.last_step == 6
    assert not again.append(6, {"loss": 2.0})
    again.close()
    assert steps(tmp_path) == [0, 5, 6]


@pytest.mark.guard
def test_a_folder_belongs_to_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one waits, and gets what the one before wrote last; its end lets go, however."""
    code = (
        "import sys, time; from pathlib import Path; from tracking.runs.spool import Run, Spool\n"
        "run = Run(tracking_uri='sqlite:///x', experiment='e', run_name='of the other')\n"
        "spool = Spool(Path(sys.argv[1]), run); print('has it', flush=True); sys.stdin.readline()\n"
        "time.sleep(0.3); spool.append(7, {'loss': 1.0}); time.sleep(1e9)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        monkeypatch.setattr("tracking.runs.spool.LOCK_TIMEOUT_S", 0.2)
        with pytest.raises(
            ResourceError, match=r"metrics\.jsonl: wanted to write it, another proc"
        ):
            open_spool(tmp_path)
        monkeypatch.undo()
        threading.Timer(1.0, other.kill).start()
        other.stdin.write(b"\n")
        other.stdin.flush()
        spool = open_spool(tmp_path)
    assert (spool.last_step, spool.run.run_name) == (7, "of the other")
    spool.close()


@pytest.mark.parametrize("torn", [b'{"step": 9, "ti', b'{"step": 9}\n', b"\0\0\0\n", b"\0\0"])
def test_a_line_torn_by_a_kill_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    spool = open_spool(tmp_path)
    spool.append(1, {"loss": 1.0})
    spool.close()
    with open(tmp_path / METRICS, "ab") as file:
        file.write(torn)
    again = open_spool(tmp_path)
    assert (again.last_step, again.lines) == (1, 1)
    again.append(2, {"loss": 2.0})
    again.close()
    assert steps(tmp_path) == [1, 2]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        with pytest.raises(OSError, match=r"metrics\.jsonl|too large"):
            [spool.append(step, {"loss": 1.0}) for step in range(10)]
        last = spool.last_step
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 0 <= last < 9
    spool.append(20, {"loss": 2.0})
    spool.close()
    assert steps(tmp_path) == [*range(last + 1), 20]


def test_sent_records_are_remembered_after_a_restart(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for step in range(5):
        spool.append(step, {"loss": 1.0, "lr": 0.1})
    batch = spool.next_batch(4)
    assert [record.step for record in batch.records] == [0, 1]
    spool.mark_sent(batch)
    spool.close()
    again = open_spool(tmp_path)
    assert [record.step for record in again.next_batch(100).records] == [2, 3, 4]
    again.mark_all_unsent()
    assert [record.step for record in again.next_batch(1).records] == [0]
    again.close()


def test_a_closed_spool_changes_nothing_more(tmp_path: Path) -> None:
    late = open_spool(tmp_path)
    late.close()
    spool = open_spool(tmp_path)
    spool.enqueue(Note("status", "FINISHED"))
    late.belongs_to("1", "another run")
    late.mark_all_unsent()
    kept = read_run(tmp_path)
    assert kept == spool.run
    assert kept is not None
    assert kept.run_id == "1"
    spool.close()


def test_notes_that_come_or_go_together_are_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = open_spool(tmp_path)
    writes: list[str] = []

    def write_json(path: str, content: Any) -> None:
        writes.append(path)
        files.write_json(path, content)

    monkeypatch.setattr("tracking.runs.spool.write_json", write_json)
    notes = [Note("tags", {"a": "b"}), Note("params", {"c": "d"}), Note("status", "RUNNING")]
    spool.enqueue(*notes)
    kept = read_run(tmp_path)
    assert kept is not None
    assert kept.untold == tuple(notes)
    spool.mark_received(notes[:2])
    assert spool.run.untold == tuple(notes[2:])
    assert writes == [str(tmp_path / RUN)] * 2
    spool.close()


def test_a_later_status_replaces_an_earlier_one(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    spool.enqueue(Note("status", "RUNNING"))
    spool.enqueue(Note("tags", {"a": "b"}))
    spool.enqueue(Note("tags", {"a": "b"}))
    spool.enqueue(Note("status", "FINISHED"))
    assert [(note.kind, note.value) for note in spool.run.untold] == [
        ("tags", {"a": "b"}),
        ("status", "FINISHED"),
    ]
    spool.close()


FORMAT_2 = """{
  "tracking_uri": "sqlite:///x",
  "experiment": "e",
  "run_name": "pretrain wiki",
  "key": "0123456789abcdef0123456789abcdef",
  "experiment_id": "7",
  "run_id": "1",
  "status": "RUNNING",
  "session": 2,
  "untold": [{"kind": "tags", "value": {"stage": "pretrain"}}],
  "format_version": 2
}
"""
"""What the version before wrote."""


def test_the_version_before_can_go_on_unless_a_json_file_waits(tmp_path: Path) -> None:
    (tmp_path / RUN).write_text(FORMAT_2)

    def stored() -> dict[str, Any]:
        return json.loads((tmp_path / RUN).read_text())

    spool = open_spool(tmp_path)
    assert (spool.run.run_name, spool.run.run_id) == ("pretrain wiki", "1")
    assert spool.run.untold == (Note("tags", {"stage": "pretrain"}),)
    assert stored() == json.loads(FORMAT_2) | {"session": 3}
    spool.enqueue(Note("json", ["manifest.json", {"rows": 3}]))
    assert stored()["format_version"] == 3
    assert read_run(tmp_path) == spool.run
    spool.mark_received([Note("json", ["manifest.json", {"rows": 3}])])
    assert stored() == json.loads(FORMAT_2) | {"session": 3}
    spool.close()


def test_a_damaged_or_newer_run_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / RUN).write_text("{")
    with pytest.raises(FormatError, match=r"mlflow_run\.json: wanted the JSON .* remove the file"):
        read_run(tmp_path)
    (tmp_path / RUN).write_text("[]")
    with pytest.raises(FormatError, match="remove the file"):
        read_run(tmp_path)
    newer = {"format_version": FORMAT_VERSION + 1, "untold": []}
    (tmp_path / RUN).write_text(json.dumps(newer))
    with pytest.raises(FormatError, match="has format 4, this raybert reads up to 3"):
        read_run(tmp_path)
