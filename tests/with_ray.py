"""Command lines that share the Ray of a process of their own, with an environment of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

RUN = """
import json, sys
from pipelines import cli
from pipelines.runtime import cluster

failed = []
try:
    for arguments in json.load(sys.stdin):
        try:
            cli.main(arguments)
        except SystemExit as ended:
            if ended.code != 0:
                failed.append(arguments)
finally:
    cluster.disconnect()
sys.exit("failed: " + "; ".join(map(" ".join, failed)) if failed else 0)
"""


def run_with_ray(commands: list[list[str]], folder: Path, **environment: str) -> None:
    """Run command lines in one process of its own, in a folder; they share its Ray."""
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | environment,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
