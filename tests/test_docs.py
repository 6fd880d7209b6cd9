"""The walk of docs/bert_from_scratch.md runs as it stands, but for fewer steps of training."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STEPS = re.compile(r"^STEPS = \d+$", re.MULTILINE)

ALONE = """\
import sys
sys.modules["ray"] = sys.modules["mlflow"] = None  # importing them fails
"""
CHECKS = """\
assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 1, losses
assert after["mlm"] < before["mlm"] - 1, (before, after)
assert [one["token"] for one in answer] == best.tolist()
assert Path("attention.png").stat().st_size > 10_000
assert abs(seen.weights.sum(-1) - 1).max() < 1e-5
"""


@pytest.mark.drill
def test_the_walk_ends_with_an_answer_and_a_picture_without_ray_and_mlflow(tmp_path: Path) -> None:
    walk = (ROOT / "docs" / "bert_from_scratch.md").read_text(encoding="utf-8")
    program, shortened = STEPS.subn("STEPS = 120", "\n".join(BLOCK.findall(walk)))
    assert shortened == 1
    done = subprocess.run(
        [sys.executable, "-c", ALONE + program + CHECKS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
