"""What the pictures on a terminal share: colours of standings, and a row of bars for a curve."""

from __future__ import annotations

from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
STANDING_COLOURS = {
    "trusted": "green",
    "probation": "cyan",
    "suspect": "yellow",
    "quarantined": "red",
    "ejected": "red",
}


def sparkline(values: Sequence[float], width: int) -> str:
    """The last ``width`` values as a row of bars."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in shown)
