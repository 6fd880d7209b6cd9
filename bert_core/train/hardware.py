"""What the machine below could do at most, and what is taken of it. Needs no torch to import."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def peak_flops(device: "torch.device") -> float | None:
    """Floating-point operations a second in bf16 that the device has at most; None if unknown."""
    if device.type != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def peak_memory_bytes(device: "torch.device | None" = None) -> int:
    """The most memory that this process has held at once: of a GPU, else of the machine (Linux)."""
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
