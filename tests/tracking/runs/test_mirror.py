"""A record next to an output in a bucket: another host goes on with it."""

import json
import logging
from pathlib import Path

import pytest

from bert_core import files
from tests.waiting import wait_until
from tracking.runs import mirror
from tracking.runs.mirror import fetch_newer, read_copy
from tracking.runs.recorder import RunRecorder, finish_run
from tracking.runs.spool import METRICS, Run, Spool, read_run
from tracking.store.server import connect


@pytest.fixture
def place(object_store: str) -> str:
    return f"{object_store}/out/record"


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are made when a recorder is opened and closed, and not in between."""
    monkeypatch.setattr(mirror, "COPY_EVERY_S", 1e6)


def steps(place: str) -> list[int]:
    lines = files.read_bytes(files.join(place, METRICS)).splitlines()
    return [json.loads(line)["step"] for line in lines]


def record(recorder: RunRecorder, first: int, last: int) -> None:
    for step in range(first, last + 1):
        recorder.record(step, {"loss": float(step)})


def wait_for_steps(place: str, *expected: int) -> None:
    wait_until(
        f"the copy has the steps {expected}", lambda: steps(place) == [*expected],
        timeout_s=120, every_s=0.05,
    )  # fmt: skip


def history(uri: str, run_id: str) -> list[int]:
    return [each.step for each in connect(uri).get_metric_history(run_id, "loss")]


@pytest.mark.usefixtures("by_hand")
def test_another_host_resumes_the_run_and_sends_no_point_twice(
    tmp_path: Path, store: str, place: str
) -> None:
    """The first had sent more than was copied, and dies; the second trains some steps again."""
    first = RunRecorder.open(tmp_path / "a", uri=store, copy=place, experiment="mirror")
    before_work = read_copy(place)
    assert before_work is not None
    record(first, 0, 4)
    first.close("RUNNING")
    first = RunRecorder.open(tmp_path / "a", uri=store, copy=place)
    record(first, 5, 9)
    assert first.flush()
    assert steps(place) == [0, 1, 2, 3, 4]
    second = RunRecorder.open(tmp_path / "b", uri=store, copy=place)
    assert second.last_step == 4
    record(second, 3, 12)
    second.close()
    assert second.run_id == first.run_id
    stored = read_copy(place)
    assert stored is not None
    assert (stored.key, stored.status) == (before_work.key, "FINISHED")
    assert steps(place) == list(range(13))
    assert second.run_id is not None
    assert history(store, second.run_id) == list(range(13))
    first.close("RUNNING")
    assert steps(place) == list(range(13)), "it is not the first's any more"
    # Back on the first host: its record is older.
    assert finish_run(tmp_path / "a", uri=store, copy=place) is None
    third = RunRecorder.open(tmp_path / "a", uri=store, copy=place)
    assert third.last_step == 12
    third.close()


@pytest.mark.guard
def test_the_last_process_to_open_the_record_holds_it(
    tmp_path: Path, store: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was away, and finds another in its place, neither copies nor sends anything more."""
    monkeypatch.setattr(mirror, "COPY_EVERY_S", 0.3)
    first = RunRecorder.open(tmp_path / "a", uri=store, copy=place, experiment="taken")
    record(first, 0, 2)
    wait_for_steps(place, 0, 1, 2)
    second = RunRecorder.open(tmp_path / "b", uri=store, copy=place)
    assert first._mirror is not None
    first._mirror.join(30)
    assert not first._mirror.is_alive()
    record(first, 3, 5)
    first.close("FAILED")
    record(second, 3, 3)
    second.close()
    assert steps(place) == [0, 1, 2, 3]
    assert second.run_id is not None
    assert history(store, second.run_id) == [0, 1, 2, 3]
    assert connect(store).get_run(second.run_id).info.status == "FINISHED"


@pytest.mark.usefixtures("by_hand")
def test_a_host_does_not_resume_from_an_earlier_runs_leftovers(
    tmp_path: Path, store: str, place: str
) -> None:
    """Another host has begun the output anew, or emptied it."""
    old = RunRecorder.open(tmp_path / "a", uri=store, copy=place, experiment="anew")
    record(old, 0, 9)
    old.close()
    files.remove(place)
    new = RunRecorder.open(tmp_path / "b", uri=store, copy=place, experiment="anew")
    record(new, 0, 2)
    new.close("RUNNING")
    again = RunRecorder.open(tmp_path / "a", uri=store, copy=place)
    assert (again.last_step, again.run_id) == (2, new.run_id)
    again.close()
    files.remove(place)
    fetch_newer(tmp_path / "a", place)
    assert read_run(tmp_path / "a") is None
    assert (tmp_path / "a" / METRICS).read_bytes() == b""


@pytest.mark.guard
@pytest.mark.usefixtures("by_hand")
def test_pictures_and_cards_go_along_and_are_sent_from_the_other_host(
    tmp_path: Path, store: str, place: str
) -> None:
    (tmp_path / "a" / "plots").mkdir(parents=True)
    (tmp_path / "a" / "bundle").mkdir()
    for name in ("plots/loss.png", "card.md", "bundle/README.md", "rows.parquet"):
        (tmp_path / "a" / name).write_bytes(b"data")
    # MLflow got nothing of it before the host was lost.
    spool = Spool(tmp_path / "a", Run(tracking_uri=store, experiment="pictures", run_name="r"))
    first = RunRecorder(spool, "http://127.0.0.1:1", place)
    first.artifact(tmp_path / "a" / "plots" / "loss.png", "plots")
    first.close("RUNNING", timeout_s=5.0)
    copied = {path.removeprefix(f"{place}/") for path in files.find_files(place)}
    assert copied == {"plots/loss.png", "card.md", METRICS, "mlflow_run.json"}
    second = RunRecorder.open(tmp_path / "b", uri=store, copy=place)
    assert second.close() is None
    assert second.run_id is not None
    (plot,) = connect(store).list_artifacts(second.run_id, "plots")
    assert plot.path == "plots/loss.png"


@pytest.mark.guard
def test_an_unreachable_bucket_is_reported_once_and_stops_nothing(
    tmp_path: Path,
    store: str,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from moto.server import ThreadedMotoServer

    def told() -> list[str]:
        return [line for line in caplog.messages if "record of the run cannot be copied" in line]

    server = ThreadedMotoServer("127.0.0.1", 0)  # it shares its buckets with that of the session
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("RAYBERT_STORAGE_RETRY_S", "2")
    monkeypatch.setattr(mirror, "COPY_EVERY_S", 0.1)
    with caplog.at_level(logging.WARNING):
        recorder = RunRecorder.open(tmp_path, uri=store, copy=place, experiment="away")
        server.stop()
        recorder.record(0, {"loss": 1.0})
        wait_until("a warning is logged", told, timeout_s=120, every_s=0.05)
        assert f"it is kept in {tmp_path}" in told()[0]
        record(recorder, 1, 4)
        server = ThreadedMotoServer(host, port)
        server.start()
        wait_for_steps(place, 0, 1, 2, 3, 4)
        recorder.close()
    server.stop()
    assert len(told()) == 1
