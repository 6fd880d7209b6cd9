"""Documents are the same however a corpus is cut and packed, and what is wrong with it is named."""

import bz2
import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web

from bert_core.data.documents import clean
from bert_core.errors import ConfigError, CorpusError
from bert_core.tasks.question_answering import QuestionAnswering
from bert_core.tasks.text_classification import OneLabel
from bert_core.tasks.texts import TextInput
from pipelines.corpus.blocks import plan_blocks, read_block
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.labelled import LabelledConfig, Split, labelled_rows, read_unlabelled
from pipelines.corpus.readers.base import Block
from pipelines.corpus.sources import corpus_size_bytes, list_corpus
from tests.web_server import WebServer

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}
TEXTS = [f"Text {n} is é and 海. " + "It goes on. " * (n % 9) + f"End of {n}." for n in range(60)]
# Also more blank lines than are kept in sight while a file is cut.
BLANK = ["\n\n", "\n \t\n", "\r\n\r\n", "\n\n\n", "\n \n\n\n\n", "\n" * 3001]
BLANK_LINES = "\n\n\n" + "".join(text + BLANK[n % 6] for n, text in enumerate(TEXTS))
HEADINGS = [f"# Chapter {n}\n{text}\n\n### A part\nMore." for n, text in enumerate(TEXTS)]
HEADER = "<mediawiki>\n  <siteinfo>\n    <sitename>Wikipedia</sitename>\n  </siteinfo>\n"
PAGES = [
    f"  <page>\n    <title>Page {n}</title>\n    <ns>0</ns>\n    <revision>\n      <model>wikitext"
    "</model>\n      <format>text/x-wiki</format>\n      <text>'''Page''' of [[text|text]]: "
    f"{text}</text>\n    </revision>\n  </page>\n"
    for n, text in enumerate(TEXTS)
]
DUMP = HEADER + "".join(PAGES) + "</mediawiki>\n"
ARTICLES = [f"Page {n}\n\nPage of text: {text}" for n, text in enumerate(TEXTS)]
LINES = "\ufeff" + "\n\n".join(json.dumps({"text": text, "n": 1}) for text in TEXTS)
# A row over several lines, blank lines, and a column before the text.
TABLE = "\ufeffn,text\n" + "".join(
    f'{n},"{text}\n\n{text}, so ""said"" it."\n{chr(10) * (n % 2)}' for n, text in enumerate(TEXTS)
)
TAB_TABLE = "text\tn\n" + "".join(f'{text} "a\t{n}\n' for n, text in enumerate(TEXTS))
# Kind → (file name, its content, settings, the documents in it).
KINDS: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "blank_line": ("a.txt", BLANK_LINES, {}, TEXTS),
    "heading": ("a.md", "\n".join(HEADINGS), {"document_boundary": "heading"}, HEADINGS),
    "file": ("a.txt", "\n\n".join(TEXTS), {"document_boundary": "file"}, ["\n\n".join(TEXTS)]),
    "jsonl": ("a.jsonl", LINES, {}, TEXTS),
    "csv": ("a.csv", TABLE, {}, [f'{text}\n\n{text}, so "said" it.' for text in TEXTS]),
    "csv, CRLF": (
        "a.csv",
        TABLE.replace("\n", "\r\n"),
        {},
        [f'{text}\n\n{text}, so "said" it.' for text in TEXTS],
    ),
    "tsv": ("a.tsv", TAB_TABLE, {}, [f'{text} "a' for text in TEXTS]),
    "wikipedia": ("a.xml", DUMP, {}, ARTICLES),
}


def blocks_of(config: CorpusConfig, block_bytes: int) -> list[Block]:
    return plan_blocks(list_corpus(config), block_bytes)


def size_bytes_of(config: CorpusConfig) -> int:
    return corpus_size_bytes(list_corpus(config))


