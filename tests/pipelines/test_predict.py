"""Rows of any number through a model: every one is there again, answered or put aside."""

import bz2
import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_core.errors import ConfigError, CorpusError
from bert_core.tasks.text_classification import OneLabel
from bert_core.tasks.texts import TextInput
from pipelines import predict
from pipelines.answering.parts import usual_part_bytes
from pipelines.corpus.blocks import plan_blocks
from pipelines.corpus.labelled import LabelledConfig, labelled_rows
from pipelines.corpus.sources import list_corpus
from pipelines.predict import PredictConfig
from tests.pipelines.interruption import run_interrupted

TEXTS = [
    f"Return the number {number} of bytes{' and more' * (number % 7)}." for number in range(50)
]


@pytest.fixture
def config(untrained: Any, tmp_path: Path) -> PredictConfig:
    return PredictConfig(
        output=str(tmp_path / "out"),
        model=str(untrained.classifier),
        source=str(tmp_path / "rows.jsonl"),
        part_bytes=1000,
        num_workers=0,
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
    )


@pytest.fixture
def answers(config: PredictConfig) -> list[Any]:
    from bert_core.inference.predictor import Predictor

    return Predictor(config.model, device="cpu").predict(TEXTS)


def lines_of(folder: str | Path) -> list[dict[str, Any]]:
    paths = sorted(Path(folder).glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("rows", "parts"), [(100, 1), (20_000, 16), (200_000, 50)], ids=["few", "20,000", "many"]
)
def test_many_texts_have_many_parts(rows: int, parts: int, tmp_path: Path) -> None:
    """Or else one worker of two is idle, nothing moves, and a kill loses all."""
    path = tmp_path / "rows.txt"
    path.write_text(f"{'x' * 79}\n" * rows)
    config = PredictConfig(output="o", model="m", source=str(path))
    corpus = list_corpus(config.corpus, config.output)
    assert len(plan_blocks(corpus, usual_part_bytes(corpus))) == pytest.approx(parts, abs=1)


def test_lines_come_back_in_order_with_their_columns_and_an_answer(
    config: PredictConfig, answers: list[Any]
) -> None:
    rows = [{"n": n, "text": text, "über": [n, None]} for n, text in enumerate(TEXTS)]
    Path(str(config.source)).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    counts = predict.run(config).counts
    assert counts["parts"] > 3
    assert (counts["rows"], counts["rejected"]) == (50, 0)
    found = lines_of(f"{config.output}/rows")
    assert [{name: row[name] for name in rows[0]} for row in found] == rows
    for row, answer in zip(found, answers, strict=True):
        assert row["predicted_label"] == answer[0]["label"]
        assert row["predicted_score"] == pytest.approx(answer[0]["score"], abs=1e-5)
        assert [one["label"] for one in row["answer"]] == [one["label"] for one in answer]


@pytest.mark.usefixtures("forked")
def test_tables_keep_their_types_and_workers_change_nothing(
    config: PredictConfig, answers: list[Any], tmp_path: Path
) -> None:
    table = pa.table(
        {
            "id": pa.array(range(50), pa.int16()),
            "body": pa.array(TEXTS, pa.large_string()).dictionary_encode(),
            "when": pa.array(range(50), pa.timestamp("us")),
        }
    )
    (tmp_path / "tables").mkdir()
    for number in range(2):
        part = table.slice(25 * number, 25)
        pq.write_table(part, tmp_path / "tables" / f"{number}.parquet", row_group_size=10)
    config = replace(config, source=str(tmp_path / "tables"), columns={"text": "body"})
    predict.run(config)
    two = replace(config, output=str(tmp_path / "two"), num_workers=2)
    assert predict.run(two).outputs == predict.run(config).outputs
    found = pq.read_table(Path(config.output, "rows"))
    assert found.select(["id", "when"]).equals(table.select(["id", "when"]))
    assert found["body"].to_pylist() == TEXTS
    assert found["predicted_label"].to_pylist() == [answer[0]["label"] for answer in answers]
    whole = [json.loads(each)[0]["label"] for each in found["answer"].to_pylist()]
    assert whole == found["predicted_label"].to_pylist()


