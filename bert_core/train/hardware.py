"""Peak performance and memory use of the machine, and process settings. Does not import torch."""

import ctypes
import resource
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Dense bf16 floating-point operations per second and chip, by words of its name; the first match
# counts. Source: NVIDIA's data sheets, without sparsity.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}


# Environment of a process that trains on a CPU: one heap for all threads, in huge pages where the
# system offers them on request. A step of MiniLM reads and writes a gigabyte, and page look-ups
# take a twentieth of its time. glibc, from 2.35 on, reads this once, at process start.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1"}

# Constants from `malloc.h`, which Python does not expose.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let this process keep freed memory for its next allocations.

    Otherwise glibc returns large tensors to the system, which maps and clears them again page by
    page in every step: a tenth of a step of BERT-mini on a CPU. Has no effect on other allocators.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, -1)


def make_deterministic(device: "torch.device") -> None:
    """Make results on a CPU reproducible bit for bit, and raise if an operation cannot be; not on a
    GPU, which would become slower."""
    import torch

    # NOTE: use_deterministic_algorithms does the same, but imports all of inductor: 2 s.
    torch.set_deterministic_debug_mode("error" if device.type == "cpu" else "default")
    # Otherwise torch fills all memory that it allocates, a twelfth of a step of MiniLM.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def flush_denormals() -> None:
    """Make this thread, and compute threads that it starts from now on, treat numbers below 1e-38
    as 0.

    AdamW's first moments of words that no row reads shrink by a tenth per step, become that small
    after some 750 steps and stay so. AdamW then takes eight to eleven times as long.
    """
    import torch

    torch.set_flush_denormal(True)


def peak_flops(device: "torch.device") -> float | None:
    """Return the device's peak bf16 floating-point operations per second; None if unknown."""
    if device.type != "cuda":
        return None
    import torch

    return peak_flops_of(torch.cuda.get_device_name(device))


def peak_flops_of(name: str) -> float | None:
    """Return the dense bf16 FLOP/s of the GPU of this name; None if unknown."""
    words = f" {name.replace('-', ' ')} "
    return next((peak for part, peak in PEAK_FLOPS.items() if f" {part} " in words), None)


def peak_memory_bytes(device: "torch.device | None" = None) -> int:
    """Return the peak memory of this process: on the GPU if given, else on the machine."""
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) << 10
    # On other systems; includes what the parent process held when it started this one.
    unit = 1 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
