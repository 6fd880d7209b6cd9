"""What made a vector decides which vectors may be compared."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bert_core.errors import FormatError
from bert_core.inference.predictor import Predictor
from bert_core.inference.vector_spaces import FORMAT_VERSION, VectorSource, read_source, source_of
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.searching import Searching
from bert_core.tasks.text_regression import TextRegression
from tests import tiny

OPTIONS = FeatureExtraction.options
PROMPTS = {"query": "query: ", "passage": "passage: "}


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: Any) -> Predictor:
    task = FeatureExtraction(options=OPTIONS(prompts=PROMPTS, dimensions=[8], query_prompt="query"))
    folder = Path(tmp_path_factory.mktemp("vectors")) / "bundle"
    return Predictor(tiny.bundle(folder, tiny.tokenizer(), task=task), device="cpu")


def made(predictor: Predictor, **parameters: Any) -> VectorSource:
    source = source_of(predictor, predictor.task.parameters(**parameters))
    assert source is not None
    return source


def test_sides_with_different_prompts_are_of_one_space(vectors: Predictor) -> None:
    task: Any = vectors.task
    assert isinstance(task, Searching)
    query, document = (source_of(vectors, task.side(side)) for side in ("query", "document"))
    assert query is not None
    assert document is not None
    assert (query.prompt, document.prompt) == ("query: ", "passage: ")
    assert document.query_prompt == "query"
    assert query.space == document.space == made(vectors, normalize=True).space
    assert made(vectors, truncate=True, prompt_name="passage").space.digest == query.space.digest
    assert query.space.model == vectors.bundle.digest


def test_what_decides_a_space_is_in_its_digest(vectors: Predictor) -> None:
    whole = made(vectors).space
    others = {
        "dimensions": made(vectors, dimensions=8).space,
        "how": made(vectors, per_token=True).space,
        "model": replace(whole, model="0" * 64),
        "task": replace(whole, task="sparse-embedding"),
    }
    for name, space in others.items():
        assert space.digest != whole.digest
        found = whole.difference(space)
        assert found is not None
        assert found[0] == name
    assert whole.difference(others["dimensions"]) == ("dimensions", str(whole.dimensions), "8")
    assert whole.difference(replace(whole)) is None
    assert made(vectors).is_normalized is False
    assert made(vectors, normalize=True).is_normalized is True


def test_what_made_vectors_is_read_back(vectors: Predictor) -> None:
    source = made(vectors, prompt_name="query", dimensions=8)
    entries = source.entries()
    assert read_source(entries, "vectors.json") == source
    with pytest.raises(FormatError, match="wanted format_version 1 or older, got 2: it was made b"):
        read_source(entries | {"format_version": FORMAT_VERSION + 1}, "vectors.json")
    edited = entries | {"space": entries["space"] | {"dimensions": 16}}
    with pytest.raises(FormatError, match=r"vectors\.json: wanted the digest of what it says made"):
        read_source(edited, "vectors.json")
    with pytest.raises(FormatError, match=r"vectors\.json: space: wanted an object, got none"):
        read_source({"format_version": 1}, "vectors.json")


def test_answers_that_are_no_vectors_have_no_space(tmp_path: Path) -> None:
    folder = tiny.bundle(tmp_path / "bundle", tiny.tokenizer(), task=TextRegression())
    assert source_of(Predictor(folder, device="cpu"), None) is None