def test_tables_without_rows_and_with_other_columns(config: PredictConfig, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    folder.mkdir()
    table = pa.table({"text": TEXTS[:3]})
    pq.write_table(table, folder / "0.parquet")
    pq.write_table(table.slice(0, 0), folder / "1.parquet")
    small = replace(config, source=str(folder), part_bytes=1)
    assert predict.run(small).counts["rows"] == 3
    found = pq.read_table(Path(config.output, "rows"))
    assert found["text"].to_pylist() == TEXTS[:3]
    pq.write_table(pa.table({"text": TEXTS, "n": range(50)}), folder / "2.parquet")
    other = replace(small, output=f"{config.output}-2")
    with pytest.raises(CorpusError, match=r"2.parquet: wanted the columns and types of .*0.parque"):
        predict.run(other)


# A cell of several lines, a blank line, and texts of all lengths beside a number.
TABLE = "n,text,über\n" + "".join(
    f'{n},"{text} ""So"",\n\nit says.",{n}\n{chr(10) * (n % 2)}' for n, text in enumerate(TEXTS)
)
CELLS = [f'{text} "So",\n\nit says.' for text in TEXTS]


@pytest.mark.usefixtures("local_ray")
def test_tables_of_text_come_back_in_order_and_workers_and_parts_change_nothing(
    config: PredictConfig, tmp_path: Path
) -> None:
    from bert_core.inference.predictor import Predictor

    answers = Predictor(config.model, device="cpu").predict(CELLS)
    (tmp_path / "plain.csv").write_text(TABLE, encoding="utf-8")
    (tmp_path / "packed.csv.gz").write_bytes(gzip.compress(TABLE.encode()))
    config = replace(config, source=str(tmp_path / "plain.csv"))
    counts = predict.run(config).counts
    assert counts["parts"] > 3
    assert (counts["rows"], counts["rejected"]) == (50, 0)
    found = lines_of(f"{config.output}/rows")
    assert [(row["n"], row["text"], row["über"]) for row in found] == [
        (str(n), text, str(n)) for n, text in enumerate(CELLS)
    ]
    assert [row["predicted_label"] for row in found] == [each[0]["label"] for each in answers]
    two = replace(config, output=str(tmp_path / "two"), num_workers=2)
    assert predict.run(two).outputs == predict.run(config).outputs
    packed = replace(config, output=f"{config.output}-packed", source=f"{tmp_path}/packed.csv.gz")
    counts = predict.run(packed).counts
    assert (counts["parts"], counts["blank_lines_left_out"]) == (1, 25)
    again = lines_of(f"{packed.output}/rows")
    assert [row["text"] for row in again] == CELLS
    assert [row["predicted_label"] for row in again] == [row["predicted_label"] for row in found]


@pytest.mark.parametrize("name", ["dev.tsv", "dev.tsv.bz2"])
def test_predict_reads_what_finetune_reads(
    config: PredictConfig, tmp_path: Path, name: str
) -> None:
    lines = "".join(f"{text}\t{n % 2}\t\n" for n, text in enumerate(TEXTS))
    data = f"sentence\tlabel\ttext_pair\n{lines}".encode()
    pack = bz2.compress if name.endswith("bz2") else bytes
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / name).write_bytes(pack(data))
    labelled = LabelledConfig(source=f"{tmp_path}/sets/{name}", columns={"text": "sentence"})
    rows = labelled_rows(labelled, "train", (TextInput, OneLabel)).rows
    sources = (f"{tmp_path}/sets/{name}", str(tmp_path / "sets"), f"{tmp_path}/sets/*{name[3:]}")
    for number, source in enumerate(sources):
        told = replace(
            config,
            output=f"{config.output}-{number}",
            source=source,
            columns={"text": "sentence"},
            part_bytes=1_000_000,
        )
        predict.run(told)
        found = lines_of(f"{told.output}/rows")
        assert [row["sentence"] for row in found] == [row["text"] for row in rows] == TEXTS
        assert [row["label"] for row in found] == [row["label"] for row in rows]
        # An empty cell of what a row may go without is as good as none.
        assert {row["text_pair"] for row in found} == {""}


