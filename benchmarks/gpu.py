"""Everything that only a GPU shows, in one call: `python -m benchmarks.gpu --json FILE`.

Needs torch, transformers with accelerate, tokenizers, pyarrow and jaxtyping, but no Ray and no
network. Each step is a process of its own with a limit of time, so that one that fails or hangs
does not stop the rest; what it had measured by then is kept, and the file is written after each.
With `RAYBERT_DATA` rows are WikiText-2's, else docstrings'.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import provenance
from bert_core import files

BUDGET_S = 520.0


@dataclass(frozen=True)
class Part:
    """A process of its own."""

    command: Sequence[str]
    """Python's arguments; `--json FILE` is added."""
    limit_s: float


def _step(name: str, limit_s: float) -> Part:
    return Part(["-m", "benchmarks.gpu", "--step", name], limit_s)


PARTS = {
    "parity": _step("parity", 90),
    "windows": _step("windows", 60),
    "encode": _step("encode", 60),
    "mfu": _step("mfu", 240),
    "ways": _step("ways", 100),
    "curve": _step("curve", 170),
}


def run(parts: Mapping[str, Part], file: Path | None, budget_s: float) -> list[dict[str, Any]]:
    """The results of parts, in order; a part that does not fit the rest of the budget is left out,
    and its result says so."""
    began, made, results = time.monotonic(), provenance(), []
    for name, part in parts.items():
        left_s = budget_s - (time.monotonic() - began)
        result = {"name": name, **_result(part, min(part.limit_s, left_s))}
        print(json.dumps(result, default=str)[:2000], flush=True)
        results.append(result)
        if file is not None:
            files.write_json(str(file), {"made": made, "parts": results})
    return results


def _result(part: Part, limit_s: float) -> dict[str, Any]:
    if limit_s <= 0:
        return {"passed": False, "error": "no time was left"}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        file, log = Path(scratch, "result.json"), Path(scratch, "log.txt")
        command = [sys.executable, *part.command, "--json", str(file)]
        with open(log, "wb") as stream:
            try:
                code = subprocess.run(
                    command, stdout=stream, stderr=subprocess.STDOUT, timeout=limit_s
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        seconds = round(time.monotonic() - began, 1)
        result = json.loads(file.read_text()) if file.exists() else None
        if code == 0:
            return {"passed": True, "seconds": seconds, "result": result}
        why = f"not within {limit_s:.0f} s" if code is None else f"exit code {code}"
        ends = log.read_text(errors="replace")[-3000:]
        return {"passed": False, "seconds": seconds, "result": result, "error": f"{why}: {ends}"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART")
    parser.add_argument("--budget_s", type=float, default=BUDGET_S, help="seconds in all")
    parser.add_argument(
        "--cpu", action="store_true", help="a little of each on the CPU, as tests do"
    )
    parser.add_argument("--step", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.step is None:
        if device.type == "cpu" and not arguments.cpu:
            parser.error("wanted a GPU that torch can use, got none: install its driver, or --cpu")
        parts = {name: PARTS[name] for name in arguments.only}
        results = run(parts, arguments.json, arguments.budget_s)
        sys.exit(not all(result["passed"] for result in results))
    from benchmarks.gpu_steps import STEPS

    for result in STEPS[arguments.step](device):
        if arguments.json is not None:
            files.write_json(str(arguments.json), {"device": device.type, **result})


if __name__ == "__main__":
    main()
