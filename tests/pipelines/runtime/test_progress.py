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
        shown.add(100, note="loss 2.5")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "  reading: 400 of 1,000 blocks"
    found = re.fullmatch(
        r"  reading: 500 of 1,000 blocks, ([\d,.]+) blocks/s, \d+ s left, loss 2.5", second
    )
    assert found
    assert 0 < float(found[1].replace(",", "")) <= 100 / 0.05


@pytest.mark.usefixtures("every_line")
def test_the_time_left_follows_from_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.meter("reading", 100_000, "blocks") as shown:
        shown.set(1)
        time.sleep(0.1)
        shown.add(10)  # at most 100 per second, so that at least 1,000 s are left
    left = capsys.readouterr().out.splitlines()[-1].split(", ")[-1]
    minutes = float(re.fullmatch(r"(\d+) min left", left)[1])  # type: ignore[index]
    assert 16 < minutes < 100


@pytest.mark.usefixtures("every_line")
def test_time_that_passes_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.meter("pretraining", 38, "minutes") as shown:
        shown.set(1)
        time.sleep(0.01)
        shown.set(2, note="step 20")
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"  pretraining: 2 of 38 minutes, \d+ s left, step 20", line)


def test_a_stalled_log_repeats_itself_less_and_less(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.02)
    with progress.meter("reading", 1000, "blocks") as shown:
        end_s = time.monotonic() + 0.3
        while time.monotonic() < end_s:
            shown.set(1)
    assert 2 <= len(capsys.readouterr().out.splitlines()) <= 5  # else 15


def test_a_log_is_not_flooded(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.meter("reading", 1000, "blocks") as shown:
        for _ in range(1000):
            shown.add()
    assert capsys.readouterr().out == ""


def test_a_remark_has_a_line_with_what_it_counts_or_says_and_none_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from bert_core.tasks.token_classification import TokenClassification

    progress.print_remarks(
        "a", {"rows_cut": 1, "words_left_out": 2000, "rows_seen": 0, "types": ""}, "b"
    )
    assert capsys.readouterr().out == "a: 1 row cut in b\na: 2,000 words left out in b\n"
    for count in (1, 2):
        progress.print_remarks("a", {"queries_left_out": count}, "b")
    assert capsys.readouterr().out == "a: 1 query left out in b\na: 2 queries left out in b\n"
    known = {"tokens": ["a", "b"], "tags": ["B-x", "O"]}
    task = TokenClassification.from_rows([known])
    progress.print_remarks("a", task.remarks([known]), "b")
    assert capsys.readouterr().out == "a: tag scheme: BIO in b\n", "nothing of unknown tags"
    unknown = {"tokens": ["a", "b"], "tags": ["B-z", "B-y"]}
    progress.print_remarks("a", task.remarks([unknown]), "b")
    told = capsys.readouterr().out
    assert "a: 2 words with unknown tags in b\na: unknown tags: y, z in b\n" in told
