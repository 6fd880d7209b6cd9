"""Documents: what cleaning keeps, ids that depend on the text alone, where sentences end."""

import hashlib
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import sentences as measured
from bert_core.data.documents import clean, document_digest, document_fraction, split_sentences

# Characters that matter to the rules, so that hypothesis meets their combinations.
TEXTS = st.text(alphabet="aB1é.?!,;\"'( \t\n\r\x00\x0c\ufeff\ud800海", max_size=80)
THOROUGH = settings(max_examples=200, deadline=None, derandomize=True)


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        ("a\r\nb\rc\nd", "a\nb\nc\nd"),
        ("\ufeffa\ufeffb", "ab"),
        ("a\x00b\x07c\x0cd\x7fe", "abcde"),
        ("a\tb", "a\tb"),
        ("a  \t\nb \n", "a\nb"),
        (" \n a\n\n", "a"),
        ("a\ud83db", "ab"),
        ("naïve 海 🌊", "naïve 海 🌊"),
        (" \r\n\x00 ", ""),
    ],
)
def test_cleaning_removes_what_is_not_text(raw: str, cleaned: str) -> None:
    assert clean(raw) == cleaned


@given(TEXTS)
@THOROUGH
def test_a_cleaned_text_is_utf8_and_cleaning_it_again_changes_nothing(raw: str) -> None:
    cleaned = clean(raw)
    assert clean(cleaned) == cleaned
    assert cleaned.encode("utf-8").decode("utf-8") == cleaned
    assert document_digest(cleaned) == hashlib.sha256(cleaned.encode()).digest()


