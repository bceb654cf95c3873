"""Whether the siblings that a node still has may go on without those that it has lost.

A replica that is cut off, or was frozen for so long that everybody's lease ran out, sees an empty stage, just as the
last survivor does. The one must not commit a step, since the others go on and the two would have different parameters;
the other must. The neighbouring stages tell them apart: they are connected to every replica of this stage.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection

from protocol.errors import SentinelError

MAX_ASKED = 9
"""Neighbours whose word is asked for; more would hardly change what most of them say."""


def outnumbered(members: Collection[str], alive: Collection[str]) -> bool:
    """Whether ``members`` must leave the step to siblings that live and cannot be reached.

    Of two sets without contact at most one goes on: the larger one, or that of the smallest name where both are of
    one size. ``members`` is never empty.
    """
    if len(members) != len(alive):
        return len(members) < len(alive)
    return min(members) > min(alive)


class Witnesses:
    """Asks the neighbouring stages who of this stage is there."""

    def __init__(
        self,
        *,
        neighbours: Callable[[], list[str]],
        ask: Callable[[str], Awaitable[Collection[str]]],
        needed: bool,
        rng: random.Random | None = None,
    ) -> None:
        """``neighbours()`` are the peers to ask; ``ask(peer)`` returns the peers that it knows to take work, within a
        bounded time. ``needed``: whether there is a neighbouring stage at all; else nobody is asked."""
        self._neighbours = neighbours
        self._ask = ask
        self._needed = needed
        self._rng = rng or random.Random()

    async def alive(self, lost: Collection[str]) -> set[str] | None:
        """Those of ``lost`` that more than half of the neighbours know to be there; None if no neighbour answers."""
        if not self._needed:
            return set()
        neighbours = self._neighbours()
        asked = self._rng.sample(neighbours, min(MAX_ASKED, len(neighbours)))
        answers = await asyncio.gather(*(self._ask(peer) for peer in asked), return_exceptions=True)
        known: list[Collection[str]] = []
        for answer in answers:
            if isinstance(answer, SentinelError):
                continue
            if isinstance(answer, BaseException):
                raise answer
            known.append(answer)
        if not known:
            return None
        votes = Counter(peer for peers in known for peer in set(peers) & set(lost))
        return {peer for peer, count in votes.items() if 2 * count > len(known)}
