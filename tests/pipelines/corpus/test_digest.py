"""A corpus is listed once a run, its bytes are read once for its digest, and who reads them."""

import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bert_core import files
from bert_core.errors import CorpusError
from pipelines import predict, prepare, vocab
from pipelines.corpus import digest
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.digest import corpus_input, ordered_corpus_input
from pipelines.corpus.sources import list_corpus
from pipelines.predict import PredictConfig
from pipelines.runtime.stage_config import StageConfig

MEGABYTE = 1 << 20


def digest_of(config: CorpusConfig, num_workers: int = 0) -> str:
    stage = StageConfig(output="unused", num_workers=num_workers)
    return corpus_input(list_corpus(config), stage)[1].digest


@pytest.fixture
def many(tmp_path: Path) -> CorpusConfig:
    """Files of several sizes, which go to workers as several tasks; one is empty."""
    for index, size_bytes in enumerate((90 * MEGABYTE, 30 * MEGABYTE, 50 * MEGABYTE, 7, 0)):
        with (tmp_path / f"{index}.txt").open("wb") as file:
            file.truncate(size_bytes)  # takes no room on the disk
    return CorpusConfig(source=str(tmp_path / "*.txt"))


def test_the_digest_is_that_of_contents_suffixes_and_weights(tmp_path: Path) -> None:
    for folder, names in (("one", "ab"), ("two", "yx")):
        (tmp_path / folder).mkdir()
        for name, data in zip(names, (b"Some.", b"Text."), strict=True):
            (tmp_path / folder / f"{name}.txt").write_bytes(data)

    def digest(*paths: str, weights: tuple[float, ...] = ()) -> str:
        sources = tuple(str(tmp_path / path) for path in paths)
        return digest_of(CorpusConfig(source=sources, weights=weights))

    same = {digest("one"), digest("two"), digest("one/b.txt", "one/a.txt"), digest("one", "one")}
    weighted = {digest("one/a.txt", "two/x.txt", weights=each) for each in ((1.0, 2.0), (2.0, 1.0))}
    # Outputs count by these: with others, every finished stage would be made again.
    assert same == {"0de7d93eaf97255bcfff6d17a6298a188cdd23017e2858b1b77667c19fcbc8e1"}
    assert weighted == {
        "8b662d1c2644e187382702a89a9124d5bab13ae7987ddddfea837008c39b63fd",
        "812dec78a34c552ab5bc01c64651c20a6791a87226b1b19bccb90e61351c1725",
    }
    assert digest("one/a.txt") not in same
    (tmp_path / "two/x.txt").rename(tmp_path / "two/x.jsonl")  # which is read in another way
    assert digest("two") not in same
    (tmp_path / "one/a.txt").write_text("Same.")
    assert digest("one") not in same


def test_the_digest_of_rows_that_are_answered_in_order_is_that_of_their_order_and_reading(
    tmp_path: Path,
) -> None:
    def digest(first: str, second: str) -> str:
        folder = tmp_path / f"{first}-{second}"
        folder.mkdir()
        (folder / first).write_bytes(b"Some.")
        (folder / second).write_bytes(b"Text.")
        corpus = list_corpus(CorpusConfig(source=str(folder)))
        stage = StageConfig(output="unused", num_workers=0)
        return ordered_corpus_input(corpus, stage).digest

    assert digest("a.txt", "b.txt") == digest("x.txt", "y.txt")
    all_four = {digest(*names) for names in (("m.txt", "n.txt"), ("d.txt", "c.txt"))}
    all_four |= {digest(*names) for names in (("a.txt", "b.csv"), ("a.csv", "b.csv"))}
    assert len(all_four) == 4


def test_the_order_of_the_files_is_that_of_their_contents(tmp_path: Path) -> None:
    texts = [f"Text {number}." for number in range(6)]

    def contents(order: list[int]) -> list[str]:
        folder = tmp_path / "-".join(map(str, order))
        folder.mkdir()
        for name, number in enumerate(order):
            (folder / f"{name}.txt").write_text(texts[number])
        stage = StageConfig(output="unused", num_workers=0)
        corpus, _ = corpus_input(list_corpus(CorpusConfig(source=str(folder))), stage)
        return [Path(file.path).read_text() for file in corpus.files]

    found = contents([0, 1, 2, 3, 4, 5])
    assert sorted(found) == texts
    assert contents([3, 1, 5, 0, 4, 2]) == found


