"""What each process of a server does first, on a cluster that `raybert serve` starts for itself."""

import sys
from typing import Any

SETUP = f"{__name__}.import_serve_without_pandas"
"""For Ray's `worker_process_setup_hook`."""


def import_serve_without_pandas() -> None:
    """Import Ray Serve as where pandas is not installed.

    Serve imports it only to write tables as JSON, which none of our answers has: 24 MiB and 0.3 s
    in each of five processes. Whoever imports pandas later gets it.
    """
    if "pandas" in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    modules["pandas"] = None
    try:
        from ray import serve as ray_serve  # noqa: F401
    finally:
        del modules["pandas"]