def test_a_fraction_depends_on_document_seed_and_purpose_and_is_uniform() -> None:
    digests = [document_digest(str(number)) for number in range(4000)]
    drawn = {
        (seed, purpose): np.array([document_fraction(digest, seed, purpose) for digest in digests])
        for seed, purpose in [(0, "split"), (0, "shard"), (1, "split")]
    }
    for fractions in drawn.values():
        assert fractions.min() >= 0
        assert fractions.max() < 1
        # The mean of n uniform numbers has standard deviation 1 / sqrt(12 n).
        assert abs(fractions.mean() - 0.5) < 4.5 / np.sqrt(12 * len(digests))
    correlations = np.corrcoef(list(drawn.values()))[np.triu_indices(3, k=1)]
    assert np.abs(correlations).max() < 4.5 / np.sqrt(len(digests))
    assert document_fraction(digests[0], 0, "split") == drawn[0, "split"][0]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Really?! Yes.", ["Really?!", "Yes."]),
        ('He said "stop." She did.', ['He said "stop."', "She did."]),
        ("It ended (at last.) Then rain.", ["It ended (at last.)", "Then rain."]),
        ("Wait... Then go.", ["Wait...", "Then go."]),
        ("A dot. then more", ["A dot. then more"]),
        ("A word. then more", ["A word.", "then more"]),
        ("It goes on... then more", ["It goes on... then more"]),
        ("It rains… Then go.", ["It rains…", "Then go."]),
        ("It is 3.14 in all. 2 are left.", ["It is 3.14 in all.", "2 are left."]),
        ('"What?" he said. "No."', ['"What?" he said.', '"No."']),
        ("“What?” Mr. Hill asked. “No.”", ["“What?” Mr. Hill asked.", "“No.”"]),
        ("“Wrong!” She raised a hand.", ["“Wrong!”", "She raised a hand."]),
        ("Oh! what a day.", ["Oh! what a day."]),
        ("How much do they know? is it all?", ["How much do they know?", "is it all?"]),
        ("It is _over!_ Go home.", ["It is _over!_", "Go home."]),
        ("We met. (So she says.) Then rain.", ["We met.", "(So she says.)", "Then rain."]),
        ("He paid. $5 was left.", ["He paid.", "$5 was left."]),
        ("See it. https://x.org/?a=b Then go.", ["See it.", "https://x.org/?a=b Then go."]),
        ("It ended--Mr. Hill left. -- A. B.", ["It ended--Mr. Hill left.", "-- A. B."]),
        ("I took No. 5. No. She did.", ["I took No. 5.", "No.", "She did."]),
        ("At 5 p.m. The U.S. Army left.", ["At 5 p.m.", "The U.S. Army left."]),
        ("From the U.S. He left on Jan. 5.", ["From the U.S.", "He left on Jan. 5."]),
        ("Pens, ink, etc. We sold it.", ["Pens, ink, etc.", "We sold it."]),
        ("It was the girl's. Mr. Hill left.", ["It was the girl's.", "Mr. Hill left."]),
        ("Buy these: 1. Bread. 2. Some tea.", ["Buy these: 1. Bread.", "2. Some tea."]),
        ("One.  Two.\tThree.", ["One.", "Two.", "Three."]),
        ("Он ушёл. Она нет.", ["Он ушёл.", "Она нет."]),
        ("Es ist z. B. Wien. Ja.", ["Es ist z. B. Wien.", "Ja."]),
        ("Fue él. ¡No! Ella.", ["Fue él.", "¡No!", "Ella."]),
        ("Mr. Smith met Dr. Who, e.g. Tom.", ["Mr. Smith met Dr. Who, e.g. Tom."]),
        ("J. R. Smith wrote. Élan followed.", ["J. R. Smith wrote.", "Élan followed."]),
        ("Use numpy.array. Then stop.", ["Use numpy.array.", "Then stop."]),
        ("a line\nthat goes on", ["a line that goes on"]),
        ("a line\n    that goes on", ["a line that goes on"]),
        ("a line.\nthat does not", ["a line.", "that does not"]),
        ("A heading\nThen prose", ["A heading", "Then prose"]),
        ("- one\n- two", ["- one", "- two"]),
        ("no stop\n\nhere", ["no stop", "here"]),
        ("no stop\n\n1. A", ["no stop", "1. A"]),
        (f"{'word ' * 12}and\nMr.\nHill", [f"{'word ' * 12}and Mr.", "Hill"]),
        (f"{'word ' * 12}Mr.\nHill left.", [f"{'word ' * 12}Mr. Hill left."]),
        (f"{'word ' * 12}these:\nHill", [f"{'word ' * 12}these:", "Hill"]),
        (f"{'word ' * 22}and\nHill", [f"{'word ' * 22}and", "Hill"]),
        ("no stop\n \t\n\n  here", ["no stop", "here"]),
        ("", []),
        ("...", ["..."]),
    ],
)
def test_sentences_end_where_a_reader_would_end_them(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


@given(TEXTS)
@THOROUGH
def test_splitting_loses_no_word_and_makes_no_empty_sentence(raw: str) -> None:
    text = clean(raw)
    sentences = split_sentences(text)
    assert all(sentence == sentence.strip() != "" for sentence in sentences)
    assert [word for s in sentences for word in s.split()] == text.split()


@pytest.mark.timeout(20)  # what grows with the square of the length takes minutes
@pytest.mark.parametrize(
    "run",
    [" ", ".", "\n", "\t\n", ". ", "Mr. A ", '"', '. "', '?" A ', "1. ", "\n1. ", f"{'x' * 60}\n "],
)
def test_long_runs_of_one_thing_take_linear_time(run: str) -> None:
    text = clean("x" + run * (200_000 // len(run)) + "x")
    assert split_sentences(text)[0].startswith("x")


def test_real_articles_fall_into_sentences_of_ordinary_length(data_dir: Path) -> None:
    text = clean((data_dir / "wikitext2" / "valid.txt").read_text(encoding="utf-8")[:300_000])
    sentences = split_sentences(text)
    assert [word for s in sentences for word in s.split()] == text.split()
    lengths = np.array([len(s.split()) for s in sentences if not s.startswith("=")])
    assert 18 < np.median(lengths) < 27  # English Wikipedia, punctuation counted as words
    assert (lengths > 100).mean() < 0.01


@pytest.fixture(scope="module")
def annotated(data_dir: Path) -> dict[str, list[measured.Annotated]]:
    return {
        "ud_ewt": measured.read_treebank(data_dir / measured.HELD_OUT),
        "chapter": [measured.read_chapter(data_dir)],
    }


@pytest.mark.parametrize(
    ("corpus", "peer", "floor"), [("ud_ewt", "sentencex", 0.91), ("chapter", "syntok", 0.995)]
)
def test_as_many_boundaries_are_right_as_the_best_of_other_splitters_finds(
    annotated: dict[str, list[measured.Annotated]], corpus: str, peer: str, floor: float
) -> None:
    documents = annotated[corpus]
    theirs = measured.f1(measured.by_paragraph(measured.PEERS[peer]()), documents)
    assert theirs > 0.9  # it got the text that it should
    assert measured.f1(split_sentences, documents) >= max(theirs, floor)


@pytest.mark.parametrize(("corpus", "floor"), [("ud_ewt", 0.9), ("chapter", 0.99)])
@pytest.mark.parametrize("width", [66, 72, 79])
def test_wrapping_lines_moves_few_boundaries(
    annotated: dict[str, list[measured.Annotated]], corpus: str, floor: float, width: int
) -> None:
    wrapped = [
        measured.Annotated(_wrap(document.text, width), document.ends)
        for document in annotated[corpus]
    ]
    assert measured.f1(split_sentences, wrapped) > floor


def _wrap(text: str, width: int) -> str:
    return "\n\n".join(textwrap.fill(part, width) for part in text.split("\n\n"))


def test_a_treebank_is_put_together_and_boundaries_counted_as_they_stand(tmp_path: Path) -> None:
    rows = [
        "# newdoc id = a",
        "# text = It's A.",
        "1-2\tIt's\t_\t_\t_\t_\t_\t_\t_\t_",
        "3\tA.\t_\t_\t_\t_\t_\t_\t_\tSpaceAfter=No",
        "",
        "# text = (B!)",
        "1\t(B!)\t_\t_\t_\t_\t_\t_\t_\t_",
        "",
        "# newpar id = p",
        "# text = C",
        "1\tC\t_\t_\t_\t_\t_\t_\t_\t_",
        "",
        "# newdoc id = b",
        "# newpar id = q",
        "# text = D",
        "1\tD\t_\t_\t_\t_\t_\t_\t_\t_",
        "",
    ]
    path = tmp_path / "some.conllu"
    path.write_text("\n".join(rows), encoding="utf-8")
    documents = measured.read_treebank(path)
    assert [document.text for document in documents] == ["It's A.(B!)\n\nC", "D"]
    assert [sorted(document.ends) for document in documents] == [[6, 10, 11], [1]]
    # Of two ends wanted one is found, and nothing else: precision 1, recall a half.
    assert measured.f1(str.splitlines, documents) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="has 11 characters, its sentences have 4"):
        measured.f1(lambda text: [text[:5]], documents)
