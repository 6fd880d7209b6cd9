"""Files are read as what they hold, whatever they are called, for corpora and labelled rows alike;
damage and odd columns are told with the file's name, and what is passed over is named."""

import base64
import bz2
import decimal
import gzip
import io
import json
import lzma
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_core.compression import decompress
from bert_core.data import json_rows
from bert_core.errors import CorpusError
from bert_core.tasks.text_classification import OneLabel
from bert_core.tasks.text_regression import Score
from bert_core.tasks.texts import TextInput
from pipelines.corpus.blocks import plan_blocks, read_block
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.data_files import _say
from pipelines.corpus.labelled import LabelledConfig, labelled_rows
from pipelines.corpus.sources import list_corpus

ROWS: list[dict[str, Any]] = [
    {"text": "open the file", "label": "x", "n": [1, {"a": "]}"}]},
    {"text": 'a "quote" \\ and é\n海', "label": "007", "n": None},
    {"text": "None", "label": "NA", "n": []},
]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS)


def parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression="none")
    return sink.getvalue()


BYTES: dict[str, bytes] = {
    "lines": LINES.encode(),
    "list": json.dumps(ROWS).encode(),
    "list over lines": ("\ufeff" + json.dumps(ROWS, indent=2, ensure_ascii=False)).encode(),
    "objects over lines": "\n".join(json.dumps(row, indent=1) for row in ROWS).encode(),
    "CRLF": json.dumps(ROWS, indent=2).replace("\n", "\r\n").encode(),
    "parquet": parquet(**{name: [row[name] for row in ROWS] for name in ("text", "label")}),
}
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
}  # fmt: skip
NAMES = {
    "lines": ("a.json", "a.jsonl", "part-00000", "a.data"),
    "parquet": ("a.parquet", "a.json", "a.txt", "part-00000"),
}


def read_corpus(path: Path, **settings: Any) -> list[str]:
    config = CorpusConfig(source=str(path), **settings)
    blocks = plan_blocks(list_corpus(config), 100)
    return [document.text for block in blocks for document in read_block(block)]


def read_rows(path: Path, shape: type = OneLabel) -> list[dict[str, Any]]:
    return labelled_rows(LabelledConfig(source=str(path)), "train", (TextInput, shape)).rows


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("kind", BYTES)
def test_contents_say_what_a_file_is_whatever_it_is_called(
    tmp_path: Path, kind: str, packed: str
) -> None:
    data = PACK[packed](BYTES[kind])
    for stem in NAMES.get(kind, ("a.json", "a.jsonl", "a")):
        for name in (stem, f"{stem}{packed}"):
            (tmp_path / name).write_bytes(data)
            rows = read_rows(tmp_path / name)
            assert [(row["text"], row["label"]) for row in rows] == [
                (row["text"], row["label"]) for row in ROWS
            ]
            if packed and kind == "parquet":  # its row groups could not be read apart
                with pytest.raises(CorpusError, match="not compressed once more, got it as"):
                    read_corpus(tmp_path / name)
            else:
                assert read_corpus(tmp_path / name) == [row["text"] for row in ROWS]


def test_a_compressed_text_under_another_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"One.\n\nTwo."))
    (tmp_path / "b.csv").write_bytes(bz2.compress(b"text,label\nThree.,x\n"))
    assert [text.strip() for text in read_corpus(tmp_path / "a.txt")] == ["One.", "Two."]
    assert read_corpus(tmp_path / "b.csv") == ["Three."]
    assert read_rows(tmp_path / "b.csv") == [{"text": "Three.", "label": "x"}]


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 3 else 3)
    if kind < 3:
        return [rng.choice(['a"b', "\\", "[{", "}]", "x\ny", "é,", '"\\"']), 7, None][kind]
    if kind == 3:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {f"{n}{rng.choice('{]')}": random_value(rng, depth + 1) for n in range(rng.randrange(3))}


