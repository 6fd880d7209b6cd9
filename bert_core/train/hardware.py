"""What the machine below could do at most, and what is taken of it."""

import resource
import sys

import torch

# Dense bf16 of a chip, floating-point operations a second, by a part of its name, the first that is
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
    "V100": 125e12,
    "T4": 65e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Floating-point operations a second in bf16 that the device has at most; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has held so far: of the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
