"""Serve's processes do without pandas, and whoever imports it later gets it."""

import subprocess
import sys

from serve.cluster.worker_start import SETUP

PROGRAM = """
import importlib, sys
module, _, name = sys.argv[1].rpartition(".")
getattr(importlib.import_module(module), name)()
assert "ray.serve" in sys.modules and "pandas" not in sys.modules
import serve.cluster.deployments
assert "pandas" not in sys.modules
from pandas import DataFrame
getattr(importlib.import_module(module), name)()
assert sys.modules["pandas"].DataFrame is DataFrame
"""


def test_ray_serve_is_imported_without_pandas() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, SETUP], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
