"""The commands of docs/cluster.md run as they stand, from a bucket and a cluster to an answer.

Every stage is a job, with a worker of the cluster.
"""

import re
import shutil
from pathlib import Path

import pytest

from bert_core import files
from bert_core.manifest import read_manifest
from tests.mlflow_server import Server
from tests.ray_clusters import running_head
from tests.test_readme import BASH, PROLOGUE, ROOT, ROWS, run, small_checkout
from tracking.models.registry import champion
from tracking.store.ports import free_ports

DOCUMENT = ROOT / "docs" / "cluster.md"
SERVED = re.compile(r"\b8000\b")


@pytest.mark.ray
@pytest.mark.cluster
def test_the_walk_ends_with_a_model_that_answers(
    object_store: str, lasting_server: Server, tmp_path: Path
) -> None:
    lasting_server.start()
    small_checkout(tmp_path, num_workers=1)
    bucket, (port,) = f"{object_store}/docstrings", free_ports(1)
    variables = {
        "BUCKET": bucket,
        "MLFLOW_TRACKING_URI": lasting_server.uri,
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
        "RAYBERT_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    found = BASH.findall(DOCUMENT.read_text(encoding="utf-8"))
    with running_head(variables, mode="token") as head:
        for script in found:
            script = SERVED.sub(str(port), script)
            run(["bash", "-c", PROLOGUE + script], tmp_path, head.environment)
        # A name that a shell would cut in two, and the champion by its reference.
        rows = shutil.copy(tmp_path / ROWS["held_out"], tmp_path / "two words.jsonl")
        done = head.raybert(
            "submit", "predict", f"--source={rows}", f"--output={bucket}/predict",
            "--model=models:/docstrings@champion", "--num_workers=1",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "succeeded, exit code 0" in done.stdout
    count = len(Path(rows).read_text().splitlines())
    assert read_manifest(f"{bucket}/evaluate").counts["rows"] == count
    assert read_manifest(f"{bucket}/predict").counts["rows"] == count
    assert "pretrain" in files.list_names(bucket)
    assert champion("docstrings", uri=lasting_server.uri) is not None
