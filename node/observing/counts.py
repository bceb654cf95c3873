"""What an observer did, for its metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Totals of this process."""

    rounds: int = 0
    answered: int = 0
    failed: int = 0
    hosts: int = 0
