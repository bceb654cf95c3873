"""What ``sentinel doctor`` finds: lines with a level and a remedy. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How bad a finding is."""

    GOOD = "good"
    NOTE = "note"
    """A node would work, but not as well as it could."""
    BAD = "bad"
    """A node would not work."""


_MARKS = {Level.GOOD: "ok", Level.NOTE: "note", Level.BAD: "BAD"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    level: Level
    text: str
    fix: str = ""
    """What to do; empty where nothing is to be done."""


def good(name: str, text: str) -> Finding:
    """All is well."""
    return Finding(name=name, level=Level.GOOD, text=text)


def note(name: str, text: str, fix: str) -> Finding:
    """It would work all the same."""
    return Finding(name=name, level=Level.NOTE, text=text, fix=fix)


def bad(name: str, text: str, fix: str) -> Finding:
    """It would not work."""
    return Finding(name=name, level=Level.BAD, text=text, fix=fix)


def works(findings: Sequence[Finding]) -> bool:
    """Whether a node would work."""
    return all(finding.level is not Level.BAD for finding in findings)


def render(findings: Sequence[Finding]) -> str:
    """One line for each, and a line below it where something is to be done."""
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.level]:<5}{finding.name}: {finding.text}")
        if finding.fix:
            lines.append(f"     -> {finding.fix}")
    problems = sum(finding.level is Level.BAD for finding in findings)
    plural = "" if problems == 1 else "s"
    lines.append(f"a node would not work here: {problems} problem{plural}" if problems else "a node would work here")
    return "\n".join(lines)


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """For ``--json``."""
    return {"works": works(findings), "findings": [asdict(finding) for finding in findings]}
