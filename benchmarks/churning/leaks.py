"""What a swarm leaves behind: processes, socket folders, claims of the dead, open files that grow."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.churning.inject import alive

WARM_SECONDS = 20.0
"""Open files are compared from this age on: by then a process is connected to all that it will be."""
FEWEST_SAMPLES = 6
FILES_PER_PEER = 8
"""Two streams each way between two nodes, the connection below them, and room for one more that is being replaced."""
MOST_GROWTH = 12
"""Open files that a process may have gained otherwise: some calls of the DHT are always under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCount:
    """How many files a process had open at a second, and how many peers its node knew then."""

    second: float
    files: int
    peers: int


@dataclass(slots=True)
class OpenFiles:
    """The open files of one process over time."""

    samples: list[FileCount] = field(default_factory=list)

    def growth(self, begun: float) -> int | None:
        """How many more there are at the end than at the beginning, by the median of thirds; None if unknown.

        What further peers need is left out of it. ``begun``: the second from which on the process was at work.
        """
        warm = [sample for sample in self.samples if sample.second >= begun + WARM_SECONDS]
        third = len(warm) // 3
        if len(warm) < FEWEST_SAMPLES:
            return None
        first, last = warm[:third], warm[-third:]
        files = statistics.median(sample.files for sample in last) - statistics.median(sample.files for sample in first)
        peers = max(sample.peers for sample in last) - min(sample.peers for sample in first)
        return round(files - FILES_PER_PEER * max(0, peers))


def count_open_files(process: psutil.Process) -> int | None:
    """The open files of a process; None if it has just ended."""
    with contextlib.suppress(psutil.Error):
        return int(process.num_fds())
    return None


@dataclass(slots=True)
class Processes:
    """Every process that a swarm was ever seen to consist of."""

    _seen: set[psutil.Process] = field(default_factory=set)

    def see(self, process: psutil.Process) -> None:
        """Remember a process and its descendants."""
        with contextlib.suppress(psutil.Error):
            self._seen.update((process, *process.children(recursive=True)))

    def left(self) -> list[psutil.Process]:
        """Those that still run."""
        return [process for process in self._seen if alive(process)]


def noted_sockets(state: Path) -> Path | None:
    """The socket folder that a running node has noted in its state folder."""
    with contextlib.suppress(OSError):
        return Path((state / "sockets").read_text(encoding="utf-8"))
    return None


def claims_of_the_dead(replicas: Iterable[Mapping[str, Any]], living: set[str]) -> list[str]:
    """The peers in a node's view that do not live."""
    return [str(replica["peer"]) for replica in replicas if replica["peer"] not in living]
