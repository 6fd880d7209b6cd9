#!/usr/bin/env bash
# MLServer 1.7.1 takes any pandas, but with pandas 3, whose texts have the dtype `str`, its
# `PandasCodec` cannot encode a frame of texts: KeyError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv

cat > encode.py <<'PYTHON'
import pandas as pd
from mlserver import __version__
from mlserver.codecs import PandasCodec

try:
    [tensor] = PandasCodec.encode_request(pd.DataFrame({"text": ["a", "b"]})).inputs
    outcome = f"a tensor of {tensor.datatype.value if hasattr(tensor.datatype, 'value') else tensor.datatype}"
except KeyError as error:
    outcome = f"KeyError {error}"
print(f"MLServer {__version__}, pandas {pd.__version__}: {outcome}")
PYTHON

status=0
expect() { # version of pandas, what is printed in the end
    venv/bin/python -m pip install --quiet --disable-pip-version-check mlserver==1.7.1 "pandas==$1"
    local line
    line=$(venv/bin/python encode.py 2>/dev/null | tail -n 1)
    echo "$line"
    [[ $line == *"$2" ]] || status=1
}
expect 2.3.3 "a tensor of BYTES"
expect 3.0.1 "KeyError 'O'"
exit "$status"
