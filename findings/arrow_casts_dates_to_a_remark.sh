#!/bin/sh
# pyarrow: dates and timestamps beyond the year 9999 are no error when they are cast to text: the
# text is a remark, `<value out of range: …>`, among the others, where to_pylist() raises. Rows keep
# their number, so a column of labels or ids gets texts that nobody wrote.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pyarrow==26.0.1
"$folder/venv/bin/python" - <<'END'
import pyarrow as pa

print("pyarrow", pa.__version__)
times = pa.array([0, 9_000_000_000_000_000_000], pa.timestamp("us"))
texts = times.cast(pa.string()).to_pylist()
print("cast to text:", texts)
try:
    times.to_pylist()
    raised = False
except OverflowError as error:
    raised = True
    print("to_pylist():", error)
assert texts[1] == "<value out of range: 9000000000000000000>" and raised, "this has changed"
END
