"""Metrics of a search among judged documents: equal to `ir-measures`, ties included."""

import ir_measures
import numpy as np
import pytest
from ir_measures import AP, RR, P, R, nDCG

from bert_core.metrics.judged import (
    CUTS,
    METRICS,
    SHOWN,
    Judgements,
    batches_of,
    first_of,
    id_order,
    judged_columns,
    judged_metrics,
    ranks_of_judged,
)

THEIRS = {"ndcg": nDCG, "map": AP, "recall": R, "precision": P}
# NOTE: not RR@k, for which ir-measures 0.4.3 takes another program than for RR and the rest: among
# equal scores it puts the smallest id first, not the largest (RR 0.5 and RR@10 1.0 of one run).


def a_search(
    seed: int, *, documents: int = 150, queries: int = 12, levels: int
) -> tuple[list[str], np.ndarray, list[dict[int, int]]]:
    """Ids, scores (queries, documents) of so many different values, and relevance by place."""
    rng = np.random.default_rng(seed)
    ids = [f"{number}" for number in rng.permutation(documents * 7)[:documents]]
    ids[:3] = ["é", "Z9", "a b"]
    scores = rng.integers(levels, size=(queries, documents)).astype(np.float32) / 7
    judged = []
    for _ in range(queries):
        places = rng.permutation(documents)[: rng.integers(1, 20)]
        judged.append({int(place): int(rng.integers(-1, 4)) for place in places})
    return ids, scores, judged


@pytest.mark.parametrize("levels", [2, 5, 10**6])
@pytest.mark.parametrize("seed", range(3))
def test_every_metric_is_that_of_ir_measures_also_with_ties(seed: int, levels: int) -> None:
    ids, scores, judged = a_search(seed, levels=levels)
    qrels = {f"q{q}": {ids[p]: rel for p, rel in own.items()} for q, own in enumerate(judged)}
    run = {f"q{q}": dict(zip(ids, row.tolist(), strict=True)) for q, row in enumerate(scores)}
    order = id_order(ids)
    relevant = [
        Judgements(
            np.array([p for p, rel in own.items() if rel > 0], dtype=np.int64),
            np.array([float(rel) for rel in own.values() if rel > 0]),
        )
        for own in judged
    ]
    ranks = [
        ranks_of_judged(row, own.places, order) for row, own in zip(scores, relevant, strict=True)
    ]
    columns = judged_columns(ranks, relevant)
    assert [*columns] == [f"{name}_at_{k}" for k in CUTS for name in METRICS]
    assert set(SHOWN) <= set(columns)
    wanted = [*(THEIRS[name] @ k for k in CUTS for name in THEIRS), RR]
    each = {
        (value.measure, value.query_id): value.value
        for value in ir_measures.iter_calc(wanted, qrels, run)
    }
    for k in CUTS:
        for name in THEIRS:
            theirs = [each[THEIRS[name] @ k, query] for query in qrels]
            assert columns[f"{name}_at_{k}"] == pytest.approx(theirs, abs=1e-9), (name, k)
        reciprocal = np.array([each[RR, query] for query in qrels])
        reciprocal[reciprocal < 1 / k - 1e-9] = 0
        assert columns[f"mrr_at_{k}"] == pytest.approx(reciprocal, abs=1e-9), k
    means = ir_measures.calc_aggregate([nDCG @ 10, AP @ 100], qrels, run)
    metrics = judged_metrics(columns)
    assert metrics["ndcg_at_10"] == pytest.approx(means[nDCG @ 10], abs=1e-9)
    assert metrics["map_at_100"] == pytest.approx(means[AP @ 100], abs=1e-9)


def test_the_first_documents_are_those_of_the_lowest_ranks() -> None:
    ids, scores, _ = a_search(5, levels=3)
    order = id_order(ids)
    for row in scores:
        ranks = ranks_of_judged(row, np.arange(len(ids)), order)
        assert sorted(ranks) == list(range(1, len(ids) + 1)), "a rank each"
        assert first_of(row, order, 10).tolist() == np.argsort(ranks)[:10].tolist()
        assert first_of(row, order, 1000).tolist() == np.argsort(ranks).tolist()


def test_scores_that_differ_only_beyond_fp32_are_equal_as_in_trec_eval() -> None:
    scores = np.array([1.0, 1.0 + 1e-12, 1.0 - 1e-12])
    assert ranks_of_judged(scores, np.arange(3), id_order(["a", "b", "c"])).tolist() == [3, 2, 1]


def test_batches_cover_all_queries_and_hold_at_least_one() -> None:
    assert list(batches_of(3, 10**9)) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert list(batches_of(3, 10)) == [slice(0, 3)]
    assert list(batches_of(0, 10)) == []