@pytest.mark.parametrize("chunk_bytes", [1, 3, 50])
def test_objects_are_those_of_the_json_module_wherever_a_piece_ends(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(json_rows, "CHUNK_BYTES", chunk_bytes)
    rng = random.Random(chunk_bytes)
    for _ in range(100):
        rows = [{"k": random_value(rng)} for _ in range(rng.randrange(4))]
        indent = rng.choice([None, 0, 2])
        data = (rng.choice(["", "\ufeff", "\n "]) + json.dumps(rows, indent=indent)).encode()
        assert json_rows.json_rows(data, "a.json") == rows
        for offset, line in json_rows.as_lines(io.BytesIO(data), "a.json"):
            assert data[offset : offset + 1] == line[:1] == b"{"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'[{"text": "a", "label": "x"}, 3]', r"object 2: wanted a JSON object, got a number"),
        (
            b'[{"text": "a", "label": "x"}, {"text": }]',
            r"object 2: wanted a JSON object, it is not JSON \(Exp",
        ),
        (
            b'[{"text": "a", "label": "x"}, {"text": "b"',
            r"wanted whole JSON, it ends within a list: copy or do",
        ),
        (
            b'{"text": "a", "label": "x"}\n{"text": "b',
            r"line 2: wanted a JSON object, it is not JSON \(Unterm",
        ),
        (
            b'{"text": "a", "label": "x"}\n["b"]',
            r"line 2: wanted a JSON object, got a list: correct or remove",
        ),
        (b'{"data": [{"paragraphs": []}]}', "wanted rows, got SQuAD's articles: give format squad"),
        (
            b'{"train": [["a", "x"]], "oos_train": [["b", "oos"]]}',
            "wanted rows, got the parts train, oos_train",
        ),
    ],
)
def test_invalid_json_is_reported_with_place_and_reason(
    tmp_path: Path, data: bytes, message: str
) -> None:
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(CorpusError, match=rf"a\.json[:,].* {message}"):
        read_rows(tmp_path / "a.json")


@pytest.mark.parametrize("schema", [5, None, "pandas_version", ["pandas_version"], {}], ids=repr)
def test_a_row_with_columns_named_as_a_table_of_pandas_is_a_row(
    tmp_path: Path, schema: Any
) -> None:
    row = {"schema": schema, "data": "x"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    assert json_rows.json_rows((tmp_path / "a.jsonl").read_bytes(), "a.jsonl") == [row]
    assert read_corpus(tmp_path / "a.jsonl", text_column="data") == ["x"]


def test_a_bad_object_of_a_list_affects_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'[{"text": "a"},\n{"text": },\n 3, {"text": "b"}]')
    assert read_corpus(tmp_path / "a.json", errors="skip") == ["a", "", "", "b"]


def test_a_dump_with_a_stream_without_content_is_read(tmp_path: Path) -> None:
    page = "<page><title>{0}</title><ns>0</ns><revision><text>Of {0}.</text></revision></page>"
    parts = ["<mediawiki>", *map(page.format, "ABC"), "", page.format("D"), "</mediawiki>", ""]
    data = b"".join(bz2.compress(part.encode()) for part in parts)
    assert decompress(data, "bz2") == bz2.decompress(data)
    for name in ("a.xml.bz2", "a-multistream1.xml-p1p41242.bz2", "a"):
        (tmp_path / name).write_bytes(data)
        for block_bytes in (1, 10_000):
            config = CorpusConfig(source=str(tmp_path / name))
            blocks = plan_blocks(list_corpus(config), block_bytes)
            found = [document.text for block in blocks for document in read_block(block)]
            assert found == [f"{title}\n\nOf {title}." for title in "ABCD"]


TEXTS = [f"word {n} and more" for n in range(200)]
LABELS = ["a", "b"] * 100


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "zstd"])
def test_a_damaged_page_is_reported_with_the_name_of_the_file(tmp_path: Path, codec: str) -> None:
    sink = io.BytesIO()
    table = pa.table({"text": TEXTS, "label": LABELS})
    pq.write_table(table, sink, compression=codec, use_dictionary=["label"], row_group_size=70)
    whole, rng, told = sink.getvalue(), random.Random(0), list[str]()
    for _ in range(60):
        data = bytearray(whole)
        at = rng.randrange(4, len(data) - 8)
        data[at : at + 8] = rng.randbytes(8)
        (tmp_path / "a.parquet").write_bytes(data)
        for read in (read_rows, read_corpus):
            try:
                read(tmp_path / "a.parquet")
            except CorpusError as error:  # and nothing else
                told.append(str(error))
    assert len(told) > 20
    assert all(f"{tmp_path}/a.parquet" in message for message in told)


TIMES = pa.array([9_000_000_000_000_000_000] * 3, pa.timestamp("us"))


def wide_integers() -> bytes:
    """A file as Polars 2.1 writes one with a column of 128-bit integers, which Arrow's schema
    names and pyarrow 25 does not know: the type's 64 bits, there, are changed to 128."""
    data = parquet(text=["a", "b", "c"], label=["x", "y", "x"], n=pa.array([1, 2, 3], pa.int64()))
    schema = pq.read_schema(pa.BufferReader(data))
    stored = bytearray(schema.serialize().to_pybytes())
    at = next(i for i in range(len(stored)) if _bits_of(stored, i) == 128)
    stored[at] = 128
    footer_bytes = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - footer_bytes : -8]
    old = base64.b64encode(schema.serialize().to_pybytes())
    assert old in footer
    footer = footer.replace(old, base64.b64encode(stored))
    return data[: -8 - footer_bytes] + footer + data[-8:]