def documents(config: CorpusConfig, block_bytes: int = 1000) -> list[tuple[str, str | None]]:
    """(cleaned text, why it was dropped) of every document, blocks in their order."""
    blocks = blocks_of(config, block_bytes)
    return [(clean(each.text), each.dropped) for block in blocks for each in read_block(block)]


def texts(config: CorpusConfig, block_bytes: int = 1000) -> list[str]:
    found = documents(config, block_bytes)
    assert {dropped for _, dropped in found} <= {None}
    return [text for text, _ in found]


def corpus(folder: Path, name: str, data: bytes, **settings: Any) -> CorpusConfig:
    (folder / name).write_bytes(data)
    return CorpusConfig(source=str(folder / name), **settings)


def parquet(path: Path, **columns: Any) -> CorpusConfig:
    pq.write_table(pa.table(columns), path, row_group_size=13)
    return CorpusConfig(source=str(path))


def streams(*parts: str) -> bytes:
    return b"".join(bz2.compress(part.encode()) for part in parts)


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_the_same_however_they_are_cut_and_packed(
    tmp_path: Path, kind: str, packed: str
) -> None:
    name, content, settings, wanted = KINDS[kind]
    config = corpus(tmp_path, name + packed, PACK[packed](content.encode()), **settings)
    for block_bytes in (7, 1000, 10_000_000):
        assert texts(config, block_bytes) == wanted
    assert (len(blocks_of(config, 7)) > 50) == (not packed and kind != "file")
    assert len(blocks_of(config, 10_000_000)) == 1


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_missing_column_of_a_table_of_text_is_named(tmp_path: Path, packed: str) -> None:
    config = corpus(tmp_path, f"a.csv{packed}", PACK[packed](b"id,body\n1,x\n2,y\n"))
    for block_bytes in (7, 1000):
        message = (
            f"a.csv{packed}, line 2: wanted text in the column 'text', got nothing; there are: "
        )
        with pytest.raises(CorpusError, match=re.escape(message)):
            documents(config, block_bytes)
    assert texts(CorpusConfig(source=config.source, text_column="body"), 7) == ["x", "y"]


LABELLED = {
    "a.csv": b'text,label\n"a\nb",x\nc,y\n',
    "a.tsv": b"text\tlabel\na b\tx\nc\ty\n",
    "a.jsonl": b'{"text": "a b", "label": "x"}\n{"text": "c", "label": "y"}\n',
}


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("name", LABELLED)
def test_labelled_rows_are_read_compressed_too(tmp_path: Path, name: str, packed: str) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}-{name}{packed}").write_bytes(PACK[packed](LABELLED[name]))
    file = LabelledConfig(source=f"{tmp_path}/train-{name}{packed}")
    folder = LabelledConfig(source=str(tmp_path))
    wanted = [("a\nb" if "csv" in name else "a b", "x"), ("c", "y")]
    asked: list[tuple[LabelledConfig, Split]]
    asked = [(file, "train"), (folder, "train"), (folder, "held_out")]
    for config, split in asked:
        rows = labelled_rows(config, split, (TextInput, OneLabel)).rows
        assert [(row["text"], row["label"]) for row in rows] == wanted
    assert len(read_unlabelled(file, TextInput)) == 2


def test_rows_without_labels_have_no_column_per_label(tmp_path: Path) -> None:
    config = LabelledConfig(source=str(tmp_path / "a.csv"), columns={"labels": ["x", "y"]})
    (tmp_path / "a.csv").write_text("text,x,y\na,0,1\n")
    message = (
        r'^columns\.labels: wanted the name of a column, got \["x", "y"\]: rows without labels'
    )
    with pytest.raises(ConfigError, match=message):
        read_unlabelled(config, TextInput)


