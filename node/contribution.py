"""What this node has contributed to a swarm, in all of its runs: the one place where that is counted.

The state folder keeps the sums of earlier runs, by swarm, in ``contribution.json``; those of this run are the counters
of the telemetry. What a node says of itself is its own word: nothing is decided by it.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from node.wording import many

if TYPE_CHECKING:  # the light commands show what is counted here, and keep no telemetry
    from node.state_folder import StateFolder
    from node.telemetry import Counters

log = logging.getLogger(__name__)

NAME: Final = "contribution.json"
FORMAT: Final = 1
MAX_SWARMS: Final = 64
"""Of more, those that this node took part in longest ago are forgotten."""
MAX_BYTES: Final = 64 * 1024
"""64 swarms take 13 KiB."""
MAX_COUNT: Final = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributed:
    """Sums over runs."""

    microbatches: int = 0
    tokens: int = 0
    steps: int = 0

    def plus(self, counters: Counters) -> Contributed:
        """With those of a run."""
        return Contributed(
            microbatches=min(MAX_COUNT, self.microbatches + counters.microbatches),
            tokens=min(MAX_COUNT, self.tokens + counters.tokens),
            steps=min(MAX_COUNT, self.steps + counters.steps),
        )

    def __str__(self) -> str:
        return f"{many(self.microbatches, 'microbatch')} ({many(self.tokens, 'token')}) in {many(self.steps, 'step')}"


class Contribution:
    """The sums of one node for one swarm."""

    def __init__(self, folder: StateFolder, swarm_hex: str, counters: Counters) -> None:
        """``counters`` are this run's, and go on counting."""
        self._folder = folder
        self._swarm = swarm_hex
        self._counters = counters
        self._before = Contributed()
        self._others: dict[str, tuple[Contributed, float]] = {}
        self._saved: Contributed | None = None
        """None until the file has been read: before that it must not be replaced."""

    @property
    def total(self) -> Contributed:
        """Of all runs, this one included."""
        return self._before.plus(self._counters)

    @property
    def now(self) -> Contributed:
        """Of this run."""
        return Contributed().plus(self._counters)

    @property
    def came_back(self) -> bool:
        """Whether an earlier run has contributed something."""
        return self._before != Contributed()

    def load(self) -> None:
        """Take up what earlier runs have left. A damaged file is moved aside; raises nothing."""
        try:
            known = parse(self._folder.read(NAME, at_most=MAX_BYTES))
        except FileNotFoundError:
            known = {}
        except ValueError as error:
            known = {}
            self._set_aside(str(error))
        except OSError as error:
            log.warning(
                "what earlier runs contributed cannot be read: %s: %s; this run counts from zero and is not kept",
                self._folder.path / NAME,
                error.strerror,
            )
            return
        self._before = known.pop(self._swarm, (Contributed(), 0.0))[0]
        self._others = known
        self._saved = self._before

    def save(self) -> None:
        """Keep the sums, if they have changed. A full disk shows elsewhere and must not end the training."""
        total = self.total
        if self._saved is None or total == self._saved:
            return
        newest = sorted(self._others.items(), key=lambda entry: entry[1][1])[-(MAX_SWARMS - 1) :]
        swarms = {**dict(newest), self._swarm: (total, time.time())}
        value = {
            "format": FORMAT,
            "swarms": {swarm: {**asdict(sums), "updated": updated} for swarm, (sums, updated) in swarms.items()},
        }
        try:
            self._folder.write_json(NAME, value)
        except OSError as error:
            log.warning("what this node contributed cannot be written down: %s", error.strerror)
            return
        self._saved = total

    def _set_aside(self, why: str) -> None:
        try:
            aside = self._folder.set_aside(NAME)
        except OSError as error:
            log.warning("%s is damaged (%s) and cannot be moved: %s", self._folder.path / NAME, why, error.strerror)
            return
        log.warning(
            "what earlier runs contributed is lost: %s is damaged (%s); it is kept as %s, and the count begins anew",
            NAME,
            why,
            aside,
        )


def parse(data: bytes) -> dict[str, tuple[Contributed, float]]:
    """The sums by swarm and when they were written, in Unix seconds.

    Raises:
        ValueError: it is not what ``save`` writes.
    """
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT or not isinstance(value.get("swarms"), dict):
        raise ValueError(f"it is not of format {FORMAT}")
    if len(value["swarms"]) > MAX_SWARMS:
        raise ValueError(f"it names more than {MAX_SWARMS} swarms")
    return {_swarm(swarm): _sums(entry) for swarm, entry in value["swarms"].items()}


def _swarm(name: str) -> str:
    if len(name) != 64 or set(name) - set("0123456789abcdef"):
        raise ValueError("it names something that is no swarm")
    return name


def _sums(entry: Any) -> tuple[Contributed, float]:
    if not isinstance(entry, dict):
        raise ValueError("the sums of a swarm are missing")
    counts: dict[str, Any] = {name: entry.get(name) for name in ("microbatches", "tokens", "steps")}
    if any(type(count) is not int or not 0 <= count <= MAX_COUNT for count in counts.values()):
        raise ValueError("a sum is not a number that can be")
    updated: Any = entry.get("updated")
    if type(updated) not in (int, float) or not 0 <= updated < 1e12:
        raise ValueError("a time is not one")
    return Contributed(**counts), float(updated)
