"""`benchmarks.books` trains on what `raybert prepare` wrote, on a machine without Ray."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipelines.conftest import Small

WITHOUT_RAY = "import sys; sys.modules['ray'] = None; from benchmarks.books import main; main()"


@pytest.mark.trained
def test_a_recipe_leaves_a_bundle_and_its_curve(prepared: Small, tmp_path: Path) -> None:
    from bert_core.bundle.format import load_bundle

    command = [sys.executable, "-c", WITHOUT_RAY, "bert", "--output", str(tmp_path)]
    command += ["--shards", str(prepared.folder / "shards")]
    command += ["--vocabulary", str(prepared.folder / "vocab")]
    limits = ["--max_steps", "4", "--rows", "8", "--log_every", "2", "--held_out_rows", "8"]
    subprocess.run([*command, *limits], check=True, timeout=120)
    curve = json.loads((tmp_path / "run.json").read_text())
    assert [point["step"] for point in curve["points"]] == [2, 4]
    assert curve["points"][1]["mlm_loss"] < curve["points"][0]["mlm_loss"]
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.encoder_config.num_hidden_layers == 4
    assert bundle.metrics["mlm_loss"] == curve["after"]["mlm_loss"]