def test_unreadable_rows_of_a_table_are_set_aside_by_line(
    config: PredictConfig, tmp_path: Path
) -> None:
    data = (
        b"id,text\n1,Return a list.\n2\n"
        b'3,"A quote, not closed\n4,"Inside."x\n'
        b"5,Caf\xe9\n"
        b'6,"Two\nlines.",more\n'
        b"7,Close the file.\n"
    )
    (tmp_path / "rows.csv").write_bytes(data)
    odd = replace(config, source=str(tmp_path / "rows.csv"), part_bytes=1_000_000)
    counts = predict.run(odd).counts
    assert (counts["rows"], counts["rejected_unreadable"]) == (2, 5)
    assert [row["id"] for row in lines_of(f"{odd.output}/rows")] == ["1", "7"]
    aside = lines_of(f"{odd.output}/rejected")
    path = tmp_path / "rows.csv"
    assert [row["where"] for row in aside] == [f"{path}, line {line}" for line in (3, 4, 5, 6, 7)]
    wanted = [
        ("2\n", "line 3: wanted 2 cells, as many as the header has columns, got 1"),
        ('3,"A quote, not closed\n', "line 4: wanted a row of .csv, it cannot be read ("),
        ('4,"Inside."x\n', "line 5: wanted a row of .csv, it cannot be read ("),
        ("5,Caf\ufffd\n", "line 6: wanted UTF-8, byte 0xe9 is not"),
        ('6,"Two\nlines.",more\n', "line 7: wanted 2 cells, as many as the header has columns, g"),
    ]
    for row, (text, reason) in zip(aside, wanted, strict=True):
        assert row["row"] == text
        assert f"{path}, {reason}" in row["reason"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            "body,label\na,b\n",
            "wanted a column 'text', there are: body, label: map it",
        ),
        (
            "a.csv",
            "text;label\na;b\n",
            "line 1: wanted names of columns separated by commas, got n",
        ),
        ("a.csv", "text,answer\na,b\n", "wanted no column 'answer', which answers are written"),
        ("a.csv", "text,,\na,b,c\n", "wanted each column once, got '' 2 times"),
        ("a.json", "{}", "wanted rows to answer, got none"),
        (
            "a.conll",
            "a O\n",
            "got .conll: write its rows as .jsonl or .parquet; only stages of lab",
        ),
    ],
)
def test_a_table_of_text_that_would_be_rejected_whole_is_refused(
    config: PredictConfig, tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CorpusError, match=message):
        predict.run(replace(config, source=str(tmp_path / name)))


