"""What this machine offers for computing: device, number format, threads and memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from protocol.errors import SettingsError

if TYPE_CHECKING:
    from protocol.manifest_sections import WireSection

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")


def choose_device(requested: str = "auto") -> torch.device:
    """The device for "auto" (a CUDA GPU if there is one), "cpu", "cuda" or "cuda:N".

    Raises:
        SettingsError: no such device on this machine, or another word.
    """
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    name, colon, index = requested.partition(":")
    if name not in ("cpu", "cuda") or (colon and (name == "cpu" or not index.isdecimal())):
        raise SettingsError(f"device: {requested!r} is unknown; write auto, cpu, cuda or cuda:N")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SettingsError(
            "device: torch sees no CUDA GPU here; check the driver (nvidia-smi) and that torch is a CUDA"
            " build, or write cpu"
        )
    number, count = int(index or 0), torch.cuda.device_count()
    if number >= count:
        raise SettingsError(f"device: there is no cuda:{number}; the last one is cuda:{count - 1}")
    return torch.device("cuda", number)


def autocast_dtype(device: torch.device, wire: WireSection) -> torch.dtype | None:
    """bfloat16 for the matrix products where the device is fast at it and the swarm allows it, else None.

    A swarm whose activations travel as fp32 wants exact numbers, so its nodes compute in float32. A CPU
    always does: most emulate bfloat16.
    """
    if device.type != "cuda" or wire.activation_dtype == "fp32":
        return None
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else None


def limit_threads(threads: int) -> None:
    """Let torch use this many threads within one operation; 0 leaves the choice to torch."""
    if threads > 0:
        torch.set_num_threads(threads)


def available_memory_bytes(device: torch.device) -> int:
    """Memory that a stage could still take: of the GPU, or of this machine within its container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    limited = cgroup_available_bytes()
    return available if limited is None else min(available, limited)


def cgroup_available_bytes(root: Path = _CGROUP_ROOT, membership: Path = _CGROUP_MEMBERSHIP) -> int | None:
    """What the memory limits of this process's control groups leave free, or None without a limit.

    Reads version 2 and 1, every group from this process's up to the root, since the tightest counts. File
    cache that the kernel can drop is not counted as used.
    """
    rooms = [room for folder, names in _memory_groups(root, membership) if (room := _room(folder, *names)) is not None]
    return min(rooms, default=None)


_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _memory_groups(root: Path, membership: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Folders of the memory controller that hold this process, with the names of their files."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, names = root, _V2
        elif "memory" in controllers.split(","):
            base, names = root / "memory", _V1
        else:
            continue
        # In a container the path may be the host's, which is not mounted: the root is then the group itself.
        group = base / path.strip("/")
        while group != base and base in group.parents:
            groups.append((group, names))
            group = group.parent
        groups.append((base, names))
    return groups


def _room(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit = _number(folder / limit_name)
    if limit is None or limit >= 1 << 60:  # version 1 writes a huge number for "no limit"
        return None
    usage = _number(folder / usage_name)
    if usage is None:
        usage = int(psutil.Process().memory_info().rss)
    return max(0, limit - max(0, usage - _cache(folder, cache_name)))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # ValueError: the word "max"
        return None


def _cache(folder: Path, name: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
    except (OSError, ValueError, IndexError):
        return 0
