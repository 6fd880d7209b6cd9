"""Label Studio's exports: what each annotation says, and what is left out or not used."""

import json
from pathlib import Path
from typing import Any

import pytest

from bert_core.data.labelled_formats import LabelledFile, labelled_records
from bert_core.errors import CorpusError


def read(tasks: Any) -> LabelledFile:
    return labelled_records(json.dumps(tasks, indent=1).encode(), "project.json", "label_studio")


def result(kind: str, value: Any, name: str = "ner") -> dict[str, Any]:
    return {"type": kind, "value": value, "from_name": name, "to_name": "text", "id": "x"}


def place(start: int, end: int, **more: Any) -> dict[str, Any]:
    return {"start": start, "end": end, **more}


ADA = result("labels", place(0, 3, text="Ada", labels=["person", "name"]))
ANNOTATION = {"completed_by": 7, "was_cancelled": False, "result": [ADA]}
TASK = {"id": 1, "data": {"text": "Ada left", "source": "x"}, "annotations": [ANNOTATION]}


def test_a_region_is_a_span_for_each_of_its_labels() -> None:
    [record] = read([TASK]).records
    ada = {"start": 0, "end": 3, "text": "Ada"}
    assert record["spans"] == [ada | {"label": "person"}, ada | {"label": "name"}]
    assert (record["text"], record["source"]) == ("Ada left", "x")
    assert (record["item"], record["annotator"]) == (1, "7")
    assert (record["label"], record["labels"]) == ([], [])


def test_regions_of_hypertext_have_the_characters_of_the_text_shown() -> None:
    where = place("/p[1]/text()[1]", "/p[1]/text()[1]", startOffset=0, endOffset=3)  # type: ignore[arg-type]
    both = where | {"globalOffsets": place(0, 3), "hypertextlabels": ["a"], "text": "Ada"}
    alone = where | {"hypertextlabels": ["a"]}
    results = [result("hypertextlabels", value) for value in (both, alone)]
    found = read([TASK | {"annotations": [ANNOTATION | {"result": results}]}])
    assert found.records[0]["spans"] == [place(0, 3, label="a", text="Ada")]
    assert found.unused == {"hypertextlabels": 1}


@pytest.mark.parametrize(
    ("results", "wanted"),
    [
        (
            [result("choices", {"choices": ["yes"]}, "q")],
            {"label": "yes", "labels": ["yes"], "q": "yes"},
        ),
        (
            [result("choices", {"choices": ["a", "b"]}, "q")],
            {"label": ["a", "b"], "labels": ["a", "b"], "q": ["a", "b"]},
        ),
        (  # which of two questions holds the label is for `columns` to say
            [
                result("choices", {"choices": ["a"]}, "topic"),
                result("choices", {"choices": ["b"]}, "tone"),
            ],
            {"topic": "a", "tone": "b"},
        ),
        ([result("pairwise", {"selected": "left"})], {"selected": "left"}),
        ([result("rating", {"rating": 4}, "stars")], {"stars": 4}),
        ([result("number", {"number": 2.5}, "score")], {"score": 2.5}),
    ],
)
def test_choices_and_numbers_are_columns(results: list[Any], wanted: dict[str, Any]) -> None:
    [record] = read([TASK | {"annotations": [ANNOTATION | {"result": results}]}]).records
    assert {name: record[name] for name in wanted} == wanted
    assert ("label" in record) == ("label" in wanted or len(results) == 1)


def test_what_is_no_annotation_is_left_out_and_counted() -> None:
    tasks = [
        TASK | {"annotations": [ANNOTATION, ANNOTATION | {"was_cancelled": True}]},
        TASK | {"annotations": [], "drafts": [{}, {}], "predictions": [{"result": [ADA]}]},
        {"id": 3, "data": {"text": "a"}},
    ]
    found = read(tasks)
    assert len(found.records) == 1
    assert found.left_out == {"cancelled": 1, "without an annotation": 2}
    assert found.unused == {"drafts": 2, "predictions of models": 1}
    assert found.rows == 4


