"""Words for people that depend on a number."""

from __future__ import annotations


def many(count: int, word: str) -> str:
    """``1 step``, ``2,000 steps``."""
    plural = "es" if word.endswith("ch") else "s"
    return f"{count:,} {word}{plural if count != 1 else ''}"
