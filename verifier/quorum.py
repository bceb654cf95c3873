"""When the swarm, and not one peer alone, ejects somebody. Pure functions over peer ids."""

from __future__ import annotations

from collections.abc import Collection, Iterable

MIN_VOTERS = 2
"""One neighbour is one opinion: with fewer than two voters nobody is ejected by accusations."""


LAST_STRIKE = 0.5
"""What must be left of a peer's own strike for it to join others: half of one, so that it counts for some steps."""


def ejects(*, accused: str, accusers: Iterable[str], neighbours: Collection[str]) -> bool:
    """Whether the accusers are a strict majority of those who can judge the accused.

    ``neighbours`` are the live peers of the neighbouring stages: they exchange tensors with the accused,
    nobody else does. Accusers from elsewhere, repeated accusers and the accused itself do not count, so
    that a crowd of fresh identities on a far stage has no say.
    """
    voters = set(neighbours) - {accused}
    if len(voters) < MIN_VOTERS:
        return False
    return 2 * len(voters & set(accusers)) > len(voters)


def seconds(*, strikes: float, others: int, limit: float) -> bool:
    """Whether a peer with some strikes of its own against the accused joins the accusations of others.

    Each other accuser makes one strike of the limit unnecessary, but never the last: nobody accuses on hearsay
    alone. Without this rule a cheat that its first victims have cut off would never collect a majority, since
    those who cut it off also cut off the evidence that the rest would need.
    """
    return others > 0 and strikes >= max(LAST_STRIKE, limit - others)


def neighbouring_stages(stage: int, num_stages: int) -> tuple[int, ...]:
    """The stages before and after ``stage``, in order. Raises ValueError for a stage that does not exist."""
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage {stage} does not exist in a model of {num_stages} stages")
    return tuple(s for s in (stage - 1, stage + 1) if 0 <= s < num_stages)
