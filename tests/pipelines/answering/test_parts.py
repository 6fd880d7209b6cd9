"""Rows to answer, as they are read from every format: no model is needed for these."""

import decimal
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_core.tasks.texts import TextInput
from pipelines.answering.parts import OutputPart, RowsConfig, read_tables, read_texts
from pipelines.corpus.blocks import plan_blocks
from pipelines.corpus.sources import list_corpus


def config_of(path: Path) -> RowsConfig:
    return RowsConfig(source=str(path), output=str(path.parent / "output"), num_workers=0)


@pytest.mark.parametrize("number", ["1e400", "-1e999", "NaN", "Infinity", "9" * 400 + ".0"])
def test_a_row_with_a_number_that_json_cannot_hold_is_put_aside(
    tmp_path: Path, number: str
) -> None:
    """RFC 8259, section 6: Infinity and NaN are not permitted, so no answer could repeat them."""
    path = tmp_path / "a.jsonl"
    path.write_text(
        f'{{"text": "a", "n": [1e300, 2]}}\n{{"text": "b", "n": [{{"x": {number}}}]}}\n'
    )
    config = config_of(path)
    part = OutputPart(config, TextInput)
    [block] = plan_blocks(list_corpus(config.corpus), 1000)
    assert [row.columns["text"] for row in read_texts(block, part)] == ["a"]
    [rejected] = part.rejected
    assert rejected["kind"] == "unreadable"
    assert "wanted a number up to 1.8e+308, got " in rejected["reason"]
    assert rejected["row"] == path.read_text().splitlines(keepends=True)[1]


def test_rows_of_a_list_are_answered_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a\nb"}, {"text": "c"}], indent=2))
    config = config_of(tmp_path / "a.json")
    part = OutputPart(config, TextInput)
    [block] = plan_blocks(list_corpus(config.corpus), 1000)
    assert [row.columns["text"] for row in read_texts(block, part)] == ["a\nb", "c"]


def test_columns_of_a_table_are_read_as_they_are_for_training(tmp_path: Path) -> None:
    sink = io.BytesIO()
    table = pa.table({
        "text": pa.array(['"a"', '"b"'], pa.json_()),
        "n": pa.array([decimal.Decimal("1.5"), None]),
        "time": pa.array([9_000_000_000_000_000_000] * 2, pa.timestamp("us")),
    })  # fmt: skip
    pq.write_table(table, sink)
    (tmp_path / "a.parquet").write_bytes(sink.getvalue())
    config = config_of(tmp_path / "a.parquet")
    part = OutputPart(config, TextInput)
    [block] = plan_blocks(list_corpus(config.corpus), 1000)
    [(batch, rows)] = read_tables(block, part, 10)
    assert [row.columns for row in rows] == [{"text": "a"}, {"text": "b"}]
    assert batch.equals(table)
