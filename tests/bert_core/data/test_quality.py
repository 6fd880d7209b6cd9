"""Which documents are left out: lengths, languages, likeness and contamination, by oracles."""

import os
import pickle
import re
import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from bert_core.data.documents import clean, document_digest
from bert_core.data.quality import (
    PERMUTATIONS,
    EvaluationGrams,
    QualityConfig,
    drop_reason,
    near_duplicates,
    signatures,
)
from bert_core.errors import ConfigError

SIGMAS = 4.5  # a fair draw lies further out once in 150,000 seeds; the seeds here are fixed

ENGLISH = "The old bridge was closed for repairs, so we had to walk along the river."
GERMAN = "Die alte Brücke war wegen Reparaturen gesperrt, also gingen wir am Fluss entlang."
FRENCH = "Le vieux pont était fermé pour travaux, nous avons donc longé la rivière à pied."


@pytest.fixture(scope="module")
def articles(data_dir: Path) -> list[str]:
    text = (data_dir / "wikitext2" / "valid.txt").read_text(encoding="utf-8")
    found = [clean(article) for article in re.split(r"\n(?= = [^=])", text)]
    return [article for article in found if len(article) > 1000]


@pytest.fixture(scope="module")
def mrpc(data_dir: Path) -> list[tuple[str, int, str]]:
    rows = []
    for part in ("train", "test"):
        path = data_dir / "mrpc" / f"msr_paraphrase_{part}.txt"
        lines = path.read_text(encoding="utf-8-sig").splitlines()[1:]
        for number, line in enumerate(lines):
            rows += [(f"mrpc/{part}", number, text) for text in line.split("\t")[3:]]
    return rows


@pytest.fixture(scope="module")
def stsb(data_dir: Path) -> list[tuple[str, str]]:
    """Where each sentence of STS-B comes from, and the sentence."""
    sentences = []
    for part in ("train", "dev"):
        for line in (data_dir / "stsb" / f"sts-{part}.csv").read_text("utf-8").splitlines():
            columns = line.split("\t")
            sentences += [(columns[1], text) for text in columns[5:7]]
    return sentences


def grams_of(text: str, length: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    length = min(length, len(words))
    return {tuple(words[at : at + length]) for at in range(len(words) - length + 1)}


def jaccard(first: str, second: str) -> float:
    one, other = grams_of(first, 5), grams_of(second, 5)
    return len(one & other) / len(one | other)


def with_words_changed(text: str, share: float, rng: np.random.Generator) -> str:
    words = text.split(" ")
    changed = rng.random(len(words)) < share
    return " ".join(
        f"x{number}" if change else word
        for number, (word, change) in enumerate(zip(words, changed, strict=True))
    )


def dropped_texts(texts: Sequence[str], threshold: float) -> list[str]:
    digests = [document_digest(text) for text in texts]
    dropped = near_duplicates(digests, signatures(texts), threshold)
    assert (np.diff(dropped) > 0).all()
    return sorted(texts[position] for position in dropped)


def test_nothing_is_left_out_by_default() -> None:
    config = QualityConfig()
    for text in ("", "one", ENGLISH, GERMAN, "word " * 100_000):
        assert drop_reason(text, config) is None
    assert not config.exact_duplicates
    assert config.near_duplicates is None
    assert config.contamination == ()
    assert config.on_contamination == "report"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "too_short"),
        ("one two", "too_short"),
        ("one  two\n\nthree", None),
        ("one two\tthree 4 , six", "too_long"),
        ("one two\tthree 4 ,", None),
    ],
)
def test_words_are_what_white_space_separates(text: str, reason: str | None) -> None:
    assert drop_reason(text, QualityConfig(min_words=3, max_words=5)) == reason


def test_a_limit_holds_without_the_other() -> None:
    assert drop_reason("one", QualityConfig(min_words=2)) == "too_short"
    assert drop_reason("one " * 1000, QualityConfig(min_words=2)) is None
    assert drop_reason("one two", QualityConfig(max_words=1)) == "too_long"
    assert drop_reason("", QualityConfig(max_words=1)) is None