@pytest.mark.parametrize("packed", PACK)
def test_sets_as_their_authors_publish_them_are_read_compressed_too(
    tmp_path: Path, packed: str
) -> None:
    answers = [{"text": "b", "answer_start": 2}]
    passage = {"context": "a b", "qas": [{"id": "1", "question": "q", "answers": answers}]}
    data = json.dumps({"data": [{"paragraphs": [passage]}]}).encode()
    (tmp_path / f"train.json{packed}").write_bytes(PACK[packed](data))
    config = LabelledConfig(source=f"{tmp_path}/train.json{packed}", format="squad")
    [row] = labelled_rows(config, "train", QuestionAnswering.shapes()).rows
    assert (row["context"], row["answers"]) == ("a b", answers)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary("int32", "string")]
)
def test_parquet_is_cut_at_its_row_groups(tmp_path: Path, kind: pa.DataType) -> None:
    rows = [*TEXTS[:30], None, *TEXTS[30:]]
    config = parquet(tmp_path / "a.parquet", n=range(61), text=pa.array(rows, kind))
    wanted = [(text or "", None if text else "no_text") for text in rows]
    for block_bytes, blocks in ((7, 5), (10_000_000, 1)):
        assert documents(config, block_bytes) == wanted
        assert len(blocks_of(config, block_bytes)) == blocks


def test_a_dump_of_many_streams_is_cut_between_them(tmp_path: Path) -> None:
    pages = ("".join(PAGES[n : n + 10]) for n in range(0, 60, 10))
    config = corpus(tmp_path, "a.xml.bz2", streams(HEADER, *pages, "</mediawiki>"))
    for block_bytes, blocks in ((7, 8), (2400, 4), (10_000_000, 1)):
        assert texts(config, block_bytes) == ARTICLES
        assert len(blocks_of(config, block_bytes)) == blocks


def test_a_dump_whose_streams_end_anywhere_is_read_from_its_beginning(tmp_path: Path) -> None:
    pieces = [DUMP[at : at + 700] for at in range(0, len(DUMP), 700)]
    config = corpus(tmp_path, "a.xml.bz2", streams(*pieces))
    assert len(blocks_of(config, 7)) == 1
    assert texts(config, 7) == ARTICLES


ONE = b"One. " * 300
LINE, LAST_LINE = b'{"text": "%s"}\n' % ONE, b'{"text": "Three."}'
PAGE, MALFORMED = PAGES[0].encode(), PAGES[1].replace("</ns>", "").encode()


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("block_bytes", [7, 1000])
@pytest.mark.parametrize(
    ("name", "before", "bad", "behind", "place", "message", "dropped"),
    [
        ("a.txt", ONE + b"\n\n", b"Caf\xe9.\n\n", b"Three.", 3,
         ": wanted UTF-8, byte 0xe9 at offset {} is not", "unreadable"),
        ("a.jsonl", LINE, b'{"text": \n', LAST_LINE, 0,
         ", the line at byte {}: wanted a JSON object, it is not JSON", "unreadable"),
        ("a.jsonl", LINE, b"[1]\n", LAST_LINE, 0,
         ", the line at byte {}: wanted a JSON object, got a list", "unreadable"),
        ("a.jsonl", LINE, b'{"text": "\xff"}\n', LAST_LINE, 0,
         ", the line at byte {}: wanted UTF-8, byte 0xff at offset 1,523 is not", "unreadable"),
        ("a.jsonl", LINE, b'{"body": 1}\n', LAST_LINE, 0, ", the line at byte {}: wanted text in "
         "the column 'text', got nothing; there are: body", "no_text"),
        ("a.csv", b"n,text\n1,%s\n" % ONE, b'2,"Two."x\n', b"3,Three.\n", None,
         ", line 3: wanted a row of .csv, it cannot be read (", "unreadable"),
        ("a.tsv", b"n\ttext\n1\t%s\n" % ONE, b"2\tTwo\tTwo.\n", b"3\tThree.\n", None,
         ", line 3: wanted 2 cells, as many as the header has columns, got 3", "unreadable"),
        ("a.xml", PAGE, MALFORMED, PAGE, 2, ": wanted pages of well-formed XML, the one at byte {} "
         "(Page 1) is not", "unreadable"),
        ("a.xml", PAGE, b"  <page>\n    <title>Half</title>\n", b"", 2, ": wanted whole pages, "
         "the piece at byte {} begins or ends within one: download the dump again", "unreadable"),
    ],
    ids=["text", "cut JSON", "a list", "JSON in Latin-1", "no text", "quoted", "cells", "bad page",
         "half a page"],
)  # fmt: skip
def test_a_bad_document_is_named_with_its_place_or_skipped(
    tmp_path: Path, name: str, before: bytes, bad: bytes, behind: bytes, place: int | None,
    message: str, dropped: str, block_bytes: int, packed: str,
) -> None:  # fmt: skip
    good = documents(corpus(tmp_path, name, before + behind))
    data = PACK[packed](before + bad + behind)
    named = re.escape(name + packed + message.format(f"{len(before) + (place or 0):,}"))
    with pytest.raises(CorpusError, match=named):
        documents(corpus(tmp_path, name + packed, data), block_bytes)
    config = corpus(tmp_path, name + packed, data, errors="skip")
    assert documents(config, block_bytes) == [good[0], ("", dropped), *good[1:]]


