"""The standing of each peer: strikes, trust and state, as a table of transitions.

Theory of operation
-------------------
Two things happen to a peer. An accepted microbatch is a *credit*: it raises trust, and enough of them end
probation. A breach is a *strike*: it halves trust and adds to a count that leaks as steps pass, so that rare
false alarms vanish and repeated ones do not. The count alone moves a peer towards quarantine:

    probation --earned--> trusted --struck--> suspect --condemned--> quarantined --released--> probation
        \\------struck------------------------>/  |
    trusted <---------------cleared-------------/   (or back to probation, if it had not earned trust yet)

*Quarantine* is this node's own decision, at once: no work to or from the peer. *Ejection* is the swarm's: it
may strike any peer in any state, has an end on the clock, and leads back to probation with a clean count and
less trust than a stranger has.

What must survive a restart leaves by ``export`` and comes back by ``restore``; else a node that barred a cheat
would take it back by being restarted.

Two rules keep this file honest: every change of state goes through ``TRANSITIONS``, and the ledger has no
clock; steps and ``now`` (seconds) are arguments.

In mode ``observe`` everything is counted and reported with ``would=True``, and nobody is barred. In mode
``off`` strikes and ejections do nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from verifier.config import CheckerConfig
from verifier.verdicts import STATISTICS, Reason

STRANGER_TRUST = 0.5
"""Trust of a peer nobody has dealt with."""

RETURN_TRUST = 0.25
"""Trust after a quarantine or an ejection has ended."""

TRUST_GAIN = 1 / 64
"""Share of the distance to full trust that one credit covers: about 45 of them halve it."""

TRUST_LOSS = 0.5
"""Factor on trust for one strike of weight 1."""

NO_STRIKES = 1e-9
"""Below this a count is zero: subtracting 0.1 ten times from 1.0 leaves 1e-16."""

MAX_PEER_CHARS = 64
"""Longest peer id in a saved standing; those of Ed25519 keys have 52 characters."""

MAX_COUNT = 2**63 - 1
"""Largest step and number of credits in a saved standing: what a signed 64-bit integer holds."""

REMEDY = "set the saved verdicts aside and start without them"


class PeerState(StrEnum):
    """How this node treats a peer."""

    PROBATION = "probation"
    TRUSTED = "trusted"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"
    EJECTED = "ejected"


class PeerEvent(StrEnum):
    """What moves a peer from one state to another."""

    EARNED = "earned"
    """Enough credits for the end of probation."""

    STRUCK = "struck"
    """A strike that leaves the count below the limit."""

    CONDEMNED = "condemned"
    """A strike that brings the count to the limit."""

    CLEARED = "cleared"
    """All strikes leaked away from a peer that had earned trust."""

    CLEARED_EARLY = "cleared_early"
    """All strikes leaked away from a peer that had not."""

    RELEASED = "released"
    """The quarantine ended."""

    EJECTED = "ejected"
    """The swarm ejected the peer."""

    EXPIRED = "expired"
    """The ejection ended."""


TRANSITIONS: dict[tuple[PeerState, PeerEvent], PeerState] = {
    (PeerState.PROBATION, PeerEvent.EARNED): PeerState.TRUSTED,
    (PeerState.PROBATION, PeerEvent.STRUCK): PeerState.SUSPECT,
    (PeerState.PROBATION, PeerEvent.CONDEMNED): PeerState.QUARANTINED,
    (PeerState.PROBATION, PeerEvent.EJECTED): PeerState.EJECTED,
    (PeerState.TRUSTED, PeerEvent.STRUCK): PeerState.SUSPECT,
    (PeerState.TRUSTED, PeerEvent.CONDEMNED): PeerState.QUARANTINED,
    (PeerState.TRUSTED, PeerEvent.EJECTED): PeerState.EJECTED,
    (PeerState.SUSPECT, PeerEvent.STRUCK): PeerState.SUSPECT,
    (PeerState.SUSPECT, PeerEvent.CONDEMNED): PeerState.QUARANTINED,
    (PeerState.SUSPECT, PeerEvent.CLEARED): PeerState.TRUSTED,
    (PeerState.SUSPECT, PeerEvent.CLEARED_EARLY): PeerState.PROBATION,
    (PeerState.SUSPECT, PeerEvent.EJECTED): PeerState.EJECTED,
    (PeerState.QUARANTINED, PeerEvent.CONDEMNED): PeerState.QUARANTINED,
    (PeerState.QUARANTINED, PeerEvent.RELEASED): PeerState.PROBATION,
    (PeerState.QUARANTINED, PeerEvent.EJECTED): PeerState.EJECTED,
    (PeerState.EJECTED, PeerEvent.EJECTED): PeerState.EJECTED,
    (PeerState.EJECTED, PeerEvent.EXPIRED): PeerState.PROBATION,
}

BARRED = frozenset({PeerState.QUARANTINED, PeerState.EJECTED})
"""States in which a peer gets no work and none is taken from it."""

_FORGET_ORDER = {
    PeerState.PROBATION: 0,
    PeerState.TRUSTED: 0,
    PeerState.SUSPECT: 1,
    PeerState.QUARANTINED: 2,
    PeerState.EJECTED: 3,
}
"""Whom a full ledger forgets first; among equals the one least recently touched. Offenders go last, else a
crowd of fresh identities would wash them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is known of one peer."""

    state: PeerState = PeerState.PROBATION
    trust: float = STRANGER_TRUST
    """In [0, 1]; 0 while quarantined or ejected."""

    strikes: float = 0.0
    reason: Reason | None = None
    """The latest strike's or the ejection's."""

    until: float | None = None
    """End of an ejection, on the clock of ``now``, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingChanged:
    """A peer passed from one state to another."""

    peer: str
    before: PeerState
    after: PeerState
    event: PeerEvent
    reason: Reason | None = None
    until: float | None = None
    would: bool = False
    """True in mode ``observe``: nobody acts on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStanding:
    """What is known of one peer, as it survives a restart. Raises ValueError with the remedy for impossible values."""

    peer: str
    state: PeerState
    trust: float
    """In [0, 1], also while barred: what forgiving would give back."""

    strikes: float
    credits: int
    """Microbatches that went well since the peer was last on probation."""

    reason: Reason | None = None
    until: float | None = None
    """End of an ejection in seconds, on a clock that goes on between runs."""

    quarantined_at: int = 0
    """Step of the quarantine, so that one that ends by itself goes on where it was."""

    def __post_init__(self) -> None:
        offender = self.state not in (PeerState.PROBATION, PeerState.TRUSTED)
        until = self.until
        for wrong, problem in (
            (not 0 < len(self.peer) <= MAX_PEER_CHARS, f"a peer id of {len(self.peer)} characters"),
            (not 0.0 <= self.trust <= 1.0, f"a trust of {self.trust}"),
            (not (math.isfinite(self.strikes) and self.strikes >= 0.0), f"a strike count of {self.strikes}"),
            (not 0 <= self.credits <= MAX_COUNT, f"{self.credits} credits"),
            (not 0 <= self.quarantined_at <= MAX_COUNT, f"a quarantine since step {self.quarantined_at}"),
            ((self.state is PeerState.EJECTED) != (until is not None), f"the state {self.state} with end {until}"),
            (until is not None and not (math.isfinite(until) and until > 0.0), f"an ejection until {until}"),
            (offender and self.reason is None, f"the state {self.state} for no reason"),
            (not offender and self.strikes > 0.0, f"{self.strikes} strikes in the state {self.state}"),
        ):
            if wrong:
                raise ValueError(f"a saved standing has {problem}; {REMEDY}")


@dataclass(slots=True, kw_only=True)
class _Entry:
    state: PeerState = PeerState.PROBATION
    trust: float = STRANGER_TRUST
    strikes: float = 0.0
    credits: int = 0
    reason: Reason | None = None
    until: float | None = None
    quarantined_at: int = 0
    statistical_step: int | None = None
    statistical_strikes: float = 0.0
    """What statistics gave within ``statistical_step``."""


class Ledger:
    """Standings of a bounded number of peers."""

    def __init__(self, config: CheckerConfig) -> None:
        self._config = config
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._last_step: int | None = None

    def strike(self, peer: str, reason: Reason, *, step: int, weight: float = 1.0) -> tuple[StandingChanged, ...]:
        """Count a breach. Raises ValueError unless ``weight`` is positive and finite.

        Statistical reasons count at most ``statistical_strikes_per_step`` within one step.
        """
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"a strike weighs more than nothing, got {weight}")
        if self._config.mode == "off":
            return ()
        entry = self._touch(peer)
        if entry.state is PeerState.EJECTED:
            return ()
        if reason in STATISTICS:
            weight = self._statistical_weight(entry, step, weight)
            if weight <= 0.0:
                return ()
        entry.strikes += weight
        entry.trust *= TRUST_LOSS**weight
        if not _audited(entry):
            entry.reason = reason
        if entry.strikes < self._config.strike_limit:
            return self._move(peer, entry, PeerEvent.STRUCK)
        return self._quarantine(peer, entry, step)

    def condemn(self, peer: str, reason: Reason, *, step: int) -> tuple[StandingChanged, ...]:
        """Bring the count to the limit at once, whatever it was: a finding that needs no further strikes.

        A peer that is quarantined already stays so and only takes over the reason, unless an audit gave it; an
        ejected one is left alone.
        """
        if self._config.mode == "off":
            return ()
        entry = self._touch(peer)
        if entry.state is PeerState.EJECTED:
            return ()
        entry.strikes = max(entry.strikes, self._config.strike_limit)
        if not _audited(entry):
            entry.reason = reason
        return self._quarantine(peer, entry, step)

    def forgive(self, peer: str, *, step: int) -> tuple[StandingChanged, ...]:
        """Take one strike back, because what it was for turned out to be nobody's fault.

        A quarantine that rested on it ends. One that followed from an audit stands, since that proved something
        else, and so does an ejection: it was the swarm's decision.
        """
        entry = self._entries.get(peer)
        if entry is None or entry.strikes <= NO_STRIKES or entry.state is PeerState.EJECTED or _audited(entry):
            return ()
        entry.strikes = max(0.0, entry.strikes - 1.0)
        entry.trust = min(1.0, entry.trust / TRUST_LOSS)
        if entry.statistical_step == step:
            entry.statistical_strikes = max(0.0, entry.statistical_strikes - 1.0)
        if entry.state is PeerState.QUARANTINED and entry.strikes < self._config.strike_limit:
            return self._return(peer, entry, PeerEvent.RELEASED)
        return self._leak(peer, entry, 0) if entry.state is PeerState.SUSPECT else ()

    def credit(self, peer: str, *, step: int) -> tuple[StandingChanged, ...]:
        """Count an accepted microbatch. Nothing that a barred peer does is a credit."""
        entry = self._touch(peer)
        if entry.state in BARRED:
            return ()
        entry.credits += 1
        entry.trust += (1.0 - entry.trust) * TRUST_GAIN
        if entry.state is PeerState.PROBATION and entry.credits >= self._config.trusted_after:
            return self._move(peer, entry, PeerEvent.EARNED)
        return ()

    def end_step(self, step: int) -> tuple[StandingChanged, ...]:
        """Let strikes leak for the steps since the last call. A step that was already ended does nothing."""
        elapsed = 1 if self._last_step is None else step - self._last_step
        if elapsed <= 0:
            return ()
        self._last_step = step
        changes: list[StandingChanged] = []
        for peer, entry in self._entries.items():
            if entry.state is PeerState.SUSPECT:
                changes.extend(self._leak(peer, entry, elapsed))
            elif entry.state is PeerState.QUARANTINED and self._served(entry, step):
                changes.extend(self._return(peer, entry, PeerEvent.RELEASED))
        return tuple(changes)

    def release(self, peer: str) -> tuple[StandingChanged, ...]:
        """End a quarantine. Does nothing for a peer that is in none."""
        entry = self._entries.get(peer)
        if entry is None or entry.state is not PeerState.QUARANTINED:
            return ()
        return self._return(peer, entry, PeerEvent.RELEASED)

    def eject(self, peer: str, *, reason: Reason, until: float, now: float) -> tuple[StandingChanged, ...]:
        """Bar a peer until the given time, at most ``ejection_seconds`` from ``now``.

        A second ejection can only prolong the first; one that has ended already does nothing.
        """
        if self._config.mode == "off" or not until > now:
            return ()
        entry = self._touch(peer)
        entry.until = max(entry.until or 0.0, min(until, now + self._config.ejection_seconds))
        entry.reason = reason
        return self._move(peer, entry, PeerEvent.EJECTED)

    def expire(self, now: float) -> tuple[StandingChanged, ...]:
        """End the ejections whose time has come."""
        changes: list[StandingChanged] = []
        for peer, entry in self._entries.items():
            if entry.until is not None and entry.until <= now:
                changes.extend(self._return(peer, entry, PeerEvent.EXPIRED))
        return tuple(changes)

    def standing(self, peer: str) -> Standing:
        """The peer's standing; that of a stranger if nothing is known."""
        entry = self._entries.get(peer)
        if entry is None:
            return Standing()
        return Standing(
            state=entry.state,
            trust=0.0 if entry.state in BARRED else entry.trust,
            strikes=entry.strikes,
            reason=entry.reason,
            until=entry.until,
        )

    def allows(self, peer: str) -> bool:
        """Whether to exchange work with the peer. Always true outside mode ``enforce``."""
        if self._config.mode != "enforce":
            return True
        entry = self._entries.get(peer)
        return entry is None or entry.state not in BARRED

    def peers(self) -> tuple[str, ...]:
        """Everybody remembered, the least recently touched first."""
        return tuple(self._entries)

    def export(self) -> tuple[SavedStanding, ...]:
        """Everybody remembered, the least recently touched first; at most ``max_peers``.

        Left out: what statistics gave within the present step, which is over before a restart is.
        """
        return tuple(
            SavedStanding(
                peer=peer,
                state=entry.state,
                trust=entry.trust,
                strikes=entry.strikes,
                credits=entry.credits,
                reason=entry.reason,
                until=entry.until,
                quarantined_at=entry.quarantined_at,
            )
            for peer, entry in self._entries.items()
        )

    def restore(self, saved: Sequence[SavedStanding], *, now: float) -> tuple[StandingChanged, ...]:
        """Know what was exported, and nothing else. Returns the ejections that have run out meanwhile.

        ``now`` is in seconds on the clock of ``until``. No ejection lasts longer than ``ejection_seconds`` from now,
        so that a clock that was set back bars nobody for years. Of more than ``max_peers`` the harmless and the
        least recent are forgotten.

        Raises ValueError, with the ledger as it was, if a peer occurs twice or a count contradicts its state.
        """
        limit = self._config.strike_limit
        entries: OrderedDict[str, _Entry] = OrderedDict()
        for standing in saved:
            if standing.peer in entries:
                raise ValueError(f"the saved standings hold {standing.peer!r} twice; {REMEDY}")
            below = standing.strikes < limit
            if (standing.state is PeerState.SUSPECT and not below) or (
                standing.state is PeerState.QUARANTINED and below
            ):
                raise ValueError(
                    f"{standing.strikes} of {limit} strikes do not make {standing.peer!r} {standing.state}; {REMEDY}"
                )
            until = standing.until
            entries[standing.peer] = _Entry(
                state=standing.state,
                trust=standing.trust,
                strikes=standing.strikes,
                credits=standing.credits,
                reason=standing.reason,
                until=None if until is None else min(until, now + self._config.ejection_seconds),
                quarantined_at=standing.quarantined_at,
            )
        excess = max(0, len(entries) - self._config.max_peers)
        for peer in sorted(entries, key=lambda peer: _FORGET_ORDER[entries[peer].state])[:excess]:
            del entries[peer]
        self._entries = entries
        return self.expire(now)

    def _touch(self, peer: str) -> _Entry:
        entry = self._entries.get(peer)
        if entry is None:
            if len(self._entries) >= self._config.max_peers:
                self._forget_one()
            entry = self._entries[peer] = _Entry()
        self._entries.move_to_end(peer)
        return entry

    def _forget_one(self) -> None:
        # min() keeps the first of equals, and the entries are in order of touch.
        del self._entries[min(self._entries, key=lambda peer: _FORGET_ORDER[self._entries[peer].state])]

    def _move(self, peer: str, entry: _Entry, event: PeerEvent) -> tuple[StandingChanged, ...]:
        before = entry.state
        entry.state = TRANSITIONS[before, event]
        if entry.state is before:
            return ()
        change = StandingChanged(
            peer=peer,
            before=before,
            after=entry.state,
            event=event,
            reason=entry.reason,
            until=entry.until,
            would=self._config.mode == "observe",
        )
        return (change,)

    def _quarantine(self, peer: str, entry: _Entry, step: int) -> tuple[StandingChanged, ...]:
        if entry.state is not PeerState.QUARANTINED:
            entry.quarantined_at = step
        return self._move(peer, entry, PeerEvent.CONDEMNED)

    def _statistical_weight(self, entry: _Entry, step: int, weight: float) -> float:
        """What is left of ``weight`` after the statistical strikes of the same step."""
        if entry.statistical_step != step:
            entry.statistical_step, entry.statistical_strikes = step, 0.0
        weight = min(weight, self._config.statistical_strikes_per_step - entry.statistical_strikes)
        entry.statistical_strikes += weight
        return weight

    def _leak(self, peer: str, entry: _Entry, elapsed: int) -> tuple[StandingChanged, ...]:
        entry.strikes -= self._config.strike_decay * elapsed
        if entry.strikes > NO_STRIKES:
            return ()
        entry.strikes = 0.0
        proven = entry.credits >= self._config.trusted_after
        return self._move(peer, entry, PeerEvent.CLEARED if proven else PeerEvent.CLEARED_EARLY)

    def _served(self, entry: _Entry, step: int) -> bool:
        after = self._config.release_after_steps
        return after is not None and step - entry.quarantined_at >= after

    def _return(self, peer: str, entry: _Entry, event: PeerEvent) -> tuple[StandingChanged, ...]:
        """Back to probation with a clean count and little trust."""
        entry.strikes = 0.0
        entry.credits = 0
        entry.trust = RETURN_TRUST
        entry.until = None
        return self._move(peer, entry, event)


def _audited(entry: _Entry) -> bool:
    """Whether the peer is quarantined for what an audit found."""
    return entry.state is PeerState.QUARANTINED and entry.reason is Reason.AUDIT
