#!/usr/bin/env bash
# pytest 9.1 does not find the fixtures of a folder's conftest.py in its second file, if a file of
# another folder stands between the two on the command line; 9.0 and 9.2 find them. Whoever runs
# `git diff --name-only | xargs pytest` meets it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

mkdir -p tests/part
printf 'import pytest\n\n@pytest.fixture\ndef made(): return 1\n' > tests/part/conftest.py
for name in first second; do
    printf 'def test_it(made): assert made == 1\n' > "tests/part/test_$name.py"
done
printf 'def test_it(): pass\n' > tests/test_between.py
printf '[pytest]\n' > pytest.ini

# Prints the last line of a run of pytest, without its time.
outcome() {
    "$1/bin/python" -m pytest -q "${@:2}" | tail -n 1 | sed 's/ in .*//' || true
}
apart=(tests/part/test_first.py tests/test_between.py tests/part/test_second.py)
together=(tests/part/test_first.py tests/part/test_second.py tests/test_between.py)

status=0
expect() { # version, outcome if the folder's files stand apart
    python3 -m venv "$1"
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check "pytest==$1"
    local seen_apart seen_together
    seen_apart=$(outcome "$1" "${apart[@]}")
    seen_together=$(outcome "$1" "${together[@]}")
    echo "pytest $1: a folder's files apart: $seen_apart; side by side: $seen_together"
    [[ $seen_apart == "$2" && $seen_together == "3 passed" ]] || status=1
}
expect 9.0.3 "3 passed"
expect 9.1.1 "2 passed, 1 error"
expect 9.2.0 "3 passed"
exit "$status"
