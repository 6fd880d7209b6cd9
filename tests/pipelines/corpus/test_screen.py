"""What is left out of a corpus is counted by its reason, and is the same however it is cut."""

import csv
import gzip
import io
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_core.data.documents import document_digest
from bert_core.data.quality import QualityConfig
from bert_core.errors import CorpusError
from pipelines.corpus.blocks import plan_blocks
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.readers.base import Block
from pipelines.corpus.screen import (
    dropped_digests,
    evaluation_files,
    evaluation_inputs,
    find_near_duplicates,
    in_parts,
    kept_documents,
)
from pipelines.corpus.sources import list_corpus
from pipelines.runtime.stage_config import StageConfig

WORDS = np.random.default_rng(0).permutation([f"word{n}" for n in range(4000)])
DOCUMENTS = [" ".join(WORDS[n * 60 : n * 60 + 60]) + "." for n in range(60)]
ROW = " ".join(WORDS[3900:3920])


def blocks_of(
    folder: Path, texts: list[str], block_bytes: int = 1000, **settings: Any
) -> list[Block]:
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    source = str(folder / "corpus.jsonl")
    return plan_blocks(list_corpus(CorpusConfig(source=source, **settings)), block_bytes)


def screened(
    blocks: list[Block], quality: QualityConfig, dropped: frozenset[bytes] = frozenset()
) -> tuple[list[str], dict[str, int]]:
    """The texts that are kept, and the counts."""
    counts: Counter[str] = Counter()
    kept = [each for block in blocks for each in kept_documents(block, quality, counts, dropped)]
    assert [each.digest for each in kept] == [document_digest(each.text) for each in kept]
    return [each.text for each in kept], dict(counts)


@pytest.mark.parametrize("block_bytes", [7, 10_000_000])
def test_every_reason_is_counted(tmp_path: Path, block_bytes: int) -> None:
    good = "This is an English sentence of some ten words, no more."
    german = "Dies ist ein deutscher Satz, der aus etwa zehn Wörtern besteht."
    texts = [good, "", " \n\x00\t", "Too short.", good * 9, german, good.upper(), "\ud83d" + good]
    blocks = blocks_of(tmp_path, texts, block_bytes, errors="skip")
    with open(tmp_path / "corpus.jsonl", "a") as file:
        file.write('\n{"text": null}\n{"text": \n[]')
    config = blocks[0].corpus
    blocks = plan_blocks(list_corpus(config), block_bytes)
    kept, counts = screened(blocks, QualityConfig(min_words=5, max_words=40, languages=("en",)))
    assert kept == [good, good.upper(), good]
    assert counts == {
        "documents_read": 11,
        "documents_with_nul": 1,
        "dropped_empty": 2,
        "dropped_too_short": 1,
        "dropped_too_long": 1,
        "dropped_other_language": 1,
        "dropped_no_text": 1,
        "dropped_unreadable": 2,
    }


def test_control_characters_are_removed_and_documents_with_nul_counted(tmp_path: Path) -> None:
    texts = ["One\x00 two\x00.", "\x00", "\ufeffThree\x07\r\nfour. \n", "Five."]
    kept, counts = screened(blocks_of(tmp_path, texts), QualityConfig())
    assert kept == ["One two.", "Three\nfour.", "Five."]
    assert counts == {"documents_read": 4, "documents_with_nul": 2, "dropped_empty": 1}


def test_nothing_is_left_out_unless_requested(tmp_path: Path) -> None:
    texts = ["a", "a", "Ein Satz.", *DOCUMENTS, *DOCUMENTS, f"{ROW} {ROW}"]
    kept, counts = screened(blocks_of(tmp_path, texts), QualityConfig())
    assert kept == texts
    assert counts == {"documents_read": len(texts)}
    assert evaluation_inputs(QualityConfig()) == []


def test_a_part_is_about_as_long_as_was_asked_for(tmp_path: Path) -> None:
    [block] = blocks_of(tmp_path, DOCUMENTS, 10_000_000)
    kept = list(kept_documents(block, QualityConfig(), Counter()))
    parts = list(in_parts(iter(kept), 2000))
    assert [each for part in parts for each in part] == kept
    lengths = [sum(len(each.text) for each in part) for part in parts]
    assert all(2000 <= length < 2000 + 600 for length in lengths[:-1])
    assert list(in_parts([], 2000)) == []


def near_duplicates(folder: Path, blocks: list[Block], **quality: Any) -> frozenset[bytes]:
    config = StageConfig(output=str(folder), num_workers=0)
    screen = QualityConfig(near_duplicates=0.7, **quality)
    path = find_near_duplicates(blocks, screen, str(folder), 0, config)
    assert [each.name for each in folder.iterdir()] == ["near_duplicates.arrow"]
    assert find_near_duplicates(blocks, screen, str(folder), 0, config) == path
    return dropped_digests(path)


def changed(text: str) -> str:
    """Nearly the same: a word in the middle is another one."""
    words = text.split()
    return " ".join([*words[:30], "other", *words[31:]])


