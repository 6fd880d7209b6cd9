#!/bin/sh
# pyarrow cannot open a Parquet file of Polars with a column of 128-bit integers, even if only other
# columns are asked for: the Arrow schema in the footer is read first. Without that entry of the
# footer the same file opens, and the column is fixed_size_binary[16].
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet polars==2.1.0 pyarrow==26.0.1
cd "$folder"
"$folder/venv/bin/python" - <<'END'
import io

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

print("polars", pl.__version__, "pyarrow", pa.__version__)
pl.DataFrame({"text": ["a"], "n": pl.Series([2**100], dtype=pl.Int128)}).write_parquet("a.parquet")
try:
    pq.read_table("a.parquet", columns=["text"])
    raised = False
except pa.ArrowNotImplementedError as error:
    raised = True
    print("text alone:", error)
data = open("a.parquet", "rb").read()
length = data[-8:-4]
footer = data[-8 - int.from_bytes(length, "little") : -8].replace(b"ARROW:schema", b"arrow:schema")
metadata = pq.read_metadata(io.BytesIO(b"PAR1" + footer + length + b"PAR1"))
schema = pq.ParquetFile("a.parquet", metadata=metadata).schema_arrow
print("without Arrow's schema:", schema.field("n").type)
assert raised and str(schema.field("n").type) == "fixed_size_binary[16]", "this has changed"
END
