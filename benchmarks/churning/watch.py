"""What the nodes' statuses tell of a swarm under churn: stalls, divergences, losses, ejections.

Pure; time is an argument. Statuses are what /status gave, of nodes that this benchmark has started itself, so they are
taken at their word.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

NOTABLE = frozenset({"lost", "ejected", "quarantined", "out_of_sync", "accusation", "verdict", "would_eject"})
"""Kinds of events that are kept with their text."""
LAST_LOSSES = 10
"""The loss is the mean over the last ten steps: single steps differ by their text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A time without a new committed step anywhere; seconds since the clock's beginning."""

    began: float
    seconds: float
    step: int
    """The step that did not end."""


@dataclass(slots=True)
class StepClock:
    """How long the swarm went without a new committed step. Runs from the first one on."""

    step: int = 0
    """Steps that somebody has committed."""
    longest: Stall = field(default_factory=lambda: Stall(began=0.0, seconds=0.0, step=0))
    _since: float | None = None

    def see(self, step: int, now: float) -> None:
        """Somebody has committed so many steps."""
        if step > self.step:
            self.look(now)
            self.step, self._since = step, now

    def waiting(self, now: float) -> float:
        """Seconds since the last new step; 0 before the first."""
        return 0.0 if self._since is None else now - self._since

    def look(self, now: float) -> None:
        """Take the wait so far into account; call it once more when the watch ends."""
        if self._since is not None and now - self._since > self.longest.seconds:
            self.longest = Stall(began=self._since, seconds=now - self._since, step=self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Two siblings that have committed the same step with different parameters as the result."""

    stage: int
    step: int
    one: str
    other: str


@dataclass(slots=True)
class Digests:
    """Who had which parameters after which step."""

    _seen: dict[tuple[int, int], dict[str, set[str]]] = field(default_factory=dict)

    def take(self, node: str, stage: int, digests: Iterable[tuple[int, str]]) -> None:
        """Note (step, digest) of a node; one that was reset may have had several for a step."""
        for step, digest in digests:
            self._seen.setdefault((stage, step), {}).setdefault(node, set()).add(digest)

    def divergences(self) -> list[Divergence]:
        """Every pair of siblings and step, in order."""
        found = []
        for (stage, step), nodes in sorted(self._seen.items()):
            for one, other in itertools.combinations(sorted(nodes), 2):
                if len(nodes[one] | nodes[other]) > 1:
                    found.append(Divergence(stage=stage, step=step, one=one, other=other))
        return found

    def compared(self) -> int:
        """Pairs of siblings and step that could be compared at all."""
        return sum(len(nodes) * (len(nodes) - 1) // 2 for nodes in self._seen.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Notable:
    """An event that somebody told."""

    node: str
    kind: str
    step: int
    about: str
    """The name of the node that it is about; empty for the one who tells it."""
    text: str


@dataclass(slots=True)
class Watch:
    """Everything that was seen of one swarm."""

    names: dict[str, str] = field(default_factory=dict)
    """Peer id -> name, of every node that was ever started."""
    clock: StepClock = field(default_factory=StepClock)
    digests: Digests = field(default_factory=Digests)
    losses: dict[int, float] = field(default_factory=dict)
    _from_first: set[int] = field(default_factory=set)
    """Steps whose loss a replica of stage 0 told, who has it from the microbatches themselves."""
    _events: dict[tuple[str, float, str, str], Notable] = field(default_factory=dict)
    _counters: dict[str, Mapping[str, int]] = field(default_factory=dict)

    def take(self, node: str, life: str, status: Mapping[str, Any], now: float) -> None:
        """Take a status in. ``life`` names one process of a node, which may have had several."""
        stage = status.get("stage")
        if status.get("coordinator") or stage is None:
            return
        self.clock.see(int(status["step"]), now)
        self.digests.take(node, stage, status.get("digests", ()))
        self._take_losses(stage, status.get("losses", ()))
        self._take_events(node, life, status.get("events", ()))
        names = ("retried", "refused", "lost")
        self._counters[life] = {name: int(status.get(f"microbatches_{name}", 0)) for name in names}

    def _take_losses(self, stage: int, losses: Iterable[tuple[int, float]]) -> None:
        for step, loss in losses:
            if step not in self.losses or (stage == 0 and step not in self._from_first):
                self.losses[step] = loss
            if stage == 0:
                self._from_first.add(step)

    def _take_events(self, node: str, life: str, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            if event["kind"] not in NOTABLE:
                continue
            key = (life, float(event["time"]), event["kind"], event["text"])
            about = self.names.get(event["peer"], event["peer"][-8:])
            self._events[key] = Notable(
                node=node, kind=event["kind"], step=event["step"], about=about, text=event["text"]
            )

    def notable(self, *kinds: str) -> list[Notable]:
        """The events of these kinds, oldest first."""
        keys = sorted(self._events, key=lambda key: (key[1], key))
        return [self._events[key] for key in keys if key[2] in kinds]

    def total(self, counter: str) -> int:
        """``retried`` or ``refused``, over all processes."""
        return sum(counters[counter] for counters in self._counters.values())

    def lost(self) -> int:
        """Microbatches that were refused on every path. All replicas of stage 0 tell of the same one."""
        told = {(event.step, event.text) for event in self.notable("lost")}
        return max([len(told), *(counters["lost"] for counters in self._counters.values())])

    def ejected(self) -> list[str]:
        """The names of nodes that somebody saw ejected."""
        return sorted({event.about for event in self.notable("ejected") if event.about})


def mean_loss(losses: Mapping[int, float], steps: int) -> float | None:
    """The mean loss of the last steps before ``steps``; None if one of them is not known."""
    last = range(max(0, steps - LAST_LOSSES), steps)
    found = [losses[step] for step in last if step in losses]
    return statistics.fmean(found) if found and len(found) == len(last) else None


def comparable_steps(one: Mapping[int, float], other: Mapping[int, float]) -> int:
    """The most steps of which both know the last ten losses; 0 if there are none."""
    steps = max((step + 1 for step in one.keys() & other.keys()), default=0)
    while steps and (mean_loss(one, steps) is None or mean_loss(other, steps) is None):
        steps -= 1
    return steps
