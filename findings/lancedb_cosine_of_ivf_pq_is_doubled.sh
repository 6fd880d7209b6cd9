#!/usr/bin/env bash
# lancedb 0.40.0: `_distance` of a search with distance_type("cosine") is 1 - cosine, but of an
# IVF_PQ index it is about twice that, until refine_factor has the rows compared in full. So the
# number changes its meaning once an index is made, and a limit on it lets through other rows.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lancedb==0.40.0 numpy==2.2.6
"$folder/venv/bin/python" - "$folder/index" <<'END'
import sys
from importlib.metadata import version

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.index import IvfPq

rng = np.random.default_rng(0)
vectors = rng.normal(size=(2000, 32)).astype(np.float32)
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 32)
table = lancedb.connect(sys.argv[1]).create_table("rows", pa.table({"vector": column}))
query = vectors[:500].mean(0)


def distances(**settings):
    search = table.search(query).distance_type("cosine").limit(5)
    for name, value in settings.items():
        search = getattr(search, name)(value)
    found = search.to_arrow()
    rows = np.array(found["vector"].to_pylist())
    cosines = rows @ query / np.linalg.norm(query)
    return found["_distance"].to_numpy(), 1 - cosines


print("lancedb", version("lancedb"))
config = IvfPq(distance_type="cosine", num_partitions=4, num_sub_vectors=8)
ways = {"without an index": distances()}
table.create_index("vector", config=config)
ways["IVF_PQ"] = distances(nprobes=4)
ways["IVF_PQ, refined"] = distances(nprobes=4, refine_factor=5)
ratios = {way: float(np.mean(given / wanted)) for way, (given, wanted) in ways.items()}
for way, ratio in ratios.items():
    print(f"{way}: _distance / (1 - cosine) = {ratio:.2f}")
assert abs(ratios["without an index"] - 1) < 0.01 and abs(ratios["IVF_PQ, refined"] - 1) < 0.01
assert 1.5 < ratios["IVF_PQ"] < 2.5, "the behaviour has changed"
END
