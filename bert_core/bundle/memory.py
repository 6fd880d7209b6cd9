"""Checks whether a bundle's weights fit in memory, by the sizes that their files state.

Loading weights that do not fit kills the process, and every process that is started to replace it.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import prod
from pathlib import Path, PurePosixPath

from safetensors import safe_open

from bert_core.errors import FormatError, ResourceError

MOST_HEADER_BYTES = 2 << 20
"""Longest safetensors header, for some 20,000 tensors; DeBERTa-v2-xxlarge's has 0.1 MB."""
FLOATING = re.compile("B?F[0-9]")
"""Names of safetensors' floating-point types."""
SINGLE_BYTES = 4
"""Size of a number in fp32, to which every floating-point weight is converted."""
_LIMITED = {
    # By version of control groups: the files of limit and use, and the prefix in memory.stat of the
    # figures that, like the use, include the groups inside.
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def check_memory(needed: int, available: int | None, where: str) -> None:
    """Check that something fits in memory, before anything of its size is loaded.

    Args:
        needed: bytes that it takes at least.
        available: bytes that are available; None if not known.
        where: what it is, for the message.
    Raises: ResourceError if it needs more.
    """
    if available is not None and needed > available:
        raise ResourceError(
            f"{where}: wanted {needed:,} bytes of memory for its weights, this machine or "
            f"container has {available:,} left: end other processes, give it more memory, or take "
            "a smaller model"
        )


def needed_bytes(files: Iterable[Path]) -> int:
    """Return the least number of bytes of memory that these files' tensors take once they are
    loaded.

    Raises: FormatError or SafetensorError if a safetensors file is damaged.
    """
    return sum(
        _tensor_bytes(path) if path.suffix == ".safetensors" else path.stat().st_size
        for path in files
    )


def check_header(path: Path) -> None:
    """Check the size of a safetensors file's header. Raises: FormatError above
    `MOST_HEADER_BYTES`."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
    if MOST_HEADER_BYTES < header_bytes < path.stat().st_size:
        raise FormatError(
            f"{path.name}: wanted a header of at most {MOST_HEADER_BYTES:,} bytes, got "
            f"{header_bytes:,}, which name more tensors than an encoder has: copy it again"
        )


def _tensor_bytes(path: Path) -> int:
    check_header(path)
    size = 0
    with safe_open(path, framework="np") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_slice(name)
            if FLOATING.match(tensor.get_dtype()):
                size += SINGLE_BYTES * prod(tensor.get_shape())
    return size


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this process can still get, with swap and with the kernel's
    file cache.

    This is the minimum of what is left on the machine and in each control group around the process.

    Args:
        root: where /proc and /sys are.
    Returns: None if the system does not say, as outside Linux.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        entries = dict(line.split(":", 1) for line in lines)
        swap = _kib(entries.get("SwapFree", "0"))
        left = [_kib(entries["MemAvailable"]) + swap]
    except (OSError, LookupError, ValueError):
        return None
    left += [bytes_left + swap for bytes_left in _left_in_groups(root)]
    return max(0, min(left))


def _kib(entry: str) -> int:
    return int(entry.split()[0]) << 10


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield the bytes left below the limit of each control group around this process."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        mounted = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
        # A container sees its own group as the root, whatever the group's path outside.
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            with suppress(OSError, ValueError, LookupError):  # missing, or "max"
                yield _left(mounted / group, version)


def _left(group: Path, version: int) -> int:
    limit, use, prefix = _LIMITED[version]
    bytes_limit = int((group / limit).read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    cached = sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
    return bytes_limit - int((group / use).read_text()) + cached