def bytes_read_by(work: Callable[[], Any]) -> int:
    """What this process reads meanwhile, from the disk or from what the system keeps of it."""

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = read()
    work()
    return read() - before


def test_every_byte_is_read_once(many: CorpusConfig) -> None:
    corpus = list_corpus(many)
    size_bytes = sum(file.size_bytes for file in corpus.files)
    stage = StageConfig(output="unused", num_workers=0)
    read = bytes_read_by(lambda: corpus_input(corpus, stage))
    assert size_bytes <= read < size_bytes + MEGABYTE


@pytest.mark.usefixtures("forked")
def test_workers_hash_what_is_more_than_a_second_takes(
    many: CorpusConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = digest_of(many, num_workers=2)
    monkeypatch.setattr(digest, "HERE_BYTES", 100 * MEGABYTE)
    monkeypatch.setattr(digest, "TASK_BYTES", 40 * MEGABYTE)
    there: list[str] = []
    read = bytes_read_by(lambda: there.append(digest_of(many, num_workers=2)))
    assert there == [here]
    assert read < 50 * MEGABYTE
    corpus = list_corpus(many)
    (tmp_path / "2.txt").unlink()
    with pytest.raises(CorpusError, match=r"^\S+/2.txt: wanted the file that existed when the"):
        corpus_input(corpus, StageConfig(output="unused", num_workers=2))


def test_a_file_removed_or_changed_before_it_is_hashed_is_named(many: CorpusConfig) -> None:
    corpus, stage = list_corpus(many), StageConfig(output="unused", num_workers=0)
    Path(corpus.files[1].path).write_bytes(b"Another text.")
    with pytest.raises(
        CorpusError, match=r"1.txt: wanted the 31,457,280 bytes that were there when"
    ):
        corpus_input(corpus, stage)
    Path(corpus.files[1].path).unlink()
    with pytest.raises(CorpusError, match=r"1.txt: wanted the file that existed when the run"):
        corpus_input(corpus, stage)


def _vocab(small: Any, source: str, output: Path) -> Callable[[], Any]:
    config = small.vocab(output)
    return lambda: vocab.run(replace(config, corpus=replace(config.corpus, source=source)))


def _prepare(small: Any, source: str, output: Path) -> Callable[[], Any]:
    config = small.prepare(output)
    return lambda: prepare.run(replace(config, corpus=replace(config.corpus, source=source)))


def _predict(small: Any, source: str, output: Path) -> Callable[[], Any]:
    config = PredictConfig(
        output=str(output),
        model=str(small.folder / "pretrain" / "bundle"),
        task="feature-extraction",
        source=source,
        num_workers=0,
        tracking_uri=small.tracking_uri,
    )
    return lambda: predict.run(config)


@pytest.mark.drill
@pytest.mark.parametrize(
    ("stage", "made"), [(_vocab, "small"), (_prepare, "prepared"), (_predict, "pretrained")]
)
def test_a_stage_lists_its_corpus_once_and_a_finished_one_looks_into_and_reads_each_file_once(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    object_store: str,
    caplog: pytest.LogCaptureFixture,
    stage: Callable[[Any, str, Path], Callable[[], Any]],
    made: str,
) -> None:
    small = request.getfixturevalue(made)
    source = f"{object_store}/corpus"
    for index, text in enumerate(small.text.read_text().split("\n\n")[:12]):
        part = "\n\n".join(text[start : start + 400] for start in range(0, len(text), 400))
        files.write_bytes(f"{source}/{index % 3}/{index}.txt", part.encode())

    def requests_of(work: Callable[[], Any]) -> Counter[str]:
        """What the store is asked for meanwhile, by its own log."""
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="werkzeug"):
            work()
        lines = [record.getMessage() for record in caplog.records if record.name == "werkzeug"]
        asked = [found[0] for line in lines if (found := re.search(r"(GET|HEAD) \S+", line))]
        return Counter("list" if "list-type=" in each else each for each in asked)

    listing = requests_of(lambda: files.find_files(source))["list"]
    run = stage(small, source, tmp_path / "output")
    assert requests_of(run)["list"] == listing > 0
    again = requests_of(run)
    read = {name: count for name, count in again.items() if name.startswith("GET")}
    assert len(read) == 12
    assert set(read.values()) == {2}  # the head, which tells what it holds, and the whole