def test_a_text_in_parquet_that_is_no_utf8_is_named_or_skipped(tmp_path: Path) -> None:
    rows = pa.array([b"One.", b"Caf\xe9.", b"Three."])
    text = pa.Array.from_buffers(pa.string(), 3, rows.buffers())
    config = parquet(tmp_path / "a.parquet", text=text)
    with pytest.raises(CorpusError, match=r"a.parquet, row group 0: wanted UTF-8, byte 0xe9 at of"):
        documents(config)
    config = CorpusConfig(source=config.source, errors="skip")
    assert documents(config) == [("One.", None), ("", "unreadable"), ("Three.", None)]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt.gz", gzip.compress(BLANK_LINES.encode())[:-9], "a.txt.gz: wanted whole .gz data"),
        ("a.jsonl.bz2", bz2.compress(LINES.encode())[:-9], "a.jsonl.bz2: wanted whole .bz2 data"),
        ("a.xml.bz2", streams(HEADER, *PAGES)[:-9],
         "a.xml.bz2: wanted a whole .bz2 file, it cannot be read (Truncated compressed"),
        ("a.xml.bz2", streams(HEADER, PAGES[0], PAGES[1][:150], PAGES[1][150:]),
         "begins or ends within one: download the dump again, or decompress it"),
        ("a.parquet", b"PAR1 but no more", "a.parquet: wanted a whole Parquet file, it cannot be "),
        ("a.pdf", b"x", "or one of these followed by .gz, .bz2, .zst or .xz, got .pdf: rename"),
        ("a.json.gz", gzip.compress(b"x"), "a.json.gz, the line at byte 0: wanted a JSON object"),
        ("a.conllu", b"x", "got .conllu: write its rows as .jsonl or .parquet; only stages of lab"),
        ("a.gz", PACK[".gz"](b"x"), "a.gz: wanted a file ending in .txt, .md, .jsonl, .ndjson, .j"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    with pytest.raises(CorpusError, match=re.escape(message)):
        documents(corpus(tmp_path, name, data), block_bytes=7)


def test_damage_within_a_parquet_file_is_reported(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", text=[text * 20 for text in TEXTS])
    data = (tmp_path / "a.parquet").read_bytes()
    with pytest.raises(CorpusError, match=r"a.parquet: wanted a whole Parquet file, it cannot be"):
        documents(corpus(tmp_path, "a.parquet", data[:100] + bytes(200) + data[300:]))


@pytest.mark.parametrize("read", [documents, size_bytes_of])
def test_a_column_that_is_missing_or_not_text_is_named(
    tmp_path: Path, read: Callable[[CorpusConfig], Any]
) -> None:
    config = parquet(tmp_path / "a.parquet", id=[1], body=["x"])
    with pytest.raises(CorpusError, match="wanted a column 'text', there are: id, body: set corp"):
        read(config)
    with pytest.raises(CorpusError, match="wanted text in the column 'id', it is int64; there are"):
        read(CorpusConfig(source=config.source, text_column="id"))


def test_empty_files_among_others_are_passed_over(tmp_path: Path) -> None:
    for name in ("0.txt", "1.jsonl", "2.parquet", "3.xml.bz2", "4.txt.gz"):
        (tmp_path / name).touch()
    config = CorpusConfig(source=str(tmp_path))
    with pytest.raises(CorpusError, match="wanted text, every file there is empty: check the path"):
        size_bytes_of(config)
    (tmp_path / "5.txt").write_text("Some.\n\nText.")
    assert texts(config) == ["Some.", "Text."]
    assert size_bytes_of(config) == 12


def test_a_file_that_changed_since_the_run_began_is_reported(tmp_path: Path) -> None:
    [block] = blocks_of(corpus(tmp_path, "a.txt", b"One.\n\nTwo."), 1000)
    corpus(tmp_path, "a.txt", b"One.\n\nTwo.\n\nThree.")
    with pytest.raises(CorpusError, match="wanted the 10 bytes that were there when the run began"):
        list(read_block(block))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(CorpusError, match="existed when the run began, it is missing: put it b"):
        list(read_block(block))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": ()}, "corpus.source: wanted a path, a URI or `docstrings`, got none"),
        ({"weights": (1.0,)}, "corpus.weights: wanted one for each of the 2 sources, got 1"),
        ({"licenses": ("MIT",) * 3}, "corpus.licenses: wanted one for each of the 2 sources, got"),
        (
            {"weights": (1.0, 0.0)},
            "corpus.weights: wanted above 0 and at most 1000, got (1.0, 0.0)",
        ),
        ({"source": ""}, "corpus.source: wanted a path, a URI or `docstrings`, got an empty str"),
        ({"weights": (1.0, 1001.0)}, "wanted above 0 and at most 1000, got (1.0, 1001.0)"),
        ({"exponent": 0.0}, "corpus.exponent: wanted above 0 and at most 1, got 0.0"),
        (
            {"exponent": 0.3, "weights": (1.0, 2.0)},
            "corpus.exponent: wanted 1 with corpus.weights, which it would replace, got 0.3",
        ),
        ({"document_boundary": "page"}, "corpus.document_boundary: wanted one of blank_line, line"),
        ({"errors": "ignore"}, "corpus.errors: wanted one of fail, skip, got 'ignore'"),
        ({"held_out_share": 1.0}, "corpus.held_out_share: wanted at least 0 and below 1, got 1.0"),
    ],
)
def test_meaningless_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    config = CorpusConfig(source=("a", "b"))  # set as a command line would, past beartype
    for name, value in settings.items():
        object.__setattr__(config, name, value)
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.__post_init__()


