"""Test files can be given in any order."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_files_of_a_folder_have_its_fixtures_whatever_is_given_between_them() -> None:
    """As `git diff --name-only | xargs pytest` gives them."""
    files = ["pipelines/test_vocab.py", "test_any_order.py", "pipelines/test_long_runs.py"]
    # It sets up nothing, but looks for every fixture.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n0",
        "-q",
        "--setup-plan",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in files)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "prepared" in done.stdout
