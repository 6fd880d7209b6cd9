"""Ranks and what is computed of them, beside numbers worked out by hand."""

import numpy as np
import pytest

from bert_core.metrics.retrieval import ranks_of, retrieval_columns, retrieval_metrics


def test_a_rank_counts_what_is_better_and_shares_what_is_equal() -> None:
    passages = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.6, 0.8]])
    queries = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    # Products with the first query: 1, 0, 0.6, 0.6; with the third: 0, 1, 0.8, 0.8.
    ranks = ranks_of(queries, passages, np.array([0, 2, 3, 0]))
    assert ranks.tolist() == [1, 2.5, 2.5, 4]


def test_vectors_that_are_all_alike_win_nothing() -> None:
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