def _bits_of(stored: bytearray, at: int) -> int | None:
    """128 if a schema with that byte changed to it is refused for it."""
    changed = bytearray(stored)
    if changed[at] != 64:
        return None
    changed[at] = 128
    try:
        pa.ipc.read_schema(pa.py_buffer(bytes(changed)))
    except pa.ArrowNotImplementedError:
        return 128
    except pa.ArrowException:
        return None
    return None


@pytest.mark.parametrize("name", ["128 bits", "time", "date", "bytes"])
def test_an_unused_column_does_not_make_a_file_unreadable(tmp_path: Path, name: str) -> None:
    odd: dict[str, Any] = {
        "time": TIMES,
        "date": pa.array([2_000_000_000] * 3, pa.date32()),
        "bytes": pa.array([b"\xff"] * 3),
    }
    data = (
        wide_integers()
        if name == "128 bits"
        else parquet(text=["a", "b", "c"], label=["x", "y", "x"], n=odd[name])
    )
    (tmp_path / "a.parquet").write_bytes(data)
    assert [row["label"] for row in read_rows(tmp_path / "a.parquet")] == ["x", "y", "x"]
    assert read_corpus(tmp_path / "a.parquet") == ["a", "b", "c"]


def test_a_column_that_is_asked_for_and_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet(text=["a", "b", "c"], label=TIMES))
    message = r"a.parquet, column 'label': wanted a timestamp\[us\] up to the year 9999, got one"
    with pytest.raises(CorpusError, match=message):
        read_rows(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("column", "labels"),
    [
        # What datasets 5.2 reads back from a column of its type Json.
        (pa.array(['"unknown"', '"spam"', '"3"'], pa.json_()), ["unknown", "spam", "3"]),
        (pa.array(["x", "y", "x"]).dictionary_encode(), ["x", "y", "x"]),
        (pa.array(["x", "y", "x"], pa.string_view()), ["x", "y", "x"]),
        (pa.array([decimal.Decimal("1"), decimal.Decimal("20"), decimal.Decimal(10**19 + 1)],
                  pa.decimal128(20, 0)), ["1", "20", "10000000000000000001"]),
        (pa.array([b"x", "é".encode(), b"y"]), ["x", "é", "y"]),
        (pa.array([2**63, 1, 2], pa.uint64()), [str(2**63), "1", "2"]),
        (pa.array([1.0, 2.0, 1.5], pa.float16()), ["1", "2", "1.5"]),
        (pa.array([0, 1, 20_000], pa.date32()), ["1970-01-01", "1970-01-02", "2024-10-04"]),
    ],
    ids=["json", "dictionary", "view", "decimal", "bytes", "uint64", "float16", "date"],
)  # fmt: skip
def test_labels_of_every_type_are_what_the_column_says(
    tmp_path: Path, column: pa.Array, labels: list[str]
) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet(text=["a", "b", "c"], label=column))
    assert [row["label"] for row in read_rows(tmp_path / "a.parquet")] == labels


@pytest.mark.parametrize("kind", [pa.decimal32(4, 2), pa.decimal128(38, 2), pa.decimal256(50, 2)])
def test_decimals_are_numbers(tmp_path: Path, kind: pa.DataType) -> None:
    scores = pa.array([decimal.Decimal("1.50"), decimal.Decimal("-2"), decimal.Decimal("0.25")])
    (tmp_path / "a.parquet").write_bytes(parquet(text=["a", "b", "c"], score=scores.cast(kind)))
    rows = read_rows(tmp_path / "a.parquet", Score)
    assert [row["score"] for row in rows] == [1.5, -2.0, 0.25]


def test_a_corpus_in_a_column_of_bytes_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet(text=pa.array(["é".encode(), b"b"])))
    assert read_corpus(tmp_path / "a.parquet") == ["é", "b"]


def test_a_corpus_in_a_column_of_json_is_read_without_its_quotes(tmp_path: Path) -> None:
    text = pa.array(['"a \\"b\\""', "3", None], pa.json_())
    (tmp_path / "a.parquet").write_bytes(parquet(text=text))
    assert read_corpus(tmp_path / "a.parquet") == ['a "b"', "", ""]


BESIDE = [
    "enwiki-latest-pages-articles-multistream-index.txt.bz2",
    "enwiki-20260101-pages-articles-multistream-index1.txt-p1p41242.bz2",
    "enwiki-latest-md5sums.txt", "SHA256SUMS", "a.txt.md5", "sub/b.jsonl.crc", "README.md",
    "LICENSE", "LICENSE.txt", "dataset_infos.json", "sub/state.json", "enwiki-latest-rss.xml",
]  # fmt: skip
HIDDEN = ["_SUCCESS", ".a.txt.crc", "sub/_old/b.txt", "_metadata"]
OF_GIT = [".gitattributes", ".git/HEAD"]


