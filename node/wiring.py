"""Who sends to whom in a step. Pure functions of swarm, step and the replicas of each stage.

Within a step the wiring is fixed, and it is drawn anew for the next one: a bad replica so
touches few of its neighbours' gradients in any one step, and nobody chooses its neighbours.
The draw lays both stages along the unit interval, each replica as long as its share of the
capacity, in an order given by a hash; whoever overlaps is wired. That gives at most n + m - 1
pairs, and each downstream replica exactly its share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.records import Claim

MAX_SHARE_FACTOR = 3.0
"""No replica's capacity counts for more than this many times the median of its stage: a node that
claims absurd speed must not draw all the work to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One downstream replica of an upstream one, with the part of its work that goes there."""

    peer: str
    share: float


def _draw(swarm: bytes, step: int, stage: int, peer: str) -> bytes:
    seed = b"sentinel:wiring" + swarm + step.to_bytes(8, "big") + stage.to_bytes(4, "big")
    return hashlib.sha256(seed + peer.encode()).digest()


def shuffled(swarm: bytes, step: int, stage: int, peers: Sequence[str]) -> list[str]:
    """The peers of a stage in this step's order, the same for everybody."""
    return sorted(peers, key=lambda peer: _draw(swarm, step, stage, peer))


def shares(claims: Sequence[Claim]) -> dict[str, float]:
    """Each replica's part of its stage's work, by capped capacity; they sum to 1."""
    capped = capped_capacities(claims)
    total = sum(capped.values())
    return {peer: capacity / total for peer, capacity in capped.items()}


def capped_capacities(claims: Sequence[Claim]) -> dict[str, float]:
    """What each claim's capacity counts for: no more than ``MAX_SHARE_FACTOR`` times the lower median of them."""
    if not claims:
        return {}
    capacities = sorted(claim.capacity for claim in claims)
    cap = MAX_SHARE_FACTOR * capacities[(len(capacities) - 1) // 2]
    return {claim.peer: min(claim.capacity, cap) for claim in claims}


def wire(
    swarm: bytes, step: int, stage: int, upstream: Mapping[str, float], downstream: Mapping[str, float]
) -> dict[str, tuple[Wire, ...]]:
    """Wire the replicas of ``stage`` to those of the next one.

    Args:
        upstream: peer -> share of the stage's work; shares sum to 1.
        downstream: the same of stage + 1.

    Returns:
        For each upstream peer its wires, whose shares sum to 1; empty if nobody is downstream.
    """
    if not downstream:
        return {peer: () for peer in upstream}
    wires: dict[str, tuple[Wire, ...]] = {}
    targets = shuffled(swarm, step, stage + 1, list(downstream))
    target_index, used = 0, 0.0
    for peer in shuffled(swarm, step, stage, list(upstream)):
        left = upstream[peer]
        parts: dict[str, float] = {}
        while left > 1e-9:
            target = targets[target_index]
            room = downstream[target] - used
            last = target_index == len(targets) - 1
            taken = left if last else min(left, room)
            if taken > 1e-9:
                parts[target] = taken
            left -= taken
            used += taken
            if used >= downstream[target] - 1e-9 and not last:
                target_index, used = target_index + 1, 0.0
        # A share too small to be cut goes to whoever is next; what rounding left over is spread.
        parts = parts or {targets[target_index]: 1.0}
        total = sum(parts.values())
        wires[peer] = tuple(Wire(peer=target, share=part / total) for target, part in parts.items())
    return wires


def assign_microbatches(swarm: bytes, step: int, count: int, stage0: Mapping[str, float]) -> dict[str, list[int]]:
    """Share a step's microbatches among the replicas of stage 0, by largest remainder."""
    if not stage0:
        return {}
    peers = shuffled(swarm, step, 0, list(stage0))
    exact = {peer: stage0[peer] * count for peer in peers}
    given = {peer: int(exact[peer]) for peer in peers}
    remainders = sorted(peers, key=lambda peer: (given[peer] - exact[peer], peers.index(peer)))
    for peer in remainders[: count - sum(given.values())]:
        given[peer] += 1
    assigned: dict[str, list[int]] = {}
    start = 0
    for peer in peers:
        assigned[peer] = list(range(start, start + given[peer]))
        start += given[peer]
    return assigned


class Dealer:
    """Deals one node's microbatches over its wires so that each gets its share, evenly in time."""

    def __init__(self, wires: Sequence[Wire]) -> None:
        self._wires = list(wires)
        self._dealt = dict.fromkeys((wire.peer for wire in wires), 0)
        self._total = 0

    def order(self, candidates: Sequence[str]) -> list[str]:
        """The peers to try for the next microbatch: the one furthest behind its share first.

        ``candidates`` are all live downstream replicas; those not wired come last, as given.
        """
        behind = sorted(
            (wire for wire in self._wires if wire.peer in candidates),
            key=lambda wire: self._dealt[wire.peer] - wire.share * (self._total + 1),
        )
        first = [wire.peer for wire in behind]
        return first + [peer for peer in candidates if peer not in first]

    def deal(self, peer: str) -> None:
        """Note that a microbatch goes to this peer first."""
        self._total += 1
        if peer in self._dealt:
            self._dealt[peer] += 1
