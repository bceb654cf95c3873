"""When the swarm, and not one peer alone, ejects somebody. Pure functions over peer ids."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

MIN_VOTERS = 2
"""One voter is one opinion: nobody is ejected on a single word, be it an accusation or an audit."""

JURY_SIZE = 15
"""Most jurors of an audit. Up to 16 replicas the whole stage is the jury, and more would only cost more."""

LEAST_JURORS = 2
"""Siblings that can judge without help from the neighbouring stages: as many as ``MIN_VOTERS`` asks for."""

_JURY_DOMAIN = b"sentinel:jury"

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


def jury(
    *,
    draw: bytes,
    accused: str,
    replicas: Collection[str],
    reserves: Collection[str] = (),
    size: int = JURY_SIZE,
    least: int = LEAST_JURORS,
) -> tuple[str, ...]:
    """Who audits the accused, in the drawn order: at most ``size`` of its siblings, sorted by a hash of draw and peer.

    ``replicas`` are the live replicas of the accused's stage, ``reserves`` those of the neighbouring stages. Siblings
    hold the same parameters and can re-execute at once. If there are fewer than ``least`` of them, reserves fill the
    jury up to ``least`` + 1, if there are so many: three jurors are the smallest jury in which a majority outvotes a
    liar.

    Nobody can choose the jury: it follows from the accused, from who is alive, and from ``draw``, which must be fixed
    before anybody can know it and be the only one for a case (whoever may pick among draws picks the jury). All who
    agree on these three get the same jury, whatever the order in which they know the peers.

    A coalition below half of a stage cannot convict an honest sibling, nor acquit a guilty one, as long as the whole
    stage is the jury. In a larger stage it is a matter of luck: 9 liars among 24 replicas (37.5 %) are a majority of
    the 15 who are drawn for an honest sibling in 7 draws of 100, 37 among 100 in 14. A larger ``size`` makes it rarer.

    Raises ValueError unless 1 <= least < size.
    """
    if not 1 <= least < size:
        raise ValueError(
            f"a jury of at most {size} cannot be filled up from {least} siblings: choose 1 <= least < size"
        )

    def drawn(peer: str) -> tuple[bytes, str]:
        return hashlib.sha256(_JURY_DOMAIN + draw + peer.encode()).digest(), peer

    siblings = set(replicas) - {accused}
    jurors = sorted(siblings, key=drawn)[:size]
    if len(jurors) < least:
        others = sorted(set(reserves) - siblings - {accused}, key=drawn)
        jurors += others[: least + 1 - len(jurors)]
    return tuple(jurors)


def convicts(*, accused: str, jury: Sequence[str], guilty: Collection[str], live: Collection[str]) -> bool:
    """Whether the jurors who found the accused guilty are a strict majority, and at least ``MIN_VOTERS``.

    The majority is one of the jurors who are live or have voted. A juror that never answered and has left must not
    acquit by its absence; but one that voted and left still counts on both sides, else two liars of five could vote,
    see two honest jurors leave, or leave themselves, and be a majority of the three who remain. Votes of others, and
    the accused's own, do not count, so that neither a crowd of fresh identities nor the neighbours of an honest
    peer can convict it. Who stays silent acquits: a coalition below half can do neither.
    """
    jurors = set(jury) - {accused}
    votes = jurors & set(guilty)
    bench = votes | (jurors & set(live))
    return len(votes) >= MIN_VOTERS and 2 * len(votes) > len(bench)


def neighbouring_stages(stage: int, num_stages: int) -> tuple[int, ...]:
    """The stages before and after ``stage``, in order. Raises ValueError for a stage that does not exist."""
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage {stage} does not exist in a model of {num_stages} stages")
    return tuple(s for s in (stage - 1, stage + 1) if 0 <= s < num_stages)
