#!/usr/bin/env bash
# With pytest 9.2, pytest-xdist 3.8's `--dist=loadgroup` no longer keeps the tests of an
# `xdist_group` in one process, and says nothing: what they share is made in each of them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

cat > test_group.py <<'PYTHON'
import os
import pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("index", range(40))
def test_it(index):
    open(f"ran-in-{os.environ['PYTEST_XDIST_WORKER']}", "w").close()
PYTHON

status=0
expect() { # version of pytest, processes that run the group
    python3 -m venv "$1"
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check "pytest==$1" pytest-xdist==3.8.0
    rm -f ran-in-*
    local outcome ran
    outcome=$("$1/bin/python" -m pytest -q -n2 --dist=loadgroup test_group.py | tail -n 1)
    ran=$(find . -name 'ran-in-*' | wc -l)
    echo "pytest $1, pytest-xdist 3.8.0: ${outcome% in *}, the group ran in $ran process(es)"
    [[ $ran == "$2" ]] || status=1
}
expect 9.1.1 1
expect 9.2.0 2
exit "$status"
