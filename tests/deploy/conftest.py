"""Programs that the manifests are checked with."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Tool = Callable[[str, str], str]


@pytest.fixture(scope="session")
def tool() -> Tool:
    """Finds a program beside Python or on the PATH, or skips and says how to get it."""

    def find(name: str, source: str) -> str:
        places = [str(Path(sys.executable).parent), os.environ["PATH"]]
        path = shutil.which(name, path=os.pathsep.join(places))
        if path is None:
            pytest.skip(f"{name} is missing: {source}")
        return path

    return find
