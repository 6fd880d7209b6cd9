"""A search of a retrieval set: every form by an independent implementation of the metrics."""

from pathlib import Path
from typing import Any

import ir_measures
import numpy as np
import pytest
from ir_measures import AP, P, R, nDCG
from scipy.sparse import csr_array

from bert_core.errors import ConfigError
from bert_core.metrics.judged import Judgements
from pipelines.answering.embedding import pack, unpacked
from pipelines.answering.searching import (
    RetrievalConfig,
    Searched,
    as_json,
    check_dimensions,
    search,
    table_of,
)
from pipelines.corpus.retrieval_sets import RetrievalSet

WORDS = ("sea", "blue", "tree", "sand", "wave", "bird", "boat", "wind")


def a_set(seed: int = 0, documents: int = 60, queries: int = 9) -> RetrievalSet:
    """Texts of random words, and random judgements."""
    rng = np.random.default_rng(seed)

    def texts(count: int, words: int) -> list[str]:
        return [" ".join(rng.choice(WORDS, size=words)) for _ in range(count)]

    judgements = [
        Judgements(places, rng.integers(1, 4, size=len(places)).astype(float))
        for _ in range(queries)
        for places in [rng.permutation(documents)[: rng.integers(0, 6)]]
    ]
    ids = [str(number) for number in range(documents)]
    names = [f"q{number}" for number in range(queries)]
    return RetrievalSet(ids, texts(documents, 9), names, texts(queries, 3), judgements, {})


def vectors(seed: int, count: int, size: int = 16) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def agrees(found: Searched, scores: np.ndarray, judged: RetrievalSet) -> None:
    """Check a form against ir-measures, given its scores."""
    ids = judged.document_ids
    qrels = {name: {ids[0]: 0} for name in judged.query_ids}
    for name, own in zip(judged.query_ids, judged.judgements, strict=True):
        for place, relevance in zip(own.places, own.relevance, strict=True):
            qrels[name][ids[place]] = int(relevance)
    run = {
        name: dict(zip(ids, row.tolist(), strict=True))
        for name, row in zip(judged.query_ids, scores, strict=True)
    }
    measures = {
        "ndcg_at_10": nDCG @ 10,
        "map_at_100": AP @ 100,
        "recall_at_5": R @ 5,
        "precision_at_1": P @ 1,
    }
    theirs = ir_measures.calc_aggregate([*measures.values()], qrels, run)
    for name, measure in measures.items():
        assert found.metrics[name] == pytest.approx(theirs[measure], abs=1e-9), (found.form, name)
    for hits, row in zip(found.nearest, scores, strict=True):
        assert [hit.score for hit in hits] == pytest.approx(sorted(row, reverse=True)[:10])
        assert [row[hit.place] for hit in hits] == pytest.approx([hit.score for hit in hits])


def test_every_form_has_the_metrics_of_ir_measures() -> None:
    judged = a_set()
    documents, queries = vectors(1, 60), vectors(2, 9)
    found = {
        each.form: each
        for each in search(
            judged, documents, queries, RetrievalConfig(dimensions=(4,)), trained=[8]
        )
    }
    assert [*found] == ["fp32", "int8", "binary", "8 dimensions", "4 dimensions", "BM25"]
    agrees(found["fp32"], queries @ documents.T, judged)
    signs = np.where(queries > 0, 1, -1) @ np.where(documents > 0, 1, -1).T
    assert len(np.unique(signs)) < 18, "which leaves many ties"
    agrees(found["binary"], signs, judged)
    for size in (8, 4):
        cut = [side[:, :size] / np.linalg.norm(side[:, :size], axis=1, keepdims=True)
               for side in (queries, documents)]  # fmt: skip
        agrees(found[f"{size} dimensions"], cut[0] @ cut[1].T, judged)


def test_sparse_vectors_are_searched_by_their_products() -> None:
    judged = a_set(1)
    rng = np.random.default_rng(0)
    dense = [np.maximum(rng.normal(size=(n, 40)) - 1, 0).astype(np.float32) for n in (60, 9)]
    documents, queries = map(csr_array, dense)
    (found,) = search(judged, documents, queries, RetrievalConfig(bm25=None))
    assert found.bytes_per_vector == 8 * np.count_nonzero(dense[0]) / 60
    agrees(found, dense[1] @ dense[0].T, judged)


def test_bm25_is_that_of_robertson_in_lucenes_form() -> None:
    judged = a_set(2)
    nothing = np.zeros((60, 1), np.float32), np.zeros((9, 1), np.float32)
    *_, found = search(judged, *nothing, RetrievalConfig(quantized=()))
    words = [text.split() for text in judged.documents]
    average = np.mean([len(each) for each in words])

    def score(query: str, document: list[str]) -> float:
        total = 0.0
        for word in query.split():
            have = sum(word in each for each in words)
            idf = np.log(1 + (len(words) - have + 0.5) / (have + 0.5))
            count = document.count(word)
            total += idf * count / (count + 1.5 * (0.25 + 0.75 * len(document) / average))
        return total

    scores = np.array([[score(query, each) for each in words] for query in judged.queries])
    agrees(found, scores.astype(np.float32), judged)
    assert found.form == "BM25"


def test_a_query_without_a_known_word_finds_nothing_by_bm25() -> None:
    judged = a_set(3)
    judged = RetrievalSet(
        judged.document_ids, judged.documents, judged.query_ids,
        ["the", "zebra", *judged.queries[2:]], judged.judgements, {},
    )  # fmt: skip
    nothing = np.zeros((60, 1), np.float32), np.zeros((9, 1), np.float32)
    *_, found = search(judged, *nothing, RetrievalConfig(quantized=()))
    assert {hit.score for hits in found.nearest[:2] for hit in hits} == {0.0}


def test_the_table_has_a_line_per_form() -> None:
    judged = a_set()
    found = [*search(judged, vectors(1, 60), vectors(2, 9), RetrievalConfig(dimensions=(4,)))]
    head, first, *_, last = table_of(found)
    assert head.split() == [
        "bytes", "ndcg@10", "map@100", "mrr@10", "recall@100", "precision@10"
    ]  # fmt: skip
    assert first.split()[:3] == ["fp32", "64", f"{found[0].metrics['ndcg_at_10']:.4f}"]
    assert last.split()[:2] == ["BM25", f"{found[-1].metrics['ndcg_at_10']:.4f}"]
    assert len({len(line) for line in table_of(found)}) == 1, "aligned"
    assert [row["form"] for row in as_json(found)] == [each.form for each in found]


@pytest.mark.parametrize(
    ("settings", "size", "message"),
    [
        ({"dimensions": (16,)}, 16, "retrieval.dimensions: wanted lengths below 16, .* got 16"),
        ({"dimensions": (8,)}, None, "retrieval.dimensions: wanted none for sparse vectors, got 8"),
        ({"dimensions": (0,)}, 16, "retrieval.dimensions: wanted at least 1, got .0,."),
    ],
)
def test_a_form_that_there_is_not_is_refused(
    settings: dict[str, Any], size: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_dimensions(RetrievalConfig(**settings), size)


@pytest.mark.parametrize("sparse", [False, True])
def test_vectors_come_back_from_workers_as_they_were(sparse: bool, tmp_path: Path) -> None:
    whole = np.maximum(vectors(0, 10), 0)
    parts = [csr_array(part) if sparse else part for part in np.split(whole, [3, 9])]
    back = unpacked([pack(part) for part in parts])
    assert isinstance(back, csr_array) == sparse
    assert (back.toarray() if isinstance(back, csr_array) else back).tolist() == whole.tolist()
