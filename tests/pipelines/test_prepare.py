"""Shards are the same bytes however they were made, and hold what the corpus says."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_core.data.documents import clean, split_sentences
from bert_core.data.formats import text_documents
from bert_core.data.masking import STRATEGIES
from bert_core.data.shards import HELD_OUT, TRAIN, ShardSet
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import ConfigError, CorpusError, FormatError
from pipelines import prepare
from pipelines.sources import CorpusConfig


def digests(folder: Path) -> list[tuple[str, str]]:
    return [(shard.name, shard.sha256) for shard in ShardSet.read(str(folder)).shards]


def command(config: Any) -> list[str]:
    return [
        sys.executable, "-m", "pipelines.cli", "prepare", "--output", config.output,
        "--corpus.source", config.corpus.source, "--corpus.held_out_share", "0.1",
        "--tokenizer", config.tokenizer, "--tracking_uri", config.tracking_uri,
        "--pairs.max_length", "48", "--pairs.dupe_factor", "2",
        "--masking.max_predictions_per_seq", "8", "--shard_bytes", "60000",
        "--block_bytes", "40000", "--num_workers", str(config.num_workers),
    ]  # fmt: skip


@pytest.mark.ray
def test_a_fresh_process_with_two_workers_gives_the_same_bytes(
    prepared: Any, tmp_path: Path
) -> None:
    config = replace(prepared.prepare(tmp_path / "shards"), num_workers=2)
    subprocess.run(command(config), check=True, timeout=120)
    assert digests(tmp_path / "shards") == digests(prepared.folder / "shards")
    assert len(digests(tmp_path / "shards")) > 3


@pytest.mark.parametrize("block_bytes", [7_777, 10_000_000])
def test_block_size_changes_nothing(prepared: Any, tmp_path: Path, block_bytes: int) -> None:
    prepare.run(replace(prepared.prepare(tmp_path / "shards"), block_bytes=block_bytes))
    assert digests(tmp_path / "shards") == digests(prepared.folder / "shards")


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_one_worker_changes_nothing(prepared: Any, tmp_path: Path) -> None:
    prepare.run(replace(prepared.prepare(tmp_path / "shards"), num_workers=1))
    assert digests(tmp_path / "shards") == digests(prepared.folder / "shards")


def test_a_restart_makes_only_what_is_missing(prepared: Any, tmp_path: Path) -> None:
    shutil.copytree(prepared.folder / "shards", tmp_path / "shards")
    config = prepared.prepare(tmp_path / "shards")
    (tmp_path / "shards" / "manifest.json").unlink()
    names = [name for name, _ in digests(prepared.folder / "shards")]
    (tmp_path / "shards" / names[1]).unlink()
    before = {name: (tmp_path / "shards" / name).stat().st_mtime_ns for name in names[2:]}
    prepare.run(config)
    after = {name: (tmp_path / "shards" / name).stat().st_mtime_ns for name in names[2:]}
    assert before == after
    assert digests(tmp_path / "shards") == digests(prepared.folder / "shards")


@pytest.mark.drill
def test_a_run_killed_between_its_shards_goes_on_to_the_same_bytes(
    prepared: Any, tmp_path: Path
) -> None:
    config = replace(prepared.prepare(tmp_path / "shards"), num_workers=2)
    killed = subprocess.Popen(command(config), start_new_session=True)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "shards").glob("fragments/*.arrow")):
        assert time.monotonic() < deadline
        assert killed.poll() is None
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "shards" / "manifest.json").exists()
    with pytest.raises(FormatError, match=r"it has no manifest.json"):
        ShardSet.read(str(tmp_path / "shards"))
    subprocess.run(command(config), check=True, timeout=240)
    assert digests(tmp_path / "shards") == digests(prepared.folder / "shards")
    assert not (tmp_path / "shards" / "fragments").exists()


def test_a_row_unmasked_is_text_of_the_corpus_and_held_out_text_is_in_no_training_shard(
    prepared: Any,
) -> None:
    shards = ShardSet.read(str(prepared.folder / "shards"))
    tokenizer = Tokenizer.load(prepared.folder / "vocab")
    data = prepared.text.read_bytes()
    documents = [clean(str(text)) for text in text_documents(data, "blank_line", "text.txt")]
    encoded = [
        np.concatenate([ids[1:-1] for ids in tokenizer.encode(split_sentences(text), 100_000)])
        for text in documents
        if text
    ]
    texts = [" ".join(map(str, ids)) for ids in encoded]
    seen: dict[str, set[int]] = {TRAIN: set(), HELD_OUT: set()}
    for info in shards.shards:
        rows = shards.open(info, prepared.folder / "cache")
        assert len(rows) == info.rows > 0
        for index in range(0, len(rows), 7):
            row = rows.row(index)
            ids = row.input_ids.copy()
            ids[row.masked_positions] = row.masked_labels
            assert ids[0] == tokenizer.cls_id
            assert ids[-1] == tokenizer.sep_id
            assert ids[row.segment_b_start - 1] == tokenizer.sep_id
            assert len(ids) <= 48
            segment = " ".join(map(str, ids[1 : row.segment_b_start - 1]))
            found = [n for n, text in enumerate(texts) if segment in text]
            assert found, tokenizer.inner.decode(ids.tolist())
            if len(segment.split()) > 12 and len(found) == 1:
                seen[info.split].add(found[0])
    assert seen[TRAIN]
    assert seen[HELD_OUT]
    assert not seen[TRAIN] & seen[HELD_OUT]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_fills_shards_with_what_it_promises(
    prepared: Any, tmp_path: Path, strategy: Any
) -> None:
    config = prepared.prepare(tmp_path / "shards")
    masking = replace(config.masking, strategy=strategy, max_predictions_per_seq=20)
    prepare.run(replace(config, masking=masking, pairs=replace(config.pairs, dupe_factor=1)))
    shards = ShardSet.read(config.output)
    tokenizer = Tokenizer.load(config.tokenizer)
    continues = np.array([token.startswith("##") for token in tokenizer.vocabulary])
    counts = shards.manifest.counts
    assert 0.12 < counts["masked_tokens"] / counts["row_tokens"] < 0.16
    split_words = 0
    for info in shards.shards:
        rows = shards.open(info, prepared.folder / "cache")
        for index in range(len(rows)):
            row = rows.row(index)
            assert len(row.masked_positions) <= 20
            assert not np.isin(row.masked_labels, tokenizer.special_ids).any()
            ids = row.input_ids.copy()
            ids[row.masked_positions] = row.masked_labels
            is_masked = np.zeros(len(ids), dtype=bool)
            is_masked[row.masked_positions] = True
            # A piece that goes on with a word is masked as the piece before it, unless that is
            # a special token, after which a word was cut.
            goes_on = np.flatnonzero(continues[ids])
            goes_on = goes_on[~np.isin(ids[goes_on - 1], tokenizer.special_ids)]
            split_words += int((is_masked[goes_on] != is_masked[goes_on - 1]).sum())
    assert (split_words > 0) == (strategy == "token")


def test_a_corpus_of_one_document_is_refused_because_next_sentences_need_two(
    prepared: Any, tmp_path: Path
) -> None:
    (tmp_path / "one.txt").write_text("A sentence. Another one. A third.\nA fourth, too.")
    corpus = CorpusConfig(source=str(tmp_path / "one.txt"), held_out_share=0.0)
    with pytest.raises(CorpusError, match="at least two documents with different texts, got one"):
        prepare.run(replace(prepared.prepare(tmp_path / "shards"), corpus=corpus))
    assert not (tmp_path / "shards" / "manifest.json").exists()


def test_a_shard_left_with_one_document_borrows_the_random_sentence(
    prepared: Any, tmp_path: Path
) -> None:
    (tmp_path / "three.txt").write_text(
        "\n\n".join(f"Sentence {i} is here. It goes on. It ends." for i in range(3))
    )
    corpus = CorpusConfig(source=str(tmp_path / "three.txt"), held_out_share=0.0)
    config = replace(prepared.prepare(tmp_path / "shards"), corpus=corpus)
    prepare.run(replace(config, shard_bytes=1024, seed=1))
    assert ShardSet.read(config.output).manifest.counts["rows"] >= 3


def test_bytes_that_are_not_utf8_are_named_with_file_and_offset(
    prepared: Any, tmp_path: Path
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"Fine.\n\n" * 500 + "Café.".encode("latin-1"))
    corpus = CorpusConfig(source=str(tmp_path / "latin.txt"))
    message = r"latin.txt: wanted UTF-8, byte 0xe9 at offset 3,503 is not"
    with pytest.raises(CorpusError, match=message):
        prepare.run(replace(prepared.prepare(tmp_path / "shards"), corpus=corpus))


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_a_workers_error_reaches_the_user_as_it_was_written(prepared: Any, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"Fine.\n\nCaf\xe9.")
    corpus = CorpusConfig(source=str(tmp_path / "latin.txt"))
    config = replace(prepared.prepare(tmp_path / "shards"), corpus=corpus, num_workers=1)
    with pytest.raises(CorpusError, match=r"^\S+latin.txt: wanted UTF-8, byte 0xe9 at offset 10 "):
        prepare.run(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shard_bytes": 10}, "shard_bytes: wanted at least 1024, got 10"),
        ({"block_bytes": 10}, "block_bytes: wanted at least 1024, got 10"),
    ],
)
def test_settings_out_of_range_are_refused(
    prepared: Any, change: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(prepared.prepare(Path("x")), **change)
