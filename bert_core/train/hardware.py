"""What the machine below could do at most, and what is taken of it. Needs no torch to import."""

import ctypes
import resource
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Dense bf16 of a chip, floating-point operations a second, by words of its name, the first that are
# found. Source: NVIDIA's data sheets, without sparsity.
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


# Environment of a process that trains on a CPU: memory of all threads in one heap, in huge pages
# where the system has them for whom asks. A step of MiniLM reads and writes a gigabyte, and what it
# takes to find its pages is a twentieth. Read once, when a process starts, by glibc from 2.35 on.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1"}

# Of `malloc.h`, which gives these settings no names that Python knows.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for what it allocates next.

    Else glibc gives large tensors back to the system, which maps and clears them again page by page
    in every step: a tenth of a step of BERT-mini on a CPU. Other allocators are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, -1)


def make_deterministic(device: "torch.device") -> None:
    """Let a CPU give the same bits every time, and raise where it cannot; not a GPU, which would be
    slower."""
    import torch

    # NOTE: use_deterministic_algorithms does the same and imports all of inductor: 2 s.
    torch.set_deterministic_debug_mode("error" if device.type == "cpu" else "default")
    # Else torch fills all memory that it asks for, a twelfth of a step of MiniLM.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def flush_denormals() -> None:
    """Let this thread, and those that compute for it from now on, take numbers below 1e-38 for 0.

    AdamW's first moment of a word that is not read falls by a tenth a step and is such a number
    after some 750; it stays one, and with it AdamW takes eight to eleven times as long.
    """
    import torch

    torch.set_flush_denormal(True)


def peak_flops(device: "torch.device") -> float | None:
    """Floating-point operations a second in bf16 that the device has at most; None if unknown."""
    if device.type != "cuda":
        return None
    import torch

    return _peak_of(torch.cuda.get_device_name(device))


def _peak_of(name: str) -> float | None:
    words = f" {name.replace('-', ' ')} "
    return next((peak for part, peak in PEAK_FLOPS.items() if f" {part} " in words), None)


def peak_memory_bytes(device: "torch.device | None" = None) -> int:
    """The most memory that this process has held at once: of a GPU, else of the machine."""
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) << 10
    # Elsewhere, and with what a parent held before it started this process.
    unit = 1 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
