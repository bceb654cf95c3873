"""Whose state a joiner takes, of which step, and whose word counts. Pure: answers in, decisions out.

A joiner trusts no sibling. It takes the step that most of them have reached, the parameters that most of them had
then, and of the descriptions with these parameters the one that most donors give.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from node.rounds import majority_digest
from protocol.errors import LocalError
from protocol.messages import SnapshotAnswer

MAX_DONORS = 3
"""More would load more of the stage, and a joiner's own link is seldom quicker than three others."""


class StateError(LocalError):
    """The state of this stage could not be got now. The text says why, and what helps if anything does."""


class NoDonorError(StateError):
    """No sibling is there, or none answers."""


class DonorsBusyError(StateError):
    """All siblings are giving their state to others."""


class DisagreementError(StateError):
    """What the siblings say of one step does not fit together, or this node's own result differs from theirs."""


class LostPaceError(StateError):
    """Training goes on faster than this node can fetch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a sibling says of itself."""

    peer: str
    step: int
    """The step that it is in."""
    frozen: int | None = None
    """The step of the snapshot that it keeps for somebody."""
    parameters: bytes = b""
    """Digest of its parameters before the step that it was asked about; empty if it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Whom to ask for the state before which step."""

    step: int
    donors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The description that counts."""

    answer: SnapshotAnswer
    donors: tuple[str, ...]
    """Who gives exactly this."""
    outvoted: tuple[str, ...]
    """Donors that say something else."""


def reached(standings: Sequence[Standing]) -> int:
    """The highest step that more than half of the siblings have reached. One that boasts cannot move it."""
    if not standings:
        raise ValueError("nobody has a standing")
    return sorted(standing.step for standing in standings)[(len(standings) - 1) // 2]


def choose(
    standings: Sequence[Standing], *, ahead: int, avoid: Collection[str], rng: random.Random, most: int = MAX_DONORS
) -> Plan:
    """Whom to ask for which step.

    Args:
        ahead: how many steps to lead: after donors have moved on while they were asked.
        avoid: peers that have failed before; they come last.

    Raises:
        NoDonorError: nobody answers.
        DonorsBusyError: everybody keeps another step for somebody else.
    """
    if not standings:
        raise NoDonorError("no sibling says how far it is; waiting for one that answers")
    most_reached = reached(standings)
    # Siblings end a step within moments of each other. Who is a little behind reaches this step at once, and if the
    # one that is in front lies, then it costs a step's time.
    newest = min(most_reached + 1, max(standing.step for standing in standings))
    step = newest + ahead
    free = [standing for standing in standings if _can_give(standing, step)]
    if not free:
        # Whoever missed nothing since another's snapshot was taken can use it as well.
        kept = Counter(each.frozen for each in standings if each.frozen is not None and each.frozen <= most_reached)
        if not kept:
            raise DonorsBusyError(f"all {len(standings)} siblings are giving their state to others; waiting for a turn")
        step = max(kept, key=lambda frozen: (kept[frozen], frozen))
        free = [standing for standing in standings if standing.frozen == step]
    order = sorted(free, key=lambda standing: (standing.peer in avoid, standing.frozen != step, rng.random()))
    return Plan(step=step, donors=tuple(standing.peer for standing in order[:most]))


def _can_give(standing: Standing, step: int) -> bool:
    return standing.frozen == step or (standing.frozen is None and standing.step <= step)


def standing_digest(votes: Mapping[str, bytes]) -> bytes | None:
    """What the stage's parameters were, by the siblings' word; None if nobody says.

    Without a majority the smaller digest counts, as it does when they average.
    """
    told = {peer: digest for peer, digest in votes.items() if digest}
    if not told:
        return None
    return majority_digest(told) or min(told.values())


def contradicts(votes: Mapping[str, bytes], digest: bytes) -> bool:
    """Whether the siblings' word is against this digest: that of most, or of all where no majority is."""
    told = {peer: vote for peer, vote in votes.items() if vote}
    if not told:
        return False
    standing = majority_digest(told)
    return digest != standing if standing is not None else digest not in told.values()


def agree(answers: Mapping[str, SnapshotAnswer], votes: Mapping[str, bytes], *, avoid: Collection[str]) -> Agreement:
    """Which description counts. Siblings hold the same bits, so honest descriptions of one step are equal.

    Args:
        answers: what each donor describes; all of one step.
        votes: the digest of the parameters before that step, by each sibling's word.

    Raises:
        NoDonorError: nobody describes anything.
        DisagreementError: nobody describes the parameters that most siblings had.
    """
    if not answers:
        raise NoDonorError("no sibling gives its state; waiting for one that does")
    step = next(iter(answers.values())).step
    standing = standing_digest({**votes, **{peer: answer.parameters for peer, answer in answers.items()}})
    groups: dict[SnapshotAnswer, list[str]] = {}
    for peer, answer in answers.items():
        if answer.parameters == standing:
            groups.setdefault(answer, []).append(peer)
    if not groups:
        raise DisagreementError(f"the donors' parameters of step {step} are not those of most siblings; asking others")
    best = min(
        groups, key=lambda answer: (-len(groups[answer]), sum(peer in avoid for peer in groups[answer]), answer.chunks)
    )
    donors = tuple(groups[best])
    return Agreement(answer=best, donors=donors, outvoted=tuple(peer for peer in answers if peer not in donors))
