#!/usr/bin/env bash
# Guess: an ONNX file that `torch.onnx.export` writes holds the graph and its weights, so that the
# same model exported from two folders is the same file.
# What happens: torch 2.13.0 keeps with every node the lines of Python that it is from, with the
# absolute paths of their files and the text of the lines. Who publishes the file publishes them,
# and its sha256 depends on where the code is installed.
set -euo pipefail
cd "$(mktemp -d)"
trap 'rm -rf "$PWD"' EXIT
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2
cat > model.py <<'PYTHON'
import sys

import torch


class Doubled(torch.nn.Module):
    def forward(self, values):
        doubled = 2 * values  # a remark of the author's
        return torch.relu(doubled)


torch.onnx.export(Doubled(), (torch.ones(2, 3),), sys.argv[1], dynamo=True, verbose=False)
PYTHON
for folder in here there; do
    mkdir "$folder"
    cp model.py "$folder"
    venv/bin/python "$folder/model.py" "$folder/model.onnx" > log 2>&1 || { cat log; exit 1; }
done
cat > look.py <<'PYTHON'
import hashlib
import sys
from pathlib import Path

import onnx
import torch

print("torch", torch.__version__, "onnx", onnx.__version__)
files = [Path(folder, "model.onnx") for folder in ("here", "there")]
for file in files:
    nodes = onnx.load(file).graph.node
    traces = [entry.value for node in nodes for entry in node.metadata_props
              if entry.key == "pkg.torch.onnx.stack_trace"]
    print(file, hashlib.sha256(file.read_bytes()).hexdigest()[:12], f"{len(traces)} stacks, one is:")
    print("  ", traces[0].strip().replace("\n", "\n   "))
    if not any(str(file.parent.resolve()) in trace and "remark" in trace for trace in traces):
        sys.exit("no local path or line of the author's is in the file any more")
if files[0].read_bytes() == files[1].read_bytes():
    sys.exit("the two files are equal now")
PYTHON
venv/bin/python look.py
