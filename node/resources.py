"""What this process and its p2pd use of the machine, as the kernel counts it."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """One reading. ``open_files_limit`` is -1 without a limit."""

    open_files: int
    open_files_limit: int
    resident_bytes: int
    p2pd_resident_bytes: int
    """0 while no p2pd runs."""


def read_resources(p2pd_pid: int | None = None) -> Resources:
    """Read the present use. Takes well under a millisecond."""
    me = psutil.Process()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Resources(
        open_files=me.num_fds(),
        open_files_limit=-1 if limit == resource.RLIM_INFINITY else limit,
        resident_bytes=me.memory_info().rss,
        p2pd_resident_bytes=_resident_bytes(p2pd_pid),
    )


def _resident_bytes(pid: int | None) -> int:
    if pid is None:
        return 0
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0  # it has just ended