def test_an_exponent_uses_small_languages_more_often_than_their_share(tmp_path: Path) -> None:
    for name, size in (("en", 8000), ("sw", 100), ("xh", 20)):
        corpus(tmp_path, f"{name}.txt", b"x" * size)
    sources = tuple(str(tmp_path / f"{name}.txt") for name in ("sw", "en", "xh"))
    listed = list_corpus(CorpusConfig(source=sources, exponent=0.5)).config
    sizes = (100, 8000, 20)
    used = [weight * size for weight, size in zip(listed.weights, sizes, strict=True)]
    wanted = [(size / sum(sizes)) ** 0.5 for size in sizes]
    assert [each / sum(used) for each in used] == pytest.approx(
        [each / sum(wanted) for each in wanted]
    )
    assert (listed.weight(1), listed.exponent) == (1.0, 1.0)


def test_an_exponent_without_text_or_with_too_little_is_refused(tmp_path: Path) -> None:
    for name, data in (("en", b"x" * 9_000_000), ("sw", b"x"), ("xh", b"")):
        corpus(tmp_path, f"{name}.txt", data)
    en, sw, xh = (str(tmp_path / f"{name}.txt") for name in ("en", "sw", "xh"))
    with pytest.raises(CorpusError, match=r"xh\.txt: wanted text in every source with corpus\.exp"):
        list_corpus(CorpusConfig(source=(en, xh), exponent=0.3))
    with pytest.raises(
        ConfigError, match=r"uses no text more than 1000 times, got 0\.3, which use"
    ):
        list_corpus(CorpusConfig(source=(en, sw), exponent=0.3))


