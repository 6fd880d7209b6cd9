"""Retrieval sets: every layout of the field is the same set, and what does not fit is named."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from bert_core.errors import ConfigError, CorpusError, InputError
from bert_core.tasks.feature_extraction import FeatureExtraction, Likeness
from bert_core.tasks.question_answering import QuestionAnswering
from bert_core.tasks.shapes import Row
from bert_core.tasks.texts import TextInput
from pipelines.corpus.labelled import (
    LabelledConfig,
    labelled_input,
    labelled_rows,
    retrieval_files_of,
)
from pipelines.corpus.retrieval_sets import (
    LEFT_OUT,
    NONE_RELEVANT,
    UNJUDGED,
    RetrievalSet,
    read_retrieval_set,
)
from tests.retrieval_sets import DOCUMENTS, QRELS, QUERIES, READ, beir, judged, lines, parquet

DATA = os.environ.get("RAYBERT_DATA")


def read(source: Path, split: str | None = None, *, skip: bool = False) -> RetrievalSet:
    found = retrieval_files_of(LabelledConfig(source=str(source), split=split), "held_out")
    assert found is not None, "it is a retrieval set"
    return read_retrieval_set(found, skip=skip)


def nano(folder: Path) -> Path:
    """NanoBEIR's layout: a split per set, and judgements without scores."""
    for name, rows in (
        ("corpus", DOCUMENTS), ("queries", QUERIES[:2]), ("qrels", judged("test", score=False))
    ):  # fmt: skip
        parquet(folder / name / "NanoSea-00000-of-00001.parquet", rows)
        others = [{**row, "text": "other"} for row in rows] if name != "qrels" else rows[:1]
        parquet(folder / name / "NanoLand-00000-of-00001.parquet", others)
    return folder


def mteb(folder: Path) -> Path:
    """MTEB's layout: the default config has the judgements."""
    documents = [{"id": row["_id"], **row} for row in DOCUMENTS]
    parquet(folder / "corpus" / "corpus-00000-of-00002.parquet", documents[:2])
    parquet(folder / "corpus" / "corpus-00001-of-00002.parquet", documents[2:])
    parquet(folder / "queries" / "queries-00000-of-00001.parquet", QUERIES)
    for split in QRELS:
        parquet(folder / "data" / f"{split}-00000-of-00001.parquet", judged(split))
    (folder / "README.md").write_text("# About\n")
    return folder


def jsonl(folder: Path) -> Path:
    """LIMIT's layout."""
    beir(folder, {})
    (folder / "qrels").rmdir()
    lines(folder / "qrels.jsonl", judged("test"))
    return folder


def trec(folder: Path) -> Path:
    folder.mkdir()
    documents = [f"<DOC>\n<DOCNO>{d['_id']}</DOCNO>\n{t}\n</DOC>\n" for d, t in zip(
        DOCUMENTS, READ, strict=True
    )]  # fmt: skip
    topics = [f"<top>\n<num>{q['_id']}</num><title>{q['text']}</title>\n</top>\n" for q in QUERIES]
    (folder / "texts.trec").write_text("".join(documents))
    (folder / "topics").write_text("".join(topics))
    (folder / "qrels").write_text("".join(f"{q} 0 {d} {s}\n" for q, d, s in QRELS["test"]))
    return folder