def test_lines_of_text_are_rows(config: PredictConfig, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("\ufeff" + "\n\n".join(TEXTS) + "\n", encoding="utf-8")
    counts = predict.run(replace(config, source=str(tmp_path / "rows.txt"))).counts
    assert counts["blank_lines_left_out"] == len(TEXTS) - 1
    assert [row["text"] for row in lines_of(f"{config.output}/rows")] == TEXTS


def test_rows_that_cannot_be_answered_are_set_aside_with_the_reason(
    config: PredictConfig,
) -> None:
    lines = [
        b'{"text": "Return a list."}',
        b'{"text": 7}',
        b"not json",
        b'{"body": "no text"}',
        b'{"text": "\xff"}',
        b"[1]",
        b'{"text": "Half a pair \\ud800."}',
        b'{"text": "Half a pair elsewhere.", "more": [{"\\uD83D": 1}]}',
        b'{"text": "Taken.", "answer": "mine"}',
        b'{"text": "Close the file."}',
    ]
    Path(str(config.source)).write_bytes(b"\n".join(lines))
    counts = predict.run(replace(config, part_bytes=1_000_000)).counts
    assert (counts["rows"], counts["rejected"]) == (2, 8)
    kept = [row["text"] for row in lines_of(f"{config.output}/rows")]
    assert kept == ["Return a list.", "Close the file."]
    aside = lines_of(f"{config.output}/rejected")
    assert Counter(row["kind"] for row in aside) == {
        "unreadable": 5,
        "name_taken": 1,
        "without_the_input": 2,
    }
    assert (counts["rejected_unreadable"], counts["rejected_name_taken"]) == (5, 1)
    (taken,) = [row for row in aside if row["kind"] == "name_taken"]
    assert taken["row"] == {"text": "Taken.", "answer": "mine"}
    assert "wanted no column 'answer', which answers are written to: set another" in taken["reason"]
    at = {row["where"].rpartition("byte ")[2]: row["reason"] for row in aside}
    assert "wanted text, got a number (7)" in at["27"]
    assert "text (text), text_pair (text), text is missing" in at["48"].replace(" and", ",")


def test_texts_that_may_not_be_cut_are_set_aside(config: PredictConfig) -> None:
    rows = [{"text": "short"}, {"text": "long " * 1000}, {"text": "short again"}]
    Path(str(config.source)).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    strict = replace(config, parameters={"truncation": False, "top_k": 1}, part_bytes=1_000_000)
    predict.run(strict)
    (aside,) = lines_of(f"{config.output}/rejected")
    assert aside["kind"] == "not_taken"
    assert aside["row"] == rows[1]
    assert "wanted at most 512 tokens" in aside["reason"]
    assert [len(row["answer"]) for row in lines_of(f"{config.output}/rows")] == [1, 1]
    cutting = replace(config, output=f"{config.output}-2", parameters={"top_k": 1})
    assert predict.run(cutting).counts["rejected"] == 0


def test_a_killed_run_makes_only_the_missing_parts(
    config: PredictConfig,
) -> None:
    Path(str(config.source)).write_text("".join(f"{json.dumps({'text': t})}\n" for t in TEXTS))
    run_interrupted(predict, config, parts=2)
    first = {path: path.stat().st_mtime_ns for path in Path(config.output, "rows").iterdir()}
    assert len(first) == 2
    counts = predict.run(config).counts
    assert counts["rows"] == 50
    assert all(path.stat().st_mtime_ns == written for path, written in first.items())
    whole = replace(config, output=f"{config.output}-whole")
    assert predict.run(whole).outputs == predict.run(config).outputs


def test_an_encoder_fills_masks(untrained: Any, config: PredictConfig) -> None:
    rows = [{"text": "Return the [MASK]."}, {"text": "no mask"}, {"text": "[MASK] a [MASK]."}]
    Path(str(config.source)).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    model = str(untrained.encoder)
    counts = predict.run(replace(config, model=model, part_bytes=1_000_000)).counts
    assert (counts["rows"], counts["rejected_not_taken"]) == (2, 1)
    assert [len(row["predicted_words"]) for row in lines_of(f"{config.output}/rows")] == [1, 2]


def test_a_setting_that_would_reject_every_row_is_refused(
    config: PredictConfig, tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"
    table = pa.table({"body": TEXTS, "answer": TEXTS})
    pq.write_table(table, path)
    tables = replace(config, source=str(path))
    with pytest.raises(
        CorpusError, match="wanted no column 'answer', which answers are written to"
    ):
        predict.run(tables)
    tables = replace(tables, answer_column="whole")
    with pytest.raises(CorpusError, match="wanted a column 'text', there are: body, answer"):
        predict.run(tables)
    with pytest.raises(ConfigError, match="columns: wanted names of the fields text, text_pair"):
        predict.run(replace(tables, columns={"txet": "body"}))
    with pytest.raises(ConfigError, match=r'parameters: wanted .* got "topk" \(did you mean top_k'):
        predict.run(replace(tables, columns={"text": "body"}, parameters={"topk": 1}))
    (tmp_path / "rows.txt").write_text("a line")
    with pytest.raises(CorpusError, match="wanted rows in Parquet, or in JSON, CSV, TSV and"):
        predict.run(replace(tables, source=(str(path), str(tmp_path / "rows.txt"))))
    (tmp_path / "rows.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(CorpusError, match=r"wanted rows to answer, got none \(1 without_the_input"):
        predict.run(config)
