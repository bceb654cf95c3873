"""Keeps checkpoints readable that were offered a moment ago, though newer ones have taken their place since.

Nodes remove old checkpoints, and a swarm of small stages does so within seconds: whoever fetches one in parts would
find it gone before its first part. So the newest ones that are offered are kept open, and a file that was removed can
be read until its descriptor is closed. How many, and for how long, is bounded: they take disk that nobody sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

NEWEST = 2
"""Of those that are offered to one peer; older ones nobody chooses."""
MAX_OF_STAGE = 4
MAX_IN_ALL = 8
IDLE_SECONDS = 60.0
"""After the last offer or part of it, a checkpoint is let go."""
GRACE_SECONDS = 5.0
"""Whoever was offered a checkpoint has so long to begin; then it may give way to a newer one."""
MAX_SECONDS = 1800.0
"""And at the latest after this time, so that strangers cannot make a disk hold on to old files for ever."""
LOOK_SECONDS = 5.0
"""Between two looks for those to let go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """A checkpoint as its header describes it: bytes in the file and digest of the parameters."""

    path: Path
    size: int
    parameters: bytes


@dataclass(slots=True, kw_only=True)
class _Held:
    descriptor: int
    facts: FileFacts
    since: float
    offered: float
    read: float


class HeldCheckpoints:
    """The open files, by stage and step. Used on the event loop alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[tuple[int, int], _Held] = {}
        self._look: asyncio.TimerHandle | None = None

    def offer(self, stage: int, found: Mapping[int, FileFacts]) -> dict[int, FileFacts]:
        """What can be offered of a stage: what was ``found`` on the disk, by step, and what is held.

        The newest found ones are held from now on, as far as there is room.
        """
        self._let_go()
        offered = dict(found)
        for step in sorted(found, reverse=True)[:NEWEST]:
            facts = found[step]
            known = self._held.get((stage, step))
            if known is not None and known.facts == facts:
                continue
            if known is not None:
                self._drop(stage, step)  # the swarm went back, and wrote this step anew
            if not self._make_room(stage):
                continue
            try:
                descriptor = os.open(facts.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                del offered[step]  # gone since it was found
                continue
            now = self._clock()
            self._held[stage, step] = _Held(descriptor=descriptor, facts=facts, since=now, offered=now, read=now)
        for (place, step), held in self._held.items():
            if place == stage:
                held.offered = self._clock()
                offered[step] = held.facts
        self._look_later()
        return offered

    def open(self, stage: int, step: int) -> int | None:
        """A descriptor of a held checkpoint, for the caller to close; None if it is not held."""
        held = self._held.get((stage, step))
        if held is None:
            return None
        held.read = self._clock()
        return os.dup(held.descriptor)

    def __len__(self) -> int:
        return len(self._held)

    def close(self) -> None:
        """Let everything go."""
        for stage, step in list(self._held):
            self._drop(stage, step)
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _make_room(self, stage: int) -> bool:
        """Whether another one of a stage can be held, if need be in the place of one that nobody reads."""
        of_stage = [key for key in self._held if key[0] == stage]
        if len(of_stage) < MAX_OF_STAGE and len(self._held) < MAX_IN_ALL:
            return True
        candidates = of_stage if len(of_stage) >= MAX_OF_STAGE else list(self._held)
        idle = min(candidates, key=lambda key: self._held[key].read)
        if self._clock() - self._held[idle].read <= GRACE_SECONDS:
            return False
        self._drop(*idle)
        return True

    def _drop(self, stage: int, step: int) -> None:
        with contextlib.suppress(OSError):  # a disk's late error is nothing to whoever only reads
            os.close(self._held.pop((stage, step)).descriptor)

    def _let_go(self) -> None:
        now = self._clock()
        for (stage, step), held in list(self._held.items()):
            if now - max(held.offered, held.read) > IDLE_SECONDS or now - held.since > MAX_SECONDS:
                self._drop(stage, step)

    def _look_later(self) -> None:
        if self._held and self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._looked)

    def _looked(self) -> None:
        self._look = None
        self._let_go()
        self._look_later()
