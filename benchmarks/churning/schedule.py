"""Which fault happens when, and to whom. Pure; time, step and seed are arguments.

A schedule is a list of faults in order, one a line:

    at step 12, on s1r0, do kill
    at 35.5 s, on s0r2, do freeze for 12 s

Nodes are named by stage and number (``s1r0``); the coordinator is ``coordinator``. ``Cast`` knows who is there, as far
as a schedule can tell, and which fault the swarm can be asked to bear.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

COORDINATOR = "coordinator"


class ScheduleError(ValueError):
    """A schedule that cannot be read, or that no swarm could follow."""


class Kind(StrEnum):
    """What happens to a node."""

    KILL = "kill"
    """SIGKILL: no goodbye. Its p2pd has to go with it."""
    FREEZE = "freeze"
    """SIGSTOP of node and p2pd, and SIGCONT some seconds later: a laptop that is closed and opened."""
    CUT = "cut"
    """SIGSTOP of its p2pd alone, for some seconds: the node runs, and nothing gets through to it or from it."""
    SLOW = "slow"
    """For some seconds its p2pd is stopped most of the time: all that it carries comes late and in bursts."""
    TERM = "term"
    """SIGTERM: it leaves politely."""
    P2PD_DEATH = "p2pd-death"
    """SIGKILL of its p2pd alone."""
    SEED_DEATH = "seed-death"
    """SIGKILL of the coordinator."""
    JOIN = "join"
    """A new node with a new identity."""
    REJOIN = "rejoin"
    """A node that is gone comes back with its state folder."""


ARRIVALS = frozenset({Kind.JOIN, Kind.REJOIN})
LASTING = frozenset({Kind.FREEZE, Kind.CUT, Kind.SLOW})
"""These are over after some seconds, and the node is still there."""
ENDINGS = frozenset({Kind.KILL, Kind.TERM, Kind.P2PD_DEATH, Kind.SEED_DEATH})
"""After these the node's process is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, due once the swarm is at ``step`` and ``second`` seconds have passed; the other one is 0."""

    kind: Kind
    node: str
    step: int = 0
    second: float = 0.0
    length: float = 0.0
    """Seconds that it lasts, if it is one of those that do."""

    def __post_init__(self) -> None:
        """Check it.

        Raises:
            ScheduleError: no node has this name, or one that lasts has no length, or something else has one.
        """
        stage_of(self.node)
        if (self.kind in LASTING) != (self.length > 0):
            raise ScheduleError(f"{self}: {', '.join(sorted(LASTING))}, and nothing else, lasts for some seconds")
        if self.step and self.second:
            raise ScheduleError(f"{self}: a fault is due at a step or at a second, not at both")

    def due(self, step: int, second: float) -> bool:
        """Whether it is time."""
        return self.step <= step and self.second <= second

    def __str__(self) -> str:
        moment = f"{self.second:.1f} s" if self.second else f"step {self.step}"
        return f"at {moment}, on {self.node}, do {self.kind}" + (f" for {self.length:.1f} s" if self.length else "")


Schedule = tuple[Fault, ...]

_NODE = re.compile(r"s(\d{1,3})r(\d{1,3})")
_LINE = re.compile(
    r"at (?:step (?P<step>\d{1,9})|(?P<second>\d{1,6}(?:\.\d)?) s), on (?P<node>\S+), do (?P<kind>[a-z0-9-]+)"
    r"(?: for (?P<length>\d{1,6}(?:\.\d)?) s)?"
)


def node_name(stage: int, number: int) -> str:
    """The name of a node."""
    return f"s{stage}r{number}"


def stage_of(name: str) -> int | None:
    """The stage that a node's name tells; None for the coordinator.

    Raises:
        ScheduleError: it is no such name.
    """
    if name == COORDINATOR:
        return None
    found = _NODE.fullmatch(name)
    if found is None:
        raise ScheduleError(f"{name!r} is no node: write {COORDINATOR}, or stage and number like s1r0")
    return int(found[1])


