"""The clock of a worker: every second belongs to one activity."""

import time

import pytest

from bert_core.train.clock import Clock


class Host:
    """A host whose clock the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)

    def work(self, seconds: float) -> None:
        self.now_s += seconds


def test_every_second_belongs_to_one_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    clock = Clock()
    host.work(2.0)
    clock.switch("computing")
    host.work(3.0)
    with clock.during("measuring"):
        host.work(5.0)
        with clock.during("checkpointing"):
            host.work(7.0)
        host.work(11.0)
    host.work(13.0)
    wanted = {"starting": 2.0, "computing": 16.0, "measuring": 16.0, "checkpointing": 7.0}
    assert clock.take() == wanted
    assert clock.taken == 1
    host.work(17.0)
    assert clock.take() == {"computing": 17.0}, "what was taken is not taken again"
    assert clock.taken == 2


def test_a_block_that_fails_ends_its_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    clock = Clock()
    clock.switch("computing")

    def fail() -> None:
        with clock.during("checkpointing"):
            host.work(1.0)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    host.work(2.0)
    taken = clock.take()
    assert (taken["checkpointing"], taken["computing"]) == (1.0, 2.0)
