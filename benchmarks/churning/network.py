"""Whether the network between nodes could be cut, slowed and made lossy on this machine.

All nodes of the benchmark talk over loopback, where that is not possible for one of them alone; each would need a
network namespace of its own, with the kernel's netem at its end.
"""

from __future__ import annotations

import os
import shutil
import subprocess

TOOLS = ("ip", "tc")


def why_no_network_faults() -> str:
    """Why the network is left alone, for people."""
    if os.geteuid() != 0:
        return "none, they need root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"none, {' and '.join(missing)} not found"
    if not _has_netem(f"sentinel-churn-{os.getpid()}"):
        return "none, this kernel has no netem"
    return "none, the nodes share one network namespace"


def _has_netem(namespace: str) -> bool:
    """Try it in a namespace that goes away again."""
    if not _runs("ip", "netns", "add", namespace):
        return False
    try:
        delay = ("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
        return _runs("ip", "netns", "exec", namespace, *delay)
    finally:
        _runs("ip", "netns", "delete", namespace)


def _runs(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False, timeout=10).returncode == 0
