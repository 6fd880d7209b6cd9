"""Sentence boundaries against four other splitters: accuracy and speed.

Accuracy is measured on UD EWT's held-out file and on a book's chapter annotated by hand, speed on
books; RAYBERT_DATA names the folder of all three. Tests use this module's code too.
"""

import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path

from benchmarks.harness import Comparison, Planned, compare, main
from bert_core.data.documents import clean, split_sentences

Splitter = Callable[[str], Iterable[str]]
HELD_OUT = Path("ud_ewt", "en_ewt-ud-dev.conllu")
CHAPTER_ENDS = Path(__file__).parents[1] / "tests" / "bert_core" / "data" / "sentence_ends.json"
BOOKS_BYTES, QUICK_BYTES, SAMPLE_BYTES = 8 << 20, 2 << 20, 200_000


@dataclass(frozen=True)
class Annotated:
    """A document and its sentence ends, annotated by hand."""

    text: str
    ends: frozenset[int]
    """Characters before each end, white space not counted; includes the last end."""


def benchmark(rounds: int, quick: bool) -> Iterator[Planned | Comparison]:
    folder = os.environ.get("RAYBERT_DATA")
    if not folder:
        raise SystemExit("set RAYBERT_DATA to the folder that holds ud_ewt and classic_books")
    data = Path(folder)
    splitters = _installed()
    for corpus, documents in {
        "ud_ewt": read_treebank(data / HELD_OUT),
        "chapter": [read_chapter(data)],
    }.items():
        ours = f1(split_sentences, documents)
        for name, split in splitters.items():
            theirs = f1(by_paragraph(split), documents)
            yield Comparison(
                name=f"sentences_vs_{name}",
                ours=ours,
                peer=theirs,
                unit="F1",
                ratio=ours / theirs,
                settings={
                    "what": f"{corpus}: {ours:.4f}, {theirs:.4f}",
                    "corpus": corpus,
                    "peer_version": version(name),
                    "documents": len(documents),
                    "ends": sum(len(document.ends) - 1 for document in documents),
                },
            )
    yield from _speed(data, splitters, rounds, QUICK_BYTES if quick else BOOKS_BYTES)


def _speed(
    data: Path, splitters: dict[str, Splitter], rounds: int, most_bytes: int
) -> Iterator[Planned]:
    paths = sorted((data / "classic_books").rglob("*.md"))
    books, size_bytes = [], 0
    for path in paths:
        if size_bytes < most_bytes:
            books.append(path.read_text(encoding="utf-8"))
            size_bytes += len(books[-1].encode())
    cleaned = [clean(book) for book in books]
    sample = [cleaned[0][:SAMPLE_BYTES]]
    fastest = max(splitters, key=lambda name: _rate(splitters[name], sample))
    paragraphs = [part for book in cleaned for part in book.split("\n\n")]
    for kind, texts in {"books": cleaned, "paragraphs": paragraphs}.items():
        yield compare(
            f"split_sentences_vs_{fastest}",
            partial(_rate, split_sentences, texts),
            partial(_rate, splitters[fastest], texts),
            unit="MB/s",
            rounds=rounds,
            what=f"{kind}, the fastest of the peers",
            corpus="classic_books",
            peer_version=version(fastest),
            texts=len(texts),
            bytes=size_bytes,
        )
    yield compare(
        f"clean_and_split_vs_{fastest}",
        lambda: _rate(lambda text: split_sentences(clean(text)), books),
        lambda: _rate(splitters[fastest], books),
        unit="MB/s",
        rounds=rounds,
        what="books, ours cleans them first",
        corpus="classic_books",
        peer_version=version(fastest),
        texts=len(books),
        bytes=size_bytes,
    )


def _rate(split: Splitter, texts: list[str]) -> float:
    size_bytes = sum(len(text.encode()) for text in texts)
    began = time.perf_counter()
    for text in texts:
        split(text)
    return size_bytes / 1e6 / (time.perf_counter() - began)


def _pysbd() -> Splitter:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", SyntaxWarning
        )  # from escapes in its patterns, when they are compiled
        warnings.simplefilter("ignore", DeprecationWarning)  # the same, before Python 3.12
        import pysbd
    return pysbd.Segmenter(language="en", clean=False).segment