def test_languages_are_distinguished() -> None:
    for code, own in (("en", ENGLISH), ("de", GERMAN), ("fr", FRENCH)):
        config = QualityConfig(languages=(code,))
        for text in (ENGLISH, GERMAN, FRENCH):
            assert drop_reason(text, config) == (None if text == own else "other_language")
    both = QualityConfig(languages=("de", "en"))
    assert [drop_reason(text, both) for text in (ENGLISH, GERMAN)] == [None, None]


def test_the_language_is_that_of_the_middle() -> None:
    licence = (ENGLISH + " ") * 40
    book = licence + (FRENCH + " ") * 60 + licence
    assert drop_reason(book, QualityConfig(languages=("fr",))) is None
    assert drop_reason(book, QualityConfig(languages=("en",))) == "other_language"


def test_a_doubtful_language_is_left_out_if_requested() -> None:
    digits = "12 34 56 78 | 9 | 3.4 | 5"
    for text, reason in ((ENGLISH, None), (f"cat {digits}", "other_language")):
        config = QualityConfig(languages=("en",), min_language_probability=0.9)
        assert drop_reason(text, config) == reason


def test_articles_of_the_english_wikipedia_are_english(articles: list[str]) -> None:
    for article in articles:
        assert drop_reason(article, QualityConfig(languages=("en",))) is None
    assert drop_reason(articles[0], QualityConfig(languages=("de", "fr"))) == "other_language"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_words": -1}, r"^quality.min_words: wanted at least 0, got -1$"),
        ({"max_words": 0}, r"^quality.max_words: wanted at least 1, got 0$"),
        (
            {"min_words": 9, "max_words": 8},
            r"^quality.max_words: wanted at least min_words = 9, got 8: leave it unset",
        ),
        (
            {"languages": ("en", "english", "DE")},
            r"^quality.languages: wanted codes of ace, af, .*, zxx, got 'DE', 'english'$",
        ),
        (
            {"languages": ("en",), "min_language_probability": 1.1},
            r"^quality.min_language_probability: wanted 0 to 1, got 1\.1$",
        ),
        (
            {"min_language_probability": 0.5},
            r"^quality.min_language_probability: wanted 0 without languages, got 0\.5: set lang",
        ),
        (
            {"near_duplicates": 0.0},
            r"^quality.near_duplicates: wanted above 0 and at most 1, got 0\.0",
        ),
        (
            {"near_duplicates": 80.0},
            r"^quality.near_duplicates: wanted above 0 and at most 1, got 80\.0",
        ),
        ({"contamination_ngram": 0}, r"^quality.contamination_ngram: wanted at least 1, got 0$"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QualityConfig(**settings)


def test_another_policy_for_contamination_is_refused() -> None:
    config = QualityConfig()
    object.__setattr__(config, "on_contamination", "mask")  # past the types, which are checked here
    with pytest.raises(
        ConfigError, match=r"^quality.on_contamination: wanted one of report, drop, got 'mask'$"
    ):
        config.__post_init__()


def test_evaluation_sets_are_inputs_and_no_other_setting_is() -> None:
    inputs = [field.name for field in fields(QualityConfig) if field.metadata.get("input")]
    assert inputs == ["contamination"]


def test_a_signature_is_the_minhash_of_datasketch(articles: list[str]) -> None:
    from datasketch import MinHash

    texts = [*articles[:20], "four words, not five", "Five words are one gram", "", "…"]
    for text, signature in zip(texts, signatures(texts), strict=True):
        words = re.findall(r"\w+", text.lower())
        words += [""] * (5 - len(words))
        hashes = []
        for at in range(len(words) - 4):
            polynomial = 0
            for word in words[at : at + 5]:
                polynomial = (polynomial + zlib.crc32(word.encode())) * 0x9E3779B97F4A7C15 % 2**64
            hashes.append(polynomial >> 32)
        oracle = MinHash(num_perm=PERMUTATIONS, seed=1, hashfunc=int, scheme="affine32")
        oracle.update_batch(hashes)
        assert (oracle.hashvalues == signature).all()


def test_a_signature_depends_on_its_own_text_alone(articles: list[str]) -> None:
    texts = [*articles[:9], "", "short"]
    together = signatures(texts)
    assert together.shape == (11, PERMUTATIONS)
    apart = np.concatenate([signatures(texts[:4]), signatures([]), signatures(texts[4:])])
    assert (together == apart).all()
    assert (signatures([texts[0].upper().replace(" ", " - ")])[0] == together[0]).all()


def test_estimates_are_as_far_from_jaccard_as_minhash_may_be(articles: list[str]) -> None:
    rng = np.random.default_rng(0)
    shares = rng.uniform(0.01, 0.25, 200)
    originals = [articles[at % len(articles)][:6000] for at in range(len(shares))]
    changed = [
        with_words_changed(text, share, rng) for text, share in zip(originals, shares, strict=True)
    ]
    true = np.array([jaccard(*pair) for pair in zip(originals, changed, strict=True)])
    assert true.min() < 0.2
    assert true.max() > 0.85
    estimates = (signatures(originals) == signatures(changed)).mean(axis=1)
    # Each position is equal with probability J: a binomial of 128 draws.
    deviations = (estimates - true) / np.sqrt(true * (1 - true) / PERMUTATIONS)
    assert np.abs(deviations).max() < SIGMAS
    assert abs(deviations.mean()) < SIGMAS / np.sqrt(len(deviations))
    # The square of a standard normal has variance 2.
    assert abs((deviations**2).mean() - 1) < SIGMAS * np.sqrt(2 / len(deviations))


def test_changed_copies_are_dropped_and_unrelated_articles_are_kept(articles: list[str]) -> None:
    rng = np.random.default_rng(0)
    copies = [with_words_changed(article, 0.01, rng) for article in articles]
    rewritten = [with_words_changed(article, 0.2, rng) for article in articles]
    threshold = 0.69
    # An estimate of J has standard deviation √(J (1 - J) / 128).
    assert min(map(jaccard, articles, copies)) > 0.84 > threshold + SIGMAS * 0.0325
    assert max(map(jaccard, articles, rewritten)) < 0.45 < threshold - SIGMAS * 0.044
    # One of every article and its copy: the one whose digest is the greater.
    assert dropped_texts([*articles, *copies, *rewritten], threshold) == sorted(
        max(pair, key=document_digest) for pair in zip(articles, copies, strict=True)
    )
    assert dropped_texts([*articles, *rewritten], threshold) == []


@pytest.mark.parametrize("threshold", [0.5, 0.8, 1.0])
def test_dropped_documents_depend_only_on_the_set_of_documents(
    articles: list[str], threshold: float
) -> None:
    rng = np.random.default_rng(1)
    texts = [
        with_words_changed(article[:3000], share, rng)
        for article in articles[:30]
        for share in (0, 0, 0.01, 0.03, 0.05)
    ]
    dropped = dropped_texts(texts, threshold)
    assert len(dropped) > 20
    for _ in range(5):
        assert (
            dropped_texts([texts[at] for at in rng.permutation(len(texts))], threshold) == dropped
        )


def clusters(rng: np.random.Generator) -> np.ndarray:
    """Signatures in chains: each is like the one before, and less like those further back."""
    rows = []
    for start in rng.integers(0, 2**32, (60, PERMUTATIONS), dtype=np.uint32):
        row = start
        for _ in range(8):
            rows.append(row)
            fresh = rng.integers(0, 2**32, PERMUTATIONS, dtype=np.uint32)
            row = np.where(rng.random(PERMUTATIONS) < rng.choice([0.05, 0.15, 0.3]), fresh, row)
    return np.array(rows)


@pytest.mark.drill
@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 0.65, 0.8, 0.9, 0.99, 1.0])
def test_no_pair_that_reaches_the_threshold_is_missed(threshold: float) -> None:
    rng = np.random.default_rng(2)
    rows = clusters(rng)
    digests = [rng.bytes(32) for _ in rows]
    kept: list[int] = []
    for document in sorted(range(len(rows)), key=lambda at: digests[at]):
        if all((rows[document] == rows[other]).mean() < threshold for other in kept):
            kept.append(document)
    dropped = near_duplicates(digests, rows, threshold)
    assert dropped.tolist() == sorted(set(range(len(rows))) - set(kept))
    if threshold <= 0.9:
        assert 50 < len(dropped) < len(rows) - 50


