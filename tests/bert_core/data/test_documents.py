"""Documents: what cleaning keeps, ids that depend on the text alone, where sentences end."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
def test_cleaning_takes_out_what_is_no_text(raw: str, cleaned: str) -> None:
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
        ("It is 3.14 in all. 2 are left.", ["It is 3.14 in all.", "2 are left."]),
        ("Mr. Smith met Dr. Who, e.g. Tom.", ["Mr. Smith met Dr. Who, e.g. Tom."]),
        ("J. R. Smith wrote. Élan followed.", ["J. R. Smith wrote.", "Élan followed."]),
        ("Use numpy.array. Then stop.", ["Use numpy.array.", "Then stop."]),
        ("a line\nthat goes on", ["a line that goes on"]),
        ("a line\n    that goes on", ["a line that goes on"]),
        ("a line.\nthat does not", ["a line.", "that does not"]),
        ("A heading\nThen prose", ["A heading", "Then prose"]),
        ("- one\n- two", ["- one", "- two"]),
        ("no stop\n\nhere", ["no stop", "here"]),
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
@pytest.mark.parametrize("run", [" ", ".", "\n", "\t\n", ". ", "Mr. A "])
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
