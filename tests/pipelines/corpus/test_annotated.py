"""Rows that people have labelled in annotation tools, as stages read them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bert_core.data.labelled_formats import labelled_records
from bert_core.errors import ConfigError, CorpusError
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


SEVERAL = TextClassification.options(multi_label=True)


def several(path: Path, **config: Any) -> list[dict[str, Any]]:
    source = LabelledConfig(source=str(path), **config)
    return labelled_rows(source, "train", TextClassification.shapes(SEVERAL)).rows


def test_a_table_without_a_header_has_columns_by_number_and_labels_in_a_cell(
    tmp_path: Path,
) -> None:
    (tmp_path / "names.txt").write_text("joy\nfear\n\nlove\n")
    (tmp_path / "a.tsv").write_text('\n"a ""b"" c"\t0,2\tx\nd\t1\ty\n"\t\tz\n"\t0 , joy\tz\n')
    given: dict[str, Any] = {
        "columns": {"text": "0", "labels": "1"},
        "label_separator": ",",
        "label_names": str(tmp_path / "names.txt"),
    }
    literal = several(tmp_path / "a.tsv", **given)
    assert [row["text"] for row in literal] == ['"a ""b"" c"', "d", '"', '"']
    assert [row["labels"] for row in literal] == [["joy", "love"], ["fear"], [], ["joy", "joy"]]
    (tmp_path / "a.tsv").write_text('"a ""b"" c"\t0,2\tx\nd\t1\ty\n')
    quoted = several(tmp_path / "a.tsv", **given, quotes="csv")
    assert [row["text"] for row in quoted] == ['a "b" c', "d"]
    (tmp_path / "b.csv").write_text("text,labels\na,x; y\nb,\n")
    assert [row["labels"] for row in several(tmp_path / "b.csv", label_separator=";")] == [
        ["x", "y"],
        [],
    ]
    (tmp_path / "c.tsv").write_text("")
    with pytest.raises(CorpusError, match=r"c\.tsv: wanted labelled rows, the file holds none"):
        several(tmp_path / "c.tsv", **given)


def test_labels_that_have_no_name_are_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("joy\nfear\n")
    (tmp_path / "a.csv").write_text("text,labels\na,joy\nb,2\nc,love\nd,1\n")
    names = str(tmp_path / "names.txt")
    given: dict[str, Any] = {"label_separator": ";", "label_names": names}
    message = (
        r"a\.csv, row 2: wanted a list of texts in the column 'labels', got a list .*; wanted a "
        r"label of .*names\.txt, or its number from … to … in 1 other row \(row 3\); 2 of 4 rows"
    )
    with pytest.raises(CorpusError, match=message):
        several(tmp_path / "a.csv", **given)
    rows = several(tmp_path / "a.csv", **given, bad_rows="skip")
    assert [row["labels"] for row in rows] == [["joy"], ["fear"]]
    with pytest.raises(CorpusError, match=r"or give the label_separator of labels in a cell"):
        several(tmp_path / "a.csv")
    for text, got in (("joy\njoy\n", "'joy' 2 times"), ("\n", "none")):
        (tmp_path / "names.txt").write_text(text)
        with pytest.raises(CorpusError, match=rf"names\.txt: wanted the name of each .* got {got}"):
            several(tmp_path / "a.csv", **given)


@pytest.mark.parametrize(("split", "rows"), [("dev", 5426), ("test", 5427)])
def test_the_real_goemotions_has_its_published_counts(
    split: str, rows: int, data_dir: Path
) -> None:
    folder = data_dir / "goemotions"
    found = several(
        folder / f"{split}.tsv",
        columns={"text": "0", "labels": "1"},
        label_separator=",",
        label_names=str(folder / "emotions.txt"),
        quotes="csv",
    )
    assert len(found) == rows
    counts = Counter(label for row in found for label in row["labels"])
    assert len(counts) == 28
    if split == "test":
        rare = ("grief", "pride", "relief", "nervousness", "neutral")
        assert [counts[name] for name in rare] == [6, 16, 11, 23, 1787]


def test_the_rows_of_the_real_goemotions_for_training_are_all_read(data_dir: Path) -> None:
    path = data_dir / "goemotions" / "train.tsv"
    data = path.read_bytes()
    records = labelled_records(data, str(path), None, header=False, quotes="csv").records
    assert len(records) == 43_410
    assert sum("," in record["1"] for record in records) == 7102