def parse_fault(line: str) -> Fault:
    """Read one line.

    Raises:
        ScheduleError: it says something else; tells what to write.
    """
    found = _LINE.fullmatch(line.strip())
    if found is None:
        raise ScheduleError(f"{line.strip()!r}: write 'at step 12, on s1r0, do kill', or 'at 9.5 s, ...'")
    if found["kind"] not in set(Kind):
        raise ScheduleError(f"{found['kind']!r} is no fault: there are {', '.join(Kind)}")
    return Fault(
        kind=Kind(found["kind"]),
        node=found["node"],
        step=int(found["step"] or 0),
        second=float(found["second"] or 0.0),
        length=float(found["length"] or 0.0),
    )


def parse_schedule(text: str) -> Schedule:
    """Read a schedule; empty lines and lines after a # are left out.

    Raises:
        ScheduleError: as ``parse_fault``.
    """
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return in_order(parse_fault(line) for line in lines if line)


def in_order(faults: Iterable[Fault]) -> Schedule:
    """In the order in which they are due; those of one moment stay as they are."""
    return tuple(sorted(faults, key=lambda fault: (fault.second, fault.step)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a swarm is asked to bear. Seconds are those of the schedule."""

    least: int = 1
    """Replicas that each stage keeps, neither gone nor frozen or cut off nor new."""
    most_frozen: int = 1
    settle: float = 45.0
    """Seconds before a node that came, or was frozen, counts as one on which its stage can rely."""
    most_away: int = 3
    """How many nodes fewer than at the beginning there may be; never more: the machine is as large as it is."""


@dataclass(slots=True)
class _Presence:
    here: bool
    ready: float
    """When its stage can rely on it."""
    frozen_until: float = 0.0


@dataclass(slots=True)
class Cast:
    """Who is there, as a schedule tells it."""

    rules: Rules = field(default_factory=Rules)
    full: int = 0
    """Nodes at the beginning, without the coordinator."""
    _nodes: dict[str, _Presence] = field(default_factory=dict)

    @classmethod
    def of(cls, stages: int, replicas: int, rules: Rules | None = None) -> Cast:
        """A coordinator and so many replicas of each stage, all there from the beginning."""
        cast = cls(rules=rules or Rules(), full=stages * replicas)
        names = [node_name(stage, number) for stage in range(stages) for number in range(replicas)]
        cast._nodes = {name: _Presence(here=True, ready=0.0) for name in (COORDINATOR, *names)}
        return cast

    def here(self, stage: int | None = None) -> list[str]:
        """The nodes whose process runs, of one stage or all; without the coordinator."""
        return [
            name
            for name, node in self._nodes.items()
            if node.here and name != COORDINATOR and stage in (None, stage_of(name))
        ]

    def away(self) -> list[str]:
        """Those that are gone and could come back; without the coordinator."""
        return [name for name, node in self._nodes.items() if not node.here and name != COORDINATOR]

    def next_name(self, stage: int) -> str:
        """A name that no node of the stage has had."""
        return node_name(stage, sum(stage_of(name) == stage for name in self._nodes))

    def reliable(self, stage: int, now: float) -> list[str]:
        """The replicas of a stage that go on working whatever happens to the others."""
        return [
            name
            for name in self.here(stage)
            if self._nodes[name].ready <= now and self._nodes[name].frozen_until <= now
        ]

    def why_not(self, fault: Fault, now: float) -> str:
        """Why a fault cannot happen, or must not; empty if it may."""
        impossible = self._impossible(fault, now)
        stage = stage_of(fault.node)
        if impossible or stage is None:
            return impossible
        if fault.kind in ARRIVALS:
            return f"{self.full} nodes are there already" if len(self.here()) >= self.full else ""
        left = [name for name in self.reliable(stage, now) if name != fault.node]
        if len(left) < self.rules.least:
            return f"stage {stage} would keep {len(left)} replicas to rely on, {self.rules.least} are needed"
        if fault.kind in ENDINGS and len(self.here()) <= self.full - self.rules.most_away:
            return f"{self.rules.most_away} nodes are gone already"
        return ""

    def _impossible(self, fault: Fault, now: float) -> str:
        node = self._nodes.get(fault.node)
        if (fault.kind is Kind.SEED_DEATH) != (fault.node == COORDINATOR) and fault.kind is not Kind.REJOIN:
            return f"{fault.kind} of {fault.node}: {Kind.SEED_DEATH} is for the coordinator, the others are for nodes"
        if fault.kind is Kind.JOIN:
            return f"{fault.node} has been there before" if node is not None else ""
        if node is None:
            return f"there is no {fault.node}"
        if fault.kind is Kind.REJOIN:
            return f"{fault.node} is there" if node.here else ""
        if not node.here:
            return f"{fault.node} is gone"
        if node.frozen_until > now:
            return f"{fault.node} is frozen"
        frozen = sum(other.frozen_until > now for other in self._nodes.values())
        if fault.kind in LASTING and frozen >= self.rules.most_frozen:
            return f"{frozen} frozen already"
        return ""

    def apply(self, fault: Fault, now: float) -> None:
        """Note that a fault has happened.

        Raises:
            ScheduleError: it cannot, or must not.
        """
        if problem := self.why_not(fault, now):
            raise ScheduleError(f"{fault}: {problem}")
        if fault.kind in ARRIVALS:
            self._nodes[fault.node] = _Presence(here=True, ready=now + self.rules.settle)
            return
        node = self._nodes[fault.node]
        if fault.kind in LASTING:
            node.frozen_until = now + fault.length
            node.ready = now + fault.length + self.rules.settle
        else:
            node.here = False


def check(schedule: Schedule, cast: Cast) -> None:
    """Go through a schedule of seconds.

    Raises:
        ScheduleError: a fault cannot happen when it is due, or breaks a rule.
    """
    for fault in schedule:
        cast.apply(fault, fault.second)


WEIGHTS = {
    Kind.KILL: 4.0,
    Kind.FREEZE: 3.0,
    Kind.CUT: 2.0,
    Kind.SLOW: 1.0,
    Kind.TERM: 2.0,
    Kind.P2PD_DEATH: 2.0,
    Kind.SEED_DEATH: 1.0,
    Kind.JOIN: 2.0,
    Kind.REJOIN: 4.0,
}
"""How often each kind is drawn, where the rules allow it."""

FREEZES = ((2.0, 6.0), (10.0, 18.0), (32.0, 40.0))
"""Seconds: shorter than the silence after which a peer counts as gone, longer, and longer than a lease."""


def draw(seed: int, cast: Cast, *, stages: int, seconds: float, gap: float = 10.0) -> Schedule:
    """Draw a schedule that keeps the rules of the cast, which is used up: a fault about every ``gap`` seconds."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    now = rng.uniform(0.6, 1.4) * gap
    while now < seconds:
        moment = round(now, 1)
        fault = _draw_one(rng, cast, stages, moment)
        if fault is not None:
            cast.apply(fault, moment)
            faults.append(fault)
        now += rng.uniform(0.6, 1.4) * gap
    return tuple(faults)


def _draw_one(rng: random.Random, cast: Cast, stages: int, now: float) -> Fault | None:
    """One of the faults that the swarm may be asked to bear now: first the kind, then the node."""
    open_to: dict[Kind, list[Fault]] = {}
    for fault in _candidates(cast, stages, round(rng.uniform(*rng.choice(FREEZES)), 1)):
        placed = replace(fault, second=now)
        if not cast.why_not(placed, now):
            open_to.setdefault(placed.kind, []).append(placed)
    if not open_to:
        return None
    kinds = sorted(open_to)
    (kind,) = rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])
    return rng.choice(open_to[kind])


def _candidates(cast: Cast, stages: int, length: float) -> Iterable[Fault]:
    for name in cast.here():
        for kind in (Kind.KILL, Kind.TERM, Kind.P2PD_DEATH):
            yield Fault(kind=kind, node=name)
        for kind in sorted(LASTING):
            yield Fault(kind=kind, node=name, length=length)
    yield Fault(kind=Kind.SEED_DEATH, node=COORDINATOR)
    for name in (COORDINATOR, *cast.away()):
        yield Fault(kind=Kind.REJOIN, node=name)
    thin = min(len(cast.here(stage)) for stage in range(stages))
    for stage in range(stages):
        if len(cast.here(stage)) == thin:
            yield Fault(kind=Kind.JOIN, node=cast.next_name(stage))
