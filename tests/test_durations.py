"""The limit of a case, and the comparison with earlier runs."""

import pytest

from tests.durations import Cost, Durations, as_json, kept, more_expensive, place_of, too_expensive


def cost(cpu_s: float, cases: int = 4) -> Cost:
    return {"cases": cases, "seconds": cpu_s, "cpu_s": cpu_s}


@pytest.mark.parametrize(
    ("cpu_s", "seconds", "markers", "is_allowed"),
    [
        (2.9, 3.0, set(), True),
        (300.0, 3.1, set(), False),
        (0.1, 29.0, set(), True),  # on a busy machine
        (0.1, 3000.0, set(), False),  # it waits
        (9.0, 90.0, {"ray"}, True),
        (1000.0, 30.0, {"ray"}, False),
        (900.0, 900.0, {"ray", "guard"}, True),
        (900.0, 900.0, {"drill"}, True),
    ],
)
def test_a_case_that_everyone_waits_for_has_a_limit(
    cpu_s: float, seconds: float, markers: set[str], is_allowed: bool
) -> None:
    complaint = too_expensive(cpu_s, seconds, markers)
    assert (complaint == "") is is_allowed
    assert is_allowed or (f"{cpu_s:.1f} s of CPU" in complaint and "mark it" in complaint)


@pytest.mark.parametrize(("seconds", "outcome"), [(1.0, "passed"), (9999.0, "failed")])
def test_a_case_beyond_its_limit_fails(
    seconds: float, outcome: str, request: pytest.FixtureRequest
) -> None:
    hook = Durations().pytest_runtest_makereport(request.node)
    next(hook)
    report = pytest.TestReport(
        request.node.nodeid, request.node.location, {}, "passed", None, "call", duration=seconds
    )
    with pytest.raises(StopIteration) as returned:
        hook.send(report)
    assert returned.value.value.outcome == outcome


def test_files_that_cost_more_are_named_whatever_the_machine() -> None:
    before = {f"test_{name}.py": cost(10.0) for name in "abcdef"}
    slower_machine = {path: cost(20.0) for path in before}
    assert more_expensive(slower_machine, before) == []
    slower_machine |= {"test_a.py": cost(50.0), "test_b.py": cost(50.0, cases=9)}
    slower_machine |= {"test_c.py": cost(90.0)}
    assert more_expensive(slower_machine, before) == [
        "test_c.py: 90.0 s of CPU, 20.0 before",
        "test_a.py: 50.0 s of CPU, 20.0 before",
    ]


def test_a_tenth_of_a_second_is_not_reported() -> None:
    assert more_expensive({"test_a.py": cost(0.3)}, {"test_a.py": cost(0.1)}) == []


def test_the_record_has_a_line_per_file_and_reads_back() -> None:
    assert as_json({"b.py": cost(1.04), "a.py": cost(2.0)}).splitlines() == [
        "{",
        '"a.py": {"cases": 4, "seconds": 2.0, "cpu_s": 2.0},',
        '"b.py": {"cases": 4, "seconds": 1.0, "cpu_s": 1.0}',
        "}",
    ]
    assert all(cost["cases"] for cost in kept().values())


def test_long_tests_of_a_file_are_counted_apart() -> None:
    assert place_of("tests/test_a.py::test_b[::]@group", {"ray"}) == "tests/test_a.py"
    assert place_of("tests/test_a.py::test_b", {"ray", "guard"}) == "tests/test_a.py (guard)"
