"""Which stage a node claims. Pure: the view's claims, this node's means and a random source come in.

Two rules spread nodes that start at the same moment evenly. A node picks a stage with the
least capacity, at random among equals. After its claim has had time to be seen it looks
again: while its stage is above its fair share and another is below, the nodes of the
crowded stage are ranked by a hash that all of them compute alike, and the last ones move.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

from node.wiring import capped_capacities
from protocol.records import Claim


def stage_loads(claims: Sequence[Claim], num_stages: int) -> list[float]:
    """Total capacity of each stage. One claim of absurd speed counts little: it must not keep others off its stage."""
    counted = capped_capacities(claims)
    loads = [0.0] * num_stages
    for claim in claims:
        if claim.stage < num_stages:
            loads[claim.stage] += counted[claim.peer]
    return loads


def choose_stage(
    claims: Sequence[Claim],
    *,
    num_stages: int,
    fits: Callable[[int], bool],
    rng: random.Random,
) -> int | None:
    """The stage with the least claimed capacity that fits this node's memory, or None if none fits."""
    loads = stage_loads(claims, num_stages)
    fitting = [stage for stage in range(num_stages) if fits(stage)]
    if not fitting:
        return None
    least = min(loads[stage] for stage in fitting)
    return rng.choice([stage for stage in fitting if loads[stage] == least])


def rank(swarm: bytes, stage: int, peer: str) -> bytes:
    """Order of the peers of a stage on which everybody agrees and which nobody can choose cheaply."""
    return hashlib.sha256(b"sentinel:placement" + swarm + stage.to_bytes(4, "big") + peer.encode()).digest()


def should_move(
    claims: Sequence[Claim],
    *,
    me: str,
    swarm: bytes,
    num_stages: int,
    fits: Callable[[int], bool],
) -> int | None:
    """The stage that this node should move to before training has begun, or None to stay.

    ``claims`` includes this node's own. Counts replicas rather than capacity: capacities are
    only measured once a node has trained. Each surplus replica of a crowded stage is matched
    with one vacancy; both are listed in an order that every node computes alike, so no two
    nodes with the same view move to the same vacancy. Pinned nodes never move.
    """
    mine = next((claim for claim in claims if claim.peer == me), None)
    if mine is None:
        return None
    members: dict[int, list[str]] = {stage: [] for stage in range(num_stages)}
    pinned = {claim.peer for claim in claims if claim.pinned}
    for claim in claims:
        if claim.stage < num_stages:
            members[claim.stage].append(claim.peer)
    # Those who may move fill the stages up evenly around those who are pinned. Among equals, the stage
    # that holds most already gets one more, so that few move.
    target = {stage: sum(peer in pinned for peer in peers) for stage, peers in members.items()}
    for _ in range(sum(len(peers) for peers in members.values()) - sum(target.values())):
        target[min(members, key=lambda stage: (target[stage], -len(members[stage]), stage))] += 1
    surplus: list[str] = []
    vacancies: list[int] = []
    for stage in range(num_stages):
        ranked = sorted(members[stage], key=lambda peer: (peer not in pinned, rank(swarm, stage, peer)))
        surplus.extend(peer for peer in ranked[target[stage] :] if peer not in pinned)
        vacancies.extend([stage] * max(0, target[stage] - len(ranked)))
    if me not in surplus:
        return None
    place = surplus.index(me)
    if place >= len(vacancies) or not fits(vacancies[place]):
        return None
    return vacancies[place]