def test_a_file_has_one_weight(tmp_path: Path) -> None:
    [path] = corpus(tmp_path, "a.txt", b"One.").sources
    sources = (path, f"{tmp_path}/*.txt")
    message = r"a.txt is in two sources with different weights, \S+a.txt and \S+\*.txt: name it in"
    with pytest.raises(ConfigError, match=message):
        list_corpus(CorpusConfig(source=sources, weights=(1.0, 2.0)))
    for weights in ((), (2.0, 2.0)):
        [found] = list_corpus(CorpusConfig(source=sources, weights=weights)).files
        assert (found.path, found.source) == (path, 0)


def test_only_the_text_columns_bytes_of_parquet_count(tmp_path: Path) -> None:
    text_bytes = sum(len(text.encode()) for text in TEXTS)
    other = [{"id": text * 50, "url": text * 60} for text in TEXTS]  # two columns in the file
    config = parquet(tmp_path / "a.parquet", other=other, text=TEXTS, last=TEXTS)
    assert text_bytes <= size_bytes_of(config) < 1.3 * text_bytes
    sources = (*config.sources, *corpus(tmp_path, "b.txt", b"x" * 1000).sources)
    both = CorpusConfig(source=sources, weights=(0.5, 3.0))
    assert size_bytes_of(both) == 3000 + int(0.5 * size_bytes_of(config))


def test_files_come_in_order_and_small_ones_are_grouped(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/.hidden.txt", "a/1.jsonl", "a/_SUCCESS"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "One."}' if "jsonl" in name else "Two.")
    assert texts(CorpusConfig(source=str(tmp_path))) == ["One.", "Two."]
    assert texts(CorpusConfig(source=f"file://{tmp_path}/*/*.jsonl")) == ["One."]
    config = CorpusConfig(source=(f"{tmp_path}/**/*.txt", str(tmp_path / "a")))
    for block_bytes, count in ((1, 2), (1000, 1)):
        blocks = blocks_of(config, block_bytes)
        found = [(each.text, each.source) for block in blocks for each in read_block(block)]
        assert (len(blocks), found) == (count, [("One.", 1), ("Two.", 0)])
    with pytest.raises(CorpusError, match="nowhere: wanted a file, a folder or a glob with at le"):
        list_corpus(CorpusConfig(source=str(tmp_path / "nowhere")))


@pytest.fixture
def website(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Shows `tmp_path`, and refuses what is asked below a file."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=403)

    site = web.Application()
    site.router.add_get("/{file}/README.md", refuse)
    site.router.add_static("/", tmp_path)
    with WebServer(site) as server:
        yield server.url


def test_a_corpus_may_be_on_the_web(tmp_path: Path, website: str) -> None:
    corpus(tmp_path, "a.txt", BLANK_LINES.encode())
    corpus(tmp_path, "b.jsonl.gz", gzip.compress(LINES.encode()))
    parquet(tmp_path / "c.parquet", text=TEXTS)
    sources = tuple(f"{website}/{name}" for name in ("a.txt", "b.jsonl.gz", "c.parquet"))
    config = CorpusConfig(source=sources)
    assert texts(config, 5000) == TEXTS * 3
    block = blocks_of(config, 5000)[0]
    (tmp_path / "a.txt").unlink()
    with pytest.raises(CorpusError, match=r"http://\S+/a.txt: wanted the file that existed when"):
        list(read_block(block))