@pytest.mark.parametrize("layout", [beir, jsonl, mteb, nano, trec])
def test_every_layout_is_the_same_set(
    layout: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = "NanoSea" if layout is nano else None
    found = read(layout(tmp_path / "set"), split)  # type: ignore[operator]
    assert found.document_ids == ["d1", "d2", "d3", "d10"]
    assert found.documents == READ
    assert (found.query_ids, found.queries) == (["q1", "q2"], ["blue sea", "a tree"])
    assert [judged.places.tolist() for judged in found.judgements] == [[0, 2], [1]]
    relevance = [[1, 1], [1]] if layout is nano else [[2, 1], [1]]
    assert [judged.relevance.tolist() for judged in found.judgements] == relevance
    assert found.pairs[1] == {"text": "blue sea", "text_pair": READ[2]}
    unjudged = 0 if layout is nano else 1
    assert found.remarks == {UNJUDGED: unjudged, NONE_RELEVANT: 0, LEFT_OUT: 0}
    printed = capsys.readouterr().out
    assert ("left out 1 query without a judgement in" in printed) == bool(unjudged)
    if layout is beir:
        assert "in qrels/test.tsv, the first on line 3 of queries.jsonl" in printed


def test_a_split_has_its_own_judgements_and_its_own_digest(tmp_path: Path) -> None:
    folder = beir(tmp_path / "set")
    assert read(folder, "train").query_ids == ["q3"]
    digests = [
        labelled_input("held_out", LabelledConfig(source=str(folder), split=split), "held_out")
        for split in (None, "test", "train")
    ]
    assert digests[0] == digests[1] != digests[2]
    with pytest.raises(ConfigError, match=r"wanted judgements of a split dev, .* of train, test"):
        read(folder, "dev")
    only = beir(tmp_path / "only", {"train": QRELS["train"]})
    assert read(only).query_ids == ["q3"], "the only split there is"


def test_rows_are_no_retrieval_set(tmp_path: Path) -> None:
    lines(tmp_path / "test.jsonl", [{"text": "a", "label": "b"}])
    for source in (tmp_path, tmp_path / "test.jsonl", tmp_path / "*.jsonl"):
        config = LabelledConfig(source=str(source))
        assert retrieval_files_of(config, "held_out") is None


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("qrels/test.tsv", "q1\td9\t1", "line 5: wanted a document of corpus.jsonl, .* no 'd9'"),
        ("qrels/test.tsv", "q9\td1\t1", "line 5: wanted a query of queries.jsonl, .* no 'q9'"),
        ("qrels/test.tsv", "q1\td1\t1", "line 5: wanted one relevance of document 'd1' to query"),
        ("corpus.jsonl", '{"_id": "d1", "text": "b"}', "line 5: wanted each id once, got 'd1'"),
        ("queries.jsonl", '{"_id": "q1", "text": "b"}', "line 4: wanted each id once, got 'q1'"),
    ],
)
def test_what_fits_nothing_is_named_with_its_file_and_line(
    file: str, line: str, message: str, tmp_path: Path
) -> None:
    folder = beir(tmp_path / "set")
    with (folder / file).open("a") as opened:
        opened.write(f"{line}\n")
    with pytest.raises(CorpusError, match=f"{file}, {message}"):
        read(folder)
    if file.startswith("qrels"):
        found = read(folder, skip=True)
        assert found.remarks[LEFT_OUT] == 1
        assert [judged.places.tolist() for judged in found.judgements] == [[0, 2], [1]]


def test_a_set_that_lacks_a_part_is_refused(tmp_path: Path) -> None:
    folder = beir(tmp_path / "set", {})
    with pytest.raises(CorpusError, match=r"wanted judgements beside corpus.jsonl and queries"):
        read(folder)
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n")
    with pytest.raises(CorpusError, match=r"test.tsv: wanted at least one judgement, got none"):
        read(folder)
    (folder / "corpus.jsonl").write_text("\n")
    with pytest.raises(CorpusError, match=r"corpus.jsonl: wanted at least one text, got none"):
        read(folder)


def test_a_query_without_a_relevant_document_counts_and_is_told(tmp_path: Path) -> None:
    found = read(beir(tmp_path / "set", {"test": [("q1", "d1", 0), ("q2", "d2", 1)]}))
    assert found.query_ids == ["q1", "q2"]
    assert found.judgements[0].places.tolist() == []
    assert found.remarks[NONE_RELEVANT] == 1


def test_pairs_of_a_set_are_labelled_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LabelledConfig(source=str(beir(tmp_path / "set")))
    shapes = TextInput, Likeness
    trained = labelled_rows(config, "train", shapes)
    assert trained.rows == [{"text": "is the", "text_pair": READ[3]}]
    assert "evaluate" not in capsys.readouterr().out
    measured = labelled_rows(config, "held_out", shapes, FeatureExtraction().fitting)
    assert [(row["text"], row["text_pair"]) for row in measured.rows] == [
        ("blue sea", READ[0]), ("blue sea", READ[2]), ("a tree", READ[1])
    ]  # fmt: skip
    assert "3 pairs, each to be found among the documents of all" in capsys.readouterr().out
    with pytest.raises(CorpusError, match=r"wanted rows with .*context.*, got a retrieval set"):
        labelled_rows(config, "train", (QuestionAnswering.inputs, QuestionAnswering.target))

    def refusing(rows: Sequence[Row]) -> list[Row | InputError]:
        return [InputError("wanted another") for _ in rows]

    with pytest.raises(CorpusError, match="a query with its document does not fit: wanted another"):
        labelled_rows(config, "train", shapes, refusing)


@pytest.mark.skipif(DATA is None, reason="RAYBERT_DATA names no real data sets")
@pytest.mark.parametrize(
    ("name", "split", "documents", "queries", "pairs"),
    [
        ("scifact", None, 5183, 300, 339),
        ("scifact", "train", 5183, 809, 919),
        ("limit_small", None, 46, 1000, 2000),
        ("vaswani", "query-text", 11429, 93, 2083),
    ],
)
def test_published_sets_have_as_many_texts_as_published(
    name: str, split: str | None, documents: int, queries: int, pairs: int
) -> None:
    found = read(Path(str(DATA)) / name, split)
    sizes = len(found.documents), len(found.queries), len(found.pairs)
    assert sizes == (documents, queries, pairs)
