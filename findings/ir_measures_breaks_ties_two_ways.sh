#!/usr/bin/env bash
# Reciprocal rank with and without a cutoff that cuts nothing are two numbers in ir-measures, if
# documents have equal scores: RR is trec_eval's, which takes the last id first, and RR@10 is that of
# MS MARCO's script, which takes the first id first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check \
    ir-measures==0.4.3 pytrec-eval-terrier==0.5.11
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import ir_measures
from ir_measures import RR, P, nDCG

judged = [ir_measures.Qrel("query", "a", 1), ir_measures.Qrel("query", "b", 0)]
found = [ir_measures.ScoredDoc("query", name, 1.0) for name in ("a", "b")]
values = ir_measures.calc_aggregate([RR, RR @ 10, nDCG @ 10, P @ 1], judged, found)
print(f"ir-measures {version('ir-measures')}: documents a, which is relevant, and b, equal scores")
for measure, value in sorted(values.items(), key=str):
    print(f"  {measure}: {value:.4f}")
sys.exit(not (values[RR] == 0.5 and values[RR @ 10] == 1.0 and values[P @ 1] == 0.0))
PYTHON