def test_what_no_task_reads_is_counted() -> None:
    results = [
        ADA,
        {"type": "relation", "from_id": "a", "to_id": "b", "direction": "right"},
        result("choices", place(0, 3, choices=["sure"])),
        result("textarea", {"text": ["a remark"]}),
    ]
    found = read([TASK | {"annotations": [ANNOTATION | {"result": results}]}])
    assert found.unused == {"relations": 1, "choices about spans": 1, "textareas": 1}


def test_each_annotator_has_a_record() -> None:
    by = [{"id": 1, "email": "a@example.org"}, {"id": 2, "email": ""}, None]
    annotations = [ANNOTATION | {"completed_by": one} for one in by]
    records = read([TASK | {"annotations": annotations}]).records
    assert [record["annotator"] for record in records] == ["a@example.org", "2", None]


def test_json_min_has_results_under_the_names_of_their_tags() -> None:
    row = {
        "id": 1, "text": "Ada left", "annotator": 7, "lead_time": 1.5, "sentiment": "good",
        "topics": {"choices": ["a", "b"]}, "ner": [place(0, 3, text="Ada", labels=["person"])],
    }  # fmt: skip
    [record] = read([row]).records
    assert record["spans"] == [place(0, 3, text="Ada", label="person")]
    assert (record["sentiment"], record["topics"]) == ("good", ["a", "b"])
    assert (record["item"], record["annotator"]) == (1, "7")
    assert "ner" not in record


def test_broken_tasks_are_named() -> None:
    found = read([TASK, TASK | {"data": "x"}, TASK | {"annotations": [5]}, TASK])
    assert len(found.records) == 2
    assert found.unread[2].startswith("task 2: wanted an object with data and a list of annotation")
    assert found.unread[3].startswith("task 3: wanted objects as annotations, got a number (5): ex")
    whole = json.dumps([TASK, TASK], indent=1).encode()
    with pytest.raises(CorpusError, match=r"project\.json: wanted whole JSON, it ends within a"):
        labelled_records(whole[:-40], "project.json", "label_studio")


def test_real_exports_have_their_choices(data_dir: Path) -> None:
    for name, column, wanted in (
        ("choices.json", "uri_selection", 'Yes " "" \n \t \t а б в \n'),
        ("choices_with_history.json", "sentiment", "Positive"),
    ):
        path = data_dir / "label_studio" / name
        found = labelled_records(path.read_bytes(), str(path), "label_studio")
        [record] = found.records
        assert record[column] == record["label"] == wanted
        assert (found.unused, found.left_out) == ({}, {})


ITEMS = [
    {"id": "blog", "title": "Ten tips", "body": "Write a function."},
    {"id": 7, "title": "Arrows"},
    {"id": "wiki", "title": "Arrow", "html": "<p>A type class</p>"},
]


@pytest.mark.parametrize(
    ("ranker", "answers"),
    [
        ({"rank": ["wiki", "blog", 7]}, [{"score": 2.0}, {"score": 1.0}, {"score": 0.0}]),
        (
            {"_": ["blog"], "good": ["wiki"], "bad": [7, "gone"]},
            [{"label": "good"}, {"label": "bad"}],
        ),
    ],
)
def test_a_ranking_is_a_row_for_each_item(
    ranker: dict[str, Any], answers: list[dict[str, Any]]
) -> None:
    ranked = result("ranker", {"ranker": ranker}, "rank")
    task = TASK | {"data": {"text": "arrows", "items": ITEMS}}
    found = read([task | {"annotations": [ANNOTATION | {"result": [ranked]}]}]).records
    texts = {"wiki": "<p>A type class</p>", "blog": "Write a function.", "7": "Arrows"}
    for record, answer in zip(found, answers, strict=True):
        assert record["text"] == "arrows"
        assert answer.items() <= record.items()
        assert record["text_pair"] == texts[record["item"].removeprefix("1/")]


def test_a_ranking_of_items_that_the_task_lacks_is_not_used() -> None:
    ranked = result("ranker", {"ranker": {"rank": ["a"]}}, "rank")
    found = read([TASK | {"annotations": [ANNOTATION | {"result": [ranked]}]}])
    assert found.unused == {"rankers": 1}
