"""Makes a CPU compute each row of a matrix product the same way, whatever the other rows are.

The rest of an encoder computes row by row, or in blocks of rows of the same length
(`model.layout`). One exception remains: activations other than GELU with the error function
(`gelu_new`, tanh, SiLU) may differ in the last bit if the number of threads does not divide a
layer's width by 32.
"""

import ctypes
from pathlib import Path

import torch

AUTO, STRICT = 2, 1 << 16
"""Values of MKL's own header for `mkl_cbwr_set`."""


def fix_products() -> bool:
    """Make MKL sum every element of a matrix product in the same order, for any number of rows and
    threads.

    By default MKL chooses the order by the shape, so a text could get different last digits in
    another batch. In its strict mode (oneMKL, Conditional Numerical Reproducibility) it does not,
    at the same speed. This is only possible before the first product of a process.
    Returns: whether products are computed so from now on. False if torch comes without MKL, on CPUs
        other than Intel's, for which MKL would fall back to slow code, and if it is too late.
    """
    library = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    if not library.exists() or not _is_intel():
        return False
    mkl = ctypes.CDLL(str(library))
    if not hasattr(mkl, "mkl_serv_cbwr_set"):  # the name of `mkl_cbwr_set` when linked statically
        return False
    mkl.mkl_serv_cbwr_set(AUTO | STRICT)
    return bool(mkl.mkl_serv_cbwr_get(-1) & STRICT)


def _is_intel() -> bool:
    described = Path("/proc/cpuinfo")
    return described.exists() and "GenuineIntel" in described.read_text(encoding="utf-8")
