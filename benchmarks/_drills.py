"""One drill in a whole swarm over memory: who was caught, when, and what it cost."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from node.simulated_swarm import Member, simulated
from node.telemetry import Event
from protocol.manifest import Manifest

STAGES = 3
LAST_LOSSES = 5
"""The final loss is the mean over the last five steps: single steps differ by their text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillResult:
    """What one swarm showed. Steps are None where it did not happen."""

    attack: str
    steps: int
    loss: float
    first_attack_step: int | None
    quarantined_step: int | None
    quarantined_by: int
    ejected_step: int | None
    exit_code: int | None
    honest_quarantined: int
    honest_ejected: int
    honest_strikes: int
    cleared: int
    retried: int
    lost: int

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def drill_manifest(steps: int, replicas: int) -> Manifest:
    """Three stages of one layer, on the standard library's sources, bf16 on the wire."""
    return Manifest.from_mapping(
        {
            "name": "drills",
            "model": {"width": 64, "layers": STAGES, "heads": 4, "kv_heads": 2, "ffn": 128, "context": 64},
            "stages": {"layers_per_stage": [1] * STAGES, "min_replicas": replicas},
            "training": {
                "steps": steps,
                "learning_rate": 3e-3,
                "warmup_steps": 3,
                "decay_steps": 60,
                "sequences_per_step": 36,
                "sequences_per_microbatch": 2,
            },
            "wire": {"activation_dtype": "bf16", "gradient_dtype": "bf16"},
            "verifier": {"allow_drills": True},
        }
    )


def run_drill(attack: str, *, stage: int = 1, replicas: int = 3, steps: int = 40, from_step: int = 20) -> DrillResult:
    """Train a swarm of three stages in which one replica of ``stage`` plays ``attack`` ("" for nobody)."""
    with tempfile.TemporaryDirectory(prefix="sentinel-drill-") as folder:
        return asyncio.run(_run(Path(folder), attack, stage, replicas, steps, from_step))


async def _run(folder: Path, attack: str, stage: int, replicas: int, steps: int, from_step: int) -> DrillResult:
    async with simulated(folder, drill_manifest(steps, replicas)) as swarm:
        await swarm.coordinate()
        members = []
        for place in range(STAGES):
            for replica in range(replicas):
                attacker = bool(attack) and place == stage and replica == replicas - 1
                members.append(
                    swarm.join(
                        f"s{place}r{replica}",
                        stage=place,
                        attack=attack if attacker else "",
                        drill_from=from_step if attacker else 0,
                    )
                )
        await asyncio.gather(*(member.outcome() for member in members if not member.attack))
        for member in members:
            member.node.stop()  # an attacker that was left behind would wait for the others for ever
        outcomes = await asyncio.gather(*(member.outcome() for member in members))
    codes = {member.peer: getattr(outcome, "exit_code", 0) for member, outcome in zip(members, outcomes, strict=True)}
    return _result(attack, members, codes)


def _result(attack: str, members: list[Member], codes: dict[str, int]) -> DrillResult:
    honest = [member for member in members if not member.attack]
    bad = next((member for member in members if member.attack), None)
    events = [event for member in honest for event in member.node.telemetry.events]
    honest_peers = {member.peer for member in honest}
    bad_peers = {bad.peer} if bad is not None else set()
    losses = max((list(member.node.telemetry.losses) for member in honest), key=len)
    quarantined = _of(events, "quarantined", bad_peers)
    return DrillResult(
        attack=attack or "none",
        steps=len(losses),
        loss=statistics.fmean(loss for _, loss in losses[-LAST_LOSSES:]),
        first_attack_step=bad.node.drill.first_attack_step if bad is not None and bad.node.drill is not None else None,
        quarantined_step=min((event.step for event in quarantined), default=None),
        quarantined_by=len(quarantined),
        ejected_step=min((event.step for event in _of(events, "ejected", bad_peers)), default=None),
        exit_code=codes[bad.peer] if bad is not None else None,
        honest_quarantined=len(_of(events, "quarantined", honest_peers)),
        honest_ejected=len({event.peer for event in _of(events, "ejected", honest_peers)}),
        honest_strikes=len(_of(events, "strike", honest_peers)),
        cleared=sum(event.kind == "cleared" for event in events),
        retried=sum(member.node.telemetry.counters.retried for member in honest),
        lost=max(member.node.telemetry.counters.lost for member in honest),
    )


def _of(events: list[Event], kind: str, peers: set[str]) -> list[Event]:
    return [event for event in events if event.kind == kind and event.peer in peers]
