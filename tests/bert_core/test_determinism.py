"""A row of a matrix product is the same to the bit, whatever is beside it: on this kind of CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROBE = """
import sys, torch
from bert_core.determinism import fix_products
fixed = sys.argv[1] == "fixed" and fix_products()
torch.set_num_threads(2)
torch.manual_seed(0)
apart = 0
with torch.inference_mode():
    for inputs, outputs in ((384, 384), (1536, 384), (3072, 768), (768, 2)):
        layer, rows = torch.nn.Linear(inputs, outputs), torch.randn(300, inputs)
        whole = layer(rows)
        apart += sum(
            not torch.equal(layer(rows[start : start + count]), whole[start : start + count])
            for count in (1, 2, 7, 16, 60, 130) for start in (0, 3, 150)
        )
print(fixed, apart)
"""


def probed(how: str) -> tuple[bool, int]:
    """Whether products are fixed, and in how many batches rows come out otherwise."""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    printed = subprocess.run(
        [sys.executable, "-c", PROBE, how],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    fixed, apart = printed.split()
    return fixed == "True", int(apart)


@pytest.mark.drill
def test_a_row_of_a_product_does_not_depend_on_the_rows_beside_it() -> None:
    fixed, apart = probed("fixed")
    if not fixed:
        pytest.skip("products of this CPU, or this torch, depend on their shape")
    assert apart == 0
    assert probed("as torch does it")[1] > 0  # or the probe would show nothing
