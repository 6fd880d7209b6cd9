"""Rows that people have labelled in annotation tools, as stages read them."""

import json
from pathlib import Path
from typing import Any

import pytest

from bert_core.errors import ConfigError
from bert_core.tasks.text_classification import TextClassification
from pipelines.corpus.labelled import LabelledConfig, labelled_rows


def test_texts_of_several_annotators_are_rows_as_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """doccano writes a file for each annotator."""
    shapes = TextClassification.shapes()
    labels = {"ann": "xxy", "bob": "xyy", "cy": "yy"}
    for name, each in labels.items():
        written = [{"id": n, "text": f"t{n}", "label": [label]} for n, label in enumerate(each)]
        text = "".join(f"{json.dumps(row)}\n" for row in written)
        (tmp_path / f"{name}.jsonl").write_text(text)

    def rows(choice: str | None) -> Any:
        source = LabelledConfig(source=str(tmp_path), format="doccano", annotators=choice)
        return labelled_rows(source, "train", shapes)

    with pytest.raises(ConfigError, match=r"since 3 texts are labelled by several of ann, bob, cy"):
        rows(None)
    with pytest.raises(ConfigError, match=r"wanted each, majority or the name of one .*, got dan"):
        rows("dan")
    assert len(rows("each").rows) == 8
    assert [row["label"] for row in rows("bob").rows] == ["x", "y", "y"]
    assert f"{tmp_path}: left out 5 rows: 5 of other annotators" in capsys.readouterr().out
    read = rows("majority")
    assert [(row["text"], row["label"]) for row in read.rows] == [
        ("t0", "x"),
        ("t1", "y"),
        ("t2", "y"),
    ]
    told = read.remarks["agreement_of_annotators"]
    assert told == "3 annotators of 3 texts: Krippendorff's alpha 0.067 for labels"
