"""Shards are the same bytes however they were made, and hold what the corpus says."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_core.cache import Cache
from bert_core.data.documents import clean, split_sentences
from bert_core.data.formats import text_documents
from bert_core.data.masking import STRATEGIES
from bert_core.data.pairs import LABELS, ROWS, PairsConfig
from bert_core.data.quality import QualityConfig
from bert_core.data.shards import ShardSet
from bert_core.data.splits import HELD_OUT, TRAIN
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import ConfigError, CorpusError, FormatError, ResourceError
from pipelines import prepare, vocab
from pipelines.corpus.blocks import plan_blocks, read_block
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.sources import list_corpus
from pipelines.prepare import PrepareConfig
from tests.commands import raybert
from tests.processes import kill_group
from tests.waiting import wait_until


def digests(folder: Path) -> list[tuple[str, str]]:
    return [(shard.name, shard.sha256) for shard in ShardSet.read(str(folder)).shards]


def command(config: Any) -> list[str]:
    return raybert(
        "prepare", "--output", config.output,
        "--corpus.source", config.corpus.source, "--corpus.held_out_share", "0.1",
        "--tokenizer", config.tokenizer, "--tracking_uri", config.tracking_uri,
        "--pairs.max_length", "48", "--pairs.dupe_factor", "2",
        "--masking.max_predictions_per_seq", "8", "--shard_bytes", "60000",
        "--block_bytes", str(config.block_bytes), "--num_workers", str(config.num_workers),
    )  # fmt: skip


@pytest.mark.guard
@pytest.mark.parametrize("block_bytes", [7_777, 10_000_000])
def test_block_size_changes_nothing(prepared: Any, tmp_path: Path, block_bytes: int) -> None:
    prepare.run(replace(prepared.prepare(tmp_path / "shards"), block_bytes=block_bytes))
    assert digests(tmp_path / "shards") == digests(prepared.folder / "shards")


@pytest.mark.usefixtures("local_ray")
def test_the_number_of_workers_changes_nothing(prepared: Any, tmp_path: Path) -> None:
    config = replace(prepared.prepare(tmp_path / "shards"), num_workers=4, block_bytes=36_000)
    prepare.run(config)
    assert len(digests(tmp_path / "shards")) > 3
    assert digests(tmp_path / "shards") == digests(prepared.folder / "shards")


@pytest.mark.guard
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


@pytest.mark.ray
@pytest.mark.guard
def test_a_run_with_every_failure_ends_in_the_same_bytes(prepared: Any, tmp_path: Path) -> None:
    """In fresh processes: killed in the first pass; a worker killed, then all in the second. This
    process goes on with what they left."""
    folder = tmp_path / "shards"
    config = replace(prepared.prepare(folder), num_workers=2, block_bytes=2_000)
    process = subprocess.Popen(command(config), start_new_session=True)
    wait_for(process, folder, "fragments/*.arrow")
    kill_group(process)
    process = subprocess.Popen(command(config), start_new_session=True)
    wait_for(process, folder, "fragments/*.arrow")
    workers = wait_until(
        "there are workers", lambda: workers_of(process.pid),
        timeout_s=60, every_s=0, process=process,
    )  # fmt: skip
    os.kill(workers[0], signal.SIGKILL)
    wait_for(process, folder, "train-*.arrow")
    kill_group(process)
    assert not (folder / "manifest.json").exists()
    with pytest.raises(FormatError, match=r"it has no manifest.json"):
        ShardSet.read(str(folder))
    prepare.run(replace(config, num_workers=0))
    assert digests(folder) == digests(prepared.folder / "shards")
    assert not (folder / "fragments").exists()


@pytest.mark.guard
def test_a_restart_under_other_names_loses_and_repeats_no_document(
    prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders of a corpus are renamed while a run is down, so that the last comes first."""
    documents = prepared.text.read_text().split("\n\n")
    for name, part in (("2023", documents[::2]), ("2024", documents[1::2])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("\n\n".join(part))

    def run(output: str, *sources: str) -> Any:
        config = prepared.prepare(tmp_path / output)
        corpus = replace(config.corpus, source=tuple(str(tmp_path / name) for name in sources))
        quality = QualityConfig(near_duplicates=0.8)
        return prepare.run(replace(config, corpus=corpus, quality=quality, block_bytes=9_000))

    run("fresh", "2023", "2024")
    encode, left = prepare._encode_block, iter(range(3))

    def killed(*arguments: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        encode(*arguments)

    monkeypatch.setattr(prepare, "_encode_block", killed)
    with pytest.raises(KeyboardInterrupt):
        run("shards", "2023", "2024")
    monkeypatch.undo()
    (tmp_path / "2023").rename(tmp_path / "z-2023")
    run("shards", "z-2023", "2024")
    assert digests(tmp_path / "shards") == digests(tmp_path / "fresh")


def wait_for(process: subprocess.Popen, folder: Path, files: str) -> None:
    wait_until(
        f"there are {files}", lambda: list(folder.glob(files)),
        timeout_s=120, every_s=0.01, process=process,
    )  # fmt: skip


def workers_of(pid: int) -> list[int]:
    """Ray Data's workers of the session that `pid` leads, by what they call themselves."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            session = int((path / "stat").read_text().rpartition(")")[2].split()[3])
            if session == pid and (path / "cmdline").read_bytes().startswith(b"ray::MapWorker"):
                pids.append(int(path.name))
        except OSError:
            continue
    return pids


@pytest.mark.drill
@pytest.mark.usefixtures("local_ray")
def test_memory_is_bound_by_the_shard_not_by_the_corpus(
    prepared: Any, tmp_path: Path, data_dir: Path
) -> None:
    books = sorted((data_dir / "classic_books").rglob("*.md"))
    peaks = []
    for limit in (8 << 20, 40 << 20):
        folder = tmp_path / str(limit)
        folder.mkdir()
        for number, book in enumerate(books):
            if sum(path.stat().st_size for path in folder.iterdir()) < limit:
                shutil.copy(book, folder / f"{number}.md")
        corpus = CorpusConfig(source=str(folder), document_boundary="heading")
        config = PrepareConfig(
            output=str(tmp_path / f"shards-{limit}"),
            tokenizer=str(prepared.folder / "vocab"),
            corpus=corpus,
            pairs=PairsConfig(dupe_factor=2),
            num_workers=1,
            tracking_uri=prepared.tracking_uri,
        )
        peaks.append(prepare.run(config).counts["peak_memory_bytes"])
    assert 100e6 < peaks[1] < 1.3 * peaks[0]


@pytest.mark.drill
def test_a_document_of_50_megabytes_passes(prepared: Any, tmp_path: Path, data_dir: Path) -> None:
    books = sorted((data_dir / "classic_books").rglob("*.md"))
    text = "\n".join(path.read_text() for path in books)[: 50 << 20]
    (tmp_path / "one.txt").write_text(text)
    (tmp_path / "other.txt").write_text("Another document. It is short.")
    config = prepared.prepare(tmp_path / "shards")
    corpus = CorpusConfig(source=str(tmp_path / "*.txt"), document_boundary="file")
    pairs = PairsConfig(max_length=512, dupe_factor=1)
    manifest = prepare.run(replace(config, corpus=corpus, pairs=pairs, shard_bytes=64 << 20))
    assert manifest.counts["documents"] == 2
    assert manifest.counts["row_tokens"] > 10e6


@pytest.mark.guard
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
        rows = shards.open(info, Cache(prepared.folder / "cache"))
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


@pytest.mark.drill
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
        rows = shards.open(info, Cache(prepared.folder / "cache"))
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


@pytest.mark.drill
@pytest.mark.parametrize("kind", ROWS)
def test_masks_drawn_later_are_in_no_shard_whatever_kind_of_rows(
    prepared: Any, tmp_path: Path, kind: Any
) -> None:
    config = prepared.prepare(tmp_path / "shards")
    prepare.run(
        replace(
            config,
            masking=replace(config.masking, dynamic=True, strategy="whole_word"),
            pairs=replace(config.pairs, kind=kind, dupe_factor=1),
        )
    )
    shards = ShardSet.read(config.output)
    tokenizer = Tokenizer.load(config.tokenizer)
    assert shards.label == LABELS[kind]
    assert shards.masker is not None
    for info in shards.shards:
        rows = shards.open(info, Cache(prepared.folder / "cache"))
        assert tokenizer.mask_id not in rows.input_ids
        row = rows.row(len(rows) // 2)
        pieces = [tokenizer.vocabulary[index] for index in row.input_ids]
        assert row.begins_word.tolist() == [not piece.startswith("##") for piece in pieces]


@pytest.mark.drill
def test_weights_say_how_often_the_documents_of_a_source_are_used(
    prepared: Any, tmp_path: Path
) -> None:
    documents = prepared.text.read_text().split("\n\n")
    for name, part in (("a", documents[::2]), ("b", documents[1::2])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(part))
    sources = tuple(str(tmp_path / f"{name}.txt") for name in "ab")

    def tokens(folder: str, *weights: float) -> tuple[int, int]:
        config = prepared.prepare(tmp_path / folder)
        corpus = CorpusConfig(source=sources, weights=weights, held_out_share=0.0)
        counts = prepare.run(replace(config, corpus=corpus)).counts
        assert counts["row_tokens"] > sum(counts[f"source_{n}_tokens"] for n in (0, 1))
        return counts["source_0_tokens"], counts["source_1_tokens"]

    once = tokens("once")
    assert tokens("ones", 1.0, 1.0) == once
    assert tokens("thrice", 3.0, 1.0) == (3 * once[0], once[1])
    config = prepared.prepare(tmp_path / "shares")
    larger, smaller = tmp_path / "larger.txt", sources[1]
    larger.write_text("\n\n".join([(tmp_path / "a.txt").read_text()] * 4))
    corpus = CorpusConfig(source=(str(larger), smaller), exponent=0.5, held_out_share=0.0)
    counts = prepare.run(replace(config, corpus=corpus)).counts
    sizes = larger.stat().st_size, (tmp_path / "b.txt").stat().st_size
    assert counts["source_0_tokens"] == 4 * once[0]
    assert counts["source_1_tokens"] / once[1] == pytest.approx(
        (sizes[0] / sizes[1]) ** 0.5, rel=0.2
    )
    half, twice = tokens("half", 0.5, 2.0)  # of both, the counts are those of what is used
    assert 0.2 * once[0] < half < 0.8 * once[0]  # some thirty documents, by their hash
    assert twice == 2 * once[1]


@pytest.mark.drill
def test_equal_documents_count_once_where_that_is_asked_for(prepared: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join([prepared.text.read_text()] * 3))
    config = prepared.prepare(tmp_path / "shards")
    config = replace(config, corpus=replace(config.corpus, source=str(tmp_path / "text.txt")))
    config = replace(config, shard_bytes=3 * config.shard_bytes)
    quality = QualityConfig(exact_duplicates=True)
    counts = prepare.run(replace(config, quality=quality)).counts
    once = prepare.run(replace(prepared.prepare(tmp_path / "once"), quality=quality)).counts
    assert counts["documents"] == once["documents"] > 100
    read = once["documents_read"]
    assert counts["dropped_exact_duplicate"] == once["dropped_exact_duplicate"] + 2 * read
    ids = [
        [shards.open(info, Cache(tmp_path)).input_ids.tolist() for info in shards.shards]
        for shards in (ShardSet.read(str(tmp_path / name)) for name in ("shards", "once"))
    ]
    assert ids[0] == ids[1]


@pytest.mark.drill
@pytest.mark.parametrize("names", ["ab", "ba"])
def test_the_duplicate_from_the_heaviest_source_is_used_and_counted(
    prepared: Any, tmp_path: Path, names: str
) -> None:
    documents = prepared.text.read_text().split("\n\n")[:60]
    heavy, light = (tmp_path / f"{name}.txt" for name in names)
    heavy.write_text("\n\n".join(documents))
    similar = [f"{text} more words" for text in documents[:30]]
    light.write_text("\n\n".join([*similar, *documents[30:]]))

    def counts_of(output: str, *weighted: tuple[Path, float], **quality: Any) -> dict[str, Any]:
        config = prepared.prepare(tmp_path / output)
        sources, weights = zip(*((str(path), weight) for path, weight in weighted), strict=True)
        corpus = CorpusConfig(source=sources, weights=weights, held_out_share=0.0)
        config = replace(config, corpus=corpus, quality=QualityConfig(min_words=60, **quality))
        return prepare.run(config).counts

    alone = counts_of("alone", (heavy, 2.0), exact_duplicates=True)
    both = counts_of("both", (heavy, 2.0), (light, 0.5), near_duplicates=0.8)
    for name in ("documents", "sentences", "tokens", "words", "source_0_tokens"):
        assert both[name] == alone[name] > 0
    assert both["source_0_documents"] == both["documents"] > 30
    assert both["source_0_tokens"] == 2 * both["tokens"]
    lengths = {name: n for name, n in both.items() if name.startswith("tokens_up_to_")}
    assert sum(lengths.values()) == both["documents"]


@pytest.mark.drill
def test_near_duplicates_and_evaluation_rows_are_left_out_and_named(
    prepared: Any, tmp_path: Path
) -> None:
    documents = prepared.text.read_text().split("\n\n")
    changed = [text.replace("The ", "That ", 1) for text in documents[:20]]
    (tmp_path / "text.txt").write_text("\n\n".join([*documents, *changed]))
    row = " ".join(documents[-1].split()[:30])
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": row}) + "\n")
    quality = QualityConfig(
        near_duplicates=0.8,
        contamination=(str(tmp_path / "rows.jsonl"),),
        on_contamination="drop",
    )
    config = replace(prepared.prepare(tmp_path / "shards"), quality=quality)
    config = replace(config, corpus=replace(config.corpus, source=str(tmp_path / "text.txt")))
    counts = prepare.run(config).counts
    assert counts["dropped_near_duplicate"] + counts.get("dropped_exact_duplicate", 0) >= 18
    assert counts["dropped_contaminated"] == 1
    named = (tmp_path / "shards" / "contamination.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in named] == [
        {"source": str(tmp_path / "rows.jsonl"), "row": 1, "documents": 1}
    ]
    again = replace(config, output=str(tmp_path / "again"), block_bytes=5_000)
    prepare.run(again)
    assert digests(tmp_path / "again") == digests(tmp_path / "shards")


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


@pytest.mark.usefixtures("local_ray")
def test_a_workers_error_reaches_the_user_as_it_was_written(prepared: Any, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"Fine.\n\nCaf\xe9.")
    corpus = CorpusConfig(source=str(tmp_path / "latin.txt"))
    config = replace(prepared.prepare(tmp_path / "shards"), corpus=corpus, num_workers=1)
    with pytest.raises(CorpusError, match=r"^\S+latin.txt: wanted UTF-8, byte 0xe9 at offset 10 "):
        prepare.run(config)


@pytest.mark.usefixtures("local_ray")
def test_workers_in_another_folder_find_the_evaluation_sets(
    prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = prepared.text.read_text().split("\n\n")
    monkeypatch.chdir(tmp_path)
    Path("sets").mkdir()
    row = " ".join(documents[-1].split()[:30])
    Path("sets", "rows.jsonl").write_text(json.dumps({"text": row}) + "\n")
    quality = QualityConfig(contamination=("sets",))
    config = prepared.prepare(tmp_path / "shards")
    prepare.run(replace(config, quality=quality, num_workers=1, force=True))
    assert digests(tmp_path / "shards") == digests(prepared.folder / "shards"), "by one worker"
    named = (tmp_path / "shards" / "contamination.jsonl").read_text()
    assert json.loads(named)["source"] == str(tmp_path / "sets" / "rows.jsonl")


@pytest.mark.drill
def test_a_vocabulary_made_again_in_one_process_is_read_again(
    prepared: Any, tmp_path: Path
) -> None:
    words, digests = tmp_path / "vocab", set()
    for size in (1000, 900):
        vocab.run(replace(prepared.vocab(words), vocab_size=size, force=True))
        config = replace(prepared.prepare(tmp_path / "shards"), tokenizer=str(words), force=True)
        digest = Tokenizer.load(words).digest
        assert prepare.run(config).counts["tokenizer_digest"] == digest
        digests.add(digest)
    assert len(digests) == 2


@pytest.mark.drill
def test_a_corpus_whose_documents_are_all_one_sentence_is_refused(
    prepared: Any, tmp_path: Path
) -> None:
    (tmp_path / "lines.txt").write_text("\n\n".join(f"This is line {i}." for i in range(50)))
    corpus = CorpusConfig(source=str(tmp_path / "lines.txt"))
    config = replace(prepared.prepare(tmp_path / "shards"), corpus=corpus)
    message = "wanted documents of several sentences for pairs.kind nsp, got 50 of one sentence"
    with pytest.raises(CorpusError, match=message):
        prepare.run(config)
    assert not (tmp_path / "shards" / "manifest.json").exists()
    full = replace(config, pairs=replace(config.pairs, kind="full_sentences"))
    assert prepare.run(replace(full, output=str(tmp_path / "full"))).counts["rows"] > 0


def test_a_vocabulary_of_another_casing_is_refused(prepared: Any, tmp_path: Path) -> None:
    shutil.copytree(prepared.folder / "vocab", tmp_path / "vocab")
    (tmp_path / "vocab" / "tokenizer.json").unlink()
    (tmp_path / "vocab" / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    config = prepared.prepare(tmp_path / "shards")
    with pytest.raises(
        FormatError, match=r"vocab: wanted a cased vocabulary, .* \(do_lower_case in tok"
    ):
        prepare.run(replace(config, tokenizer=str(tmp_path / "vocab")))
    assert not (tmp_path / "shards").exists()


def test_a_source_that_disappears_is_named(prepared: Any, tmp_path: Path) -> None:
    documents = prepared.text.read_text().split("\n\n")
    for name, part in (("a", documents[::2]), ("b", documents[1::2])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(part))
    config = prepared.prepare(tmp_path / "shards")
    config = replace(config, corpus=replace(config.corpus, source=str(tmp_path / "*.txt")))
    blocks = plan_blocks(list_corpus(config.corpus), config.block_bytes)
    (tmp_path / "b.txt").unlink()

    def read_all() -> list[str]:
        return [document.text for block in blocks for document in read_block(block)]

    with pytest.raises(CorpusError, match=r"b.txt: wanted the file that existed when the run be"):
        read_all()


@pytest.mark.drill
def test_an_output_within_the_corpus_is_not_part_of_it(prepared: Any, tmp_path: Path) -> None:
    shutil.copy(prepared.text, tmp_path / "text.txt")
    config = prepared.prepare(tmp_path / "out" / "shards")
    config = replace(config, corpus=replace(config.corpus, source=str(tmp_path)))
    made = prepare.run(config)
    assert prepare.run(config) == made
    assert prepare.run(replace(config, force=True)).digest == made.digest
    assert digests(tmp_path / "out" / "shards") == digests(prepared.folder / "shards")


def test_a_mistake_in_a_comment_line_is_found_before_the_work(
    prepared: Any, tmp_path: Path
) -> None:
    config = replace(prepared.prepare(tmp_path / "shards"), compare_with=str(tmp_path / "none"))
    with pytest.raises(FormatError, match=r"none: wanted tokenizer.json or vocab.txt, found neith"):
        prepare.run(config)
    assert not (tmp_path / "shards").exists()


@pytest.mark.guard
def test_a_disk_that_fills_is_named_and_the_run_goes_on_when_there_is_room(
    prepared: Any, small_disk: Callable[[str], Path]
) -> None:
    disk = small_disk("size=600k")
    config = prepared.prepare(disk / "shards")
    with pytest.raises(ResourceError, match=r"shards/.*: could not be written: No space left"):
        prepare.run(config)
    assert not (disk / "shards" / "manifest.json").exists()
    assert not list((disk / "shards").rglob("*.part"))
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    prepare.run(config)
    assert digests(disk / "shards") == digests(prepared.folder / "shards")


@pytest.mark.parametrize("name", ["shard_bytes", "block_bytes"])
def test_settings_out_of_range_are_refused(small: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: wanted at least 1024, got 10"):
        replace(small.prepare(Path("x")), **{name: 10})
