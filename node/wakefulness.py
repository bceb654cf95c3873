"""Whether this process was stopped for a while: SIGSTOP, a laptop that slept, a machine that stood still.

Whoever wakes up finds what others said meanwhile in its buffers, and would act on it as if no time had passed, although
they have long given it up. What was begun before such a gap is to be begun again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TICK_SECONDS = 0.5
GAP_SECONDS = 4.0
"""Between two ticks, from which on the process is held to have been stopped: less than it takes to be found gone."""


class Wakefulness:
    """Is told every ``TICK_SECONDS`` that the process runs."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._ticked = now()
        self._woke = float("-inf")

    def tick(self) -> None:
        """The process runs."""
        now = self._now()
        if now - self._ticked > GAP_SECONDS:
            self._woke = now
        self._ticked = now

    def slept_since(self, moment: float) -> bool:
        """Whether the process was stopped, and woke up, after ``moment`` (of the clock). Right also before the first
        tick after a gap."""
        if self._now() - self._ticked > GAP_SECONDS:
            self._woke = self._now()
        return self._woke >= moment
