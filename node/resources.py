"""What this node uses of the machine beside what its own process tells: its p2pd's memory, and the disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil


def p2pd_resident_bytes(pid: int | None) -> int:
    """Resident memory of the p2pd child; 0 while none runs."""
    if pid is None:
        return 0
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0  # it has just ended


def read_disk(folder: Path) -> tuple[int, int]:
    """Free bytes, for this user, and size of the disk that holds a folder. May wait for a disk that hangs.

    Raises:
        OSError: the folder is gone, or its disk.
    """
    usage = shutil.disk_usage(folder)
    return usage.free, usage.total