def test_a_document_similar_only_to_a_dropped_one_is_kept() -> None:
    base = np.arange(PERMUTATIONS, dtype=np.uint32)
    middle, far = base.copy(), base.copy()
    middle[:20] += 1000
    far[:40] += 1000
    rows = np.array([base, middle, far])  # 0.84 alike in a row, 0.69 at the ends
    assert near_duplicates([b"a", b"b", b"c"], rows, 0.8).tolist() == [1]
    assert near_duplicates([b"b", b"a", b"c"], rows, 0.8).tolist() == [0, 2]


def test_one_of_exact_duplicates_is_kept() -> None:
    texts = [ENGLISH, GERMAN, ENGLISH, FRENCH, ENGLISH, GERMAN]
    assert dropped_texts(texts, 1.0) == sorted([ENGLISH, ENGLISH, GERMAN])
    assert dropped_texts([ENGLISH], 0.8) == dropped_texts([], 0.8) == []


def overlap_oracle(rows: list[tuple[str, int, str]], text: str, ngram: int) -> list:
    found = {}
    for source, number, row_text in rows:
        of_row = grams_of(row_text, ngram)
        length = len(next(iter(of_row)))
        if length >= min(8, ngram) and any(
            gram in of_row for gram in grams_of(text, length) if len(gram) == length
        ):
            found[source, number] = True
    return list(found)


