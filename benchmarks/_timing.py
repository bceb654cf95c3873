"""How the benchmarks measure time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

REPETITIONS = 9


def median_seconds(work: Callable[[], object]) -> float:
    """Median wall seconds of one call, after one call to warm up."""
    work()
    taken = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
