"""Decisions of an averaging round among siblings. Pure: announcements in, decisions out.

A round averages once the same set of members has been announced by every one of them, and
is committed once all of them hold an aggregate with the same digest.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Members = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What one sibling announced last for this step."""

    members: Members
    attempt: int
    microbatches: int
    parameters: bytes


def differing(me: str, mine: Announcement, announced: Mapping[str, Announcement]) -> list[str]:
    """The members that have not announced exactly my members and my attempt."""
    return [
        peer
        for peer in mine.members
        if peer != me
        and (
            peer not in announced or announced[peer].members != mine.members or announced[peer].attempt != mine.attempt
        )
    ]


def agreed(me: str, mine: Announcement, announced: Mapping[str, Announcement]) -> bool:
    """Whether every member has announced exactly my members and my attempt."""
    return not differing(me, mine, announced)


def settle_members(me: str, live: Sequence[str], announced: Mapping[str, Announcement]) -> Members:
    """The members to announce when announcements have differed for too long.

    The set that most live siblings announced and that has me in it; among equals the larger,
    then the first in order. With no such set, those whose announcement has me in it, and me.
    """
    votes = Counter(announced[peer].members for peer in live if peer in announced and me in announced[peer].members)
    if votes:
        best = min(votes, key=lambda members: (-votes[members], -len(members), members))
        if votes[best] > 1 or len(live) <= 2:
            return best
    friends = [peer for peer in live if peer in announced and me in announced[peer].members]
    return tuple(sorted({me, *friends}))


def joinable(me: str, mine: Announcement, announced: Mapping[str, Announcement], odd: Sequence[str]) -> Members | None:
    """A smaller set that this node can join instead of dropping those who announced it, if there is one.

    Whoever drops a stuck member a moment earlier announces the rest, and differs from everybody for that moment.
    The set must have this node in it and everybody who agrees with this node, so that nobody can be talked out
    of the round; each of its members must have announced it or still agree; the largest one counts.
    """
    agreeing = {peer for peer in mine.members if peer not in odd}
    found = []
    for peer in odd:
        offered = announced[peer].members if peer in announced else ()
        inside = agreeing | {me} <= set(offered) < set(mine.members)
        backed = all(
            other in agreeing or other == me or (other in announced and announced[other].members == offered)
            for other in offered
        )
        if inside and backed and announced[peer].attempt >= mine.attempt:
            found.append(offered)
    return min(found, key=lambda members: (-len(members), members), default=None)


def insisted_on(left_out: Collection[str], mine: Announcement, announced: Mapping[str, Announcement]) -> set[str]:
    """Those whom this node leaves out and most of the other members do not, in this attempt or a later one.

    Whoever lies to one member only is believed by the others; a liar to all is left out by all.
    """
    others = [
        announced[peer].members
        for peer in mine.members
        if peer in announced and peer not in left_out and announced[peer].attempt >= mine.attempt
    ]
    return {peer for peer in left_out if 2 * sum(peer in members for members in others) > len(mine.members) - 1}


def next_attempt(mine: int, announced: Mapping[str, Announcement], members: Members, most: int) -> int:
    """The attempt to announce: siblings that are further on are followed, up to ``most``."""
    others = (announced[peer].attempt for peer in members if peer in announced)
    return max([mine, *(attempt for attempt in others if attempt <= most)])


def strides(members: int) -> list[slice]:
    """Each member's slice of a vector: every entry whose index leaves the member's place as remainder.

    Slices of neighbouring entries would be of one matrix each, and as different as matrices are. These are alike, so
    that each can be judged by itself.
    """
    return [slice(place, None, members) for place in range(members)]


def slice_length(length: int, cut: slice) -> int:
    """How many of ``length`` entries a slice has."""
    return len(range(length)[cut])


def aggregate_digest(aggregate: memoryview, microbatches: int) -> bytes:
    """SHA-256 over the aggregate's bytes and the number of microbatches in it."""
    digest = hashlib.sha256(microbatches.to_bytes(8, "big"))
    digest.update(aggregate)
    return digest.digest()


def majority_digest(digests: Mapping[str, bytes], of: int | None = None) -> bytes | None:
    """The digest that more than half of the members hold, if there is one.

    ``of`` is the number of members, where some have not said what they hold.
    """
    digest, votes = Counter(digests.values()).most_common(1)[0]
    return digest if 2 * votes > (len(digests) if of is None else of) else None
