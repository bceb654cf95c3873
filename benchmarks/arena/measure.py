"""From the nodes of one swarm to its row: who was found, when, and what it cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from benchmarks.arena.cells import Run
from benchmarks.arena.score import NodeFact, Row, agreed_losses, detection, final_loss, mean_delay, mean_of
from node.simulated_swarm import Member
from node.telemetry import Event
from protocol.errors import EjectedError
from verifier.ledger import PeerState
from verifier.quorum import neighbouring_stages

BARRED = frozenset({PeerState.QUARANTINED, PeerState.EJECTED})


class Noticed(deque[Any]):
    """A node's list of something, without an end, that also calls back."""

    def __init__(self, notice: Callable[[Any], None]) -> None:
        super().__init__()
        self._notice = notice

    def append(self, entry: Any) -> None:
        """Note one entry."""
        super().append(entry)
        self._notice(entry)


class Watch:
    """When honest nodes first barred each peer, and how much it had falsified by then."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.first: dict[tuple[str, str], tuple[int, int]] = {}
        """(kind of event, peer) -> (step, tensors falsified until then)."""

    def add(self, member: Member) -> None:
        """Listen to a node. It may become an attacker later, whose word does not count then."""
        self.members[member.peer] = member
        member.node.telemetry.events = Noticed(lambda event: self._notice(member, event))

    def _notice(self, observer: Member, event: Event) -> None:
        if event.kind in ("quarantined", "ejected") and event.peer in self.members and not observer.attack:
            drill = self.members[event.peer].node.drill
            self.first.setdefault((event.kind, event.peer), (event.step, drill.attacked if drill is not None else 0))

    def step(self, kind: str, peer: str) -> int | None:
        """When the first honest node saw this."""
        return self.first[kind, peer][0] if (kind, peer) in self.first else None

    def attacked(self, kind: str, peer: str) -> int | None:
        """How much the peer had falsified by then."""
        return self.first[kind, peer][1] if (kind, peer) in self.first else None


def row_of(run: Run, members: list[Member], watch: Watch) -> Row:
    """The row of a swarm that has trained its last step."""
    ended = {member: member.task.exception() for member in members if member.task.done()}
    gone = {member.peer for member, error in ended.items() if error is not None}
    ejected = {member.peer for member, error in ended.items() if isinstance(error, EjectedError)}
    died = [
        {"node": member.name, "attacker": bool(member.attack), "error": repr(error)}
        for member, error in ended.items()
        if error is not None and not isinstance(error, EjectedError)
    ]
    facts = [_fact(member, members, watch, gone, ejected) for member in members]
    return {**_row(run, members, facts), "died": died}


def _fact(member: Member, members: list[Member], watch: Watch, gone: set[str], ejected: set[str]) -> NodeFact:
    assert member.stage is not None
    stages = 1 + max(other.stage for other in members if other.stage is not None)
    near = neighbouring_stages(member.stage, stages)
    sides = [
        [
            other.node.guard.ledger.standing(member.peer).state
            for other in members
            if other.stage == stage and other.peer not in gone and other.node.guard is not None
        ]
        for stage in near
    ]
    states = [state for side in sides for state in side]
    drill = member.node.drill
    by = sum(state is PeerState.EJECTED for state in states)
    return NodeFact(
        attacker=bool(member.attack),
        ejected=member.peer in ejected or 2 * by > len(states),
        quarantined_by=sum(state in BARRED for state in states),
        neighbours=len(states),
        barred_on_one_side=any(2 * sum(state in BARRED for state in side) > len(side) > 0 for side in sides),
        first_attack_step=drill.first_attack_step if drill is not None else None,
        # Whom the swarm has ejected nobody has to quarantine any more.
        quarantined_step=earliest(watch.step("quarantined", member.peer), watch.step("ejected", member.peer)),
        ejected_step=watch.step("ejected", member.peer),
        attacked_at_quarantine=earliest(
            watch.attacked("quarantined", member.peer), watch.attacked("ejected", member.peer)
        ),
        attacked_at_ejection=watch.attacked("ejected", member.peer),
    )


def earliest(*values: int | None) -> int | None:
    """The least of those that there are."""
    return min((value for value in values if value is not None), default=None)


def _row(run: Run, members: list[Member], facts: list[NodeFact]) -> Row:
    cell = run.cell
    honest = [member for member in members if not member.attack]
    bad = [fact for fact in facts if fact.attacker]
    found = detection(facts, found=lambda fact: fact.detected)
    expelled = detection(facts, found=lambda fact: fact.ejected)
    isolated = detection(facts, found=lambda fact: fact.isolated)
    losses = agreed_losses([list(member.node.telemetry.losses) for member in honest if member.stage == 0])
    counters = [member.node.telemetry.counters for member in honest]
    trained = sum(counter.microbatches for counter in counters)
    honest_peers = {member.peer for member in honest}
    struck = sum(
        event.kind == "strike" and event.peer in honest_peers
        for member in honest
        for event in member.node.telemetry.events
    )
    computed = _seconds(honest, "forward") + _seconds(honest, "backward")
    return {
        "suite": cell.suite,
        "cell": cell.name,
        "attack": cell.attack,
        "direction": cell.direction,
        "stage_role": cell.stage_role,
        "defence": run.defence,
        "seed": run.seed,
        "precision": found.precision,
        "recall": found.recall,
        "f1": found.f1,
        "precision_ejected": expelled.precision,
        "recall_ejected": expelled.recall,
        "f1_ejected": expelled.f1,
        "precision_isolated": isolated.precision,
        "recall_isolated": isolated.recall,
        "f1_isolated": isolated.f1,
        "steps_to_quarantine": mean_delay(facts, lambda fact: fact.quarantined_step),
        "steps_to_ejection": mean_delay(facts, lambda fact: fact.ejected_step),
        "attacked_microbatches_to_quarantine": mean_of([fact.attacked_at_quarantine for fact in bad]),
        "attacked_microbatches_to_ejection": mean_of([fact.attacked_at_ejection for fact in bad]),
        # A microbatch brings a node a tensor from each side.
        "honest_refused_share": struck / (2 * trained) if trained else 0.0,
        "loss": final_loss(losses),
        "losses": [round(loss, 4) for loss in losses],
        "attackers": len(bad),
        "attacked": sum(fact.first_attack_step is not None for fact in bad),
        "ejected": sum(fact.ejected for fact in bad),
        "quarantined": sum(fact.detected and not fact.ejected for fact in bad),
        "honest_ejected": sum(fact.ejected for fact in facts if not fact.attacker),
        "honest_detected": sum(fact.detected for fact in facts if not fact.attacker),
        "audits": sum(counter.audits for counter in counters),
        "extra_compute_share": _seconds(honest, "audit") / computed if computed else 0.0,
        "check_share": _seconds(honest, "check") / computed if computed else 0.0,
        "bytes_out": sum(member.node.telemetry.counters.bytes_out for member in members),
        "microbatches_retried": sum(counter.retried for counter in counters),
        "microbatches_lost": max((member.node.telemetry.counters.lost for member in honest), default=0),
    }


def _seconds(members: list[Member], phase: str) -> float:
    values = (
        member.node.metrics.registry.get_sample_value("sentinel_phase_seconds_total", {"phase": phase})
        for member in members
    )
    return sum(value or 0.0 for value in values)