def _blingfire() -> Splitter:
    import blingfire

    return lambda text: blingfire.text_to_sentences(text).split("\n")


def _sentencex() -> Splitter:
    import sentencex

    return lambda text: list(sentencex.segment("en", text))


def _syntok() -> Splitter:
    from syntok import segmenter

    return lambda text: [
        "".join(token.spacing + token.value for token in sentence)
        for paragraph in segmenter.analyze(text)
        for sentence in paragraph
    ]


PEERS: dict[str, Callable[[], Splitter]] = {
    "pysbd": _pysbd,
    "blingfire": _blingfire,
    "sentencex": _sentencex,
    "syntok": _syntok,
}


def _installed() -> dict[str, Splitter]:
    splitters = {}
    for name, make in PEERS.items():
        try:
            splitters[name] = make()
        except ImportError as error:
            print(f"{name} is skipped: {error}")
    return splitters


def by_paragraph(split: Splitter) -> Splitter:
    """`split` on each paragraph alone: not every splitter ends a sentence at a blank line."""
    return lambda text: [
        sentence for paragraph in re.split(r"\n\s*\n", text) for sentence in split(paragraph)
    ]


def f1(split: Splitter, documents: list[Annotated]) -> float:
    """Harmonic mean of precision and recall of sentence ends, over all documents together.

    A document's last end, which no splitter misses, does not count; those of its paragraphs do.

    Raises: ValueError if `split` loses or adds a character other than white space, which would
        shift the ends.
    """
    correct = predicted = annotated = 0
    for document in documents:
        ends = set(accumulate(_dense_length(sentence) for sentence in split(document.text)))
        length = _dense_length(document.text)
        if max(ends, default=0) != length:
            raise ValueError(
                f"a document has {length} characters, its sentences have {max(ends, default=0)}: "
                f"{document.text[:60]!r}"
            )
        ends -= {0, length}
        gold = document.ends - {length}
        correct += len(ends & gold)
        predicted += len(ends)
        annotated += len(gold)
    return 2 * correct / (predicted + annotated)


def read_treebank(path: Path) -> list[Annotated]:
    """The documents of a CoNLL-U file, reassembled: a blank line between paragraphs."""
    documents = []
    text, ends, between = "", [0], ""
    for block in path.read_text(encoding="utf-8").strip().split("\n\n"):
        lines = block.split("\n")
        comments = dict(line[2:].partition(" = ")[::2] for line in lines if line[0] == "#")
        if "newdoc id" in comments:
            if text:
                documents.append(Annotated(text, frozenset(ends[1:])))
            text, ends, between = "", [0], ""
        elif "newpar id" in comments:
            between = "\n\n"
        text += between + comments["text"]
        ends.append(ends[-1] + _dense_length(comments["text"]))
        between = "" if _no_space_after([line for line in lines if line[0] != "#"]) else " "
    return [*documents, Annotated(text, frozenset(ends[1:]))]


def _no_space_after(rows: list[str]) -> bool:
    """Whether the next sentence follows the last word (or multiword token) without a space."""
    words = [row.split("\t") for row in rows if "." not in row.partition("\t")[0]]
    last = words[-1][0]
    return any("SpaceAfter=No" in row[9] for row in words if row[0].split("-")[-1] == last)


def read_chapter(data: Path) -> Annotated:
    """The chapter of the books that sentence_ends.json names.

    Raises: ValueError if the book's text differs from the annotated one.
    """
    annotation = json.loads(CHAPTER_ENDS.read_text(encoding="utf-8"))
    book = (data / annotation["book"]).read_text(encoding="utf-8")
    text = book.partition(f"{annotation['chapter']} \n")[2].partition("\n##")[0].strip()
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest != annotation["sha256"]:
        raise ValueError(
            f"{annotation['chapter']} of {data / annotation['book']} has sha256 {digest}, the "
            f"annotated text has {annotation['sha256']}: the book is another edition"
        )
    return Annotated(text, frozenset(annotation["ends"]))


def _dense_length(text: str) -> int:
    return len("".join(text.split()))


if __name__ == "__main__":
    main(benchmark, "sentences")