def test_files_that_accompany_data_are_skipped_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [*BESIDE, *HIDDEN, *OF_GIT, "data.txt", "sub/README.md"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        data = f"of {name}".encode()
        (tmp_path / name).write_bytes(bz2.compress(data) if name.endswith("bz2") else data)
    _say.cache_clear()
    assert read_corpus(tmp_path) == ["of data.txt", "of sub/README.md"]
    lines = capsys.readouterr().out.replace(str(tmp_path), "DIR").splitlines()
    assert lines == [
        "DIR: passed over 4 files hidden: .a.txt.crc, _SUCCESS, _metadata, sub/_old/b.txt",
        "DIR: passed over 12 files beside the data: LICENSE, LICENSE.txt, README.md, SHA256SUMS "
        "and 8 more",
    ]
    assert read_corpus(tmp_path / "README.md") == ["of README.md"]  # a file that is named is read


def test_json_beside_tables_describes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,x\n")
    (tmp_path / "label2id.json").write_text('{"x": 0}')
    assert read_rows(tmp_path) == [{"text": "a", "label": "x"}]
    assert "passed over 1 file beside the data: label2id.json" in capsys.readouterr().out
    (tmp_path / "a.csv").rename(tmp_path / "b.txt")
    (tmp_path / "label2id.json").write_text('[{"text": "b", "label": "y"}]')
    assert read_rows(tmp_path) == [{"text": "b", "label": "y"}]
    assert "passed over 1 file of other kinds: b.txt" in capsys.readouterr().out


# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md, version 1
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "data", "way_out"),
    [
        ("a.feather", b"ARROW1\0\0", "`pyarrow.parquet.write_table(pyarrow.ipc.open_file("),
        ("a.sqlite", b"SQLite format 3\0", "it is an SQLite database: write its table as .parqu"),
        ("a.zip", b"PK\x03\x04", "it is a zip archive: unpack it"),
        ("a.tar.gz", gzip.compress(bytes(257) + b"ustar"), "it is a tar archive: unpack it"),
        # Other files under the names of those that are read.
        ("a.csv", b"PK\x03\x04", "it is a zip archive: unpack it"),
        ("a.parquet", b"ARROW1\0\0", "`pyarrow.parquet.write_table(pyarrow.ipc.open_file("),
        ("a.jsonl.gz", gzip.compress(b"\n<!DOCTYPE html>"), "it is a web page: download the file"),
        ("a.tsv", b"<html>", "it is a web page: download the file"),
        ("a.parquet", POINTER, "it is a pointer of Git LFS: have Git LFS fetch"),
        ("a.txt", POINTER, "it is a pointer of Git LFS: have Git LFS fetch"),
    ],
)
def test_a_file_of_an_unsupported_format_says_what_to_do(
    tmp_path: Path, name: str, data: bytes, way_out: str
) -> None:
    (tmp_path / name).write_bytes(data)
    for read in (read_corpus, read_rows):
        with pytest.raises(CorpusError, match=re.escape(way_out)):
            read(tmp_path / name)


def test_xml_that_is_not_a_dump_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_bytes(b"<rss/>")
    with pytest.raises(CorpusError, match="wanted a Wikipedia dump, got other XML: write its te"):
        read_corpus(tmp_path / "a.xml")


def test_text_may_begin_as_other_formats_do(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("ORCID,text,label\n1,a,x\n")
    assert read_rows(tmp_path / "a.csv") == [{"text": "a", "label": "x"}]


@pytest.mark.parametrize("what", ["", "/*.txt"])
def test_a_file_name_that_is_not_utf8_is_reported(tmp_path: Path, what: str) -> None:
    (tmp_path / "b.txt").write_text("One.")
    (tmp_path / "caf\udce9.txt").write_text("Two.")
    message = r"wanted names of files in UTF-8, got b'.*caf\\xe9.txt': rename the file"
    with pytest.raises(CorpusError, match=message):
        list_corpus(CorpusConfig(source=f"{tmp_path}{what}"))


@pytest.mark.parametrize("card", ["date: 2024-02-30", "[" * 3000, "a: b: c", "configs: 3"])
def test_a_card_that_cannot_be_read_is_named(tmp_path: Path, card: str) -> None:
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")
    (tmp_path / "a.txt").write_text("One.")
    with pytest.raises(CorpusError, match=r"README.md: wanted .*, or give the files as a glob$"):
        list_corpus(CorpusConfig(source=str(tmp_path)))
