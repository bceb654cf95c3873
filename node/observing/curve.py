"""The loss of each step, as the middle of what nodes tell of it, collected over time. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

WINDOW_STEPS: Final = 64
"""Steps before the present one whose loss can still change: a status tells of the last 50."""

MAX_POINTS: Final = 20_000
MAX_TELLERS: Final = 64
"""Whose word on one step is kept: enough for a middle."""


class Curve:
    """Collects losses by step."""

    def __init__(self) -> None:
        self._done: deque[tuple[int, float]] = deque(maxlen=MAX_POINTS)
        self._open: dict[int, dict[str, float]] = {}

    def add(self, teller: str, losses: Iterable[tuple[int, float]], *, step: int) -> None:
        """A node's word on some steps, while the swarm works on ``step``. What is too far from that is left out."""
        for of_step, loss in losses:
            if step - WINDOW_STEPS < of_step <= step and (not self._done or of_step > self._done[-1][0]):
                told = self._open.setdefault(of_step, {})
                if teller in told or len(told) < MAX_TELLERS:
                    told[teller] = loss

    def close(self, *, step: int) -> None:
        """Settle the steps that are long past."""
        for past in sorted(known for known in self._open if known <= step - WINDOW_STEPS):
            self._done.append((past, median(self._open.pop(past).values())))

    def points(self) -> list[tuple[int, float]]:
        """Step and loss, in order of steps."""
        return [*self._done, *((step, median(self._open[step].values())) for step in sorted(self._open))]


def middle(values: Sequence[float]) -> float | None:
    """The median, so that fewer than half cannot move it beyond what others say; None of nothing."""
    return median(values) if values else None
