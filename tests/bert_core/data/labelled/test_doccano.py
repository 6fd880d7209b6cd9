"""doccano's exports."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bert_core.data.labelled_formats import LabelledFile, labelled_records


def read(*rows: Any) -> LabelledFile:
    data = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    return labelled_records(data, "export/admin.jsonl", "doccano")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"label": [[0, 3, "x"]]}, {"spans": [[0, 3, "x"]], "label": [], "labels": []}),
        ({"label": []}, {"spans": [], "label": [], "labels": []}),
        ({"label": ["a"]}, {"label": "a", "labels": ["a"]}),
        ({"label": ["a", "b"]}, {"label": ["a", "b"], "labels": ["a", "b"]}),
        ({"label": "a"}, {"label": "a", "labels": ["a"]}),
        ({"label": 3}, {"label": 3, "labels": [3]}),
        ({"labels": [[0, 3, "x"]]}, {"spans": [[0, 3, "x"]]}),
        (
            {"entities": [{"id": 1, "label": "x", "start_offset": 0, "end_offset": 3}]},
            {"spans": [{"start": 0, "end": 3, "label": "x"}]},
        ),
    ],
)
def test_labels_and_spans_are_read_in_every_form(
    given: dict[str, Any], wanted: dict[str, Any]
) -> None:
    [record] = read({"id": 5, "text": "Ada", **given}).records
    assert {name: record[name] for name in wanted} == wanted
    assert (record["text"], record["item"], record["annotator"]) == ("Ada", 5, "admin")


def test_relations_and_comments_are_counted() -> None:
    row = {"id": 1, "text": "a", "entities": [], "relations": [{}], "Comments": ["b", "c"]}
    assert read(row, row).unused == {"relations": 2, "comments": 4}


def test_a_row_without_labels_is_named() -> None:
    found = read({"text": "a"}, {"text": "a", "label": {}})
    assert found.unread[1].startswith("row 1: wanted a list in label or entities, as doccano write")
    assert "got an object ({})" in found.unread[2]


def test_the_real_export_has_its_published_counts(data_dir: Path) -> None:
    path = data_dir / "doccano_bsner" / "admin.jsonl"
    found = labelled_records(path.read_bytes(), str(path), "doccano")
    spans = [span for record in found.records for span in record["spans"]]
    assert (len(found.records), len(spans)) == (454, 444)
    assert Counter(label for _, _, label in spans) == {
        "PERSON": 178, "LOC": 105, "ORG": 91, "MISC": 30, "DATE": 29, "MONEY": 10, "TIME": 1,
    }  # fmt: skip
    assert sum(not record["spans"] for record in found.records) == 223
