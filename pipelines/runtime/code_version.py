"""The version of the code that runs."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

GIT_TIMEOUT_S = 5.0
"""How long git may take to name the commit, on a busy machine or a slow disk."""


def code_version() -> str:
    """Return the version of raybert, with the commit if it runs from a checkout."""
    try:
        release = version("raybert")
    except PackageNotFoundError:
        release = "unknown"
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return release
    return f"{release}+{commit.stdout.strip()}" if commit.stdout.strip() else release
