"""How the driver of a training follows its record."""

import json
import os
from pathlib import Path

from pipelines.training.records import NewRecords, read_records
from tracking.runs.spool import METRICS


def line(step: int) -> str:
    return json.dumps({"step": step, "time_ms": 1, "metrics": {"loss": step / 2}}) + "\n"


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def bytes_read() -> int:
    """By this process, so far."""
    counters = Path("/proc/self/io").read_text().splitlines()
    return next(int(one.split()[1]) for one in counters if one.startswith("rchar:"))


def test_every_line_of_a_record_is_read_once_when_it_is_whole(tmp_path: Path) -> None:
    path, new = tmp_path / METRICS, NewRecords(tmp_path)
    assert new.read() == read_records(tmp_path) == {}
    append(path, line(1) + line(2) + line(3)[:12])
    assert new.read() == read_records(tmp_path) == {1: {"loss": 0.5}, 2: {"loss": 1.0}}
    assert new.read() == {}
    append(path, line(3)[12:-1])
    assert new.read() == {}, "its end is not there"
    append(path, "\n" + line(4))
    assert new.read() == {3: {"loss": 1.5}, 4: {"loss": 2.0}}
    assert list(read_records(tmp_path)) == [1, 2, 3, 4]


def test_a_record_that_was_cut_or_exchanged_is_read_from_its_beginning(tmp_path: Path) -> None:
    path, new = tmp_path / METRICS, NewRecords(tmp_path)
    append(path, line(1) + line(2) + line(3)[:12])
    assert list(new.read()) == [1, 2]
    os.truncate(path, len(line(1) + line(2)))  # a torn end, which the next start cuts off
    assert new.read() == {}
    append(path, line(3))
    assert list(new.read()) == [3]
    os.truncate(path, len(line(1)))
    assert list(new.read()) == [1]
    other = tmp_path / "other"
    append(other, "".join(map(line, range(10, 20))))
    other.replace(path)
    assert list(new.read()) == list(range(10, 20))


def test_only_the_new_part_of_a_growing_record_is_read(tmp_path: Path) -> None:
    path, new = tmp_path / METRICS, NewRecords(tmp_path)
    append(path, "".join(map(line, range(20_000))))
    assert len(new.read()) == 20_000
    size_bytes = path.stat().st_size
    before = bytes_read()
    for step in range(20_000, 20_020):
        append(path, line(step))
        assert list(new.read()) == [step]
    assert bytes_read() - before < size_bytes / 10
