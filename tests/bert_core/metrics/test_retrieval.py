"""Ranks and what is computed of them, beside numbers worked out by hand."""

import numpy as np
import pytest

from bert_core.metrics.bootstrap import intervals
from bert_core.metrics.retrieval import (
    ranking_columns,
    ranking_metrics,
    ranks_of,
    retrieval_columns,
    retrieval_metrics,
    sparse_ranks_of,
)


def test_a_rank_counts_what_is_better_and_shares_what_is_equal() -> None:
    passages = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.6, 0.8]])
    queries = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    # Products with the first query: 1, 0, 0.6, 0.6; with the third: 0, 1, 0.8, 0.8.
    ranks = ranks_of(queries, passages, np.array([0, 2, 3, 0]))
    assert ranks.tolist() == [1, 2.5, 2.5, 4]


def test_identical_vectors_rank_in_the_middle() -> None:
    ranks = ranks_of(np.ones((300, 3)), np.ones((301, 3)), np.arange(300))
    assert set(ranks) == {151.0}


def test_queries_count_alike_however_many_passages_are_right_for_them() -> None:
    # Query 7 has passages at ranks 1, 4 and 20, query 3 one at rank 2.
    columns = retrieval_columns(np.array([4.0, 2.0, 20.0, 1.0]), np.array([7, 3, 7, 7]))
    found = retrieval_metrics(columns)
    assert found == pytest.approx(
        {
            "mrr": (1 / 1 + 1 / 2) / 2,
            "recall_at_1": (1 / 3 + 0) / 2,
            "recall_at_5": (2 / 3 + 1) / 2,
            "recall_at_10": (2 / 3 + 1) / 2,
        }
    )


def rankings(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Scores and relevance of the passages of some queries, with ties in both."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 30, size=20)
    return [(rng.integers(0, 8, size) / 4, rng.integers(0, 4, size) * 1.0) for size in sizes]


def columns_of(queries: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    """The rows of all queries, mixed."""
    scores, wanted = (np.concatenate(each) for each in zip(*queries, strict=True))
    query = np.repeat(np.arange(len(queries)), [len(each) for each, _ in queries])
    order = np.random.default_rng(0).permutation(len(query))
    return ranking_columns(scores[order], wanted[order], query[order])


@pytest.mark.parametrize("seed", range(3))
def test_gains_are_those_of_scikit_learn_where_scores_tie_too(seed: int) -> None:
    from sklearn.metrics import ndcg_score

    queries = [(scores, wanted) for scores, wanted in rankings(seed) if wanted.any()]
    wanted = [
        ndcg_score([relevance], [scores], k=10) if len(scores) > 1 else 1.0
        for scores, relevance in queries
    ]
    found = ranking_metrics(columns_of(queries))
    assert found["ndcg_at_10"] == pytest.approx(np.mean(wanted), abs=1e-12)


@pytest.mark.filterwarnings("ignore")
def test_rankings_are_measured_as_sentence_transformers_measures_them() -> None:
    """Without ties, which it breaks by the order of the passages."""
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    rng = np.random.default_rng(1)
    samples: list[dict[str, str | list[str]]] = []
    queries = []
    for number, size in enumerate(rng.integers(3, 30, size=12)):
        scores, right = rng.permutation(size) / size, max(1, size // 8)
        names = [f"{number}-{score}" for score in scores]
        samples.append({"query": f"{number}", "positive": names[:right], "negative": names[right:]})
        queries.append((scores, (np.arange(size) < right) * 1.0))

    class Reads:
        """Takes a passage's score from its name."""

        model_card_data = None

        def predict(self, pairs: list[list[str]], **_: object) -> np.ndarray:
            return np.array([float(passage.partition("-")[2]) for _, passage in pairs])

    evaluator = CrossEncoderRerankingEvaluator(samples, write_csv=False)
    evaluator.store_metrics_in_model_card_data = lambda *_, **__: None  # type: ignore[method-assign]
    theirs = evaluator(Reads())  # type: ignore[arg-type]
    ours = ranking_metrics(columns_of(queries))
    assert ours["ndcg_at_10"] == pytest.approx(theirs["ndcg@10"], abs=1e-12)
    assert ours["mrr_at_10"] == pytest.approx(theirs["mrr@10"], abs=1e-12)


def test_equal_scores_gain_nothing() -> None:
    relevance = np.array([1.0, 0.0, 0.0])
    columns = ranking_columns(np.zeros(3), relevance, np.zeros(3, dtype=np.int64))
    found = ranking_metrics(columns)
    assert found["mrr_at_10"] == 1 / 2
    assert found["ndcg_at_10"] == pytest.approx(np.mean(1 / np.log2([2, 3, 4])))


def test_queries_without_a_relevant_passage_do_not_count() -> None:
    query = np.array([0, 0, 1, 1])
    columns = ranking_columns(np.array([1.0, 2.0, 1.0, 2.0]), np.array([1.0, 0, 0, 0]), query)
    assert ranking_metrics(columns)["mrr_at_10"] == 1 / 2
    nothing = ranking_columns(np.ones(2), np.zeros(2), np.zeros(2, dtype=np.int64))
    assert ranking_metrics(nothing) == {"ndcg_at_10": 0.0, "mrr_at_10": 0.0}


def test_an_interval_is_that_of_drawing_queries() -> None:
    """Half of the queries have their passage first, half second: rows of a query do not vary by
    themselves, so more passages make the interval no narrower."""
    queries = [
        (np.arange(passages)[::-1] * 1.0, (np.arange(passages) == number % 2) * 1.0)
        for passages in [40]
        for number in range(50)
    ]
    low, high = intervals(ranking_metrics, columns_of(queries))["mrr_at_10"]
    error = 0.25 / np.sqrt(50)  # of a mean of 1 and 1/2, each half of the time
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_ranks_of_sparse_vectors_are_those_of_dense_ones() -> None:
    from scipy.sparse import csr_array

    rng = np.random.default_rng(0)
    queries, passages = (rng.integers(0, 3, (rows, 9)) * 1.0 for rows in (300, 20))
    right = rng.integers(0, 20, 300)
    found = sparse_ranks_of(csr_array(queries), csr_array(passages), right)
    np.testing.assert_array_equal(found, ranks_of(queries, passages, right))
