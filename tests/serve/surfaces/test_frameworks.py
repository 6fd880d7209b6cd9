"""Every argument of the frameworks that call a server for TEI's or OpenAI's routes: those of their
own signatures, as `test_every_argument` walks those of clients."""

import importlib
import inspect
from typing import Any

import pytest

NAMES = (
    "llama_index's embeddings",
    "llama_index's reranker",
    "langchain's embeddings",
    "haystack's ranker",
    "haystack's run",
)


@pytest.fixture(scope="module")
def frameworks() -> Any:
    """The module, which imports them all, in seconds."""
    return importlib.import_module("tests.serve.surfaces.frameworks")


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_of_a_framework_is_walked(name: str, frameworks: Any) -> None:
    assert frameworks.WALKS.keys() == {*NAMES}
    method, _, cases = frameworks.WALKS[name]
    parameters = inspect.signature(method).parameters.keys() - {"self"}
    assert parameters - frameworks.APART == cases.keys()


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_of_a_framework_works_or_is_refused(
    front: str, name: str, frameworks: Any
) -> None:
    _, ask, cases_of = frameworks.WALKS[name]
    for argument, cases in cases_of.items():
        for case in cases:
            given = {"url": front, **case.also}
            if case.gives in ("the same", "another"):
                same = ask(**given | {argument: case.value}) == ask(**given)
                assert same == (case.gives == "the same"), (argument, case)
            else:
                with pytest.raises(Exception, match=case.gives):
                    ask(**given | {argument: case.value})