@pytest.mark.parametrize("ngram", [3, 8, 13, 20])
def test_overlaps_are_those_of_every_gram_compared_with_every_other(ngram: int) -> None:
    # Few words, so that grams meet by chance, and pieces of rows, long ones too.
    rng = np.random.default_rng(ngram)
    draw = rng.choice(["a", "a", "a", "b", "ab", "ba"], (60, 30))
    texts = [" ".join(words[: rng.integers(1, 31)]) for words in draw]
    rows = [(f"set{at % 3}", at // 2, text) for at, text in enumerate(texts)]
    grams = EvaluationGrams(rows, ngram)
    hits = []
    for _ in range(60):
        pieces = rng.choice(texts, 3)
        text = " ".join(piece[: 2 * rng.integers(1, 40)] for piece in pieces)
        assert grams.overlaps(text) == overlap_oracle(rows, text, ngram)
        hits.append(len(grams.overlaps(text)))
    assert max(hits) > min(hits)
    assert sum(hits) > 10


def test_planted_rows_are_found_by_name_and_no_others(
    data_dir: Path, articles: list[str], mrpc: list[tuple[str, int, str]]
) -> None:
    lines = (data_dir / "sst2" / "dev.tsv").read_text(encoding="utf-8").splitlines()[1:]
    rows = [("sst2", number, line.split("\t")[0]) for number, line in enumerate(lines)]
    rte = pq.read_table(data_dir / "rte" / "validation.parquet").to_pylist()
    rows += [("rte", number, row["sentence1"]) for number, row in enumerate(rte)]
    rows += mrpc
    grams = EvaluationGrams(rows, 13)
    assert grams.looked_for.total() + grams.too_short.total() == len(rows)
    assert grams.looked_for["mrpc/train"] > 8000  # of 8,152 sentences
    # A review that Wikipedia quotes: the only row that is in there already.
    there = {article: found for article in articles if (found := grams.overlaps(article))}
    assert [article[:19] for article in there] == ["= Die Another Day ="]
    assert list(there.values()) == [[("sst2", 79)]]
    rng = np.random.default_rng(0)
    planted = 0
    for article in articles:
        source, number, text = rows[rng.integers(len(rows))]
        at = article.find(" ", int(rng.integers(len(article) // 2)))
        found = grams.overlaps(f"{article[:at]} {text.upper()} {article[at:]}")
        long_enough = len(re.findall(r"\w+", text)) >= 8
        assert ((source, number) in found) == long_enough
        # Both sentences of a pair in MRPC are one row, and other pairs repeat them.
        assert set(found) == {*grams.overlaps(text), *there.get(article, [])}
        planted += long_enough
    assert planted > 40


@pytest.mark.drill
def test_mrpc_is_found_in_sts_b(
    mrpc: list[tuple[str, int, str]], stsb: list[tuple[str, str]]
) -> None:
    grams = EvaluationGrams(mrpc, 13)
    by_origin: dict[str, list[bool]] = {}
    for origin, sentence in stsb:
        by_origin.setdefault(origin, []).append(bool(grams.overlaps(sentence)))
    assert len(by_origin["MSRpar"]) == 2 * (1000 + 250)
    assert np.mean(by_origin["MSRpar"]) > 0.95
    others = [hit for origin, hits in by_origin.items() if origin != "MSRpar" for hit in hits]
    assert np.mean(others) < 0.01


def test_a_row_is_found_by_one_of_its_grams_and_not_by_less() -> None:
    words = [f"w{number}" for number in range(20)]
    grams = EvaluationGrams([("long", 7, " ".join(words))], 13)
    for start in range(20):
        for end in range(start, 21):
            text = f"before {' '.join(words[start:end])} after"
            assert grams.overlaps(text) == ([("long", 7)] if end - start >= 13 else [])


def test_case_and_punctuation_hide_nothing() -> None:
    row = "A plane, taking off — at 9.30 — isn't loud enough"
    grams = EvaluationGrams([("set", 0, row)], 13)
    assert grams.overlaps("«a PLANE taking\noff» at 9 (30) isn’t loud, enough!") == [("set", 0)]
    assert grams.overlaps("a plane taking off at 9 30 isn t loud enoughs") == []
    assert grams.overlaps("") == grams.overlaps("…") == []


def test_a_row_of_fewer_than_eight_words_is_counted_and_not_looked_for() -> None:
    rows = [("a", 0, "one two three four five six seven"), ("a", 1, ENGLISH), ("b", 0, "")]
    grams = EvaluationGrams(rows, 13)
    assert grams.too_short == {"a": 1, "b": 1}
    assert grams.looked_for == {"a": 1}
    assert grams.overlaps(f"{rows[0][2]} {ENGLISH}") == [("a", 1)]
    assert EvaluationGrams([], 13).overlaps(ENGLISH) == []


def test_a_row_with_two_texts_is_named_once_in_the_order_of_the_rows() -> None:
    rows = [("x", 3, ENGLISH), ("x", 3, GERMAN), ("x", 1, FRENCH), ("y", 1, ENGLISH)]
    grams = EvaluationGrams(rows, 13)
    assert grams.overlaps(f"{FRENCH} {GERMAN} {ENGLISH}") == [("x", 3), ("x", 1), ("y", 1)]


def test_grams_survive_the_way_to_a_worker(mrpc: list[tuple[str, int, str]]) -> None:
    grams = EvaluationGrams(mrpc, 13)
    sent = pickle.dumps(grams)
    text_bytes = sum(len(text) for *_, text in mrpc)
    assert len(sent) < 6 * text_bytes
    there = pickle.loads(sent)  # noqa: S301
    text = "\n".join(text for *_, text in mrpc[100:140])
    assert there.overlaps(text) == grams.overlaps(text) != []


@pytest.mark.drill
def test_nothing_depends_on_the_process() -> None:
    program = (
        "import sys, zlib; from bert_core.data.quality import *;"
        "texts = sys.argv[1:];"
        "grams = EvaluationGrams([('set', at, text) for at, text in enumerate(texts)], 5);"
        "print(zlib.crc32(signatures(texts).tobytes()), [grams.overlaps(text) for text in texts],"
        "grams._heads.tolist(), [drop_reason(text, QualityConfig(languages=('de', 'fr'), "
        "min_language_probability=0.9)) for text in texts])"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", program, ENGLISH, GERMAN, FRENCH],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert str(zlib.crc32(signatures([ENGLISH, GERMAN, FRENCH]).tobytes())) in printed[0]


def test_importing_the_module_imports_neither_library() -> None:
    program = (
        "import sys, bert_core.data.quality as quality; quality.QualityConfig();"
        "quality.drop_reason('a', quality.QualityConfig(min_words=1));"
        "print({'datasketch', 'py3langid', 'scipy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b"set()"
