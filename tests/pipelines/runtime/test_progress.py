"""What a person sees of long work, on a terminal and in a log."""

import re
import time

import pytest

from pipelines.runtime import progress


@pytest.fixture
def every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)


@pytest.mark.usefixtures("every_line")
def test_a_log_gets_lines_with_the_rate_and_the_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress.meter("reading", 1000, "blocks") as shown:
        shown.set(400)  # by an earlier run: in no rate
        time.sleep(0.05)
        shown.add(10, note="loss 2.5")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "  reading: 400 of 1,000 blocks"
    found = re.fullmatch(
        r"  reading: 410 of 1,000 blocks, ([\d.]+) blocks/s, ([\d,]+) s left, loss 2.5", second
    )
    assert found
    rate, left_s = float(found[1]), float(found[2])
    assert 0 < rate <= 10 / 0.05
    assert left_s == pytest.approx(590 / rate, abs=1)


def test_a_log_is_not_flooded(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.meter("reading", 1000, "blocks") as shown:
        for _ in range(1000):
            shown.add()
    assert capsys.readouterr().out == ""
