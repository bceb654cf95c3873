"""How far a download is, at what rate, and for how long it will go on. Pure; time is an argument."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

WINDOW_SECONDS = 10.0
"""The rate is that of the last so many seconds: long enough to be steady, short enough to show a change."""

MIB = 1 << 20


@dataclass(slots=True)
class Meter:
    """Bytes that have arrived, and when."""

    total: int
    started: float
    done: int = 0
    _arrived: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, count: int, now: float) -> None:
        """Note that ``count`` bytes have arrived."""
        self.done += count
        self._arrived.append((now, count))
        self._forget(now)

    def rate(self, now: float) -> float:
        """Bytes a second of late; 0 before anything has come."""
        self._forget(now)
        seconds = min(now - self.started, WINDOW_SECONDS)
        return sum(count for _, count in self._arrived) / seconds if seconds > 0 else 0.0

    def seconds_left(self, now: float) -> float | None:
        """At this rate; None while nothing comes."""
        rate = self.rate(now)
        return (self.total - self.done) / rate if rate > 0 else None

    def _forget(self, now: float) -> None:
        while self._arrived and self._arrived[0][0] < now - WINDOW_SECONDS:
            self._arrived.popleft()


def progress_text(meter: Meter, now: float, *, siblings: int, busy: int = 0) -> str:
    """One line for a person. ``siblings`` give; ``busy`` of them have asked this node to wait for its turn."""
    text = f"downloading the stage's state: {_amounts(meter)} from {siblings} sibling{'s' * (siblings != 1)}"
    if siblings and busy == siblings:
        return f"{text}, all busy with other joiners; waiting for a turn"
    return f"{text}, {_pace(meter, now)}"


def file_progress_text(meter: Meter, now: float) -> str:
    """How far one file is, for a person."""
    return f"{_amounts(meter)}, {_pace(meter, now)}"


def _pace(meter: Meter, now: float) -> str:
    left = meter.seconds_left(now)
    return "waiting for the next bytes" if left is None else f"{amount(meter.rate(now))}/s, {duration(left)} left"


def duration(seconds: float) -> str:
    """Seconds up to two minutes, then minutes up to two hours, then hours; rounded up."""
    if seconds <= 120:
        return f"{math.ceil(seconds)} s"
    if seconds <= 7200:
        return f"{math.ceil(seconds / 60)} min"
    return f"{math.ceil(seconds / 3600)} h"


def amount(count: float) -> str:
    """Bytes in the unit that suits them."""
    if count >= 10 * MIB:
        return f"{count / MIB:.0f} MiB"
    return f"{count / MIB:.1f} MiB" if count >= MIB else f"{count / 1024:.0f} KiB"


def _amounts(meter: Meter) -> str:
    if meter.total < 10 * MIB:
        return f"{meter.done >> 10} of {meter.total >> 10} KiB"
    return f"{meter.done >> 20} of {meter.total >> 20} MiB"
