"""CoNLL-U's attributes, and PARSEME's expressions."""

from collections import Counter
from pathlib import Path

import pytest

from bert_core.data.labelled_formats import labelled_records
from bert_core.errors import CorpusError

HEAD = "# global.columns = ID FORM MISC PARSEME:MWE\n"


def row(number: int, form: str, misc: str = "_", mwe: str = "*") -> str:
    return f"{number}\t{form}\t{misc}\t{mwe}\n"


def test_attributes_of_misc_are_columns() -> None:
    sentences = (
        HEAD
        + row(1, "Ada", "Entity=B-PER|SpaceAfter=No")
        + row(2, "left", "Entity=|x")
        + "\n"
        + row(1, "Rome", "entity=B-LOC")
        + "\n"
    )
    first, second = labelled_records(sentences.encode(), "a.conllu", "conllu").records
    assert first["misc.entity"] == ["B-PER", "O"]
    assert first["misc.spaceafter"] == ["No", "O"]
    assert (second["misc.entity"], second["misc.spaceafter"]) == (["B-LOC"], ["O"])


def test_expressions_are_tags() -> None:
    cells = ["1:VID", "1", "*", "1;2:LVC", "2", "3:VID", "_", "3"]
    text = HEAD + "".join(row(n, "w", mwe=cell) for n, cell in enumerate(cells, 1))
    found = labelled_records(text.encode(), "a.cupt", "cupt")
    assert found.records[0]["mwe"] == [
        "B-VID", "I-VID", "O", "B-VID", "B-LVC", "B-VID", "O", "B-VID",
    ]  # fmt: skip
    assert found.unused == {"gaps within expressions": 2, "words of a second expression": 1}
    with pytest.raises(CorpusError, match=r"a\.cupt: wanted a column PARSEME:MWE, there are: id"):
        labelled_records(b"# global.columns = ID FORM\n1\ta\n", "a.cupt", "cupt")


def test_real_sets_have_their_published_counts(data_dir: Path) -> None:
    path = data_dir / "parseme_cupt" / "en_train_first400.cupt"
    found = labelled_records(path.read_bytes(), str(path), "cupt")
    assert len(found.records) == 400
    marked = [cell for record in found.records for cell in record["parseme:mwe"] if ":" in cell]
    begun = Counter(tag[0] for record in found.records for tag in record["mwe"])
    assert len(marked) == 40
    assert begun["B"] == 40 + found.unused["gaps within expressions"]
    path = data_dir / "ud_ewt" / "en_ewt-ud-dev.conllu"
    records = labelled_records(path.read_bytes(), str(path), "conllu").records
    assert len(records) == 2001
    assert Counter(cell for record in records for cell in record["misc.spaceafter"])["No"] > 3000
