"""Which passages near a query may be its negatives."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_core.errors import ConfigError
from pipelines.answering import mining
from pipelines.answering.mining import (
    NearnessConfig,
    belonging,
    candidates,
    first_places,
    nearest,
    texts_at,
)

SCORES = np.array([0.9, 0.8, 0.7, 0.6, 0.5, -0.2], np.float32)
DIGESTS = np.array([1, 2, 3, 4, 5, 6], np.uint64)


@pytest.mark.parametrize(
    ("settings", "own_score", "places", "too_near"),
    [
        ({}, 0.65, [0, 2, 3, 4, 5], 0),
        ({"first_rank": 2, "last_rank": 3}, 0.65, [2, 3], 0),
        ({"margin": 0.0}, 0.65, [3, 4, 5], 2),
        ({"margin": 0.1}, 0.65, [4, 5], 3),
        ({"relative_margin": 0.1}, 0.65, [4, 5], 3),
        ({"relative_margin": 0.05}, 0.65, [3, 4, 5], 2),
        ({"relative_margin": 0.5}, -0.2, [], 5),
        ({"most": 0.7}, 0.65, [2, 3, 4, 5], 1),
        ({"least": 0.0, "most": 0.6}, 0.9, [3, 4], 2),
        ({"margin": 0.1, "most": 0.55, "last_rank": 4}, 0.65, [4], 3),
    ],
)
def test_what_is_too_near_or_out_of_the_ranks_is_left_out(
    settings: dict[str, Any], own_score: float, places: list[int], too_near: int
) -> None:
    own = np.array([2], np.uint64)  # a passage of the query has no rank
    # Just below what fp32 makes of the bounds.
    scores = SCORES - np.float32(1e-6)
    found = candidates(scores, DIGESTS, own_score, own, NearnessConfig(**settings))
    assert (found.places.tolist(), found.too_near) == (places, too_near)


def test_everything_that_belongs_to_a_query_is_excluded() -> None:
    most = np.iinfo(np.uint64).max
    relevant = np.array([[3, 9], [5, 1], [5, 4], [most, 7]], np.uint64)
    assert belonging(5, relevant).tolist() == [1, 4, 5]
    assert belonging(4, relevant).tolist() == [4]
    assert belonging(int(most), relevant).tolist() == [7, most]


def test_a_text_is_kept_where_it_occurs_first() -> None:
    parts = [np.array(part, np.uint64) for part in ([4, 4, 1], [], [1, 2, 4])]
    kept = [part.tolist() for part in first_places(parts)]
    assert kept == [[True, False, True], [], [False, True, False]]


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Vectors of 50 passages in three files."""
    rng = np.random.default_rng(0)
    paths = []
    for number, count in enumerate((20, 0, 30)):
        vectors = pa.array(rng.normal(size=count * 8).astype(np.float32))
        table = pa.table(
            {
                mining.TEXT: [f"{number}-{place}" for place in range(count)],
                mining.DIGEST: pa.array(np.arange(count) + 100 * number, pa.uint64()),
                mining.VECTOR: pa.FixedSizeListArray.from_arrays(vectors, 8),
            }
        )
        paths.append(str(tmp_path / f"{number}.parquet"))
        pq.write_table(table, paths[-1])
    return paths


def test_the_nearest_are_those_that_a_comparison_with_each_finds(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mining, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(mining, "QUERIES_AT_ONCE", 3)
    queries = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
    columns = [pq.read_table(path).column(mining.VECTOR).combine_chunks() for path in paths]
    vectors = np.concatenate([column.flatten().to_numpy().reshape(-1, 8) for column in columns])
    scores, places, digests = nearest(queries, paths, 9)
    whole = queries @ vectors.T
    assert places.tolist() == np.argsort(-whole, axis=1)[:, :9].tolist()
    assert scores == pytest.approx(-np.sort(-whole, axis=1)[:, :9], abs=1e-5)
    assert digests.tolist() == [*range(20), *range(200, 230)]
    assert texts_at(paths, np.array([0, 19, 20, 49])) == ["0-0", "0-19", "2-0", "2-29"]
    assert nearest(queries[:0], paths, 9)[0].shape == (0, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"first_rank": 5, "last_rank": 4}, "near.last_rank: wanted at least first_rank, 5, got 4"),
        ({"first_rank": 0}, "near.first_rank: wanted at least 1, got 0"),
        ({"relative_margin": 2.0}, "near.relative_margin: wanted 0 to 1, got 2"),
        ({"margin": -1.0}, "near.margin: wanted at least 0, got -1"),
    ],
)
def test_bounds_that_leave_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NearnessConfig(**settings)
