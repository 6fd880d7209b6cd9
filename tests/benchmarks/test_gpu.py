"""What runs on a GPU also runs here, with less work; a part that fails stops no other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import PARTS, Part, main, run

ALL_STEPS = """
import json, pathlib, sys
import torch
from benchmarks.gpu import PARTS
from benchmarks.gpu_steps import STEPS

results = {name: list(STEPS[name](torch.device("cpu")))[-1] for name in PARTS}
pathlib.Path(sys.argv[1]).write_text(json.dumps(results))
"""
WRITES = "import pathlib, sys; pathlib.Path(sys.argv[2]).write_text('{\"done\": 1}')"


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    parts = {
        "fails": Part(["-c", "raise SystemExit('out of memory')"], 30),
        "hangs": Part(["-c", f"{WRITES}; import time; time.sleep(60)"], 2),
        "works": Part(["-c", WRITES], 30),
    }
    run(parts, tmp_path / "gpu.json", budget_s=60)
    written = json.loads((tmp_path / "gpu.json").read_text())
    fails, hangs, works = written["parts"]
    assert not fails["passed"]
    assert "exit code 1: out of memory" in fails["error"]
    assert not hangs["passed"]
    assert "not within 2 s" in hangs["error"]
    assert hangs["result"] == {"done": 1}, "what it had measured by then is kept"
    assert works["passed"]
    assert works["result"] == {"done": 1}
    assert "numpy" in written["made"]["versions"]


def test_parts_that_exceed_the_time_are_left_out() -> None:
    (result,) = run({"works": Part(["-c", WRITES], 30)}, None, budget_s=0)
    assert not result["passed"]
    assert result["error"] == "no time was left"


@pytest.mark.drill
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    # In one process, so that torch and transformers are imported once.
    subprocess.run([sys.executable, "-c", ALL_STEPS, str(path)], check=True, timeout=500)
    results = json.loads(path.read_text())
    assert list(results) == list(PARTS)
    assert {"bert-tiny", "electra-small", "deberta-tiny"} <= results["parity"]["errors"].keys()
    assert results["curve"]["points"]
    assert results["encode"]["texts_per_s"] > 0


def test_the_command_runs_a_part_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.json"
    command = ["gpu", "--cpu", "--only", "windows", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    [part] = json.loads(path.read_text())["parts"]
    assert ended.value.code == 0, part.get("error")
    assert part["name"] == "windows"
    assert max(part["result"]["relative_error"].values()) < 1e-2
