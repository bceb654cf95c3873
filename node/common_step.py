"""The step with which a swarm begins, or goes on after all of it was stopped. Pure: claims in, a decision out.

A node that waits for the start claims the step of its newest checkpoint of the stage, and the digest of the parameters
in it: its *offer*. Without a checkpoint it offers step 0, whose parameters follow from the manifest. The common step is
the newest one that every stage can supply; whoever offers a later one looks whether it has an older checkpoint as well.
All nodes decide this from the same claims, so they decide alike; where their views differ, siblings notice when they
compare digests before they average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from protocol.records import Claim, NodeState

TRAINS = frozenset({NodeState.TRAINING, NodeState.PROBATION})
"""States of a node whose swarm has begun."""
OFFERS = TRAINS | {NodeState.WAITING}
"""States in which the step in a claim is one that its owner can go on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the swarm can begin."""

    step: int
    founders: tuple[frozenset[str], ...]
    """By stage, the peers that hold its parameters of this step, all the same ones."""
    lacking: tuple[int, ...] = ()
    """Stages of which nobody has a checkpoint though others have: the swarm waits for them."""

    @property
    def possible(self) -> bool:
        """Whether every stage can supply the step."""
        return not self.lacking and all(self.founders)


def meet(claims: Iterable[Claim], num_stages: int) -> Meeting:
    """The common step of those who wait, and of those who train already.

    A stage can supply the newest step that at least half of its checkpoints reach: one peer cannot move a stage of
    three or more. If nobody has a checkpoint of some stage, the swarm begins anew where most nodes have none at all,
    and waits otherwise.
    """
    offers: list[list[Claim]] = [[] for _ in range(num_stages)]
    for claim in claims:
        if claim.state in OFFERS and claim.stage < num_stages:
            offers[claim.stage].append(claim)
    held = [[claim for claim in stage if claim.step > 0] for stage in offers]
    lacking = tuple(stage for stage, holders in enumerate(held) if not holders)
    if not lacking:
        step = min(_newest(claim.step for claim in holders) for holders in held)
    else:
        step = 0
        if 2 * sum(map(len, held)) < sum(map(len, offers)) or not any(held):
            lacking = ()
    return Meeting(step=step, founders=tuple(_founders(stage, step) for stage in offers), lacking=lacking)


def under_way(claims: Iterable[Claim], num_stages: int, *, me: str) -> int | None:
    """The step that a swarm is in which trains without this node; None if not every stage has somebody who trains.

    The newest step that anybody claims: claims lag behind, and whoever believes too new a one merely asks a sibling.
    """
    training = [claim for claim in claims if claim.state in TRAINS and claim.peer != me]
    if len({claim.stage for claim in training if claim.stage < num_stages}) < num_stages:
        return None
    return max(claim.step for claim in training)


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    """Who takes a stage up again that has lost its last replica."""

    heirs: frozenset[str]
    """Those with the newest checkpoint of it, all the same one."""
    step: int
    """Of that checkpoint."""
    late: bool
    """Whether the others are further than that, so that updates of this stage are lost."""


def succession(claims: Iterable[Claim], num_stages: int, stage: int, *, farthest: int) -> Succession | None:
    """Who can take up a stage that has lost its last replica, where all other stages stand still for lack of it.

    A step ends in one stage after the other, so theirs may be the one before or after that of the newest checkpoint. If
    it is one further, this stage misses one update. Where they are further still, by at most ``farthest`` steps, the
    stage misses so many, and its heirs go on in the step in which the others stand.
    """
    there = list(claims)
    waiting = [claim for claim in there if claim.stage == stage and claim.state is NodeState.WAITING and claim.step > 0]
    reached = [
        max((claim.step for claim in there if claim.stage == place and claim.state in TRAINS), default=None)
        for place in range(num_stages)
    ]
    if not waiting or reached.pop(stage) is not None or not reached:
        return None
    others = [step for step in reached if step is not None]
    step = _newest(claim.step for claim in waiting)
    if len(others) < len(reached) or step > min(others) + 1 or max(others) - step > max(1, farthest):
        return None
    return Succession(heirs=_founders(waiting, step), step=step, late=any(other > step + 1 for other in others))


def newest_at_most(steps: Collection[int], limit: int) -> int | None:
    """The newest of these steps that is not past a limit."""
    return max((step for step in steps if step <= limit), default=None)


def _newest(steps: Iterable[int]) -> int:
    """The newest step that at least half of these reach."""
    ordered = sorted(steps)
    return ordered[len(ordered) // 2]


def _founders(offers: Sequence[Claim], step: int) -> frozenset[str]:
    """Who holds the parameters of a step, of those whose digests differ the largest group; before equal ones, the
    group that has begun, then the smaller digest."""
    there = [claim for claim in offers if claim.step == step]
    if not there:
        return frozenset()
    # Before the first step everybody has the same parameters, whether or not the claim names their digest.
    digests = Counter(claim.digest if step else b"" for claim in there)
    begun = {claim.digest for claim in there if claim.state in TRAINS}
    digest = min(digests, key=lambda digest: (-digests[digest], digest not in begun, digest))
    return frozenset(claim.peer for claim in there if not step or claim.digest == digest)
