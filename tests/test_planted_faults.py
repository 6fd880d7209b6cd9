"""The table of `planted_faults.py` fits the tree, without running any of its tests."""

from collections import Counter

import pytest

from tests.planted_faults import FAULTS, ROOT, Fault, located, planted, stages_of


def test_every_fault_has_one_location_and_leaves_code_that_compiles() -> None:
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text()
        compile(planted(text, fault), fault.file, "exec")


def test_every_test_that_should_notice_a_fault_exists() -> None:
    for fault in FAULTS:
        assert fault.tests, fault.name
        assert [located(ROOT, test) for test in fault.tests] == list(fault.tests), fault.name


def test_faults_have_unique_names() -> None:
    assert [
        name for name, count in Counter(each.name for each in FAULTS).items() if count > 1
    ] == []


def test_a_fault_without_a_place_of_its_own_is_refused() -> None:
    fault = Fault(name="twice", what="", file="a.py", old="a", new="b", tests=())
    with pytest.raises(ValueError, match=r"twice: wanted this once in a\.py, it is there 2 times"):
        planted("a a", fault)


def test_the_targets_of_make_test_and_ci_are_read_from_the_makefile() -> None:
    first, more = stages_of(ROOT)
    assert "not drill" in first.marks
    assert more.marks.endswith(f"and not ({first.marks})")
