"""Runs one swarm of the arena in this process and says what happened to each node."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
import uvloop

from benchmarks.arena.cells import Attacker, Run, attackers
from benchmarks.arena.score import NodeFact, Row, agreed_losses, detection, final_loss, mean_delay, mean_of
from node.simulated_swarm import Member, SimulatedSwarm, simulated
from node.telemetry import Event
from protocol.errors import EjectedError
from protocol.manifest import Manifest
from verifier.ledger import PeerState
from verifier.quorum import neighbouring_stages

AUDIT_RATE = 1 / 64
AUDIT_SUSPICION = 8.0
"""In so short a run nobody earns trust, so every peer is audited at the rate of a newcomer: the product of these
two, one microbatch in eight. The manifest's default is for long runs, in which most peers are trusted."""

MINIMUM_HISTORY = 16
"""Accepted tensors before a fence judges. A node of a stage of eight sees two tensors a step here."""

BARRED = frozenset({PeerState.QUARANTINED, PeerState.EJECTED})


def manifest_of(run: Run) -> Manifest:
    """The manifest of a run: a small Llama of one layer a stage, on the standard library's sources."""
    setting = run.cell.setting
    audited = run.defence == "all"
    return Manifest.from_mapping(
        {
            "name": "arena",
            "model": {
                "width": setting.width,
                "layers": setting.stages,
                "heads": 4,
                "kv_heads": 2,
                "ffn": 2 * setting.width,
                "context": setting.context,
                "seed": run.seed,
            },
            "stages": {"layers_per_stage": [1] * setting.stages, "min_replicas": setting.replicas},
            "training": {
                "steps": setting.steps,
                "learning_rate": 3e-3,
                "warmup_steps": 3,
                "decay_steps": 2 * setting.steps,
                "sequences_per_step": setting.microbatches * setting.sequences_per_microbatch,
                "sequences_per_microbatch": setting.sequences_per_microbatch,
            },
            "data": {"seed": run.seed},
            "verifier": {
                "mode": "off" if run.defence == "off" else "enforce",
                "warmup_steps": setting.warmup_steps,
                "minimum_history": MINIMUM_HISTORY,
                "audit_rate": AUDIT_RATE if audited else 0.0,
                "audit_suspicion": AUDIT_SUSPICION if audited else 1.0,
                "allow_drills": True,
            },
            # All nodes live in this process: nobody's silence means anything, and leases need no renewal.
            "network": {
                "heartbeat_seconds": 300.0,
                "dead_after_seconds": 1200.0,
                "lease_seconds": 120.0,
                "renew_seconds": 60.0,
                "hop_timeout_seconds": 120.0,
            },
        }
    )


def run_swarm(run: Run) -> Row:
    """Train one swarm to its end. Takes seconds to minutes, and all of one core."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sentinel-arena-") as folder:
        return uvloop.run(_run(run, Path(folder)))


class _Noticed(deque[Event]):
    """A node's list of events, without an end, that also calls back."""

    def __init__(self, notice: Callable[[Event], None]) -> None:
        super().__init__()
        self._notice = notice

    def append(self, event: Event) -> None:
        """Note one event."""
        super().append(event)
        self._notice(event)


class _Watch:
    """When honest nodes first barred each peer, and how much it had falsified by then."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.first: dict[tuple[str, str], tuple[int, int]] = {}
        """(kind of event, peer) -> (step, tensors falsified until then)."""

    def add(self, member: Member) -> None:
        """Listen to an honest node, or know an attacker."""
        self.members[member.peer] = member
        if not member.attack:
            member.node.telemetry.events = _Noticed(self._notice)

    def _notice(self, event: Event) -> None:
        if event.kind in ("quarantined", "ejected") and event.peer in self.members:
            drill = self.members[event.peer].node.drill
            self.first.setdefault((event.kind, event.peer), (event.step, drill.attacked if drill is not None else 0))

    def step(self, kind: str, peer: str) -> int | None:
        """When the first honest node saw this."""
        return self.first[kind, peer][0] if (kind, peer) in self.first else None

    def attacked(self, kind: str, peer: str) -> int | None:
        """How much the peer had falsified by then."""
        return self.first[kind, peer][1] if (kind, peer) in self.first else None


async def _run(run: Run, folder: Path) -> Row:
    started, used = time.perf_counter(), time.process_time()
    manifest = manifest_of(run)
    async with simulated(folder, manifest, inline=True) as swarm:
        coordinator = await swarm.coordinate()
        watch = _Watch()
        members = _join(swarm, run, watch)
        await asyncio.gather(*map(_begun, members))
        partners = frozenset(member.peer for member, attacker in members.items() if attacker and attacker.colluding)
        for member, attacker in members.items():
            if attacker is not None and attacker.colluding and member.node.drill is not None:
                member.node.drill.partners = partners - {member.peer}
        # Training goes on without it, and it would ask everybody for their status again and again.
        coordinator.node.stop()
        outcomes = await asyncio.gather(*(member.task for member in members), return_exceptions=True)
    died = [
        {"node": member.name, "attacker": bool(member.attack), "error": repr(outcome)}
        for member, outcome in zip(members, outcomes, strict=True)
        if outcome is not None and not isinstance(outcome, EjectedError)
    ]
    gone = {
        member.peer for member, outcome in zip(members, outcomes, strict=True) if isinstance(outcome, BaseException)
    }
    ejected = {
        member.peer for member, outcome in zip(members, outcomes, strict=True) if isinstance(outcome, EjectedError)
    }
    facts = [_fact(member, list(members), watch, gone, ejected) for member in members]
    return {
        **_row(run, list(members), facts),
        "died": died,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - used,
    }


def _join(swarm: SimulatedSwarm, run: Run, watch: _Watch) -> dict[Member, Attacker | None]:
    setting = run.cell.setting
    bad = {(attacker.stage, attacker.replica): attacker for attacker in attackers(run.cell, run.seed)}
    members: dict[Member, Attacker | None] = {}
    for stage in range(setting.stages):
        for replica in range(setting.replicas):
            attacker = bad.get((stage, replica))
            member = swarm.join(
                f"s{stage}r{replica}",
                stage=stage,
                attack=attacker.drill if attacker is not None else "",
                drill_from=run.cell.attack_from if attacker is not None else 0,
            )
            watch.add(member)
            members[member] = attacker
    return members


async def _begun(member: Member) -> None:
    """Wait until a node has read the manifest, or has ended."""
    invited = asyncio.ensure_future(member.node.invited.wait())
    await asyncio.wait({invited, member.task}, return_when=asyncio.FIRST_COMPLETED)
    invited.cancel()


def _fact(member: Member, members: list[Member], watch: _Watch, gone: set[str], ejected: set[str]) -> NodeFact:
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
