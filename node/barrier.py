"""When a step is over for a stage, and who holds it up. Pure; time is an argument.

A replica that has END from every live replica of the stage before it knows that no more
work of the step can come. Who is gone, ejected or overdue is excused.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

MIN_LIMIT_SECONDS = 15.0
"""No peer is called overdue before this, however fast the steps are: a laptop may pause for a moment."""
MAD_FACTOR = 8.0
HISTORY = 32


@dataclass(slots=True)
class Deadline:
    """Learns how long a wait usually takes; the limit is median + k * MAD of the last ones."""

    first_limit: float
    """Seconds allowed before anything was learnt."""
    _waits: list[float] = field(default_factory=list)

    def learn(self, seconds: float) -> None:
        """Note a wait that ended well."""
        self._waits.append(seconds)
        del self._waits[:-HISTORY]

    def limit(self) -> float:
        """Seconds after which whoever is still missing is overdue."""
        if len(self._waits) < 3:
            return self.first_limit
        median = statistics.median(self._waits)
        deviation = statistics.median(abs(wait - median) for wait in self._waits)
        return max(MIN_LIMIT_SECONDS, 4 * median + MAD_FACTOR * deviation)


AHEAD_STEPS = 2
"""How much further others have to be before a node believes that they have gone on without it."""


def left_behind(step: int, siblings: Mapping[str, int], upstream: Mapping[str, int]) -> bool:
    """Whether the swarm has gone on without a replica that is still in ``step``.

    Args:
        siblings, upstream: the step that each live replica of this stage and of the one before says that it is in.

    No end of ``step`` comes any more then, so that waiting for it would be for ever. More than half of all have to
    say so, that no liar sends others to fetch a state again and again, and a sibling that can give it.
    """
    told = [*siblings.values(), *upstream.values()]
    ahead = sum(number > step + AHEAD_STEPS for number in told)
    return 2 * ahead > len(told) and any(number > step + AHEAD_STEPS for number in siblings.values())


@dataclass(slots=True)
class EndBarrier:
    """The ENDs of one step."""

    ended: dict[str, float] = field(default_factory=dict)
    """Upstream peer -> the loss of the step that it reports."""
    excused: set[str] = field(default_factory=set)

    def end(self, peer: str, loss: float) -> None:
        """Note an END."""
        self.ended.setdefault(peer, loss)

    def waiting_for(self, upstream: Collection[str]) -> list[str]:
        """Live upstream replicas whose END is missing."""
        return [peer for peer in upstream if peer not in self.ended and peer not in self.excused]

    def passed(self, upstream: Collection[str]) -> bool:
        """Whether no more work can come. Somebody must have ended: an empty stage ends nothing."""
        return bool(self.ended) and not self.waiting_for(upstream)

    def loss(self) -> float:
        """The step's loss: the median of what the upstream replicas report."""
        return statistics.median(self.ended.values())


@dataclass(slots=True)
class Coverage:
    """Which microbatches of a step the replicas of stage 0 have trained, round after round.

    Replicas announce, in rounds, what they have trained. Once all live ones have announced a
    round, what nobody has is dealt out again, by a rule that all of them compute alike, among
    those who have not already failed at it.
    """

    count: int
    announced: dict[str, tuple[int, dict[int, float], frozenset[int]]] = field(default_factory=dict)
    """Peer -> (round, trained microbatch -> loss, failed microbatches)."""

    def announce(self, peer: str, round_number: int, losses: dict[int, float], failed: Collection[int]) -> None:
        """Take an announcement in; older rounds than the known one are ignored."""
        known = self.announced.get(peer)
        if known is None or round_number >= known[0]:
            self.announced[peer] = (round_number, losses, frozenset(failed))

    def waiting_for(self, live: Collection[str], round_number: int) -> list[str]:
        """Live replicas that have not announced this round yet."""
        return [peer for peer in live if peer not in self.announced or self.announced[peer][0] < round_number]

    def losses(self, live: Collection[str]) -> dict[int, float]:
        """Microbatch -> loss over all live replicas; the first peer in order counts where two have it."""
        merged: dict[int, float] = {}
        for peer in sorted(live):
            for microbatch, loss in self.announced.get(peer, (0, {}, frozenset()))[1].items():
                if 0 <= microbatch < self.count:
                    merged.setdefault(microbatch, loss)
        return merged

    def missing(self, live: Collection[str]) -> list[int]:
        """Microbatches that no live replica has trained."""
        done = self.losses(live)
        return [microbatch for microbatch in range(self.count) if microbatch not in done]

    def deal(self, order: list[str]) -> dict[str, list[int]]:
        """Deal the missing microbatches out among the live replicas, given in this step's order.

        A microbatch at which every live replica has failed is dealt to nobody: it is lost.
        """
        dealt: dict[str, list[int]] = {peer: [] for peer in order}
        for microbatch in self.missing(order):
            able = [peer for peer in order if microbatch not in self.announced.get(peer, (0, {}, frozenset()))[2]]
            if able:
                dealt[able[microbatch % len(able)]].append(microbatch)
        return dealt