@pytest.mark.drill
def test_near_duplicates_are_the_same_whatever_the_blocks_are(tmp_path: Path) -> None:
    near = [changed(text) for text in DOCUMENTS[::4]]
    texts = [*DOCUMENTS, *near, *DOCUMENTS[::10], "Short."]
    sizes = (7, 3000, 10_000_000)
    found = [
        near_duplicates(tmp_path / str(size), blocks_of(tmp_path, texts, size)) for size in sizes
    ]
    pairs = [{document_digest(t) for t in (text, changed(text))} for text in DOCUMENTS[::4]]
    assert found[0] == found[1] == found[2]
    assert [len(pair & found[0]) for pair in pairs] == [1] * 15
    assert len(found[0]) == 15
    kept, counts = screened(blocks_of(tmp_path, texts), QualityConfig(), found[0])
    # Equal documents stay: they meet in a shard. Every dropped one had a partner that is kept.
    assert counts["dropped_near_duplicate"] == len(texts) - len(kept)
    assert {document_digest(text) for text in texts} - set(map(document_digest, kept)) == found[0]


def test_documents_left_out_for_another_reason_displace_no_near_duplicate(tmp_path: Path) -> None:
    text = max(DOCUMENTS[0], changed(DOCUMENTS[0]), key=lambda each: document_digest(each))
    other = min(DOCUMENTS[0], changed(DOCUMENTS[0]), key=lambda each: document_digest(each))
    blocks = blocks_of(tmp_path, [text, other + " more" * 9])
    assert len(near_duplicates(tmp_path / "all", blocks)) == 1
    assert near_duplicates(tmp_path / "short", blocks, max_words=60) == frozenset()
    assert near_duplicates(tmp_path / "none", blocks_of(tmp_path, [""])) == frozenset()


ROWS = ["An answer.", ROW, "Too short to be looked for.", changed(DOCUMENTS[7])]


def squad(rows: list[str]) -> bytes:
    paragraphs = [{"context": row, "qas": [{"id": "56be", "is": True, "n": 3}]} for row in rows]
    return json.dumps({"version": "1.1", "data": [{"paragraphs": paragraphs}]}).encode()


def table(rows: list[str], delimiter: str) -> bytes:
    sink = io.StringIO()
    csv.writer(sink, delimiter=delimiter).writerows([["n", "text"], *enumerate(rows)])
    return sink.getvalue().encode()


def parquet(rows: list[str]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"n": range(len(rows)), "text": rows}), sink)
    return sink.getvalue()


def lines(rows: list[str]) -> bytes:
    """The text is deep in the row."""
    found = [{"n": n, "choices": [{"text": "no"}, {"text": row}]} for n, row in enumerate(rows)]
    return "\n".join(json.dumps(each) for each in found).encode()


# Of SQuAD a row is a string, and each paragraph has two.
EVALUATION: dict[str, tuple[Callable[[list[str]], bytes], list[int]]] = {
    "dev.tsv": (lambda rows: table(rows, "\t"), [2, 4]),
    "dev.csv": (lambda rows: table(rows, ","), [2, 4]),
    "dev.jsonl": (lines, [2, 4]),
    "dev.parquet": (parquet, [2, 4]),
    "dev.json": (squad, [4, 8]),
    "dev.txt": (
        lambda rows: "\n".join(f"{n}\t{row}" for n, row in enumerate(rows)).encode(),
        [2, 4],
    ),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", EVALUATION)
def test_evaluation_rows_in_the_corpus_are_named_with_file_and_row(
    tmp_path: Path, name: str, packed: bool
) -> None:
    write, [first, second] = EVALUATION[name]
    (tmp_path / "sets").mkdir()
    path = tmp_path / "sets" / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(write(ROWS)) if packed else write(ROWS))
    texts = [*DOCUMENTS, f"It says: {ROW.upper()}! And so on.", ROW]
    quality = QualityConfig(contamination=(str(tmp_path / "sets"),))
    quality = replace(quality, contamination=evaluation_files(quality))
    wanted = {
        "documents_read": 62,
        "contaminated": 3,
        f"overlap\t{path}\t{first}": 2,
        f"overlap\t{path}\t{second}": 1,
    }
    blocks = blocks_of(tmp_path, texts)
    assert screened(blocks, quality) == (texts, wanted)
    kept, counts = screened(blocks, replace(quality, on_contamination="drop"))
    assert kept == [*DOCUMENTS[:7], *DOCUMENTS[8:]]
    assert counts == wanted | {"dropped_contaminated": 3}
    [given] = evaluation_inputs(quality)
    assert (given.name, given.source) == ("evaluation 0", str(path))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("dev.json", b"{", "dev.json, line 1: wanted a JSON object, it is not JSON (Expecting pr"),
        ("dev.jsonl", b"[3]", "dev.jsonl, object 1: wanted a JSON object, got a number: co"),
        ("dev.txt.gz", gzip.compress(b"x" * 99)[:-9], "dev.txt.gz: wanted whole .gz data, it "),
        ("dev.pdf", b"x", "dev.pdf: wanted .csv, .tsv, .jsonl, .json or .parquet, also compresse"),
        (None, b"", "sets: wanted a file, a folder or a glob with at least one file, found none"),
    ],
)
def test_an_evaluation_set_that_cannot_be_read_is_named(
    tmp_path: Path, name: str | None, data: bytes, message: str
) -> None:
    (tmp_path / "sets").mkdir()
    if name:
        (tmp_path / "sets" / name).write_bytes(data)
    quality = QualityConfig(contamination=(str(tmp_path / "sets"),))
    with pytest.raises(CorpusError, match=re.escape(message)):
        screened(
            blocks_of(tmp_path, DOCUMENTS),
            replace(quality, contamination=evaluation_files(quality)),
        )
