#!/usr/bin/env bash
# lancedb 0.40.0: a file of a table in which a bit has changed is read without an error: Lance's
# files have no checksums. A vector that became huge is then the nearest row of any search by dot.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lancedb==0.40.0 numpy==2.2.6
"$folder/venv/bin/python" - "$folder/index" <<'END'
import sys
from importlib.metadata import version
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa

rng = np.random.default_rng(0)
vectors = rng.normal(size=(1000, 16)).astype(np.float32)
column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 16)
lancedb.connect(sys.argv[1]).create_table("rows", pa.table({"vector": column}))
[data] = Path(sys.argv[1], "rows.lance", "data").iterdir()
content = bytearray(data.read_bytes())
content[content.index(vectors[500].tobytes()) + 3] ^= 0x40
data.write_bytes(content)
table = lancedb.connect(sys.argv[1]).open_table("rows")
read = np.array(table.to_arrow()["vector"].to_pylist(), dtype=np.float32)
print("lancedb", version("lancedb"))
print("read without an error; rows that differ:", np.flatnonzero((read != vectors).any(1)))
assert (read != vectors).any(), "the behaviour has changed"
END
